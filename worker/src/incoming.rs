//! Connections to a worker's port, with TLS where there are certificates, and the identity of each caller.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::http::Extensions;
use baton_tls::{Accepted, Identity, Stream, Tls};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpListener,
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{
    sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned},
    task::TaskTracker,
};
use tonic::transport::server::Connected;

/// Limits of what a peer can keep open without a certificate.
#[derive(Clone, Copy)]
struct Limits {
    /// For a TLS handshake.
    handshake_timeout: Duration,
    /// Handshakes under way at a time. One more displaces the oldest.
    max_handshakes: usize,
    /// Connections of peers without a certificate, such as probes. One more displaces the oldest.
    max_without_identity: usize,
}

const LIMITS: Limits =
    Limits { handshake_timeout: Duration::from_secs(5), max_handshakes: 256, max_without_identity: 256 };

/// The caller's identity, as tonic keeps it with each request of a connection.
#[derive(Clone, Copy, Debug)]
pub struct CallerIdentity(Option<Identity>);

/// Whose certificate came with the connection of a request with these extensions; `None` without TLS or a certificate.
pub fn identity_of(extensions: &Extensions) -> Option<Identity> {
    extensions.get::<CallerIdentity>().and_then(|caller| caller.0)
}

/// A connection that tells tonic the caller's identity.
pub(crate) struct Connection {
    accepted: Accepted,
    /// With TLS, of a peer without a certificate.
    place: Option<Place>,
}

impl Connected for Connection {
    type ConnectInfo = CallerIdentity;

    fn connect_info(&self) -> CallerIdentity {
        CallerIdentity(self.accepted.peer)
    }
}

impl Connection {
    /// The stream, unless a newer connection has displaced this one.
    fn stream(self: Pin<&mut Self>, cx: &mut Context<'_>) -> io::Result<Pin<&mut Stream>> {
        let this = self.get_mut();
        if let Some(place) = &mut this.place
            && place.displaced.as_mut().poll(cx).is_ready()
        {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(Pin::new(&mut this.accepted.stream))
    }
}

/// A limited number of connections. A new one displaces the oldest, so a flood of them keeps no other peer out for long.
struct Places {
    num_places: usize,
    /// Oldest first. A token is cancelled when its connection has left, or to make the connection leave.
    taken: VecDeque<CancellationToken>,
}

impl Places {
    fn new(num_places: usize) -> Places {
        Places { num_places, taken: VecDeque::new() }
    }

    fn take(&mut self, place: CancellationToken) {
        self.taken.retain(|place| !place.is_cancelled());
        if self.taken.len() >= self.num_places
            && let Some(oldest) = self.taken.pop_front()
        {
            oldest.cancel();
        }
        self.taken.push_back(place);
    }
}

/// A place that an open connection has taken. The drop leaves it.
struct Place {
    displaced: Pin<Box<WaitForCancellationFutureOwned>>,
    _leaves: DropGuard,
}

impl Place {
    fn take(places: &Mutex<Places>) -> Place {
        let place = CancellationToken::new();
        places.lock().unwrap_or_else(PoisonError::into_inner).take(place.clone());
        Place { displaced: Box::pin(place.clone().cancelled_owned()), _leaves: place.drop_guard() }
    }
}

/// Accepts connections until `close`.
pub(crate) fn accept(
    listener: TcpListener,
    tls: Option<Tls>,
    close: CancellationToken,
) -> ReceiverStream<io::Result<Connection>> {
    accept_within(LIMITS, listener, tls, close)
}

fn accept_within(
    limits: Limits,
    listener: TcpListener,
    tls: Option<Tls>,
    close: CancellationToken,
) -> ReceiverStream<io::Result<Connection>> {
    // The server accepts them as fast as they come.
    let (sender, connections) = mpsc::channel(1);
    let mut handshakes = Places::new(limits.max_handshakes);
    let without_identity = Arc::new(Mutex::new(Places::new(limits.max_without_identity)));
    tokio::spawn(async move {
        let tasks = TaskTracker::new();
        loop {
            let accepted = tokio::select! {
                () = close.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            let (socket, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Usually the process has no file descriptor left; some will be closed.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            // Tokens are sent one by one, so delay gains nothing.
            let _ = socket.set_nodelay(true);
            let Some(tls) = tls.clone() else {
                let accepted = Accepted { stream: Stream::Plain(socket), peer: None };
                // The server has ended.
                if sender.send(Ok(Connection { accepted, place: None })).await.is_err() {
                    break;
                }
                continue;
            };
            // Accepting must not wait for a place: silent peers would stop the port.
            let place = close.child_token();
            handshakes.take(place.clone());
            let (sender, close, without_identity) =
                (sender.clone(), close.clone(), Arc::clone(&without_identity));
            tasks.spawn(async move {
                let handshake = baton_tls::accept(&tls, socket, limits.handshake_timeout);
                let accepted = place.run_until_cancelled(handshake).await;
                place.cancel();
                match accepted {
                    Some(Ok(accepted)) => {
                        let place = accepted.peer.is_none().then(|| Place::take(&without_identity));
                        // As above.
                        let _ = sender.send(Ok(Connection { accepted, place })).await;
                    }
                    Some(Err(error)) => tls.refused(address, &error),
                    None if close.is_cancelled() => {}
                    None => tls.refused(address, &io::Error::other("newer connections displaced it")),
                }
            });
        }
        drop(sender);
        tasks.close();
        tasks.wait().await;
    });
    ReceiverStream::new(connections)
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.stream(cx)?.poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream(cx)?.poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream(cx)?.poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.accepted.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream(cx)?.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream(cx)?.poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::SocketAddr,
        path::{Path, PathBuf},
    };

    use baton_tls::{TlsClient, TlsClientConfig, TlsConfig};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
        time::timeout,
    };
    use tokio_stream::StreamExt;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);
    /// No time passes before a peer leaves: only the number of peers makes it leave.
    const PATIENT: Limits =
        Limits { handshake_timeout: Duration::from_secs(3600), max_handshakes: 4, max_without_identity: 3 };

    fn file(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tls/testdata").join(name)
    }

    fn tls(name: &str) -> Tls {
        let (cert, key) = (file(&format!("{name}.pem")), file(&format!("{name}.key")));
        Tls::load(TlsConfig { cert, key, ca: file("ca.pem"), name: None }).unwrap()
    }

    async fn port() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    /// Both ends of a connection.
    async fn both<T>(
        connect: impl Future<Output = io::Result<T>>,
        connections: &mut ReceiverStream<io::Result<Connection>>,
    ) -> (T, Connection) {
        let both = async { tokio::join!(connect, connections.next()) };
        let (ours, theirs) = timeout(PATIENCE, both).await.expect("the peer is not kept out");
        (ours.unwrap(), theirs.unwrap().unwrap())
    }

    /// Waits until the port has closed the connection.
    async fn closed(mut socket: TcpStream) {
        let read = timeout(PATIENCE, socket.read(&mut [0])).await.expect("the port closes it");
        assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    }

    #[tokio::test]
    async fn silent_peers_displace_each_other_and_keep_no_certificate_out() {
        let (listener, address) = port().await;
        let close = CancellationToken::new();
        let mut connections = accept_within(PATIENT, listener, Some(tls("a")), close.clone());
        let mut silent = Vec::new();
        for _ in 0..2 * PATIENT.max_handshakes {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let b = tls("b");
        let connect = async { baton_tls::connect(&b, "127.0.0.1", TcpStream::connect(address).await?).await };
        let (_ours, theirs) = both(connect, &mut connections).await;
        assert_eq!(theirs.connect_info().0, Some(b.identity()));
        // The newest handshakes may go on, also after the one that has ended.
        let newest = silent.split_off(PATIENT.max_handshakes + 1);
        for oldest in silent {
            closed(oldest).await;
        }
        close.cancel();
        for silent in newest {
            closed(silent).await;
        }
        assert!(connections.next().await.is_none());
    }

    #[tokio::test]
    async fn peers_without_a_certificate_displace_each_other_and_no_other_peer() {
        let (listener, address) = port().await;
        let mut connections = accept_within(PATIENT, listener, Some(tls("a")), CancellationToken::new());
        let b = tls("b");
        let connect = async { baton_tls::connect(&b, "127.0.0.1", TcpStream::connect(address).await?).await };
        let ((mut known, _), mut known_here) = both(connect, &mut connections).await;
        let client = TlsClientConfig { ca: file("ca.pem"), own: None, name: None };
        let client = TlsClient::load(client).unwrap();
        let mut unknown = Vec::new();
        for _ in 0..=PATIENT.max_without_identity {
            let connect = async { client.connect("127.0.0.1", TcpStream::connect(address).await?).await };
            unknown.push(both(connect, &mut connections).await);
        }
        let (_ours, mut oldest) = unknown.remove(0);
        assert_eq!(oldest.connect_info().0, None);
        let read = timeout(PATIENCE, oldest.read(&mut [0])).await.expect("it is displaced");
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        let (newest, newest_here) = unknown.last_mut().unwrap();
        for (ours, theirs) in [(&mut known, &mut known_here), (newest, newest_here)] {
            ours.write_all(b"x").await.unwrap();
            ours.flush().await.unwrap();
            let mut byte = [0];
            let read = timeout(PATIENCE, theirs.read(&mut byte)).await.expect("the byte arrives");
            assert_eq!((read.unwrap(), byte), (1, *b"x"));
        }
    }
}
