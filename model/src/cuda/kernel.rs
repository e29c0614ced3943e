//! What a kernel is on the host's side: a file, the numbers that it is compiled for, and the struct that it takes.

/// A place in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Address(pub(crate) u64);

impl Address {
    /// No place: what a kernel can do without.
    pub(crate) const NULL: Address = Address(0);

    /// So many bytes further.
    pub(crate) fn add(self, offset: usize) -> Address {
        Address(self.0 + offset as u64)
    }
}

/// A file of kernels, and what is fixed when it is compiled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    /// "norm.cu"
    pub(crate) file: &'static str,
    pub(crate) text: &'static str,
    /// Macros and their values, such as the size of a head.
    pub(crate) defines: Vec<(&'static str, u64)>,
}

/// Files that others include: their names, and their texts.
pub(crate) const HEADERS: [(&str, &str); 4] = [
    ("common.cuh", include_str!("kernels/common.cuh")),
    ("attention.cuh", include_str!("kernels/attention.cuh")),
    ("attention_tiles.cuh", include_str!("kernels/attention_tiles.cuh")),
    ("warpgroup.cuh", include_str!("kernels/warpgroup.cuh")),
];

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct LaunchShape {
    /// Blocks, in x, y and z.
    pub(crate) grid: [u32; 3],
    /// Of a block; all in x.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
}

/// The arguments of a kernel, passed to it as they are.
///
/// # Safety
/// The type is `repr(C)`, without padding, and field by field what the kernel of this name takes.
pub(crate) unsafe trait Kernel: Copy {
    /// What its file calls it.
    const NAME: &'static str;

    /// The same; of a file that a program has several times, what it is called there.
    fn name(&self) -> &'static str {
        Self::NAME
    }

    /// How it is to be launched with these arguments.
    fn shape(&self) -> LaunchShape;
}
