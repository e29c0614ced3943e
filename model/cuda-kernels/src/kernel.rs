//! A kernel on the host's side: its file, the constants it is compiled for, and the struct of its arguments.

use std::path::PathBuf;

/// An address in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Address(pub u64);

impl Address {
    /// No address, for an optional argument of a kernel.
    pub const NULL: Address = Address(0);

    /// The address `offset` bytes further.
    pub fn offset_by(self, offset: usize) -> Address {
        Address(self.0 + offset as u64)
    }
}

/// A file of kernels and the constants it is compiled with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelSource {
    /// "norm.cu"
    pub file: &'static str,
    /// Macros and their values, such as the head size.
    pub defines: Vec<(&'static str, u64)>,
}

impl KernelSource {
    /// All macros: "HEAD_DIM=64 KV=2".
    pub fn constants(&self) -> String {
        let constants: Vec<String> =
            self.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        constants.join(" ")
    }

    /// The value of a macro.
    ///
    /// # Panics
    /// When the file is compiled without it.
    pub fn defined(&self, name: &str) -> u64 {
        let found = self.defines.iter().find(|(defined, _)| *defined == name);
        found.unwrap_or_else(|| panic!("{} is compiled without {name}", self.file)).1
    }
}

/// The text of the kernel files, by name. The caller that opens a device passes them in. A changed kernel therefore
/// rebuilds only the crate that embeds the files, not the crates that launch the kernels.
#[derive(Clone, Copy, Debug)]
pub struct KernelFiles(&'static [(&'static str, &'static str)]);

impl KernelFiles {
    /// Names and texts, headers included.
    pub const fn new(files: &'static [(&'static str, &'static str)]) -> KernelFiles {
        KernelFiles(files)
    }

    /// The text of one file.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn text(&self, name: &str) -> &'static str {
        let found = self.0.iter().find(|(file, _)| *file == name);
        found.unwrap_or_else(|| panic!("no kernel file {name}")).1
    }

    /// The names and texts of the headers.
    pub fn headers(&self) -> Vec<(&'static str, &'static str)> {
        self.0.iter().copied().filter(|(file, _)| file.ends_with(".cuh")).collect()
    }
}

/// The text of the kernels, and where compiled code is.
#[derive(Clone, Debug)]
pub struct KernelCode {
    /// The text that is compiled.
    pub files: KernelFiles,
    /// The folder of code that was compiled here. `None`: nothing is kept.
    pub cache_dir: Option<PathBuf>,
    /// The file of code that is installed with the program ([`crate::shipped`]).
    pub shipped: Option<PathBuf>,
}

/// Threads and shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LaunchShape {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, all in x.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// The arguments of a kernel. The launch passes the struct by value.
///
/// # Safety
/// The type is `repr(C)` without padding, and its fields are those of the kernel's own struct.
pub unsafe trait Kernel: Copy {
    /// The kernel's name in its file.
    const NAME: &'static str;

    /// The kernel's name in a program. It differs from `NAME` where a program compiles one file several times.
    fn name(&self) -> &'static str {
        Self::NAME
    }

    /// Threads and shared memory for these arguments.
    fn shape(&self) -> LaunchShape;
}
