//! Loads decoder-only language models onto a backend: this machine's CPUs or NVIDIA GPUs.
//!
//! [`load`] makes a [`LoadedModel`] of a Hugging Face directory or a GGUF file, and that makes an
//! [`Executor`].
//!
//! This crate does not know requests, text or the network.

mod kernel_files;
mod load;

pub use baton_checkpoint::{
    DeviceModel, LoadOptions, LoadProgress, gguf_files, gguf_memory_bytes, load_config, load_for_device,
    load_ranks_for_devices,
};
pub use baton_cpu_threads::{CpuList, CpuListError, ThreadPool};
pub use baton_cuda::{
    CudaError, device_name as cuda_device_name, num_devices as num_cuda_devices,
    set_connections as set_cuda_connections,
};
pub use baton_cuda_kernels::kernel::KernelCode;
pub use baton_cuda_kernels::shipped as shipped_kernels;
pub use baton_model_cpu::benchmark::{CpuPeaks, Peak as CpuPeak};
pub use baton_model_cpu::{CpuExecutor, CpuModel, ParallelCpuExecutor};
pub use baton_model_cuda::{
    BatchLimits, DeviceWeightBytes, ModelOnDevices, StartError as CudaStartError,
    block_kernels as cuda_block_kernels,
};
pub use baton_model_spec::{
    Activation, Activations, Backend, Batch, BatchSequence, Communicator, CommunicatorError, DecoderShard,
    DecoderSpec, ExecuteError, Executor, ExpertNaming, FloatDtype, InvalidLogits, LayerSpec, LoadError,
    MlpSpec, ModelConfig, ParseQuantisationError, PrivateWeights, Quantisation, Rank, RopeScaling, RopeSpec,
    SampledRow, SampledToken, SamplingExecutor, StoredWeights, ThreadCommunicator, TokenCount, TokenLogprobs,
    TokenSampling, cost,
};
pub use kernel_files::{KERNEL_FILES, kernel_code};
pub use load::{LoadedModel, load, load_ranks};
