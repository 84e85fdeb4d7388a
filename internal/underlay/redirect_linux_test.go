package underlay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/stack"
)

// redirectRules install what istio-cni does for the output of a pod: TCP without our mark to 15001, questions to 15053.
func redirectRules(t *testing.T, u *Underlay) {
	t.Helper()
	err := u.cfg.Netns.Do(func() error {
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer0"}
		if err := netlink.LinkAdd(link); err != nil {
			return fmt.Errorf("add eth0: %w", err)
		}
		if peer, err := netlink.LinkByName("peer0"); err != nil {
			return err
		} else if err := netlink.LinkSetUp(peer); err != nil {
			return err
		}
		for _, a := range []string{"10.2.0.1/24", "fd02::1/64"} {
			addr, err := netlink.ParseAddr(a)
			if err != nil {
				return err
			}
			addr.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(link, addr); err != nil {
				return err
			}
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		for _, dst := range []string{"0.0.0.0/0", "::/0"} {
			_, all, _ := net.ParseCIDR(dst)
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Index, Dst: all}); err != nil {
				return err
			}
		}
		c, err := nftables.New()
		if err != nil {
			return err
		}
		table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "istio-ambient-nat"})
		chain := c.AddChain(&nftables.Chain{Name: "output", Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityNATDest})
		port := func(p uint16) []byte { return binaryutil.BigEndian.PutUint16(p) }
		redirect := func(proto byte, dport, to uint16) {
			exprs := []expr.Any{
				&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
				&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(0xfff), Xor: make([]byte, 4)},
				&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(0x539)},
				&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: append([]byte("eth0"), make([]byte, 12)...)},
				&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
			}
			if dport != 0 {
				exprs = append(exprs,
					&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
					&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: port(dport)})
			}
			exprs = append(exprs, &expr.Immediate{Register: 1, Data: port(to)}, &expr.Redir{RegisterProtoMin: 1})
			c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: exprs})
		}
		redirect(unix.IPPROTO_UDP, 53, DNSPort)
		redirect(unix.IPPROTO_TCP, 53, DNSPort)
		redirect(unix.IPPROTO_TCP, 0, OutboundPort)
		if err := c.Flush(); err != nil {
			return fmt.Errorf("nftables: %w", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A recordingHandler gives requests to the test.
type recordingHandler struct {
	tcp chan tcpCall
	udp chan stack.Flow
}

type tcpCall struct {
	ctx context.Context
	req stack.TCPRequest
}

func (h *recordingHandler) ServeTCP(ctx context.Context, req stack.TCPRequest) {
	h.tcp <- tcpCall{ctx, req}
}

func (h *recordingHandler) ServeUDP(_ context.Context, c stack.UDPConn) {
	h.udp <- c.Flow()
	_ = c.Reply(append([]byte("re:"), c.Payload()...))
}

func startRedirect(t *testing.T, limit int) (*Underlay, *Redirect, *recordingHandler) {
	t.Helper()
	return startRedirectIn(t, limit, stack.NewLimits(0))
}

// startRedirectIn is startRedirect in a process with limits.
func startRedirectIn(t *testing.T, limit int, limits *stack.Limits) (*Underlay, *Redirect, *recordingHandler) {
	t.Helper()
	u := newUnderlay(t)
	redirectRules(t, u)
	h := &recordingHandler{tcp: make(chan tcpCall, 64), udp: make(chan stack.Flow, 64)}
	r, err := u.ListenRedirect(RedirectConfig{Handler: h, Limits: limits, MaxPending: limit, IPv6: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if n := r.pendingNow(); n != 0 {
			t.Errorf("%d connections without a decision after the end", n)
		}
	})
	return u, r, h
}

func (r *Redirect) pendingNow() int { r.mu.Lock(); defer r.mu.Unlock(); return len(r.pending) }

// app connects as an application of the pod does.
func app(t *testing.T, u *Underlay, network, to string) net.Conn {
	t.Helper()
	var c net.Conn
	err := u.cfg.Netns.Do(func() error {
		a := netip.MustParseAddrPort(to)
		domain, sa := sockaddr(a)
		typ := unix.SOCK_STREAM
		if network == "udp" {
			typ = unix.SOCK_DGRAM
		}
		fd, err := unix.Socket(domain, typ|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), "app")
		defer f.Close()
		if err := unix.Connect(fd, sa); err != nil {
			return err
		}
		c, err = net.FileConn(f)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(5 * time.Second))
	t.Cleanup(func() { c.Close() })
	return c
}

func TestNetnsRedirectHandsOverTheOriginalDestination(t *testing.T) {
	u, _, h := startRedirect(t, 0)
	for _, to := range []string{"203.0.113.9:80", "[2001:db8::9]:80", "203.0.113.53:53"} {
		c := app(t, u, "tcp", to)
		call := <-h.tcp
		if got := call.req.Flow(); got.Dst.String() != to || got.Src.String() != c.LocalAddr().String() {
			t.Errorf("flow %v, want %v -> %s", got, c.LocalAddr(), to)
		}
		if err := call.req.HandBack(); !errors.Is(err, stack.ErrUnsupported) {
			t.Errorf("HandBack: %v, want ErrUnsupported", err)
		}
		conn, err := call.req.Accept(call.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if conn.LocalAddr().String() != to {
			t.Errorf("local address %v, want %s", conn.LocalAddr(), to)
		}
		b := u.cfg.Group.Blocking(t.Context(), conn)
		go func() { c.Write([]byte("hello")); c.(*net.TCPConn).CloseWrite() }()
		if got, err := io.ReadAll(b); err != nil || string(got) != "hello" {
			t.Errorf("%s: %q, %v", to, got, err)
		}
		b.Close()
		if _, err := call.req.Accept(call.ctx); !errors.Is(err, stack.ErrGone) {
			t.Errorf("a second verb: %v, want ErrGone", err)
		}
	}
}

func TestNetnsRedirectRefusesByReset(t *testing.T) {
	u, _, h := startRedirect(t, 0)
	for name, verb := range map[string]func(stack.TCPRequest){
		"Reset": stack.TCPRequest.Reset, "Drop": stack.TCPRequest.Drop,
		"Unreachable": func(r stack.TCPRequest) { r.Unreachable(stack.HostUnreachable) },
	} {
		c := app(t, u, "tcp", "203.0.113.9:80")
		verb((<-h.tcp).req)
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s: the application reads %v, want a reset", name, err)
		}
	}
}

func TestNetnsRedirectedApplicationGivesUp(t *testing.T) {
	u, _, h := startRedirect(t, 0)
	c := app(t, u, "tcp", "203.0.113.9:80")
	call := <-h.tcp
	c.(*net.TCPConn).CloseWrite() // a FIN alone is no hang-up
	c.(*net.TCPConn).SetLinger(0)
	if call.ctx.Err() != nil {
		t.Error("a FIN ended the request")
	}
	c.Close()
	select {
	case <-call.ctx.Done():
		if !errors.Is(context.Cause(call.ctx), stack.ErrGone) {
			t.Errorf("cause %v, want ErrGone", context.Cause(call.ctx))
		}
	case <-time.After(5 * time.Second):
		t.Error("the request goes on after the application hung up")
	}
	if _, err := call.req.Accept(call.ctx); !errors.Is(err, stack.ErrGone) {
		t.Errorf("Accept: %v, want ErrGone", err)
	}
}

func TestNetnsRedirectLimitEvictsTheOldest(t *testing.T) {
	u, r, h := startRedirect(t, 2)
	var calls []tcpCall
	var apps []net.Conn
	for range 3 {
		apps = append(apps, app(t, u, "tcp", "203.0.113.9:80"))
		calls = append(calls, <-h.tcp)
	}
	<-calls[0].ctx.Done()
	if _, err := apps[0].Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("FP-17: the oldest reads %v, want a reset", err)
	}
	if evicted, limited := r.Refused(); calls[1].ctx.Err() != nil || calls[2].ctx.Err() != nil || evicted != 1 || limited != 0 {
		t.Errorf("FP-17: younger requests ended, or %d evictions and %d refusals counted instead of 1 and 0", evicted, limited)
	}
	calls[1].req.Reset()
	calls[2].req.Reset()
}

func TestNetnsRedirectLimitOfTheProcess(t *testing.T) {
	limits := stack.NewLimits(1)
	u, r, h := startRedirectIn(t, 2, limits)
	app(t, u, "tcp", "203.0.113.9:80")
	first := <-h.tcp
	second := app(t, u, "tcp", "203.0.113.9:80")
	if _, err := second.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("FP-17: at the limit of the process the new connection reads %v, want a reset", err)
	}
	if evicted, limited := r.Refused(); first.ctx.Err() != nil || evicted != 0 || limited != 1 {
		t.Errorf("FP-17: the older request ended, or %d evictions and %d refusals counted instead of 0 and 1", evicted, limited)
	}
	first.req.Reset()
	app(t, u, "tcp", "203.0.113.9:80")
	(<-h.tcp).req.Reset()
	if n := limits.InFlight(); n != 0 {
		t.Errorf("%d in flight after all", n)
	}
}

func TestNetnsRedirectedQuestions(t *testing.T) {
	u, _, h := startRedirect(t, 0)
	for _, to := range []string{"203.0.113.53:53", "[2001:db8::53]:53"} {
		c := app(t, u, "udp", to)
		c.Write([]byte("question"))
		flow := <-h.udp
		if flow.Dst.Port() != 53 || !flow.Dst.Addr().IsUnspecified() || flow.Dst.Addr().Is4() != netip.MustParseAddrPort(to).Addr().Is4() {
			t.Errorf("flow %v, want an unspecified destination of the same family", flow)
		}
		p := make([]byte, 64)
		n, err := c.Read(p)
		if err != nil || string(p[:n]) != "re:question" {
			t.Errorf("%s: %q, %v", to, p[:n], err)
		}
	}
}

func TestNetnsICMPRelayHearsWhatTheKernelReceives(t *testing.T) {
	u := newUnderlay(t)
	r, err := u.ListenICMP(true)
	if err != nil {
		t.Fatal(err)
	}
	packets := make(chan []byte, 16)
	if err := r.Start(func(p []byte) bool { packets <- p; return true }); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	// A datagram to a port that nobody has: the kernel answers itself with an ICMP error.
	for _, tt := range []struct {
		to     string
		header int
		proto  int // offset of the protocol number
	}{{"127.0.0.1:9", 20, 9}, {"[::1]:9", 40, 6}} {
		c := app(t, u, "udp", tt.to)
		c.Write([]byte("x"))
		p := <-packets
		want := byte(1)
		if tt.header == 40 {
			want = protoICMPv6
			if n := int(binary.BigEndian.Uint16(p[4:])); n != len(p)-40 {
				t.Errorf("payload length %d of %d bytes", n, len(p))
			}
		}
		dst := netip.MustParseAddrPort(tt.to).Addr().AsSlice()
		if p[tt.proto] != want || string(p[tt.header-len(dst):tt.header]) != string(dst) {
			t.Errorf("%s: packet % x", tt.to, p[:tt.header+8])
		}
	}
}
