package tun

import (
	"context"
	"testing"

	"golang.org/x/sys/unix"
)

// BenchmarkNetnsEnrol measures Open and Unenrol of one pod, IPv4 and IPv6, BPF loaded each time.
func BenchmarkNetnsEnrol(b *testing.B) {
	l := newLab(b, true)
	for b.Loop() {
		k, err := Open(context.Background(), testConfig(l.pod))
		if err != nil {
			b.Fatal(err)
		}
		if err := k.Unenrol(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkNetnsSocket measures what each dial from a pod's netns begins with.
func BenchmarkNetnsSocket(b *testing.B) {
	needPrivilege(b)
	ns := newNetns(b)
	for b.Loop() {
		fd, err := ns.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			b.Fatal(err)
		}
		_ = unix.Close(fd)
	}
}
