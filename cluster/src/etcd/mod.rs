//! Discovery through etcd: one key per worker, held by a lease, watched by prefix.
//!
//! ```text
//! <prefix>/workers/<id>  =  the WorkerRecord as JSON     while the worker is registered
//!                           nothing (an empty value)     for a moment, when it withdraws
//! ```
//! The empty value tells a worker that left from one whose lease ran out. The latter may be alive: an
//! etcd that stalled for longer than the lease drops all workers at once.

mod registrar;
#[cfg(test)]
mod tests;
mod watcher;

use std::{error::Error as _, fs, io, path::Path, time::Duration};

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use tokio::time::timeout;
use tonic::transport::Endpoint;

pub(crate) use registrar::Registrar;
pub(crate) use watcher::Watcher;

use crate::{
    DiscoveryError, EtcdConfig, EtcdTls,
    config::{ETCD_CA, ETCD_CERT, ETCD_KEY, ETCD_PASSWORD_FILE},
};

/// For each call; etcd answers within milliseconds or has a problem.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// etcd closes connections that are pinged more often than every 5 s.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(6);
const BACKOFF_LIMIT: Duration = Duration::from_secs(2);

/// How to connect. Each connection reads the certificates and the password: they may have been replaced.
struct Connector {
    config: EtcdConfig,
    /// Of the files when they could last be used.
    options: ConnectOptions,
    /// Whether a warning has told that they cannot be used now.
    has_warned: bool,
}

impl Connector {
    fn new(config: &EtcdConfig) -> Result<Connector, DiscoveryError> {
        Ok(Connector { options: options(config)?, config: config.clone(), has_warned: false })
    }

    async fn connect(&mut self) -> Result<Client, Lost> {
        match options(&self.config) {
            Ok(options) => {
                self.options = options;
                self.has_warned = false;
            }
            Err(error) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    tracing::warn!(%error, "changed certificates or password of etcd cannot be used; keeping the old ones");
                }
            }
        }
        in_time(Client::connect(&self.config.endpoints, Some(self.options.clone()))).await
    }
}

/// Connects once, and returns the version of the etcd that answers.
///
/// # Errors
/// When no endpoint answers, the member has no leader, or a certificate or the password is refused.
pub async fn reach(config: &EtcdConfig) -> Result<String, DiscoveryError> {
    let unreached = |lost: Lost| DiscoveryError::Etcd(lost.to_string());
    let mut client = Connector::new(config)?.connect().await.map_err(unreached)?;
    let status = in_time(client.status()).await.map_err(unreached)?;
    match status.leader() {
        0 => Err(DiscoveryError::Etcd("etcd has no leader".to_owned())),
        _ => Ok(status.version().to_owned()),
    }
}

/// As the files are now.
fn options(config: &EtcdConfig) -> Result<ConnectOptions, DiscoveryError> {
    let mut options = ConnectOptions::new()
        .with_connect_timeout(CALL_TIMEOUT)
        .with_timeout(CALL_TIMEOUT)
        .with_keep_alive(KEEP_ALIVE_INTERVAL, CALL_TIMEOUT)
        .with_keep_alive_while_idle(true)
        // A member that is cut off from the others reports that instead of an old view.
        .with_require_leader(true);
    if let Some(auth) = &config.auth {
        let file = &auth.password_file;
        let password = fs::read_to_string(file).map_err(unreadable(ETCD_PASSWORD_FILE, file))?;
        options = options.with_user(&auth.user, password.trim_end_matches(['\r', '\n']));
        options = options.with_auto_token_refresh(true);
    }
    if config.has_tls() {
        options = options.with_tls(tls_options(&config.tls.clone().unwrap_or_default())?);
    }
    Ok(options)
}

fn tls_options(tls: &EtcdTls) -> Result<TlsOptions, DiscoveryError> {
    let read = |option, file: &Path| fs::read(file).map_err(unreadable(option, file));
    let mut options = match &tls.ca {
        Some(ca) => TlsOptions::new().ca_certificate(Certificate::from_pem(read(ETCD_CA, ca)?)),
        None => TlsOptions::new().with_native_roots(),
    };
    if let (Some(cert), Some(key)) = (&tls.cert, &tls.key) {
        options = options.identity(Identity::from_pem(read(ETCD_CERT, cert)?, read(ETCD_KEY, key)?));
    }
    if let Some(domain) = &tls.domain {
        options = options.domain_name(domain);
    }
    // Files that do not belong together are found here, as during a rotation, and not by a call.
    Endpoint::from_static("https://etcd").tls_config(options.clone()).map_err(|error| {
        let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        DiscoveryError::Config(format!("{ETCD_CA}, {ETCD_CERT} and {ETCD_KEY} cannot be used: {why}"))
    })?;
    Ok(options)
}

fn unreadable(option: &'static str, file: &Path) -> impl FnOnce(io::Error) -> DiscoveryError {
    let path = file.to_owned();
    move |source| DiscoveryError::File { option, path, source }
}

/// The connection to etcd, or our key in it, is lost for now.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("etcd: {0}")]
    Call(#[from] etcd_client::Error),
    #[error("etcd does not answer")]
    Silent,
    #[error("etcd closed the stream")]
    Closed,
    #[error("the lease expired while etcd or this worker stalled")]
    Expired,
    #[error("the worker's key is gone from etcd")]
    KeyGone,
    #[error("etcd ended the watch: {0}")]
    WatchEnded(String),
}

async fn in_time<T>(call: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, Lost> {
    timeout(CALL_TIMEOUT, call).await.map_err(|_| Lost::Silent)?.map_err(Lost::Call)
}
