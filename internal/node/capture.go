package node

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/internal/telemetry"
)

// Limits of a capture of a running node.
const (
	captureSeconds    = 60                    // unless another time is asked for
	captureMaxSeconds = 24 * 3600             //
	captureBytes      = 64 << 20              // of the file, unless another size is asked for
	captureMaxBytes   = 1 << 40               // of a ring: its files are bounded by its client
	captureQueue      = 4096                  // packets, and
	captureQueueBytes = 16 << 20              // bytes that may wait for the client
	captureDelay      = 20 * time.Millisecond // until the record of a connection is there, for its comments
)

// A captureRequest is what a client wants.
type captureRequest struct {
	pods     []*pod
	pod      bool // the pod's side
	tunnel   bool // the tunnel's side
	duration time.Duration
	bytes    int64
	packets  int64
	snap     int
}

// Trailers of the answer, by which a client tells a capture that is whole, and one that has ended before its time.
const (
	trailerCaptured = "X-Ztun-Captured"
	trailerDropped  = "X-Ztun-Dropped"
	trailerLimit    = "X-Ztun-Limit"   // bytes or packets, if it was that limit that was reached
	trailerSeconds  = "X-Ztun-Seconds" // from the beginning to the last packet, with a limit
)

// serveCapture streams packets as pcapng until the client goes away or a limit is reached. While nobody asks for it, it costs
// a comparison for each packet.
func (n *Node) serveCapture(w http.ResponseWriter, r *http.Request) {
	req, err := n.captureRequest(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c := &capture{n: n, req: req, queue: make(chan captured, captureQueue), known: make(map[[2]netip.AddrPort]*telemetry.Conn)}
	n.captures.add(c)
	defer n.captures.remove(c)
	defer c.detach()
	c.began = time.Now()
	if err := c.attach(); err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	w.Header().Set("Content-Type", "application/vnd.tcpdump.pcap")
	w.Header().Set("Trailer", strings.Join([]string{trailerCaptured, trailerDropped, trailerLimit, trailerSeconds}, ", "))
	ctx, cancel := context.WithTimeout(r.Context(), req.duration)
	defer cancel()
	if err := c.run(ctx, w); err != nil {
		return // the client has gone
	}
	c.trailers(w.Header())
}

// trailers says how many packets there were, and which limit ended the capture.
func (c *capture) trailers(h http.Header) {
	h.Set(trailerCaptured, strconv.FormatInt(c.written, 10))
	h.Set(trailerDropped, strconv.FormatUint(c.dropped.Load(), 10))
	if c.limit != "" {
		h.Set(trailerLimit, c.limit)
		h.Set(trailerSeconds, strconv.FormatFloat(c.last.Sub(c.began).Seconds(), 'f', 3, 64))
	}
}

func (n *Node) captureRequest(q url.Values) (req captureRequest, err error) {
	req = captureRequest{duration: captureSeconds * time.Second, bytes: captureBytes, packets: 1 << 40, snap: 1 << 18}
	seconds := int64(captureSeconds)
	for _, p := range []struct {
		name     string
		v        *int64
		min, max int64
	}{
		{"seconds", &seconds, 1, captureMaxSeconds},
		{"bytes", &req.bytes, 1 << 10, captureMaxBytes},
		{"packets", &req.packets, 1, 1 << 40},
	} {
		if s := q.Get(p.name); s != "" {
			if *p.v, err = strconv.ParseInt(s, 10, 64); err != nil || *p.v < p.min || *p.v > p.max {
				return req, fmt.Errorf("%s=%s: want a number from %d to %d", p.name, s, p.min, p.max)
			}
		}
	}
	req.duration = time.Duration(seconds) * time.Second
	if s := q.Get("snaplen"); s != "" {
		if req.snap, err = strconv.Atoi(s); err != nil || req.snap < 40 || req.snap > 1<<18 {
			return req, fmt.Errorf("snaplen=%s: want a number from 40 to %d", s, 1<<18)
		}
	}
	points := q.Get("point")
	if points == "" {
		points = "pod"
	}
	for p := range strings.SplitSeq(points, ",") {
		switch p {
		case "pod":
			req.pod = true
		case "tunnel":
			req.tunnel = true
		default:
			return req, fmt.Errorf("point=%s: want pod, tunnel, or both with a comma", p)
		}
	}
	want := q.Get("pod")
	for _, p := range n.listPods() {
		if want == "" || p.spec.String() == want || p.spec.uid == want {
			req.pods = append(req.pods, p)
		}
	}
	if len(req.pods) == 0 {
		return req, fmt.Errorf("pod=%s: this node serves no such pod", want)
	}
	return req, nil
}

// A captured is a packet that waits for the client.
type captured struct {
	at     time.Time
	iface  int
	dir    replay.Direction
	data   []byte
	length int
	steers bool // flows are given to the kernel, by their SYNs
}

// A capture is what one client captures.
type capture struct {
	n     *Node
	req   captureRequest
	queue chan captured

	waiting atomic.Int64 // bytes in the queue
	dropped atomic.Uint64

	taps     []*tunBackend
	sniffers []interface{ Close() error }
	sniffing sync.WaitGroup

	began time.Time

	// Of run.
	written int64     // packets
	size    int64     // bytes
	last    time.Time // of the last packet
	limit   string    // that was reached: bytes or packets

	mu    sync.Mutex                            // guards below
	known map[[2]netip.AddrPort]*telemetry.Conn // by what the pod's side shows of it, and by its tunnel
}

// captures are those that run. The zero value is ready.
type captures struct {
	running atomic.Int32

	mu   sync.Mutex // guards below
	list []*capture
}

func (s *captures) add(c *capture) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, c)
	s.running.Add(1)
}

func (s *captures) remove(c *capture) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = slices.DeleteFunc(s.list, func(x *capture) bool { return x == c })
	s.running.Add(-1)
}

// learn tells captures of a connection that has begun or ended.
func (s *captures) learn(conn *telemetry.Conn) {
	if s.running.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.list {
		c.learn(conn)
	}
}

// maxKnownFlows bounds what is remembered of flows that have ended.
const maxKnownFlows = 1 << 14

func (c *capture) learn(conn *telemetry.Conn) {
	tunnel := conn.Status(time.Now()).Tunnel
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.known) > maxKnownFlows {
		clear(c.known)
	}
	c.known[[2]netip.AddrPort{conn.Src, conn.OriginalDst}] = conn
	if conn.Direction == telemetry.Outbound && tunnel.IsValid() {
		c.known[[2]netip.AddrPort{tunnel, conn.Dst}] = conn
	}
}

// attach begins to look at packets.
func (c *capture) attach() error {
	podIface, tunnelIface := 0, 0
	if c.req.pod {
		tunnelIface = 1
	}
	for _, p := range c.req.pods {
		line, pending := p.state()
		if line == nil {
			return fmt.Errorf("pod %s is not served: %s", p.spec.String(), pending)
		}
		if c.req.pod {
			b, ok := line.backend.(*tunBackend)
			if !ok {
				return fmt.Errorf("pod %s is served by the redirect backend, which has no device that point pod could capture: take point tunnel, or tcpdump in the pod", p.spec.String())
			}
			if !b.tapped.CompareAndSwap(false, true) {
				return fmt.Errorf("pod %s is being captured already", p.spec.String())
			}
			c.taps = append(c.taps, b)
			steers := b.steerer != nil
			b.stack.SetTap(func(written bool, pieces ...[]byte) {
				dir := replay.DirOutbound // of the pod, as tcpdump has it on the device
				if written {
					dir = replay.DirInbound
				}
				c.take(podIface, dir, pieces, steers)
			})
		}
		if c.req.tunnel {
			s, err := line.underlay.Sniff(hbone.Port)
			if err != nil {
				return err
			}
			c.sniffers = append(c.sniffers, s)
			c.sniffing.Go(func() {
				err := s.Run(func(outgoing bool, packet []byte) {
					dir := replay.DirInbound
					if outgoing {
						dir = replay.DirOutbound
					}
					c.take(tunnelIface, dir, [][]byte{packet}, false)
				})
				if err != nil {
					c.n.log.Warn("capture of tunnels", "error", err.Error())
				}
			})
		}
	}
	return nil
}

func (c *capture) detach() {
	for _, b := range c.taps {
		b.stack.SetTap(nil)
		b.tapped.Store(false)
	}
	for _, s := range c.sniffers {
		_ = s.Close() // nothing is left to be lost
	}
	c.sniffing.Wait()
}

// take copies a packet into the queue, or counts it as dropped: it never waits.
func (c *capture) take(iface int, dir replay.Direction, pieces [][]byte, steers bool) {
	length := 0
	for _, p := range pieces {
		length += len(p)
	}
	n := min(length, c.req.snap)
	if c.waiting.Add(int64(n)) > captureQueueBytes {
		c.waiting.Add(int64(-n))
		c.dropped.Add(1)
		return
	}
	data := make([]byte, 0, n)
	for _, p := range pieces {
		data = append(data, p[:min(len(p), n-len(data))]...)
	}
	select {
	case c.queue <- captured{time.Now(), iface, dir, data, length, steers}:
	default:
		c.waiting.Add(int64(-n))
		c.dropped.Add(1)
	}
}

// countingWriter counts what is written of the file.
type countingWriter struct {
	w http.ResponseWriter
	n *int64
}

func (w countingWriter) Write(b []byte) (int, error) {
	n, err := w.w.Write(b)
	*w.n += int64(n)
	return n, err
}

// run writes what was captured until ctx ends or a limit is reached; an error is the client's.
func (c *capture) run(ctx context.Context, w http.ResponseWriter) error {
	var names []string
	if c.req.pod {
		names = append(names, "pod")
	}
	if c.req.tunnel {
		names = append(names, "tunnel")
	}
	flush := http.NewResponseController(w)
	out := replay.NewWriter(countingWriter{w, &c.size}, "ztun capture", c.req.snap, names...)
	if err := flush.Flush(); err != nil {
		return err
	}
	counts := make([]uint64, len(names))
	for c.size < c.req.bytes && c.written < c.req.packets {
		p, ok := c.next(ctx)
		if !ok {
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return ctx.Err()
			}
			break
		}
		c.waiting.Add(int64(-len(p.data)))
		if err := out.Packet(p.iface, p.at, p.dir, p.data, p.length, c.comment(&p)); err != nil {
			return err
		}
		c.written++
		c.last = p.at
		counts[p.iface]++
		if len(c.queue) == 0 {
			if err := flush.Flush(); err != nil {
				return err
			}
		}
	}
	switch {
	case c.size >= c.req.bytes:
		c.limit = "bytes"
	case c.written >= c.req.packets:
		c.limit = "packets"
	}
	return c.end(out, flush, counts)
}

// next is the next packet, once it is old enough; false: ctx has ended and nothing waits.
func (c *capture) next(ctx context.Context) (p captured, ok bool) {
	select {
	case p = <-c.queue:
	default:
		select {
		case p = <-c.queue:
		case <-ctx.Done():
			return p, false
		}
	}
	if d := captureDelay - time.Since(p.at); d > 0 {
		time.Sleep(d)
	}
	return p, true
}

// end writes the counts. What was dropped is told of the first interface: there is one queue.
func (c *capture) end(out *replay.Writer, flush *http.ResponseController, counts []uint64) error {
	for i, n := range counts {
		dropped := uint64(0)
		if i == 0 {
			dropped = c.dropped.Load()
		}
		if err := out.Statistics(i, time.Now(), n, dropped); err != nil {
			return err
		}
	}
	return flush.Flush()
}

// comment says which flow a packet is of, who its ends are, and of a SYN that is written back to the device that the kernel carries the flow
// from then on.
func (c *capture) comment(p *captured) string {
	what := c.ends(p)
	if p.steers && p.dir == replay.DirInbound && replay.IsSYN(p.data) {
		if what != "" {
			what += "; "
		}
		what += replay.CarriedNote
	}
	return what
}

func (c *capture) ends(p *captured) string {
	src, dst, ok := replay.Endpoints(p.data)
	if !ok {
		return ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	conn := c.known[[2]netip.AddrPort{src, dst}]
	if conn == nil {
		if conn = c.known[[2]netip.AddrPort{dst, src}]; conn == nil {
			return ""
		}
		src, dst = dst, src
	}
	what := fmt.Sprintf("flow %d", conn.ID)
	if src != conn.Src {
		what = "tunnel"
	}
	return fmt.Sprintf("%s %s %s -> %s", what, conn.Direction, name(conn.SrcIdentity.String()), name(conn.DstIdentity.String()))
}

func name(identity string) string {
	if identity == "" {
		return "unknown"
	}
	return identity
}
