//! The worker's side: register, and stay registered.

use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    Dialer, DiscoveryConfig, DiscoveryError, WorkerRecord,
    config::ROUTER,
    embedded, etcd,
    registration_state::{RegistrationState, Service, StateReport},
};

/// Keeps a worker registered until it is withdrawn or dropped.
#[derive(Debug)]
pub struct Registration {
    state: watch::Receiver<RegistrationState>,
    task: JoinHandle<()>,
    withdraw: DropGuard,
}

/// Registers a worker, and registers it again whenever the discovery service has lost it.
///
/// # Errors
/// When the configuration is not valid. An unreachable service is no error: it is tried until it answers.
pub fn register(config: &DiscoveryConfig, record: WorkerRecord) -> Result<Registration, DiscoveryError> {
    register_over(config, record, &Dialer::default())
}

/// Like [`register`], with a dialer for calls to the router.
///
/// # Errors
/// Those of [`register`].
pub fn register_over(
    config: &DiscoveryConfig,
    record: WorkerRecord,
    dialer: &Dialer,
) -> Result<Registration, DiscoveryError> {
    config.validate()?;
    record.validate().map_err(|error| DiscoveryError::Config(error.to_string()))?;
    let withdraw = CancellationToken::new();
    let (sender, state) = watch::channel(RegistrationState::Searching { problem: None });
    let report = StateReport::new(sender, service(config));
    let task = match config {
        DiscoveryConfig::Embedded { router, .. } if router.is_empty() => {
            let message = format!("{ROUTER} is empty; a worker needs the router's address, http://host:port");
            return Err(DiscoveryError::Config(message));
        }
        DiscoveryConfig::Embedded { router, key } => {
            let registrar = embedded::Registrar::new(router, key.as_ref(), record, report, dialer)?;
            tokio::spawn(registrar.run(withdraw.clone()))
        }
        DiscoveryConfig::Etcd(config) => {
            let registrar = etcd::Registrar::new(config, record, report)?;
            tokio::spawn(registrar.run(withdraw.clone()))
        }
        // The router calls its workers; a worker has nothing to do.
        DiscoveryConfig::Static { .. } => {
            let mut report = report;
            report.set(RegistrationState::Registered);
            let withdrawn = withdraw.clone();
            tokio::spawn(async move { withdrawn.cancelled().await })
        }
    };
    Ok(Registration { state, task, withdraw: withdraw.drop_guard() })
}

fn service(config: &DiscoveryConfig) -> Service {
    match config {
        DiscoveryConfig::Embedded { router, .. } => Service::Router(router.clone()),
        DiscoveryConfig::Etcd(config) => Service::Etcd(config.endpoints.clone()),
        DiscoveryConfig::Static { .. } => Service::List,
    }
}

impl Registration {
    /// The state of the registration, and its changes.
    pub fn state(&self) -> watch::Receiver<RegistrationState> {
        self.state.clone()
    }

    /// Ends the registration. Returns when the discovery service has removed the worker, or cannot be reached:
    /// then the lease expires.
    pub async fn withdraw(self) {
        drop(self.withdraw);
        if let Err(error) = self.task.await {
            tracing::error!(%error, "registration task panicked; the worker is no longer registered");
        }
    }
}
