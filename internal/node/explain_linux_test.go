package node

import (
	"net/http"
	"strings"
	"testing"
)

// A running ztun also tells which endpoints a pod passes over, because it could not connect to them.
func TestNetnsExplainTellsWhatIsPassedOver(t *testing.T) {
	b := newBed(t)
	a := b.start(0)
	b.start(1)
	b.serve(b.pods[webB], 8080, who)
	// The pod other serves web as well, but nobody listens there.
	b.setState(a.node, "services: {}}\n- uid: c//Pod/shop/web", "services: {shop/web.shop.svc.cluster.local: {80: 8080}}}\n- uid: c//Pod/shop/web")
	ask := func(from string) bool {
		return strings.Contains(a.get(t, http.MethodGet, "admin", "/debug/explain?from=shop/"+from+"&to=10.96.0.10:80"), `"workload":"shop/other","service":"web.shop.svc.cluster.local","port":8080,"candidate":false,"why":"failed a moment ago`)
	}
	if ask("client") {
		t.Error("it is passed over before it has failed")
	}
	for range 60 { // one of both is picked at random
		if _, err := b.ask(b.pods[clientA], "10.96.0.10:80"); err != nil {
			t.Fatal(err)
		}
		if ask("client") {
			if ask("other") {
				t.Error("it is passed over by a pod that has not met it")
			}
			return
		}
	}
	t.Error("it is not passed over after 60 connections to the service")
}
