//! The files of a GGUF model, which may be split.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use baton_gguf::{Gguf, GgufError, GgufFile, Tensor, Value};
use baton_model_spec::LoadError;

const NUM_FILES: &str = "split.count";

/// The files of a model, of which `first` is the first or the only one.
///
/// # Errors
/// When it cannot be read, or is one of several and its name is not that of a first file:
/// `model-00001-of-00003.gguf`.
pub fn gguf_files(first: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let file = GgufFile::open(first).map_err(|source| LoadError::io(first, source))?;
    let bad = |error: GgufError| LoadError::bad_file(first, error);
    let gguf = file.parse().map_err(bad)?;
    let num_files = gguf.read(NUM_FILES, "a whole number", Value::as_unsigned).map_err(bad)?.unwrap_or(1);
    if num_files <= 1 {
        return Ok(vec![first.to_owned()]);
    }
    let name = first.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let prefix = name.strip_suffix(&format!("-00001-of-{num_files:05}.gguf")).filter(|_| num_files < 100_000);
    let prefix = prefix.ok_or_else(|| {
        let expected = format!("1, or the first of as many files: NAME-00001-of-{num_files:05}.gguf");
        bad(gguf.refuse(NUM_FILES, &expected))
    })?;
    let name_of = |number| format!("{prefix}-{number:05}-of-{num_files:05}.gguf");
    Ok((1..=num_files).map(|number| first.with_file_name(name_of(number))).collect())
}

/// The parsed files of a model.
pub(super) struct Contents<'a> {
    /// The first file, which contains the metadata.
    pub(super) gguf: &'a Gguf<'a>,
    /// The tensors of all files, each with its bytes.
    pub(super) tensors: BTreeMap<&'a str, (&'a Tensor, &'a [u8])>,
}

/// Parses all files of a model and passes them to `read`.
pub(super) fn with_contents<T>(
    first: &Path,
    read: impl FnOnce(&Contents<'_>) -> Result<T, LoadError>,
) -> Result<T, LoadError> {
    let paths = gguf_files(first)?;
    let open = |path: &PathBuf| GgufFile::open(path).map_err(|source| LoadError::io(path, source));
    let files = paths.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let mut parsed = Vec::with_capacity(files.len());
    for (path, file) in paths.iter().zip(&files) {
        parsed.push(file.parse().map_err(|error| LoadError::bad_file(path, error))?);
    }
    let mut tensors = BTreeMap::new();
    for ((path, file), gguf) in paths.iter().zip(&files).zip(&parsed) {
        for (name, tensor) in gguf.tensors() {
            let bytes = &file.bytes()[tensor.start..][..tensor.size_bytes];
            if tensors.insert(*name, (tensor, bytes)).is_some() {
                return Err(LoadError::bad_file(path, GgufError::Duplicate { name: (*name).to_owned() }));
            }
        }
    }
    read(&Contents { gguf: &parsed[0], tensors })
}
