package config

import (
	"encoding/json"
	"net/netip"
	"time"

	"ztun.dev/ztun/internal/telemetry"
)

// A Config is everything that can be set. Settings says what each field means, in which unit, and what its default is.
type Config struct {
	ProxyMode         ProxyMode
	ProxyWorkloadInfo WorkloadInfo // dedicated mode: the workload that is served
	EnableProxy       bool
	DNSCapture        bool
	DNSProxyAddr      netip.AddrPort // the zero address with a port: both loopback addresses
	InpodUDS          string
	InpodPortReuse    bool
	PacketMark        Mark
	EnableOrigSrc     OrigSrc

	NodeName                  string
	Network                   string
	ClusterID                 string
	ClusterDomain             string
	TrustDomain               string
	PreferredServiceNamespace string
	IPv6Enabled               bool
	PodName                   string // of this process, as the next three
	PodNamespace              string
	ServiceAccount            string
	InstanceIP                string
	IstioVersion              string

	LocalXDSPath string // at most one of the two is set
	LocalXDS     string
	XDSAddress   string // "": off
	XDSRootCA    string // path, PEM or SYSTEM; as CARootCA
	AltXDSHost   string
	XDSOnDemand  bool
	XDSHeaders   map[string]string // extra gRPC metadata, as CAHeaders; secret

	FakeCA     bool
	FakeCARoot string
	CAAddress  string
	CARootCA   string
	AltCAHost  string
	CAHeaders  map[string]string
	AuthToken  string // path or token
	SecretTTL  time.Duration

	CRLPath          string
	CRLMode          CRLMode
	CertMetrics      CertMetrics
	TrustMountedRoot bool
	TLSKeylog        string
	TLS12Enabled     bool
	CompliancePolicy string

	Capture            Capture
	FailMode           FailMode
	HostCapture        Prefixes
	Offload            Offload
	ConnectCache       time.Duration // 0: nothing is remembered
	TUNGSO             Switch
	HandoverSocket     string
	UnknownPolicy      UnknownPolicy
	InvalidPolicy      InvalidPolicy
	ReadyIgnorePending time.Duration // 0: never
	RemovedPodGrace    time.Duration
	WorkerThreads      Threads

	AdminPort uint16
	StatsPort uint16

	LogFormat              telemetry.Format
	LogFilter              telemetry.Filter
	AuthzPolicyInfoLogging bool
	MetricsDropLabels      []string // names of telemetry.Labels
	AccessLogFields        []string

	PoolMaxStreams             uint16
	PoolUnusedRelease          time.Duration
	HTTP2StreamWindowBytes     uint32
	HTTP2ConnectionWindowBytes uint32
	HTTP2FrameBytes            uint32
	LocalhostAppTunnel         bool
	EnableResponseBaggage      bool
	EnableSOCKS5               bool

	KeepaliveEnabled   bool
	KeepaliveTime      time.Duration
	KeepaliveInterval  time.Duration
	KeepaliveRetries   uint32
	UserTimeoutEnabled bool

	ConnectTimeout    time.Duration
	HandshakeTimeout  time.Duration
	ResponseTimeout   time.Duration
	HalfClosedTimeout time.Duration // 0: none
	MaxConnectionAge  time.Duration // 0: until the certificates expire

	TerminationDeadline    time.Duration // how long connections may go on after the end has been asked for
	TerminationGracePeriod uint32        // seconds; gives TerminationDeadline where that is not set

	MaxInFlight       uint32
	MaxInFlightPerPod uint32
	BufferLimitBytes  uint64

	XDSInitialVersionsBytes uint64
	XDSOnDemandTimeout      time.Duration
	XDSCacheDir             string
	XDSMaxMessageBytes      uint64

	DNSUpstream     DNSUpstream
	DNSResolvConf   string
	DNSCacheEntries uint32 // 0: no cache
	DNSCacheBytes   uint64
	DNSStale        time.Duration
	DNSUDPBytes     uint16
	DNSTimeout      time.Duration
	DNSSearch       []string
	DNSAAAA         DNSAAAA

	Metadata     map[string]string          // ISTIO_META_ and proxyMetadata: of the node, sent to the control plane
	MetadataJSON map[string]json.RawMessage // ISTIO_METAJSON_

	File string // the YAML file that was read; "" if none was
	Pods []Pod  // of the file only

	origins map[string]Origin // by key
	texts   map[string]string // values as they were written, by key
}

// A Pod is one network namespace to serve and the workload that lives in it.
type Pod struct {
	Netns          string // absolute path, such as /run/netns/web or /proc/4711/ns/net
	UID            string // of the workload in the mesh state; "": found by the names
	Name           string
	Namespace      string
	ServiceAccount string
}

// defaultServiceAccount is that of Kubernetes for pods that name none.
const defaultServiceAccount = "default"

// LogJSON is the format of LOG_FORMAT=json.
const LogJSON = telemetry.JSON
