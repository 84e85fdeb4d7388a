package proxy

import (
	"cmp"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"ztun.dev/ztun/internal/hbone"
	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
)

// A target is what a CONNECT to the pod leads to.
type target struct {
	app      netip.AddrPort    // the pod's address and the port, after every translation: what policy sees
	loopback netip.AddrPort    // valid: where the application listens instead
	service  *workload.Service // that the authority names; nil: none
	header   []byte            // that the connection to the application begins with
}

// target turns the authority of a CONNECT into the address of the application: the pod's own address, and the port that the
// authority, or the service that it names, means; or that of its application tunnel.
func (p *Proxy) target(state *workload.Snapshot, self *workload.Workload, r *hbone.Request, forwarded string) (*target, error) {
	own := unmapped(r.Local).Addr()
	host, port, err := splitAuthority(r.Authority)
	if err != nil {
		return nil, err
	}
	t, to := new(target), port
	var named *workload.Service
	ip, err := netip.ParseAddr(host)
	if ip = ip.Unmap(); err == nil {
		if ip != own && self.AppTunnel == nil && !p.fronts(state, self, ip) {
			return nil, reject(http.StatusBadRequest, "ip mismatch: %s != %s", own, ip)
		}
	} else {
		if named = state.ServiceNamed(strings.ToLower(host), self.Namespace); named == nil {
			return nil, reject(http.StatusServiceUnavailable, "no service or workload for hostname: %s", host)
		}
		if to = PortOf(self, named, port); to == 0 {
			return nil, reject(http.StatusServiceUnavailable, "requested service %s:%d found, but cannot resolve port", host, port)
		}
		t.service = named
	}
	if to, err = ApplicationPort(self, to); err != nil {
		return nil, err
	}
	t.app = netip.AddrPortFrom(own, to)
	if self.AppTunnel == nil || !self.AppTunnel.PROXY {
		return t, nil
	}
	if !p.cfg.AppTunnelOnPodAddress {
		t.loopback = netip.AddrPortFrom(loopbackOf(own), to)
	}
	service := ""
	if named != nil {
		service = named.Hostname
		if ip = p.vip(named); !ip.IsValid() {
			return nil, reject(http.StatusServiceUnavailable, "requested service %s found, but has no IP addresses", host)
		}
	} else if p.serves(state, self, ip, forwarded) {
		service = forwarded
	}
	t.header, err = proxyHeader(unmapped(r.Remote), netip.AddrPortFrom(ip, port), r.Peer, service)
	return t, err
}

// ApplicationPort is where a CONNECT for a port of a workload leads: to that port or, if it has one, to its application tunnel. What would lead
// to the proxy itself is refused.
func ApplicationPort(w *workload.Workload, asked uint16) (uint16, error) {
	to := asked
	if w.AppTunnel != nil && w.AppTunnel.Port != 0 {
		to = w.AppTunnel.Port
	}
	return to, cmp.Or(CheckPort(asked), CheckPort(to))
}

// CheckPort refuses the proxy's own ports, to which nothing is led.
func CheckPort(port uint16) error {
	if illegalPort(port) {
		return errSelfCall
	}
	return nil
}

// PortOf is the port of a workload that a port of a service leads to; 0: none.
func PortOf(w *workload.Workload, v *workload.Service, port uint16) uint16 {
	if own := w.Services[v.Key()][port]; own != 0 {
		return own
	}
	return v.Ports[port]
}

func loopbackOf(family netip.Addr) netip.Addr {
	if family.Is4() {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

// vip picks the address that stands for a service that was named: of our own network and IPv4, else of our own network, else any.
func (p *Proxy) vip(v *workload.Service) (best netip.Addr) {
	rank := 0
	for _, a := range v.VIPs {
		r := 1
		if a.Network == p.cfg.Network {
			r = 2
			if a.Addr.Is4() {
				r = 3
			}
		}
		if r > rank {
			best, rank = a.Addr, r
		}
	}
	return best
}

// serves reports whether what has the address is known to serve a hostname.
func (p *Proxy) serves(state *workload.Snapshot, self *workload.Workload, ip netip.Addr, hostname string) bool {
	if v := state.ServiceAt(p.cfg.Network, ip, self.Namespace); v != nil {
		return v.Hostname == hostname
	}
	w := state.WorkloadAt(p.cfg.Network, ip)
	if w == nil {
		return false
	}
	for key := range w.Services {
		if key.Hostname == hostname {
			return true
		}
	}
	return false
}

// fronts reports whether the pod is a waypoint of what has the address: then streams to that address are for it. One that is not
// healthy is still one.
func (p *Proxy) fronts(state *workload.Snapshot, self *workload.Workload, ip netip.Addr) bool {
	if v := state.ServiceAt(p.cfg.Network, ip, self.Namespace); v != nil {
		for i := range v.WeightedWaypoints {
			if isGateway(state, self, &v.WeightedWaypoints[i].Destination) {
				return true
			}
		}
		return isGateway(state, self, v.Waypoint)
	}
	w := state.WorkloadAt(p.cfg.Network, ip)
	return w != nil && isGateway(state, self, w.Waypoint)
}

// isGateway reports whether an address of a waypoint leads to the workload.
func isGateway(state *workload.Snapshot, self *workload.Workload, g *workload.GatewayAddress) bool {
	if g == nil {
		return false
	}
	var via *workload.Service
	var w *workload.Workload
	if g.Hostname == (workload.ServiceKey{}) {
		via = state.ServiceAt(g.Address.Network, g.Address.Addr, self.Namespace)
		w = state.WorkloadAt(g.Address.Network, g.Address.Addr)
	} else {
		via, w = state.Service(g.Hostname), state.WorkloadNamed(g.Hostname)
	}
	if via != nil {
		_, member := self.Services[via.Key()]
		return member
	}
	return w == self
}

// splitAuthority reads host:port.
func splitAuthority(s string) (host string, port uint16, err error) {
	host, service, err := net.SplitHostPort(s)
	n, perr := strconv.ParseUint(service, 10, 16)
	if err != nil || perr != nil || host == "" || len(host) > maxHostname || n == 0 {
		return "", 0, reject(http.StatusBadRequest, "no valid authority pseudo header: %.*s", maxHostname, s)
	}
	return host, uint16(n), nil
}

// servedBy guesses the service that an inbound connection was addressed to, among those of the workload: the one that the peer
// named, else the first, by name, that leads to the port.
func servedBy(state *workload.Snapshot, self *workload.Workload, port uint16, named string) string {
	best := ""
	for key, ports := range self.Services {
		if key.Hostname == named {
			return named
		}
		v := state.Service(key)
		if v == nil || best != "" && key.Hostname >= best {
			continue
		}
		for servicePort, target := range v.Ports {
			if own := ports[servicePort]; own != 0 {
				target = own
			}
			if target == port {
				best = key.Hostname
			}
		}
	}
	return best
}

// setService names the service of an inbound connection, which is one of the workload's.
func setService(f *telemetry.Facts, state *workload.Snapshot, self *workload.Workload, hostname string) {
	f.Service = hostname
	for key := range self.Services {
		if key.Hostname != hostname || f.ServiceNamespace != "" && key.Namespace >= f.ServiceNamespace {
			continue
		}
		if v := state.Service(key); v != nil {
			f.ServiceName, f.ServiceNamespace = v.Name, v.Namespace
		}
	}
}
