//! Works on KV blocks beside the forward pass, on a queue of its own: gathers and scatters pieces, encodes and
//! decodes them, and computes their checksums.
//!
//! A handoff moves many small pieces (one layer of one block). A copy for each piece would pay the latency of the
//! link to the host every time. The queue moves a frame of pieces with one kernel and one copy, and a checksum is
//! only eight bytes on that link.

use std::{fmt, io};

use baton_cuda::CudaError;
use baton_cuda_kernels::blocks::{self, ByteRun, CopyRuns};
use baton_cuda_kernels::checksum::{self, ChecksumPieces, HashSecret};
use baton_cuda_kernels::codes::{self, CodeDirection, CodeFormat, CodePieces};
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::driver::DriverDevice;
use baton_cuda_kernels::kernel::{Address, KernelCode, KernelSource};
use baton_kv_cache::{BlockKernels, DeviceCopy, KvLayout, WireCodec};
use xxhash_rust::const_xxh3::const_custom_default_secret;

use crate::error::StartError;

/// Bytes that are staged at a time.
pub const STAGED_BYTES: usize = 8 << 20;

/// Pieces of one launch.
pub const MAX_RUNS: usize = 4096;

/// Bytes of a run that one block of threads copies.
const PART_BYTES: usize = 16 << 10;

/// Copy engines move runs of this many bytes and more, which leaves the multiprocessors to steps. On an H100 that loads a prompt from
/// the host's memory, the 99th percentile of another stream's time between tokens is 11 ms instead of 31
/// (docs/benchmarks/2026-11-26-kv-tiers.md).
const ENGINE_BYTES: u64 = 256 << 10;

const DEFAULT_SECRET: [u8; 192] = const_custom_default_secret(0);

/// Opens a queue on device `ordinal` for blocks of `layout`, with its own stream and staging memory. Kernels that the
/// cache of `code` does not hold are compiled and added to it.
///
/// # Errors
/// When the device or a library is missing, or there is too little memory.
pub fn block_kernels(
    ordinal: u32,
    layout: &KvLayout,
    code: &KernelCode,
) -> Result<Box<dyn BlockKernels>, StartError> {
    let device = DriverDevice::beside_steps(ordinal, &sources(layout), code.clone())?;
    Ok(Box::new(BlockQueue::new(device, layout)?))
}

/// The kernels of a queue.
pub fn sources(layout: &KvLayout) -> [KernelSource; 3] {
    [blocks::source(), checksum::source(), codes::source(layout)]
}

pub struct BlockQueue<D> {
    pub device: D,
    /// Layout of the pool.
    pub layout: KvLayout,
    /// [`MAX_RUNS`] runs, or piece offsets.
    runs: Address,
    /// [`STAGED_BYTES`] bytes: pieces on their way to or from the host.
    staged: Address,
    /// [`STAGED_BYTES`] bytes: encoded pieces after decoding, as the peer will see them.
    decoded: Address,
    /// [`MAX_RUNS`] checksums.
    sums: Address,
}

impl<D> fmt::Debug for BlockQueue<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockQueue").finish_non_exhaustive()
    }
}

/// Direction of copies between the pool and the staging memory.
#[derive(Clone, Copy)]
enum CopyDirection {
    Gathered,
    Scattered,
}

impl<D: KernelDevice> BlockQueue<D> {
    pub fn new(mut device: D, layout: &KvLayout) -> Result<BlockQueue<D>, CudaError> {
        Ok(BlockQueue {
            layout: *layout,
            runs: device.allocate(MAX_RUNS * size_of::<ByteRun>())?,
            staged: device.allocate(STAGED_BYTES)?,
            decoded: device.allocate(STAGED_BYTES)?,
            sums: device.allocate(MAX_RUNS * 8)?,
            device,
        })
    }

    /// Runs of `num_bytes` bytes that are moved at a time.
    fn group(num_bytes: usize) -> usize {
        (STAGED_BYTES / num_bytes.max(1)).clamp(1, MAX_RUNS)
    }

    /// Queues copies between runs in the pool, at `places`, and the staging memory. At most [`STAGED_BYTES`] bytes.
    fn copy(&mut self, places: &[u64], num_bytes: usize, direction: CopyDirection) -> Result<(), CudaError> {
        let (pool, offsets) = offsets(places);
        let runs = offsets.iter().enumerate().map(|(nth, &place)| {
            let staged = (nth * num_bytes) as u64;
            let (from, to) = match direction {
                CopyDirection::Gathered => (place, staged),
                CopyDirection::Scattered => (staged, place),
            };
            ByteRun { from, to, num_bytes: num_bytes as u64 }
        });
        let runs: Vec<ByteRun> = runs.collect();
        let (from, to) = match direction {
            CopyDirection::Gathered => (pool, self.staged),
            CopyDirection::Scattered => (self.staged, pool),
        };
        // SAFETY: the caller guarantees the memory that the runs refer to.
        unsafe { self.copy_runs(from, to, &runs, num_bytes as u64) }
    }

    /// Queues copies of at most [`MAX_RUNS`] runs, the longest of `longest` bytes.
    ///
    /// # Safety
    /// The runs are valid, and nothing else uses what is written.
    unsafe fn copy_runs(
        &mut self,
        from: Address,
        to: Address,
        runs: &[ByteRun],
        longest: u64,
    ) -> Result<(), CudaError> {
        let num_parts = longest.div_ceil(PART_BYTES as u64) as u32;
        let copy = CopyRuns { from, to, runs: self.runs, num_runs: runs.len() as u32, num_parts };
        // SAFETY: there is room for this many runs. The caller guarantees the memory that they refer to.
        unsafe {
            self.device.upload(self.runs, bytemuck::cast_slice(runs))?;
            self.device.launch(&copy)
        }
    }

    /// Encodes pieces from the pool into the staging memory, or decodes them back. `offsets` count from `pool` and
    /// are uploaded as list `nth`. Returns the list's address.
    ///
    /// # Safety
    /// The pieces are valid. No other work uses the pieces that are written.
    unsafe fn code(
        &mut self,
        (pool, offsets): (Address, &[u64]),
        nth: usize,
        form: CodeFormat,
        direction: CodeDirection,
    ) -> Result<Address, CudaError> {
        let list = self.runs.offset_by(nth * MAX_RUNS * size_of::<u64>());
        let kernel = CodePieces {
            pool,
            offsets: list,
            coded: self.staged,
            num_pieces: offsets.len() as u32,
            num_heads: 2 * self.layout.num_kv_heads as u32,
            form,
            direction,
        };
        // SAFETY: there is room for three lists and for the encoded pieces. The caller guarantees the pieces.
        unsafe {
            self.device.upload(list, bytemuck::cast_slice(offsets))?;
            self.device.launch(&kernel)?;
        }
        Ok(list)
    }

    /// Encodes a group of pieces into `coded` and returns the checksums of the pieces after decoding.
    ///
    /// # Safety
    /// The pieces are valid.
    unsafe fn encode(
        &mut self,
        places: &[u64],
        coded: &mut [u8],
        form: CodeFormat,
        seed: u64,
    ) -> Result<Vec<u64>, CudaError> {
        let piece_bytes = self.layout.layer_bytes() as u64;
        let (pool, offsets) = offsets(places);
        let behind_each_other: Vec<u64> = (0..places.len() as u64).map(|nth| nth * piece_bytes).collect();
        let mut sums = vec![0; places.len()];
        // SAFETY: the caller guarantees the pieces. The decoded pieces of a group fit their memory.
        unsafe {
            self.code((pool, &offsets), 0, form, CodeDirection::Encoded)?;
            let list = self.code((self.decoded, &behind_each_other), 1, form, CodeDirection::Decoded)?;
            self.hash((self.decoded, list), piece_bytes, &HashSecret::new(&DEFAULT_SECRET, seed), &mut sums)?;
            self.device.download(self.staged, coded)?;
        }
        Ok(sums)
    }

    /// Computes the checksums of `sums.len()` pieces and waits for them. The pieces start at the `offsets` from
    /// `base`; the list of offsets is on the device.
    ///
    /// # Safety
    /// The pieces are valid.
    unsafe fn hash(
        &mut self,
        (base, offsets): (Address, Address),
        num_bytes: u64,
        secret: &HashSecret,
        sums: &mut [u64],
    ) -> Result<(), CudaError> {
        let num_pieces = sums.len() as u64;
        let kernel =
            ChecksumPieces { base, offsets, sums: self.sums, num_bytes, num_pieces, secret: *secret };
        // SAFETY: there is room for a group's checksums. The caller guarantees the pieces.
        unsafe {
            self.device.launch(&kernel)?;
            self.device.download(self.sums, bytemuck::cast_slice_mut(sums))
        }
    }

    /// The kernel format of `codec`, if there is a kernel for it and for pieces of this size.
    fn form(&self, codec: &WireCodec) -> Option<CodeFormat> {
        let sizes = checksum::MIN_BYTES as usize..=STAGED_BYTES;
        let is_known = *codec.layout() == self.layout && sizes.contains(&self.layout.layer_bytes());
        CodeFormat::of(codec).filter(|_| is_known)
    }

    /// Waits for all queued work.
    fn finish(&mut self) -> Result<(), CudaError> {
        self.device.mark(0)?;
        self.device.wait_for(0)
    }

    /// Splits work into groups that fit the staging memory. Calls `each` with the places of a group, the offset of
    /// its bytes in `0..num_bytes * places.len()`, and the bytes of each run. A run larger than the staging memory is
    /// split into parts.
    pub fn in_groups(
        &mut self,
        places: &[u64],
        num_bytes: usize,
        mut each: impl FnMut(&mut Self, &[u64], usize, usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if num_bytes > STAGED_BYTES {
            for (nth, &place) in places.iter().enumerate() {
                for at in (0..num_bytes).step_by(STAGED_BYTES) {
                    let len = STAGED_BYTES.min(num_bytes - at);
                    each(self, &[place + at as u64], nth * num_bytes + at, len)?;
                }
            }
            return Ok(());
        }
        let group = Self::group(num_bytes);
        for (nth, places) in places.chunks(group).enumerate() {
            each(self, places, nth * group * num_bytes, num_bytes)?;
        }
        Ok(())
    }
}

/// The lowest of these places, and the distance of each place from it.
fn offsets(places: &[u64]) -> (Address, Vec<u64>) {
    let first = places.iter().copied().min().unwrap_or(0);
    (Address(first), places.iter().map(|place| place - first).collect())
}

impl<D: KernelDevice> BlockKernels for BlockQueue<D> {
    unsafe fn gather(&mut self, places: &[u64], bytes: &mut [u8]) -> io::Result<()> {
        let num_bytes = bytes.len() / places.len().max(1);
        let gathered = self.in_groups(places, num_bytes, |queue, places, at, num_bytes| {
            queue.copy(places, num_bytes, CopyDirection::Gathered)?;
            let bytes = &mut bytes[at..at + places.len() * num_bytes];
            // SAFETY: this many bytes were just staged.
            unsafe { queue.device.download(queue.staged, bytes) }
        });
        gathered.map_err(io::Error::other)
    }

    unsafe fn scatter(&mut self, places: &[u64], bytes: &[u8]) -> io::Result<()> {
        let num_bytes = bytes.len() / places.len().max(1);
        let scattered = self.in_groups(places, num_bytes, |queue, places, at, num_bytes| {
            let bytes = &bytes[at..at + places.len() * num_bytes];
            // SAFETY: there is room for a group.
            unsafe { queue.device.upload(queue.staged, bytes) }?;
            queue.copy(places, num_bytes, CopyDirection::Scattered)
        });
        scattered.and_then(|()| self.finish()).map_err(io::Error::other)
    }

    unsafe fn copy(&mut self, _: usize, copies: &[DeviceCopy]) -> io::Result<()> {
        let runs = copies.iter().map(ByteRun::from);
        let (long, short): (Vec<ByteRun>, Vec<ByteRun>) = runs.partition(|run| run.num_bytes >= ENGINE_BYTES);
        for ByteRun { from, to, num_bytes } in long {
            // SAFETY: by the caller's word.
            unsafe { self.device.copy(Address(to), Address(from), num_bytes as usize) }
                .map_err(io::Error::other)?;
        }
        for runs in short.chunks(MAX_RUNS) {
            let longest = runs.iter().map(|run| run.num_bytes).max().unwrap_or(0);
            // SAFETY: by the caller's word.
            unsafe { self.copy_runs(Address::NULL, Address::NULL, runs, longest) }
                .map_err(io::Error::other)?;
        }
        self.finish().map_err(io::Error::other)
    }

    fn settle(&mut self) -> io::Result<()> {
        self.finish().map_err(io::Error::other)
    }

    unsafe fn checksums(
        &mut self,
        places: &[u64],
        num_bytes: usize,
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        if (num_bytes as u64) < checksum::MIN_BYTES {
            return Ok(None);
        }
        let secret = HashSecret::new(&DEFAULT_SECRET, seed);
        let mut sums = vec![0; places.len()];
        let (base, offsets) = offsets(places);
        for (offsets, sums) in offsets.chunks(MAX_RUNS).zip(sums.chunks_mut(MAX_RUNS)) {
            // SAFETY: there is room for this many offsets. The caller guarantees the pieces.
            let computed = unsafe {
                let uploaded = self.device.upload(self.runs, bytemuck::cast_slice(offsets));
                uploaded.and_then(|()| self.hash((base, self.runs), num_bytes as u64, &secret, sums))
            };
            computed.map_err(io::Error::other)?;
        }
        Ok(Some(sums))
    }

    unsafe fn gather_coded(
        &mut self,
        codec: &WireCodec,
        places: &[u64],
        coded: &mut [u8],
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        let Some(form) = self.form(codec) else { return Ok(None) };
        let group = Self::group(self.layout.layer_bytes());
        let mut sums = Vec::with_capacity(places.len());
        for (places, coded) in places.chunks(group).zip(coded.chunks_mut(group * codec.piece_bytes())) {
            // SAFETY: the caller guarantees the pieces.
            sums.extend(unsafe { self.encode(places, coded, form, seed) }.map_err(io::Error::other)?);
        }
        Ok(Some(sums))
    }

    unsafe fn scatter_coded(&mut self, codec: &WireCodec, places: &[u64], coded: &[u8]) -> io::Result<bool> {
        let Some(form) = self.form(codec) else { return Ok(false) };
        let group = Self::group(self.layout.layer_bytes());
        for (places, coded) in places.chunks(group).zip(coded.chunks(group * codec.piece_bytes())) {
            let (pool, offsets) = offsets(places);
            // SAFETY: encoded pieces are smaller than the pieces of a group, which fit. The caller guarantees the
            // pool.
            let decoded = unsafe {
                let uploaded = self.device.upload(self.staged, coded);
                uploaded.and_then(|()| self.code((pool, &offsets), 0, form, CodeDirection::Decoded))
            };
            decoded.map_err(io::Error::other)?;
        }
        self.finish().map_err(io::Error::other)?;
        Ok(true)
    }
}
