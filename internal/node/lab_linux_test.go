package node

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"ztun.dev/ztun/internal/admin"
	"ztun.dev/ztun/internal/ca"
	"ztun.dev/ztun/internal/config"
	"ztun.dev/ztun/internal/lab"
)

// The lab of the tests: two nodes with two pods each. The names are those of the pods' workloads.
const (
	clientA = iota // node a, allowed
	otherA         // node a, another service account
	webB           // node b, serves web
	plainB         // node b, not in the mesh: no ztun, no workload
)

// podNames are those of the pods that ztun serves, by node.
var podNames = [][]string{{"client", "other"}, {"web"}}

// A bed is a lab with a mesh on it.
type bed struct {
	*lab.Lab
	t    *testing.T
	dir  string
	pods []*lab.Host

	variant         // of all nodes
	options Options // of all nodes, but for the output
	nodes   [2]*process
}

// A process is one node's ztun, in this process.
type process struct {
	node *Node
	stop context.CancelFunc
	done chan struct{}
	err  error
	out  *logBuffer // the access log
	log  *logBuffer
}

const meshState = `
workloads:
- {uid: c//Pod/shop/client, name: client, namespace: shop, serviceAccount: client, protocol: HBONE, node: node-a, workloadIps: [%[1]s, "%[2]s"], services: {}}
- {uid: c//Pod/shop/other, name: other, namespace: shop, serviceAccount: other, protocol: HBONE, node: node-a, workloadIps: [%[3]s, "%[4]s"], services: {}}
- uid: c//Pod/shop/web
  name: web
  namespace: shop
  serviceAccount: web
  protocol: HBONE
  node: node-b
  workloadIps: [%[5]s, "%[6]s"]
  authorizationPolicies: [shop/no-other, shop/no-9090]
  services: {shop/web.shop.svc.cluster.local: {80: 8080, 81: 1}}
- {uid: c//Pod/shop/gone, name: gone, namespace: shop, serviceAccount: gone, protocol: HBONE, node: node-c, workloadIps: [10.77.2.254, "fd77::2:fe"], services: {}}
services:
- {name: web, namespace: shop, hostname: web.shop.svc.cluster.local, vips: [/10.96.0.10, "/fd96::10"], ports: {80: 8080, 81: 1}}
- {name: empty, namespace: shop, hostname: empty.shop.svc.cluster.local, vips: [/10.96.0.11, "/fd96::11"], ports: {80: 8080}}
policies:
- name: no-other
  namespace: shop
  scope: WorkloadSelector
  action: Deny
  dryRun: false
  rules: [[[{principals: [!Exact cluster.local/ns/shop/sa/other]}]]]
- {name: no-9090, namespace: shop, scope: WorkloadSelector, action: Deny, dryRun: false, rules: [[[{destinationPorts: [9090]}]]]}
`

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("ZTUN_REQUIRE_NETNS") == "1" {
			t.Fatal("needs root")
		}
		t.Skip("needs root; ZTUN_REQUIRE_NETNS=1 makes this an error")
	}
}

// A variant is how the pods of a bed are served: how they are captured, and, with tun, how flows are given back to the kernel.
type variant struct {
	capture config.Capture
	offload config.Offload
}

func (v variant) String() string {
	if v.capture == config.CaptureRedirect {
		return v.capture.String()
	}
	return v.offload.String()
}

// backend is what the variant comes to on a machine that can do all.
func (v variant) backend() string {
	switch {
	case v.capture == config.CaptureRedirect:
		return config.OffloadOff.String()
	case v.offload == config.OffloadAuto:
		return config.OffloadSockops.String()
	}
	return v.offload.String()
}

// handsBack reports whether the kernel carries what it can.
func (v variant) handsBack() bool { return v.backend() != config.OffloadOff.String() }

// variants are all ways to serve a pod.
var variants = []variant{
	{config.CaptureTUN, config.OffloadSockops},
	{config.CaptureTUN, config.OffloadOff},
	{config.CaptureRedirect, config.OffloadAuto},
	{config.CaptureTUN, config.OffloadTC}, // these two not with the race detector: they differ from the first in package tun only
	{config.CaptureTUN, config.OffloadNFT},
}

// eachBackend runs a test of the data path with every variant.
func eachBackend(t *testing.T, test func(*testing.T, *bed)) {
	t.Helper()
	for _, v := range variants {
		if (v.offload == config.OffloadTC || v.offload == config.OffloadNFT) && slower > 1 {
			continue
		}
		t.Run(v.String(), func(t *testing.T) { test(t, newBedOn(t, v, lab.Config{})) })
	}
}

// newBed builds the lab, without ztun, as pods are served by default.
func newBed(t *testing.T) *bed {
	t.Helper()
	return newBedOn(t, variant{capture: config.CaptureTUN}, lab.Config{})
}

// newBedOn is newBed for any variant, on a lab of which something may be special. Pods for redirect have istio-cni's rules already.
func newBedOn(t *testing.T, v variant, cfg lab.Config) *bed {
	t.Helper()
	requireRoot(t)
	cfg.Nodes, cfg.PodsPerNode, cfg.IPv6, cfg.ResolvConf = 2, 2, true, "nameserver 10.96.0.53\noptions timeout:2 attempts:1\n"
	l, err := lab.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{Lab: l, t: t, variant: v, dir: t.TempDir(), pods: []*lab.Host{l.Pod(0, 0), l.Pod(0, 1), l.Pod(1, 0), l.Pod(1, 1)}}
	t.Cleanup(func() {
		for i := range b.nodes {
			b.stop(i)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	p := b.pods
	state := fmt.Sprintf(meshState, p[0].Addr4, p[0].Addr6, p[1].Addr4, p[1].Addr6, p[2].Addr4, p[2].Addr6)
	b.write("mesh.yaml", state)
	if v.capture == config.CaptureRedirect {
		istioCNI(t, p[clientA], p[otherA], p[webB])
	}
	authority, err := ca.New(time.Now)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := authority.PEM()
	if err != nil {
		t.Fatal(err)
	}
	b.write("root.pem", string(secret))
	b.write("resolv.conf", "nameserver "+l.Wire().Addr4.String()+"\n")
	for i, pods := range podNames {
		name := []string{"node-a", "node-b"}[i]
		text := fmt.Sprintf("nodeName: %s\nlocalXdsPath: %s\nfakeCa: true\nfakeCaRoot: %s\nhandoverSocket: %s\ncapture: %s\noffload: %s\ndnsResolvConf: %s\npods:\n",
			name, b.path("mesh.yaml"), b.path("root.pem"), b.path(name, "ztun.sock"), v.capture, v.offload, b.path("resolv.conf"))
		for j, pod := range pods {
			text += fmt.Sprintf("- {netns: %s, name: %s, namespace: shop, serviceAccount: %s}\n", l.Pod(i, j).NetnsPath(), pod, pod)
		}
		b.write(name+".yaml", text)
	}
	return b
}

func (b *bed) path(parts ...string) string {
	return filepath.Join(append([]string{b.dir}, parts...)...)
}

// file is the configuration of node i.
func (b *bed) file(i int) string { return b.path([]string{"node-a.yaml", "node-b.yaml"}[i]) }

func (b *bed) write(name, text string) {
	b.t.Helper()
	if err := os.WriteFile(b.path(name), []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bed) read(name string) string {
	b.t.Helper()
	text, err := os.ReadFile(b.path(name))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(text)
}

func (b *bed) load(i int) *config.Config {
	b.t.Helper()
	cfg, err := config.Load(config.Sources{File: b.file(i)})
	if err != nil {
		b.t.Fatal(err)
	}
	return cfg
}

// rewrite writes the configuration of node i to another file, with old replaced by new, which are taken in pairs, and returns
// its path.
func (b *bed) rewrite(i int, name string, oldnew ...string) string {
	b.t.Helper()
	text, err := os.ReadFile(b.file(i))
	if err != nil {
		b.t.Fatal(err)
	}
	for i := 0; i < len(oldnew); i += 2 {
		if !strings.Contains(string(text), oldnew[i]) {
			b.t.Fatalf("no %q in\n%s", oldnew[i], text)
		}
	}
	b.write(name, strings.NewReplacer(oldnew...).Replace(string(text)))
	return b.path(name)
}

// start starts the ztun of node i and waits until it serves, with the backend that the test is about.
func (b *bed) start(i int) *process {
	b.t.Helper()
	p := b.launch(i)
	b.mustCapture(i, p.log, p.done)
	return p
}

// launch is start with whatever backend.
func (b *bed) launch(i int) *process {
	b.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	p := &process{stop: stop, done: make(chan struct{}), out: newLogBuffer(), log: newLogBuffer()}
	o := b.options
	o.Stdout, o.Stderr, o.Ports = p.out, p.log, anyPorts
	var err error
	if p.node, err = build(b.load(i), o); err != nil {
		b.t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		defer p.node.close()
		p.err = p.node.run(ctx)
	}()
	b.nodes[i] = p
	p.log.await(b.t, "\tready\t", p.done)
	return p
}

// mustCapture reads in the log that each pod of a node is captured by the backend that the test is about.
func (b *bed) mustCapture(i int, log *logBuffer, ended <-chan struct{}) {
	b.t.Helper()
	for _, pod := range podNames[i] {
		log.await(b.t, "\tpod captured\t", ended, `pod="shop/`+pod+`"`, `capture="`+b.capture.String()+`"`, `offload="`+b.backend()+`"`)
	}
}

// stop ends the ztun of node i in order.
func (b *bed) stop(i int) {
	b.t.Helper()
	p := b.nodes[i]
	if p == nil {
		return
	}
	b.nodes[i] = nil
	p.stop()
	<-p.done
	if p.err != nil {
		b.t.Errorf("node %d: %v", i, p.err)
	}
	if b.t.Failed() {
		b.t.Logf("node %d, access log:\n%s\nlog:\n%s", i, p.out, p.log)
	}
}

// A logBuffer keeps lines and tells who waits for one.
type logBuffer struct {
	mu      sync.Mutex
	buf     bytes.Buffer
	changed chan struct{}
}

func newLogBuffer() *logBuffer { return &logBuffer{changed: make(chan struct{})} }

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
	return l.buf.Write(p)
}

func (l *logBuffer) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.buf.String() }

// await waits for a line that has all of the parts, and returns it; ended stops the wait.
func (l *logBuffer) await(t *testing.T, part string, ended <-chan struct{}, more ...string) string {
	t.Helper()
	limit := time.After(15 * time.Second)
	for {
		l.mu.Lock()
		text, changed := l.buf.String(), l.changed
		l.mu.Unlock()
	lines:
		for line := range strings.Lines(text) {
			for _, p := range append(more, part) {
				if !strings.Contains(line, p) {
					continue lines
				}
			}
			return line
		}
		select {
		case <-changed:
		case <-ended:
			t.Fatalf("ended without a line with %q %q:\n%s", part, more, l)
		case <-limit:
			t.Fatalf("no line with %q %q in:\n%s", part, more, l)
		}
	}
}

// serve runs handle for each connection to port of a host, on both families, until the test ends.
func (b *bed) serve(h *lab.Host, port int, handle func(net.Conn)) {
	b.t.Helper()
	l, err := h.Listen("tcp", fmt.Sprintf("[::]:%d", port))
	if err != nil {
		b.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				handle(c)
			})
		}
	})
	b.t.Cleanup(func() { l.Close(); wg.Wait() })
}

// who answers with the address that it sees.
func who(c net.Conn) {
	if _, err := io.WriteString(c, c.RemoteAddr().String()); err == nil {
		c.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, c)
	}
}

func (b *bed) dial(h *lab.Host, to string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(b.t.Context(), 5*time.Second)
	defer cancel()
	return h.Dial(ctx, "tcp", to)
}

// ask connects and reads all.
func (b *bed) ask(h *lab.Host, to string) (string, error) {
	c, err := b.dial(h, to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	got, err := io.ReadAll(c)
	return string(got), err
}

// askFrom is ask from one of several addresses of a host.
func (b *bed) askFrom(h *lab.Host, from, to string) (got string, err error) {
	err = h.Do(func() error {
		ctx, cancel := context.WithTimeout(b.t.Context(), 5*time.Second)
		defer cancel()
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext(ctx, "tcp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		text, err := io.ReadAll(c)
		got = string(text)
		return err
	})
	return got, err
}

// refusal is the error of a client that nobody is to serve. Where the kernel answers for ztun it comes after the connect.
func (b *bed) refusal(h *lab.Host, to string) error {
	ctx, cancel := context.WithTimeout(b.t.Context(), 10*time.Second)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", to)
	if err != nil {
		return err
	}
	defer c.Close()
	if b.capture == config.CaptureTUN {
		return nil
	}
	c.SetDeadline(time.Now().Add(10 * time.Second))
	_, err = c.Read(make([]byte, 1))
	return err
}

// seen is what a client sees of a failure, whose errno is that of a connect without ztun.
func (b *bed) seen(errno syscall.Errno) syscall.Errno {
	if b.capture == config.CaptureRedirect {
		return unix.ECONNRESET
	}
	return errno
}

func addrPort(a netip.Addr, port uint16) string { return netip.AddrPortFrom(a, port).String() }

// each lists an address of a host in each family.
func each(h *lab.Host, port uint16) []string {
	return []string{addrPort(h.Addr4, port), addrPort(h.Addr6, port)}
}

// own is the address of a host in the family of another.
func own(h *lab.Host, to string) netip.Addr {
	if netip.MustParseAddrPort(to).Addr().Is6() {
		return h.Addr6
	}
	return h.Addr4
}

// eventually polls with a bound, for what nobody announces.
func eventually(t *testing.T, limit time.Duration, what string, f func() bool) {
	t.Helper()
	const step = 5 * time.Millisecond
	tick := time.NewTicker(step)
	defer tick.Stop()
	for ; limit > 0; limit -= step {
		if f() {
			return
		}
		<-tick.C
	}
	t.Errorf("waited in vain for %s", what)
}

func TestMain(m *testing.M) {
	if runAsChild() {
		return
	}
	goleak.VerifyTestMain(m)
}

// anyPorts keep the nodes of one process, and of several tests, out of each other's way.
var anyPorts = admin.Ports{Admin: admin.AnyPort, Stats: admin.AnyPort, Ready: admin.AnyPort}
