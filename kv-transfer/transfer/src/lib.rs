//! The data plane that moves KV blocks between workers, and the seam that transports implement.
//!
//! - [`Receiver`] is the decode side. It grants blocks, verifies what peers wrote, revokes grants and fences them.
//! - [`Sender`] is the prefill side. It finds a [`Route`] to granted blocks and pushes pieces. It logs and counts which
//!   transport it chooses: the first kind that works, or the fastest where the rates were measured.
//! - [`SendingTransport`] and [`ReceivingTransport`] are the two halves of a transport. Each transport is a crate of
//!   its own beside this one. The caller that starts a sender or a receiver passes the transports in.
//!
//! This crate knows no engine and no wire protocol. Of the handoff it knows only the messages. An opaque guard keeps
//! the blocks allocated; it belongs to the grant (decode side) or to the route (prefill side). It is dropped when no
//! writer and no reader can touch the blocks any more. How bytes travel is the transports' concern.

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
