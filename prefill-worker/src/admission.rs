//! Which prompts a prefill worker accepts.

use baton_handoff::prefill::ComputedHandoff;
use baton_request::Failure;
use baton_worker::{
    Worker,
    handoff::{
        giving::PeerBlocks,
        opening::{Begun, leaving},
    },
};

/// Accepts a prompt unless the worker drains or its KV cannot be used by the decode worker. Whether the engine has room
/// for it, the engine decides.
///
/// # Errors
/// Why not: the decode worker hears it.
pub fn admit(worker: &Worker, begun: &Begun<ComputedHandoff>) -> Result<PeerBlocks, Failure> {
    if worker.lifecycle().is_draining() {
        return Err(leaving());
    }
    PeerBlocks::accept(worker, &begun.kv_format, begun.wire)
}
