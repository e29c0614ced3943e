//! The router's side: know who is there.

use baton_proto::worker::registry_server::RegistryServer;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::{Dialer, DiscoveryConfig, DiscoveryError, Membership, RegistryService, etcd, fixed};

/// Follows the membership until it is stopped or dropped.
#[derive(Debug)]
pub struct Discovery {
    members: Membership,
    registry: Option<RegistryService>,
    task: Option<JoinHandle<()>>,
    stop: CancellationToken,
}

/// Begins to look for workers.
///
/// With embedded discovery workers come to this process: mount [`Discovery::registry`].
///
/// # Errors
/// When the configuration cannot work. An unreachable service is no error: it is tried for ever.
pub fn watch(config: &DiscoveryConfig) -> Result<Discovery, DiscoveryError> {
    watch_over(config, &Dialer::default())
}

/// As [`watch()`], calling workers by this dialer. With one that speaks TLS, only workers that show a certificate of the
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
            Discovery { members: registry.members(), registry: Some(registry), task: None, stop }
        }
        DiscoveryConfig::Etcd(config) => {
            let watcher = etcd::Watcher::new(config)?;
            let members = watcher.members();
            let task = tokio::spawn(watcher.run(stop.clone()));
            Discovery { members, registry: None, task: Some(task), stop }
        }
        DiscoveryConfig::Static { workers } => {
            let (members, task) = fixed::watch(workers, dialer, stop.clone())?;
            Discovery { members, registry: None, task: Some(task), stop }
        }
    })
}

impl Discovery {
    /// Follows the membership.
    pub fn members(&self) -> Membership {
        self.members.clone()
    }

    /// The gRPC service to which workers register; only with embedded discovery.
    pub fn registry(&self) -> Option<RegistryServer<RegistryService>> {
        self.registry.clone().map(RegistryServer::new)
    }

    /// Ends: registration streams are closed, so that a server that drains need not wait for them.
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
