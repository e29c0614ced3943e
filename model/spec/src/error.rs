//! Errors of loading a model. Each message names the file, the field or tensor, and the expected value.

use std::path::{Path, PathBuf};

use crate::integers::MIN_GROUP;

/// A model was refused. Another try with the same input fails in the same way.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file is not the expected JSON.
    #[error("{}: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The position and the problem.
        message: String,
    },
    /// The directory has no weights.
    #[error("{}: found neither model.safetensors nor model.safetensors.index.json", path.display())]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },
    /// A feature that only the CPU backend has.
    #[error("{what} is not supported on a GPU, use --device cpu")]
    NotOnDevice {
        /// The requested feature.
        what: &'static str,
    },
    /// The architecture is not supported.
    #[error("{}: architecture {found} is not supported, expected one of {expected}", path.display())]
    UnknownArchitecture {
        /// config.json
        path: PathBuf,
        /// The architecture in config.json.
        found: String,
        /// The supported architectures.
        expected: String,
    },
    /// A field of config.json has an unsupported or invalid value.
    #[error("{}: {field} is {found}, expected {expected}", path.display())]
    Config {
        /// config.json
        path: PathBuf,
        /// The field, with dots between levels.
        field: String,
        /// Its value.
        found: String,
        /// The accepted values.
        expected: String,
    },
    /// A weight file is damaged.
    #[error("{}: {message}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The problem.
        message: String,
    },
    /// A required tensor is missing.
    #[error("{}: tensor {tensor} is missing, expected one of shape {expected:?}", path.display())]
    MissingTensor {
        /// The weight file, or the index of several.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The shape that config.json implies.
        expected: Vec<usize>,
    },
    /// A tensor does not fit config.json.
    #[error("{}: tensor {tensor} has shape {found:?}, expected {expected:?}", path.display())]
    WrongShape {
        /// The weight file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape that config.json implies.
        expected: Vec<usize>,
    },
    /// A tensor has a type that the kernels do not support.
    #[error("{}: tensor {tensor} is of type {found}, expected F32, F16 or BF16", path.display())]
    WrongDtype {
        /// The weight file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The tensor's type.
        found: String,
    },
    /// A tensor that the decoder would ignore. The model is then not the one that config.json describes.
    #[error("{}: tensor {tensor} is not part of {architecture}, expected none by this name", path.display())]
    UnexpectedTensor {
        /// The weight file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The architecture of config.json.
        architecture: String,
    },
    /// Activations in bf16 were requested on a CPU without the instructions for it.
    #[error(
        "activations in bf16 need a CPU with AMX or avx512_bf16, or with bf16 of aarch64, which this CPU does not have: use \
         f32 or auto"
    )]
    NoBf16,
    /// The weights can never fit into memory of this process's own.
    #[error(
        "{}: the weights take {bytes} bytes of memory{}, but this process may use {limit} (the machine's memory, or the limit \
         of its control group): use --quantize int8 or int4, a smaller model, or a --weight-cache that can be written, \
         from which weights are read again as they are needed",
        path.display(), beside_text(.beside)
    )]
    WeightsTooLarge {
        /// The model.
        path: PathBuf,
        /// What its packed weights take, with those of the ranks that this process loaded before.
        bytes: usize,
        /// The weights of another model that are in memory, too.
        beside: Option<PrivateWeights>,
        /// What the process may use.
        limit: usize,
    },
    /// The model cannot be divided among this many ranks.
    #[error("{num_ranks} ranks cannot divide {size} {what}, expected a tensor parallel degree of {degrees}")]
    Indivisible {
        /// What cannot be divided.
        what: &'static str,
        /// Its size.
        size: usize,
        /// The tensor-parallel degree.
        num_ranks: usize,
        /// The possible degrees.
        degrees: String,
    },
    /// A rank's boundary would cut a quantised tensor's columns inside a group that shares a scale.
    #[error(
        "{}: {num_ranks} ranks divide tensor {tensor} at column {column}, within a group of {group} that share a scale, \
         expected a multiple of {multiple}: use a smaller tensor parallel degree{}, or other weights",
        path.display(), smaller_groups(.multiple)
    )]
    SplitGroup {
        /// The weight file, or the index of several.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// The tensor-parallel degree.
        num_ranks: usize,
        /// The first or last column of a rank.
        column: usize,
        /// Numbers that share a scale.
        group: usize,
        /// Columns may be cut at multiples of this.
        multiple: usize,
    },
    /// A load option has an invalid value.
    #[error("{option} is {found}, expected {expected}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        found: usize,
        /// The accepted values.
        expected: &'static str,
    },
}

/// Packed weights of a model in memory of this process's own, which no file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivateWeights {
    /// The model.
    pub path: PathBuf,
    /// Of all its ranks.
    pub bytes: usize,
}

fn beside_text(beside: &Option<PrivateWeights>) -> String {
    let text = |weights: &PrivateWeights| format!(" beside {} of {}", weights.bytes, weights.path.display());
    beside.as_ref().map(text).unwrap_or_default()
}

/// A hint for groups that are larger than the smallest possible.
fn smaller_groups(multiple: &usize) -> &'static str {
    if *multiple > MIN_GROUP { ", smaller groups (as --quantize int8:32 has)" } else { "" }
}

impl LoadError {
    /// A file cannot be read.
    pub fn io(path: &Path, source: std::io::Error) -> LoadError {
        LoadError::Io { path: path.to_owned(), source }
    }

    /// A weight file is damaged.
    pub fn bad_file(path: &Path, message: impl ToString) -> LoadError {
        LoadError::BadFile { path: path.to_owned(), message: message.to_string() }
    }
}
