//! The data plane that moves KV blocks between workers, and the seam that transports implement.
//!
//! - [`Receiver`], on the decode side: grants blocks to be written, verifies, revokes, fences.
//! - [`Sender`], on the prefill side: finds a [`Route`] to granted blocks, pushes pieces. The choice of a transport is
//!   logged and counted; where a measurement knows better than the order of kinds, the fastest is taken.
//! - [`SendingTransport`] and [`ReceivingTransport`]: what a transport is. Each has a crate of its own beside this one,
//!   and whoever starts a sender and a receiver says which there are.
//!
//! It knows no engine and no wire protocol, and of the handoff only its messages: what keeps blocks allocated is an
//! opaque guard that travels with the grant (decode side) or the route (prefill side), and is dropped only when no
//! writer, or reader, can touch the blocks any more. How bytes travel is not known here either.

pub mod checksum;
mod counters;
pub mod cuda;
pub mod ranks;
pub mod receiver;
pub mod sender;
pub mod socket;
mod staging;
#[cfg(test)]
mod testing;
pub mod word;

pub use checksum::checksum;
pub use counters::{Counters, TransportCounters, TransportCounts};
pub use receiver::{Fenced, Granted, Listening, Receiver, ReceiverConfig, ReceiverLoad, ReceivingTransport};
pub use sender::{
    Measured, RemotePool, Route, Sender, SenderConfig, SenderContext, SendingTransport, copy_rate,
    stream_rate,
};
pub use staging::StagingSlots;
