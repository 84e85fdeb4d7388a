//go:build !linux

package stack

import (
	"errors"

	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"ztun.dev/ztun/tun"
)

// Devices with a descriptor exist on Linux only.

var errNoFD = errors.New("stack: devices with a descriptor need Linux")

type txVec struct{}

func (*txVec) fill(tun.VnetHdr, *stack.PacketBuffer) bool { return false }
func (*txVec) write(int) error                            { return errNoFD }
func (*txVec) release()                                   {}

type rxVec struct{}

func (*rxVec) read(int, []byte, []byte) (int, error) { return 0, errNoFD }

func readFD(int, []byte) (int, error) { return 0, errNoFD }

func writeFD(int, []byte) error { return errNoFD }
