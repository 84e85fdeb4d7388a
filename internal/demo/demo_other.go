//go:build !linux

package demo

import (
	"context"
	"fmt"
	"runtime"
)

// Run needs Linux.
func Run(context.Context, Config) error {
	return &Error{Code: 1, Err: fmt.Errorf("demo: network namespaces are a thing of Linux, this is %s; run it in a virtual machine", runtime.GOOS)}
}
