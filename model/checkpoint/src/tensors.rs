//! The tensors of a model's files by name, with a mark on those that were taken.
//!
//! It knows names, types, shapes and bytes, not what tensors are for.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use baton_gguf::TensorType;
use baton_model_spec::{FloatDtype, LoadError};
use safetensors::tensor::Dtype;

use crate::file::Span;

/// All tensors of a model.
pub(crate) struct Tensors {
    /// The file, or the index of several files: for messages about missing tensors.
    pub(crate) path: PathBuf,
    pub(crate) by_name: BTreeMap<String, Tensor>,
}

/// A tensor of the files.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) span: Span,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: StoredDtype,
    pub(crate) is_taken: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum StoredDtype {
    Float(FloatDtype),
    /// GGUF blocks of integers.
    Block(TensorType),
    /// A type that no weight is made of.
    Other(Dtype),
}

impl fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoredDtype::Float(dtype) => f.write_str(dtype.name()),
            StoredDtype::Block(tensor_type) => f.write_str(tensor_type.name()),
            StoredDtype::Other(dtype) => write!(f, "{dtype:?}"),
        }
    }
}

/// A tensor of any type: one part of a weight.
pub(crate) struct Raw {
    pub(crate) span: Span,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: Dtype,
}

impl Raw {
    pub(crate) fn wrong_shape(&self, tensor: String, found: Vec<usize>, expected: Vec<usize>) -> LoadError {
        LoadError::WrongShape { path: self.span.file().path().to_owned(), tensor, found, expected }
    }

    pub(crate) fn bad(&self, message: String) -> LoadError {
        LoadError::bad_file(self.span.file().path(), message)
    }
}

impl From<Dtype> for StoredDtype {
    fn from(dtype: Dtype) -> StoredDtype {
        match dtype {
            Dtype::F32 => StoredDtype::Float(FloatDtype::F32),
            Dtype::F16 => StoredDtype::Float(FloatDtype::F16),
            Dtype::BF16 => StoredDtype::Float(FloatDtype::Bf16),
            other => StoredDtype::Other(other),
        }
    }
}

impl From<TensorType> for StoredDtype {
    fn from(tensor_type: TensorType) -> StoredDtype {
        match tensor_type {
            TensorType::F32 => StoredDtype::Float(FloatDtype::F32),
            TensorType::F16 => StoredDtype::Float(FloatDtype::F16),
            TensorType::Bf16 => StoredDtype::Float(FloatDtype::Bf16),
            blocks => StoredDtype::Block(blocks),
        }
    }
}

impl Tensors {
    /// The type of a tensor in a directory; `None` if the tensor is missing.
    pub(crate) fn dtype_of(&self, name: &str) -> Option<Dtype> {
        match self.by_name.get(name)?.dtype {
            StoredDtype::Float(FloatDtype::F32) => Some(Dtype::F32),
            StoredDtype::Float(FloatDtype::F16) => Some(Dtype::F16),
            StoredDtype::Float(FloatDtype::Bf16) => Some(Dtype::BF16),
            StoredDtype::Other(dtype) => Some(dtype),
            StoredDtype::Block(_) => None,
        }
    }

    /// The shape of a tensor; `None` if it is missing.
    pub(crate) fn shape_of(&self, name: &str) -> Option<Vec<usize>> {
        Some(self.by_name.get(name)?.shape.clone())
    }

    /// Takes a tensor that is a part of a weight and has one of these types and shapes.
    pub(crate) fn take_raw(
        &mut self,
        name: &str,
        dtypes: &[Dtype],
        shapes: &[&[usize]],
    ) -> Result<Raw, LoadError> {
        let (tensor, expected) = (name.to_owned(), shapes[0].to_vec());
        let Some(dtype) = self.dtype_of(name) else {
            return Err(LoadError::MissingTensor { path: self.path.clone(), tensor, expected });
        };
        let found = self.by_name.get_mut(name).expect("present: its type was found");
        let raw = Raw { span: found.span.clone(), shape: found.shape.clone(), dtype };
        if !shapes.contains(&&*raw.shape) {
            let found = raw.shape.clone();
            return Err(raw.wrong_shape(tensor, found, expected));
        }
        if !dtypes.contains(&dtype) {
            let names: Vec<String> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
            return Err(
                raw.bad(format!("tensor {tensor} is of type {dtype:?}, expected {}", names.join(" or ")))
            );
        }
        found.is_taken = true;
        Ok(raw)
    }
}
