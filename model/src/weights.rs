//! Weight files: safetensors and GGUF, mapped into memory.
//!
//! It knows names, shapes and bytes, not what they are for.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_gguf::{Gguf, TensorType, Value};
use memmap2::Mmap;
use safetensors::tensor::{Dtype, Metadata};

use crate::fields::{Fields, read_object};
use crate::gguf::{Names, Place};
use crate::gguf_files::gguf_files;
use crate::matrix::{Matrix, RowOrder, Span, Stored};
use crate::quantised::{self, Quantisation};
use crate::{DecoderSpec, FloatDtype, LoadError, ModelConfig};

/// All tensors of a model.
pub(crate) struct Checkpoint {
    /// For messages about tensors that are in no file.
    path: PathBuf,
    tensors: BTreeMap<String, Tensor>,
    /// How the tensors are named, if not as published.
    names: Option<Names>,
    /// How they were quantised, if several make up a weight.
    quantisation: Option<Quantisation>,
    files: Vec<Arc<WeightFile>>,
    /// Elements of the tensors that were taken.
    num_parameters: u64,
}

/// One mapped file. Whoever truncates it while it is in use kills the process: replace, do not rewrite.
#[derive(Debug)]
pub(crate) struct WeightFile {
    path: PathBuf,
    map: Mmap,
    /// Hash of the header.
    header: blake3::Hash,
}

impl WeightFile {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Tensor {
    span: Span,
    shape: Vec<usize>,
    dtype: StoredDtype,
    is_taken: bool,
}

#[derive(Clone, Copy, Debug)]
enum StoredDtype {
    Float(FloatDtype),
    /// Blocks of integers.
    Block(TensorType),
    /// Nothing that a weight is made of.
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

/// A tensor of any type: a part of a weight.
pub(crate) struct Raw {
    pub(crate) span: Span,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: Dtype,
}

impl Raw {
    pub(crate) fn wrong_shape(&self, tensor: String, found: Vec<usize>, expected: Vec<usize>) -> LoadError {
        LoadError::WrongShape { path: self.span.file().path.clone(), tensor, found, expected }
    }

    pub(crate) fn bad(&self, message: String) -> LoadError {
        LoadError::bad_file(&self.span.file().path, message)
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

impl Checkpoint {
    fn new(path: &Path) -> Checkpoint {
        Checkpoint {
            path: path.to_owned(),
            tensors: BTreeMap::new(),
            names: None,
            quantisation: None,
            files: vec![],
            num_parameters: 0,
        }
    }

    /// Maps the weight files of the directory or GGUF file `model` and checks their headers.
    pub(crate) fn open(model: &Path, config: &ModelConfig) -> Result<Checkpoint, LoadError> {
        if !model.is_dir() {
            return Checkpoint::open_gguf(model, &config.decoder);
        }
        Ok(Checkpoint { quantisation: config.quantisation, ..Checkpoint::open_directory(model)? })
    }

    #[cfg(test)]
    pub(crate) fn open_quantised(model: &Path, quantisation: Quantisation) -> Result<Checkpoint, LoadError> {
        Ok(Checkpoint { quantisation: Some(quantisation), ..Checkpoint::open_directory(model)? })
    }

    fn open_directory(model: &Path) -> Result<Checkpoint, LoadError> {
        let single = model.join("model.safetensors");
        let index = model.join("model.safetensors.index.json");
        // As transformers: one whole file goes before an index.
        if single.exists() {
            let mut checkpoint = Checkpoint::new(&single);
            checkpoint.tensors = checkpoint.add_file(&single)?;
            return Ok(checkpoint);
        }
        if !index.exists() {
            return Err(LoadError::NoWeights { path: model.to_owned() });
        }
        Checkpoint::open_index(model, &index)
    }

    fn open_gguf(first: &Path, spec: &DecoderSpec) -> Result<Checkpoint, LoadError> {
        let mut checkpoint = Checkpoint::new(first);
        let mut architecture = None;
        for path in gguf_files(first)? {
            let map = map(&path)?;
            let gguf = Gguf::parse(&map).map_err(|error| LoadError::gguf(&path, &error))?;
            let found = gguf.get("general.architecture").and_then(Value::as_text).map(str::to_owned);
            architecture = architecture.or(found);
            let tensors: Vec<(String, baton_gguf::Tensor)> =
                gguf.tensors().iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
            let header = blake3::hash(gguf.header());
            let file = Arc::new(WeightFile { path, map, header });
            for (name, tensor) in tensors {
                let span = Span::new(&file, tensor.start..tensor.start + tensor.size_bytes);
                let dtype = tensor.tensor_type.into();
                checkpoint.tensors.insert(name, Tensor { span, shape: tensor.shape, dtype, is_taken: false });
            }
            checkpoint.files.push(file);
        }
        let separate_experts = checkpoint.tensors.contains_key("blk.0.ffn_gate.0.weight");
        checkpoint.names = Some(Names::new(&architecture.unwrap_or_default(), separate_experts, spec));
        Ok(checkpoint)
    }

    fn open_index(dir: &Path, index: &Path) -> Result<Checkpoint, LoadError> {
        let object = read_object(index)?;
        let fields = Fields::new(index, &object);
        let expected = "an object from tensor names to file names";
        let map = fields.get("weight_map").and_then(serde_json::Value::as_object);
        let map = map.ok_or_else(|| fields.refuse("weight_map", expected))?;
        let mut names_of: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, file) in map {
            let file = file.as_str().ok_or_else(|| fields.refuse("weight_map", expected))?;
            // A file of this directory, not of another.
            if Path::new(file).file_name() != Some(file.as_ref()) {
                return Err(LoadError::bad_file(index, format!("{file:?} is not the name of a file")));
            }
            names_of.entry(file).or_default().push(name);
        }
        let mut checkpoint = Checkpoint::new(index);
        for (file, names) in names_of {
            let path = dir.join(file);
            let mut found = checkpoint.add_file(&path)?;
            for name in names {
                let tensor = found.remove(name).ok_or_else(|| {
                    LoadError::bad_file(
                        &path,
                        format!("tensor {name} is missing, expected by {}", index.display()),
                    )
                })?;
                checkpoint.tensors.insert(name.to_owned(), tensor);
            }
        }
        Ok(checkpoint)
    }

    fn add_file(&mut self, path: &Path) -> Result<BTreeMap<String, Tensor>, LoadError> {
        let map = map(path)?;
        let bad = |message: String| LoadError::bad_file(path, message);
        let Some(length) = map.first_chunk::<8>() else {
            return Err(bad(format!("the file has {} bytes, expected a safetensors header", map.len())));
        };
        let length = u64::from_le_bytes(*length);
        let data = length.checked_add(8).filter(|&data| data <= map.len() as u64).ok_or_else(|| {
            bad(format!(
                "the file has {} bytes, expected a safetensors header of {length}: truncated, or another format",
                map.len()
            ))
        })? as usize;
        let header = &map[8..data];
        let metadata: Metadata = serde_json::from_slice(header)
            .map_err(|error| bad(format!("the safetensors header is broken: {error}")))?;
        let header = blake3::hash(header);
        let infos: Vec<_> = metadata.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        let size = map.len();
        let file = Arc::new(WeightFile { path: path.to_owned(), map, header });
        let mut tensors = BTreeMap::new();
        for (name, info) in infos {
            let (start, end) = info.data_offsets;
            let elements = info.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            let expected = elements.and_then(|n| n.checked_mul(info.dtype.bitsize())).map(|bits| bits / 8);
            if end < start || expected != Some(end - start) {
                return Err(bad(format!(
                    "tensor {name} has bytes {start} to {end}, expected as many as shape {:?} of {:?} needs",
                    info.shape, info.dtype
                )));
            }
            if end.checked_add(data).is_none_or(|end| end > size) {
                return Err(bad(format!(
                    "the file has {size} bytes, expected {} for tensor {name}: truncated",
                    end.saturating_add(data)
                )));
            }
            let span = Span::new(&file, data + start..data + end);
            let dtype = info.dtype.into();
            tensors.insert(name, Tensor { span, shape: info.shape, dtype, is_taken: false });
        }
        self.files.push(file);
        Ok(tensors)
    }

    /// Takes the tensor, or the tensors that make up the one, that is published as `name`.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        if let (Some(quantisation), &[rows, cols]) = (self.quantisation, shape)
            && let Some(module) = name.strip_suffix(".weight")
            && let Some(matrix) = quantised::take(self, quantisation, module, [rows, cols])?
        {
            self.num_parameters += (rows * cols) as u64;
            return Ok(matrix);
        }
        let Place { name, part, order } = match &self.names {
            Some(names) => names.place(name),
            None => Place { name: name.to_owned(), part: None, order: RowOrder::AsIs },
        };
        let expected: Vec<usize> =
            part.map(|(_, num_parts)| num_parts).into_iter().chain(shape.iter().copied()).collect();
        let Some(tensor) = self.tensors.get_mut(&name) else {
            return Err(LoadError::MissingTensor { path: self.path.clone(), tensor: name, expected });
        };
        let path = || tensor.span.file().path.clone();
        if tensor.shape != expected {
            return Err(LoadError::WrongShape {
                path: path(),
                found: tensor.shape.clone(),
                tensor: name,
                expected,
            });
        }
        let span = match part {
            Some((part_idx, num_parts)) => tensor.span.part(part_idx, num_parts),
            None => tensor.span.clone(),
        };
        // A vector is one row, unless its elements are in the order of a matrix's rows.
        let cols = if shape.len() == 1 && order != RowOrder::AsIs { 1 } else { shape[shape.len() - 1] };
        let stored = match tensor.dtype {
            StoredDtype::Float(dtype) => Stored::Floats(span, dtype),
            StoredDtype::Block(tensor_type) if cols.is_multiple_of(tensor_type.block_len()) => {
                Stored::Blocks(span, tensor_type)
            }
            other => {
                return Err(LoadError::WrongDtype { path: path(), tensor: name, found: other.to_string() });
            }
        };
        tensor.is_taken = true;
        let rows = shape.iter().product::<usize>() / cols;
        self.num_parameters += (rows * cols) as u64;
        Ok(Matrix::new(rows, cols, stored, order))
    }

    /// The type of a tensor of a directory; `None` if there is no such tensor.
    pub(crate) fn dtype_of(&self, name: &str) -> Option<Dtype> {
        match self.tensors.get(name)?.dtype {
            StoredDtype::Float(FloatDtype::F32) => Some(Dtype::F32),
            StoredDtype::Float(FloatDtype::F16) => Some(Dtype::F16),
            StoredDtype::Float(FloatDtype::Bf16) => Some(Dtype::BF16),
            StoredDtype::Other(dtype) => Some(dtype),
            StoredDtype::Block(_) => None,
        }
    }

    /// The shape of a tensor; `None` if it is not there.
    pub(crate) fn shape_of(&self, name: &str) -> Option<Vec<usize>> {
        Some(self.tensors.get(name)?.shape.clone())
    }

    /// Takes a tensor that is a part of a weight, of one of these types and shapes.
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
        let found = self.tensors.get_mut(name).expect("it has a type");
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

    /// The file, or the index of several: for messages about tensors.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Elements of the tensors that were taken.
    pub(crate) fn num_parameters(&self) -> u64 {
        self.num_parameters
    }

    /// Refuses tensors that nobody took, unless they may be ignored.
    pub(crate) fn refuse_rest(
        &self,
        architecture: &str,
        ignore: impl Fn(&str) -> bool,
    ) -> Result<(), LoadError> {
        // Quantising wrote biases where there were none, and zeros of what needs none.
        let is_nothing = |name: &str, tensor: &Tensor| {
            self.quantisation.is_some()
                && (name.ends_with(".bias") || name.ends_with(".weight_zero_point"))
                && tensor.span.iter().all(|byte| *byte == 0)
        };
        let is_left =
            |name: &str, tensor: &Tensor| !tensor.is_taken && !ignore(name) && !is_nothing(name, tensor);
        match self.tensors.iter().find(|(name, tensor)| is_left(name, tensor)) {
            None => Ok(()),
            Some((name, tensor)) => Err(LoadError::UnexpectedTensor {
                path: tensor.span.file().path.clone(),
                tensor: name.clone(),
                architecture: architecture.to_owned(),
            }),
        }
    }

    /// Bytes of all files.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.map.len() as u64).sum()
    }

    /// Adds what identifies the weights without reading them all: headers and sizes.
    pub(crate) fn hash_into(&self, hasher: &mut blake3::Hasher) {
        for file in &self.files {
            hasher.update(file.header.as_bytes());
            hasher.update(&(file.map.len() as u64).to_le_bytes());
        }
    }

    /// Gives the files' pages back to the system: what was packed is read once. What is still looked up there comes
    /// back by itself.
    pub(crate) fn release_pages(&self) {
        for file in &self.files {
            // SAFETY: the mapping is of a file and never written, so its pages can be read again.
            // Only a hint: pages that stay are no fault.
            let _ = unsafe { file.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }

    /// Adds what tells these files from others with the same headers: where they lie, and when they were written.
    ///
    /// # Errors
    /// When a file cannot be asked.
    pub(crate) fn hash_files_into(&self, hasher: &mut blake3::Hasher) -> Result<(), LoadError> {
        for file in &self.files {
            let path = &file.path;
            let modified = path.metadata().and_then(|metadata| metadata.modified());
            let modified = modified.map_err(|source| LoadError::io(path, source))?;
            let modified = modified.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let whole = path.canonicalize().map_err(|source| LoadError::io(path, source))?;
            hasher.update(whole.as_os_str().as_encoded_bytes());
            hasher.update(&modified.as_nanos().to_le_bytes());
        }
        Ok(())
    }
}

fn map(path: &Path) -> Result<Mmap, LoadError> {
    let file = File::open(path).map_err(|source| LoadError::io(path, source))?;
    // SAFETY: a read-only mapping; see `WeightFile` about truncation.
    unsafe { Mmap::map(&file) }.map_err(|source| LoadError::io(path, source))
}
