//! The handoff of a sequence's KV from one worker to another, as pure state machines. Inputs and the time go in, actions come
//! out: no machine knows a socket, an engine or a clock. One handoff is one stream between two workers.
//!
//! | | decode side, receives KV | prefill side, sends KV |
//! |---|---|---|
//! | a prompt that is computed | [`decode::RemotePrefill`] | [`prefill::ComputedHandoff`] |
//! | a prefix that is cached | [`decode::PrefixFetch`] | [`prefill::CachedHandoff`] |
//!
//! The prefill side begins as [`prefill::Opening`]. The first message decides which machine continues.
//!
//! ```text
//! D (decode side)                                P (prefill side)
//!   Begin ---------------------------------------> queued
//!   reserve blocks <------------------------------ Started       (its scheduler has taken the request)
//!   Grant ---------------------------------------> route, push   (pieces that were ready before are kept until now)
//!   forward it <---------------------------------- FirstToken    (at any time after Started)
//!   verify <-------------------------------------- Written       (many; the last one has `last` set)
//!   Commit --------------------------------------> free          (all verified, first token known)
//! ```
//!
//! Blocks in messages are D's: `Grant` lists D's blocks and counts the cached ones, and a piece is one layer of one of them.
//! If P's blocks have another size, P pushes a piece when all of its own pieces with tokens of that piece are final.
//!
//! For a cached prefix, `Fetch` replaces `Begin`, `Held` replaces `Started`, and there is no `FirstToken`: P computes
//! nothing, reports how many tokens it holds, and sends their KV. Any two workers can do this, whatever their roles.
//!
//! Either side tells the other with `Progress` that its queue moves: P until the first token, and D from then on, while it waits
//! for blocks. The deadlines of both restart.
//!
//! D may send `Cancel` at any time. P answers with `Stopped` when it has stopped writing. When the first token ends the
//! request, D sends `Done` instead: P stops in the same way, and both sides have succeeded. P may send `Failed`, and then
//! `Stopped`. A broken stream ends the handoff on both sides.
//!
//! All machines keep these promises, which the tests check over interrupted exchanges:
//! - exactly one `Finish`, and then exactly one `Close`, the last action except for late `Revoke`s;
//! - D commits only if every granted piece was reported once and verified;
//! - every reservation is either committed or revoked, once;
//! - P releases its blocks once, and only after the computation and the pushes were told to stop;
//! - every state but the last has a deadline.

// Invariant 12: `cargo xtask verify purity` checks that this crate reaches no runtime, clock or socket.
#![forbid(unsafe_code)]

mod access;
mod block_map;
mod deadlines;
pub mod decode;
mod error;
mod limits;
mod message;
mod piece;
mod piece_set;
pub mod prefill;
#[cfg(test)]
mod tests;
mod transport;

pub use access::{AccessKey, Generation, Secret};
pub use error::{HandoffError, KvFault, PushError, RouteError, Side};
pub use limits::Limits;
pub use message::{Begin, DecodeMessage, Grant, PrefillMessage, Written};
pub use piece::{Piece, PieceWrite, Pushed, Source};
pub use transport::{TransportKind, TransportOffer};
