//! The memory of blocks that no one but their executor uses.

use std::io;

use baton_cuda_kernels::kernel::Address;
use baton_kv_cache::DeviceMemory;

/// Blocks that only the executor whose device allocated them reaches.
#[derive(Debug)]
pub struct PoolAddress(pub Address);

// SAFETY: a device frees what it allocated when it is dropped, and its executor with it.
unsafe impl DeviceMemory for PoolAddress {
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
