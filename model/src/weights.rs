//! Weight files: safetensors, mapped into memory.
//!
//! It knows names, shapes and bytes, not what they are for.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::FloatDtype;
use memmap2::Mmap;
use safetensors::tensor::{Dtype, Metadata};

use crate::LoadError;
use crate::fields::{Fields, read_object};

/// All tensors of a model directory.
pub(crate) struct Checkpoint {
    /// For messages about tensors that are in no file.
    path: PathBuf,
    tensors: BTreeMap<String, Tensor>,
    files: Vec<Arc<WeightFile>>,
    /// Elements of the tensors that were taken.
    num_parameters: u64,
}

/// One mapped file. Whoever truncates it while it is in use kills the process: replace, do not rewrite.
#[derive(Debug)]
struct WeightFile {
    path: PathBuf,
    map: Mmap,
    /// Hash of the header.
    header: blake3::Hash,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    file: Arc<WeightFile>,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: Dtype,
    start: usize,
}

/// A matrix, or some rows of a tensor, in a mapped file.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    file: Arc<WeightFile>,
    start: usize,
    pub(crate) dtype: FloatDtype,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Matrix {
    /// The bytes of row `row_idx`.
    pub(crate) fn row(&self, row_idx: usize) -> &[u8] {
        let num_bytes = self.cols * self.dtype.size_bytes();
        &self.bytes()[row_idx * num_bytes..][..num_bytes]
    }

    /// Row `row_idx`, widened.
    pub(crate) fn row_values(&self, row_idx: usize) -> impl Iterator<Item = f32> {
        let dtype = self.dtype;
        self.row(row_idx).chunks_exact(dtype.size_bytes()).map(move |bytes| widen(dtype, bytes))
    }

    fn bytes(&self) -> &[u8] {
        &self.file.map[self.start..self.start + self.size_bytes()]
    }

    fn size_bytes(&self) -> usize {
        self.rows * self.cols * self.dtype.size_bytes()
    }

    /// All of it, widened.
    pub(crate) fn to_f32(&self) -> Vec<f32> {
        self.bytes().chunks_exact(self.dtype.size_bytes()).map(|bytes| widen(self.dtype, bytes)).collect()
    }
}

/// One stored number.
fn widen(dtype: FloatDtype, bytes: &[u8]) -> f32 {
    match dtype {
        FloatDtype::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        FloatDtype::Bf16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        FloatDtype::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

impl Checkpoint {
    /// Maps the weight files of `dir` and checks their headers.
    pub(crate) fn open(dir: &Path) -> Result<Checkpoint, LoadError> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        // As transformers: one whole file goes before an index.
        if single.exists() {
            let mut checkpoint = Checkpoint {
                path: single.clone(),
                tensors: BTreeMap::new(),
                files: vec![],
                num_parameters: 0,
            };
            for (name, tensor) in checkpoint.add_file(&single)? {
                checkpoint.tensors.insert(name, tensor);
            }
            return Ok(checkpoint);
        }
        if !index.exists() {
            return Err(LoadError::NoWeights { path: dir.to_owned() });
        }
        let object = read_object(&index)?;
        let fields = Fields::new(&index, &object);
        let expected = "an object from tensor names to file names";
        let map = fields.get("weight_map").and_then(serde_json::Value::as_object);
        let map = map.ok_or_else(|| fields.refuse("weight_map", expected))?;
        let mut names_of: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, file) in map {
            let file = file.as_str().ok_or_else(|| fields.refuse("weight_map", expected))?;
            // A file of this directory, not of another.
            if Path::new(file).file_name() != Some(file.as_ref()) {
                return Err(LoadError::bad_file(&index, format!("{file:?} is not the name of a file")));
            }
            names_of.entry(file).or_default().push(name);
        }
        let mut checkpoint =
            Checkpoint { path: index.clone(), tensors: BTreeMap::new(), files: vec![], num_parameters: 0 };
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
        let opened = File::open(path).map_err(|source| LoadError::io(path, source))?;
        // SAFETY: a read-only mapping; see `WeightFile` about truncation.
        let map = unsafe { Mmap::map(&opened) }.map_err(|source| LoadError::io(path, source))?;
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
            let tensor =
                Tensor { file: Arc::clone(&file), shape: info.shape, dtype: info.dtype, start: data + start };
            tensors.insert(name, tensor);
        }
        self.files.push(file);
        Ok(tensors)
    }

    /// Takes a tensor out, so that those nobody asked for remain.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        let missing = || LoadError::MissingTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
            expected: shape.to_vec(),
        };
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        let path = || tensor.file.path.clone();
        if tensor.shape != shape {
            return Err(LoadError::WrongShape {
                path: path(),
                tensor: name.to_owned(),
                found: tensor.shape.clone(),
                expected: shape.to_vec(),
            });
        }
        let dtype = match tensor.dtype {
            Dtype::F32 => FloatDtype::F32,
            Dtype::F16 => FloatDtype::F16,
            Dtype::BF16 => FloatDtype::Bf16,
            other => {
                return Err(LoadError::WrongDtype {
                    path: path(),
                    tensor: name.to_owned(),
                    found: format!("{other:?}"),
                });
            }
        };
        let tensor = self.tensors.remove(name).expect("found above");
        let cols = shape.last().copied().unwrap_or(1);
        let rows: usize = shape.iter().rev().skip(1).product();
        self.num_parameters += (rows * cols) as u64;
        Ok(Matrix { file: tensor.file, start: tensor.start, dtype, rows, cols })
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
        match self.tensors.iter().find(|(name, _)| !ignore(name)) {
            None => Ok(()),
            Some((name, tensor)) => Err(LoadError::UnexpectedTensor {
                path: tensor.file.path.clone(),
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
