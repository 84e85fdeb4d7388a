package tun

import "context"

// atEnd calls f when ctx ends. What it returns waits for that, or prevents it: f is not called, nor does it run, after that.
func atEnd(ctx context.Context, f func()) (stop func()) {
	stopped := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		f()
		close(stopped)
	})
	return func() {
		if !cancel() {
			<-stopped
		}
	}
}
