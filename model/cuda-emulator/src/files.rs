//! Paths of the files that tests compile when they run: the kernels and the emulator's C++.
//!
//! The files are read from the source tree, so a changed kernel needs no build of Rust code.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use baton_cuda_kernels::kernel::KernelFiles;

/// The repository: `BATON_REPOSITORY`, for programs that run elsewhere, or the one in which this crate was built.
pub fn repository() -> PathBuf {
    let built_in = || concat!(env!("CARGO_MANIFEST_DIR"), "/../..").into();
    std::env::var_os("BATON_REPOSITORY").map_or_else(built_in, PathBuf::from)
}

/// The folder of the `.cu` and `.cuh` files.
pub fn kernel_folder() -> PathBuf {
    repository().join("model/cuda-kernels/kernels")
}

/// The folder of the emulator's C++.
pub fn cpp_folder() -> PathBuf {
    repository().join("model/cuda-emulator/cpp")
}

/// The folder of the fake libraries' C++.
pub fn fake_folder() -> PathBuf {
    repository().join("model/cuda-emulator/fake")
}

/// All kernel files, as they are when the first test reads them.
pub fn kernel_files() -> KernelFiles {
    static FILES: OnceLock<KernelFiles> = OnceLock::new();
    *FILES.get_or_init(|| KernelFiles::new(read(&kernel_folder()).leak()))
}

/// The text of each file, by name.
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
