//! What prefill and decode workers share: configuration, start, registration, serving and draining.
//!
//! In reading order: [`run()`] is the life of a worker, [`Worker`] what its services see, [`Lifecycle`]
//! where it stands, [`handoff`] how it takes KV from other workers and gives it. A role adds what only it serves
//! ([`RoleService`]).
//!
//! This crate does not know how requests are planned, nor who owns them.
#![forbid(unsafe_code)]

pub mod blending;
mod block_device;
mod bring_in;
mod config;
mod data_plane;
mod device;
mod grammars;
pub mod handoff;
mod host_memory;
mod incoming;
mod lifecycle;
mod links;
mod listeners;
mod load;
mod metrics;
mod pace;
pub mod peers;
mod run;
mod scratch;
mod server;
mod service;
mod tickets;
mod watchers;
mod worker;

pub use baton_handoff::TransportKind;
pub use baton_kv_store::{StoreOpenError, TierOpenError};
pub use baton_transport_rdma::finds_rdma;
pub use baton_worker_metrics::{PromptPace, RequestClock};
pub use baton_worker_tiers::{Recall, SaveAtEnd, Tiers};
pub use block_device::BlockDevice;
pub use bring_in::{Meanwhile, bring_in};
pub use config::{
    BlendSettings, ConfigError, DrafterConfig, KvMemory, ThreadPinning, WorkerConfig, name_of,
    private_runtime_dir,
};
pub use data_plane::{DataPlane, KvDirection};
pub use device::ComputeDevice;
pub use incoming::identity_of;
pub use lifecycle::{Lifecycle, Phase};
pub use links::PeerLinks;
pub use load::Model;
pub use metrics::WorkerMetrics;
pub use pace::step_profile;
pub use run::{EngineBroke, RoleService, run, serve, service_name};
pub use scratch::MAX_SCRATCH_BLOCKS;
pub use server::{KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_MESSAGE_BYTES};
pub use tickets::{Tickets, Uncovered};
pub use worker::Worker;
