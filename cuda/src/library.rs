//! Looks up functions of libraries at run time, and finds the libraries of CUDA toolkits.
//!
//! A driver supports libraries of its own major version of CUDA, with any minor version, and of older major versions
//! (NVIDIA, "CUDA Compatibility"). File names end in the major version, so a search can ask for the right one.
//! `libNAME.so` comes with the headers and can have any version, so it is not used.

use std::{
    error::Error as _,
    fmt,
    mem::ManuallyDrop,
    path::{Path, PathBuf},
};

use libloading::Library;
use thiserror::Error;

/// Major versions of CUDA in which the called functions are the same, the newest first.
const MAJORS: [u32; 2] = [13, 12];

/// The first driver of the oldest of these versions.
const OLDEST_DRIVER: u32 = 525;

/// The folder of installed toolkits, such as `cuda-12.9`. `cuda` links to one of them.
const TOOLKITS: &str = "/usr/local";

/// A version of CUDA: of a library, or the newest that a driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaVersion {
    /// 12 of 12.8.
    pub major: u32,
    /// 8 of 12.8.
    pub minor: u32,
}

impl CudaVersion {
    /// Converts the number that the driver and libraries return: 12080 is 12.8.
    pub(crate) fn of_number(number: u32) -> CudaVersion {
        CudaVersion { major: number / 1000, minor: number % 1000 / 10 }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Major versions that a driver supports, the newest first. Without a driver: all versions.
pub fn majors(driver: Option<CudaVersion>) -> impl Iterator<Item = u32> {
    MAJORS.into_iter().filter(move |major| driver.is_none_or(|driver| *major <= driver.major))
}

/// A library of a CUDA toolkit is missing, or the driver does not support it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("no {name}{}: {why}; {remedy}", .driver.map_or(String::new(), |driver| format!(" for a driver of CUDA {driver}")))]
pub struct NoLibrary {
    /// "NVRTC"
    pub name: &'static str,
    /// The driver version that must support the library, or its code.
    pub driver: Option<CudaVersion>,
    /// The files that were tried, with the loader's messages.
    pub why: String,
    /// What to do about it.
    pub remedy: String,
}

/// A library of CUDA's toolkit.
pub(crate) struct Part {
    /// "NVRTC"
    pub(crate) name: &'static str,
    /// "libnvrtc"
    pub(crate) stem: &'static str,
    /// The environment variable that can name its file or folder.
    pub(crate) variable: &'static str,
    /// The packages that contain it, for each of [`MAJORS`].
    pub(crate) packages: [&'static str; MAJORS.len()],
}

impl Part {
    /// Loads the newest version that the driver supports. `place` is a file or a folder; without it, the library's
    /// environment variable may name one. Without both, the search covers the dynamic linker's libraries, then
    /// toolkits. The library is never unloaded, because its threads and exit handlers outlive every handle.
    pub(crate) fn load(
        &self,
        place: Option<&Path>,
        driver: Option<CudaVersion>,
    ) -> Result<(ManuallyDrop<Library>, PathBuf), NoLibrary> {
        if majors(driver).next().is_none() {
            let why = format!("it is older than CUDA {}", MAJORS[MAJORS.len() - 1]);
            let remedy = format!("driver {OLDEST_DRIVER} or newer is needed");
            return Err(NoLibrary { name: self.name, driver, why, remedy });
        }
        let names = majors(driver).map(|major| PathBuf::from(format!("{}.so.{major}", self.stem)));
        let named = std::env::var_os(self.variable).map(PathBuf::from);
        let candidates: Vec<PathBuf> = match place.or(named.as_deref()) {
            Some(folder) if folder.is_dir() => names.map(|name| folder.join(name)).collect(),
            Some(file) => vec![file.to_owned()],
            None => {
                let names: Vec<PathBuf> = names.collect();
                let folders = toolkits(TOOLKITS.as_ref());
                let of_toolkits =
                    folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
                let of_toolkits: Vec<PathBuf> = of_toolkits.filter(|path| path.exists()).collect();
                names.into_iter().chain(of_toolkits).collect()
            }
        };
        let mut errors = Vec::new();
        for path in candidates {
            // SAFETY: its initialisers may run at any time in any thread. An operator who configures another library
            // trusts it, as with any program.
            match unsafe { Library::new(path.as_os_str()) } {
                Ok(library) => return Ok((ManuallyDrop::new(library), path)),
                Err(error) => errors.push(words(&error)),
            }
        }
        Err(self.absent(driver, errors.join("; ")))
    }

    /// Checks the version of a loaded library: file names can be wrong.
    pub(crate) fn check(
        &self,
        path: &Path,
        version: CudaVersion,
        driver: Option<CudaVersion>,
    ) -> Result<(), NoLibrary> {
        match majors(driver).any(|major| major == version.major) {
            true => Ok(()),
            false => Err(self.absent(driver, format!("{} is of CUDA {version}", path.display()))),
        }
    }

    pub(crate) fn absent(&self, driver: Option<CudaVersion>, why: String) -> NoLibrary {
        let packages = MAJORS.iter().zip(self.packages);
        let of_use = packages.filter(|(major, _)| majors(driver).any(|runs| runs == **major));
        let named: Vec<String> =
            of_use.map(|(major, packages)| format!("of CUDA {major} ({packages})")).collect();
        let remedy = format!(
            "install that {} where the dynamic linker finds it, or let {} name its file or folder",
            named.join(" or "),
            self.variable
        );
        NoLibrary { name: self.name, driver, why, remedy }
    }
}

/// Library folders of the installed toolkits, the newest first. Some ways of installation do not tell the dynamic
/// linker about them.
fn toolkits(root: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    let versions = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let (major, minor) = name.strip_prefix("cuda-")?.split_once('.')?;
        Some(((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?), entry.path().join("lib64")))
    });
    let mut versions: Vec<_> = versions.collect();
    versions.sort();
    // The operator chose the toolkit that `cuda` links to.
    let linked = root.join("cuda/lib64");
    linked
        .is_dir()
        .then_some(linked)
        .into_iter()
        .chain(versions.into_iter().rev().map(|(_, path)| path))
        .collect()
}

/// The loader's messages, which name the file.
pub(crate) fn words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// Functions of a library, looked up once. Their types follow the header, with `int` for enums, because a newer
/// library may return new values.
macro_rules! api {
    ($vis:vis struct $api:ident { $($name:ident: $symbol:literal fn($($arg:ty),*) -> $result:ty;)* }) => {
        #[doc = "Functions, looked up once."]
        $vis struct $api {
            $(#[doc = concat!("`", $symbol, "`")] $vis $name: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl $api {
            fn find(library: &std::mem::ManuallyDrop<libloading::Library>) -> Result<$api, libloading::Error> {
                Ok($api {
                    // SAFETY: the types follow the header, and the library is never unloaded.
                    $($name: *unsafe { library.get($symbol.as_bytes()) }?,)*
                })
            }
        }
    };
}
pub(crate) use api;

/// Copies a C string.
///
/// # Safety
/// The pointer is null or a C string.
pub(crate) unsafe fn text(pointer: *const std::ffi::c_char) -> String {
    match pointer.is_null() {
        true => String::new(),
        // SAFETY: by the caller's word.
        false => unsafe { std::ffi::CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed() {
        let versions = [12000, 12080, 13010].map(|number| CudaVersion::of_number(number).to_string());
        assert_eq!(versions, ["12.0", "12.8", "13.1"]);
    }

    #[test]
    fn the_linked_toolkit_comes_first_then_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cuda-12.9", "cuda-13.10", "cuda-13.2", "cuda-old", "other"] {
            std::fs::create_dir_all(dir.path().join(name).join("lib64")).unwrap();
        }
        let names = || -> Vec<String> {
            let folders = toolkits(dir.path());
            let inside =
                folders.iter().map(|path| path.strip_prefix(dir.path()).unwrap().display().to_string());
            inside.collect()
        };
        assert_eq!(names(), ["cuda-13.10/lib64", "cuda-13.2/lib64", "cuda-12.9/lib64"]);
        std::os::unix::fs::symlink("cuda-12.9", dir.path().join("cuda")).unwrap();
        assert_eq!(names()[0], "cuda/lib64");
        assert!(toolkits(&dir.path().join("nowhere")).is_empty());
    }
}
