//! TLS for programs that only dial, such as `baton chat`: they trust an authority and need no certificate.

use std::{fmt, io, path::PathBuf, sync::Arc};

use rustls::{ClientConfig, RootCertStore, client::Resumption};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::{
    Stream,
    config::{CA, CERT, certificates, key, provider, server_name},
    error::{TlsError, explain},
};

/// Which files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsClientConfig {
    /// The authority, or several, that servers' certificates come from, in PEM.
    pub ca: PathBuf,
    /// A certificate and its key, in PEM, for servers that ask for one.
    pub own: Option<(PathBuf, PathBuf)>,
    /// The name that servers' certificates must have; `None`: that of the host that was dialled.
    pub name: Option<String>,
}

/// TLS as these files had it when they were read. Cheap to clone.
#[derive(Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    name: Option<String>,
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsClient").field("name", &self.name).finish_non_exhaustive()
    }
}

impl TlsClient {
    /// Reads the files.
    ///
    /// # Errors
    /// When they cannot be read, or do not belong together.
    pub fn load(files: TlsClientConfig) -> Result<TlsClient, TlsError> {
        let mut roots = RootCertStore::empty();
        for ca in certificates(CA, &files.ca)? {
            roots.add(ca)?;
        }
        if let Some(name) = &files.name {
            server_name(name)?;
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots);
        let mut config = match files.own {
            None => builder.with_no_client_auth(),
            Some((cert, key_file)) => {
                let own = builder.with_client_auth_cert(certificates(CERT, &cert)?, key(&key_file)?);
                own.map_err(|error| match error {
                    rustls::Error::InconsistentKeys(_) => TlsError::OtherKey { cert, key: key_file },
                    error => TlsError::Unusable(error),
                })?
            }
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config.resumption = Resumption::disabled();
        Ok(TlsClient { config: Arc::new(config), name: files.name })
    }

    /// Makes a TLS connection to `host`.
    ///
    /// # Errors
    /// What is wrong with the peer, in words.
    pub async fn connect(&self, host: &str, socket: TcpStream) -> io::Result<Stream> {
        let name = server_name(self.name.as_deref().unwrap_or(host));
        let name = name.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let connector = TlsConnector::from(Arc::clone(&self.config));
        let stream = connector.connect(name, socket).await.map_err(|error| explain(&error))?;
        Ok(Stream::Tls(Box::new(stream.into())))
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, time::Duration};

    use tokio::net::TcpListener;

    use super::*;
    use crate::{Tls, TlsConfig, accept};

    fn testdata(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
    }

    fn files(ca: &str, own: Option<(&str, &str)>) -> TlsClientConfig {
        let own = own.map(|(cert, key)| (testdata(cert), testdata(key)));
        TlsClientConfig { ca: testdata(ca), own, name: None }
    }

    #[test]
    fn files_that_cannot_work_are_named() {
        for (files, expected) in [
            (files("none.pem", None), "cannot read --tls-ca"),
            (files("a.key", None), "holds no certificate"),
            (files("ca.pem", Some(("none.pem", "a.key"))), "cannot read --tls-cert"),
            (files("ca.pem", Some(("a.pem", "none.key"))), "cannot read --tls-key"),
            (files("ca.pem", Some(("a.pem", "b.key"))), "does not belong to --tls-cert"),
            (TlsClientConfig { name: Some("no name".into()), ..files("ca.pem", None) }, "is no name"),
        ] {
            let error = TlsClient::load(files).unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} does not say {expected:?}");
        }
    }

    #[tokio::test]
    async fn only_a_client_with_a_certificate_has_an_identity() {
        let config =
            TlsConfig { cert: testdata("a.pem"), key: testdata("a.key"), ca: testdata("ca.pem"), name: None };
        let server = Tls::load(config).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        for (own, is_known) in [(None, false), (Some(("b.pem", "b.key")), true)] {
            let client = TlsClient::load(files("ca.pem", own)).unwrap();
            let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let accepted = async {
                let socket = listener.accept().await.unwrap().0;
                accept(&server, socket, Duration::from_secs(30)).await
            };
            let (accepted, connected) = tokio::join!(accepted, client.connect("127.0.0.1", socket));
            connected.unwrap();
            assert_eq!(accepted.unwrap().peer.is_some(), is_known);
        }
    }
}
