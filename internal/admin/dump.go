package admin

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"net/http"
	"strings"
	"time"

	"ztun.dev/ztun/internal/telemetry"
	"ztun.dev/ztun/internal/workload"
)

// A Dumper says what there is to see. Its methods are called for each request, from any goroutine; what they return is read only.
type Dumper interface {
	State() *workload.Snapshot
	Static() *workload.Snapshot // of it, what came from a local file; nil: nothing
	Certificates() []Certificate
	Pods() []Pod // nil: this is not a node, there is one workload
	Settings() []Setting
}

// A Certificate is what is held for an identity.
type Certificate struct {
	Identity workload.Identity
	State    string              // Initializing, Available, or Unavailable: <error>
	Chain    []*x509.Certificate // leaf first
	Roots    []*x509.Certificate // that its peers have to come from
}

// A Pod is a workload that this node serves, or will.
type Pod struct {
	UID                             string // as whoever announced it calls it
	Name, Namespace, ServiceAccount string
	Pending                         string // why it is not served; "": it is
	Capture                         string // the backend
	CaptureReason                   string // why that one
	Offload                         string // how its flows are given back to the kernel, or off

	Connections []*telemetry.Conn // that are open
}

// A Setting is a value of the configuration, secrets masked.
type Setting struct {
	Key      string `json:"key"`
	Variable string `json:"variable,omitempty"`
	Value    string `json:"value"`
	Origin   string `json:"origin"`
}

// A dump is the whole of /config_dump.
type dump struct {
	workload.Dump
	StagedServices struct{}            `json:"stagedServices"`
	StaticConfig   workload.Dump       `json:"staticConfig"`
	Version        versionJSON         `json:"version"`
	Config         configJSON          `json:"config"`
	Certificates   []certificateJSON   `json:"certificates"`
	WorkloadState  map[string]*podJSON `json:"workloadState,omitzero"`
}

type versionJSON struct {
	Version        string `json:"version"`
	GitRevision    string `json:"gitRevision"`
	GoVersion      string `json:"goVersion"`
	BuildProfile   string `json:"buildProfile"`
	BuildStatus    string `json:"buildStatus"`
	IstioVersion   string `json:"istioVersion"`
	CryptoProvider string `json:"cryptoProvider"`
	Implementation string `json:"implementation"`
}

func (s *Server) configDump(w http.ResponseWriter, _ *http.Request) {
	state, static := s.cfg.Dumper.State(), s.cfg.Dumper.Static()
	writeJSON(w, &dump{
		Dump:          workload.NewDump(state),
		StaticConfig:  workload.NewDump(static),
		Version:       s.cfg.Build.dump(),
		Config:        s.config(),
		Certificates:  s.certificates(),
		WorkloadState: s.pods(),
	})
}

func (b *Build) dump() versionJSON {
	status := "Clean"
	if b.Modified {
		status = "Modified"
	}
	return versionJSON{b.Version, b.Revision, b.Go, "release", status, b.IstioVersion, "go", "ztun"}
}

// A configJSON has what ztunnel's tools read, and all settings.
type configJSON struct {
	Proxy                   bool           `json:"proxy"`
	DNSProxy                bool           `json:"dnsProxy"`
	AdminAddr               map[string]any `json:"adminAddr"`
	StatsAddr               map[string]any `json:"statsAddr"`
	ReadinessAddr           map[string]any `json:"readinessAddr"`
	ProxyMode               string         `json:"proxyMode"`
	SelfTerminationDeadline durationJSON   `json:"selfTerminationDeadline"`
	Settings                []Setting      `json:"settings"`
}

type durationJSON struct {
	Secs  int64 `json:"secs"`
	Nanos int64 `json:"nanos"`
}

func (s *Server) config() configJSON {
	values := make(map[string]string)
	settings := s.settings()
	for _, x := range settings {
		values[x.Key] = x.Value
	}
	mode := values["proxyMode"]
	if mode != "" {
		mode = strings.ToUpper(mode[:1]) + mode[1:]
	}
	d, _ := time.ParseDuration(values["connectionTerminationDeadline"]) // was read before
	port := func(p, standard int) int {
		if p == 0 {
			return standard
		}
		return p
	}
	wildcard := func(p int) map[string]any { return map[string]any{"SocketAddr": hosts(p, p, "::")[0]} }
	return configJSON{
		Proxy:                   values["enableProxy"] == "true",
		DNSProxy:                strings.EqualFold(values["dnsCapture"], "true"),
		AdminAddr:               map[string]any{"Localhost": []any{true, port(s.cfg.Ports.Admin, 15000)}},
		StatsAddr:               wildcard(port(s.cfg.Ports.Stats, 15020)),
		ReadinessAddr:           wildcard(port(s.cfg.Ports.Ready, 15021)),
		ProxyMode:               mode,
		SelfTerminationDeadline: durationJSON{int64(d / time.Second), int64(d % time.Second)},
		Settings:                settings,
	}
}

func (s *Server) settings() []Setting {
	list := s.cfg.Dumper.Settings()
	if list == nil {
		return []Setting{}
	}
	return list
}

type certificateJSON struct {
	Identity  string     `json:"identity"`
	State     string     `json:"state"`
	CertChain []x509JSON `json:"certChain"`
	RootCerts []x509JSON `json:"rootCerts"`
}

type x509JSON struct {
	PEM            string    `json:"pem"` // in base64 once more
	SerialNumber   string    `json:"serialNumber"`
	ValidFrom      time.Time `json:"validFrom"`
	ExpirationTime time.Time `json:"expirationTime"`
}

func (s *Server) certificates() []certificateJSON {
	var list []certificateJSON
	for _, c := range s.cfg.Dumper.Certificates() {
		list = append(list, certificateJSON{c.Identity.String(), c.State, chain(c.Chain), chain(c.Roots)})
	}
	return sortedBy(list, func(c certificateJSON) string { return c.Identity })
}

func chain(certs []*x509.Certificate) []x509JSON {
	list := make([]x509JSON, 0, len(certs))
	for _, c := range certs {
		text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
		list = append(list, x509JSON{base64.StdEncoding.EncodeToString(text), c.SerialNumber.String(), c.NotBefore.UTC(), c.NotAfter.UTC()})
	}
	return list
}

type podJSON struct {
	State         string           `json:"state"`
	Info          podInfoJSON      `json:"info"`
	Reason        string           `json:"reason,omitempty"`
	Capture       string           `json:"capture,omitempty"`
	CaptureReason string           `json:"captureReason,omitempty"`
	Offload       string           `json:"offload,omitempty"`
	Connections   *connectionsJSON `json:"connections,omitempty"`
}

type podInfoJSON struct {
	Name           string `json:"name"`
	Namespace      string `json:"namespace"`
	ServiceAccount string `json:"serviceAccount"`
}

type connectionsJSON struct {
	Inbound  []connectionJSON `json:"inbound"`
	Outbound []connectionJSON `json:"outbound"`
}

type connectionJSON struct {
	Src         string  `json:"src"`
	OriginalDst *string `json:"originalDst"` // inbound: the service that the peer has named, or null
	ActualDst   string  `json:"actualDst"`
	Protocol    string  `json:"protocol"`
}

// pods are the pods by their UID, each with its connections.
func (s *Server) pods() map[string]*podJSON {
	list := s.cfg.Dumper.Pods()
	if list == nil {
		return nil
	}
	all := make(map[string]*podJSON, len(list))
	for _, p := range list {
		j := &podJSON{State: "Up", Info: podInfoJSON{p.Name, p.Namespace, p.ServiceAccount}, Reason: p.Pending, Capture: p.Capture, CaptureReason: p.CaptureReason, Offload: p.Offload}
		if p.Pending != "" {
			j.State = "Pending"
		} else {
			j.Connections = connections(p.Connections)
		}
		all[p.UID] = j
	}
	return all
}

func connections(list []*telemetry.Conn) *connectionsJSON {
	j := new(connectionsJSON)
	for _, c := range list {
		if c.Direction == telemetry.Inbound {
			j.Inbound = append(j.Inbound, inbound(c))
		} else {
			dst := c.OriginalDst.String()
			j.Outbound = append(j.Outbound, connectionJSON{c.Src.String(), &dst, c.Dst.String(), c.Protocol.String()})
		}
	}
	bySource := func(c connectionJSON) string { return c.Src }
	j.Inbound, j.Outbound = sortedBy(j.Inbound, bySource), sortedBy(j.Outbound, bySource)
	return j
}

// inbound is HBONE if the peer has proved who it is.
func inbound(c *telemetry.Conn) connectionJSON {
	j := connectionJSON{Src: c.Src.String(), ActualDst: c.AppDst.String(), Protocol: telemetry.TCP.String()}
	if c.ForwardedHost != "" {
		j.OriginalDst = &c.ForwardedHost
	}
	if !c.SrcIdentity.IsZero() {
		j.Protocol = telemetry.HBONE.String()
	}
	return j
}

// A Connection is a line of /debug/conns. Its JSON form is stable: keys only get added.
type Connection struct {
	ID          uint64             `json:"id"` // the flow_id of the access log
	Direction   string             `json:"direction"`
	State       string             `json:"state"` // of both legs: telemetry.State
	Pod         string             `json:"pod"`   // of this node, namespace/name
	Protocol    string             `json:"protocol"`
	Src         string             `json:"src"`
	Dst         string             `json:"dst"`
	OriginalDst string             `json:"originalDst"`
	AppDst      string             `json:"appDst,omitempty"`
	HBONEAddr   string             `json:"hboneAddr,omitempty"`
	Service     string             `json:"service,omitempty"`
	SrcWorkload string             `json:"srcWorkload,omitempty"` // namespace/name
	DstWorkload string             `json:"dstWorkload,omitempty"`
	SrcIdentity string             `json:"srcIdentity,omitempty"`
	DstIdentity string             `json:"dstIdentity,omitempty"`
	Tunnel      string             `json:"tunnel,omitempty"`  // this node's end
	Carried     string             `json:"carried,omitempty"` // "kernel": the bytes do not pass through this process
	TraceID     string             `json:"traceId,omitempty"`
	Policy      string             `json:"policy,omitempty"` // that allowed it
	AgeSeconds  float64            `json:"ageSeconds"`
	IdleSeconds float64            `json:"idleSeconds"`
	Received    uint64             `json:"receivedBytes"` // from the side that opened it
	Sent        uint64             `json:"sentBytes"`     // to it
	Buffered    int64              `json:"bufferedBytes"` // read of one side and not taken by the other
	SetUp       map[string]float64 `json:"setUpSeconds"`  // by step; steps that took no time are left out
}

// conns are the open connections, the oldest first.
func (s *Server) conns() []Connection {
	list, now := []Connection{}, s.cfg.Now()
	s.cfg.Records.Each(func(c *telemetry.Conn) {
		x := c.Status(now)
		j := Connection{
			ID: c.ID, Direction: c.Direction.String(), State: x.State.String(), Pod: named(c.Source), Protocol: c.Protocol.String(), Src: addr(c.Src), Dst: addr(c.Dst), OriginalDst: addr(c.OriginalDst),
			AppDst: addr(c.AppDst), HBONEAddr: c.HBONEAddr, Service: c.Service, SrcWorkload: named(c.Source), DstWorkload: named(c.Destination),
			SrcIdentity: c.SrcIdentity.String(), DstIdentity: c.DstIdentity.String(), Tunnel: addr(x.Tunnel), TraceID: c.TraceID, Policy: x.Policy,
			AgeSeconds: c.Duration(now).Seconds(), IdleSeconds: x.Idle.Seconds(), Received: c.Received.Load(), Sent: c.Sent.Load(), Buffered: x.Buffered,
			SetUp: make(map[string]float64),
		}
		if c.Kernel() {
			j.Carried = "kernel"
		}
		if c.Direction == telemetry.Inbound {
			j.Pod = named(c.Destination)
		}
		for i, d := range x.Steps {
			if d > 0 {
				j.SetUp[telemetry.Step(i).String()] = d.Seconds()
			}
		}
		list = append(list, j)
	})
	sortByID(list)
	return list
}
