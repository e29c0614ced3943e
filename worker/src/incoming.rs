//! Connections to a worker's port, with TLS where there are certificates, and the identity of each caller.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::http::Extensions;
use baton_tls::{Accepted, Identity, Stream, Tls};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpListener,
    sync::{Semaphore, mpsc},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::server::Connected;

/// For a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Handshakes under way at a time; later connections wait.
const MAX_HANDSHAKES: usize = 256;

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

/// Accepts connections until `close`.
pub(crate) fn accept(
    listener: TcpListener,
    tls: Option<Tls>,
    close: CancellationToken,
) -> ReceiverStream<io::Result<Connection>> {
    // The server accepts them as fast as they come.
    let (sender, connections) = mpsc::channel(1);
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
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
            let permit = Arc::clone(&handshakes).acquire_owned().await.expect("never closed");
            let (sender, close) = (sender.clone(), close.clone());
            tasks.spawn(async move {
                let accepted =
                    close.run_until_cancelled(baton_tls::accept(&tls, socket, HANDSHAKE_TIMEOUT)).await;
                drop(permit);
                match accepted {
                    // As above.
                    Some(Ok(accepted)) => drop(sender.send(Ok(Connection(accepted))).await),
                    Some(Err(error)) => tls.refused(address, &error),
                    None => {}
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
