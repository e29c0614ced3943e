//! Connections to an HTTP server, with or without TLS.

use std::{
    io,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
};

use anyhow::ensure;
use baton_tls::{Stream, Tls, TlsClient, TlsClientConfig};
use clap::Args;
use http::{Uri, uri::Scheme};
use hyper::rt::ReadBufCursor;
use hyper_util::{
    client::legacy::connect::{Connected, Connection},
    rt::TokioIo,
};
use tokio::net::TcpStream;
use tower::Service;

use crate::tls::TlsArgs;

/// Certificates for a server at an https:// URL.
#[derive(Clone, Debug, Default, Args)]
pub struct ClientTlsArgs {
    /// Certificate authority (PEM) that signed the certificate of an https:// server.
    #[arg(long, value_name = "FILE", env = "BATON_TLS_CA", help_heading = "TLS")]
    pub tls_ca: Option<PathBuf>,
    /// Certificate (PEM) for a server that asks for one.
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_key",
        requires = "tls_ca",
        env = "BATON_TLS_CERT",
        help_heading = "TLS"
    )]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert", env = "BATON_TLS_KEY", help_heading = "TLS")]
    pub tls_key: Option<PathBuf>,
    /// Name that the server's certificate must have. Default: the host name or address of the URL.
    #[arg(long, value_name = "NAME", requires = "tls_ca", env = "BATON_TLS_NAME", help_heading = "TLS")]
    pub tls_name: Option<String>,
}

impl ClientTlsArgs {
    /// Loads TLS for servers at these URLs.
    ///
    /// # Errors
    /// When the files cannot be used, or none of the servers is at an https:// URL.
    pub fn load(&self, urls: &[&str]) -> anyhow::Result<Option<TlsClient>> {
        let ClientTlsArgs { tls_ca: Some(ca), tls_cert, tls_key, tls_name } = self.clone() else {
            return Ok(None);
        };
        ensure!(
            urls.iter().any(|url| url.starts_with("https:")),
            "{} is reached without TLS, though there is --tls-ca: write https://, or leave it out",
            urls.join(", ")
        );
        Ok(Some(TlsClient::load(TlsClientConfig { ca, own: tls_cert.zip(tls_key), name: tls_name })?))
    }

    /// Loads TLS for calls of workers, which require a certificate of every client; `None` without one.
    ///
    /// # Errors
    /// When the files cannot be used.
    pub fn of_workers(&self) -> anyhow::Result<Option<Tls>> {
        let ClientTlsArgs { tls_ca, tls_cert, tls_key, tls_name } = self.clone();
        TlsArgs { tls_cert, tls_key, tls_ca, tls_name }.load()
    }
}

/// Opens connections for an HTTP client.
#[derive(Clone, Debug)]
pub struct Connector {
    /// For servers at https:// URLs.
    pub tls: Option<TlsClient>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No TCP connection.
    #[error("{0}")]
    Socket(#[from] io::Error),
    /// TCP connected; TLS failed.
    #[error("{0}")]
    Tls(io::Error),
}

impl Connector {
    async fn connect(self, uri: Uri) -> Result<Wire, ConnectError> {
        let is_tls = uri.scheme() == Some(&Scheme::HTTPS);
        let host = uri.host().unwrap_or_default();
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let socket = TcpStream::connect(format!("{host}:{port}")).await?;
        socket.set_nodelay(true)?;
        let stream = match (is_tls, self.tls) {
            (false, _) => Stream::Plain(socket),
            (true, Some(tls)) => tls.connect(host, socket).await.map_err(ConnectError::Tls)?,
            (true, None) => return Err(ConnectError::Tls(io::Error::other("give --tls-ca (BATON_TLS_CA)"))),
        };
        Ok(Wire(TokioIo::new(stream)))
    }
}

impl Service<Uri> for Connector {
    type Response = Wire;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Wire, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// A connection for hyper's client.
pub struct Wire(TokioIo<Stream>);

impl Connection for Wire {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl hyper::rt::Read for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl hyper::rt::Write for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
