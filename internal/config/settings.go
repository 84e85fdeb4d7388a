package config

import (
	"math"
	"strings"
	"unicode"

	"ztun.dev/ztun/internal/telemetry"
)

// A Setting describes one setting.
type Setting struct {
	Variable string // environment; "": none
	Key      string // YAML file
	Flag     string // command line, without the dashes; "": none, as for secrets, which others could see there
	Type     string
	Default  string // as it would be written
	Meaning  string
	Secret   bool
	Unused   bool // it is read and checked, and has no effect yet
}

// Name is how messages call the setting.
func (s *Setting) Name() string {
	if s.Variable != "" {
		return s.Variable
	}
	return s.Key
}

// Settings lists every setting, in the order of the reference.
func Settings() []Setting {
	var c Config
	list := make([]Setting, 0, len(settings))
	for i := range settings {
		s := &settings[i]
		list = append(list, Setting{
			Variable: s.variable, Key: s.key, Flag: s.flag(), Type: s.bind(&c).kind(), Default: s.def, Meaning: s.meaning,
			Secret: s.is&secret != 0, Unused: s.is&unused != 0,
		})
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
	is       property
	stronger string // a variable that wins over the other one
}

// A property of a setting.
type property uint8

const (
	secret property = 1 << iota // never shown
	unused                      // it has no effect yet
)

// flag is the key in the form of flags: localXdsPath is --local-xds-path.
func (s *setting) flag() string {
	if s.is&secret != 0 {
		return ""
	}
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

// DNS over UDP: no message of a client that does not ask for more is longer than 512 bytes (RFC 1035, section 4.2.1).
const minDNSUDP = 512

// maxKeepaliveRetries is the kernel's (MAX_TCP_KEEPCNT, include/net/tcp.h).
const maxKeepaliveRetries = 127

const (
	fileVariable        = "ZTUN_CONFIG"        // names the file, so it cannot stand in it
	testVariable        = "ZTUN_REQUIRE_NETNS" // of the test suite, whose processes inherit it
	proxyConfigVariable = "PROXY_CONFIG"       // many settings in one
	metadataPrefix      = "ISTIO_META_"
	metadataJSONPrefix  = "ISTIO_METAJSON_"
)

// headers are sets of variables with a common prefix, whose rest is a name.
var headers = []struct {
	prefix, meaning string
	bind            func(*Config) *map[string]string
}{
	{"XDS_HEADER_", "gRPC metadata for the control plane", func(c *Config) *map[string]string { return &c.XDSHeaders }},
	{"CA_HEADER_", "gRPC metadata for the certificate authority", func(c *Config) *map[string]string { return &c.CAHeaders }},
}

// settings is the only list. Names without ZTUN_ and their defaults are ztunnel's, except for those of keepalive, which find a dead peer
// within 90 s instead of half an hour, and for the addresses of control plane and certificate authority, which cannot be used yet.
var settings = []setting{
	{"PROXY_MODE", "proxyMode", "shared", "shared: the pods of a node; dedicated: the network namespace of this process", func(c *Config) value { return choice(&c.ProxyMode, proxyModes) }, 0, ""},
	{"PROXY_WORKLOAD_INFO", "proxyWorkloadInfo", "", "dedicated mode: the workload, namespace/name/service-account", func(c *Config) value { return (*infoValue)(&c.ProxyWorkloadInfo) }, unused, ""},
	{"ENABLE_PROXY", "enableProxy", "true", "serve TCP", func(c *Config) value { return boolean(&c.EnableProxy) }, 0, ""},
	{"ISTIO_META_DNS_CAPTURE", "dnsCapture", "true", "answer the DNS questions of pods; anything but true switches it off", func(c *Config) value { return (*lenientBool)(&c.DNSCapture) }, unused, ""},
	{"ISTIO_META_DNS_PROXY_ADDR", "dnsProxyAddr", "localhost:15053", "where the redirect backend listens for DNS: localhost:PORT is both loopback addresses", func(c *Config) value { return (*listenValue)(&c.DNSProxyAddr) }, unused, ""},
	{"INPOD_UDS", "inpodUds", "/var/run/ztunnel/ztunnel.sock", "unix socket on which istio-cni announces pods", func(c *Config) value { return str(&c.InpodUDS) }, unused, ""},
	{"INPOD_PORT_REUSE", "inpodPortReuse", "true", "SO_REUSEPORT on listeners in pods", func(c *Config) value { return boolean(&c.InpodPortReuse) }, unused, ""},
	{"PACKET_MARK", "packetMark", "", "SO_MARK of sockets of this process, decimal; not set: 1337 in shared mode", func(c *Config) value { return (*markValue)(&c.PacketMark) }, unused, ""},
	{"ENABLE_ORIG_SRC", "enableOrigSrc", "auto", "deliver from the address of the client: true and auto: a pod where that cannot be is not served; false: from the pod's own", func(c *Config) value { return choice(&c.EnableOrigSrc, origSrcs) }, 0, ""},

	{"NODE_NAME", "nodeName", "", "name of this node: its workloads are looked for there", func(c *Config) value { return str(&c.NodeName) }, 0, ""},
	{"NETWORK", "network", "", "network that this node is in", func(c *Config) value { return str(&c.Network) }, 0, ""},
	{"CLUSTER_ID", "clusterId", "Kubernetes", "name of the cluster", func(c *Config) value { return str(&c.ClusterID) }, 0, "ISTIO_META_CLUSTER_ID"},
	{"CLUSTER_DOMAIN", "clusterDomain", "cluster.local", "suffix of the names of services", func(c *Config) value { return (*domainValue)(&c.ClusterDomain) }, 0, ""},
	{"TRUST_DOMAIN", "trustDomain", "cluster.local", "trust domain of this process's own identity", func(c *Config) value { return str(&c.TrustDomain) }, 0, ""},
	{"PREFERED_SERVICE_NAMESPACE", "preferedServiceNamespace", "", "namespace whose services win in DNS where no other rule decides", func(c *Config) value { return str(&c.PreferredServiceNamespace) }, 0, ""},
	{"IPV6_ENABLED", "ipv6Enabled", "true", "serve IPv6 and answer AAAA", func(c *Config) value { return boolean(&c.IPv6Enabled) }, 0, ""},
	{"POD_NAME", "podName", "", "name of the pod that this process runs in", func(c *Config) value { return str(&c.PodName) }, unused, ""},
	{"POD_NAMESPACE", "podNamespace", "", "namespace of the pod that this process runs in", func(c *Config) value { return str(&c.PodNamespace) }, unused, ""},
	{"SERVICE_ACCOUNT", "serviceAccount", "", "service account of the pod that this process runs in", func(c *Config) value { return str(&c.ServiceAccount) }, unused, ""},
	{"INSTANCE_IP", "instanceIp", "", "address of the pod that this process runs in", func(c *Config) value { return str(&c.InstanceIP) }, unused, ""},
	{"ISTIO_META_ISTIO_VERSION", "istioVersion", "unknown", "version of Istio that metrics and the dump name", func(c *Config) value { return str(&c.IstioVersion) }, 0, ""},

	{"LOCAL_XDS_PATH", "localXdsPath", "", "YAML file with the state of the mesh", func(c *Config) value { return str(&c.LocalXDSPath) }, 0, ""},
	{"LOCAL_XDS", "localXds", "", "state of the mesh as YAML text, instead of a file", func(c *Config) value { return str(&c.LocalXDS) }, 0, ""},
	{"XDS_ADDRESS", "xdsAddress", "", "URI of the control plane; empty: none. It cannot be used yet", func(c *Config) value { return str(&c.XDSAddress) }, 0, ""},
	{"XDS_ROOT_CA", "xdsRootCa", "./var/run/secrets/istio/root-cert.pem", "roots of the control plane: path, PEM text, or SYSTEM for those of the operating system", func(c *Config) value { return (*rootsValue)(&c.XDSRootCA) }, unused, ""},
	{"ALT_XDS_HOSTNAME", "altXdsHostname", "", "second name that the control plane's certificate may have", func(c *Config) value { return str(&c.AltXDSHost) }, unused, ""},
	{"XDS_ON_DEMAND", "xdsOnDemand", "false", "ask the control plane for what is needed only; not together with DNS", func(c *Config) value { return boolean(&c.XDSOnDemand) }, unused, ""},

	{"FAKE_CA", "fakeCa", "false", "sign certificates in this process, for trials", func(c *Config) value { return boolean(&c.FakeCA) }, 0, ""},
	{"ZTUN_FAKE_CA_ROOT", "fakeCaRoot", "", "PEM file with certificate and key of the root that processes with a fake CA share", func(c *Config) value { return str(&c.FakeCARoot) }, 0, ""},
	{"CA_ADDRESS", "caAddress", "", "URI of the certificate authority, without FAKE_CA. It cannot be used yet", func(c *Config) value { return str(&c.CAAddress) }, 0, ""},
	{"CA_ROOT_CA", "caRootCa", "./var/run/secrets/istio/root-cert.pem", "roots of the certificate authority, as XDS_ROOT_CA", func(c *Config) value { return (*rootsValue)(&c.CARootCA) }, unused, ""},
	{"ALT_CA_HOSTNAME", "altCaHostname", "", "second name that the certificate authority's certificate may have", func(c *Config) value { return str(&c.AltCAHost) }, unused, ""},
	{"AUTH_TOKEN", "authToken", "./var/run/secrets/tokens/istio-token", "bearer token for control plane and certificate authority, or the path of a file with it", func(c *Config) value { return str(&c.AuthToken) }, secret | unused, ""},
	{"SECRET_TTL", "secretTtl", "24h", "life that is asked for certificates", func(c *Config) value { return positive(&c.SecretTTL) }, unused, ""},

	{"CRL_PATH", "crlPath", "", "PEM file with revocation lists. It cannot be used yet", func(c *Config) value { return str(&c.CRLPath) }, 0, ""},
	{"ZTUN_CRL_MODE", "crlMode", "allow-unknown", "what happens where no current revocation list is there", func(c *Config) value { return choice(&c.CRLMode, crlModes) }, unused, ""},
	{"ZTUN_CERT_METRICS", "certMetrics", "identity", "labels of metrics of certificates: identity or none (aggregate)", func(c *Config) value { return choice(&c.CertMetrics, certMetrics) }, unused, ""},
	{"ZTUN_TRUST_MOUNTED_ROOTS", "trustMountedRoots", "false", "trust the mounted root certificates beside those that came with a certificate", func(c *Config) value { return boolean(&c.TrustMountedRoot) }, unused, ""},
	{"ZTUN_TLS_KEYLOG", "tlsKeylog", "", "file that gets the keys of TLS connections, for debugging: who has them can read all traffic", func(c *Config) value { return str(&c.TLSKeylog) }, unused, ""},
	{"TLS12_ENABLED", "tls12Enabled", "false", "accept TLS 1.2 between nodes", func(c *Config) value { return boolean(&c.TLS12Enabled) }, unused, ""},
	{"COMPLIANCE_POLICY", "compliancePolicy", "", "pqc: post-quantum key exchange only. It cannot be used yet; other values mean nothing", func(c *Config) value { return str(&c.CompliancePolicy) }, 0, ""},

	{"ZTUN_CAPTURE", "capture", "auto", "how traffic of pods is led here: tun, redirect, or auto: tun where it can be set up, else redirect", func(c *Config) value { return choice(&c.Capture, captures) }, 0, ""},
	{"ZTUN_FAIL_MODE", "failMode", "closed", "traffic while this process is dead: closed: none; open: in clear, on hosts only", func(c *Config) value { return choice(&c.FailMode, failModes) }, 0, ""},
	{"ZTUN_HOST_CAPTURE", "hostCapture", "mesh", "what a host captures: mesh, or prefixes", func(c *Config) value { return (*prefixesValue)(&c.HostCapture) }, unused, ""},
	{"ZTUN_OFFLOAD", "offload", "auto", "how flows that need no byte in user space are given back to the kernel, and others accepted by it: sockops, or tc: without the root of cgroup v2; auto: the first of these that works, else off; nft is for trials, see Ports, marks, rules in the README; off: all bytes pass through the netstack", func(c *Config) value { return choice(&c.Offload, offloads) }, 0, ""},
	{"ZTUN_CONNECT_CACHE", "connectCache", "0", "how long a pod's further connections to an address and port outside the mesh go there without being decided about one by one, until the state changes; 0: each is; takes sockops", func(c *Config) value { return (*durationValue)(&c.ConnectCache) }, 0, ""},
	{"ZTUN_TUN_GSO", "tunGso", "auto", "segmentation offload on TUN devices; on: a pod fails without it", func(c *Config) value { return choice(&c.TUNGSO, switches) }, unused, ""},
	{"ZTUN_HANDOVER_SOCKET", "handoverSocket", "/var/run/ztunnel/ztun.sock", "path beside which state that must outlive the process is kept (`ztun-state`); a handover to a successor on a socket there is not built yet", func(c *Config) value { return str(&c.HandoverSocket) }, 0, ""},
	{"ZTUN_UNKNOWN_POLICY", "unknownPolicy", "deny", "connections while a policy that selects their workload has not arrived: deny after a second, or allow with a warning", func(c *Config) value { return choice(&c.UnknownPolicy, unknownPolicies) }, 0, ""},
	{"ZTUN_INVALID_POLICY", "invalidPolicy", "deny", "policies that cannot be read and never could: deny what they select, or skip them", func(c *Config) value { return choice(&c.InvalidPolicy, invalidPolicies) }, unused, ""},
	{"ZTUN_READY_IGNORE_PENDING_AFTER", "readyIgnorePendingAfter", "30s", "time after which pods that are still pending no longer keep the node from being ready; 0: never", func(c *Config) value { return (*durationValue)(&c.ReadyIgnorePending) }, 0, ""},
	{"ZTUN_REMOVED_POD_GRACE", "removedPodGrace", "5s", "time for connections of a pod that leaves the mesh and lives on", func(c *Config) value { return (*durationValue)(&c.RemovedPodGrace) }, unused, ""},
	{"ZTUNNEL_WORKER_THREADS", "workerThreads", "auto", "threads that move bytes: a number, 0 = one per core, N% of the cores, auto = a quarter of the cores, at least 2", func(c *Config) value { return (*threadsValue)(&c.WorkerThreads) }, 0, ""},
	{"ZTUNNEL_CPU_LIMIT", "cpuLimit", "", "cores that count for worker threads, if ZTUNNEL_RESOURCE_CPU_LIMIT is not set: a whole number", func(c *Config) value { return coresValue{&c.WorkerThreads.limit, false} }, 0, ""},
	{"ZTUNNEL_RESOURCE_CPU_LIMIT", "resourceCpuLimit", "", "CPU limit of the container, such as 2, 1.5 or 500m: the number of worker threads with auto", func(c *Config) value { return coresValue{&c.WorkerThreads.resourceLimit, true} }, 0, ""},
	{"ZTUNNEL_RESOURCE_CPU_REQUEST", "resourceCpuRequest", "", "CPU request of the container: worker threads with auto are not fewer", func(c *Config) value { return coresValue{&c.WorkerThreads.request, true} }, 0, ""},

	{"", "proxyAdminPort", "15000", "port of the admin endpoint, on loopback addresses", func(c *Config) value { return uint16In(&c.AdminPort, 1) }, 0, ""},
	{"", "statsPort", "15020", "port of the metrics", func(c *Config) value { return uint16In(&c.StatsPort, 1) }, 0, ""},
	{"LOG_FORMAT", "logFormat", "plain", "json, or anything else for plain lines", func(c *Config) value { return (*formatValue)(&c.LogFormat) }, 0, ""},
	{"RUST_LOG", "rustLog", "info", "what is logged: off, error, warn, info, debug or trace, also per target (info,access=debug)", func(c *Config) value { return (*filterValue)(&c.LogFilter) }, 0, ""},
	{"AUTHZ_POLICY_INFO_LOGGING", "authzPolicyInfoLogging", "false", "log decisions of policies at info instead of debug; only true switches it on", func(c *Config) value { return (*lenientBool)(&c.AuthzPolicyInfoLogging) }, 0, ""},
	{"ZTUN_METRICS_DROP_LABELS", "metricsDropLabels", "", "labels of the traffic metrics to leave out, or ends of several: revision, version, region, zone, principal", func(c *Config) value { return (*labelsValue)(&c.MetricsDropLabels) }, 0, ""},
	{"ZTUN_ACCESS_LOG_FIELDS", "accessLogFields", "", "fields to add to lines of the access log: response_flags, trace_id, flow_id, tunnel.local_addr, policy", func(c *Config) value { return wordsValue{&c.AccessLogFields, telemetry.AccessFields()} }, 0, ""},

	{"POOL_MAX_STREAMS_PER_CONNECTION", "poolMaxStreamsPerConnection", "100", "HBONE streams on one connection", func(c *Config) value { return uint16In(&c.PoolMaxStreams, 1) }, 0, ""},
	{"POOL_UNUSED_RELEASE_TIMEOUT", "poolUnusedReleaseTimeout", "5m", "idle time after which an HBONE connection is closed", func(c *Config) value { return (*durationValue)(&c.PoolUnusedRelease) }, 0, ""},
	{"HTTP2_STREAM_WINDOW_SIZE", "http2StreamWindowSize", "4MiB", "receive window of a stream", func(c *Config) value { return size(&c.HTTP2StreamWindowBytes, 1, maxWindow) }, 0, ""},
	{"HTTP2_CONNECTION_WINDOW_SIZE", "http2ConnectionWindowSize", "16MiB", "receive window of a connection", func(c *Config) value { return size(&c.HTTP2ConnectionWindowBytes, minConnectionWindow, maxWindow) }, 0, ""},
	{"HTTP2_FRAME_SIZE", "http2FrameSize", "1MiB", "largest frame that a peer may send", func(c *Config) value { return size(&c.HTTP2FrameBytes, minFrame, maxFrame) }, 0, ""},
	{"ZTUN_MAX_CONNECTION_AGE", "maxConnectionAge", "0", "age at which an HBONE connection takes no more streams; 0: when the certificates expire", func(c *Config) value { return (*durationValue)(&c.MaxConnectionAge) }, 0, ""},
	{"LOCALHOST_APP_TUNNEL", "localhostAppTunnel", "true", "application tunnels are on the loopback address of the pod", func(c *Config) value { return boolean(&c.LocalhostAppTunnel) }, 0, ""},
	{"ENABLE_RESPONSE_BAGGAGE", "enableResponseBaggage", "true", "say in responses who answers, and use what clients say of themselves in metrics and logs", func(c *Config) value { return boolean(&c.EnableResponseBaggage) }, 0, ""},
	{"UNSTABLE_ENABLE_SOCKS5", "enableSocks5", "false", "SOCKS5 on 127.0.0.1:15080 of each pod", func(c *Config) value { return boolean(&c.EnableSOCKS5) }, unused, ""},

	{"KEEPALIVE_ENABLED", "keepaliveEnabled", "true", "TCP keepalive on every socket", func(c *Config) value { return boolean(&c.KeepaliveEnabled) }, 0, ""},
	{"KEEPALIVE_TIME", "keepaliveTime", "45s", "idle time before the first TCP keepalive", func(c *Config) value { return positive(&c.KeepaliveTime) }, 0, ""},
	{"KEEPALIVE_INTERVAL", "keepaliveInterval", "15s", "time between TCP keepalives", func(c *Config) value { return positive(&c.KeepaliveInterval) }, 0, ""},
	{"KEEPALIVE_RETRIES", "keepaliveRetries", "3", "unanswered TCP keepalives after which the peer is dead", func(c *Config) value { return uint32In(&c.KeepaliveRetries, 1, maxKeepaliveRetries) }, 0, ""},
	{"USER_TIMEOUT_ENABLED", "userTimeoutEnabled", "true", "a peer that acknowledges nothing for the time of all keepalives is dead", func(c *Config) value { return boolean(&c.UserTimeoutEnabled) }, 0, ""},

	{"ZTUN_CONNECT_TIMEOUT", "connectTimeout", "10s", "limit of a TCP connect", func(c *Config) value { return positive(&c.ConnectTimeout) }, 0, ""},
	{"ZTUN_HANDSHAKE_TIMEOUT", "handshakeTimeout", "10s", "limit of TLS and HTTP/2 set-up together", func(c *Config) value { return positive(&c.HandshakeTimeout) }, 0, ""},
	{"ZTUN_RESPONSE_TIMEOUT", "responseTimeout", "20s", "limit of the answer to a CONNECT", func(c *Config) value { return positive(&c.ResponseTimeout) }, 0, ""},
	{"ZTUN_HALF_CLOSED_TIMEOUT", "halfClosedTimeout", "1h", "half-closed connection without bytes; 0: no limit", func(c *Config) value { return (*durationValue)(&c.HalfClosedTimeout) }, 0, ""},
	{"CONNECTION_TERMINATION_DEADLINE", "connectionTerminationDeadline", "5s", "time for open connections when the process ends", func(c *Config) value { return (*durationValue)(&c.TerminationDeadline) }, 0, ""},
	{"TERMINATION_GRACE_PERIOD_SECONDS", "terminationGracePeriodSeconds", "", "if CONNECTION_TERMINATION_DEADLINE is not set, that is 5 s less than this above 10, else 1 s less, at least 1 s", func(c *Config) value { return secondsValue{&c.TerminationGracePeriod} }, 0, ""},

	{"ZTUN_MAX_IN_FLIGHT", "maxInFlight", "8192", "unanswered SYNs of the process", func(c *Config) value { return uint32In(&c.MaxInFlight, 1, math.MaxInt32) }, 0, ""},
	{"ZTUN_MAX_IN_FLIGHT_PER_POD", "maxInFlightPerPod", "2048", "unanswered SYNs of one pod", func(c *Config) value { return uint32In(&c.MaxInFlightPerPod, 1, math.MaxInt32) }, 0, ""},
	{"ZTUN_BUFFER_LIMIT", "bufferLimit", "256MiB", "bytes of all connections that wait in this process; from half of it on senders are slowed down", func(c *Config) value { return size64(&c.BufferLimitBytes, 1<<20, math.MaxInt64) }, 0, ""},

	{"ZTUN_XDS_INITIAL_VERSIONS_BYTES", "xdsInitialVersionsBytes", "3584KiB", "size of the list of versions that a new control plane connection begins with", func(c *Config) value { return size64(&c.XDSInitialVersionsBytes, 0, math.MaxInt32) }, unused, ""},
	{"ZTUN_XDS_ON_DEMAND_TIMEOUT", "xdsOnDemandTimeout", "2s", "wait for what was asked on demand", func(c *Config) value { return positive(&c.XDSOnDemandTimeout) }, unused, ""},
	{"ZTUN_XDS_CACHE_DIR", "xdsCacheDir", "", "directory for the last state, for starts without a control plane", func(c *Config) value { return str(&c.XDSCacheDir) }, unused, ""},
	{"ZTUN_XDS_MAX_MESSAGE", "xdsMaxMessage", "2048MiB", "largest message of the control plane", func(c *Config) value { return size64(&c.XDSMaxMessageBytes, 1<<20, math.MaxInt64) }, unused, ""},

	{"ZTUN_DNS_UPSTREAM", "dnsUpstream", "original", "who answers what the mesh does not know: the resolver that the application addressed (original), resolvconf, or IP addresses", func(c *Config) value { return (*upstreamValue)(&c.DNSUpstream) }, unused, ""},
	{"ZTUN_DNS_RESOLV_CONF", "dnsResolvConf", "/etc/resolv.conf", "file with the resolvers of resolvconf, and of this process: hostnames of endpoints are asked there", func(c *Config) value { return str(&c.DNSResolvConf) }, 0, ""},
	{"ZTUN_DNS_CACHE_ENTRIES", "dnsCacheEntries", "16384", "answers that are kept; 0: none", func(c *Config) value { return uint32In(&c.DNSCacheEntries, 0, math.MaxInt32) }, unused, ""},
	{"ZTUN_DNS_CACHE_BYTES", "dnsCacheBytes", "32MiB", "size of the answers that are kept", func(c *Config) value { return size64(&c.DNSCacheBytes, 0, math.MaxInt64) }, unused, ""},
	{"ZTUN_DNS_STALE", "dnsStale", "1h", "time for which an expired answer may be given while no resolver answers", func(c *Config) value { return (*durationValue)(&c.DNSStale) }, unused, ""},
	{"ZTUN_DNS_UDP_SIZE", "dnsUdpSize", "1232", "largest answer over UDP, in bytes", func(c *Config) value { return uint16In(&c.DNSUDPBytes, minDNSUDP) }, unused, ""},
	{"ZTUN_DNS_TIMEOUT", "dnsTimeout", "4500ms", "limit of a question to a resolver", func(c *Config) value { return positive(&c.DNSTimeout) }, unused, ""},
	{"ZTUN_DNS_SEARCH", "dnsSearch", "", "further suffixes with which a name may stand for a service", func(c *Config) value { return (*domainsValue)(&c.DNSSearch) }, unused, ""},
	{"ZTUN_DNS_AAAA", "dnsAaaa", "all", "auto: no AAAA for names of services that have IPv4 where the pod has no IPv6", func(c *Config) value { return choice(&c.DNSAAAA, dnsAAAAs) }, unused, ""},
}
