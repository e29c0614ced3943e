//! Shared by several fuzz targets: inputs that are edits of valid files or messages, and a model that computes.
//!
//! Random bytes rarely pass a check of magic numbers. So where a format has structure, an input is a list of edits of a valid
//! file or message. A decoder then reads far before it rejects the input.
#![deny(unsafe_code)]

mod change;
pub mod gguf;
pub mod json;
pub mod model;
pub mod tensors;

pub use change::Change;

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::LazyLock;
use std::time::Duration;

use arbitrary::Arbitrary;
use tempfile::TempDir;

/// A folder of this process, in memory where the system supports that.
pub fn folder() -> &'static Path {
    static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        TempDir::new_in(parent).expect("a folder for files")
    });
    FOLDER.path()
}

/// Writes a file in the [folder] as a new inode, because the old one may still be mapped.
pub fn write(name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder().join(name);
    let _ = std::fs::remove_file(&path);
    std::fs::write(&path, bytes).expect("room for a file");
    path
}

/// The folder of NIXL, if it is installed: from the environment, or where `cargo xtask setup` puts it.
pub fn nixl() -> Option<PathBuf> {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/nixl/.nixl_cu12.mesonpy.libs");
    let path = std::env::var_os("BATON_NIXL").map_or_else(|| own.into(), PathBuf::from);
    path.exists().then_some(path)
}

/// The output of `future` within ten seconds. A pause of the machine counts as a tenth of a second.
///
/// # Errors
/// When it takes longer.
pub async fn soon<T>(future: impl Future<Output = T>) -> Result<T, tokio::time::error::Elapsed> {
    let mut future = pin!(future);
    let mut outcome = Err(());
    for _ in 0..99 {
        outcome = tokio::time::timeout(Duration::from_millis(100), &mut future).await.map_err(drop);
        if outcome.is_ok() {
            break;
        }
    }
    match outcome {
        Ok(value) => Ok(value),
        Err(()) => tokio::time::timeout(Duration::from_millis(100), future).await,
    }
}

/// One of `items`, for any index.
pub fn pick<T>(items: &[T], idx: impl Into<usize>) -> &T {
    &items[idx.into() % items.len()]
}

/// Changes a byte of `bytes`, if there are any.
fn overwrite(bytes: &mut [u8], at: u32, byte: u8) {
    let at = at as usize % bytes.len().max(1);
    if let Some(place) = bytes.get_mut(at) {
        *place = byte;
    }
}

/// A change of one word of a message.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Field {
    word: u8,
    change: Change,
}

/// Changes words of `message`, which has at least one.
pub fn edit(message: &mut [u8], fields: &[Field]) {
    for Field { word, change } in fields {
        let at = usize::from(*word) % (message.len() / 4) * 4;
        let word: [u8; 4] = message[at..at + 4].try_into().expect("four bytes");
        let changed = change.of(u32::from_le_bytes(word).into()) as u32;
        message[at..at + 4].copy_from_slice(&changed.to_le_bytes());
    }
}
