//! Configuration, weights and the forward pass of decoder-only language models.

mod executor;

pub use executor::{Batch, BatchSequence, ExecuteError, Executor};
