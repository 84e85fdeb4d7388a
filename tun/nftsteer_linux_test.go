package tun

import (
	"net/netip"
	"testing"

	"github.com/google/nftables"
)

// More flows end between two sweeps than one transaction can be acknowledged for, and the kernel has lost one of them already.
func TestNetnsNFTForgetsManyFlows(t *testing.T) {
	l := newLab(t, true)
	s, err := NewSteering(SteeringConfig{Mode: SteerByNFT, Marks: testConfig(nil).Marks}) // the test sweeps in place of Run
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	cfg := testConfig(l.pod)
	cfg.Steering = s
	n := open(t, cfg).steerer.(*nftNetns)
	const all = 3000
	flow := func(i int) (src, dst netip.AddrPort) {
		return netip.AddrPortFrom(pod4, uint16(1+i)), netip.MustParseAddrPort("192.0.2.7:80")
	}
	n.mu.Lock()
	var elements []nftables.SetElement
	for i := range all {
		src, dst := flow(i)
		key := keyOf(n.cookie, src, dst)
		b, _ := nftKey(&key)
		n.flows[key] = &handedFlow{way: ToNetwork}
		if i > 0 {
			elements = append(elements, nftables.SetElement{Key: b})
		}
	}
	for len(elements) > 0 {
		part := elements[:min(500, len(elements))]
		elements = elements[len(part):]
		must(t, n.conn.SetAddElements(n.set(ToNetwork, false), part))
		must(t, n.conn.Flush())
	}
	n.mu.Unlock()
	told := 0
	for range 3 {
		n.sweep(func(EndedFlow) { told++ })
	}
	n.mu.Lock()
	left, err := n.conn.GetSetElements(n.set(ToNetwork, false))
	known := len(n.flows)
	n.mu.Unlock()
	if err != nil || len(left) > 0 || known > 0 || told != all {
		t.Errorf("%d ends told, %d flows known, %d in the kernel, %v; want %d, none, none", told, known, len(left), err, all)
	}
	// Addresses and ports of one that the kernel had lost are used again.
	src, dst := flow(0)
	must(t, n.steer(src, dst, ToNetwork, 0))
	n.mu.Lock()
	defer n.mu.Unlock()
	if left, err = n.conn.GetSetElements(n.set(ToNetwork, false)); err != nil || len(left) != 1 {
		t.Errorf("%d flows in the kernel, %v; want the one that is steered anew", len(left), err)
	}
	key := keyOf(n.cookie, src, dst)
	b, _ := nftKey(&key)
	must(t, n.conn.SetDeleteElements(n.set(ToNetwork, false), []nftables.SetElement{{Key: b}}))
	must(t, n.conn.Flush())
	if err := n.remove(key); err != nil {
		t.Errorf("a flow that is missing already: %v", err)
	}
}
