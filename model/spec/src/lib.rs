//! Describes a model: its architecture, its cost, its division among ranks, and the interface of its executors.
//!
//! A model's configuration becomes a [`DecoderSpec`], plain data that describes one decoder. An [`Executor`] computes
//! it: a [`Batch`] goes in, logits or sampled tokens come out. A [`ParallelExecutor`] runs several ranks that compute
//! one model together (tensor parallelism).
//!
//! This crate does not know weights, kernels, devices, requests or the network.

pub mod architecture;
mod blend;
mod communicator;
mod config;
pub mod cost;
mod decoder;
mod divergence;
mod error;
mod executor;
pub mod fields;
mod float;
mod integers;
mod long_rope;
mod precision;
mod quantisation_config;
mod ranks;
mod rope;
mod sampling;
mod shard;
mod stored_weights;
mod text_part;
mod weight_format;

pub use blend::{
    BlendPassage, BlendRatio, BlendRefusal, Blended, BlendedPrompt, FIRST_KEPT_LAYER, InvalidRatio,
    PassageKv, Selection, SelectionOrder, select,
};
pub use communicator::{Communicator, CommunicatorError, ThreadCommunicator};
pub use config::ModelConfig;
pub use decoder::{Activation, DecoderSpec, ExpertNaming, LayerSpec, MlpSpec};
pub use error::{LoadError, PrivateWeights};
pub use executor::{Batch, BatchSequence, BlendingExecutor, ExecuteError, Executor, SamplingExecutor};
pub use float::FloatDtype;
pub use integers::{IntegerFormat, IntegerRow, IntegerWidth, MAX_GROUP, MIN_GROUP};
pub use precision::{Activations, Backend, ParseQuantisationError, Quantisation};
pub use quantisation_config::StoredQuantisation;
pub use ranks::{ParallelExecutor, RankError, RankExecutor, SamplingRank};
pub use rope::{RopeScaling, RopeSpec};
pub use sampling::{
    DraftedCount, InvalidLogits, SampledRow, SampledToken, TokenCount, TokenLogprobs, TokenSampling,
};
pub use shard::{DecoderShard, Rank};
pub use stored_weights::StoredWeights;
pub use weight_format::WeightFormat;
