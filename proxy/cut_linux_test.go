package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/loop"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
	"ztun.dev/ztun/stack"
)

// A sockConn is a kernel socket as a loop.Conn, as small as the tests need it.
type sockConn struct {
	fd  int
	ref *loop.Ref
}

func (c *sockConn) TryRead(p []byte) (int, error) {
	n, err := unix.Read(c.fd, p)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return 0, loop.ErrAgain
	case err != nil:
		return 0, loop.ErrReset
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

func (c *sockConn) TryWrite(p []byte) (int, error) {
	n, err := unix.SendmsgN(c.fd, p, nil, nil, unix.MSG_NOSIGNAL)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return 0, loop.ErrAgain
	case err != nil:
		return 0, loop.ErrReset
	}
	return n, nil
}

func (c *sockConn) Attach(r *loop.Ref) error {
	c.ref = r
	return r.Watch(c.fd, func(loop.Events) { r.WakeLocal() })
}

func (c *sockConn) Reset() error {
	_ = unix.SetsockoptLinger(c.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	return c.Close()
}

func (c *sockConn) Close() error {
	if c.ref != nil {
		c.ref.Unwatch(c.fd)
	}
	return unix.Close(c.fd)
}

func (c *sockConn) CloseWrite() error          { return unix.Shutdown(c.fd, unix.SHUT_WR) }
func (c *sockConn) LocalAddr() netip.AddrPort  { return netip.AddrPort{} }
func (c *sockConn) RemoteAddr() netip.AddrPort { return netip.AddrPort{} }

// sockets makes TCP connections on the loopback interface: the client's end as everybody has it, the other as a loop.Conn.
func (b *cutBench) sockets() (net.Conn, *sockConn, error) {
	b.dialing.Lock() // so that what is accepted is what was dialled
	defer b.dialing.Unlock()
	client, err := net.Dial("tcp", b.listener.Addr().String()) //nolint:noctx // at once
	if err != nil {
		return nil, nil, err
	}
	c, err := b.listener.Accept()
	if err != nil {
		return nil, nil, err
	}
	defer c.Close() // out of the runtime's poller
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	s := &sockConn{fd: -1}
	var dup error
	err = raw.Control(func(fd uintptr) { s.fd, dup = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	return client, s, errors.Join(err, dup)
}

// A cutBench is many established connections of several pods, on event loops with threads.
type cutBench struct {
	testing.TB
	group    *loop.Group
	store    *workload.Store
	mesh     *mesh
	conns    *Connections
	pods     []*Proxy
	records  *telemetry.Recorder
	cuts     chan int // how many connections a change closed, once they have gone
	listener net.Listener
	dialing  sync.Mutex
	after    []*workload.Policy // what applies, and the one that denies half
	flows    []*cutFlow
	end      func() // lets go of everything; once
}

// A cutFlow is a plaintext connection, as the client and as the application see it.
type cutFlow struct {
	fakeRequest
	b      *cutBench
	denied bool // by the policy of the test
	socket bool // the client's side is one of the kernel's
	client net.Conn
	server loop.Conn
	up     *sync.WaitGroup
}

func (f *cutFlow) Accept(context.Context) (loop.Conn, error) {
	if !f.socket {
		near, far := loop.PipeAddrs(f.flow.Dst, f.flow.Src)
		f.app = far
		return near, nil
	}
	client, near, err := f.b.sockets()
	f.client = client
	return near, err
}

// Dial, Deliver and DialLoopback make a cutBench the underlay of its pods. The context tells which flow it is about.
func (b *cutBench) Dial(context.Context, netip.AddrPort) (loop.Conn, error) {
	return nil, net.ErrClosed
}

func (b *cutBench) DialLoopback(context.Context, netip.AddrPort) (loop.Conn, error) {
	return nil, net.ErrClosed
}

type flowKey struct{}

func (b *cutBench) Deliver(ctx context.Context, _, _ netip.AddrPort) (loop.Conn, error) {
	f, _ := ctx.Value(flowKey{}).(*cutFlow)
	near, far := loop.Pipe()
	f.server = far
	return near, nil
}

const cutPods = 10

var deniedNet, allowedNet = netip.MustParseAddr("10.66.0.0"), netip.MustParseAddr("10.77.0.0")

// cutPolicy denies one of the two networks of clients. The others, as many as a large mesh has, decide nothing.
func cutPolicies(others int) (before, after []*workload.Policy) {
	for i := range others {
		p := denies(fmt.Sprint("other-", i), fmt.Sprintf("cluster.local/ns/default/sa/other-%d", i), workload.ScopePolicyGlobal)
		before = append(before, p)
	}
	cut := denies("cut", "", workload.ScopePolicyGlobal)
	cut.Groups = []workload.Group{{{{SourceIPs: []netip.Prefix{netip.PrefixFrom(deniedNet, 16)}}}}}
	return before, append(slices.Clone(before), cut)
}

func newCutBench(tb testing.TB, others int) *cutBench {
	tb.Helper()
	b := &cutBench{TB: tb, store: new(workload.Store), mesh: newMesh(), cuts: make(chan int, 1)}
	var err error
	was := runtime.GOMAXPROCS(runtime.NumCPU() + 3) // as the node does it: a loop's thread holds a processor while it is busy
	tb.Cleanup(func() { runtime.GOMAXPROCS(was) })
	if b.group, err = loop.New(loop.Config{Loops: 2, Sparse: 1, Now: time.Now, StopTimeout: time.Minute}); err != nil {
		tb.Fatal(err)
	}
	before, after := cutPolicies(others)
	b.after = after
	b.set(before)
	b.conns, err = NewConnections(ConnectionsConfig{Store: b.store, Group: b.group, Log: slog.New(cutLog{Handler: slog.DiscardHandler, cuts: b.cuts})})
	if err != nil {
		tb.Fatal(err)
	}
	b.records, err = telemetry.NewRecorder(telemetry.Config{Now: time.Now, Access: io.Discard, Log: slog.New(slog.DiscardHandler), Classify: ClassifyError})
	if err != nil {
		tb.Fatal(err)
	}
	for range cutPods {
		p, err := New(Config{
			Client: &workload.Client{UID: b.mesh.client.UID}, Local: func(a netip.Addr) bool { return a == b.mesh.client.Addresses[0] }, Store: b.store, Underlay: b,
			Tunnel: &fakeTunnel{g: b.group}, DNS: echoDNS{}, Records: b.records, Connections: b.conns, Group: b.group, Rand: func() uint64 { return 7 }, Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			tb.Fatal(err)
		}
		b.pods = append(b.pods, p)
	}
	if b.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil { //nolint:noctx // at once
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { b.records.Run(ctx) })
	running.Go(func() { b.conns.Run(ctx) })
	running.Go(func() {
		if err := b.group.Run(ctx); err != nil {
			tb.Error(err)
		}
	})
	b.end = sync.OnceFunc(func() {
		b.conns.Close(errDrained)
		cancel()
		running.Wait()
		b.listener.Close()
		for _, f := range b.flows {
			if f.client != nil {
				f.client.Close()
			}
		}
	})
	tb.Cleanup(b.end)
	return b
}

func (b *cutBench) set(policies []*workload.Policy) {
	st := b.mesh.state()
	st.Policies = policies
	b.store.Replace(st)
}

// cutLog tells of the line that ends a cut.
type cutLog struct {
	slog.Handler
	cuts chan<- int
}

func (cutLog) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }
func (l cutLog) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "count" {
			l.cuts <- int(a.Value.Int64())
		}
		return true
	})
	return nil
}

// open establishes connections, every other one of the network that will be denied; those of the first have sockets.
func (b *cutBench) open(n, sockets int) {
	b.Helper()
	const burst = 1000 // set-ups at once
	for first := 0; first < n; first += burst {
		var up sync.WaitGroup
		for i := first; i < min(n, first+burst); i++ {
			f := &cutFlow{b: b, denied: i%2 == 0, socket: i < sockets, up: &up}
			from := allowedNet
			if f.denied {
				from = deniedNet
			}
			at := from.As4()
			at[2], at[3] = byte(i>>8), byte(i)
			f.flow = stack.Flow{Src: netip.AddrPortFrom(netip.AddrFrom4(at), uint16(1024+i>>16)), Dst: netip.AddrPortFrom(b.mesh.client.Addresses[0], 8080)}
			b.flows = append(b.flows, f)
			up.Add(1)
			p := b.pods[i%cutPods]
			b.group.Go(context.WithValue(b.Context(), flowKey{}, f), func(ctx context.Context) {
				defer up.Done()
				p.inbound(ctx, f)
			})
		}
		up.Wait()
	}
	for _, f := range b.flows {
		if f.answer != "" || f.socket && f.client == nil {
			b.Fatalf("flow from %v: %q", f.flow.Src, f.answer)
		}
	}
}

// An end is the far end of a leg, and the byte that it is to get.
type end struct {
	loop.Conn
	byte
}

// passAround sends a byte from each of the flows to its application and another back, and waits until all have arrived.
func (b *cutBench) passAround(flows []*cutFlow) {
	b.Helper()
	up, down := func(i int) byte { return byte(i) }, func(i int) byte { return byte(i >> 8) }
	var apps, servers []end
	for i, f := range flows {
		servers = append(servers, end{f.server, up(i)})
		if !f.socket {
			apps = append(apps, end{f.app, down(i)})
		}
	}
	b.await(servers, func() {
		for i, f := range flows {
			if !f.socket {
				f.app.TryWrite([]byte{up(i)})
			} else if _, err := f.client.Write([]byte{up(i)}); err != nil {
				b.Errorf("flow from %v: %v", f.flow.Src, err)
			}
		}
	})
	b.await(apps, func() {
		for i, f := range flows {
			f.server.TryWrite([]byte{down(i)})
		}
	})
	for i, f := range flows {
		if !f.socket {
			continue
		}
		p := make([]byte, 2)
		f.client.SetReadDeadline(time.Now().Add(time.Minute))
		if n, err := f.client.Read(p); n != 1 || p[0] != down(i) || err != nil {
			b.Fatalf("flow from %v: %q, %v; want %q", f.flow.Src, p[:n], err, down(i))
		}
	}
}

// await waits until each of the ends has got what is sent to it.
func (b *cutBench) await(ends []end, send func()) {
	b.Helper()
	all := &allRead{left: slices.Clone(ends), done: make(chan struct{})}
	ref := b.group.Add(func(r *loop.Ref) loop.Task {
		for _, e := range ends {
			e.Attach(r)
		}
		return all
	})
	send()
	select {
	case <-all.done:
	case <-time.After(2 * time.Minute):
		b.Fatalf("%d of %d ends did not get what was sent to them", all.unread.Load(), len(ends))
	}
	detached := make(chan struct{})
	ref.Post(func() {
		for _, e := range ends {
			e.Attach(nil)
		}
		ref.Remove()
		close(detached)
	})
	<-detached
}

// allRead reads a byte from each of many ends.
type allRead struct {
	left   []end
	unread atomic.Int64
	once   sync.Once
	done   chan struct{}
}

func (a *allRead) Turn(int) bool {
	var p [2]byte
	a.left = slices.DeleteFunc(a.left, func(e end) bool {
		n, err := e.TryRead(p[:])
		return err == nil && n == 1 && p[0] == e.byte
	})
	if a.unread.Store(int64(len(a.left))); len(a.left) == 0 {
		a.once.Do(func() { close(a.done) })
	}
	return false
}

// wasReset reports whether both sides of a flow have seen a reset.
func (f *cutFlow) wasReset() bool {
	_, err := f.server.TryRead(make([]byte, 1))
	if !f.socket {
		_, app := f.app.TryRead(make([]byte, 1))
		return errors.Is(err, loop.ErrReset) && errors.Is(app, loop.ErrReset)
	}
	f.client.SetReadDeadline(time.Now().Add(time.Minute))
	_, client := f.client.Read(make([]byte, 1))
	return errors.Is(err, loop.ErrReset) && errors.Is(client, syscall.ECONNRESET)
}

// A change of policy with 100 000 open connections, 5000 of which have a kernel socket on the client's side (10 000 sockets in all),
// closes exactly those that it denies; all others still move bytes.
func TestPolicyCutOfManyConnections(t *testing.T) {
	t.Run("FP-20 CP-98", func(t *testing.T) {
		const sockets, others = 5000, 200
		var limit unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur < 2*sockets+500 {
			t.Fatalf("the test needs %d descriptors, the limit is %d (%v)", 2*sockets+500, limit.Cur, err)
		}
		b := newCutBench(t, others)
		b.open(cutConns, sockets)
		b.passAround(b.flows)
		before, after := cutPolicies(others)
		b.set(before) // the same, in other objects: everything is decided about again, and nothing closes
		b.passAround(b.flows[sockets-1000 : sockets+1000])
		b.set(after)
		if n := <-b.cuts; n != cutConns/2 {
			t.Errorf("%d connections closed, want %d", n, cutConns/2)
		}
		var left []*cutFlow
		wrong := 0
		for _, f := range b.flows {
			switch {
			case !f.denied:
				left = append(left, f)
			case !f.wasReset():
				wrong++
			}
		}
		if wrong > 0 {
			t.Errorf("%d denied connections saw no reset", wrong)
		}
		b.passAround(left)
		if n := b.records.Stats().Open; n != len(left) {
			t.Errorf("%d records open, want %d", n, len(left))
		}
		if s := b.group.Stats(); s.Tasks != len(left) {
			t.Errorf("%d relays, want %d", s.Tasks, len(left))
		}
	})
}

// BenchmarkPolicyCut is how long it takes until the denied half of the open connections has gone, and how long others wait meanwhile:
// who opens a connection (reader), and who waits for its turn on a loop (loop); and, for comparison, before it (idle).
func BenchmarkPolicyCut(b *testing.B) {
	for _, c := range []struct{ conns, sockets, policies int }{{100_000, 0, 1}, {100_000, 0, 200}, {100_000, 5000, 10}, {5000, 5000, 10}} {
		b.Run(fmt.Sprintf("conns=%d/sockets=%d/policies=%d", c.conns, c.sockets, c.policies), func(b *testing.B) {
			var took time.Duration
			waits := make(map[string][]time.Duration)
			for range b.N {
				b.StopTimer()
				bench := newCutBench(b, c.policies-1)
				bench.open(c.conns, c.sockets)
				bench.passAround(bench.flows)
				runtime.GC()
				stop := bench.watch(waits, "idle-")
				time.Sleep(500 * time.Millisecond)
				stop()
				stop = bench.watch(waits, "")
				b.StartTimer()
				from := time.Now()
				bench.set(bench.after)
				n := <-bench.cuts
				took += time.Since(from)
				b.StopTimer()
				stop()
				bench.end() // the next run needs its descriptors
				if n != c.conns/2 {
					b.Fatalf("%d closed", n)
				}
			}
			b.ReportMetric(float64(took.Milliseconds())/float64(b.N), "ms/cut")
			for name, list := range waits {
				slices.Sort(list)
				b.ReportMetric(float64(list[len(list)*999/1000].Microseconds()), name+"-p99.9-us")
			}
		})
	}
}

// watch measures what others wait for until stop is called.
func (b *cutBench) watch(waits map[string][]time.Duration, kind string) (stop func()) {
	ended := make(chan struct{})
	var running sync.WaitGroup
	var mu sync.Mutex
	measure := func(name string, once func() time.Time) {
		running.Go(func() {
			var list []time.Duration
			for {
				select {
				case <-ended:
					mu.Lock()
					waits[kind+name] = append(waits[kind+name], list...)
					mu.Unlock()
					return
				default:
				}
				from := time.Now()
				list = append(list, once().Sub(from))
				time.Sleep(20 * time.Microsecond)
			}
		})
	}
	pod := b.pods[0].conns
	measure("reader", func() time.Time {
		c := pod.open(b.records, telemetry.Facts{Direction: telemetry.Inbound, Src: netip.AddrPortFrom(allowedNet, 1), Destination: b.mesh.client}, func(error) {})
		c.decide()
		c.Finish(nil)
		return time.Now()
	})
	ref := b.group.Add(func(*loop.Ref) loop.Task { return idleTask{} })
	measure("loop", func() time.Time {
		ran := make(chan time.Time, 1)
		ref.Post(func() { ran <- time.Now() })
		return <-ran
	})
	return func() { close(ended); running.Wait(); ref.Post(ref.Remove) }
}

type idleTask struct{}

func (idleTask) Turn(int) bool { return false }
