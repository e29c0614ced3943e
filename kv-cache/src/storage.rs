//! The memory of a block pool: one region, anonymous but with a file descriptor, so that a prefill
//! worker of the same user on the same host can map it and write into granted blocks; or memory of a
//! device, of which the host sees only copies.
//!
//! The storage hands out places, not rights. Who may read or write a block at a time is decided by
//! its owners (the engine's block pool, the handoff's grants); that is why the accessors are unsafe.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::NonNull,
    sync::{MutexGuard, OnceLock, PoisonError},
};

use crate::{
    BlockId, BlockKernels, DeviceMemory, KvLayout,
    pages::{self, HUGE_PAGE},
};

/// Memory of `num_blocks` blocks of one [`KvLayout`], zeroed at first.
#[derive(Debug)]
pub struct BlockStorage {
    memory: Memory,
    layout: KvLayout,
    num_blocks: usize,
    /// Whether all pages were supplied ahead, once somebody has asked for it.
    populated: OnceLock<Result<(), io::ErrorKind>>,
}

/// Where the bytes are.
#[derive(Debug)]
enum Memory {
    Host { base: NonNull<u8>, fd: OwnedFd },
    Device(Box<dyn DeviceMemory>),
}

// SAFETY: the storage is a fixed region that lives until the drop; every access to its bytes goes
// through an unsafe method whose caller vouches for exclusivity.
unsafe impl Send for BlockStorage {}
// SAFETY: as above.
unsafe impl Sync for BlockStorage {}

impl BlockStorage {
    /// New zeroed memory. The kernel supplies pages as they are touched.
    ///
    /// # Errors
    /// When the kernel refuses the memory.
    pub fn new(layout: KvLayout, num_blocks: usize) -> io::Result<BlockStorage> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a valid C string; the result is checked before it is owned.
        let raw = unsafe { libc::memfd_create(c"baton-kv-blocks".as_ptr(), flags) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raw` is a new descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let size_bytes = size_bytes(&layout, num_blocks)?;
        check(
            // SAFETY: plain system calls on an owned descriptor.
            unsafe { libc::ftruncate(fd.as_raw_fd(), size_bytes as libc::off_t) },
        )?;
        // Neither side can pull the memory from under the other's mapping.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: as above.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
        Self::map(fd, layout, num_blocks)
    }

    /// Maps another process's storage.
    ///
    /// # Errors
    /// When the descriptor is not sealed memory of just the size that `layout` and `num_blocks` need.
    pub fn from_fd(fd: OwnedFd, layout: KvLayout, num_blocks: usize) -> io::Result<BlockStorage> {
        // SAFETY: a plain system call on an owned descriptor; fails on anything but a memfd.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "block memory is not a sealed memfd"));
        }
        // SAFETY: `stat` is plain data for which all zeroes is a value.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` outlives the call.
        check(unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) })?;
        let expected = size_bytes(&layout, num_blocks)?;
        if stat.st_size as usize != expected {
            let message = format!("block memory has {} bytes, expected {expected}", stat.st_size);
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Self::map(fd, layout, num_blocks)
    }

    fn map(fd: OwnedFd, layout: KvLayout, num_blocks: usize) -> io::Result<BlockStorage> {
        let size_bytes = size_bytes(&layout, num_blocks)?;
        let base = pages::map(&fd, size_bytes)?;
        Ok(BlockStorage { memory: Memory::Host { base, fd }, layout, num_blocks, populated: OnceLock::new() })
    }

    /// Blocks in a device's memory, of [`bytes_of`](Self::bytes_of) bytes.
    pub fn on_device(memory: Box<dyn DeviceMemory>, layout: KvLayout, num_blocks: usize) -> BlockStorage {
        BlockStorage { memory: Memory::Device(memory), layout, num_blocks, populated: OnceLock::new() }
    }

    /// Bytes of so many blocks.
    ///
    /// # Errors
    /// When no memory has that many, or they are none.
    pub fn bytes_of(layout: &KvLayout, num_blocks: usize) -> io::Result<usize> {
        size_bytes(layout, num_blocks)
    }

    /// How blocks are arranged.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Blocks that fit.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes of all blocks.
    pub fn size_bytes(&self) -> usize {
        self.num_blocks * self.layout.block_bytes()
    }

    /// Has the kernel supply the pages of a range of bytes now, huge ones where it can, instead of one by one as they are
    /// touched. Contents stay as they are, and may be read and written meanwhile.
    ///
    /// # Errors
    /// When the kernel cannot, or has not the memory; pages then come as they are touched.
    ///
    /// # Panics
    /// When the range does not lie in the storage, or does not begin at a multiple of 2 MiB.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        assert!(
            range.end <= self.size_bytes() && range.start.is_multiple_of(HUGE_PAGE),
            "no pages {range:?}"
        );
        match &self.memory {
            // SAFETY: the range lies in the mapping, which begins at a multiple of a huge page.
            Memory::Host { base, .. } => unsafe { pages::back(base.as_ptr(), range) },
            // Allocated whole.
            Memory::Device(_) => Ok(()),
        }
    }

    /// [Populates](Self::populate) all of it, once: whoever asks later waits for the first, and gets the same answer.
    ///
    /// # Errors
    /// As there.
    pub fn populate_all(&self) -> io::Result<()> {
        let populate = || self.populate(0..self.size_bytes()).map_err(|error| error.kind());
        Ok((*self.populated.get_or_init(populate))?)
    }

    /// The device's memory, if the blocks are there.
    pub fn device(&self) -> Option<&dyn DeviceMemory> {
        match &self.memory {
            Memory::Host { .. } => None,
            Memory::Device(memory) => Some(&**memory),
        }
    }

    /// Whether the blocks lie on several devices, some heads on each.
    pub fn is_divided(&self) -> bool {
        self.device().is_some_and(|memory| memory.address().is_none())
    }

    /// Address of the first byte, for a device that reads or writes by itself.
    ///
    /// # Panics
    /// When the memory [is divided](Self::is_divided): who writes by address has asked for memory that has one.
    pub fn address(&self) -> u64 {
        match &self.memory {
            Memory::Host { base, .. } => base.as_ptr() as u64,
            Memory::Device(memory) => memory.address().expect("blocks on one device"),
        }
    }

    /// The memory's descriptor, to be given to a peer.
    ///
    /// # Panics
    /// As [`layer_ptr`](Self::layer_ptr) of blocks on a device.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match &self.memory {
            Memory::Host { fd, .. } => fd.as_fd(),
            Memory::Device(memory) => panic!("blocks of device {} have no descriptor", memory.device()),
        }
    }

    /// Where a piece (one layer of one block) begins, counted from the first byte;
    /// [`KvLayout::layer_bytes`] bytes from there belong to it.
    ///
    /// # Panics
    /// When the block or layer does not exist: such an id was never handed out.
    pub fn layer_offset(&self, block: BlockId, layer_idx: usize) -> usize {
        assert!(
            block.idx() < self.num_blocks && layer_idx < self.layout.num_layers,
            "no piece {block}/{layer_idx}"
        );
        self.layout.piece_offset(block, layer_idx)
    }

    /// First byte of a piece.
    ///
    /// # Panics
    /// As [`layer_offset`](Self::layer_offset), and when the blocks are on a device: whoever reads and writes in
    /// place has asked for memory of the host.
    pub fn layer_ptr(&self, block: BlockId, layer_idx: usize) -> NonNull<u8> {
        let offset = self.layer_offset(block, layer_idx);
        match &self.memory {
            // SAFETY: block and layer were checked, so the offset lies inside the mapping.
            Memory::Host { base, .. } => unsafe { base.add(offset) },
            Memory::Device(memory) => panic!("blocks of device {} are not the host's", memory.device()),
        }
    }

    /// Writes the bytes of a piece; they are there when it returns.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// Nobody else reads or writes the piece during the call.
    pub unsafe fn store(&self, block: BlockId, layer_idx: usize, bytes: &[u8]) -> io::Result<()> {
        assert_eq!(bytes.len(), self.layout.layer_bytes(), "bytes of a piece");
        match &self.memory {
            // SAFETY: by the caller's word.
            Memory::Host { .. } => unsafe { self.layer_mut(block, layer_idx) }.copy_from_slice(bytes),
            // SAFETY: in bounds by `layer_offset`; exclusive by the caller's word.
            Memory::Device(memory) => unsafe { memory.write(self.layer_offset(block, layer_idx), bytes) }?,
        }
        Ok(())
    }

    /// Copies pieces (layers of blocks) to `bytes`, one behind the other.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// Nobody writes them during the call.
    pub unsafe fn load_all(&self, pieces: &[(BlockId, usize)], bytes: &mut [u8]) -> io::Result<()> {
        assert_eq!(bytes.len(), pieces.len() * self.layout.layer_bytes(), "bytes of the pieces");
        if let Some(mut kernels) = self.kernels() {
            // SAFETY: in bounds by `layer_offset`; unwritten by the caller's word.
            return unsafe { kernels.gather(&self.places(pieces), bytes) };
        }
        for (&(block, layer_idx), bytes) in
            pieces.iter().zip(bytes.chunks_exact_mut(self.layout.layer_bytes()))
        {
            match &self.memory {
                // SAFETY: by the caller's word.
                Memory::Host { .. } => bytes.copy_from_slice(unsafe { self.layer(block, layer_idx) }),
                // SAFETY: as above.
                Memory::Device(memory) => unsafe { memory.read(self.layer_offset(block, layer_idx), bytes) }?,
            }
        }
        Ok(())
    }

    /// Writes pieces, one behind the other in `bytes`; they are there when it returns.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// Nobody else reads or writes them during the call.
    pub unsafe fn store_all(&self, pieces: &[(BlockId, usize)], bytes: &[u8]) -> io::Result<()> {
        assert_eq!(bytes.len(), pieces.len() * self.layout.layer_bytes(), "bytes of the pieces");
        if let Some(mut kernels) = self.kernels() {
            // SAFETY: in bounds by `layer_offset`; exclusive by the caller's word.
            return unsafe { kernels.scatter(&self.places(pieces), bytes) };
        }
        for (&(block, layer_idx), bytes) in pieces.iter().zip(bytes.chunks_exact(self.layout.layer_bytes())) {
            // SAFETY: by the caller's word.
            unsafe { self.store(block, layer_idx, bytes) }?;
        }
        Ok(())
    }

    /// The device's kernels, if it has any.
    pub(crate) fn kernels(&self) -> Option<MutexGuard<'_, Box<dyn BlockKernels>>> {
        let kernels = self.device()?.kernels()?;
        Some(kernels.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Where pieces begin in the memory of the device; of several, their offsets.
    pub(crate) fn places(&self, pieces: &[(BlockId, usize)]) -> Vec<u64> {
        let base = self.device().and_then(DeviceMemory::address).unwrap_or(0);
        pieces.iter().map(|&(block, layer_idx)| base + self.layer_offset(block, layer_idx) as u64).collect()
    }

    /// The bytes of a piece.
    ///
    /// # Safety
    /// Nobody writes the piece while the slice lives.
    pub unsafe fn layer(&self, block: BlockId, layer_idx: usize) -> &[u8] {
        // SAFETY: in bounds by `layer_ptr`; unwritten by the caller's word.
        unsafe {
            std::slice::from_raw_parts(self.layer_ptr(block, layer_idx).as_ptr(), self.layout.layer_bytes())
        }
    }

    /// The bytes of a piece, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes the piece while the slice lives.
    #[allow(clippy::mut_from_ref)] // the storage hands out places; the caller holds the right
    pub unsafe fn layer_mut(&self, block: BlockId, layer_idx: usize) -> &mut [u8] {
        // SAFETY: in bounds by `layer_ptr`; exclusive by the caller's word.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.layer_ptr(block, layer_idx).as_ptr(),
                self.layout.layer_bytes(),
            )
        }
    }
}

impl Drop for BlockStorage {
    fn drop(&mut self) {
        if let Memory::Host { base, .. } = &self.memory {
            // SAFETY: the mapping was made with this size and nothing borrowed from it is alive.
            unsafe { libc::munmap(base.as_ptr().cast(), self.size_bytes()) };
        }
    }
}

fn size_bytes(layout: &KvLayout, num_blocks: usize) -> io::Result<usize> {
    match layout.block_bytes().checked_mul(num_blocks) {
        Some(size) if size > 0 && size <= isize::MAX as usize => Ok(size),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{num_blocks} blocks of KV memory"))),
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
