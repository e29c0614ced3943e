//! Where a worker listens, and where others reach it: its URL, the host of its listeners for KV, its usable transports. It does
//! not bind anything.

use std::net::SocketAddr;

use baton_cluster::is_loopback_host;
use baton_handoff::TransportKind;

use crate::config::{ConfigError, WorkerConfig};

impl WorkerConfig {
    /// Whether other hosts reach the listeners for KV, if the host that this worker announces, with its URL `address`, is for them.
    pub(crate) fn check_listeners(&self, address: &str) -> Result<(), ConfigError> {
        let host = self.data_host(address);
        let listeners = [
            (TransportKind::Tcp, "--data-listen", self.data_listen),
            (TransportKind::Rdma, "--rdma-listen", self.rdma_listen()),
            (TransportKind::Nccl, "--nccl-listen", self.nccl_listen),
        ];
        let hidden = listeners
            .into_iter()
            .find(|(kind, _, listen)| self.transports.contains(kind) && listen.ip().is_loopback());
        let announced_by = match (&self.data_host, &self.advertise) {
            (Some(_), _) => "--data-host",
            (None, Some(_)) => "--advertise",
            (None, None) => "--listen",
        };
        match hidden {
            Some((_, flag, listen)) if !is_loopback_host(&host) => {
                Err(ConfigError::LoopbackListener { announced_by, host, flag, listen })
            }
            _ => Ok(()),
        }
    }

    /// The ways of [`transports`](Self::transports) that blocks can travel, also where they `are_divided` among GPUs.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn usable_transports(&self, are_divided: bool) -> Result<Vec<TransportKind>, ConfigError> {
        let mut usable = self.transports.clone();
        usable.retain(|&kind| !are_divided || kind.supports_ranks());
        if usable.is_empty() { Err(ConfigError::OnlyNccl) } else { Ok(usable) }
    }

    /// Of the `used` transports, those that carry KV to other hosts in the clear although this worker has a certificate.
    pub(crate) fn unencrypted(&self, used: &[TransportKind]) -> Vec<TransportKind> {
        let mut unencrypted = vec![TransportKind::Rdma, TransportKind::Nccl];
        unencrypted.retain(|kind| self.tls.is_some() && used.contains(kind));
        unencrypted
    }

    /// URL at which others reach this worker, once `bound` is known.
    ///
    /// # Errors
    /// When none is given and `bound` is not one that others can use.
    pub fn address(&self, bound: SocketAddr) -> Result<String, ConfigError> {
        match &self.advertise {
            Some(url) => {
                let uri = url.parse::<tonic::transport::Uri>().ok();
                let port = uri.as_ref().filter(|uri| uri.scheme().is_some()).and_then(|uri| uri.port_u16());
                if port.is_none() {
                    return Err(ConfigError::Advertise(url.clone()));
                }
                if uri.as_ref().and_then(|uri| uri.scheme_str()) != Some(self.scheme()) {
                    return Err(ConfigError::AdvertisedScheme { url: url.clone(), expected: self.scheme() });
                }
                Ok(url.trim_end_matches('/').to_owned())
            }
            None if bound.ip().is_unspecified() => Err(ConfigError::Unadvertised { listen: bound }),
            None => Ok(format!("{}://{bound}", self.scheme())),
        }
    }

    /// Where the control connections of rdma are listened for.
    pub fn rdma_listen(&self) -> SocketAddr {
        self.rdma_listen.unwrap_or_else(|| SocketAddr::new(self.data_listen.ip(), 0))
    }

    fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Host at which others reach the data listener, given this worker's URL.
    pub fn data_host(&self, address: &str) -> String {
        self.data_host.clone().unwrap_or_else(|| {
            let uri = address.parse::<tonic::transport::Uri>().ok();
            uri.as_ref().and_then(|uri| uri.host()).unwrap_or("127.0.0.1").to_owned()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use baton_tls::{Tls, TlsConfig};

    use super::*;
    use crate::config::tests::{config, with};

    #[test]
    fn listeners_of_kv_are_reached_where_they_are_announced() {
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        let advertised = |url: &str, transports: &[TransportKind]| {
            with(|c| (c.advertise, c.transports) = (Some(url.into()), transports.to_vec()))
        };
        let [shm, rdma, nccl, tcp] = TransportKind::ALL;
        for (config, expected) in [
            (
                advertised("http://gpu-0:8090", &[shm, tcp]),
                "--advertise announces gpu-0 to other workers, but --data-listen 127.0.0.1:0 is reached from this host alone",
            ),
            (advertised("http://10.0.0.1:8090", &[rdma]), "--rdma-listen 127.0.0.1:0"),
            (advertised("http://[fd00::1]:8090", &[nccl]), "--nccl-listen 127.0.0.1:0"),
            (with(|c| c.data_host = Some("gpu-0".into())), "--data-host announces gpu-0"),
            (with(|c| c.listen = ([10, 0, 0, 1], 80).into()), "--listen announces 10.0.0.1"),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} does not say {expected:?}");
        }
        let mut reached = advertised("http://gpu-0:8090", &TransportKind::ALL);
        (reached.data_listen, reached.nccl_listen) = (any, any);
        let mut told = advertised("http://gpu-0:8090", &[tcp]);
        told.data_host = Some("127.0.0.1".into());
        let here = ["http://localhost:1", "http://127.0.0.2:1", "http://[::1]:1"];
        let here = here.map(|url| advertised(url, &[tcp]));
        let shared = advertised("http://gpu-0:8090", &[shm]);
        for config in here.into_iter().chain([reached, told, shared]) {
            assert!(config.validate().is_ok(), "{:?}", config.validate());
        }
    }

    #[test]
    fn blocks_that_are_divided_among_gpus_do_not_travel_over_nccl() {
        let usable = |transports: &[TransportKind], are_divided| {
            with(|c| c.transports = transports.to_vec()).usable_transports(are_divided)
        };
        let [shm, rdma, nccl, tcp] = TransportKind::ALL;
        assert_eq!(usable(&[shm, nccl], false).unwrap(), [shm, nccl]);
        assert_eq!(usable(&[shm, rdma, nccl, tcp], true).unwrap(), [shm, rdma, tcp]);
        assert!(usable(&[nccl], true).unwrap_err().to_string().contains("add tcp"));
    }

    #[test]
    fn transports_that_do_not_encrypt_are_named_where_there_is_a_certificate() {
        let [shm, rdma, nccl, tcp] = TransportKind::ALL;
        let file = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tls/testdata").join(name);
        let files = TlsConfig { cert: file("a.pem"), key: file("a.key"), ca: file("ca.pem"), name: None };
        let secure = with(|c| c.tls = Some(Tls::load(files).unwrap()));
        assert_eq!(secure.unencrypted(&TransportKind::ALL), [rdma, nccl]);
        assert_eq!(secure.unencrypted(&[nccl, tcp]), [nccl]);
        assert!(secure.unencrypted(&[shm, tcp]).is_empty());
        assert!(config().unencrypted(&TransportKind::ALL).is_empty());
    }

    #[test]
    fn addresses_follow_what_is_advertised() {
        let bound = SocketAddr::from(([127, 0, 0, 1], 4000));
        assert_eq!(config().address(bound).unwrap(), "http://127.0.0.1:4000");
        let config = with(|c| c.advertise = Some("http://decode-0:9000/".into()));
        assert_eq!(config.address(bound).unwrap(), "http://decode-0:9000");
        assert_eq!(config.data_host("http://decode-0:9000"), "decode-0");
        assert_eq!(with(|c| c.data_host = Some("10.0.0.1".into())).data_host("http://x:1"), "10.0.0.1");
    }

    #[test]
    fn rdma_listens_where_tcp_does() {
        let any = SocketAddr::from(([0, 0, 0, 0], 8091));
        assert_eq!(config().rdma_listen(), SocketAddr::from(([127, 0, 0, 1], 0)));
        assert_eq!(with(|c| c.data_listen = any).rdma_listen(), SocketAddr::from(([0, 0, 0, 0], 0)));
        let own = SocketAddr::from(([10, 0, 0, 1], 8092));
        let both = with(|c| (c.data_listen, c.rdma_listen) = (any, Some(own)));
        assert_eq!(both.rdma_listen(), own);
    }
}
