//go:build !linux

package main

import (
	"fmt"
	"os"
	"runtime"
)

func main() {
	fmt.Fprintf(os.Stderr, "benchnet: network namespaces are a thing of Linux, this is %s\n", runtime.GOOS)
	os.Exit(1)
}
