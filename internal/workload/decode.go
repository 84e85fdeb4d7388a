package workload

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"ztun.dev/ztun/internal/strict"
)

// A decoder reads YAML nodes into what they say of the mesh.
type decoder struct{ strict.Reader }

func (d *decoder) boolean(dst *bool) strict.Field {
	return func(n *yaml.Node, path string) {
		if err := n.Decode(dst); err != nil {
			d.Errorf(n, path, "want true or false, have %s", strict.Describe(n))
		}
	}
}

func (d *decoder) uint32(dst *uint32) strict.Field {
	return func(n *yaml.Node, path string) {
		s, ok := d.Scalar(n, path, "a number")
		v, err := strconv.ParseUint(s, 10, 32)
		if ok && err != nil {
			d.Errorf(n, path, "want a number from 0 to 4294967295, have %q", s)
		}
		*dst = uint32(v)
	}
}

func (d *decoder) port(dst *uint16) strict.Field {
	return func(n *yaml.Node, path string) {
		s, ok := d.Scalar(n, path, "a port")
		v, err := strconv.ParseUint(s, 10, 16)
		if ok && err != nil {
			d.Errorf(n, path, "want a port from 0 to 65535, have %q", s)
		}
		*dst = uint16(v)
	}
}

func (d *decoder) strings(dst *[]string) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			var s string
			d.String(&s)(n, path)
			*dst = append(*dst, s)
		})
	}
}

func (d *decoder) ports(dst *PortMap) strict.Field {
	return func(n *yaml.Node, path string) {
		if n.Kind != yaml.MappingNode {
			d.Errorf(n, path, "want a mapping of service ports to target ports, have %s", strict.Describe(n))
			return
		}
		*dst = make(PortMap, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			var from, to uint16
			at := strict.Join(path, n.Content[i].Value)
			d.port(&from)(n.Content[i], at)
			d.port(&to)(strict.Resolve(n.Content[i+1]), at)
			(*dst)[from] = to
		}
	}
}

func (d *decoder) addrs(dst *[]netip.Addr) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			s, ok := d.Scalar(n, path, "an IP address")
			a, err := netip.ParseAddr(s)
			if ok && (err != nil || a.Zone() != "") {
				d.Errorf(n, path, "want an IP address, have %q", s)
				return
			}
			*dst = append(*dst, a.Unmap())
		})
	}
}

func (d *decoder) prefixes(dst *[]netip.Prefix) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			if p, ok := d.prefix(n, path); ok {
				*dst = append(*dst, p)
			}
		})
	}
}

func (d *decoder) prefix(n *yaml.Node, path string) (netip.Prefix, bool) {
	s, ok := d.Scalar(n, path, "an IP prefix")
	if !ok {
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		d.Errorf(n, path, "want an IP prefix such as 10.0.0.0/8, have %q", s)
		return netip.Prefix{}, false
	}
	return canonicalPrefix(p), true
}

// canonicalPrefix is the form in which addresses can be found in it: masked, and of IPv4 where it is written as IPv6.
func canonicalPrefix(p netip.Prefix) netip.Prefix {
	if a := p.Addr(); a.Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
	}
	return p.Masked()
}

func (d *decoder) identities(dst *[]Identity) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			s, ok := d.Scalar(n, path, "a SPIFFE identity")
			if !ok {
				return
			}
			id, err := ParseIdentity(s)
			if err != nil {
				d.Errorf(n, path, "want spiffe://<trust domain>/ns/<namespace>/sa/<service account>, have %q", s)
				return
			}
			*dst = append(*dst, id)
		})
	}
}

// enum reads one of names; its index is the value.
func enum[T ~uint8](d *decoder, dst *T, names []string) strict.Field {
	return func(n *yaml.Node, path string) {
		s, ok := d.Scalar(n, path, "one of "+strings.Join(names, ", "))
		if !ok {
			return
		}
		i := slices.Index(names, s)
		if i < 0 {
			d.Errorf(n, path, "want one of %s, have %q", strings.Join(names, ", "), s)
			return
		}
		*dst = T(i)
	}
}

func enums[T ~uint8](d *decoder, dst *[]T, names []string) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			var v T
			enum(d, &v, names)(n, path)
			*dst = append(*dst, v)
		})
	}
}

// networkAddr reads "network/ip".
func (d *decoder) networkAddr(n *yaml.Node, path string) (NetworkAddr, bool) {
	s, ok := d.Scalar(n, path, "an address as <network>/<ip>")
	if !ok {
		return NetworkAddr{}, false
	}
	a, ok := parseNetworkAddr(s)
	if !ok {
		d.Errorf(n, path, "want an address as <network>/<ip> (\"/10.96.0.10\" in the default network), have %q", s)
	}
	return a, ok
}

func parseNetworkAddr(s string) (NetworkAddr, bool) {
	network, ip, found := strings.Cut(s, "/")
	a, err := netip.ParseAddr(ip)
	return NetworkAddr{network, a.Unmap()}, found && err == nil && a.Zone() == ""
}

func (d *decoder) networkAddrs(dst *[]NetworkAddr) strict.Field {
	return func(n *yaml.Node, path string) {
		d.List(n, path, func(n *yaml.Node, path string) {
			if a, ok := d.networkAddr(n, path); ok {
				*dst = append(*dst, a)
			}
		})
	}
}

// destination reads "network/ip", else "namespace/hostname".
func (d *decoder) destination(dst *GatewayAddress) strict.Field {
	return func(n *yaml.Node, path string) {
		s, ok := d.Scalar(n, path, "<network>/<ip> or <namespace>/<hostname>")
		if !ok {
			return
		}
		if !dst.parse(s) {
			d.Errorf(n, path, "want <network>/<ip> or <namespace>/<hostname>, have %q", s)
		}
	}
}

// parse reads the address or the hostname; the port stays.
func (g *GatewayAddress) parse(s string) (ok bool) {
	if g.Address, ok = parseNetworkAddr(s); ok {
		return true
	}
	g.Address = NetworkAddr{}
	g.Hostname, ok = ParseServiceKey(strings.ToLower(s))
	return ok
}

func (d *decoder) gateway(dst *GatewayAddress) strict.Field {
	return func(n *yaml.Node, path string) {
		d.Mapping(n, path, map[string]strict.Field{
			"destination":   d.destination(dst),
			"hboneMtlsPort": d.port(&dst.Port),
		}, "destination", "hboneMtlsPort")
	}
}

func (d *decoder) optionalGateway(dst **GatewayAddress) strict.Field {
	return func(n *yaml.Node, path string) {
		*dst = new(GatewayAddress)
		d.gateway(*dst)(n, path)
	}
}
