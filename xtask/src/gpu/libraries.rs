//! CUDA libraries that the system's loader does not find: those of toolkits and of Python wheels.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::tools;

/// Libraries that programs look for. The driver decides the version.
const NAMES: [&str; 4] = ["libnvrtc.so.13", "libnvrtc.so.12", "libcublasLt.so.13", "libcublasLt.so.12"];

/// `LD_LIBRARY_PATH` for programs that need them.
pub(super) fn path(root: &Path) -> Result<OsString> {
    let mut folders = likely(root);
    folders.retain(|folder| has_library(folder));
    folders.extend(std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths));
    std::env::join_paths(folders).context("a folder of libraries with a colon in its name")
}

fn has_library(folder: &Path) -> bool {
    NAMES.iter().any(|name| folder.join(name).exists())
}

/// The nearest first.
fn likely(root: &Path) -> Vec<PathBuf> {
    let asked = std::env::var_os("BATON_NVRTC").map(PathBuf::from);
    let asked = asked.map(|path| if path.is_dir() { path } else { path.with_file_name("") });
    let mut folders: Vec<PathBuf> = asked.into_iter().collect();
    folders.extend(std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths));
    folders.extend(tools::nvrtc(root).parent().map(Path::to_owned));
    folders.extend(within("/usr/local".as_ref(), "cuda").into_iter().map(|toolkit| toolkit.join("lib64")));
    let print = "import sys; print('\\n'.join(path for path in sys.path if path))";
    if let Ok(output) = Command::new("python3").args(["-c", print]).output() {
        let packages = String::from_utf8_lossy(&output.stdout).into_owned();
        let wheels = packages.lines().flat_map(|packages| within(&Path::new(packages).join("nvidia"), ""));
        folders.extend(wheels.map(|wheel| wheel.join("lib")));
    }
    folders
}

/// Folders in a folder, in the order of their names.
fn within(folder: &Path, prefix: &str) -> BTreeSet<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    named.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_either_version_are_taken() {
        let dir = std::env::temp_dir().join(format!("baton-xtask-libraries-{}", std::process::id()));
        for (name, is_taken) in [
            ("libnvrtc.so.12", true),
            ("libcublasLt.so.13", true),
            ("libnvrtc.so", false),
            ("libnvrtc.so.1", false),
        ] {
            let folder = dir.join(format!("with-{name}"));
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(name), "").unwrap();
            assert_eq!(has_library(&folder), is_taken, "{name}");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
