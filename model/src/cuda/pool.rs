//! How blocks of KV are told to kernels.

use std::io;

use baton_kv_cache::{DeviceMemory, KvDtype, KvLayout};

use super::kernel::Address;

/// What `kv::` in `kernels/common.cuh` calls it.
pub(crate) fn number_of(dtype: KvDtype) -> u64 {
    KvDtype::ALL.iter().position(|&other| other == dtype).expect("all are there") as u64
}

/// Bytes, at most 16, to which the elements of every vector are aligned, if block 0 is.
pub(crate) fn alignment(layout: &KvLayout) -> u64 {
    let places = layout.head_bytes() | (layout.head_dim * layout.dtype.size_bytes()) | 16;
    1 << places.trailing_zeros()
}

/// Blocks that nobody reaches but the executor whose device allocated them.
#[derive(Debug)]
pub(crate) struct OwnBlocks(pub(crate) Address);

// SAFETY: a device frees what it allocated when it is dropped, and its executor with it.
unsafe impl DeviceMemory for OwnBlocks {
    fn device(&self) -> u32 {
        0
    }

    fn address(&self) -> Option<u64> {
        Some(self.0.0)
    }

    unsafe fn read(&self, _: usize, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    unsafe fn write(&self, _: usize, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        None
    }

    fn bind(&self) -> io::Result<()> {
        Ok(())
    }
}
