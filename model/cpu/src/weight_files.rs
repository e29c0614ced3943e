//! The files of packed weights in their directory: which are obsolete or were left unfinished, and whether one more fits
//! on the disk.
//!
//! The names of all files of a model start with its place. It does not know what is in them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The extension of a complete file.
pub(crate) const COMPLETE: &str = "panels";
/// The extension of a file that is being written.
pub(crate) const UNFINISHED: &str = "new";

/// Removes packed files of the model at `place` whose names do not start with `weights`. Processes that have one
/// mapped keep it.
pub(crate) fn remove_old(dir: &Path, place: &str, weights: &str) {
    for (name, path) in files_of(dir, place, COMPLETE) {
        if !name.starts_with(weights) {
            // A file that remains costs disk space only.
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes what processes that were killed left of the model at `place`. The caller has the lock of that place: no
/// process is writing there.
pub(crate) fn remove_unfinished(dir: &Path, place: &str) {
    for (_, path) in files_of(dir, place, UNFINISHED) {
        let _ = fs::remove_file(path);
    }
}

fn files_of(dir: &Path, place: &str, extension: &str) -> Vec<(String, PathBuf)> {
    let Ok(entries) = dir.read_dir() else { return vec![] };
    let paths = entries.flatten().map(|entry| entry.path());
    let named = paths.filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), path)));
    named
        .filter(|(name, path)| {
            name.starts_with(place) && path.extension().is_some_and(|found| found == extension)
        })
        .collect()
}

/// Bytes that this process may still write to the file system of `dir`; `None` where that is not known.
pub(crate) fn free_bytes(dir: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(dir).ok()?;
    // Some file systems count no blocks.
    (found.f_blocks > 0).then(|| found.f_bavail.saturating_mul(found.f_frsize))
}

/// Whether a file of `needed` bytes fits into `dir`, of whose file system `free` bytes are left.
///
/// # Errors
/// When it does not; the message says what to do.
pub(crate) fn check_room(dir: &Path, needed: u64, free: Option<u64>) -> io::Result<()> {
    match free {
        Some(free) if needed > free => Err(io::Error::new(
            io::ErrorKind::StorageFull,
            format!(
                "packed weights of this model take {needed} bytes, but {} has {free} bytes free: make room there, or give \
                 --weight-cache a directory on another disk",
                dir.display()
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_both_numbers() {
        let dir = Path::new("/cache/baton");
        let error = check_room(dir, 141, Some(60)).unwrap_err().to_string();
        for expected in ["take 141 bytes", "/cache/baton has 60 bytes free", "--weight-cache"] {
            assert!(error.contains(expected), "{error}");
        }
        check_room(dir, 141, Some(141)).unwrap();
        check_room(dir, 141, None).unwrap();
    }

    #[test]
    fn what_a_disk_has_free_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let free = free_bytes(dir.path());
        assert!(free.is_none_or(|free| free > 0), "{free:?}");
        assert_eq!(free_bytes(&dir.path().join("missing")), None);
    }

    #[test]
    fn files_of_other_places_and_layouts_stay() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a-1-1.panels", "a-2-1.panels", "a-2-1.new", "b-1-1.panels", "b-1-1.new", "a.lock"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let names = || {
            let entries = dir.path().read_dir().unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        remove_old(dir.path(), "a", "a-1");
        assert_eq!(names(), ["a-1-1.panels", "a-2-1.new", "a.lock", "b-1-1.new", "b-1-1.panels"]);
        remove_unfinished(dir.path(), "a");
        assert_eq!(names(), ["a-1-1.panels", "a.lock", "b-1-1.new", "b-1-1.panels"]);
    }
}
