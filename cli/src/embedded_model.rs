//! The tiny model inside the program, so that `baton up` works on a machine that has nothing else.
//!
//! Models are loaded from directories. The embedded one is written out once, to a directory named
//! by its content, and memory-mapped from there by every worker.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::Context;

macro_rules! model_files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../../models/tiny/", $name)).as_slice())),*]
    };
}

const FILES: [(&str, &[u8]); 6] = model_files![
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
];

/// The name under which it is served.
pub const NAME: &str = "baton-tiny";

/// The directory that holds the embedded model, written now if it is not there yet.
pub fn directory() -> anyhow::Result<PathBuf> {
    let mut hasher = blake3::Hasher::new();
    for (name, bytes) in FILES {
        hasher.update(name.as_bytes()).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    }
    let dir = cache_dir().join(format!("{NAME}-{}", &hasher.finalize().to_hex()[..16]));
    if !is_complete(&dir) {
        write(&dir).with_context(|| format!("writing the embedded model to {}", dir.display()))?;
    }
    Ok(dir)
}

/// `$XDG_CACHE_HOME/baton`, `~/.cache/baton`, or the temporary directory when there is no home.
pub(crate) fn cache_dir() -> PathBuf {
    let non_empty = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = non_empty("XDG_CACHE_HOME").or_else(|| non_empty("HOME").map(|home| home.join(".cache")));
    let dir = base.map(|base| base.join("baton")).filter(|dir| fs::create_dir_all(dir).is_ok());
    dir.unwrap_or_else(|| std::env::temp_dir().join("baton"))
}

/// The name of the directory vouches for the content; the sizes for a write that ended.
fn is_complete(dir: &Path) -> bool {
    FILES.iter().all(|(name, bytes)| {
        fs::metadata(dir.join(name)).is_ok_and(|metadata| metadata.len() == bytes.len() as u64)
    })
}

/// Writes beside the final place and moves: another process sees all of the model or nothing.
fn write(dir: &Path) -> io::Result<()> {
    let parent = dir.parent().expect("the directory lies in the cache directory");
    fs::create_dir_all(parent)?;
    let partial = tempfile::Builder::new().prefix(".partial-").tempdir_in(parent)?;
    for (name, bytes) in FILES {
        fs::write(partial.path().join(name), bytes)?;
    }
    let partial = partial.keep();
    if let Err(error) = fs::rename(&partial, dir) {
        fs::remove_dir_all(&partial)?;
        // Somebody else was faster.
        if !is_complete(dir) {
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
        assert!(!is_complete(&dir));
        write(&dir).unwrap();
        assert!(is_complete(&dir));
        // A second writer finds it there and leaves nothing behind.
        write(&dir).unwrap();
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1);
    }
}
