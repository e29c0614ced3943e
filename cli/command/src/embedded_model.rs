//! The tiny model that is embedded in the program, so that `baton up` works without any other file.
//!
//! Models are loaded from directories. The embedded one is written out once, to a directory named
//! by its content, and memory-mapped from there by every worker.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::Context;

type Files = [(&'static str, &'static [u8])];

macro_rules! model_files {
    ($dir:literal: $($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../models/tiny/", $dir, $name)).as_slice())),*]
    };
}

const FILES: &Files = model_files![
    "":
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
];

/// The files of its draft model, which needs no tokenizer.
const DRAFT_FILES: &Files = model_files!["draft/": "config.json", "model.safetensors"];

/// The name under which it is served.
pub const NAME: &str = "baton-tiny";

/// The directory that holds the embedded model, written now if it is not there yet.
pub fn directory() -> anyhow::Result<PathBuf> {
    directory_of(NAME, FILES)
}

/// The same for its draft model.
pub fn draft_directory() -> anyhow::Result<PathBuf> {
    directory_of(&format!("{NAME}-draft"), DRAFT_FILES)
}

fn directory_of(model_name: &str, files: &Files) -> anyhow::Result<PathBuf> {
    let mut hasher = blake3::Hasher::new();
    for (name, bytes) in files {
        hasher.update(name.as_bytes()).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    }
    let dir = cache_dir().join(format!("{model_name}-{}", &hasher.finalize().to_hex()[..16]));
    if !is_complete(&dir, files) {
        write(&dir, files).with_context(|| format!("writing the embedded model to {}", dir.display()))?;
    }
    Ok(dir)
}

/// `$XDG_CACHE_HOME/baton`, `~/.cache/baton`, or the temporary directory when there is no home.
pub fn cache_dir() -> PathBuf {
    let non_empty = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = non_empty("XDG_CACHE_HOME").or_else(|| non_empty("HOME").map(|home| home.join(".cache")));
    let dir = base.map(|base| base.join("baton")).filter(|dir| fs::create_dir_all(dir).is_ok());
    dir.unwrap_or_else(|| std::env::temp_dir().join("baton"))
}

/// The directory is named by its content; the sizes tell that it was written to the end.
fn is_complete(dir: &Path, files: &Files) -> bool {
    files.iter().all(|(name, bytes)| {
        fs::metadata(dir.join(name)).is_ok_and(|metadata| metadata.len() == bytes.len() as u64)
    })
}

/// Writes to a temporary directory and renames it: another process sees the whole model or none of it.
fn write(dir: &Path, files: &Files) -> io::Result<()> {
    let parent = dir.parent().expect("the directory is inside the cache directory");
    fs::create_dir_all(parent)?;
    let partial = tempfile::Builder::new().prefix(".partial-").tempdir_in(parent)?;
    for (name, bytes) in files {
        fs::write(partial.path().join(name), bytes)?;
    }
    let partial = partial.keep();
    if let Err(error) = fs::rename(&partial, dir) {
        fs::remove_dir_all(&partial)?;
        // Another process may have written it first.
        if !is_complete(dir, files) {
            return Err(error);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_the_model_whole_and_only_once() {
        let cache = tempfile::tempdir().unwrap();
        let dir = cache.path().join("model");
        assert!(!is_complete(&dir, FILES));
        write(&dir, FILES).unwrap();
        assert!(is_complete(&dir, FILES));
        // A second writer finds it there and leaves nothing behind.
        write(&dir, FILES).unwrap();
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1);
    }
}
