//! CUDA libraries that the system's loader does not find: those of toolkits, of Python's wheels, and of conda.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::tools;

/// Libraries that programs look for. The driver decides the version.
const NAMES: [(&str, &[&str]); 4] = [
    ("driver", &["libcuda.so.1"]),
    ("cuBLASLt", &["libcublasLt.so.13", "libcublasLt.so.12"]),
    ("NVRTC", &["libnvrtc.so.13", "libnvrtc.so.12"]),
    ("NCCL", &["libnccl.so.2"]),
];

/// Instead of a path: the system's loader may still find the library.
const NONE: &str = "none found";

/// Folders that the dynamic linker searches anyway.
const OF_SYSTEM: [&str; 5] =
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"];

/// Asks Python for its folders of packages, and for the folder of its own installation: conda puts libraries there.
const ASK_PYTHON: &str = "import sys, site\n\
    for path in sys.path + site.getsitepackages() + [site.getusersitepackages()]: print('packages', path)\n\
    print('prefix', sys.prefix)";

/// Where the libraries are.
pub(super) struct Libraries {
    /// `LD_LIBRARY_PATH` for programs that need them.
    pub(super) path: OsString,
    /// "cuBLASLt" and its first path, or [`NONE`].
    pub(super) found: Vec<(&'static str, String)>,
}

impl Libraries {
    /// `root` is that of a checkout, whose `setup` may have unpacked some.
    pub(super) fn find(root: Option<&Path>) -> Result<Libraries> {
        Libraries::among(likely(root))
    }

    fn among(mut folders: Vec<PathBuf>) -> Result<Libraries> {
        folders.retain(|folder| NAMES.iter().any(|(_, files)| place(folder, files).is_some()));
        let everywhere = || folders.iter().cloned().chain(OF_SYSTEM.map(PathBuf::from));
        let found = NAMES.map(|(name, files)| {
            let first = everywhere().find_map(|folder| place(&folder, files));
            (name, first.map_or(NONE.to_owned(), |path| path.display().to_string()))
        });
        let asked = std::env::var_os("LD_LIBRARY_PATH");
        let asked: Vec<PathBuf> = asked.iter().flat_map(std::env::split_paths).collect();
        let others = asked.into_iter().filter(|folder| !folders.contains(folder));
        let path = std::env::join_paths(folders.iter().cloned().chain(others));
        Ok(Libraries {
            path: path.context("a folder of libraries with a colon in its name")?,
            found: found.into(),
        })
    }

    /// `None`: it was not found.
    pub(super) fn place_of(&self, name: &str) -> Option<&str> {
        let place = self.found.iter().find(|(known, _)| *known == name).map(|(_, place)| place.as_str());
        place.filter(|place| *place != NONE)
    }
}

/// The newest version in a folder.
fn place(folder: &Path, files: &[&str]) -> Option<PathBuf> {
    files.iter().map(|file| folder.join(file)).find(|path| path.exists())
}

/// The nearest first.
fn likely(root: Option<&Path>) -> Vec<PathBuf> {
    let asked = std::env::var_os("BATON_NVRTC").map(PathBuf::from);
    let asked = asked.map(|path| if path.is_dir() { path } else { path.with_file_name("") });
    let mut folders: Vec<PathBuf> = asked.into_iter().collect();
    folders.extend(std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths));
    if let Some(root) = root {
        folders.extend(tools::nvrtc(root).parent().map(Path::to_owned));
        folders.extend(tools::nccl_library(root).parent().map(Path::to_owned));
    }
    folders.extend(within("/usr/local".as_ref(), "cuda").into_iter().map(|toolkit| toolkit.join("lib64")));
    folders.extend(of_python());
    folders.extend(std::env::var_os("CONDA_PREFIX").map(|prefix| PathBuf::from(prefix).join("lib")));
    for conda in ["/opt/conda", "/opt/miniconda3", "/opt/mambaforge"] {
        folders.extend(of_prefix(Path::new(conda)));
    }
    folders
}

fn of_python() -> Vec<PathBuf> {
    let Ok(output) = Command::new("python3").args(["-c", ASK_PYTHON]).output() else { return vec![] };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut folders = vec![];
    for line in said.lines() {
        match line.split_once(' ') {
            Some(("packages", packages)) if !packages.is_empty() => {
                folders.extend(of_wheels(Path::new(packages)))
            }
            Some(("prefix", prefix)) => folders.push(Path::new(prefix).join("lib")),
            _ => {}
        }
    }
    folders
}

/// A Python installation, or environment, that need not be on PATH.
fn of_prefix(prefix: &Path) -> Vec<PathBuf> {
    let pythons = within(&prefix.join("lib"), "python3.");
    let wheels = pythons.into_iter().flat_map(|python| of_wheels(&python.join("site-packages")));
    [prefix.join("lib")].into_iter().chain(wheels).collect()
}

/// Libraries of NVIDIA's wheels: `nvidia/cublas/lib` for CUDA 12, `nvidia/cu13/lib` for CUDA 13.
fn of_wheels(packages: &Path) -> Vec<PathBuf> {
    within(&packages.join("nvidia"), "").into_iter().map(|wheel| wheel.join("lib")).collect()
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
    fn libraries_of_wheels_and_conda_are_found() {
        let dir = std::env::temp_dir().join(format!("baton-xtask-libraries-{}", std::process::id()));
        let wheels = "lib/python3.12/site-packages/nvidia";
        for file in [
            format!("{wheels}/cublas/lib/libcublasLt.so.12"),
            format!("{wheels}/nccl/lib/libnccl.so.2"),
            format!("{wheels}/curand/lib/libcurand.so.10"),
            "lib/libnvrtc.so.12".to_owned(),
            "lib/libnvrtc.so.13".to_owned(),
            "lib/libcublasLt.so".to_owned(),
        ] {
            let path = dir.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let libraries = Libraries::among(of_prefix(&dir)).unwrap();
        let folders: Vec<PathBuf> = std::env::split_paths(&libraries.path).take(3).collect();
        assert_eq!(
            folders,
            ["lib".into(), format!("{wheels}/cublas/lib"), format!("{wheels}/nccl/lib")]
                .map(|folder| dir.join(folder))
        );
        let found = |name| &libraries.found.iter().find(|(known, _)| *known == name).unwrap().1;
        assert!(found("NVRTC").ends_with("lib/libnvrtc.so.13"), "the newest: {}", found("NVRTC"));
        assert!(found("NCCL").ends_with("nccl/lib/libnccl.so.2"));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
