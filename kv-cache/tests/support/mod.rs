//! A fake device for the tests of memory.

use std::{io, ptr::NonNull, sync::Mutex};

use baton_kv_cache::{DeviceMemory, HostAccess};

/// A fake device: its memory is the host's.
#[derive(Debug)]
pub struct FakeDevice(u32, Mutex<Vec<u8>>);

impl FakeDevice {
    /// Zeroed memory of the device with this number.
    pub fn new(device: u32, size_bytes: usize) -> FakeDevice {
        FakeDevice(device, vec![0; size_bytes].into())
    }
}

// SAFETY: the vector never changes its size, so its memory never moves.
unsafe impl DeviceMemory for FakeDevice {
    fn device(&self) -> u32 {
        self.0
    }

    fn address(&self) -> Option<u64> {
        Some(self.1.lock().unwrap().as_ptr() as u64)
    }

    fn bind(&self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.1.lock().unwrap()[offset..offset + bytes.len()]);
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.1.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        None
    }

    unsafe fn access_host(&self, _: NonNull<u8>, _: usize) -> io::Result<Option<HostAccess>> {
        Ok(Some(Box::new(())))
    }
}
