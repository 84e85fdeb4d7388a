package config

import (
	"math"
	"strings"
	"unicode"
)

// A Setting describes one setting.
type Setting struct {
	Variable string // environment
	Key      string // YAML file
	Flag     string // command line, without the dashes
	Type     string
	Default  string // as it would be written
	Meaning  string
}

// Settings lists every setting, in the order of the reference.
func Settings() []Setting {
	var c Config
	list := make([]Setting, 0, len(settings))
	for _, s := range settings {
		list = append(list, Setting{s.variable, s.key, s.flag(), s.bind(&c).kind(), s.def, s.meaning})
	}
	return list
}

// A setting is one row of the table. The default is read by the same code as any other value.
type setting struct {
	variable string
	key      string
	def      string
	meaning  string
	bind     func(*Config) value
	stronger string // a variable that wins over the other one
}

// flag is the key in the form of flags: localXdsPath is --local-xds-path.
func (s *setting) flag() string {
	var b strings.Builder
	for _, r := range s.key {
		if unicode.IsUpper(r) {
			b.WriteByte('-')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// Limits of RFC 9113: a window is at most 2^31-1 bytes (section 6.9.1), that of a connection starts at 65535 and cannot be made smaller
// (6.9.2), a frame may be limited to 2^14 to 2^24-1 bytes (6.5.2).
const (
	maxWindow           = math.MaxInt32
	minConnectionWindow = 65535
	minFrame            = 1 << 14
	maxFrame            = 1<<24 - 1
)

// settings is the only list. Names without ZTUN_ and their defaults are ztunnel's, except for those of keepalive, which find a dead peer
// within 90 s instead of half an hour.
var settings = []setting{
	{"NODE_NAME", "nodeName", "", "name of this node: its workloads are looked for there", func(c *Config) value { return str(&c.NodeName) }, ""},
	{"NETWORK", "network", "", "network that this node is in", func(c *Config) value { return str(&c.Network) }, ""},
	{"CLUSTER_ID", "clusterId", "Kubernetes", "name of the cluster", func(c *Config) value { return str(&c.ClusterID) }, "ISTIO_META_CLUSTER_ID"},
	{"CLUSTER_DOMAIN", "clusterDomain", "cluster.local", "suffix of the names of services", func(c *Config) value { return (*domainValue)(&c.ClusterDomain) }, ""},
	{"TRUST_DOMAIN", "trustDomain", "cluster.local", "trust domain of this process's own identity", func(c *Config) value { return str(&c.TrustDomain) }, ""},
	{"PREFERED_SERVICE_NAMESPACE", "preferedServiceNamespace", "", "namespace whose services win in DNS where no other rule decides", func(c *Config) value { return str(&c.PreferredServiceNamespace) }, ""},
	{"IPV6_ENABLED", "ipv6Enabled", "true", "serve IPv6 and answer AAAA", func(c *Config) value { return (*boolValue)(&c.IPv6Enabled) }, ""},

	{"LOCAL_XDS_PATH", "localXdsPath", "", "YAML file with the state of the mesh", func(c *Config) value { return str(&c.LocalXDSPath) }, ""},
	{"LOCAL_XDS", "localXds", "", "state of the mesh as YAML text, instead of a file", func(c *Config) value { return str(&c.LocalXDS) }, ""},

	{"FAKE_CA", "fakeCa", "false", "sign certificates in this process, for trials", func(c *Config) value { return (*boolValue)(&c.FakeCA) }, ""},
	{"ZTUN_FAKE_CA_ROOT", "fakeCaRoot", "", "PEM file with certificate and key of the root that processes with a fake CA share", func(c *Config) value { return str(&c.FakeCARoot) }, ""},

	{"ZTUN_HANDOVER_SOCKET", "handoverSocket", "/var/run/ztunnel/ztun.sock", "unix socket on which a successor takes over; state that must outlive the process is kept beside it", func(c *Config) value { return str(&c.HandoverSocket) }, ""},
	{"ZTUNNEL_WORKER_THREADS", "workerThreads", "auto", "threads that move bytes: a number, 0 = one per core, N% of the cores, auto = a quarter of the cores, at least 2", func(c *Config) value { return (*threadsValue)(&c.WorkerThreads) }, ""},

	{"LOG_FORMAT", "logFormat", "plain", "json, or anything else for plain lines", func(c *Config) value { return (*formatValue)(&c.LogFormat) }, ""},
	{"RUST_LOG", "rustLog", "info", "what is logged: off, error, warn, info, debug or trace, also per target (info,access=debug)", func(c *Config) value { return &c.LogFilter }, ""},

	{"POOL_MAX_STREAMS_PER_CONNECTION", "poolMaxStreamsPerConnection", "100", "HBONE streams on one connection", func(c *Config) value { return uint16In(&c.PoolMaxStreams, 1) }, ""},
	{"POOL_UNUSED_RELEASE_TIMEOUT", "poolUnusedReleaseTimeout", "5m", "idle time after which an HBONE connection is closed", func(c *Config) value { return (*durationValue)(&c.PoolUnusedRelease) }, ""},
	{"HTTP2_STREAM_WINDOW_SIZE", "http2StreamWindowSize", "4MiB", "receive window of a stream", func(c *Config) value { return size(&c.HTTP2StreamWindowBytes, 1, maxWindow) }, ""},
	{"HTTP2_CONNECTION_WINDOW_SIZE", "http2ConnectionWindowSize", "16MiB", "receive window of a connection", func(c *Config) value { return size(&c.HTTP2ConnectionWindowBytes, minConnectionWindow, maxWindow) }, ""},
	{"HTTP2_FRAME_SIZE", "http2FrameSize", "1MiB", "largest frame that a peer may send", func(c *Config) value { return size(&c.HTTP2FrameBytes, minFrame, maxFrame) }, ""},

	{"KEEPALIVE_TIME", "keepaliveTime", "45s", "idle time before the first TCP keepalive", func(c *Config) value { return positive(&c.KeepaliveTime) }, ""},
	{"KEEPALIVE_INTERVAL", "keepaliveInterval", "15s", "time between TCP keepalives", func(c *Config) value { return positive(&c.KeepaliveInterval) }, ""},
	{"KEEPALIVE_RETRIES", "keepaliveRetries", "3", "unanswered TCP keepalives after which the peer is dead", func(c *Config) value { return uint32In(&c.KeepaliveRetries, 1, maxKeepaliveRetries) }, ""},

	{"ZTUN_CONNECT_TIMEOUT", "connectTimeout", "10s", "limit of a TCP connect", func(c *Config) value { return positive(&c.ConnectTimeout) }, ""},
	{"ZTUN_HANDSHAKE_TIMEOUT", "handshakeTimeout", "10s", "limit of TLS and HTTP/2 set-up together", func(c *Config) value { return positive(&c.HandshakeTimeout) }, ""},
	{"ZTUN_RESPONSE_TIMEOUT", "responseTimeout", "20s", "limit of the answer to a CONNECT", func(c *Config) value { return positive(&c.ResponseTimeout) }, ""},

	{"ZTUN_MAX_IN_FLIGHT", "maxInFlight", "8192", "unanswered SYNs of the process", func(c *Config) value { return uint32In(&c.MaxInFlight, 1, math.MaxInt32) }, ""},
	{"ZTUN_MAX_IN_FLIGHT_PER_POD", "maxInFlightPerPod", "2048", "unanswered SYNs of one pod", func(c *Config) value { return uint32In(&c.MaxInFlightPerPod, 1, math.MaxInt32) }, ""},
}

// maxKeepaliveRetries is the kernel's (MAX_TCP_KEEPCNT, include/net/tcp.h).
const maxKeepaliveRetries = 127

const (
	fileVariable = "ZTUN_CONFIG"        // names the file, so it cannot stand in it
	testVariable = "ZTUN_REQUIRE_NETNS" // of the test suite, whose processes inherit it
)
