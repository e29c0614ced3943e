//! What a model is, what it costs, and the seams behind which something computes it.
//!
//! A configuration becomes a [`DecoderSpec`], one decoder described by data. Whatever computes it is an [`Executor`]: a
//! [`Batch`] goes in, logits or sampled tokens come out. Several ranks that compute one model together are a
//! [`ParallelExecutor`].
//!
//! It does not know weights, kernels, devices, requests, or the network.

pub mod architecture;
mod communicator;
mod config;
pub mod cost;
mod decoder;
mod error;
mod executor;
pub mod fields;
mod float;
mod integers;
mod precision;
mod quantisation_config;
mod ranks;
mod rope;
mod sampling;
mod shard;

pub use communicator::{Communicator, CommunicatorError, ThreadCommunicator};
pub use config::ModelConfig;
pub use decoder::{Activation, DecoderSpec, ExpertNaming, LayerSpec, MlpSpec};
pub use error::LoadError;
pub use executor::{Batch, BatchSequence, ExecuteError, Executor, SamplingExecutor};
pub use float::FloatDtype;
pub use integers::{IntegerFormat, IntegerRow, IntegerWidth, MAX_GROUP, MIN_GROUP};
pub use precision::{Activations, Backend, ParseQuantisationError, Quantisation};
pub use quantisation_config::StoredQuantisation;
pub use ranks::{ParallelExecutor, RankError, RankExecutor, SamplingRank};
pub use rope::{RopeScaling, RopeSpec};
pub use sampling::{InvalidLogits, SampledRow, SampledToken, TokenCount, TokenLogprobs, TokenSampling};
pub use shard::{DecoderShard, Rank};
