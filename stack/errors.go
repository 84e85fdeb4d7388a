package stack

import (
	"fmt"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip"

	"ztun.dev/ztun/internal/loop"
)

// goError turns an error of the netstack into one of Go. nil stays nil.
func goError(err tcpip.Error) error {
	switch err.(type) {
	case nil:
		return nil
	case *tcpip.ErrWouldBlock:
		return loop.ErrAgain
	case *tcpip.ErrConnectionReset, *tcpip.ErrConnectionAborted, *tcpip.ErrAborted, *tcpip.ErrClosedForSend,
		*tcpip.ErrNotConnected, *tcpip.ErrInvalidEndpointState:
		return loop.ErrReset
	case *tcpip.ErrConnectionRefused:
		return fmt.Errorf("stack: %w", syscall.ECONNREFUSED)
	case *tcpip.ErrTimeout:
		return errTimeout
	case *tcpip.ErrHostUnreachable:
		return fmt.Errorf("stack: %w", syscall.EHOSTUNREACH)
	case *tcpip.ErrNetworkUnreachable:
		return fmt.Errorf("stack: %w", syscall.ENETUNREACH)
	default:
		return fmt.Errorf("stack: %s", err)
	}
}

var errTimeout = fmt.Errorf("stack: no acknowledgement: %w", syscall.ETIMEDOUT)
