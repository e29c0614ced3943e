//! Why a model cannot be loaded: each a sentence that names the file, the thing in it and what was expected.

use std::path::{Path, PathBuf};

use crate::integers::MIN_GROUP;

/// A model was refused. Nothing about it gets better by trying again.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not the JSON that it should be.
    #[error("{}: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and what.
        message: String,
    },
    /// There are no weights in the directory.
    #[error("{}: found neither model.safetensors nor model.safetensors.index.json", path.display())]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },
    /// What only processors do so far.
    #[error("{what} is not there on a device so far: it takes --device cpu")]
    NotOnDevice {
        /// Asked for.
        what: &'static str,
    },
    /// The decoder does not know this architecture.
    #[error("{}: architecture {found} is not supported, expected one of {expected}", path.display())]
    UnknownArchitecture {
        /// config.json
        path: PathBuf,
        /// What it asks for.
        found: String,
        /// What there is.
        expected: String,
    },
    /// A field of config.json asks for what the decoder does not do, or for nothing sensible.
    #[error("{}: {field} is {found}, expected {expected}", path.display())]
    Config {
        /// config.json
        path: PathBuf,
        /// The field, with dots between levels.
        field: String,
        /// Its value.
        found: String,
        /// What would do.
        expected: String,
    },
    /// A weight file is damaged.
    #[error("{}: {message}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A tensor that the architecture needs is not there.
    #[error("{}: tensor {tensor} is missing, expected one of shape {expected:?}", path.display())]
    MissingTensor {
        /// The weight file, or the index of several.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// The shape that config.json implies.
        expected: Vec<usize>,
    },
    /// A tensor does not fit config.json.
    #[error("{}: tensor {tensor} has shape {found:?}, expected {expected:?}", path.display())]
    WrongShape {
        /// The weight file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape that config.json implies.
        expected: Vec<usize>,
    },
    /// A tensor is of a type that the kernels do not compute with.
    #[error("{}: tensor {tensor} is of type {found}, expected F32, F16 or BF16", path.display())]
    WrongDtype {
        /// The weight file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// Its type.
        found: String,
    },
    /// A tensor that the decoder would ignore: the model is another than config.json says.
    #[error("{}: tensor {tensor} is not part of {architecture}, expected none by this name", path.display())]
    UnexpectedTensor {
        /// The weight file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// The architecture of config.json.
        architecture: String,
    },
    /// Activations in bf16 were asked for.
    #[error("activations in bf16 need a processor with avx512_bf16, which this one has not: use f32 or auto")]
    NoBf16,
    /// So many ranks cannot compute this model together.
    #[error("{num_ranks} ranks cannot divide {size} {what}, expected a tensor parallel degree of {degrees}")]
    Indivisible {
        /// What each rank would have a part of.
        what: &'static str,
        /// How many of it there are.
        size: usize,
        /// The tensor-parallel degree.
        num_ranks: usize,
        /// Those that would do.
        degrees: String,
    },
    /// The columns of a tensor of integers would be divided where its numbers share a scale.
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
        /// Where a rank's columns begin or end.
        column: usize,
        /// Numbers that share a scale.
        group: usize,
        /// Columns may be divided at multiples of it.
        multiple: usize,
    },
    /// An option of the caller makes no sense.
    #[error("{option} is {found}, expected {expected}")]
    Option {
        /// The field of `LoadOptions`.
        option: &'static str,
        /// Its value.
        found: usize,
        /// What would do.
        expected: &'static str,
    },
}

/// What else helps where weights are rounded in larger groups than there may be.
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
