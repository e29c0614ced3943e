//! The gate of a worker, as its tasks share it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_engine::EngineHandle;
use baton_request::BlendPoint;

use super::gate::{Decision, Gate};
use crate::config::WorkerConfig;

/// Decides for one worker.
#[derive(Debug)]
pub struct Blending {
    /// Locked for a decision. `None`: this worker never blends, for this reason.
    gate: Result<Mutex<Gate>, &'static str>,
}

impl Blending {
    pub(crate) fn new(config: &WorkerConfig, engine: &EngineHandle) -> Blending {
        let gate = match (config.blend, engine.blends()) {
            (None, _) => Err("off"),
            // The engine has said why.
            (Some(_), None) => Err("model"),
            (Some(settings), Some(_)) => {
                let num_layers = engine.storage().layout().num_layers;
                Ok(Mutex::new(Gate::new(settings.max_kl, settings.audit, num_layers)))
            }
        };
        Blending { gate }
    }

    /// What is computed again of passages; `None` while nothing is blended by itself.
    pub fn point(&self) -> Option<BlendPoint> {
        self.gate().and_then(|gate| gate.point())
    }

    /// Whether audits have found that blended prompts of the model differ too much from full prefills.
    pub fn is_closed_by_audits(&self) -> bool {
        self.gate().is_some_and(|gate| gate.is_closed_by_audits())
    }

    /// What becomes of a prompt that comes with `point`; see [`Gate::decide`].
    pub(crate) fn decide(&self, point: Option<BlendPoint>, fits: bool) -> Decision {
        match &self.gate {
            Ok(gate) => lock(gate).decide(point, fits),
            Err(reason) => Decision { refused: Some(reason), measure: None },
        }
    }

    /// `None`: this worker never blends.
    pub(crate) fn gate(&self) -> Option<MutexGuard<'_, Gate>> {
        self.gate.as_ref().ok().map(lock)
    }
}

/// No user code runs under the lock, so a poisoned one holds whole data.
fn lock(gate: &Mutex<Gate>) -> MutexGuard<'_, Gate> {
    gate.lock().unwrap_or_else(PoisonError::into_inner)
}
