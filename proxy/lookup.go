package proxy

import (
	"context"
	"errors"
	"net/netip"

	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
)

// lookup finds the address of a destination that has only a hostname: one of the family that is preferred, if there is any, at random.
// The messages of its errors are ztunnel's.
func (p *Proxy) lookup(ctx context.Context, self *workload.Workload, d *Decision) error {
	if d.Lookup == "" {
		return nil
	}
	p.cfg.Records.OnDemandDNS(self, d.Destination)
	all, err := p.cfg.Resolver.Resolve(ctx, d.Lookup)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		p.cfg.Log.Debug("hostname of an endpoint not resolved", "hostname", d.Lookup, "error", err.Error())
		return noRoute(telemetry.ReasonDNS, "no ip addresses were resolved for workload: %s", d.Destination.UID)
	case len(all) == 0:
		return noRoute(telemetry.ReasonDNS, "ip addresses were resolved for workload %s, but valid dns response had no A/AAAA records", d.Destination.UID)
	}
	ip := one(all, d.near, p.cfg.Rand())
	if p.cfg.Local(ip) && illegalPort(d.NextHop.Port()) && d.Route == Passthrough {
		return errSelfCall
	}
	d.found(ip)
	return nil
}

// one picks an address of near's family, if there is any, else of the other.
func one(all []netip.Addr, near netip.Addr, random uint64) netip.Addr {
	var same []netip.Addr
	for _, a := range all {
		if a.Is4() == near.Is4() {
			same = append(same, a)
		}
	}
	if len(same) > 0 {
		all = same
	}
	return all[random%uint64(len(all))]
}

type noResolver struct{}

func (noResolver) Resolve(context.Context, string) ([]netip.Addr, error) {
	return nil, errors.New("proxy: config: no Resolver")
}
