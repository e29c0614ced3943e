//! The configuration of discovery. Plain data. `cli` merges flags, environment and file.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use tonic::metadata::{Ascii, MetadataValue};

/// Options, as messages name them: each with its variable.
pub(crate) const ROUTER: &str = "--router (BATON_ROUTER)";
pub(crate) const WORKERS: &str = "--workers (BATON_WORKERS)";
const ETCD_ENDPOINTS: &str = "--etcd-endpoints (BATON_ETCD_ENDPOINTS)";
const ETCD_LEASE_TTL: &str = "--etcd-lease-ttl (BATON_ETCD_LEASE_TTL)";
pub(crate) const ETCD_CA: &str = "--etcd-ca (BATON_ETCD_CA)";
pub(crate) const ETCD_CERT: &str = "--etcd-cert (BATON_ETCD_CERT)";
pub(crate) const ETCD_KEY: &str = "--etcd-key (BATON_ETCD_KEY)";
pub(crate) const ETCD_PASSWORD_FILE: &str = "--etcd-password-file (BATON_ETCD_PASSWORD_FILE)";

/// The kind of discovery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum DiscoveryConfig {
    /// Inside the router, without another service.
    Embedded {
        /// The router's address, `http://host:port`. Only workers use it.
        router: String,
        /// The API key with which a worker registers, if the router needs one.
        #[serde(default, skip_serializing)]
        key: Option<RegistrationKey>,
    },
    /// An etcd cluster. Routers and workers survive each other.
    Etcd(EtcdConfig),
    /// A fixed list of addresses, which the router polls.
    Static {
        /// Addresses of workers, `http://host:port`. Only the router uses it.
        workers: Vec<String>,
    },
}

/// A worker's API key; never printed.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct RegistrationKey(String);

impl RegistrationKey {
    /// The key `secret`.
    pub fn new(secret: String) -> RegistrationKey {
        RegistrationKey(secret)
    }

    /// The header that shows it.
    ///
    /// # Errors
    /// When no header can hold it.
    pub(crate) fn header(&self) -> Result<MetadataValue<Ascii>, DiscoveryError> {
        let header = MetadataValue::try_from(format!("Bearer {}", self.0));
        let not_plain = |_| DiscoveryError::Config("--api-key (BATON_API_KEY) is no plain text".into());
        let mut header = header.map_err(not_plain)?;
        header.set_sensitive(true);
        Ok(header)
    }
}

impl std::fmt::Debug for RegistrationKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RegistrationKey(…)")
    }
}

/// The connection to etcd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EtcdConfig {
    /// `http://host:port` or `https://host:port`, at least one.
    pub endpoints: Vec<String>,
    /// The prefix of keys. A worker's key is `<prefix>/workers/<id>`.
    pub prefix: String,
    /// How long a silent worker stays registered. Whole seconds, at least 2.
    pub lease_ttl: Duration,
    /// Certificates, for `https`. `None`: etcd's is of an authority that the system trusts.
    pub tls: Option<EtcdTls>,
    /// User name and password, when etcd has authentication switched on.
    pub auth: Option<EtcdAuth>,
}

impl Default for EtcdConfig {
    fn default() -> EtcdConfig {
        EtcdConfig {
            endpoints: vec!["http://127.0.0.1:2379".into()],
            prefix: "/baton".into(),
            lease_ttl: Duration::from_secs(5),
            tls: None,
            auth: None,
        }
    }
}

/// Certificates in PEM files. Each connection reads them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EtcdTls {
    /// Certificate authority that signed etcd's certificate. `None`: those that the system trusts.
    pub ca: Option<PathBuf>,
    /// This process's certificate, when etcd asks for one.
    pub cert: Option<PathBuf>,
    /// The key of `cert`.
    pub key: Option<PathBuf>,
    /// Name in etcd's certificate, when it is not the host of the endpoint.
    pub domain: Option<String>,
}

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdAuth {
    /// User name.
    pub user: String,
    /// File that holds the password. Each connection reads it; the end of a line is not part of it.
    pub password_file: PathBuf,
}

/// A configuration that is not valid.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// A value is wrong.
    #[error("discovery: {0}")]
    Config(String),
    /// A file of certificates or of the password cannot be read.
    #[error("discovery: cannot read {option} {path}: {source}")]
    File {
        /// The option that names it.
        option: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// etcd does not answer, refuses, or has no leader.
    #[error("{0}")]
    Etcd(String),
}

impl DiscoveryConfig {
    /// Checks every value that can be checked without the network.
    ///
    /// # Errors
    /// Says which value is wrong and what is expected. [`register`](crate::register) and
    /// [`watch`](crate::watch()) also check that the part they use is present.
    pub fn validate(&self) -> Result<(), DiscoveryError> {
        match self {
            DiscoveryConfig::Embedded { router, .. } if router.is_empty() => Ok(()),
            DiscoveryConfig::Embedded { router, .. } => url(ROUTER, router),
            DiscoveryConfig::Static { workers } => {
                workers.iter().try_for_each(|address| url(WORKERS, address))
            }
            DiscoveryConfig::Etcd(etcd) => etcd.validate(),
        }
    }
}

impl EtcdConfig {
    fn validate(&self) -> Result<(), DiscoveryError> {
        if self.endpoints.is_empty() {
            let message = format!("{ETCD_ENDPOINTS} is empty; give at least one endpoint, http://host:port");
            return Err(DiscoveryError::Config(message));
        }
        self.endpoints.iter().try_for_each(|endpoint| url(ETCD_ENDPOINTS, endpoint))?;
        if self.endpoints.iter().any(|endpoint| endpoint.starts_with("http://")) && self.has_tls() {
            let message = format!(
                "{ETCD_ENDPOINTS} has an http:// endpoint beside {ETCD_CA}, {ETCD_CERT} or an https:// endpoint; write \
                 https://"
            );
            return Err(DiscoveryError::Config(message));
        }
        if self.lease_ttl < Duration::from_secs(2) || self.lease_ttl.subsec_nanos() != 0 {
            let message = format!("{ETCD_LEASE_TTL} is {:?}; give whole seconds, at least 2", self.lease_ttl);
            return Err(DiscoveryError::Config(message));
        }
        if let Some(tls) = &self.tls
            && tls.cert.is_some() != tls.key.is_some()
        {
            let message = format!("{ETCD_CERT} and {ETCD_KEY} belong together; give both or neither");
            return Err(DiscoveryError::Config(message));
        }
        Ok(())
    }

    /// Whether connections are encrypted.
    pub(crate) fn has_tls(&self) -> bool {
        self.tls.is_some() || self.endpoints.iter().any(|endpoint| endpoint.starts_with("https://"))
    }

    /// `<prefix>/workers/`.
    pub(crate) fn workers_prefix(&self) -> String {
        format!("{}/workers/", self.prefix.trim_end_matches('/'))
    }
}

pub(crate) fn url(what: &str, address: &str) -> Result<(), DiscoveryError> {
    let wrong = || DiscoveryError::Config(format!("{what} is {address:?}, expected http://host:port"));
    let uri = address.parse::<tonic::transport::Uri>().map_err(|_| wrong())?;
    let scheme = uri.scheme_str().is_some_and(|scheme| scheme == "http" || scheme == "https");
    let host = uri.host().is_some_and(|host| !host.is_empty());
    if scheme && host { Ok(()) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_values_are_named() {
        let etcd = |change: fn(&mut EtcdConfig)| {
            let mut config = EtcdConfig::default();
            change(&mut config);
            DiscoveryConfig::Etcd(config)
        };
        let cases = [
            (
                DiscoveryConfig::Embedded { router: "router:80".into(), key: None },
                "--router (BATON_ROUTER) is \"router:80\"",
            ),
            (
                DiscoveryConfig::Static { workers: vec!["ftp://x".into()] },
                "--workers (BATON_WORKERS) is \"ftp://x\"",
            ),
            (etcd(|c| c.endpoints.clear()), "--etcd-endpoints (BATON_ETCD_ENDPOINTS) is empty"),
            (
                etcd(|c| c.lease_ttl = Duration::from_millis(2500)),
                "--etcd-lease-ttl (BATON_ETCD_LEASE_TTL) is 2.5s; give whole seconds",
            ),
            (etcd(|c| c.tls = Some(EtcdTls::default())), "beside --etcd-ca (BATON_ETCD_CA)"),
            (etcd(|c| c.endpoints.push("https://etcd-1:2379".into())), "or an https:// endpoint"),
        ];
        for (config, expected) in cases {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} does not say {expected:?}");
        }
        assert!(DiscoveryConfig::Etcd(EtcdConfig::default()).validate().is_ok());
    }

    #[test]
    fn a_key_that_no_header_can_hold_names_its_option() {
        let error = RegistrationKey::new("a\nb".into()).header().unwrap_err().to_string();
        assert!(error.contains("--api-key (BATON_API_KEY)"), "{error}");
    }
}
