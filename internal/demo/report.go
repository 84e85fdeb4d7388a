package demo

import (
	"fmt"
	"slices"
)

// A Report is what was observed, and beside it what was expected. Its JSON form is stable: keys only get added. Fields of IPv6
// are empty on a machine without it.
type Report struct {
	OK       bool     `json:"ok"` // every fact holds
	Failures []string `json:"failures"`

	RequestURL string `json:"request_url"`
	RequestOK  bool   `json:"request_ok"`
	Answer     string `json:"answer"` // first line
	IPv6       bool   `json:"ipv6"`   // the machine has it
	RequestOK6 bool   `json:"request_ok_v6"`

	ClientAddressSeen      string `json:"client_address_seen"`
	ClientAddressExpected  string `json:"client_address_expected"`
	ClientAddressSeen6     string `json:"client_address_seen_v6"`
	ClientAddressExpected6 string `json:"client_address_expected_v6"`

	SourceIdentity              string `json:"source_identity"`      // as the destination's node has verified it
	DestinationIdentity         string `json:"destination_identity"` // as the source's node has verified it
	SourceIdentityExpected      string `json:"source_identity_expected"`
	DestinationIdentityExpected string `json:"destination_identity_expected"`

	Denied         bool   `json:"denied"`          // the client got no answer, and policy was why
	DeniedClient   string `json:"denied_client"`   // identity
	DeniedReason   string `json:"denied_reason"`   // in the access log of the server's node
	DeniedObserved string `json:"denied_observed"` // by the client

	// Payload of TCP outside of port 15008, and of markers wherever they were, in bytes.
	ClearBytesWithZtun uint64 `json:"clear_bytes_with_ztun"`
	ClearBytesWithout  uint64 `json:"clear_bytes_without"`
	With               Wire   `json:"wire_with_ztun"`
	Without            Wire   `json:"wire_without"`

	ThroughputRatio     float64 `json:"throughput_ratio"` // with to without ztun, client to server
	ThroughputRatioDown float64 `json:"throughput_ratio_down"`
	SpeedWith           Speed   `json:"throughput_with_ztun"`
	SpeedWithout        Speed   `json:"throughput_without"`

	PingPongWith    PingPong `json:"ping_pong_with_ztun"`
	PingPongWithout PingPong `json:"ping_pong_without"`

	Capture           string  `json:"capture"`           // backend, as the nodes say
	HTTPClient        string  `json:"http_client"`       // curl, or ztun's own
	ThroughputClient  string  `json:"throughput_client"` // iperf3, or ztun's own
	CongestionControl string  `json:"congestion_control"`
	MTU               int     `json:"mtu"`
	DurationSeconds   float64 `json:"duration_seconds"`
}

// Wire is what crossed the wire between the nodes.
type Wire struct {
	Packets     uint64 `json:"packets"`
	ClearBytes  uint64 `json:"clear_tcp_bytes"`
	TunnelBytes uint64 `json:"tunnel_bytes"`     // payload of TCP on port 15008
	OtherBytes  uint64 `json:"other_bytes"`      // neither TCP nor the link's own
	RequestHits uint64 `json:"request_markers"`  // packets with the marker that the client sent
	ReplyHits   uint64 `json:"response_markers"` // packets with the marker that the server sent
	Lost        uint64 `json:"capture_lost"`     // packets that were not looked at
}

// Speed is throughput in Mbit/s.
type Speed struct {
	Up   float64 `json:"up_mbps"`
	Down float64 `json:"down_mbps"`
}

// PingPong is what a round trip of 64 bytes takes while other connections of the same pod send at full speed, in milliseconds.
type PingPong struct {
	P50     float64 `json:"p50_ms"`
	P99     float64 `json:"p99_ms"`
	Streams int     `json:"streams"`      // beside it
	Bulk    float64 `json:"streams_mbps"` // of all of them
}

// fail notes a fact that does not hold.
func (r *Report) fail(format string, args ...any) {
	r.Failures = append(r.Failures, fmt.Sprintf(format, args...))
}

// family is one of IPv4 and IPv6 of a report.
type family struct {
	name         string
	flag         string // of curl and demo-client
	index        int    // of an address in member.Addrs
	ok           *bool
	seen, expect *string
}

func (r *Report) families() []family {
	f := []family{
		{"IPv4", "-4", 0, &r.RequestOK, &r.ClientAddressSeen, &r.ClientAddressExpected},
		{"IPv6", "-6", 1, &r.RequestOK6, &r.ClientAddressSeen6, &r.ClientAddressExpected6},
	}
	if !r.IPv6 {
		f = f[:1]
	}
	return f
}

// finish decides whether all facts hold. Each check is on what was observed; nothing is assumed.
func (r *Report) finish() {
	for _, f := range r.families() {
		if !*f.ok {
			r.fail("the request over %s was not answered", f.name)
		} else if *f.seen != *f.expect {
			r.fail("the server saw the client address %s over %s, want the pod's own %s", *f.seen, f.name, *f.expect)
		}
	}
	if r.Capture != backend {
		r.fail("the nodes capture their pods by %q, want %q", r.Capture, backend)
	}
	if r.SourceIdentity != r.SourceIdentityExpected {
		r.fail("the source's identity is %q, want %q", r.SourceIdentity, r.SourceIdentityExpected)
	}
	if r.DestinationIdentity != r.DestinationIdentityExpected {
		r.fail("the destination's identity is %q, want %q", r.DestinationIdentity, r.DestinationIdentityExpected)
	}
	if !r.Denied {
		r.fail("the flow of %s was not denied by policy", r.DeniedClient)
	}
	sent := uint64(len(r.families()))
	switch {
	case r.Without.RequestHits < sent || r.Without.ReplyHits < sent || r.ClearBytesWithout == 0:
		r.fail("the control run without ztun does not show what it sent: %d bytes, %d and %d markers; the capture sees too little",
			r.ClearBytesWithout, r.Without.RequestHits, r.Without.ReplyHits)
	case r.With.TunnelBytes == 0:
		r.fail("no byte crossed port 15008 with ztun: there was nothing to protect")
	}
	if r.ClearBytesWithZtun != 0 || r.With.RequestHits+r.With.ReplyHits != 0 {
		r.fail("%d bytes and %d markers could be read on the wire with ztun", r.ClearBytesWithZtun, r.With.RequestHits+r.With.ReplyHits)
	}
	if n := r.With.Lost + r.Without.Lost; n != 0 {
		r.fail("the capture lost %d packets", n)
	}
	if slices.Contains([]float64{r.SpeedWithout.Up, r.SpeedWithout.Down, r.SpeedWith.Up, r.SpeedWith.Down}, 0) {
		r.fail("throughput was not measured")
	} else {
		r.ThroughputRatio, r.ThroughputRatioDown = r.SpeedWith.Up/r.SpeedWithout.Up, r.SpeedWith.Down/r.SpeedWithout.Down
	}
	if r.PingPongWith.P50 == 0 || r.PingPongWithout.P50 == 0 {
		r.fail("round trips beside other connections were not measured")
	}
	r.OK = len(r.Failures) == 0
}
