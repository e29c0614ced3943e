//! Memory of a device as the storage of blocks sees it. The crates that know the device's driver implement it.

use std::{fmt, io, ptr::NonNull, sync::Mutex};

use crate::WireCodec;

/// A device's access to memory of the host. It ends when this is dropped.
pub type HostAccess = Box<dyn fmt::Debug + Send + Sync>;

/// One region of a device's memory, freed when dropped. Implemented by crates that know the device's driver.
///
/// # Safety
/// Until it is dropped, the region stays at [`address`](Self::address) and keeps its size.
pub unsafe trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Number of the device, as its driver counts in this process.
    fn device(&self) -> u32;

    /// Address of the first byte, for drivers and device code, not for the host. `None` when the region is divided
    /// among several devices: then it can only be copied from and to.
    fn address(&self) -> Option<u64>;

    /// The regions of the ranks, in their order, when each rank has its own
    /// ([`DividedMemory`](crate::DividedMemory)).
    fn parts(&self) -> &[Box<dyn DeviceMemory>] {
        &[]
    }

    /// Makes the device current on the calling thread, for libraries that ask its driver about the memory.
    ///
    /// # Errors
    /// When the device fails.
    fn bind(&self) -> io::Result<()>;

    /// Copies `bytes.len()` bytes at `offset` to the host, and waits for them.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The bytes are in the region, and they are not written meanwhile.
    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()>;

    /// Copies `bytes` to `offset`, and waits for them.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The bytes are in the region, and they are not used otherwise meanwhile.
    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()>;

    /// A handle with which other processes of this host can open the region; `None` when it has none.
    fn handle(&self) -> Option<[u8; 64]>;

    /// Lets the device, or each device of divided memory, read and write memory of the host at the host's own addresses. `None`
    /// when it cannot.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// The memory outlives the access.
    unsafe fn access_host(&self, _base: NonNull<u8>, _size_bytes: usize) -> io::Result<Option<HostAccess>> {
        Ok(None)
    }

    /// The device's operations on blocks, if it has any.
    fn kernels(&self) -> Option<&Mutex<Box<dyn BlockKernels>>> {
        None
    }
}

/// Bytes that a device copies between memories that it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCopy {
    /// Address of the first byte.
    pub source: u64,
    /// Address of its copy.
    pub target: u64,
    /// Number of bytes.
    pub len: usize,
}

/// A device's operations on blocks, on a queue of their own: they wait for no other work of the device, and no other
/// work waits for them. Implemented by crates with kernels. Places are the device's addresses, or offsets in memory
/// without an address.
pub trait BlockKernels: fmt::Debug + Send {
    /// Copies one run from each of `places` to the host, and waits for them. All runs have the same length and follow
    /// each other in `bytes`.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// Each run exists, and it is not written meanwhile.
    unsafe fn gather(&mut self, places: &[u64], bytes: &mut [u8]) -> io::Result<()>;

    /// Copies runs of the same length, which follow each other in `bytes`, to `places`, and waits for them.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// Each run has room, and it is not used otherwise meanwhile.
    unsafe fn scatter(&mut self, places: &[u64], bytes: &[u8]) -> io::Result<()>;

    /// Has the device of `rank` make these copies, and waits for them. `rank` is 0 for memory of one device.
    ///
    /// # Errors
    /// When the device fails. It may still read and write until [`settle`](Self::settle) has returned.
    ///
    /// # Safety
    /// The device reaches all bytes. The sources are not written and the targets are not used meanwhile.
    unsafe fn copy(&mut self, rank: usize, copies: &[DeviceCopy]) -> io::Result<()>;

    /// Waits, also after an error, until the device has done all that was begun here.
    ///
    /// # Errors
    /// When the device fails. It may still read and write.
    fn settle(&mut self) -> io::Result<()>;

    /// XXH3-64, seeded with `seed`, of runs of `num_bytes` at `places`. `None` when the device does not compute it
    /// for such runs: then the caller does.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As of [`gather`](Self::gather).
    unsafe fn checksums(
        &mut self,
        places: &[u64],
        num_bytes: usize,
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>>;

    /// Encodes the pieces at `places` one after the other into `coded`, and waits for them. Returns checksums, seeded
    /// with `seed`, of the decoded pieces. `None` when the device does not encode so: then the caller does.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As of [`gather`](Self::gather).
    unsafe fn gather_coded(
        &mut self,
        codec: &WireCodec,
        places: &[u64],
        coded: &mut [u8],
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>>;

    /// Decodes pieces, which follow each other in `coded`, to `places`, and waits for them. `false`, without any
    /// effect, when the device does not decode so: then the caller does.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As of [`scatter`](Self::scatter).
    unsafe fn scatter_coded(&mut self, codec: &WireCodec, places: &[u64], coded: &[u8]) -> io::Result<bool>;
}
