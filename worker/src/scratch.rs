//! Blocks without a sequence, reserved for a measurement of the data plane.

use std::time::Duration;

use baton_engine::{Request, Reservation, SamplingParams, SpeculationMode};
use tonic::Status;

use crate::worker::Worker;

/// A measurement takes at most so many blocks, however many are free.
pub const MAX_SCRATCH_BLOCKS: usize = 64;

/// Free blocks are reserved at once.
const PATIENCE: Duration = Duration::from_secs(1);

impl Worker {
    /// Reserves blocks on a worker that is not busy: at most `max_blocks`, [`MAX_SCRATCH_BLOCKS`] and an eighth of the
    /// pool. They are free again when the reservation is dropped.
    ///
    /// # Errors
    /// `UNAVAILABLE` when requests wait, half of the pool is taken, or the worker is leaving.
    pub async fn reserve_scratch(&self, max_blocks: usize) -> Result<Reservation, Status> {
        let busy = |why: &str| Status::unavailable(format!("{} measures nothing now: {why}", self.id()));
        if self.lifecycle.is_draining() {
            return Err(busy("it is leaving"));
        }
        let load = *self.engine.load().borrow();
        if load.num_waiting > 0 || load.num_free_blocks < load.num_total_blocks / 2 {
            return Err(busy("it is busy"));
        }
        let block_size = self.engine.storage().layout().block_size;
        let num_blocks = max_blocks
            .min(MAX_SCRATCH_BLOCKS)
            .min(load.num_total_blocks / 8)
            .min(self.engine.context_length() / block_size)
            .max(1);
        // As for a prompt of that length, under a random salt: no block of it is in the prefix cache.
        let salt = uuid::Uuid::new_v4().to_string();
        let request = Request {
            id: format!("scratch-{salt}"),
            prompt: vec![0; (num_blocks * block_size).saturating_sub(1).max(1)].into(),
            sampling: SamplingParams { max_tokens: 1, ..SamplingParams::default() },
            cache_salt: salt,
            speculation: SpeculationMode::Off,
            ..Request::default()
        };
        match tokio::time::timeout(PATIENCE, self.engine.reserve(request)).await {
            Ok(Ok(reservation)) => Ok(reservation),
            Ok(Err(error)) => Err(busy(&error.to_string())),
            Err(_) => Err(busy("no blocks became free")),
        }
    }
}
