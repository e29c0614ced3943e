//! Where CUDA's libraries are: a toolkit, a package of the system, or wheels of Python, of CUDA 12 or 13.
//!
//! Programs look for `libNAME.so` and `libNAME.so.12`. A folder of links gives them that name for whichever there is.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::tools;

const NAMES: [&str; 2] = ["libnvrtc.so", "libcublasLt.so"];

/// Those that were tried with the functions that are called, the best first.
const VERSIONS: [&str; 2] = ["12", "13"];

/// `LD_LIBRARY_PATH` for programs that need them, with links in `dir`. What is not found, the loader may know of.
pub(super) fn path(root: &Path, dir: &Path) -> Result<OsString> {
    let links = dir.join("lib");
    std::fs::create_dir_all(&links).context("make a folder of libraries")?;
    let mut folders = vec![links.clone()];
    let known = folders_of_libraries(root);
    for name in NAMES {
        let link = links.join(name);
        // It is of an earlier run.
        let _ = std::fs::remove_file(&link);
        if let Some(file) = find(&known, name) {
            symlink(&file, &link).context("link a library")?;
            folders.extend(file.parent().map(Path::to_owned));
        }
    }
    folders.extend(std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths));
    std::env::join_paths(folders).context("a folder of libraries with a colon in its name")
}

fn find(folders: &[PathBuf], name: &str) -> Option<PathBuf> {
    let files = folders.iter().flat_map(|folder| {
        let of_version = |version: &&str| folder.join(format!("{name}.{version}"));
        VERSIONS.iter().map(of_version).collect::<Vec<_>>()
    });
    files.filter_map(|file| file.canonicalize().ok()).next()
}

/// The nearest first.
fn folders_of_libraries(root: &Path) -> Vec<PathBuf> {
    let asked = std::env::var_os("BATON_NVRTC").map(PathBuf::from);
    let asked = asked.map(|path| if path.is_dir() { path } else { path.with_file_name("") });
    let mut folders: Vec<PathBuf> = asked.into_iter().collect();
    folders.extend(std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths));
    folders.extend(tools::nvrtc(root).parent().map(Path::to_owned));
    folders.extend(within("/usr/local".as_ref(), "cuda").into_iter().map(|toolkit| toolkit.join("lib64")));
    folders.push("/usr/lib/x86_64-linux-gnu".into());
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
    fn the_nearest_library_is_linked_under_the_name_that_is_looked_for() {
        let dir = std::env::temp_dir().join(format!("baton-xtask-libraries-{}", std::process::id()));
        let [near, far] = ["near", "far"].map(|name| dir.join(name));
        [&near, &far].iter().for_each(|folder| std::fs::create_dir_all(folder).unwrap());
        for file in [near.join("libnvrtc.so.13"), far.join("libnvrtc.so.12"), far.join("libcublasLt.so.12")] {
            std::fs::write(file, "").unwrap();
        }
        let folders = [near.clone(), far.clone()];
        let found = NAMES.map(|name| find(&folders, name).unwrap());
        let expected = [near.join("libnvrtc.so.13"), far.join("libcublasLt.so.12")];
        assert_eq!(found, expected.map(|file| file.canonicalize().unwrap()));
        assert_eq!(find(&folders[..1], "libcublasLt.so"), None);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
