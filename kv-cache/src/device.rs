//! Memory of a device, as whoever holds blocks in it sees it. The driver is known elsewhere.

use std::{fmt, io, sync::Mutex};

use crate::WireCodec;

/// One region of a device's memory, freed when dropped. Implemented where the device's driver is known.
///
/// # Safety
/// The region stays where [`address`](Self::address) says, and as large as it was said to be, until it is dropped.
pub unsafe trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Number of the device, as its driver counts in this process.
    fn device(&self) -> u32;

    /// Address of the first byte, for drivers and for code of the device. Not for the host. `None` where the region lies
    /// on several devices: then it can only be copied from and to.
    fn address(&self) -> Option<u64>;

    /// The regions of the ranks, in their order, where they have one each ([`DividedMemory`](crate::DividedMemory)).
    fn parts(&self) -> &[Box<dyn DeviceMemory>] {
        &[]
    }

    /// Makes the device the calling thread's, for libraries that ask its driver about the memory.
    ///
    /// # Errors
    /// When the device fails.
    fn bind(&self) -> io::Result<()>;

    /// Copies `bytes.len()` bytes from `offset` on to the host, and waits for them.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The bytes lie in the region, and nobody writes them meanwhile.
    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()>;

    /// Copies `bytes` to `offset`; they are there when it returns.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// They lie in the region, and nobody else uses them meanwhile.
    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()>;

    /// A name under which other processes of this host can open the region; `None` when it has none.
    fn handle(&self) -> Option<[u8; 64]>;

    /// What the device does with blocks by itself, if it can.
    fn kernels(&self) -> Option<&Mutex<Box<dyn BlockKernels>>> {
        None
    }
}

/// What a device does with blocks by itself, on a queue of its own: it waits for nothing else that the device does, and
/// nothing else waits for it. Implemented where kernels are known; places are the device's addresses, or offsets in memory that has
/// none.
pub trait BlockKernels: fmt::Debug + Send {
    /// Copies as many runs of the same length as there are `places` to the host, one behind the other in `bytes`, and waits
    /// for them.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// Each run is there, and nobody writes it meanwhile.
    unsafe fn gather(&mut self, places: &[u64], bytes: &mut [u8]) -> io::Result<()>;

    /// Copies runs of the same length, one behind the other in `bytes`, to `places`; they are there when it returns.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// There is room for each run, and nobody else uses it meanwhile.
    unsafe fn scatter(&mut self, places: &[u64], bytes: &[u8]) -> io::Result<()>;

    /// XXH3-64, seeded with `seed`, of runs of `num_bytes` at `places`. `None` when it does not take it of such runs: then
    /// processors do.
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

    /// Codes the pieces at `places`, one behind the other in `coded`, and waits for them; the checksums, seeded with `seed`,
    /// are of what decoding makes of them. `None` when it does not code so: then processors do.
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

    /// Decodes pieces, one behind the other in `coded`, to `places`; they are there when it returns. `false`, and nothing has
    /// happened, when it does not decode so: then processors do.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As of [`scatter`](Self::scatter).
    unsafe fn scatter_coded(&mut self, codec: &WireCodec, places: &[u64], coded: &[u8]) -> io::Result<bool>;
}
