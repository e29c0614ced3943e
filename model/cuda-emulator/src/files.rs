//! Where files are that are compiled when tests run: kernels, and the emulator's own.
//!
//! They are read from the source tree: a test of a changed kernel needs no build of Rust.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use baton_cuda_kernels::kernel::KernelFiles;

/// The repository: `BATON_REPOSITORY`, for programs that run where they were not built, or that which this crate was built in.
pub fn repository() -> PathBuf {
    let built_in = || concat!(env!("CARGO_MANIFEST_DIR"), "/../..").into();
    std::env::var_os("BATON_REPOSITORY").map_or_else(built_in, PathBuf::from)
}

/// Of the `.cu` and `.cuh` files.
pub fn kernel_folder() -> PathBuf {
    repository().join("model/cuda-kernels/kernels")
}

/// Of the emulator's C++.
pub fn cpp_folder() -> PathBuf {
    repository().join("model/cuda-emulator/cpp")
}

/// Of the fake libraries' C++.
pub fn fake_folder() -> PathBuf {
    repository().join("model/cuda-emulator/fake")
}

/// All kernel files, as they are when the first test asks.
pub fn kernel_files() -> KernelFiles {
    static FILES: OnceLock<KernelFiles> = OnceLock::new();
    *FILES.get_or_init(|| KernelFiles::new(read(&kernel_folder()).leak()))
}

/// Names and texts, by name.
fn read(folder: &Path) -> Vec<(&'static str, &'static str)> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.map(|entry| entry.expect("the folder can be read").path());
    let mut files: Vec<(&str, &str)> = paths
        .map(|path| {
            let name = path.file_name().expect("a file").to_str().expect("a name in ASCII").to_owned();
            let text = std::fs::read_to_string(&path).expect("it is in the source tree");
            (&*name.leak(), &*text.leak())
        })
        .collect();
    files.sort_unstable();
    files
}
