//! Reads the files of a published model: its configuration, and its weights tensor by tensor and row by row.
//!
//! Opens a Hugging Face directory or a GGUF file and takes the tensors of its
//! [`DecoderSpec`](baton_model_spec::DecoderSpec) by name. A [`Matrix`] reads rows of every storage format: floats,
//! GGUF blocks, AWQ, GPTQ, FP8, compressed-tensors. A backend's [`MatrixSink`] converts matrices to the backend's own
//! layout.
//!
//! This crate does not know kernels, CPUs or GPUs.

mod blocks;
mod checkpoint;
mod decoder;
mod device;
mod file;
mod gguf;
mod integer_choice;
mod integer_tensors;
mod load;
mod matrix;
mod quantised;
mod sink;
mod tensors;
mod text_part;

pub use decoder::{DecoderWeights, DenseMlp, LayerWeights, Linear, Mlp};
pub use device::{DeviceModel, DeviceSink, DeviceSource, load_for_device, load_ranks_for_devices};
pub use gguf::{gguf_files, gguf_memory_bytes};
pub use integer_choice::{IntegerChoice, SplitGroup, Tolerance, common_format};
pub use load::{
    LoadOptions, LoadProgress, LoadedDecoder, LoadedFiles, SharedFindings, load_config, load_decoder,
};
pub use matrix::{Fp8Scales, Matrix};
pub use sink::{MatrixSink, ProductKind};
