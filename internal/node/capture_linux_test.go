package node

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
	"ztun.dev/ztun/internal/replay"
	"ztun.dev/ztun/internal/workload"
)

// A liveCapture is the answer to /debug/capture that is being read.
type liveCapture struct {
	resp *http.Response
	stop context.CancelFunc
	done chan struct{}
	got  *logBuffer
}

// startCapture asks the ztun of node i.
func (b *bed) startCapture(i int, query string) *liveCapture {
	b.t.Helper()
	ctx, stop := context.WithCancel(b.t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.nodes[i].node.admin.Addrs("admin")[0].String()+"/debug/capture?"+query, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	c := &liveCapture{resp: resp, stop: stop, done: make(chan struct{}), got: newLogBuffer()}
	go func() {
		defer close(c.done)
		io.Copy(c.got, resp.Body)
		resp.Body.Close()
	}()
	b.t.Cleanup(func() { stop(); <-c.done })
	return c
}

// packetsOf counts the packets that a capture has of an interface.
func packetsOf(t *testing.T, file string, iface string) (n int) {
	t.Helper()
	s, err := replay.NewSource(replay.SourceConfig{Paths: []string{"-"}, Stdin: strings.NewReader(file)})
	if err != nil {
		t.Fatal(err)
	}
	for p := new(replay.Packet); s.Next(p) == nil; {
		if p.Interface == iface {
			n++
		}
	}
	return n
}

// What ztun capture and tcpdump write of live traffic leads, played again, to the decisions of the live access log.
func TestNetnsCaptureReplaysToTheSameDecisions(t *testing.T) {
	b := newBedOn(t, variant{config.CaptureTUN, config.OffloadOff}, lab.Config{}) // what the kernel carries alone is not on the device
	a := b.start(0)
	b.start(1)
	b.serve(b.pods[webB], 8080, who)
	b.serve(b.pods[webB], 9090, who)
	b.serve(b.pods[plainB], 8080, who)
	const up, down = 2_000_000, 3_000_000
	b.serve(b.pods[webB], 8081, func(c net.Conn) {
		if n, err := io.Copy(io.Discard, c); n != up || err != nil {
			t.Errorf("the server got %d bytes, %v, want %d", n, err, up)
		}
		c.Write(make([]byte, down))
	})

	live := b.startCapture(0, "point=pod,tunnel&pod=shop/client&seconds=60")
	eventually(t, 5*time.Second, "the header of the capture", func() bool { return len(live.got.String()) > 0 })
	dumped := newLogBuffer()
	var dump *exec.Cmd
	var dumping sync.WaitGroup
	if path, err := exec.LookPath("tcpdump"); err == nil {
		ready := newLogBuffer()
		if err := b.pods[clientA].Do(func() error {
			// Without -s its buffer has places for 500 superpackets of any length: on a busy machine it lost some.
			dump = exec.CommandContext(t.Context(), path, "-i", "ztun0", "-B", "32768", "-s", "512", "-U", "--immediate-mode", "-w", "-")
			dump.Stdout, dump.Stderr = dumped, ready
			return dump.Start()
		}); err != nil {
			t.Fatal(err)
		}
		dumping.Go(func() { _ = dump.Wait() })
		ready.await(t, "listening on", a.done)
	}

	client := b.pods[clientA]
	for range 3 {
		for _, to := range []string{"10.96.0.10:80", "[fd96::10]:80", addrPort(b.pods[plainB].Addr4, 8080), addrPort(b.pods[webB].Addr4, 9090), "10.96.0.11:80", "10.96.0.10:81"} {
			_, _ = b.ask(client, to) // some are refused
		}
	}
	bulk := func(to string) error {
		c, err := b.dial(client, to)
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.Write(make([]byte, up)); err != nil {
			return err
		}
		c.(*net.TCPConn).CloseWrite()
		n, err := io.Copy(io.Discard, c)
		if n != down {
			err = fmt.Errorf("%d bytes, %w, want %d", n, err, down)
		}
		return err
	}
	for _, to := range each(b.pods[webB], 8081) { // superpackets, windows that fill
		if err := bulk(to); err != nil {
			t.Fatal(err)
		}
	}
	line := regexp.MustCompile(`src\.addr=(\S+)`)
	const flows = 20
	var lines []string
	eventually(t, 10*time.Second, "the lines of all flows", func() bool {
		lines = nil
		for l := range strings.Lines(a.out.String()) {
			if strings.Contains(l, `direction="outbound"`) {
				lines = append(lines, l)
			}
		}
		return len(lines) == flows
	})
	eventually(t, 10*time.Second, "all packets of the capture", func() bool { return strings.Count(live.got.String(), "flow ") > flows })
	if dump != nil {
		eventually(t, 20*time.Second, "all packets in tcpdump's output", func() bool {
			return packetsOf(t, dumped.String(), "") >= packetsOf(t, live.got.String(), "pod")
		})
	}
	b.stop(0) // whose end resets what is open, and ends the captures
	<-live.done
	if dump != nil {
		_ = dump.Process.Signal(syscall.SIGINT)
		dumping.Wait()
	}
	if n := packetsOf(t, live.got.String(), "tunnel"); n < 4 {
		t.Errorf("%d packets of tunnels", n)
	}
	for _, part := range []string{"spiffe://cluster.local/ns/shop/sa/client -> spiffe://cluster.local/ns/shop/sa/web", "tunnel outbound spiffe://cluster.local/ns/shop/sa/client", "flow 1 outbound "} {
		if !strings.Contains(live.got.String(), part) {
			t.Errorf("no comment has %q", part)
		}
	}
	st, err := workload.ParseStatic("mesh.yaml", []byte(b.read("mesh.yaml")))
	if err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string][]byte{"ztun capture": []byte(live.got.String()), "tcpdump": []byte(dumped.String())} {
		t.Run("T1/"+name, func(t *testing.T) {
			if len(file) == 0 {
				if os.Getenv("ZTUN_REQUIRE_NETNS") == "1" {
					t.Fatal("there is no tcpdump here")
				}
				t.Skip("there is no tcpdump here")
			}
			out, _ := replayBytes(t, st, file, func(c *ReplayConfig) { c.Local = []netip.Addr{client.Addr4, client.Addr6} })
			replayedFlows := make(map[string]*ReplayFlow)
			for text := range strings.SplitSeq(strings.TrimSpace(out), "\n") {
				f := new(ReplayFlow)
				if err := json.Unmarshal([]byte(text), f); err != nil {
					t.Fatal(err)
				}
				replayedFlows[f.Src] = f
			}
			for _, l := range lines {
				src := line.FindStringSubmatch(l)[1]
				f := replayedFlows[src]
				if f == nil {
					t.Errorf("no flow from %s, of\n%s\nin\n%s", src, l, out)
					continue
				}
				if live, played := decisionOf(l), f.decision(); live != played {
					t.Errorf("live   %s\nplayed %s\nof %s", live, played, l)
				}
			}
		})
	}
}

// Where flows are given to the kernel, a capture has little more than their SYNs. The decisions are the same all the same.
func TestNetnsCaptureOfWhatTheKernelCarries(t *testing.T) {
	t.Run("T1", func(t *testing.T) { eachOffload(t, checkCaptureOfWhatTheKernelCarries) })
}

func checkCaptureOfWhatTheKernelCarries(t *testing.T, b *bed) {
	a := b.start(0)
	b.start(1)
	b.serve(b.pods[webB], 8080, who)
	b.serve(b.pods[plainB], 8080, who)
	client := b.pods[clientA]
	b.serve(client, 8080, who)
	live := b.startCapture(0, "pod=shop/client&seconds=60")
	eventually(t, 5*time.Second, "the header of the capture", func() bool { return len(live.got.String()) > 0 })
	outbound := []string{
		"10.96.0.10:80", "[fd96::10]:80", // mesh
		addrPort(b.pods[plainB].Addr4, 8080), addrPort(b.pods[plainB].Addr6, 8080), // outside of it
		addrPort(b.pods[webB].Addr4, 9090), "10.96.0.11:80", "10.96.0.10:81", // denied there, no endpoint, refused there
	}
	const kernel = 6 // of which the kernel carries as many, with those that come in
	for _, to := range outbound {
		_, _ = b.ask(client, to) // some are refused
	}
	for _, to := range []string{addrPort(client.Addr4, 8080), addrPort(client.Addr6, 8080)} {
		if _, err := b.ask(b.pods[plainB], to); err != nil {
			t.Fatal(err)
		}
	}
	flows := len(outbound) + 2
	line := regexp.MustCompile(`src\.addr=(\S+)`)
	var lines []string
	eventually(t, 10*time.Second, "the lines of all flows", func() bool {
		lines = nil
		for l := range strings.Lines(a.out.String()) {
			if strings.Contains(l, `direction="`) {
				lines = append(lines, l)
			}
		}
		return len(lines) == flows
	})
	eventually(t, 10*time.Second, "the notes of the capture", func() bool { return strings.Count(live.got.String(), replay.CarriedNote) == kernel })
	b.stop(0) // ends the capture
	<-live.done
	st, err := workload.ParseStatic("mesh.yaml", []byte(b.read("mesh.yaml")))
	if err != nil {
		t.Fatal(err)
	}
	played := make(map[string]*ReplayFlow)
	out, _ := replayBytes(t, st, []byte(live.got.String()), func(c *ReplayConfig) { c.Local = []netip.Addr{client.Addr4, client.Addr6} })
	for text := range strings.SplitSeq(strings.TrimSpace(out), "\n") {
		f := new(ReplayFlow)
		if err := json.Unmarshal([]byte(text), f); err != nil {
			t.Fatal(err)
		}
		played[f.Src] = f
	}
	carried := 0
	withoutBytes := func(s string) string {
		head, _, _ := strings.Cut(s, ", sent")
		return head
	}
	for _, l := range lines {
		src := line.FindStringSubmatch(l)[1]
		f := played[src]
		if f == nil {
			t.Errorf("no flow from %s, of\n%s\nin\n%s", src, l, out)
			continue
		}
		if f.Kernel != !strings.Contains(l, "error=") {
			t.Errorf("the kernel carries it: %v, of\n%s", f.Kernel, l)
		}
		want, got := decisionOf(l), f.decision()
		if f.Kernel {
			carried++
			want, got = withoutBytes(want), withoutBytes(got)
		}
		if want != got {
			t.Errorf("live   %s\nplayed %s\nof %s\n%s", want, got, l, f.Text())
		}
	}
	if carried != kernel {
		t.Errorf("the kernel carries %d flows, want %d; played\n%s", carried, kernel, out)
	}
}

// decisionOf is what a line of the access log says of a flow.
func decisionOf(line string) string {
	field := func(name string) string {
		m := regexp.MustCompile(`\b` + regexp.QuoteMeta(name) + `=("[^"]*"|\S+)`).FindStringSubmatch(line)
		if m == nil {
			return ""
		}
		return strings.Trim(m[1], `"`)
	}
	failed := strings.Contains(line, "error=")
	num := func(name string) string {
		n, _ := strconv.Atoi(field(name))
		return strconv.Itoa(n)
	}
	hop := field("dst.addr")
	if strings.Contains(line, "connection failed") && field("dst.identity") == "" && field("src.workload") == "" {
		hop = "" // an early failure: no next hop
	}
	return fmt.Sprintf("to %s, service %s, identity %s, sent %s, received %s, failed %v", hop, field("dst.service"), field("dst.identity"), num("bytes_sent"), num("bytes_recv"), failed)
}

func (r *ReplayFlow) decision() string {
	hop, id := "", ""
	if n := len(r.Opened); n > 0 {
		hop = r.Opened[n-1].NextHop
	}
	if r.Destination != nil {
		id = r.Destination.Identity
	}
	return fmt.Sprintf("to %s, service %s, identity %s, sent %d, received %d, failed %v", hop, r.Service, id, r.Sent, r.Received, r.Error != "")
}

// A capture ends by its limits, says what it has, and lets go when its client does.
func TestNetnsCaptureEnds(t *testing.T) {
	b := newBedOn(t, variant{config.CaptureTUN, config.OffloadOff}, lab.Config{})
	b.start(0)
	b.serve(b.pods[plainB], 8080, who)
	to := addrPort(b.pods[plainB].Addr4, 8080)
	backend := b.nodes[0].node.listPods()[0].current().backend.(*tunBackend)

	t.Run("after a number of packets", func(t *testing.T) {
		c := b.startCapture(0, "packets=5")
		if _, err := b.ask(b.pods[clientA], to); err != nil {
			t.Fatal(err)
		}
		<-c.done
		if got, dropped := c.resp.Trailer.Get(trailerCaptured), c.resp.Trailer.Get(trailerDropped); got != "5" || dropped != "0" {
			t.Errorf("%s packets captured, %s dropped, want 5 and 0", got, dropped)
		}
		if n := packetsOf(t, c.got.String(), "pod"); n != 5 {
			t.Errorf("%d packets in the file, want 5", n)
		}
		if got := c.resp.Trailer.Get(trailerLimit); got != "packets" {
			t.Errorf("ended by %q, want packets", got)
		}
	})
	t.Run("after a size", func(t *testing.T) {
		c := b.startCapture(0, "bytes=1024&snaplen=100")
		for range 3 {
			if _, err := b.ask(b.pods[clientA], to); err != nil {
				t.Fatal(err)
			}
		}
		<-c.done
		if n := len(c.got.String()); n < 1024 || n > 1024+512 {
			t.Errorf("%d bytes, want a little more than 1024", n)
		}
		if got, took := c.resp.Trailer.Get(trailerLimit), c.resp.Trailer.Get(trailerSeconds); got != "bytes" || took == "" {
			t.Errorf("ended by %q after %q s, want bytes", got, took)
		}
	})
	t.Run("after a time", func(t *testing.T) {
		c := b.startCapture(0, "seconds=1")
		<-c.done
		if n := packetsOf(t, c.got.String(), "pod"); n != 0 || c.resp.Trailer.Get(trailerCaptured) != "0" || c.resp.Trailer.Get(trailerLimit) != "" {
			t.Errorf("%d packets, trailer %v", n, c.resp.Trailer)
		}
	})
	t.Run("when the client goes away", func(t *testing.T) {
		c := b.startCapture(0, "")
		if !backend.tapped.Load() {
			t.Error("nobody looks at the packets")
		}
		again := b.startCapture(0, "")
		<-again.done
		if again.resp.StatusCode != http.StatusConflict || !strings.Contains(again.got.String(), "is being captured already") {
			t.Errorf("a second capture: %s %s", again.resp.Status, again.got)
		}
		c.stop()
		<-c.done
		eventually(t, 5*time.Second, "the end of the tap", func() bool { return !backend.tapped.Load() })
	})
	t.Run("bad queries", func(t *testing.T) {
		for query, want := range map[string]string{
			"seconds=0": "seconds=0: want a number from 1 to 86400", "bytes=x": "bytes=x: want", "packets=-1": "packets=-1: want", "snaplen=1": "snaplen=1: want",
			"point=moon": "point=moon: want pod, tunnel", "pod=shop/none": "this node serves no such pod",
		} {
			c := b.startCapture(0, query)
			<-c.done
			if c.resp.StatusCode != http.StatusBadRequest || !strings.Contains(c.got.String(), want) {
				t.Errorf("%s: %s %s, want %s", query, c.resp.Status, c.got, want)
			}
		}
	})
}

// A pod that has no device: its side is refused with what to do, and its tunnels are captured.
func TestNetnsCaptureBesideRedirect(t *testing.T) {
	b := newBedOn(t, variant{capture: config.CaptureRedirect}, lab.Config{})
	b.start(0)
	b.start(1)
	b.serve(b.pods[webB], 8080, who)
	for query, pod := range map[string]string{"pod=shop/client": "client", "pod=shop/other&point=pod,tunnel": "other"} {
		c := b.startCapture(0, query)
		<-c.done
		want := "pod shop/" + pod + " is served by the redirect backend, which has no device that point pod could capture: take point tunnel, or tcpdump in the pod\n"
		if c.resp.StatusCode != http.StatusConflict || c.got.String() != want {
			t.Errorf("%s: %s %s, want %s", query, c.resp.Status, c.got, want)
		}
	}
	c := b.startCapture(0, "pod=shop/client&point=tunnel&packets=3")
	if _, err := b.ask(b.pods[clientA], "10.96.0.10:80"); err != nil {
		t.Fatal(err)
	}
	<-c.done
	if n := packetsOf(t, c.got.String(), "tunnel"); n != 3 {
		t.Errorf("%d packets of tunnels, want 3", n)
	}
}
