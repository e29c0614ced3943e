//! What decides of the tiers below a pool. A worker carries it out, a simulator runs it. Pure.
//!
//! - `directory`: which tier holds which blocks, where, and which make room;
//! - `worth`: what of a sequence is read sooner than computed: before that, and meanwhile;
//! - `recall_pace`: how long reads take.
//!
//! It knows neither bytes nor files.
#![forbid(unsafe_code)]

mod directory;
mod recall_pace;
mod worth;

pub use directory::{Directory, SlotChange, SlotPlace};
pub use recall_pace::RecallPace;
pub use worth::{ReadMode, TierRun, Worth, meeting, worth};
