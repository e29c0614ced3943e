//! The router's side: follows the membership.

use baton_proto::worker::registry_server::RegistryServer;
use tokio::{sync::watch as state, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::{Dialer, DiscoveryConfig, DiscoveryError, Membership, RegistryService, etcd, fixed};

/// Follows the membership until it is stopped or dropped.
#[derive(Debug)]
pub struct Discovery {
    members: Membership,
    registry: Option<RegistryService>,
    is_connected: state::Receiver<bool>,
    task: Option<JoinHandle<()>>,
    stop: CancellationToken,
}

/// Starts discovery.
///
/// With embedded discovery workers register with this process: mount [`Discovery::registry`].
///
/// # Errors
/// When the configuration is not valid. An unreachable service is no error: it is retried for ever.
pub fn watch(config: &DiscoveryConfig) -> Result<Discovery, DiscoveryError> {
    watch_over(config, &Dialer::default())
}

/// As [`watch()`], with a dialer for calls to workers. With a TLS dialer, only workers with a certificate of the
/// authority may register.
///
/// # Errors
/// As there.
pub fn watch_over(config: &DiscoveryConfig, dialer: &Dialer) -> Result<Discovery, DiscoveryError> {
    config.validate()?;
    let stop = CancellationToken::new();
    Ok(match config {
        DiscoveryConfig::Embedded { .. } => {
            let registry = RegistryService::new(stop.clone(), dialer.has_tls());
            let members = registry.members();
            Discovery { members, registry: Some(registry), is_connected: always(), task: None, stop }
        }
        DiscoveryConfig::Etcd(config) => {
            let watcher = etcd::Watcher::new(config)?;
            let (members, is_connected) = (watcher.members(), watcher.is_connected());
            let task = tokio::spawn(watcher.run(stop.clone()));
            Discovery { members, registry: None, is_connected, task: Some(task), stop }
        }
        DiscoveryConfig::Static { workers } => {
            let (members, task) = fixed::watch(workers, dialer, stop.clone())?;
            Discovery { members, registry: None, is_connected: always(), task: Some(task), stop }
        }
    })
}

/// Discovery that depends on no service.
fn always() -> state::Receiver<bool> {
    state::Sender::new(true).subscribe()
}

impl Discovery {
    /// Follows the membership.
    pub fn members(&self) -> Membership {
        self.members.clone()
    }

    /// Whether the discovery service answers. Without it the known members stay, and none is added.
    pub fn is_connected(&self) -> state::Receiver<bool> {
        self.is_connected.clone()
    }

    /// The gRPC service to which workers register; only with embedded discovery.
    pub fn registry(&self) -> Option<RegistryServer<RegistryService>> {
        self.registry.clone().map(RegistryServer::new)
    }

    /// Ends discovery. Registration streams are closed, so a draining server need not wait for them.
    pub async fn stop(mut self) {
        self.stop.cancel();
        if let Some(task) = self.task.take()
            && let Err(error) = task.await
        {
            tracing::error!(%error, "the discovery task broke");
        }
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
