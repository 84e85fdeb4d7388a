package tun

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// nftTable is the name of the table, of family inet.
const nftTable = "ztun"

// setNFTMark does what the BPF program does with nftables, for sockets that carry ztun's own mark and so not for delivered
// connections, which carry another:
//
//	table inet ztun { chain pre { type filter hook prerouting priority mangle; policy accept;
//		iifname "eth0" meta l4proto tcp socket mark and 0xfff == 0x539 meta mark set 0x539
//	} }
func (s *setup) setNFTMark() error {
	if err := s.removeNFT(); err != nil { // of an earlier start, with other marks perhaps
		return err
	}
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	accept := nftables.ChainPolicyAccept
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: nftTable})
	chain := conn.AddChain(&nftables.Chain{
		Name:     "pre",
		Table:    table,
		Type:     nftables.ChainTypeFilter,
		Hooknum:  nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityMangle,
		Policy:   &accept,
	})
	mark, mask := binaryutil.NativeEndian.PutUint32(s.cfg.Marks.Own), binaryutil.NativeEndian.PutUint32(s.cfg.Marks.OwnMask)
	for _, i := range s.ifaces {
		name := make([]byte, unix.IFNAMSIZ)
		copy(name, i.Name)
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name},
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Socket{Key: expr.SocketKeyMark, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: mark},
			&expr.Immediate{Register: 1, Data: mark},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
		}})
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("table inet %s: %w", nftTable, err)
	}
	s.undo.add(s.removeNFT)
	return nil
}

// removeNFT deletes the table if there is one.
func (s *setup) removeNFT() error {
	conn, err := nftables.New()
	if err != nil {
		return nil // no nftables in this kernel, so no table
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil
	}
	for _, t := range tables {
		if t.Name != nftTable {
			continue
		}
		conn.DelTable(t)
		if err := conn.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete table inet %s: %w", nftTable, err)
		}
	}
	return nil
}
