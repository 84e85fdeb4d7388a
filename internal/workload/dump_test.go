package workload

import (
	"encoding/json"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// What is dumped reads back as the same state.
func TestADumpReadsBack(t *testing.T) {
	st, err := ParseStatic("mesh.yaml", []byte(everyKey))
	if err != nil {
		t.Fatal(err)
	}
	s := NewSnapshot(st)
	data, err := json.Marshal(NewDump(s))
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParseDump("dump.json", data)
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	if diff := cmp.Diff(s.State(), NewSnapshot(again).State(), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Errorf("state (-before +after):\n%s", diff)
	}
}

func TestParseDumpOfTheAdminPort(t *testing.T) {
	data, err := os.ReadFile("../admin/testdata/config_dump.json")
	if err != nil {
		t.Fatal(err)
	}
	st, err := ParseDump("config_dump.json", data)
	if err != nil {
		t.Fatal(err)
	}
	s := NewSnapshot(st)
	v := s.ServiceNamed("cart.shop.svc.cluster.local", "shop")
	if v == nil || len(s.Endpoints(v.Key())) == 0 {
		t.Errorf("service cart is %+v with %d endpoints", v, len(s.Endpoints(v.Key())))
	}
}

func TestParseDumpRefusesWhatItCannotRead(t *testing.T) {
	for name, tt := range map[string]struct{ in, want string }{
		"no JSON":       {"{", "d.json: unexpected end of JSON input; a dump is what /config_dump"},
		"an enum":       {`{"workloads": [{"uid": "x", "protocol": "UDP"}]}`, `workloads[0] x: protocol: "UDP" is none of TCP, HBONE`},
		"a VIP":         {`{"services": [{"namespace": "a", "hostname": "b", "vips": ["1.2.3.4"]}]}`, `services[0] a/b: vips: "1.2.3.4" is not network/address`},
		"a SAN":         {`{"services": [{"namespace": "a", "hostname": "b", "subjectAltNames": ["x"]}]}`, "subjectAltNames:"},
		"a gateway":     {`{"workloads": [{"uid": "x", "waypoint": {"destination": "wp"}}]}`, `gateway: "wp" is neither`},
		"a service key": {`{"workloads": [{"uid": "x", "services": ["wp"]}]}`, `services: "wp" is not namespace/hostname`},
		"a match":       {`{"policies": [{"name": "p", "rules": [[[{"principals": [{"Like": "x"}]}]]]}]}`, `policies[0] /p: "Like" is none of Exact`},
		"a match value": {`{"policies": [{"name": "p", "rules": [[[{"principals": [{"Exact": 1}]}]]]}]}`, `policies[0] /p: Exact: want a string, have 1`},
		"an app tunnel": {`{"workloads": [{"uid": "x", "applicationTunnel": {"protocol": "HTTP"}}]}`, `applicationTunnel.protocol: "HTTP" is none of NONE, PROXY`},
		"a text":        {`{"policies": [{"name": "p", "rules": [[[{"principals": ["x"]}]]]}]}`, "x is none of Exact"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := ParseDump("d.json", []byte(tt.in)); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.HasPrefix(err.Error(), "d.json: ") {
				t.Errorf("ParseDump = %v, want an error with %q", err, tt.want)
			}
		})
	}
}

// What is written in another form than ztun's is the same state.
func TestParseDumpCanonicalizes(t *testing.T) {
	st, err := ParseDump("d.json", []byte(`{
		"workloads": [{"uid": "x", "workloadIps": ["10.0.0.1"], "services": ["shop/Cart.Local"], "waypoint": {"destination": "shop/WP.local", "hboneMtlsPort": 15008}}],
		"services": [{"namespace": "shop", "hostname": "Cart.Local", "endpoints": {"x": {"workloadUid": "x", "port": {"80": 8080}}}}],
		"policies": [{"name": "p", "rules": [[[{"sourceIps": ["::ffff:10.1.2.3/104"]}]]]}]
	}`))
	if err != nil {
		t.Fatal(err)
	}
	key := ServiceKey{"shop", "cart.local"}
	if ends := NewSnapshot(st).Endpoints(key); len(ends) != 1 || ends[0].Ports[80] != 8080 {
		t.Errorf("endpoints of %s are %v, want x with 80 to 8080", key, ends)
	}
	if got, want := st.Workloads[0].Waypoint.Hostname, (ServiceKey{"shop", "wp.local"}); got != want {
		t.Errorf("waypoint is %v, want %v", got, want)
	}
	if got, want := st.Policies[0].Groups[0][0][0].SourceIPs[0], netip.MustParsePrefix("10.0.0.0/8"); got != want {
		t.Errorf("source prefix is %v, want %v", got, want)
	}
}

func FuzzParseDump(f *testing.F) {
	data, err := os.ReadFile("../admin/testdata/config_dump.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"policies": [{"rules": [[[{"principals": [{"Presence": []}]}]]]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		st, err := ParseDump("d", data)
		if err == nil {
			NewSnapshot(st)
		}
	})
}
