//! How the parts of a cluster find each other: flags, and what discovery is told by them.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context, bail};
use baton_cluster::{DiscoveryConfig, EtcdAuth, EtcdConfig, EtcdTls, RegistrationKey};
use clap::{Args, ValueEnum};

/// How the parts find each other.
#[derive(Clone, Debug, Args)]
pub(crate) struct DiscoveryArgs {
    /// How routers and workers find each other.
    #[arg(long, value_enum, default_value_t = DiscoveryKind::Embedded, env = "BATON_DISCOVERY")]
    pub discovery: DiscoveryKind,
    /// URLs of etcd, separated by commas.
    #[arg(
        long,
        value_name = "URLS",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:2379",
        env = "BATON_ETCD_ENDPOINTS"
    )]
    pub etcd_endpoints: Vec<String>,
    /// Prefix of every key in etcd. Clusters with different prefixes do not see each other.
    #[arg(long, value_name = "KEY", default_value = "/baton", env = "BATON_ETCD_PREFIX")]
    pub etcd_prefix: String,
    /// Seconds without contact after which etcd removes a worker.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, env = "BATON_ETCD_LEASE_TTL")]
    pub etcd_lease_ttl: u64,
    /// User name for etcd.
    #[arg(long, value_name = "NAME", env = "BATON_ETCD_USER")]
    pub etcd_user: Option<String>,
    /// File that holds the password for etcd. Each connection reads it.
    #[arg(long, value_name = "FILE", env = "BATON_ETCD_PASSWORD_FILE")]
    pub etcd_password_file: Option<PathBuf>,
    /// Certificate authority (PEM) that signed etcd's certificate. Without it, URLs with https need one that the system trusts.
    #[arg(long, value_name = "FILE", env = "BATON_ETCD_CA")]
    pub etcd_ca: Option<PathBuf>,
    /// Client certificate (PEM) for etcd.
    #[arg(long, value_name = "FILE", requires = "etcd_key", env = "BATON_ETCD_CERT")]
    pub etcd_cert: Option<PathBuf>,
    /// Private key of the client certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "etcd_cert", env = "BATON_ETCD_KEY")]
    pub etcd_key: Option<PathBuf>,
    /// Name in etcd's certificate, if it is not the host of the endpoint.
    #[arg(long, value_name = "NAME", requires = "etcd_ca", env = "BATON_ETCD_TLS_NAME")]
    pub etcd_tls_name: Option<String>,
}

impl DiscoveryArgs {
    /// As the cluster wants it. `router` and `key` are for the embedded kind, `workers` for the static one.
    pub(crate) fn config(
        &self,
        router: String,
        key: Option<RegistrationKey>,
        workers: Vec<String>,
    ) -> anyhow::Result<DiscoveryConfig> {
        Ok(match self.discovery {
            DiscoveryKind::Embedded => DiscoveryConfig::Embedded { router, key },
            DiscoveryKind::Static => DiscoveryConfig::Static { workers },
            DiscoveryKind::Etcd => DiscoveryConfig::Etcd(EtcdConfig {
                endpoints: self.etcd_endpoints.clone(),
                prefix: self.etcd_prefix.clone(),
                lease_ttl: Duration::from_secs(self.etcd_lease_ttl),
                tls: etcd_tls(self),
                auth: etcd_auth(self)?,
            }),
        })
    }
}

/// How routers and workers find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DiscoveryKind {
    /// Workers register with the router. Nothing else is needed.
    Embedded,
    /// Workers register in etcd. Several routers may share them.
    Etcd,
    /// The router is given a list of workers.
    Static,
}

fn etcd_tls(args: &DiscoveryArgs) -> Option<EtcdTls> {
    let (ca, cert, key) = (args.etcd_ca.clone(), args.etcd_cert.clone(), args.etcd_key.clone());
    (ca.is_some() || cert.is_some()).then_some(EtcdTls { ca, cert, key, domain: args.etcd_tls_name.clone() })
}

fn etcd_auth(args: &DiscoveryArgs) -> anyhow::Result<Option<EtcdAuth>> {
    let (user, file) = match (&args.etcd_user, &args.etcd_password_file) {
        (Some(user), Some(file)) => (user.clone(), file),
        (None, None) => return Ok(None),
        _ => bail!(
            "--etcd-user (BATON_ETCD_USER) and --etcd-password-file (BATON_ETCD_PASSWORD_FILE) belong together; \
             give both or neither"
        ),
    };
    // Each connection reads it. Here it is only looked at, before a model is loaded in vain.
    fs::read_to_string(file).with_context(|| {
        format!("cannot read --etcd-password-file (BATON_ETCD_PASSWORD_FILE) {}", file.display())
    })?;
    Ok(Some(EtcdAuth { user, password_file: file.clone() }))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        discovery: DiscoveryArgs,
    }

    #[test]
    fn what_is_wrong_with_the_password_names_its_option() {
        for (words, expected) in [
            ("", "--etcd-password-file (BATON_ETCD_PASSWORD_FILE) belong together"),
            (
                "--etcd-password-file /no/file",
                "cannot read --etcd-password-file (BATON_ETCD_PASSWORD_FILE) /no/file",
            ),
        ] {
            let line =
                Line::parse_from(format!("baton --discovery etcd --etcd-user u {words}").split_whitespace());
            let error = line.discovery.config(String::new(), None, Vec::new()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
