//! What a kernel is on the host's side: a file, the numbers that it is compiled for, and the struct that it takes.

use std::path::PathBuf;

/// A place in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Address(pub u64);

impl Address {
    /// No place: what a kernel can do without.
    pub const NULL: Address = Address(0);

    /// So many bytes further.
    pub fn add(self, offset: usize) -> Address {
        Address(self.0 + offset as u64)
    }
}

/// A file of kernels, and what is fixed when it is compiled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelSource {
    /// "norm.cu"
    pub file: &'static str,
    /// Macros and their values, such as the size of a head.
    pub defines: Vec<(&'static str, u64)>,
}

/// The texts of the kernel files, by name. The caller that opens a device passes them in: a changed kernel rebuilds the crate that
/// embeds the files, and none of those that launch them.
#[derive(Clone, Copy, Debug)]
pub struct KernelFiles(&'static [(&'static str, &'static str)]);

impl KernelFiles {
    /// Names and texts, headers included.
    pub const fn new(files: &'static [(&'static str, &'static str)]) -> KernelFiles {
        KernelFiles(files)
    }

    /// The text of one.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn text(&self, name: &str) -> &'static str {
        let found = self.0.iter().find(|(file, _)| *file == name);
        found.unwrap_or_else(|| panic!("no kernel file {name}")).1
    }

    /// Files that others include.
    pub fn headers(&self) -> Vec<(&'static str, &'static str)> {
        self.0.iter().copied().filter(|(file, _)| file.ends_with(".cuh")).collect()
    }
}

/// Where the code of kernels comes from.
#[derive(Clone, Debug)]
pub struct KernelCode {
    /// What is compiled.
    pub files: KernelFiles,
    /// Where compiled code is kept; `None`: it is compiled each time.
    pub cache_dir: Option<PathBuf>,
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LaunchShape {
    /// Blocks, in x, y and z.
    pub grid: [u32; 3],
    /// Of a block; all in x.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// The arguments of a kernel, passed to it as they are.
///
/// # Safety
/// The type is `repr(C)`, without padding, and field by field what the kernel of this name takes.
pub unsafe trait Kernel: Copy {
    /// What its file calls it.
    const NAME: &'static str;

    /// The same; of a file that a program has several times, what it is called there.
    fn name(&self) -> &'static str {
        Self::NAME
    }

    /// How it is to be launched with these arguments.
    fn shape(&self) -> LaunchShape;
}
