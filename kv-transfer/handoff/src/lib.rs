//! The handoff as two pure state machines: [`decode::DecodeHandoff`] on the worker that owns the
//! request, [`prefill::PrefillHandoff`] on the worker that computes its prompt. Inputs and the time
//! go in, actions come out; they know no socket, no engine and no clock. One handoff is one stream
//! between the two workers.
//!
//! ```text
//! D (decode worker)                              P (prefill worker)
//!   Begin ---------------------------------------> queued
//!   reserve blocks <------------------------------ Started       (its scheduler took it up)
//!   Grant ---------------------------------------> route, push   (pieces ready before are kept till now)
//!   pass it on <---------------------------------- FirstToken    (at any time after Started)
//!   verify <-------------------------------------- Written       (many; the last one says so)
//!   Commit --------------------------------------> free          (all verified, first token known)
//! ```
//!
//! Blocks in messages are D's: `Grant` lists, and counts as cached, D's blocks, and a piece is one layer of one of them.
//! Where P's have another size, P releases a piece of D when all of its own pieces under it are final.
//!
//! A handoff of what is cached ([`Extent::Cached`]) is the same, with `Held` for `Started` and without `FirstToken`: P
//! computes nothing, says how much it has, and hands over that. It serves any two workers: D and P are sides here.
//!
//! Instead of any of these D may send `Cancel`, which P answers with `Stopped` once nothing of it
//! writes any more; P may send `Failed`, and then `Stopped`. A stream that breaks ends both.
//!
//! Both machines keep these promises, which the tests check over interrupted exchanges:
//! - exactly one `Finish`, and then exactly one `Close`, the last action but for late `Revoke`s;
//! - D finishes well only if every granted piece was named once and verified;
//! - every reservation is either committed or revoked, once;
//! - P's blocks are released once, and after the computation and the pushes were told to stop;
//! - in every state but the last, there is a deadline.

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
