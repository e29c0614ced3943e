//! Configuration, weights and the forward pass of decoder-only language models.
//!
//! A Hugging Face directory or a GGUF file becomes a [`LoadedModel`] by [`load`]: its configuration is read into
//! a [`DecoderSpec`], one decoder described by data, and its tensors are packed into the layout that kernels
//! stream. Its [`CpuExecutor`] computes [`Batch`]es over blocks of KV.
//!
//! It does not know requests, text, or the network.

mod architecture;
mod blocks;
mod communicator;
mod config;
pub mod cost;
mod cpu;
#[doc(hidden)]
pub mod cuda;
mod decoder;
mod error;
mod executor;
mod fields;
mod float;
mod gguf;
mod gguf_files;
mod integer_tensors;
mod integers;
mod load;
mod matrix;
mod packed;
mod parallel;
mod precision;
mod quantised;
mod rope;
mod sampling;
mod shard;
mod spec;
mod weights;

pub use baton_cuda::num_devices as num_cuda_devices;
pub use communicator::{Communicator, CommunicatorError, ThreadCommunicator};
pub use config::ModelConfig;
#[doc(hidden)]
pub use cpu::benchmark;
pub use cpu::{CpuExecutor, CpuList, CpuListError, ParallelCpuExecutor, ThreadPool};
pub use cuda::{
    BatchLimits, DeviceWeightBytes, ModelOnDevices, StartError as CudaStartError,
    block_kernels as cuda_block_kernels,
};
pub use error::LoadError;
pub use executor::{Batch, BatchSequence, ExecuteError, Executor, SamplingExecutor};
pub use float::FloatDtype;
pub use gguf_files::gguf_files;
pub use load::{LoadOptions, LoadProgress, LoadedModel, load, load_ranks};
pub use precision::{Activations, Backend, ParseQuantisationError, Quantisation};
pub use rope::{RopeScaling, RopeSpec};
pub use sampling::{InvalidLogits, SampledRow, SampledToken, TokenCount, TokenLogprobs, TokenSampling};
pub use shard::{DecoderShard, Rank};
pub use spec::{Activation, DecoderSpec, ExpertNaming, LayerSpec, MlpSpec};
