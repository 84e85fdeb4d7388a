// Node's http2 as an HBONE peer, for interop/node_test.go.
//
//   peer.mjs CERT KEY ROOT server ADDRESS PORT               serves CONNECT
//   peer.mjs CERT KEY ROOT client ADDRESS PORT URL AUTHORITY opens a CONNECT for each connection
//
// It prints "ready", and goes away gracefully when it reads "drain".
import fs from 'node:fs';
import http2 from 'node:http2';
import net from 'node:net';
import readline from 'node:readline';

const [certFile, keyFile, rootFile, mode, address, port, url, authority] = process.argv.slice(2);
const tls = {
  cert: fs.readFileSync(certFile),
  key: fs.readFileSync(keyFile),
  ca: fs.readFileSync(rootFile),
  minVersion: 'TLSv1.3',
};

const { NGHTTP2_REFUSED_STREAM } = http2.constants;

// join moves bytes, ends and resets between a stream and a socket. Node ends the readable side of a stream that was reset, and
// stream.close(code) sends END_STREAM before RST_STREAM: both have to be kept from looking like an end.
function join(stream, socket) {
  stream.pipe(socket, { end: false });
  stream.on('end', () => (stream.aborted || stream.rstCode ? socket.resetAndDestroy() : socket.end()));
  stream.on('aborted', () => socket.resetAndDestroy());
  stream.on('error', () => socket.resetAndDestroy());
  socket.pipe(stream);
  socket.on('error', (err) => stream.destroy(err));
}

const sessions = new Set();
const keep = (session) => {
  sessions.add(session);
  session.on('close', () => sessions.delete(session));
  session.on('error', () => {});
};

let listener;
if (mode === 'server') {
  listener = http2.createSecureServer({ ...tls, requestCert: true, rejectUnauthorized: true });
  listener.on('session', keep);
  listener.on('stream', (stream, headers) => {
    if (headers[':method'] !== 'CONNECT') {
      stream.respond({ ':status': 405 }, { endStream: true });
      return;
    }
    const [host, port] = headers[':authority'].split(':');
    const app = net.connect({ host, port, allowHalfOpen: true });
    const refused = () => stream.respond({ ':status': 503 }, { endStream: true });
    app.once('error', refused);
    app.once('connect', () => {
      app.off('error', refused);
      if (stream.destroyed) {
        app.resetAndDestroy();
        return;
      }
      stream.respond({ ':status': 200, baggage: headers.baggage });
      join(stream, app);
    });
  });
} else {
  let session;
  const connect = () => {
    const mine = http2.connect(url, { ...tls, checkServerIdentity: () => undefined }); // the chain is checked; the name is a URI
    keep(mine);
    const forget = () => {
      if (session === mine) session = undefined;
    };
    mine.on('goaway', forget);
    mine.on('close', forget);
    return mine;
  };
  // A request that a session refused because it goes away, ours or nghttp2's own doing, was not processed: it is sent again.
  const open = (socket, again) => {
    const mine = (session ??= connect());
    const stream = mine.request({ ':method': 'CONNECT', ':authority': authority, baggage: 'service.name=node' });
    const gaveUp = (err) => stream.destroy(err);
    socket.on('error', gaveUp);
    stream.once('error', () => {
      socket.off('error', gaveUp);
      if (again && (stream.pending || stream.rstCode === NGHTTP2_REFUSED_STREAM)) {
        if (session === mine) session = undefined;
        open(socket, false);
      } else socket.resetAndDestroy();
    });
    stream.on('response', (headers) => {
      if (headers[':status'] !== 200) {
        socket.resetAndDestroy();
        return;
      }
      stream.removeAllListeners('error');
      join(stream, socket);
      socket.resume();
    });
  };
  listener = net.createServer({ allowHalfOpen: true, pauseOnConnect: true }, (socket) => open(socket, true));
}
listener.listen(Number(port), address, () => console.log('ready'));
readline.createInterface({ input: process.stdin }).on('line', (line) => {
  if (line === 'drain') for (const s of sessions) s.close();
});
