//! Fake devices: blocks in host memory that claims to be on a device.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use baton_kv_cache::{
    BlockId, BlockKernels, BlockStorage, DeviceCopy, DeviceMemory, DividedMemory, KvLayout, KvShard,
    WireCodec, WireScratch,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The device, where there is one.
const DEVICE: u32 = 5;

/// A device whose memory NIXL is told to be the host's, as it is.
pub const HOST: u32 = u32::MAX;

/// How a fake device fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It copies nothing.
    Copies,
    /// Nor does it say whether it has stopped.
    Hangs,
}

/// With kernels, as workers have it.
pub fn fake_device(layout: KvLayout, num_blocks: usize) -> BlockStorage {
    counted_device(layout, num_blocks).0
}

/// The same, and how often pieces went between it and the host.
pub fn counted_device(layout: KvLayout, num_blocks: usize) -> (BlockStorage, Arc<Counts>) {
    let counts = Arc::<Counts>::default();
    let kernels = FakeKernels { counts: Arc::clone(&counts), ..FakeKernels::default() };
    (device(layout, num_blocks, Some(kernels)), counts)
}

/// The same, which fails when pieces are copied from it.
pub fn failing_device(layout: KvLayout, num_blocks: usize, fault: Fault) -> BlockStorage {
    device(layout, num_blocks, Some(FakeKernels { fault: Some(fault), ..FakeKernels::default() }))
}

/// The same, which fails or not, and whose copies to another device wait to be let on.
pub fn paused_device(
    layout: KvLayout,
    num_blocks: usize,
    fault: Option<Fault>,
) -> (BlockStorage, PausedCopies) {
    let ((begin, begun), (go_on, let_on)) = (mpsc::channel(), mpsc::channel());
    let kernels = FakeKernels { fault, pause: Some((begin, let_on)), ..FakeKernels::default() };
    (device(layout, num_blocks, Some(kernels)), PausedCopies { begun, go_on })
}

/// The copies of a device that wait.
#[derive(Debug)]
pub struct PausedCopies {
    /// A copy has begun.
    pub begun: mpsc::Receiver<()>,
    /// Lets a copy go on.
    pub go_on: mpsc::Sender<()>,
}

/// The same of several devices, each with some heads; a piece is moved by all.
pub fn counted_devices(layout: KvLayout, num_blocks: usize, devices: &[u32]) -> (BlockStorage, Arc<Counts>) {
    let counts = Arc::<Counts>::default();
    let of_rank = |rank| *KvShard::new(&layout, devices.len(), rank).expect("a shard").layout();
    let parts = devices.iter().enumerate();
    let parts = parts.map(|(rank, &device)| memory(device, of_rank(rank), num_blocks, None)).collect();
    let kernels = devices.iter().map(|_| {
        let kernels = FakeKernels { counts: Arc::clone(&counts), ..FakeKernels::default() };
        Box::new(kernels) as Box<dyn BlockKernels>
    });
    let memory = DividedMemory::new(layout, parts).expect("shards").with_kernels(kernels.collect());
    (BlockStorage::on_device(Box::new(memory), layout, num_blocks), counts)
}

/// Pieces of a fake device with kernels.
#[derive(Debug, Default)]
pub struct Counts {
    /// Copied to or from the host.
    pub moved: AtomicUsize,
    /// Copied from device to device.
    pub copied: AtomicUsize,
    /// Hashed on the device.
    pub hashed: AtomicUsize,
    /// Encoded or decoded on the device.
    pub coded: AtomicUsize,
}

/// A device that only copies.
pub fn device_without_kernels(layout: KvLayout, num_blocks: usize) -> BlockStorage {
    device(layout, num_blocks, None)
}

/// `None`: it only copies.
fn device(layout: KvLayout, num_blocks: usize, kernels: Option<FakeKernels>) -> BlockStorage {
    BlockStorage::on_device(memory(DEVICE, layout, num_blocks, kernels), layout, num_blocks)
}

fn memory(
    device: u32,
    layout: KvLayout,
    num_blocks: usize,
    kernels: Option<FakeKernels>,
) -> Box<dyn DeviceMemory> {
    let host = BlockStorage::new(layout, num_blocks).expect("memory");
    let fault = kernels.as_ref().and_then(|kernels| kernels.fault);
    let kernels = kernels.map(|kernels| Mutex::new(Box::new(kernels) as Box<dyn BlockKernels>));
    Box::new(FakeDevice { device, host, kernels, fault })
}

/// The memory of a fake device of this process, by its handle.
///
/// # Errors
/// Never. The driver's counterpart has errors.
pub fn opened(_: u32, handle: [u8; 64], _: usize) -> io::Result<Box<dyn DeviceMemory>> {
    let address = handle.last_chunk().expect("a handle is longer than an address");
    Ok(Box::new(Opened { address: u64::from_ne_bytes(*address) }))
}

fn check(fault: Option<Fault>) -> io::Result<()> {
    fault.map_or(Ok(()), |_| Err(io::Error::other("the fake device fails")))
}

#[derive(Debug)]
struct FakeDevice {
    device: u32,
    host: BlockStorage,
    kernels: Option<Mutex<Box<dyn BlockKernels>>>,
    fault: Option<Fault>,
}

impl FakeDevice {
    fn at(&self, offset: usize) -> *mut u8 {
        // The storage is one run from its first byte.
        self.host.layer_ptr(BlockId(0), 0).as_ptr().wrapping_add(offset)
    }
}

// SAFETY: the storage stays where it is until it is dropped.
unsafe impl DeviceMemory for FakeDevice {
    fn device(&self) -> u32 {
        self.device
    }

    fn address(&self) -> Option<u64> {
        Some(self.host.address())
    }

    fn bind(&self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        check(self.fault)?;
        // SAFETY: in bounds, and not written meanwhile, by the caller's word.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(offset), bytes.len()) };
        Ok(())
    }

    /// The number of the device, and at the end the address.
    fn handle(&self) -> Option<[u8; 64]> {
        let mut handle = [self.device as u8; 64];
        let address = handle.last_chunk_mut().expect("a handle is longer than an address");
        *address = self.host.address().to_ne_bytes();
        Some(handle)
    }

    fn kernels(&self) -> Option<&Mutex<Box<dyn BlockKernels>>> {
        self.kernels.as_ref()
    }
}

/// Memory that [`opened`] has found.
#[derive(Debug)]
struct Opened {
    address: u64,
}

// SAFETY: tests keep the fake device longer than what was opened by its handle.
unsafe impl DeviceMemory for Opened {
    fn device(&self) -> u32 {
        DEVICE
    }

    fn address(&self) -> Option<u64> {
        Some(self.address)
    }

    fn bind(&self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        let from = (self.address as *const u8).wrapping_add(offset);
        // SAFETY: in bounds, and not written meanwhile, by the caller's word.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let to = (self.address as *mut u8).wrapping_add(offset);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        None
    }
}

#[derive(Debug, Default)]
struct FakeKernels {
    counts: Arc<Counts>,
    fault: Option<Fault>,
    /// Where a copy says that it has begun, and what it waits for then.
    pause: Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>,
}

impl BlockKernels for FakeKernels {
    unsafe fn gather(&mut self, places: &[u64], bytes: &mut [u8]) -> io::Result<()> {
        let num_bytes = bytes.len() / places.len();
        for (&place, bytes) in places.iter().zip(bytes.chunks_exact_mut(num_bytes)) {
            // SAFETY: there, and not written meanwhile, by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(place as *const u8, bytes.as_mut_ptr(), num_bytes) };
        }
        self.counts.moved.fetch_add(places.len(), Ordering::SeqCst);
        Ok(())
    }

    unsafe fn scatter(&mut self, places: &[u64], bytes: &[u8]) -> io::Result<()> {
        let num_bytes = bytes.len() / places.len();
        for (&place, bytes) in places.iter().zip(bytes.chunks_exact(num_bytes)) {
            // SAFETY: there, and not used meanwhile, by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place as *mut u8, num_bytes) };
        }
        self.counts.moved.fetch_add(places.len(), Ordering::SeqCst);
        Ok(())
    }

    unsafe fn copy(&mut self, _: usize, copies: &[DeviceCopy]) -> io::Result<()> {
        if let Some((begin, let_on)) = &self.pause {
            // Either fails when the test has ended. One that has failed may wait for this thread before it ends.
            let _ = begin.send(());
            let _ = let_on.recv_timeout(Duration::from_secs(60));
        }
        check(self.fault)?;
        for &DeviceCopy { source, target, len } in copies {
            // SAFETY: there, and not used meanwhile, by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, len) };
        }
        self.counts.copied.fetch_add(copies.len(), Ordering::SeqCst);
        Ok(())
    }

    fn settle(&mut self) -> io::Result<()> {
        check(self.fault.filter(|&fault| fault == Fault::Hangs))
    }

    unsafe fn checksums(
        &mut self,
        places: &[u64],
        num_bytes: usize,
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        let sum = |&place: &u64| {
            // SAFETY: as of `gather`.
            xxh3_64_with_seed(unsafe { std::slice::from_raw_parts(place as *const u8, num_bytes) }, seed)
        };
        self.counts.hashed.fetch_add(places.len(), Ordering::SeqCst);
        Ok(Some(places.iter().map(sum).collect()))
    }

    unsafe fn gather_coded(
        &mut self,
        codec: &WireCodec,
        places: &[u64],
        coded: &mut [u8],
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        let num_bytes = codec.layout().layer_bytes();
        let (mut decoded, mut scratch) = (vec![0; num_bytes], WireScratch::default());
        let code = |(&place, coded): (&u64, &mut [u8])| {
            // SAFETY: as of `gather`.
            let piece = unsafe { std::slice::from_raw_parts(place as *const u8, num_bytes) };
            codec.encode(piece, coded, &mut scratch);
            codec.decode(coded, &mut decoded, &mut scratch);
            xxh3_64_with_seed(&decoded, seed)
        };
        let sums = places.iter().zip(coded.chunks_exact_mut(codec.piece_bytes())).map(code).collect();
        self.counts.coded.fetch_add(places.len(), Ordering::SeqCst);
        Ok(Some(sums))
    }

    unsafe fn scatter_coded(&mut self, codec: &WireCodec, places: &[u64], coded: &[u8]) -> io::Result<bool> {
        let (num_bytes, mut scratch) = (codec.layout().layer_bytes(), WireScratch::default());
        for (&place, coded) in places.iter().zip(coded.chunks_exact(codec.piece_bytes())) {
            // SAFETY: as of `scatter`.
            let piece = unsafe { std::slice::from_raw_parts_mut(place as *mut u8, num_bytes) };
            codec.decode(coded, piece, &mut scratch);
        }
        self.counts.coded.fetch_add(places.len(), Ordering::SeqCst);
        Ok(true)
    }
}
