package config

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"ztun.dev/ztun/internal/telemetry"
)

// commas splits a list; an empty text is an empty one.
func commas(s string) []string {
	if s == "" {
		return nil
	}
	list := strings.Split(s, ",")
	for i := range list {
		list[i] = strings.TrimSpace(list[i])
	}
	return list
}

// A wordsValue is a list of words out of a set.
type wordsValue struct {
	p       *[]string
	allowed []string
}

func (v wordsValue) Set(s string) error {
	list := commas(s)
	for _, w := range list {
		if !slices.Contains(v.allowed, w) {
			return fmt.Errorf("want %s, separated by commas", strings.Join(v.allowed, ", "))
		}
	}
	*v.p = list
	return nil
}

func (wordsValue) kind() string { return "words" }

// A labelsValue is a list of labels of the traffic metrics, or of what several of them end with: revision is the canonical revisions
// of source and destination.
type labelsValue []string

func (v *labelsValue) Set(s string) error {
	var list []string
	for _, w := range commas(s) {
		before := len(list)
		for _, l := range telemetry.DroppableLabels() {
			if l == w || strings.HasSuffix(l, "_"+w) {
				list = append(list, l)
			}
		}
		if len(list) == before || w == "" {
			return errors.New("want labels of the traffic metrics, such as source_principal, or ends of several such as revision, version, region, zone or principal, separated by commas")
		}
	}
	slices.Sort(list)
	*v = slices.Compact(list)
	return nil
}

func (*labelsValue) kind() string { return "labels" }

// A domainsValue is a list of DNS suffixes.
type domainsValue []string

func (v *domainsValue) Set(s string) error {
	var list []string
	for _, w := range commas(s) {
		var d domainValue
		if err := d.Set(w); err != nil {
			return errors.New("want domain names separated by commas")
		}
		list = append(list, string(d))
	}
	*v = list
	return nil
}

func (*domainsValue) kind() string { return "domains" }

// Prefixes are what a host captures; none: what the mesh state says.
type Prefixes []netip.Prefix

type prefixesValue Prefixes

func (v *prefixesValue) Set(s string) error {
	if s == "mesh" {
		*v = nil
		return nil
	}
	var list []netip.Prefix
	for _, w := range commas(s) {
		p, err := netip.ParsePrefix(w)
		if err != nil || p != p.Masked() {
			return errPrefixes
		}
		list = append(list, p)
	}
	if len(list) == 0 {
		return errPrefixes
	}
	*v = list
	return nil
}

var errPrefixes = errors.New("want mesh, or prefixes such as 10.0.0.0/8 separated by commas")

func (*prefixesValue) kind() string { return "prefixes" }

// A DNSUpstream says who answers what the mesh does not know. The zero value is the resolver that the application addressed.
type DNSUpstream struct {
	ResolvConf bool         // those of resolv.conf
	Addrs      []netip.Addr // or these
}

type upstreamValue DNSUpstream

func (v *upstreamValue) Set(s string) error {
	switch s {
	case "original":
		*v = upstreamValue{}
		return nil
	case "resolvconf":
		*v = upstreamValue{ResolvConf: true}
		return nil
	}
	var list []netip.Addr
	for _, w := range commas(s) {
		a, err := netip.ParseAddr(w)
		if err != nil {
			return errUpstream
		}
		list = append(list, a.Unmap())
	}
	if len(list) == 0 {
		return errUpstream
	}
	*v = upstreamValue{Addrs: list}
	return nil
}

var errUpstream = errors.New("want original, resolvconf, or IP addresses separated by commas")

func (*upstreamValue) kind() string { return "upstream" }

// A listenValue is localhost:PORT or IP:PORT.
type listenValue netip.AddrPort

func (v *listenValue) Set(s string) error {
	if port, ok := strings.CutPrefix(s, "localhost:"); ok {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return errListen
		}
		*v = listenValue(netip.AddrPortFrom(netip.Addr{}, uint16(n)))
		return nil
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil || a.Port() == 0 {
		return errListen
	}
	*v = listenValue(netip.AddrPortFrom(a.Addr().Unmap(), a.Port()))
	return nil
}

var errListen = errors.New("want localhost:PORT or IP:PORT")

func (*listenValue) kind() string { return "address" }

// A WorkloadInfo names a workload.
type WorkloadInfo struct{ Namespace, Name, ServiceAccount string }

type infoValue WorkloadInfo

func (v *infoValue) Set(s string) error {
	if s == "" {
		*v = infoValue{}
		return nil
	}
	parts := strings.SplitN(s, "/", 3)
	if len(parts) != 3 || slices.Contains(parts, "") {
		return errors.New("want namespace/name/service-account")
	}
	*v = infoValue{parts[0], parts[1], parts[2]}
	return nil
}

func (*infoValue) kind() string { return "workload" }

// A Mark is the mark of sockets, if one is set.
type Mark struct {
	Value uint32
	Given bool
}

type markValue Mark

func (v *markValue) Set(s string) error {
	if s == "" {
		*v = markValue{}
		return nil
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return errors.New("want a decimal number of 32 bits")
	}
	*v = markValue{uint32(n), true}
	return nil
}

func (*markValue) kind() string { return "mark" }
