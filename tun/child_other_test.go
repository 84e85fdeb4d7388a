//go:build !linux

package tun

func runAsChild() bool { return false }
