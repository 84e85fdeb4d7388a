package tun

func runAsChild() bool { return false }
