//! Errors of certificates and of handshakes.

use std::{io, path::PathBuf};

use thiserror::Error;

/// Why TLS cannot be set up. The message names the file or option.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file is missing or not readable.
    #[error("cannot read {option} {path}: {source}")]
    Read {
        /// The option that names it.
        option: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is damaged.
    #[error("cannot read {option} {path}: {why}")]
    File {
        /// The option that names it.
        option: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A file holds something else.
    #[error("{option} {path} holds no {expected} in PEM")]
    Empty {
        /// The option that names it.
        option: &'static str,
        /// Which file.
        path: PathBuf,
        /// What was looked for.
        expected: &'static str,
    },
    /// Key and certificate do not belong together.
    #[error("--tls-key (BATON_TLS_KEY) {key} does not belong to --tls-cert (BATON_TLS_CERT) {cert}")]
    OtherKey {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// No peer would accept the certificate.
    #[error("peers will reject --tls-cert (BATON_TLS_CERT) {cert}: {why}")]
    Refused {
        /// The certificate's file.
        cert: PathBuf,
        /// Expired, or of another authority than `--tls-ca`, for example.
        why: String,
    },
    /// Neither a host name nor an address.
    #[error("{0:?} is no name that a certificate could be for; --tls-name (BATON_TLS_NAME) gives another")]
    Name(String),
    /// rustls does not accept the files.
    #[error(
        "--tls-cert (BATON_TLS_CERT), --tls-key (BATON_TLS_KEY) or --tls-ca (BATON_TLS_CA) cannot be used: {0}"
    )]
    Unusable(#[from] rustls::Error),
}

/// Describes why a handshake failed, and what to do.
pub(crate) fn explain(error: &io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let message = match inner {
        Some(error) => explain_rustls(error),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            "the peer closed the connection during the TLS handshake; does it speak TLS?".to_owned()
        }
        None => error.to_string(),
    };
    io::Error::new(error.kind(), message)
}

pub(crate) fn explain_rustls(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidMessage(_) => {
            "the peer does not speak TLS here; are both started with --tls-cert, --tls-key and --tls-ca?"
                .to_owned()
        }
        rustls::Error::AlertReceived(alert) => format!("the peer refuses the TLS handshake ({alert:?})"),
        error => error.to_string(),
    }
}
