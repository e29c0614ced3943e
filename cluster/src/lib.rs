//! Membership: worker records ([`WorkerRecord`]) and the kinds of discovery.
//!
//! A worker calls [`register`] and stays known until it withdraws. A router calls [`watch()`] and reads
//! the newest [`Members`]. With every kind of discovery ([`DiscoveryConfig`]):
//!
//! - Losing the discovery service changes nothing: the last known membership stays, and registration
//!   is renewed when the service returns, however long that takes.
//! - A worker whose KV format differs from its model's is refused with a message that names the difference.
//!
//! [`Dialer`] opens connections between processes, with certificates or without.
//!
//! This crate does not know whether a worker answers, how busy it is, or which worker should serve a request.
#![forbid(unsafe_code)]

mod backoff;
mod config;
mod dial;
mod discovery;
mod embedded;
mod etcd;
mod fixed;
mod members;
mod registration;
mod registration_state;
#[cfg(test)]
mod testing;

pub use baton_cluster_record::{
    BalanceArrival, BalanceGrants, BalanceRefused, Capacity, Compute, KvClass, RecordError, Role, WorkerId,
    WorkerRecord,
};
pub use config::{DiscoveryConfig, DiscoveryError, EtcdAuth, EtcdConfig, EtcdTls, RegistrationKey};
pub use dial::{CONNECTION_WINDOW, DialError, Dialed, Dialer, is_loopback_host};
pub use discovery::{Discovery, watch, watch_over};
pub use embedded::RegistryService;
pub use etcd::reach as reach_etcd;
pub use members::{Members, Membership};
pub use registration::{Registration, register, register_over};
pub use registration_state::RegistrationState;
