//! Exit codes of routers and workers, for whatever restarts them.

use std::process::ExitCode;

use baton_worker::EngineBroke;

/// It cannot start, and would not the next time: a wrong setting or model. `EX_CONFIG` of sysexits.h.
pub(crate) const CANNOT_START: u8 = 78;

/// The code for the error of a router or worker.
pub(crate) fn of_server(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<EngineBroke>() {
        // It has served: another start may help.
        Some(EngineBroke) => ExitCode::FAILURE,
        None => ExitCode::from(CANNOT_START),
    }
}
