package config

import "time"

// A Config is everything that can be set. Settings says what each field means, in which unit, and what its default is.
type Config struct {
	NodeName                  string
	Network                   string
	ClusterID                 string
	ClusterDomain             string
	TrustDomain               string
	PreferredServiceNamespace string
	IPv6Enabled               bool

	LocalXDSPath string // at most one of the two is set
	LocalXDS     string

	FakeCA     bool
	FakeCARoot string

	HandoverSocket string
	WorkerThreads  Threads

	LogFormat LogFormat
	LogFilter LogFilter

	PoolMaxStreams             uint16
	PoolUnusedRelease          time.Duration
	HTTP2StreamWindowBytes     uint32
	HTTP2ConnectionWindowBytes uint32
	HTTP2FrameBytes            uint32

	KeepaliveTime     time.Duration
	KeepaliveInterval time.Duration
	KeepaliveRetries  uint32

	ConnectTimeout   time.Duration
	HandshakeTimeout time.Duration
	ResponseTimeout  time.Duration

	MaxInFlight       uint32
	MaxInFlightPerPod uint32

	File string // the YAML file that was read; "" if none was
	Pods []Pod  // of the file only

	origins map[string]Origin // by key
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
