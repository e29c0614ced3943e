//! Certificates of this process, for connections between processes of Baton.

use std::path::PathBuf;

use baton_tls::{Tls, TlsConfig};
use clap::Args;

/// Certificates for what processes of Baton say to each other. All three, or none.
#[derive(Clone, Debug, Default, Args)]
pub struct TlsArgs {
    /// Certificate of this process (PEM), with intermediate certificates.
    ///
    /// Workers and the router then use mutual TLS among each other. The three files belong together. A
    /// changed file is read at the next handshake.
    #[arg(long, value_name = "FILE", requires = "tls_key", requires = "tls_ca", env = "BATON_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert", env = "BATON_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// Certificate authority (PEM) that signed the certificates of all workers and routers.
    #[arg(long, value_name = "FILE", requires = "tls_cert", env = "BATON_TLS_CA")]
    pub tls_ca: Option<PathBuf>,
    /// Name that every certificate must have. Default: the host name or address that is called.
    #[arg(long, value_name = "NAME", requires = "tls_cert", env = "BATON_TLS_NAME")]
    pub tls_name: Option<String>,
}

impl TlsArgs {
    /// The files, if they were given.
    pub fn files(&self) -> Option<[PathBuf; 3]> {
        Some([self.tls_cert.clone()?, self.tls_key.clone()?, self.tls_ca.clone()?])
    }

    /// Loads the certificates; `None` where no flag names any.
    ///
    /// # Errors
    /// When a file is missing or holds no certificate or key.
    pub fn load(&self) -> anyhow::Result<Option<Tls>> {
        let TlsArgs { tls_cert: Some(cert), tls_key: Some(key), tls_ca: Some(ca), tls_name } = self.clone()
        else {
            return Ok(None);
        };
        Ok(Some(Tls::load(TlsConfig { cert, key, ca, name: tls_name })?))
    }

    /// The same certificates as flags, for a child process.
    pub fn flags(&self) -> Vec<String> {
        let TlsArgs { tls_cert, tls_key, tls_ca, tls_name } = self;
        let file = |flag: &str, path: &Option<PathBuf>| {
            path.as_ref().map(|path| format!("{flag}={}", path.display()))
        };
        let flags = [
            file("--tls-cert", tls_cert),
            file("--tls-key", tls_key),
            file("--tls-ca", tls_ca),
            tls_name.as_ref().map(|name| format!("--tls-name={name}")),
        ];
        flags.into_iter().flatten().collect()
    }
}
