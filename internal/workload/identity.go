package workload

import (
	"errors"
	"fmt"
	"strings"
)

// An Identity is a SPIFFE ID of the form that Istio gives to workloads,
// spiffe://<trust domain>/ns/<namespace>/sa/<service account>. It is a comparable value; the zero value is no identity.
type Identity struct {
	TrustDomain    string
	Namespace      string
	ServiceAccount string
}

const spiffeScheme = "spiffe://"

// ErrNotIdentity is wrapped by ParseIdentity.
var ErrNotIdentity = errors.New("not a workload identity")

// ParseIdentity reads the URI form: exactly five parts after the scheme, the second "ns", the fourth "sa", none empty.
func ParseIdentity(uri string) (Identity, error) {
	rest, ok := strings.CutPrefix(uri, spiffeScheme)
	if !ok {
		return Identity{}, fmt.Errorf("workload: %q: %w: scheme is not spiffe", uri, ErrNotIdentity)
	}
	p := strings.Split(rest, "/")
	if len(p) != 5 || p[1] != "ns" || p[3] != "sa" || p[0] == "" || p[2] == "" || p[4] == "" {
		return Identity{}, fmt.Errorf("workload: %q: %w: want spiffe://<trust domain>/ns/<namespace>/sa/<service account>", uri, ErrNotIdentity)
	}
	return Identity{TrustDomain: p[0], Namespace: p[2], ServiceAccount: p[4]}, nil
}

// IsZero reports whether there is no identity.
func (id Identity) IsZero() bool { return id == Identity{} }

// String is the URI form, or "" for no identity.
func (id Identity) String() string {
	if id.IsZero() {
		return ""
	}
	return spiffeScheme + id.Principal()
}

// Principal is the form that policies match: the URI without its scheme, or "" for no identity.
func (id Identity) Principal() string {
	if id.IsZero() {
		return ""
	}
	return id.TrustDomain + "/ns/" + id.Namespace + "/sa/" + id.ServiceAccount
}
