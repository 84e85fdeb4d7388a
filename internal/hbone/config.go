package hbone

import (
	"log/slog"
	"net/netip"
	"time"

	"ztun.dev/ztun/internal/loop"
)

// A PoolConfig configures a Pool. The zero values of the numbers are the defaults named beside them.
type PoolConfig struct {
	Group  *loop.Group
	Dialer Dialer
	TLS    ClientTLS
	Log    *slog.Logger

	MaxStreams       int           // streams per tunnel: 100, ztunnel's default; with 1 a tunnel is not used again
	ExtraTunnels     int           // for bulk, per key, beyond what MaxStreams requires: min(4, cores) + 1; negative: none
	MaxAge           time.Duration // of tunnels: that of the certificates; then no new streams, and the end with the last one
	IdleRelease      time.Duration // 300 s, ztunnel's default
	ConnectTimeout   time.Duration // 10 s
	HandshakeTimeout time.Duration // TLS and HTTP/2 together: 10 s
	ResponseTimeout  time.Duration // 20 s
	Settings         Settings
	Budget           *loop.Budget // of the process's memory for connections; nil: none
	Metrics          *Metrics     // nil: none
}

// A ServerConfig configures a Server.
type ServerConfig struct {
	Group   *loop.Group
	TLS     ServerTLS
	Handler Handler
	Log     *slog.Logger

	// Refused is called for what the Handler does not hear of: with a *HandshakeError for a peer that sent something which led to
	// no tunnel, and with a *RequestError. It may be nil, must not block, and may be called from any goroutine.
	Refused func(local, remote netip.AddrPort, err error)

	HandshakeTimeout time.Duration // 10 s
	MaxHandshakes    int           // handshakes in progress: 128, of one address a quarter; further ones wait
	MaxArrivals      int           // connections without a handshake: 1024; the oldest go first
	Resume           func()        // called when Accepting becomes true again; may be nil
	MaxAge           time.Duration // as of a PoolConfig
	Settings         Settings
	Budget           *loop.Budget // as of a PoolConfig
	Metrics          *Metrics     // as of a PoolConfig
}

// Settings are the sizes of the HTTP/2 connection. Zero fields mean the defaults, which are ztunnel's wire behaviour.
type Settings struct {
	StreamWindow     uint32 // bytes: 4 MiB
	ConnectionWindow uint32 // bytes: 16 MiB
	FrameSize        uint32 // bytes: 1 MiB
	HeaderList       uint32 // bytes: 16 KiB as client, 64 KiB as server
	MaxStreams       uint32 // as server: 200
}
