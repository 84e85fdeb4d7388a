package lab

import (
	"bytes"
	"encoding/hex"
	"testing"
)

// Pieces of packets, in hexadecimal.
const (
	mac      = "020000000002" + "020000000001"
	srcDst6  = "fd770000000000000000000000010" + "00a" + "fd770000000000000000000000020" + "00a"
	tcpClear = "9c40" + "1f90" + "00000001" + "00000002" + "5018" + "ffff" + "0000" + "0000"
	tcpHBONE = "9c40" + "3aa0" + "00000001" + "00000002" + "5018" + "ffff" + "0000" + "0000"
	tcpReply = "3aa0" + "9c40" + "00000001" + "00000002" + "6018" + "ffff" + "0000" + "0000" + "01010101"
	hello    = "68656c6c6f"
)

func ipv4(total, fragment, proto string) string {
	return "0800" + "4500" + total + "0001" + fragment + "40" + proto + "0000" + "0a4d010a" + "0a4d020a"
}

func ipv6(length, next string) string { return "86dd" + "60000000" + length + next + "40" + srcDst6 }

func frame(t testing.TB, parts ...string) []byte {
	t.Helper()
	var b []byte
	for _, p := range append([]string{mac}, parts...) {
		raw, err := hex.DecodeString(p)
		if err != nil {
			t.Fatalf("%q: %v", p, err)
		}
		b = append(b, raw...)
	}
	return b
}

func TestClassify(t *testing.T) {
	tests := []struct {
		name    string
		parts   []string
		class   packetClass
		payload int
	}{
		{"TCP over IPv4", []string{ipv4("002d", "4000", "06"), tcpClear, hello}, classClear, 5},
		{"padding of a short frame is no payload", []string{ipv4("0028", "4000", "06"), tcpClear, "000000000000"}, classClear, 0},
		{"TCP over IPv6", []string{ipv6("0019", "06"), tcpClear, hello}, classClear, 5},
		{"HBONE over IPv4", []string{ipv4("002d", "4000", "06"), tcpHBONE, hello}, classTunnel, 5},
		{"HBONE's answer over IPv6, with options", []string{ipv6("001d", "06"), tcpReply, hello}, classTunnel, 5},
		{"length zero is a segmentation-offload packet", []string{ipv4("0000", "4000", "06"), tcpClear, hello}, classClear, 5},
		{"the same over IPv6", []string{ipv6("0000", "06"), tcpClear, hello}, classClear, 5},
		{"behind a VLAN tag", []string{"81000001", ipv4("002d", "4000", "06"), tcpClear, hello}, classClear, 5},
		{"behind IPv6 options", []string{ipv6("0021", "00"), "06000104" + "00000000", tcpClear, hello}, classClear, 5},
		{"a later fragment of TCP counts whole", []string{ipv4("0019", "0010", "06"), hello}, classClear, 5},
		{"a later fragment over IPv6 counts whole", []string{ipv6("000d", "2c"), "06000088" + "00000001", hello}, classClear, 5},
		{"a first fragment over IPv6", []string{ipv6("0021", "2c"), "06000001" + "00000001", tcpClear, hello}, classClear, 5},
		{"a cut TCP header counts whole", []string{ipv4("0019", "4000", "06"), hello}, classClear, 5},
		{"UDP", []string{ipv4("0021", "4000", "11"), "9c400035000d0000", hello}, classOther, 13},
		{"ARP", []string{"0806", "0001080006040001"}, classLink, 8},
		{"neighbour solicitation", []string{ipv6("0008", "3a"), "8700000000000000"}, classLink, 8},
		{"multicast listener report", []string{ipv6("0010", "00"), "3a00050200000000", "8f00000000000000"}, classLink, 8},
		{"ICMPv6 echo", []string{ipv6("0008", "3a"), "8000000000000000"}, classOther, 8},
		{"another protocol", []string{"88cc", hello}, classOther, 5},
		{"an IPv4 header that is longer than its packet", []string{"0800", "4f00001400010000400600000a4d010a0a4d020a"}, classOther, 20},
		{"extension headers without end", []string{ipv6("0008", "00"), "06ff000000000000"}, classOther, 8},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			class, payload := classify(frame(t, tt.parts...))
			if class != tt.class || payload != tt.payload {
				t.Errorf("classify = %d, %d bytes; want %d, %d", class, payload, tt.class, tt.payload)
			}
		})
	}
}

// FuzzClassify: any frame has a class, and never a payload longer than itself.
func FuzzClassify(f *testing.F) {
	f.Add(frame(f, ipv4("002d", "4000", "06"), tcpClear, hello))
	f.Add(frame(f, ipv6("0021", "00"), "06000104"+"00000000", tcpHBONE, hello))
	f.Add(frame(f, ipv6("000d", "2c"), "06000088"+"00000001", hello))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		in := bytes.Clone(b)
		class, payload := classify(b)
		if payload < 0 || payload > len(b) || class > classOther {
			t.Errorf("classify(%x) = %d, %d", b, class, payload)
		}
		if !bytes.Equal(in, b) {
			t.Errorf("classify changed %x to %x", in, b)
		}
	})
}
