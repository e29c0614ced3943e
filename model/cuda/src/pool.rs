//! Block memory that only its executor uses.

use std::io;

use baton_cuda_kernels::kernel::Address;
use baton_kv_cache::DeviceMemory;

/// The address of blocks that the executor's own device allocated.
#[derive(Debug)]
pub struct PoolAddress(pub Address);

// SAFETY: the device frees the memory when it is dropped, together with its executor.
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
