//! The files of a published model: its configuration, and its weights tensor by tensor and row by row.
//!
//! A Hugging Face directory or a GGUF file is opened, and the tensors of its [`DecoderSpec`](baton_model_spec::DecoderSpec)
//! are taken by their names. However numbers are stored (floats, GGUF's blocks, AWQ, GPTQ, FP8, compressed-tensors), a
//! [`Matrix`] gives them row by row. What a backend makes of matrices is up to its [`MatrixSink`].
//!
//! It does not know kernels, processors or devices.

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

pub use decoder::{DecoderWeights, DenseMlp, LayerWeights, Linear, Mlp};
pub use device::{DeviceModel, DeviceSink, DeviceSource, load_for_device, load_ranks_for_devices};
pub use gguf::gguf_files;
pub use integer_choice::{IntegerChoice, SplitGroup, Tolerance, common_format};
pub use load::{LoadOptions, LoadProgress, LoadedDecoder, LoadedFiles, load_config, load_decoder};
pub use matrix::{Fp8Scales, Matrix};
pub use sink::{MatrixSink, ProductKind};
