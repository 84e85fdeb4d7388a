package proxy

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/workload"
)

// How long an endpoint is avoided that has failed: the first time, and at most; each time that it fails again it is twice as long.
const (
	avoidFirst = 5 * time.Second
	avoidMost  = 60 * time.Second
)

// maxFailures is how many endpoints that failed a pod remembers; of more the first are forgotten.
const maxFailures = 32

// failures are the endpoints of services that a pod could not connect to lately. What the state has anew of a workload is another one, without
// a past. The zero value has none; it is safe for concurrent use.
type failures struct {
	list atomic.Pointer[[]failure] // is replaced, never changed; nil: none
	mu   sync.Mutex                // held to replace it
}

type failure struct {
	endpoint *workload.Workload
	avoid    time.Duration
	until    time.Time
}

// avoided lists the endpoints that are avoided now. It allocates only if there are any.
func (f *failures) avoided(now time.Time) (list []*workload.Workload) {
	all := f.list.Load()
	if all == nil {
		return nil
	}
	for _, x := range *all {
		if now.Before(x.until) {
			list = append(list, x.endpoint)
		}
	}
	return list
}

// Avoided lists the endpoints that are passed over now because they failed.
func (p *Proxy) Avoided() []*workload.Workload { return p.failures.avoided(p.cfg.Group.Now()) }

// failed notes that an endpoint has failed. What is told of one that is avoided already was begun before.
func (f *failures) failed(w *workload.Workload, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := failure{w, avoidFirst, now.Add(avoidFirst)}
	var list []failure
	if all := f.list.Load(); all != nil {
		for _, x := range *all {
			switch {
			case x.endpoint == w && now.Before(x.until):
				return
			case now.After(x.until.Add(avoidMost)):
			case x.endpoint == w:
				next.avoid = min(2*x.avoid, avoidMost)
				next.until = now.Add(next.avoid)
			default:
				list = append(list, x)
			}
		}
	}
	if len(list) >= maxFailures {
		list = list[1:]
	}
	list = append(list, next)
	f.list.Store(&list)
}

// worked forgets the failures of an endpoint.
func (f *failures) worked(w *workload.Workload) {
	is := func(x failure) bool { return x.endpoint == w }
	if all := f.list.Load(); all == nil || !slices.ContainsFunc(*all, is) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	all := f.list.Load()
	if all == nil {
		return // another set-up was first
	}
	list := slices.DeleteFunc(slices.Clone(*all), is)
	if len(list) == 0 {
		f.list.Store(nil)
		return
	}
	f.list.Store(&list)
}

// blames reports whether an error of a set-up, which has not been given up, is the endpoint's: not our own, nor that of a peer beyond it.
func blames(err error) bool {
	_, certificate := errors.AsType[*hbone.CertificateError](err)
	_, beyond := errors.AsType[*hbone.InnerError](err)
	ours := slices.ContainsFunc(ownErrors, func(e error) bool { return errors.Is(err, e) })
	return !certificate && !beyond && !ours
}

// ownErrors are what this host lacks, and its own end.
var ownErrors = []error{
	syscall.EMFILE, syscall.ENFILE, syscall.EADDRNOTAVAIL, syscall.ENOBUFS, syscall.ENOMEM, syscall.ENETUNREACH, syscall.EPERM, syscall.EACCES,
	loop.ErrStopped,
}
