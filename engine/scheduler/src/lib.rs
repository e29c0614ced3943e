//! The decisions of an engine: which tokens its next step computes, and who owns which KV blocks. An engine carries them out, and the
//! simulator runs the same under a virtual clock.
//!
//! In reading order:
//! - `block_pool`: the owners of KV blocks, and the prefix cache;
//! - `sequence`: tokens, how many are computed, and blocks;
//! - `plan`: what one step does;
//! - `step_time`: how long steps take, and how many prompt tokens fit beside decodes;
//! - `scheduler`: decides the next step.
//!
//! Pure: it knows no thread, clock, model, request or stream.

#![forbid(unsafe_code)]

mod block_pool;
mod plan;
mod scheduler;
mod sequence;
mod step_time;

pub use block_pool::{BlockPool, IntegrityError, PoolReport};
pub use plan::{Admission, Adoption, Chunk, StepPlan};
pub use scheduler::{MAX_REST, PrefixBlocks, Scheduler, SchedulerConfig};
pub use sequence::{Sequence, SequenceId, SequenceRole, keeps};
pub use step_time::{NEWEST, PrefillBudget, StepTime, TOKEN_GUESS};
