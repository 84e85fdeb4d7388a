package admin

import (
	"cmp"
	"net/netip"
	"slices"

	"ztun.dev/ztun/internal/workload"
)

func addr(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func named(w *workload.Workload) string {
	if w == nil {
		return ""
	}
	return w.Namespace + "/" + w.Name
}

func sortByID(list []Connection) {
	slices.SortFunc(list, func(a, b Connection) int { return cmp.Compare(a.ID, b.ID) })
}
