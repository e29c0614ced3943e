//! The router's journal: what clients asked for and the tokens that came, appended to files that survive the router.
//!
//! ```text
//! accept ─┐                        ┌─ segment 1: Accepted a, Tokens a, Accepted b, …
//! push  ──┼→ buffer ─one thread──→ ┼─ segment 2: Tokens b, Ended a, Tokens b, …
//! end   ──┘  (20 ms, one fsync)    └─ segment 3: Snapshot b, …      (then 1 and 2 are deleted)
//!                                       each record points to the one before of its session
//! ```
//!
//! `record.rs` is the format, `index.rs` what is known of each session, `recovery.rs` builds the index from segments; all pure.
//! `state.rs` is what callers share with `writer.rs`, the only thread that writes. A session in the index takes about a hundred bytes; its records are read when
//! it is resumed. Requests and tokens are bytes here: the journal knows neither models nor protocols.
#![forbid(unsafe_code)]

mod journal;
mod state;
mod writer;

mod index;
mod record;
mod recovery;
mod segment;

mod error;

pub use error::{AcceptError, JournalOpenError, ResumeError};
pub use journal::{Journal, JournalConfig, Session, SessionWriter};
pub use record::{Acceptance, Ending};
pub use state::JournalCounts;

#[cfg(test)]
mod tests;
