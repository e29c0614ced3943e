//! Copies between the pool of a worker and the tiers below it: what requests leave is [saved](SaveAtEnd), and what the pool lacks is
//! [recalled](Recall) before a prompt, or a preempted sequence, is computed. A recall is like the fetch of a prefix: blocks are
//! reserved, written and cached. If it fails or takes too long, the engine computes what did not come. What is slow to read comes
//! [while the prompt is computed](BesideRecall). What the engine forgets, as it may be wrong, the tiers [forget](Tiers::forget_spoiled).
//!
//! This crate does not know the network, nor who plans requests.
#![forbid(unsafe_code)]

mod beside;
mod limits;
mod recall;
mod resume;
mod save;
mod spoiled;
mod tiers;

pub use beside::{Beside, BesideRecall};
pub use limits::FetchLimits;
pub use recall::Recall;
pub use save::SaveAtEnd;
pub use tiers::{Tiers, TiersConfig};
