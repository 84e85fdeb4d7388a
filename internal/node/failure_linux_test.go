package node

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

func TestNetnsFailuresAreSeenAsSuch(t *testing.T) {
	eachBackend(t, func(t *testing.T, b *bed) {
		t.Run("FP-15 D26", func(t *testing.T) { checkFailuresAreSeenAsSuch(t, b) })
	})
}

func checkFailuresAreSeenAsSuch(t *testing.T, b *bed) {
	a, z := b.start(0), b.start(1)
	web, plain := b.pods[webB], b.pods[plainB]
	b.serve(web, 8080, who)
	b.serve(web, 9090, who)
	// Where the node has no route it says so by ICMP; the lab's own default route says "host unreachable" instead.
	if err := b.Node(0).Do(removeDefaultRoutes); err != nil {
		t.Fatal(err)
	}
	const (
		atOnce           = time.Second
		noRouteToNetwork = "io error: Network is unreachable (os error 101)"
		denied           = "connection closed due to policy rejection: explicitly denied by: shop/"

		// Address resolution asks three times, a second apart. Where its failure meets a retransmission of the SYN the kernel may tell
		// nobody, and the next resolution begins a second later: 200 plain connections at once took 3.1 s, 7.2 s (a third), 14.3 s.
		afterProbe = 10 * time.Second
	)
	tests := []struct {
		name    string
		from    *lab.Host
		to      []string
		want    syscall.Errno
		limit   time.Duration
		source  string // error in the access log of the client's node
		inbound string // of the server's node, if it sees the flow
	}{
		{"passthrough refused", b.pods[clientA], each(plain, 1), unix.ECONNREFUSED, atOnce, "io error: Connection refused (os error 111)", ""},
		{"no listener in the mesh", b.pods[clientA], each(web, 8081), unix.ECONNREFUSED, atOnce, "503 Service Unavailable: connection failed: Connection refused", "connection failed: Connection refused (os error 111)"},
		{"no listener behind a service", b.pods[clientA], []string{"10.96.0.10:81", "[fd96::10]:81"}, unix.ECONNREFUSED, atOnce, "503 Service Unavailable: connection failed: Connection refused", "connection failed: Connection refused (os error 111)"},
		{"port that the service lacks", b.pods[clientA], []string{"10.96.0.10:82", "[fd96::10]:82"}, unix.ECONNREFUSED, atOnce, "no healthy upstream", ""},
		{"service without endpoints", b.pods[clientA], []string{"10.96.0.11:80", "[fd96::11]:80"}, unix.ECONNREFUSED, atOnce, "no healthy upstream", ""},
		{"denied by identity", b.pods[otherA], []string{"10.96.0.10:80", "[fd96::10]:80"}, unix.ECONNREFUSED, atOnce, denied + "no-other", denied + "no-other"},
		{"denied by port", b.pods[clientA], each(web, 9090), unix.ECONNREFUSED, atOnce, denied + "no-9090", denied + "no-9090"},
		{"address that nobody has", b.pods[clientA], []string{"10.77.2.253:80", "[fd77::2:fd]:80"}, unix.EHOSTUNREACH, afterProbe, "No route to host (os error 113)", ""},
		{"workload that is gone", b.pods[clientA], []string{"10.77.2.254:80", "[fd77::2:fe]:80"}, unix.EHOSTUNREACH, afterProbe, "No route to host (os error 113)", ""},
		{"network without a route", b.pods[clientA], []string{"192.0.2.1:80", "[2001:db8::1]:80"}, unix.ENETUNREACH, afterProbe, noRouteToNetwork, ""},
	}
	var all sync.WaitGroup
	for _, tt := range tests {
		for _, to := range tt.to {
			all.Go(func() {
				start := time.Now()
				err := b.refusal(tt.from, to)
				if took := time.Since(start); !errors.Is(err, b.seen(tt.want)) || took > tt.limit {
					t.Errorf("%s, %s: %v after %v, want %v within %v", tt.name, to, err, took, b.seen(tt.want), tt.limit)
				}
			})
		}
	}
	all.Wait()
	for _, tt := range tests {
		for _, to := range tt.to {
			client := own(tt.from, to).String()
			if b.offload != config.OffloadNFT && b.offload != config.OffloadTC || tt.source != noRouteToNetwork { // there the reason is a guess
				a.out.await(t, `direction="outbound"`, a.done, client, tt.source)
			}
			if tt.inbound != "" {
				z.out.await(t, `direction="inbound"`, z.done, client, "error\taccess", tt.inbound)
			}
		}
	}
}

// removeDefaultRoutes takes away the default routes of the namespace of the thread.
func removeDefaultRoutes() error {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Type: unix.RTN_UNREACHABLE}, netlink.RT_FILTER_TYPE)
		if err != nil {
			return err
		}
		for _, r := range routes {
			if err := netlink.RouteDel(&r); err != nil {
				return fmt.Errorf("%s: %w", r, err)
			}
		}
	}
	return nil
}
