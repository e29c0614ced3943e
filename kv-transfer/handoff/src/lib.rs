//! The handoff of a sequence's KV from one worker to another, as pure state machines. Inputs and the time go in, actions come
//! out: no machine knows a socket, an engine or a clock. One handoff is one stream between two workers.
//!
//! | | decode side, takes KV | prefill side, gives KV |
//! |---|---|---|
//! | a prompt that is computed | [`decode::RemotePrefill`] | [`prefill::ComputedHandoff`] |
//! | a prefix that is cached | [`decode::PrefixFetch`] | [`prefill::CachedHandoff`] |
//!
//! The prefill side begins as [`prefill::Opening`], until the first message says which.
//!
//! ```text
//! D (decode side)                                P (prefill side)
//!   Begin ---------------------------------------> queued
//!   reserve blocks <------------------------------ Started       (its scheduler has taken the request)
//!   Grant ---------------------------------------> route, push   (pieces that were ready before are kept until now)
//!   pass it on <---------------------------------- FirstToken    (at any time after Started)
//!   verify <-------------------------------------- Written       (many; the last one says so)
//!   Commit --------------------------------------> free          (all verified, first token known)
//! ```
//!
//! Blocks in messages are D's: `Grant` lists D's blocks and counts the cached ones, and a piece is one layer of one of them.
//! Where P's blocks have another size, P pushes a piece of D when all of its own pieces under it are final.
//!
//! A cached prefix takes `Fetch` for `Begin` and `Held` for `Started`, and has no `FirstToken`: P computes nothing, says how
//! much it holds, and hands that over. Any two workers do this; D and P are only sides here.
//!
//! D may send `Cancel` at any time. P answers with `Stopped` once nothing of it writes any more. When the first token ends
//! the request, D sends `Done` instead: P stops in the same way, and both sides have ended well. P may send `Failed`, and
//! then `Stopped`. A stream that breaks ends both.
//!
//! All machines keep these promises, which the tests check over interrupted exchanges:
//! - exactly one `Finish`, and then exactly one `Close`, the last action except for late `Revoke`s;
//! - D commits only if every granted piece was named once and verified;
//! - every reservation is either committed or revoked, once;
//! - P's blocks are released once, and after the computation and the pushes were told to stop;
//! - in every state but the last, there is a deadline.

// Invariant 12: `cargo xtask verify purity` checks that this crate reaches no runtime, clock or socket.
#![forbid(unsafe_code)]

mod access;
mod deadlines;
pub mod decode;
mod error;
mod limits;
mod message;
mod piece;
mod pieces;
pub mod prefill;
mod sides;
#[cfg(test)]
mod tests;
mod transport;

pub use access::{AccessKey, Generation, Secret};
pub use error::{HandoffError, KvFault, PushError, RouteError, Side};
pub use limits::Limits;
pub use message::{Begin, DecodeMessage, Grant, PrefillMessage, Written};
pub use piece::{Piece, PieceWrite, Pushed, Source};
pub use transport::{TransportKind, TransportOffer};
