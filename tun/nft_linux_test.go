package tun

import (
	"testing"

	"github.com/google/nftables"
)

// nftTables lists the names of the tables of family inet.
func nftTables(t *testing.T, ns *Netns) (names []string) {
	t.Helper()
	must(t, ns.Do(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
		for _, table := range tables {
			names = append(names, table.Name)
		}
		return err
	}))
	return names
}
