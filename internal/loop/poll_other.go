//go:build !linux

package loop

import (
	"errors"
	"time"
)

// Events is a set of what changed on a watched descriptor.
type Events uint32

// The events of a Watch.
const (
	Readable Events = 1 << iota
	Writable
	PeerClosed
	HangUp
	Failed
)

var errNoPoller = errors.New("event loops need Linux (epoll)")

type watch struct{ ready func(Events) }

type poller struct{}

func newPoller() (*poller, error)                         { return nil, errNoPoller }
func (p *poller) close()                                  {}
func (p *poller) interrupt()                              {}
func (p *poller) watch(int, func(Events)) (*watch, error) { return nil, errNoPoller }
func (p *poller) unwatch(*watch)                          {}
func (p *poller) poll(time.Duration, *eventLoop) bool     { return false }
func yieldThread()                                        {}
func tuneThread()                                         {}
func threadTime() time.Duration                           { return 0 }
