package config

import (
	"fmt"
	"slices"
	"strings"
)

// ProxyMode is what the process serves.
type ProxyMode uint8

// The modes.
const (
	Shared    ProxyMode = iota // all pods of a node
	Dedicated                  // its own network namespace: a host
)

// Capture is how the traffic of a pod is led to this process.
type Capture uint8

// The capture backends. Auto takes tun for each pod where it can be set up, else redirect.
const (
	CaptureAuto Capture = iota
	CaptureTUN
	CaptureRedirect
)

// FailMode is what happens to traffic while there is no process, or no state.
type FailMode uint8

// The modes.
const (
	FailClosed FailMode = iota
	FailOpen
)

// Offload is how flows are given back to the kernel.
type Offload uint8

// The values.
const (
	OffloadAuto Offload = iota
	OffloadSockops
	OffloadTC
	OffloadNFT
	OffloadOff
)

// A Switch is on, off, or found out by trying.
type Switch uint8

// The values.
const (
	Auto Switch = iota
	On
	Off
)

// OrigSrc is whether inbound connections are delivered from the address of their client.
type OrigSrc uint8

// The values.
const (
	OrigSrcBestEffort OrigSrc = iota
	OrigSrcAlways
	OrigSrcNever
)

// UnknownPolicy is what happens while a policy that selects a workload has not arrived.
type UnknownPolicy uint8

// The values.
const (
	UnknownPolicyDeny UnknownPolicy = iota
	UnknownPolicyAllow
)

// InvalidPolicy is what happens where a policy cannot be read and no earlier version of it could.
type InvalidPolicy uint8

// The values.
const (
	InvalidPolicyDeny InvalidPolicy = iota
	InvalidPolicySkip
)

// CRLMode is what happens where no current revocation list is there.
type CRLMode uint8

// The values.
const (
	CRLAllowUnknown CRLMode = iota
	CRLAllowStale
	CRLStrict
)

// CertMetrics is how metrics of certificates are labelled.
type CertMetrics uint8

// The values.
const (
	CertMetricsIdentity CertMetrics = iota
	CertMetricsAggregate
)

// DNSAAAA is when questions for AAAA are answered.
type DNSAAAA uint8

// The values.
const (
	AAAAAll DNSAAAA = iota
	AAAAAuto
)

// The names of the values, in their order.
var (
	proxyModes      = []string{"shared", "dedicated"}
	captures        = []string{"auto", "tun", "redirect"}
	failModes       = []string{"closed", "open"}
	offloads        = []string{"auto", "sockops", "tc", "nft", "off"}
	switches        = []string{"auto", "on", "off"}
	origSrcs        = []string{"auto", "true", "false"}
	unknownPolicies = []string{"deny", "allow"}
	invalidPolicies = []string{"deny", "skip"}
	crlModes        = []string{"allow-unknown", "allow-stale", "strict"}
	certMetrics     = []string{"identity", "aggregate"}
	dnsAAAAs        = []string{"all", "auto"}
)

func (m ProxyMode) String() string     { return proxyModes[m] }
func (c Capture) String() string       { return captures[c] }
func (m FailMode) String() string      { return failModes[m] }
func (o Offload) String() string       { return offloads[o] }
func (s Switch) String() string        { return switches[s] }
func (o OrigSrc) String() string       { return origSrcs[o] }
func (p UnknownPolicy) String() string { return unknownPolicies[p] }
func (p InvalidPolicy) String() string { return invalidPolicies[p] }
func (m CRLMode) String() string       { return crlModes[m] }
func (m CertMetrics) String() string   { return certMetrics[m] }
func (a DNSAAAA) String() string       { return dnsAAAAs[a] }

// A choiceValue is one of several words, exactly as written.
type choiceValue[T ~uint8] struct {
	p     *T
	names []string
}

func choice[T ~uint8](p *T, names []string) value { return choiceValue[T]{p, names} }

func (v choiceValue[T]) Set(s string) error {
	i := slices.Index(v.names, s)
	if i < 0 {
		last := len(v.names) - 1
		return fmt.Errorf("want %s or %s", strings.Join(v.names[:last], ", "), v.names[last])
	}
	*v.p = T(i)
	return nil
}

func (v choiceValue[T]) kind() string { return strings.Join(v.names, "|") }
