//! Tests of the whole system: real processes, real sockets, real etcd, real faults.

mod bad_input;
mod bench;
mod blending;
mod broken_models;
mod cache_events;
mod cancel;
mod clients;
mod devices;
mod doctor;
mod durable;
mod faults;
mod gguf;
mod harness;
mod keys;
mod measure_migration;
mod migration;
mod observing;
#[path = "../ports.rs"]
mod ports;
mod prefix;
mod prompts;
mod serving;
mod sides;
mod simulated;
mod soak;
mod structured;
mod tiers;
mod tls;
mod up;
/// The proxy that the handoff's fault matrix uses to disturb connections.
#[path = "../../decode-worker/tests/handoff/matrix/wire.rs"]
#[allow(dead_code)] // the matrix uses more of it
mod wire;
