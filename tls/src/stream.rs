//! TLS over the sockets of the async runtime, or plain sockets without TLS.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::{Identity, Tls, error::explain};

/// The first byte of a TLS connection: a record that holds a handshake.
const HANDSHAKE: u8 = 0x16;

/// The answer to a client that speaks HTTP to a port of TLS.
const NOT_TLS: &[u8] = b"HTTP/1.0 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\nthis port speaks TLS\n";

/// A connection, with or without TLS.
#[derive(Debug)]
pub enum Stream {
    /// Without TLS.
    Plain(TcpStream),
    /// Inside TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

/// An accepted connection.
#[derive(Debug)]
pub struct Accepted {
    /// To read from and write to.
    pub stream: Stream,
    /// The identity of the peer, if it has shown a certificate of the authority.
    pub peer: Option<Identity>,
}

/// Accepts a TLS connection within `patience`. A peer without a certificate has no identity.
///
/// # Errors
/// What is wrong with the peer, in words.
pub async fn accept(tls: &Tls, socket: TcpStream, patience: Duration) -> io::Result<Accepted> {
    take(tls, socket, patience, false).await
}

/// Accepts a connection with or without TLS; the first byte tells which.
///
/// # Errors
/// As [`accept`].
pub async fn accept_either(tls: &Tls, socket: TcpStream, patience: Duration) -> io::Result<Accepted> {
    take(tls, socket, patience, true).await
}

async fn take(
    tls: &Tls,
    mut socket: TcpStream,
    patience: Duration,
    may_be_plain: bool,
) -> io::Result<Accepted> {
    let taken = async {
        let mut first = [0];
        let is_tls = socket.peek(&mut first).await? > 0 && first[0] == HANDSHAKE;
        if !is_tls && may_be_plain {
            return Ok(Accepted { stream: Stream::Plain(socket), peer: None });
        }
        if !is_tls {
            // Unread bytes would make the kernel reset the connection and discard the answer.
            let _ = socket.try_read(&mut [0; 4096]);
            let _ = socket.write_all(NOT_TLS).await;
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a peer speaks no TLS to a port that does",
            ));
        }
        let stream =
            TlsAcceptor::from(tls.http_server()).accept(socket).await.map_err(|error| explain(&error))?;
        let peer = stream.get_ref().1.peer_certificates().and_then(Identity::of);
        Ok(Accepted { stream: Stream::Tls(Box::new(stream.into())), peer })
    };
    timeout(patience, taken)
        .await
        .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no TLS handshake came")))
}

/// Makes a TLS connection to `host` and returns the identity of the peer.
///
/// # Errors
/// What is wrong with the peer, in words.
pub async fn connect(tls: &Tls, host: &str, socket: TcpStream) -> io::Result<(Stream, Identity)> {
    let name = tls.name_of(host).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let stream =
        TlsConnector::from(tls.http_client()).connect(name, socket).await.map_err(|error| explain(&error))?;
    let peer = stream.get_ref().1.peer_certificates().and_then(Identity::of);
    let peer = peer.ok_or_else(|| io::Error::other("the peer has shown no certificate"))?;
    Ok((Stream::Tls(Box::new(stream.into())), peer))
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;
    use crate::TlsConfig;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn tls(name: &str, ca: &str, expected: Option<&str>) -> Tls {
        let path = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name);
        let (cert, key) = (path(&format!("{name}.pem")), path(&format!("{name}.key")));
        Tls::load(TlsConfig { cert, key, ca: path(ca), name: expected.map(str::to_owned) }).unwrap()
    }

    async fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (ours, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn both_ends_know_each_other() {
        let (a, b) = (tls("a", "ca.pem", None), tls("b", "ca.pem", None));
        let (ours, theirs) = sockets().await;
        let (accepted, connected) =
            tokio::join!(accept(&a, theirs, PATIENCE), connect(&b, "127.0.0.1", ours));
        let (mut accepted, (mut ours, peer)) = (accepted.unwrap(), connected.unwrap());
        assert_eq!((accepted.peer, peer), (Some(b.identity()), a.identity()));
        ours.write_all(b"hello").await.unwrap();
        ours.flush().await.unwrap();
        let mut heard = [0; 5];
        accepted.stream.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"hello");
    }

    #[tokio::test]
    async fn unauthenticated_peers_and_wrong_names_are_refused_by_name() {
        // Of another authority, which it believes in, too: one of the two sides always sees it.
        let foreign = tls("foreign", "other-ca.pem", None);
        let a = tls("a", "ca.pem", None);
        let (ours, theirs) = sockets().await;
        let (accepted, connected) =
            tokio::join!(accept(&a, theirs, PATIENCE), connect(&foreign, "127.0.0.1", ours));
        assert!(connected.unwrap_err().to_string().contains("UnknownIssuer"));
        assert!(accepted.unwrap_err().to_string().contains("refuses the TLS handshake"));

        let (ours, theirs) = sockets().await;
        let picky = tls("b", "ca.pem", None);
        let (_, connected) = tokio::join!(accept(&a, theirs, PATIENCE), connect(&picky, "10.0.0.1", ours));
        let error = connected.unwrap_err().to_string();
        assert!(error.contains("not valid for name"), "{error}");
        let (ours, theirs) = sockets().await;
        let named = tls("b", "ca.pem", Some("baton"));
        let (_, connected) = tokio::join!(accept(&a, theirs, PATIENCE), connect(&named, "10.0.0.1", ours));
        assert_eq!(connected.unwrap().1, a.identity());
    }

    #[tokio::test]
    async fn plain_peers_are_told_apart_and_told() {
        let a = tls("a", "ca.pem", None);
        let (mut ours, theirs) = sockets().await;
        ours.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let error = accept(&a, theirs, PATIENCE).await.unwrap_err();
        assert!(error.to_string().contains("speaks no TLS"), "{error}");
        let mut told = String::new();
        ours.read_to_string(&mut told).await.unwrap();
        assert!(told.contains("this port speaks TLS"));

        let (mut ours, theirs) = sockets().await;
        ours.write_all(b"GET").await.unwrap();
        let accepted = accept_either(&a, theirs, PATIENCE).await.unwrap();
        assert!(matches!(accepted.stream, Stream::Plain(_)) && accepted.peer.is_none());

        // The other way round: TLS to a port that has none.
        let (ours, mut theirs) = sockets().await;
        let answer = async move {
            theirs.read_exact(&mut [0; 16]).await.unwrap();
            theirs.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
            theirs
        };
        let (_theirs, connected) = tokio::join!(answer, connect(&a, "127.0.0.1", ours));
        let error = connected.unwrap_err().to_string();
        assert!(error.contains("does not speak TLS"), "{error}");

        let (_silent, theirs) = sockets().await;
        let error = accept(&a, theirs, Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
