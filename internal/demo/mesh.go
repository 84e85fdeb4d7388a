package demo

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"text/template"
)

// The mesh of the demonstration: a shop with a web server that only the service account client may reach.
const (
	namespace   = "shop"
	service     = "web.shop.svc.cluster.local"
	webPort     = 8080
	sinkPort    = 5201 // iperf3's own
	crowdPort   = 5202 // of the sink's own program: for the eight streams
	echoPort    = 5203 // and, in another process, for the round trips beside them
	policy      = "web-only-for-client"
	spiffeStart = "spiffe://cluster.local/ns/" + namespace + "/sa/"
	serviceURL  = "http://" + service + "/"

	// resolvConf is that of the pods. Nobody is at the address: questions have to be answered on their way there.
	resolvConf = "nameserver 10.96.0.10\nsearch shop.svc.cluster.local svc.cluster.local cluster.local\n"
)

// Addresses of the service, which no interface has.
var vips = []netip.Addr{netip.MustParseAddr("10.96.0.80"), netip.MustParseAddr("fd96::80")}

// A role is what a pod does. It is the pod's name and its service account.
type role string

const (
	client   role = "client"
	intruder role = "intruder"
	web      role = "web"
	sink     role = "sink"
)

func (r role) identity() string { return spiffeStart + string(r) }

// roles are the pods by node.
var roles = [2][2]role{{client, intruder}, {web, sink}}

// A member is a pod as the mesh sees it.
type member struct {
	Role  role
	Node  string
	Addrs []netip.Addr // IPv4 first
	Netns string       // path of its network namespace
}

// UID is that of the pod in Kubernetes, where the node agent gets it from the container runtime.
func (m member) UID() string { return "demo-" + string(m.Role) }

// Addresses are those of the pod as a list in YAML.
func (m member) Addresses() string { return yamlList(m.Addrs, "") }

func yamlList(addrs []netip.Addr, prefix string) string {
	quoted := make([]string, len(addrs))
	for i, a := range addrs {
		quoted[i] = fmt.Sprintf("%q", prefix+a.String())
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// meshFile is the state of the mesh in the form of the static local configuration.
func meshFile(members []member) []byte {
	v := vips
	if len(members[0].Addrs) == 1 {
		v = vips[:1]
	}
	return execute(meshTemplate, struct {
		Members []member
		VIPs    string
		Dual    bool
	}{members, yamlList(v, "/"), len(v) == 2})
}

var meshTemplate = template.Must(template.New("mesh.yaml").Parse(`workloads:
{{- range .Members}}
- uid: Kubernetes//Pod/shop/{{.Role}}
  name: {{.Role}}
  namespace: shop
  serviceAccount: {{.Role}}
  node: {{.Node}}
  workloadIps: {{.Addresses}}
  protocol: HBONE
  workloadName: {{.Role}}
  canonicalName: {{.Role}}
{{- if eq .Role "web"}}
  services: {"shop/web.shop.svc.cluster.local": {80: 8080}}
  authorizationPolicies: ["shop/web-only-for-client"]
{{- else}}
  services: {}
{{- end}}
{{- end}}
services:
- name: web
  namespace: shop
  hostname: web.shop.svc.cluster.local
  vips: {{.VIPs}}
  ports: {80: 8080}
  ipFamilies: {{if .Dual}}Dual{{else}}IPv4{{end}}
policies:
- name: web-only-for-client
  namespace: shop
  scope: WorkloadSelector
  action: Deny
  dryRun: false
  rules:
  - - - notPrincipals: [!Exact cluster.local/ns/shop/sa/client]
`))

// nodeFile is the configuration of one node's ztun.
func nodeFile(node, dir string, members []member) []byte {
	var own []member
	for _, m := range members {
		if m.Node == node {
			own = append(own, m)
		}
	}
	return execute(nodeTemplate, struct {
		Node, Dir, Backend string
		Members            []member
	}{node, dir, backend, own})
}

var nodeTemplate = template.Must(template.New("node.yaml").Parse(`nodeName: {{.Node}}
localXdsPath: {{.Dir}}/mesh.yaml
fakeCa: true
fakeCaRoot: {{.Dir}}/root.pem
handoverSocket: {{.Dir}}/{{.Node}}/ztun.sock
logFormat: plain
capture: {{.Backend}}
pods:
{{- range .Members}}
- {netns: {{.Netns}}, uid: {{.UID}}, name: {{.Role}}, namespace: shop, serviceAccount: {{.Role}}}
{{- end}}
`))

func execute(t *template.Template, data any) []byte {
	var b bytes.Buffer
	if err := t.Execute(&b, data); err != nil {
		panic(err) // both are constants of this file
	}
	return b.Bytes()
}
