package proxy

import (
	"fmt"
	"net/netip"
	"testing"

	"ztun.dev/ztun/internal/workload"
)

// BenchmarkClassify is a decision in a mesh of so many workloads, ten to a service.
func BenchmarkClassify(b *testing.B) {
	for _, n := range []int{100, 10_000, 100_000} {
		st := bigMesh(n, 10)
		s := workload.NewSnapshot(st)
		source := st.Workloads[0]
		for name, target := range map[string]netip.AddrPort{
			"service":  netip.AddrPortFrom(st.Services[len(st.Services)/2].VIPs[0].Addr, 80),
			"workload": netip.AddrPortFrom(st.Workloads[n/2].Addresses[0], 8080),
			"unknown":  netip.MustParseAddrPort("192.0.2.1:443"),
		} {
			b.Run(fmt.Sprintf("workloads=%d/to=%s", n, name), func(b *testing.B) {
				q := Query{Source: source, From: source.Addresses[0], Target: target, Tables: new(Tables)}
				b.ReportAllocs()
				for b.Loop() {
					q.Rand++
					if d := Classify(s, &q); d.Route == Refuse {
						b.Fatal(d.Err)
					}
				}
			})
		}
	}
}

// BenchmarkPick is a decision for a service with so many endpoints.
func BenchmarkPick(b *testing.B) {
	for _, n := range []int{1, 10, 100, 1000, 10_000} {
		st := bigMesh(n, n)
		s := workload.NewSnapshot(st)
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			source := st.Workloads[0]
			q := Query{Source: source, From: source.Addresses[0], Target: netip.AddrPortFrom(st.Services[0].VIPs[0].Addr, 80), Tables: new(Tables)}
			b.ReportAllocs()
			for b.Loop() {
				q.Rand++
				if d := Classify(s, &q); d.Route == Refuse {
					b.Fatal(d.Err)
				}
			}
		})
	}
}

// BenchmarkPickAlone is the choice among so many endpoints, without the rest of the decision.
func BenchmarkPickAlone(b *testing.B) {
	for _, n := range []int{1, 10, 100, 1000, 10_000, 100_000} {
		st := bigMesh(n, n)
		s := workload.NewSnapshot(st)
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			q := Query{Source: st.Workloads[0], Tables: new(Tables)}
			b.ReportAllocs()
			for b.Loop() {
				q.Rand++
				if _, ok := pick(s, &q, st.Services[0], 80, false); !ok {
					b.Fatal("no endpoint")
				}
			}
		})
	}
}

// bigMesh has n workloads and a service for each so many of them.
func bigMesh(n, perService int) (st workload.State) {
	for i := range n {
		svc := i / perService
		key := workload.ServiceKey{Namespace: fmt.Sprint("ns", svc%50), Hostname: fmt.Sprintf("svc%d.ns%d.svc.cluster.local", svc, svc%50)}
		if i%perService == 0 {
			st.Services = append(st.Services, &workload.Service{
				Name: fmt.Sprint("svc", svc), Namespace: key.Namespace, Hostname: key.Hostname, Ports: workload.PortMap{80: 8080},
				VIPs: []workload.NetworkAddr{{Addr: netip.AddrFrom4([4]byte{10, 96 + byte(svc>>16), byte(svc >> 8), byte(svc)})}},
			})
		}
		st.Workloads = append(st.Workloads, &workload.Workload{
			UID: fmt.Sprintf("k//Pod/%s/p%d", key.Namespace, i), Name: fmt.Sprint("p", i), Namespace: key.Namespace, ServiceAccount: "default",
			TrustDomain: "cluster.local", Protocol: workload.ProtocolHBONE, Capacity: 1,
			Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 128 + byte(i>>16), byte(i >> 8), byte(i)})},
			Services:  map[workload.ServiceKey]workload.PortMap{key: nil},
		})
	}
	return st
}
