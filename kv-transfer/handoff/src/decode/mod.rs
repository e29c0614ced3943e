//! The decode side of a handoff: it grants blocks, receives KV in them and verifies it.
//!
//! Two machines share the inputs, the actions, the record of arriving KV and the last states:
//! - [`RemotePrefill`]: a prefill worker computes a whole sequence and samples the token after it.
//! - [`PrefixFetch`]: another worker hands over what it has cached at the front of a sequence.
//!
//! Neither waits for fences: `Revoke` gives the blocks to the data plane, which returns them when no writer can reach them.
//! The state `Stopping` only keeps the stream open for a limited time, so that `Stopped` reaches the data plane.

mod ending;
mod incoming;
mod prefix_fetch;
mod remote_prefill;
mod side;

pub use incoming::Committed;
pub use prefix_fetch::{PrefixFetch, PrefixFetchAction};
pub use remote_prefill::{RemotePrefill, RemotePrefillAction, RemotePrefilled};
pub use side::{DecodeAction, DecodeInput};
