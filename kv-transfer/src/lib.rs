//! The data plane that moves KV blocks between workers.
//!
//! - [`Receiver`], on the decode side: grants blocks to be written, verifies, revokes, fences.
//! - [`Sender`], on the prefill side: finds a [`Route`] to granted blocks, pushes pieces.
//! - Transports, best first: shared memory (`shm`), one-sided writes of a network device (`rdma`), from one CUDA device
//!   to another (`nccl`), sockets (`tcp`). The choice is logged and counted; where a measurement knows better, the fastest is taken.
//!
//! It knows no engine and no wire protocol, and of the handoff only its messages: what keeps blocks allocated is an opaque guard that
//! travels with the grant (decode side) or the route (prefill side), and is dropped only when no
//! writer, or reader, can touch the blocks any more.

mod checksum;
mod counters;
pub mod cuda;
mod nccl;
mod ranks;
mod rdma;
mod receiver;
mod sender;
mod shm;
mod tcp;
mod word;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod conformance_sides;
#[cfg(test)]
mod conformance_wire;
#[cfg(test)]
mod pretended;
#[cfg(test)]
mod testing;

pub use checksum::checksum;
pub use counters::{Counters, TransportCounters, TransportCounts};
pub use nccl::NcclFindings;
#[cfg(any(test, feature = "testing"))]
pub use nccl::TestFabric;
pub use rdma::finds_rdma;
pub use receiver::{Fenced, Granted, Receiver, ReceiverConfig, ReceiverLoad};
pub use sender::{Measured, Route, Sender, SenderConfig, copy_rate, stream_rate};
