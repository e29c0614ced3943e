//! Certificates from files, as configurations of rustls; read again when the files change.

use std::{
    fmt::Display,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant, SystemTime},
};

use rustls::{
    CipherSuite, ClientConfig, RootCertStore, ServerConfig,
    client::{Resumption, WebPkiServerVerifier, danger::ServerCertVerifier},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tracing::{info, warn};

use crate::{error::TlsError, identity::Identity};

/// The ALPN protocols of the ports of gRPC and HTTP.
const HTTP: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// The ALPN protocol of the data plane: a client cannot mistake another port for it.
const DATA: [&[u8]; 1] = [b"baton-kv"];

/// Options, as messages name them: each with its variable.
pub(crate) const CERT: &str = "--tls-cert (BATON_TLS_CERT)";
pub(crate) const CA: &str = "--tls-ca (BATON_TLS_CA)";

/// Which files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// This process's certificate, with those between it and the authority's, in PEM.
    pub cert: PathBuf,
    /// Its key, in PEM.
    pub key: PathBuf,
    /// The authority, or several, that peers' certificates come from, in PEM.
    pub ca: PathBuf,
    /// The name that every peer's certificate must have; `None`: that of the host that was dialled.
    pub name: Option<String>,
}

/// TLS with the current content of the files. Cheap to clone.
#[derive(Clone)]
pub struct Tls {
    shared: Arc<Shared>,
}

struct Shared {
    config: TlsConfig,
    loaded: RwLock<Loaded>,
    /// When a rejected connection was last logged.
    last_refusal: Mutex<Option<Instant>>,
}

struct Loaded {
    stamps: Stamps,
    identity: Identity,
    http_server: Arc<ServerConfig>,
    data_server: Arc<ServerConfig>,
    http_client: Arc<ClientConfig>,
    data_client: Arc<ClientConfig>,
}

/// When each file was changed, and its length.
type Stamps = [Option<(SystemTime, u64)>; 3];

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// When they cannot be read, do not belong together, or no peer would accept them: expired, for example.
    pub fn load(config: TlsConfig) -> Result<Tls, TlsError> {
        let loaded = RwLock::new(Loaded::read(&config)?);
        Ok(Tls { shared: Arc::new(Shared { config, loaded, last_refusal: Mutex::default() }) })
    }

    /// The identity of this process.
    pub fn identity(&self) -> Identity {
        self.with(|loaded| loaded.identity)
    }

    /// For a port of gRPC and HTTP: a peer may show no certificate, and has no identity then.
    pub fn http_server(&self) -> Arc<ServerConfig> {
        self.with(|loaded| Arc::clone(&loaded.http_server))
    }

    /// For a port of the data plane: a peer without a certificate is disconnected.
    pub fn data_server(&self) -> Arc<ServerConfig> {
        self.with(|loaded| Arc::clone(&loaded.data_server))
    }

    /// To dial gRPC.
    pub fn http_client(&self) -> Arc<ClientConfig> {
        self.with(|loaded| Arc::clone(&loaded.http_client))
    }

    /// To dial the data plane.
    pub fn data_client(&self) -> Arc<ClientConfig> {
        self.with(|loaded| Arc::clone(&loaded.data_client))
    }

    /// The name that the certificate of the peer at `host` must have.
    ///
    /// # Errors
    /// When it cannot be one.
    pub fn name_of(&self, host: &str) -> Result<ServerName<'static>, TlsError> {
        server_name(self.shared.config.name.as_deref().unwrap_or(host))
    }

    /// Logs that a connection was rejected, at most once a second: unauthenticated peers must not fill the log.
    pub fn refused(&self, peer: impl Display, error: &io::Error) {
        let mut last = self.shared.last_refusal.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1)) {
            *last = Some(Instant::now());
            warn!(%peer, %error, "connection rejected: TLS handshake failed");
        }
    }

    /// The configuration of the current files, or the previous one if the files cannot be used.
    fn with<T>(&self, get: impl Fn(&Loaded) -> T) -> T {
        let Shared { config, loaded, .. } = &*self.shared;
        let stamps = stamps(config);
        {
            let loaded = loaded.read().unwrap_or_else(PoisonError::into_inner);
            if loaded.stamps == stamps {
                return get(&loaded);
            }
        }
        let mut loaded = loaded.write().unwrap_or_else(PoisonError::into_inner);
        if loaded.stamps != stamps {
            match Loaded::read(config) {
                Ok(new) => {
                    info!(identity = %new.identity, "certificates changed; new connections use them");
                    *loaded = new;
                }
                Err(error) => {
                    warn!(%error, "changed certificates cannot be used; keeping the old ones")
                }
            }
            // They are not read again until they change again.
            loaded.stamps = stamps;
        }
        get(&loaded)
    }
}

impl Loaded {
    fn read(config: &TlsConfig) -> Result<Loaded, TlsError> {
        // Taken before the files are read: a change meanwhile is then noticed.
        let stamps = stamps(config);
        let chain = certificates(CERT, &config.cert)?;
        let key = key(&config.key)?;
        let mut roots = RootCertStore::empty();
        for ca in certificates(CA, &config.ca)? {
            roots.add(ca)?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(provider()));
        let refused =
            |error: rustls::Error| TlsError::Refused { cert: config.cert.clone(), why: error.to_string() };
        let verifier =
            || WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let unusable =
            |error: rustls::server::VerifierBuilderError| rustls::Error::General(error.to_string());
        let (required, optional) = (
            verifier().build().map_err(unusable)?,
            verifier().allow_unauthenticated().build().map_err(unusable)?,
        );
        let servers = WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(unusable)?;

        // Verified as a peer would.
        let now = UnixTime::now();
        required.verify_client_cert(&chain[0], &chain[1..], now).map_err(refused)?;
        if let Some(name) = &config.name {
            servers
                .verify_server_cert(&chain[0], &chain[1..], &server_name(name)?, &[], now)
                .map_err(refused)?;
        }
        let identity = Identity::of(&chain)
            .ok_or_else(|| rustls::Error::General("the certificate has no public key".into()))?;

        let other_key = |error| match error {
            rustls::Error::InconsistentKeys(_) => {
                TlsError::OtherKey { cert: config.cert.clone(), key: config.key.clone() }
            }
            error => TlsError::Unusable(error),
        };
        let server = |verifier: Arc<dyn ClientCertVerifier>, protocols: &[&[u8]]| {
            let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(&[&rustls::version::TLS13])?
                .with_client_cert_verifier(verifier)
                .with_single_cert(chain.clone(), key.clone_key())
                .map_err(other_key)?;
            server.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
            // No session is resumed: each connection checks the certificate. After the handshake only data is sent, so
            // that the kernel can take over.
            server.send_tls13_tickets = 0;
            server.enable_secret_extraction = true;
            Ok::<_, TlsError>(Arc::new(server))
        };
        let client = |protocols: &[&[u8]]| {
            let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(&[&rustls::version::TLS13])?
                .with_root_certificates(Arc::clone(&roots))
                .with_client_auth_cert(chain.clone(), key.clone_key())
                .map_err(other_key)?;
            client.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
            client.resumption = Resumption::disabled();
            client.enable_secret_extraction = true;
            Ok::<_, TlsError>(Arc::new(client))
        };
        Ok(Loaded {
            stamps,
            identity,
            http_server: server(optional, &HTTP)?,
            data_server: server(required, &DATA)?,
            http_client: client(&HTTP[..1])?,
            data_client: client(&DATA)?,
        })
    }
}

/// Lets libraries that make TLS connections of their own, such as HTTP clients, compute with ring. A second call changes nothing.
pub fn compute_with_ring() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Ring, preferring the fastest cipher of this processor: AES-128 where it has instructions for AES (a fifth faster than
/// AES-256, and secure), else ChaCha20.
pub(crate) fn provider() -> CryptoProvider {
    let mut provider = rustls::crypto::ring::default_provider();
    let first = match has_aes() {
        true => CipherSuite::TLS13_AES_128_GCM_SHA256,
        false => CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
    };
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != first);
    provider
}

fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes")
        && std::arch::is_aarch64_feature_detected!("pmull");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}

pub(crate) fn server_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    // As URLs write addresses of IPv6.
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    match bare.parse::<IpAddr>() {
        Ok(address) => Ok(ServerName::IpAddress(address.into())),
        Err(_) => ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name(name.to_owned())),
    }
}

pub(crate) fn certificates(
    option: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates = CertificateDer::pem_slice_iter(&read(option, path)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| TlsError::File { option, path: path.to_owned(), why: error.to_string() })?;
    match certificates.is_empty() {
        true => Err(TlsError::Empty { option, path: path.to_owned(), expected: "certificate" }),
        false => Ok(certificates),
    }
}

pub(crate) fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let option = "--tls-key (BATON_TLS_KEY)";
    PrivateKeyDer::from_pem_slice(&read(option, path)?).map_err(|_| TlsError::Empty {
        option,
        path: path.to_owned(),
        expected: "private key",
    })
}

fn read(option: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read { option, path: path.to_owned(), source })
}

fn stamps(config: &TlsConfig) -> Stamps {
    [&config.cert, &config.key, &config.ca].map(|path| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn testdata(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
    }

    fn files(cert: &str, key: &str, ca: &str) -> TlsConfig {
        TlsConfig { cert: testdata(cert), key: testdata(key), ca: testdata(ca), name: None }
    }

    #[test]
    fn files_that_cannot_work_are_named_with_what_is_wrong() {
        let named = |name: &str| TlsConfig { name: Some(name.into()), ..files("a.pem", "a.key", "ca.pem") };
        for (config, expected) in [
            (files("none.pem", "a.key", "ca.pem"), "cannot read --tls-cert (BATON_TLS_CERT)"),
            (files("a.pem", "none.key", "ca.pem"), "cannot read --tls-key (BATON_TLS_KEY)"),
            (files("a.pem", "a.key", "none.pem"), "cannot read --tls-ca (BATON_TLS_CA)"),
            (files("a.key", "a.key", "ca.pem"), "holds no certificate"),
            (files("a.pem", "a.pem", "ca.pem"), "holds no private key"),
            (files("a.pem", "b.key", "ca.pem"), "does not belong to --tls-cert"),
            (files("expired.pem", "expired.key", "ca.pem"), "expired"),
            (files("foreign.pem", "foreign.key", "ca.pem"), "UnknownIssuer"),
            (named("other.example"), "not valid for name"),
            (named("no name"), "is no name that a certificate could be for; --tls-name (BATON_TLS_NAME)"),
        ] {
            let error = Tls::load(config).unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} does not say {expected:?}");
        }
        assert!(Tls::load(named("baton")).is_ok());
        assert!(Tls::load(named("127.0.0.1")).is_ok());
    }

    #[test]
    fn changed_files_are_read_by_the_next_handshake_and_broken_ones_change_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let copy = |from: &str, to: &str| fs::copy(testdata(from), dir.path().join(to)).unwrap();
        let set = |name: &str| {
            copy(&format!("{name}.pem"), "tls.crt");
            copy(&format!("{name}.key"), "tls.key");
            // Two changes can fall into one tick of the file system's clock.
            let later = SystemTime::now() + std::time::Duration::from_secs(u64::from(name.as_bytes()[0]));
            fs::File::options()
                .append(true)
                .open(dir.path().join("tls.crt"))
                .unwrap()
                .set_modified(later)
                .unwrap();
        };
        let identity_of = |name: &str| {
            Tls::load(files(&format!("{name}.pem"), &format!("{name}.key"), "ca.pem")).unwrap().identity()
        };
        set("a");
        copy("ca.pem", "ca.crt");
        let path = |name: &str| dir.path().join(name);
        let config =
            TlsConfig { cert: path("tls.crt"), key: path("tls.key"), ca: path("ca.crt"), name: None };
        let tls = Tls::load(config).unwrap();
        assert_eq!(tls.identity(), identity_of("a"));
        set("b");
        assert_eq!(tls.identity(), identity_of("b"));
        set("expired");
        assert_eq!(tls.identity(), identity_of("b"));
        set("a");
        assert_eq!(tls.identity(), identity_of("a"));
    }

    #[test]
    fn the_cipher_is_that_of_the_processor() {
        let first = provider().cipher_suites[0].suite();
        assert_eq!(first == CipherSuite::TLS13_AES_128_GCM_SHA256, has_aes());
    }
}
