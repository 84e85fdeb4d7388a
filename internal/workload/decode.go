package workload

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A decoder reads YAML nodes strictly and collects every error with its line and path, so that a file is mended in one go.
type decoder struct {
	file string
	errs []error
}

func (d *decoder) errorf(n *yaml.Node, path, format string, args ...any) {
	d.errs = append(d.errs, fmt.Errorf("%s:%d: %s: %s", d.file, n.Line, path, fmt.Sprintf(format, args...)))
}

func (d *decoder) err() error { return errors.Join(d.errs...) }

func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// A field reads the value of one key.
type field func(n *yaml.Node, path string)

// mapping reads the keys of a mapping with fields; keys that are not there are errors, as are required ones that are missing.
func (d *decoder) mapping(n *yaml.Node, path string, fields map[string]field, required ...string) {
	n = resolve(n)
	if n.Kind != yaml.MappingNode {
		d.errorf(n, path, "want a mapping, have %s", describe(n))
		return
	}
	seen := make(map[string]bool)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], resolve(n.Content[i+1])
		at := join(path, k.Value)
		f := fields[k.Value]
		switch {
		case seen[k.Value]:
			d.errorf(k, at, "is given twice")
		case f == nil:
			d.errorf(k, at, "unknown key%s", suggestion(k.Value, fields))
		case !isNull(v):
			f(v, at)
		}
		seen[k.Value] = true
	}
	for _, k := range required {
		if !seen[k] {
			d.errorf(n, join(path, k), "is missing")
		}
	}
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	if isNull(n) {
		return "nothing"
	}
	return strconv.Quote(n.Value)
}

// suggestion names the known key that is nearest, if one is near.
func suggestion(key string, fields map[string]field) string {
	best, distance := "", 3
	for k := range fields {
		if n := editDistance(strings.ToLower(key), strings.ToLower(k)); n < distance || n == distance && best != "" && k < best {
			best, distance = k, n
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", best)
}

func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

func (d *decoder) list(n *yaml.Node, path string, item field) {
	n = resolve(n)
	if n.Kind != yaml.SequenceNode {
		d.errorf(n, path, "want a list, have %s", describe(n))
		return
	}
	for i, v := range n.Content {
		item(resolve(v), fmt.Sprintf("%s[%d]", path, i))
	}
}

func (d *decoder) scalar(n *yaml.Node, path, want string) (string, bool) {
	if n.Kind != yaml.ScalarNode {
		d.errorf(n, path, "want %s, have %s", want, describe(n))
		return "", false
	}
	return n.Value, true
}

func (d *decoder) str(dst *string) field {
	return func(n *yaml.Node, path string) {
		if s, ok := d.scalar(n, path, "a string"); ok {
			*dst = s
		}
	}
}

func (d *decoder) boolean(dst *bool) field {
	return func(n *yaml.Node, path string) {
		if err := n.Decode(dst); err != nil {
			d.errorf(n, path, "want true or false, have %s", describe(n))
		}
	}
}

func (d *decoder) uint32(dst *uint32) field {
	return func(n *yaml.Node, path string) {
		s, ok := d.scalar(n, path, "a number")
		v, err := strconv.ParseUint(s, 10, 32)
		if ok && err != nil {
			d.errorf(n, path, "want a number from 0 to 4294967295, have %q", s)
		}
		*dst = uint32(v)
	}
}

func (d *decoder) port(dst *uint16) field {
	return func(n *yaml.Node, path string) {
		s, ok := d.scalar(n, path, "a port")
		v, err := strconv.ParseUint(s, 10, 16)
		if ok && err != nil {
			d.errorf(n, path, "want a port from 0 to 65535, have %q", s)
		}
		*dst = uint16(v)
	}
}

func (d *decoder) strings(dst *[]string) field {
	return func(n *yaml.Node, path string) {
		d.list(n, path, func(n *yaml.Node, path string) {
			var s string
			d.str(&s)(n, path)
			*dst = append(*dst, s)
		})
	}
}

func (d *decoder) ports(dst *PortMap) field {
	return func(n *yaml.Node, path string) {
		if n.Kind != yaml.MappingNode {
			d.errorf(n, path, "want a mapping of service ports to target ports, have %s", describe(n))
			return
		}
		*dst = make(PortMap, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			var from, to uint16
			at := join(path, n.Content[i].Value)
			d.port(&from)(n.Content[i], at)
			d.port(&to)(resolve(n.Content[i+1]), at)
			(*dst)[from] = to
		}
	}
}

func (d *decoder) addrs(dst *[]netip.Addr) field {
	return func(n *yaml.Node, path string) {
		d.list(n, path, func(n *yaml.Node, path string) {
			s, ok := d.scalar(n, path, "an IP address")
			a, err := netip.ParseAddr(s)
			if ok && (err != nil || a.Zone() != "") {
				d.errorf(n, path, "want an IP address, have %q", s)
				return
			}
			*dst = append(*dst, a.Unmap())
		})
	}
}

func (d *decoder) prefixes(dst *[]netip.Prefix) field {
	return func(n *yaml.Node, path string) {
		d.list(n, path, func(n *yaml.Node, path string) {
			if p, ok := d.prefix(n, path); ok {
				*dst = append(*dst, p)
			}
		})
	}
}

func (d *decoder) prefix(n *yaml.Node, path string) (netip.Prefix, bool) {
	s, ok := d.scalar(n, path, "an IP prefix")
	if !ok {
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		d.errorf(n, path, "want an IP prefix such as 10.0.0.0/8, have %q", s)
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

func (d *decoder) identities(dst *[]Identity) field {
	return func(n *yaml.Node, path string) {
		d.list(n, path, func(n *yaml.Node, path string) {
			s, ok := d.scalar(n, path, "a SPIFFE identity")
			if !ok {
				return
			}
			id, err := ParseIdentity(s)
			if err != nil {
				d.errorf(n, path, "want spiffe://<trust domain>/ns/<namespace>/sa/<service account>, have %q", s)
				return
			}
			*dst = append(*dst, id)
		})
	}
}

// enum reads one of names; its index is the value.
func enum[T ~uint8](d *decoder, dst *T, names []string) field {
	return func(n *yaml.Node, path string) {
		s, ok := d.scalar(n, path, "one of "+strings.Join(names, ", "))
		if !ok {
			return
		}
		i := slices.Index(names, s)
		if i < 0 {
			d.errorf(n, path, "want one of %s, have %q", strings.Join(names, ", "), s)
			return
		}
		*dst = T(i)
	}
}

func enums[T ~uint8](d *decoder, dst *[]T, names []string) field {
	return func(n *yaml.Node, path string) {
		d.list(n, path, func(n *yaml.Node, path string) {
			var v T
			enum(d, &v, names)(n, path)
			*dst = append(*dst, v)
		})
	}
}

// networkAddr reads "network/ip".
func (d *decoder) networkAddr(n *yaml.Node, path string) (NetworkAddr, bool) {
	s, ok := d.scalar(n, path, "an address as <network>/<ip>")
	if !ok {
		return NetworkAddr{}, false
	}
	a, ok := parseNetworkAddr(s)
	if !ok {
		d.errorf(n, path, "want an address as <network>/<ip> (\"/10.96.0.10\" in the default network), have %q", s)
	}
	return a, ok
}

func parseNetworkAddr(s string) (NetworkAddr, bool) {
	network, ip, found := strings.Cut(s, "/")
	a, err := netip.ParseAddr(ip)
	return NetworkAddr{network, a.Unmap()}, found && err == nil && a.Zone() == ""
}

func (d *decoder) networkAddrs(dst *[]NetworkAddr) field {
	return func(n *yaml.Node, path string) {
		d.list(n, path, func(n *yaml.Node, path string) {
			if a, ok := d.networkAddr(n, path); ok {
				*dst = append(*dst, a)
			}
		})
	}
}

// destination reads "network/ip", else "namespace/hostname".
func (d *decoder) destination(dst *GatewayAddress) field {
	return func(n *yaml.Node, path string) {
		s, ok := d.scalar(n, path, "<network>/<ip> or <namespace>/<hostname>")
		if !ok {
			return
		}
		if !dst.parse(s) {
			d.errorf(n, path, "want <network>/<ip> or <namespace>/<hostname>, have %q", s)
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

func (d *decoder) gateway(dst *GatewayAddress) field {
	return func(n *yaml.Node, path string) {
		d.mapping(n, path, map[string]field{
			"destination":   d.destination(dst),
			"hboneMtlsPort": d.port(&dst.Port),
		}, "destination", "hboneMtlsPort")
	}
}

func (d *decoder) optionalGateway(dst **GatewayAddress) field {
	return func(n *yaml.Node, path string) {
		*dst = new(GatewayAddress)
		d.gateway(*dst)(n, path)
	}
}
