package tun

import (
	"context"
	"errors"
	"net/netip"
	"os"
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

// BenchmarkNetnsSocketOf asks for a socket of the pod, as a cut does before it ends one: by a socket that is kept, and by one of its own.
func BenchmarkNetnsSocketOf(b *testing.B) {
	l := newLab(b, false)
	k, err := Open(b.Context(), testConfig(l.pod))
	if err != nil {
		b.Fatal(err)
	}
	defer k.Close()
	nobody := netip.MustParseAddrPort("10.78.0.10:9")
	for name, ask := range map[string]func() error{
		"kept": func() error { _, err := k.SocketOf(nobody, nobody); return err },
		"made": func() error {
			return l.pod.Do(func() error { _, err := diag(nil).find(nobody, nobody); return err })
		},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if err := ask(); !errors.Is(err, os.ErrNotExist) {
					b.Fatal(err)
				}
			}
		})
	}
}
