//! The decode side of a handoff: it wants KV, grants blocks for it and verifies what was written.
//!
//! Two machines share the inputs, the actions and the bookkeeping of arriving KV:
//! - [`RemotePrefill`]: a prefill worker computes a whole sequence and samples the token after it.
//! - [`PrefixFetch`]: another worker hands over what it has cached at the front of a sequence.
//!
//! Neither waits for fences: `Revoke` hands the blocks to the data plane, which returns them when no
//! writer can reach them. The state `Stopping` only keeps the stream open for a while, so that the peer can
//! say `Stopped` and the data plane hears of it.

mod incoming;
mod prefix_fetch;
mod remote_prefill;
mod side;

pub use incoming::Committed;
pub use prefix_fetch::{PrefixFetch, PrefixFetchAction};
pub use remote_prefill::{RemotePrefill, RemotePrefillAction, RemotePrefilled};
pub use side::{DecodeAction, DecodeInput};
