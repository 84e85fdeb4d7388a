package node

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestPrivilege(t *testing.T) {
	const chart = 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_NET_RAW | 1<<unix.CAP_SYS_ADMIN
	for _, tt := range []struct {
		name string
		euid int
		caps uint64
		want string
	}{
		{"root", 0, 1<<(unix.CAP_LAST_CAP+1) - 1, ""},
		{"the container of ztunnel's chart", 0, chart, ""},
		{"another user with capabilities", 1000, chart, ""},
		{"nobody", 65534, 0, "the network namespaces of pods need root; run it with sudo, or with the capabilities CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_ADMIN"},
		{"an ordinary container", 0, 1 << unix.CAP_NET_RAW, "the network namespaces of pods need capabilities that are missing: CAP_NET_ADMIN, CAP_SYS_ADMIN; a container gets them by securityContext.capabilities.add or --cap-add"},
		{"all but raw sockets", 0, chart &^ (1 << unix.CAP_NET_RAW), "the network namespaces of pods need capabilities that are missing: CAP_NET_RAW; a container gets them by securityContext.capabilities.add or --cap-add"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			if err := privilege(tt.euid, tt.caps); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("privilege(%d, %#x) = %q, want %q", tt.euid, tt.caps, got, tt.want)
			}
		})
	}
}
