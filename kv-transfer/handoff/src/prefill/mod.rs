//! The prefill side of a handoff: it has KV, or computes it, and writes it into the blocks that the decode side grants.
//!
//! A stream begins as an [`Opening`]. Its first message says which machine continues:
//! - [`ComputedHandoff`]: the prompt is computed here, and each layer is pushed when it is final.
//! - [`CachedHandoff`]: what is cached here is pushed; nothing is computed.
//!
//! Both share their inputs and actions, and the bookkeeping of pieces that are ready and pushed.
//!
//! `Stop` ends the computation and closes the route. `Idle` says that no thread reads the blocks any more. The blocks' guard
//! travels with the route, so `Release` is safe even when the deadline of `Stopping` passes first: the memory stays until
//! the route is idle.

mod cached;
mod computed;
mod delivery;
mod opening;
mod side;

pub use cached::{CachedHandoff, CachedHandoffAction};
pub use computed::{ComputeInput, ComputedHandoff, ComputedHandoffAction, HandedOver};
pub use opening::{Opening, OpeningAction};
pub use side::{OwnSide, PrefillAction, PrefillInput};
