//! Which prompts a prefill worker accepts.

use baton_handoff::prefill::ComputedHandoff;
use baton_request::Failure;
use baton_worker::{
    Worker,
    handoff::{
        opening::{OpenedHandoff, draining_failure},
        prefill_side::PeerFormat,
    },
};
use baton_worker_messages::submit_failure;

/// Accepts a prompt unless the worker drains, the request is invalid or the decode worker cannot use its KV. Whether there is
/// room for it, the engine decides later.
///
/// # Errors
/// The failure that the decode worker receives.
pub fn admit(worker: &Worker, opened: &OpenedHandoff<ComputedHandoff>) -> Result<PeerFormat, Failure> {
    if worker.lifecycle().is_draining() {
        return Err(draining_failure());
    }
    worker.engine().validate(&opened.request).map_err(|error| submit_failure(&error.into()))?;
    PeerFormat::new(worker, &opened.kv_format, opened.wire)
}
