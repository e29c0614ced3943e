//! A model's weights in safetensors or GGUF files: finds each published tensor.
//!
//! It knows names, shapes and bytes, not what tensors are for.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use baton_gguf::{Gguf, Value};
use baton_model_spec::fields::{Fields, read_object};
use baton_model_spec::{DecoderSpec, FloatDtype, LoadError, ModelConfig, StoredQuantisation};
use safetensors::tensor::Metadata;

use crate::file::{Span, WeightFile, map};
use crate::gguf::{Names, Place, gguf_files};
use crate::matrix::{Matrix, Stored, StoredOrder};
use crate::quantised;
use crate::tensors::{StoredDtype, Tensor, Tensors};
use crate::text_part;

/// Bytes at the beginning and at the end of a tensor that identify it.
const SAMPLE_BYTES: usize = 4096;

/// The weights of a model, by tensor.
pub struct Checkpoint {
    tensors: Tensors,
    /// The files' own tensor names; `None` for published names.
    names: Option<Names>,
    /// The quantisation method, if several tensors make up a weight.
    quantisation: Option<StoredQuantisation>,
    files: Vec<Arc<WeightFile>>,
    /// Elements of the tensors taken so far.
    num_parameters: u64,
}

impl Checkpoint {
    fn new(path: &Path) -> Checkpoint {
        Checkpoint {
            tensors: Tensors { path: path.to_owned(), by_name: BTreeMap::new() },
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
        let mut checkpoint = Checkpoint::open_directory(model)?;
        if config.has_other_parts() {
            text_part::keep(&mut checkpoint.tensors)?;
        }
        Ok(Checkpoint { quantisation: config.quantisation, ..checkpoint })
    }

    #[cfg(test)]
    pub(crate) fn open_quantised(
        model: &Path,
        quantisation: StoredQuantisation,
    ) -> Result<Checkpoint, LoadError> {
        Ok(Checkpoint { quantisation: Some(quantisation), ..Checkpoint::open_directory(model)? })
    }

    fn open_directory(model: &Path) -> Result<Checkpoint, LoadError> {
        let single = model.join("model.safetensors");
        let index = model.join("model.safetensors.index.json");
        // As in transformers: a single file takes precedence over an index.
        if single.exists() {
            let mut checkpoint = Checkpoint::new(&single);
            checkpoint.tensors.by_name = checkpoint.add_file(&single)?;
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
            let gguf = Gguf::parse(&map).map_err(|error| LoadError::bad_file(&path, error))?;
            let found = gguf.get("general.architecture").and_then(Value::as_text).map(str::to_owned);
            architecture = architecture.or(found);
            let tensors: Vec<(String, baton_gguf::Tensor)> =
                gguf.tensors().iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
            let header = blake3::hash(gguf.header());
            let file = WeightFile::new(path, map, header);
            for (name, tensor) in tensors {
                let span = Span::new(&file, tensor.start..tensor.start + tensor.size_bytes);
                let dtype = tensor.tensor_type.into();
                checkpoint
                    .tensors
                    .by_name
                    .insert(name, Tensor { span, shape: tensor.shape, dtype, is_taken: false });
            }
            checkpoint.files.push(file);
        }
        let separate_experts = checkpoint.tensors.by_name.contains_key("blk.0.ffn_gate.0.weight");
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
            // The index may only name files of its own directory.
            if Path::new(file).file_name() != Some(file.as_ref()) {
                return Err(LoadError::bad_file(index, format!("{file:?} is not a file name")));
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
                checkpoint.tensors.by_name.insert(name.to_owned(), tensor);
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
            .map_err(|error| bad(format!("the safetensors header is malformed: {error}")))?;
        let header = blake3::hash(header);
        let infos: Vec<_> = metadata.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        let size = map.len();
        let file = WeightFile::new(path.to_owned(), map, header);
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

    /// Whether the files have the weight published as `name`, in any format.
    pub(crate) fn has(&self, name: &str) -> bool {
        let stored = self.names.as_ref().map(|names| names.place(name).name);
        let module = name.strip_suffix(".weight").filter(|_| self.quantisation.is_some());
        self.tensors.by_name.contains_key(stored.as_deref().unwrap_or(name))
            || module.is_some_and(|module| quantised::has(&self.tensors, module))
    }

    /// Whether two weights of floats, under their published names in a directory, have the same shape and numbers. Not if
    /// one of them is quantised.
    pub(crate) fn are_equal(&self, a: &str, b: &str) -> bool {
        let [Some(a), Some(b)] = [a, b].map(|name| self.tensors.by_name.get(name)) else { return false };
        let (StoredDtype::Float(a_dtype), StoredDtype::Float(b_dtype)) = (a.dtype, b.dtype) else {
            return false;
        };
        if a.shape != b.shape {
            return false;
        }
        let num = a.shape.iter().product::<usize>();
        let num_sampled = num.min(SAMPLE_BYTES / FloatDtype::F16.size_bytes());
        // Weights that differ nearly always do so at their ends: then gigabytes need not be read.
        [0..num_sampled, num - num_sampled..num, 0..num].into_iter().all(|part| {
            let [of_a, of_b] = [(a, a_dtype), (b, b_dtype)].map(|(tensor, dtype)| {
                let size = dtype.size_bytes();
                (&tensor.span[part.start * size..part.end * size], dtype)
            });
            are_same_numbers(of_a, of_b)
        })
    }

    /// Takes the weight published as `name`: one tensor, or the tensors that make it up.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        if let (Some(quantisation), &[rows, cols]) = (self.quantisation, shape)
            && let Some(module) = name.strip_suffix(".weight")
            && let Some(matrix) = quantised::take(&mut self.tensors, quantisation, module, [rows, cols])?
        {
            self.num_parameters += (rows * cols) as u64;
            return Ok(matrix);
        }
        let Place { name, part, order } = match &self.names {
            Some(names) => names.place(name),
            None => Place { name: name.to_owned(), part: None, order: StoredOrder::AsIs },
        };
        let expected: Vec<usize> =
            part.map(|(_, num_parts)| num_parts).into_iter().chain(shape.iter().copied()).collect();
        let Some(tensor) = self.tensors.by_name.get_mut(&name) else {
            return Err(LoadError::MissingTensor { path: self.tensors.path.clone(), tensor: name, expected });
        };
        let path = || tensor.span.file().path().to_owned();
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
        // A vector is one row, except where its elements are permuted like a matrix's rows.
        let cols = if shape.len() == 1 && order != StoredOrder::AsIs { 1 } else { shape[shape.len() - 1] };
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

    /// The file, or the index of several files: for messages about tensors.
    pub(crate) fn path(&self) -> &Path {
        &self.tensors.path
    }

    /// Elements of the tensors taken so far.
    pub(crate) fn num_parameters(&self) -> u64 {
        self.num_parameters
    }

    /// Refuses tensors that were not taken, except redundant ones.
    pub(crate) fn refuse_rest(
        &self,
        architecture: &str,
        ignore: impl Fn(&str) -> bool,
    ) -> Result<(), LoadError> {
        // Quantisation tools write biases of zero where the model has none, and zero points that are not needed.
        let is_zero = |name: &str, tensor: &Tensor| {
            self.quantisation.is_some()
                && (name.ends_with(".bias") || name.ends_with(".weight_zero_point"))
                && tensor.span.iter().all(|byte| *byte == 0)
        };
        let is_left =
            |name: &str, tensor: &Tensor| !tensor.is_taken && !ignore(name) && !is_zero(name, tensor);
        match self.tensors.by_name.iter().find(|(name, tensor)| is_left(name, tensor)) {
            None => Ok(()),
            Some((name, tensor)) => Err(LoadError::UnexpectedTensor {
                path: tensor.span.file().path().to_owned(),
                tensor: name.clone(),
                architecture: architecture.to_owned(),
            }),
        }
    }

    /// Bytes of all files.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes().len() as u64).sum()
    }

    /// Hashes headers and sizes, and of each tensor the beginning and the end: checkpoints of one training run have the same headers. That
    /// identifies the weights without reading all of them.
    pub(crate) fn hash_into(&self, hasher: &mut blake3::Hasher) {
        self.files.iter().for_each(|file| file.hash_into(hasher));
        for tensor in self.tensors.by_name.values() {
            let (beginning, rest) = tensor.span.split_at(tensor.span.len().min(SAMPLE_BYTES));
            hasher.update(beginning);
            hasher.update(&rest[rest.len().saturating_sub(SAMPLE_BYTES)..]);
        }
    }

    /// Hashes what tells these files from others with the same headers: their paths and times of modification.
    ///
    /// # Errors
    /// When the system does not report them.
    pub(crate) fn hash_places_into(&self, hasher: &mut blake3::Hasher) -> Result<(), LoadError> {
        self.files.iter().try_for_each(|file| file.hash_place_into(hasher))
    }

    /// Returns the files' pages to the system: packed weights are not read again. A page that is read again is mapped
    /// in again.
    pub(crate) fn release_pages(&self) {
        self.files.iter().for_each(|file| file.release_pages());
    }
}

/// Whether these bytes, each with its type, are the same numbers. There are as many of both.
fn are_same_numbers((a, a_dtype): (&[u8], FloatDtype), (b, b_dtype): (&[u8], FloatDtype)) -> bool {
    if a_dtype == b_dtype {
        return a == b;
    }
    let mut numbers = a.chunks_exact(a_dtype.size_bytes()).zip(b.chunks_exact(b_dtype.size_bytes()));
    numbers.all(|(one, other)| a_dtype.widen(one) == b_dtype.widen(other))
}
