package config

import "time"

// check looks at what several settings say together, and at what cannot be done yet and must not be taken for done.
func (l *loader) check() {
	c := l.cfg
	set := func(key string) bool { return c.origins[key].Source != FromDefault }
	if c.LocalXDS != "" && c.LocalXDSPath != "" {
		l.errorf("LOCAL_XDS (%s) and LOCAL_XDS_PATH (%s): only one may be set", c.Origin("localXds"), c.Origin("localXdsPath"))
	}
	if c.MaxInFlightPerPod > c.MaxInFlight && set("maxInFlightPerPod") {
		l.errorf("ZTUN_MAX_IN_FLIGHT_PER_POD (%d) is above ZTUN_MAX_IN_FLIGHT (%d)", c.MaxInFlightPerPod, c.MaxInFlight)
	}
	if c.XDSOnDemand && c.DNSCapture {
		l.errorf("XDS_ON_DEMAND (%s) needs DNS off: a name cannot be denied by a table that is not complete; set ISTIO_META_DNS_CAPTURE=false", c.Origin("xdsOnDemand"))
	}
	if c.AdminPort == c.StatsPort {
		l.errorf("proxyAdminPort (%s) and statsPort (%s) are both %d", c.Origin("proxyAdminPort"), c.Origin("statsPort"), c.AdminPort)
	}
	if !c.EnableProxy && !c.DNSCapture {
		l.errorf("ENABLE_PROXY (%s) and ISTIO_META_DNS_CAPTURE (%s): nothing is left to do", c.Origin("enableProxy"), c.Origin("dnsCapture"))
	}
	if c.ProxyMode == Dedicated && c.ProxyWorkloadInfo == (WorkloadInfo{}) {
		l.errorf("PROXY_MODE=dedicated (%s) needs PROXY_WORKLOAD_INFO=namespace/name/service-account", c.Origin("proxyMode"))
	}
	if c.ProxyMode == Shared && c.FailMode == FailOpen {
		l.errorf("ZTUN_FAIL_MODE=open (%s): on a node traffic of pods never leaves in clear; only hosts may choose it", c.Origin("failMode"))
	}
	if set("terminationGracePeriodSeconds") && c.origins["connectionTerminationDeadline"].Source == FromDefault {
		c.TerminationDeadline = deadline(c.TerminationGracePeriod)
		c.origins["connectionTerminationDeadline"] = c.origins["terminationGracePeriodSeconds"]
		c.texts["connectionTerminationDeadline"] = c.TerminationDeadline.String()
	}
	for _, m := range missing {
		if why := m.asked(c); why != "" {
			l.errorf("%s (%s): %s", find(m.key).title(), c.Origin(m.key), why)
		}
	}
}

// deadline leaves time within the grace period for what comes after the connections, as ztunnel does.
func deadline(graceSeconds uint32) time.Duration {
	n := int64(graceSeconds) - 1
	if graceSeconds > 10 {
		n = int64(graceSeconds) - 5
	}
	return time.Duration(max(n, 1)) * time.Second
}

// title is how messages call the setting.
func (s *setting) title() string {
	if s.variable != "" {
		return s.variable
	}
	return s.key
}

// missing is what cannot be done yet and would weaken the mesh, or leave it without state, if it were passed over in silence.
var missing = []struct {
	key   string
	asked func(*Config) (why string)
}{
	{"proxyMode", func(c *Config) string {
		return when(c.ProxyMode == Dedicated, "dedicated mode is not built yet: only shared is served")
	}},
	{"enableProxy", func(c *Config) string {
		return when(!c.EnableProxy, "DNS alone is not built yet: pods would be captured")
	}},
	{"xdsAddress", func(c *Config) string {
		return when(c.XDSAddress != "", "xDS is not built yet: set LOCAL_XDS_PATH, and XDS_ADDRESS to nothing")
	}},
	{"caAddress", func(c *Config) string {
		return when(c.CAAddress != "" && !c.FakeCA, "the client of a certificate authority is not built yet: set FAKE_CA=true")
	}},
	{"crlPath", func(c *Config) string {
		return when(c.CRLPath != "", "revocation is not built yet: peers with revoked certificates would be accepted")
	}},
	{"crlMode", func(c *Config) string {
		return when(c.CRLMode == CRLStrict, "revocation is not built yet: peers of which nothing is known would be accepted")
	}},
	{"compliancePolicy", func(c *Config) string {
		return when(c.CompliancePolicy == "pqc", "pqc is not built yet: peers without it would be accepted")
	}},
}

func when(asked bool, why string) string {
	if asked {
		return why
	}
	return ""
}
