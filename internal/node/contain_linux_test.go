package node

import (
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"ztun.dev/ztun/tun"
)

// closed asserts that nothing of a pod gets out uncaptured: whatever becomes of a connection, the server does not see it.
func (b *bed) closed(pod int, what string) {
	b.t.Helper()
	server := b.pods[plainB]
	c, err := b.dial(b.pods[pod], addrPort(server.Addr4, 9100))
	if err == nil {
		c.Close()
		b.t.Errorf("%s: pod %s connects in clear", what, b.pods[pod].Name)
	}
}

func TestNetnsPodThatIsLostStaysClosedAndAlone(t *testing.T) {
	b := newBed(t)
	a := b.start(0)
	b.serve(b.pods[plainB], 9100, func(c net.Conn) { who(c) })
	if _, err := b.ask(b.pods[clientA], addrPort(b.pods[plainB].Addr4, 9100)); err != nil {
		t.Fatal(err)
	}
	if err := b.pods[clientA].Do(func() error {
		link, err := netlink.LinkByName(tun.DefaultName)
		if err != nil {
			return err
		}
		return netlink.LinkDel(link)
	}); err != nil {
		t.Fatal(err)
	}
	a.log.await(t, "pod lost", a.done, "shop/client")
	b.closed(clientA, "after its device is gone")
	if a.node.readiness.Ready() {
		t.Error("the node is ready although a pod has just been lost")
	}
	if _, err := b.ask(b.pods[otherA], addrPort(b.pods[plainB].Addr4, 9100)); err != nil {
		t.Errorf("another pod of the node is not served any more: %v", err)
	}
	a.log.await(t, "the pod is not pending any more", a.done, "shop/client")
	eventually(t, 5*time.Second, "ready again", a.node.readiness.Ready)
	if _, err := b.ask(b.pods[clientA], addrPort(b.pods[plainB].Addr4, 9100)); err != nil {
		t.Errorf("after it was captured again: %v", err)
	}
}

// A process that died leaves its pods closed. Before the restart a program in one of them takes the port of ours.
func TestNetnsRestartThatOnePodHinders(t *testing.T) {
	b := newBed(t)
	b.serve(b.pods[plainB], 9100, func(c net.Conn) { who(c) })
	c := b.spawnReady(0)
	c.kill(t)
	l, err := b.pods[otherA].Listen("tcp", "[::]:15008")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a := b.launch(0)
	if _, err := b.ask(b.pods[clientA], addrPort(b.pods[plainB].Addr4, 9100)); err != nil {
		t.Errorf("the other pod is not served: %v", err)
	}
	b.closed(otherA, "while it cannot be captured")
	for site, want := range map[string]string{
		"readiness /healthz/ready": "shop/other: underlay: listen on [::]:15008",
		"metrics /metrics":         `ztun_pods{capture="",state="pending"} 1`,
		"admin /debug/pods":        "15008",
	} {
		where, path, _ := strings.Cut(site, " ")
		if got := a.page(t, where, path); !strings.Contains(got, want) {
			t.Errorf("%s says %q, want %q in it", site, got, want)
		}
	}
	l.Close()
	a.log.await(t, "the pod is not pending any more", a.done, "shop/other")
	if _, err := b.ask(b.pods[otherA], addrPort(b.pods[plainB].Addr4, 9100)); err != nil {
		t.Errorf("after the port was free again: %v", err)
	}
	eventually(t, 5*time.Second, "ready", a.node.readiness.Ready)
}

func TestNetnsFailedRestartLeavesPodsClosed(t *testing.T) {
	b := newBed(t)
	b.serve(b.pods[plainB], 9100, func(c net.Conn) { who(c) })
	c := b.spawnReady(0)
	c.kill(t)
	// Somebody takes the port of both pods before the restart.
	var held []net.Listener
	for _, i := range []int{clientA, otherA} {
		l, err := b.pods[i].Listen("tcp", "[::]:15008")
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, l)
	}
	if err := b.refused(b.file(0)); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("the restart fails with %v, want the port in use", err)
	}
	deadline := time.Now().Add(time.Second) // the kernel takes up to a second to notice that nobody reads
	for time.Now().Before(deadline) {
		b.closed(clientA, "after a failed restart")
	}
	b.closed(otherA, "after a failed restart")
	for _, l := range held {
		l.Close()
	}
	b.start(0)
	if _, err := b.ask(b.pods[clientA], addrPort(b.pods[plainB].Addr4, 9100)); err != nil {
		t.Errorf("after the next start: %v", err)
	}
}
