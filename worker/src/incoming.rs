//! Connections to a worker's port, with TLS where there are certificates, and the identity of each caller.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    pin::Pin,
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
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::server::Connected;

/// Limits of what a peer can keep open without a certificate.
#[derive(Clone, Copy)]
struct Limits {
    /// For a TLS handshake.
    handshake_timeout: Duration,
    /// Handshakes under way at a time. One more displaces the oldest.
    max_handshakes: usize,
}

const LIMITS: Limits = Limits { handshake_timeout: Duration::from_secs(5), max_handshakes: 256 };

/// The caller's identity, as tonic keeps it with each request of a connection.
#[derive(Clone, Copy, Debug)]
pub struct CallerIdentity(Option<Identity>);

/// Whose certificate came with the connection of a request with these extensions; `None` without TLS or a certificate.
pub fn identity_of(extensions: &Extensions) -> Option<Identity> {
    extensions.get::<CallerIdentity>().and_then(|caller| caller.0)
}

/// A connection that tells tonic the caller's identity.
pub(crate) struct Connection(Accepted);

impl Connected for Connection {
    type ConnectInfo = CallerIdentity;

    fn connect_info(&self) -> CallerIdentity {
        CallerIdentity(self.0.peer)
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
                if sender.send(Ok(Connection(accepted))).await.is_err() {
                    break;
                }
                continue;
            };
            // Accepting must not wait for a place: silent peers would stop the port.
            let place = close.child_token();
            handshakes.take(place.clone());
            let (sender, close) = (sender.clone(), close.clone());
            tasks.spawn(async move {
                let handshake = baton_tls::accept(&tls, socket, limits.handshake_timeout);
                let accepted = place.run_until_cancelled(handshake).await;
                place.cancel();
                match accepted {
                    // As above.
                    Some(Ok(accepted)) => drop(sender.send(Ok(Connection(accepted))).await),
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
        Pin::new(&mut self.get_mut().0.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::{net::SocketAddr, path::Path};

    use baton_tls::TlsConfig;
    use tokio::{io::AsyncReadExt, net::TcpStream, time::timeout};
    use tokio_stream::StreamExt;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);
    /// No time passes before a peer leaves: only the number of peers makes it leave.
    const PATIENT: Limits = Limits { handshake_timeout: Duration::from_secs(3600), max_handshakes: 4 };

    fn tls(name: &str) -> Tls {
        let file = |name: String| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tls/testdata").join(name);
        let (cert, key) = (file(format!("{name}.pem")), file(format!("{name}.key")));
        Tls::load(TlsConfig { cert, key, ca: file("ca.pem".to_owned()), name: None }).unwrap()
    }

    async fn port() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    /// Waits until the port has closed the connection.
    async fn closed(mut socket: impl AsyncRead + Unpin) {
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
        let connected =
            async { baton_tls::connect(&b, "127.0.0.1", TcpStream::connect(address).await.unwrap()).await };
        let both = async { tokio::join!(connected, connections.next()) };
        let (connected, accepted) = timeout(PATIENCE, both).await.expect("it is not kept out");
        connected.unwrap();
        assert_eq!(accepted.unwrap().unwrap().connect_info().0, Some(b.identity()));
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
}
