//! The memory of a block pool. It is one anonymous region with a file descriptor, so that a prefill worker of the
//! same user on the same host can map it and write into granted blocks. Or it is memory of a device, of which the
//! host sees only copies.
//!
//! The storage gives access to blocks, but does not decide who has the right to it. The owners of blocks do (the
//! engine's block pool, the handoff's grants). That is why the accessors are unsafe.

use std::{
    fs::File,
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
    /// The result of [`populate_all`](BlockStorage::populate_all), once it was called.
    populated: OnceLock<Result<(), io::ErrorKind>>,
}

/// The location of the bytes.
#[derive(Debug)]
enum Memory {
    Host { base: NonNull<u8>, fd: OwnedFd },
    Device(Box<dyn DeviceMemory>),
}

// SAFETY: the storage is a fixed region that lives until the drop. Every access to its bytes goes through an unsafe
// method whose caller guarantees exclusivity.
unsafe impl Send for BlockStorage {}
// SAFETY: as above.
unsafe impl Sync for BlockStorage {}

impl BlockStorage {
    /// New zeroed memory. The kernel supplies pages on first touch.
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
        // SAFETY: `raw` is a new descriptor without another owner.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let size_bytes = size_bytes(&layout, num_blocks)?;
        check(
            // SAFETY: plain system calls on an owned descriptor.
            unsafe { libc::ftruncate(fd.as_raw_fd(), size_bytes as libc::off_t) },
        )?;
        // Neither side can remove memory under the other's mapping.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: as above.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
        Self::map(fd, layout, num_blocks)
    }

    /// Maps another process's storage.
    ///
    /// # Errors
    /// When the descriptor is not sealed memory of exactly the size that `layout` and `num_blocks` need.
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

    /// Maps a file, which no process makes shorter while this lives.
    pub(crate) fn of_file(file: &File, layout: KvLayout, num_blocks: usize) -> io::Result<BlockStorage> {
        if file.metadata()?.len() < size_bytes(&layout, num_blocks)? as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Self::map(file.try_clone()?.into(), layout, num_blocks)
    }

    fn map(fd: OwnedFd, layout: KvLayout, num_blocks: usize) -> io::Result<BlockStorage> {
        let size_bytes = size_bytes(&layout, num_blocks)?;
        let base = pages::map(&fd, size_bytes)?;
        Ok(BlockStorage { memory: Memory::Host { base, fd }, layout, num_blocks, populated: OnceLock::new() })
    }

    /// Blocks in a device's memory, which has [`bytes_of`](Self::bytes_of) bytes.
    pub fn on_device(memory: Box<dyn DeviceMemory>, layout: KvLayout, num_blocks: usize) -> BlockStorage {
        BlockStorage { memory: Memory::Device(memory), layout, num_blocks, populated: OnceLock::new() }
    }

    /// Bytes of `num_blocks` blocks.
    ///
    /// # Errors
    /// When the size is 0 or exceeds the address space.
    pub fn bytes_of(layout: &KvLayout, num_blocks: usize) -> io::Result<usize> {
        size_bytes(layout, num_blocks)
    }

    /// The arrangement of blocks.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes of all blocks.
    pub fn size_bytes(&self) -> usize {
        self.num_blocks * self.layout.block_bytes()
    }

    /// Has the kernel supply the pages of a range of bytes now, huge ones where possible, instead of one by one on
    /// first touch. Contents stay as they are, and may be read and written meanwhile.
    ///
    /// # Errors
    /// When the kernel cannot, or lacks the memory. Pages then come on first touch.
    ///
    /// # Panics
    /// When the range is not in the storage, or does not begin at a multiple of 2 MiB.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        assert!(
            range.end <= self.size_bytes() && range.start.is_multiple_of(HUGE_PAGE),
            "no pages {range:?}"
        );
        match &self.memory {
            // SAFETY: the range is in the mapping, which begins at a multiple of a huge page.
            Memory::Host { base, .. } => unsafe { pages::back(base.as_ptr(), range) },
            // Device memory is allocated at once.
            Memory::Device(_) => Ok(()),
        }
    }

    /// [Populates](Self::populate) the whole storage once. Later callers wait for the first one and get the same
    /// result.
    ///
    /// # Errors
    /// As [`populate`](Self::populate).
    pub fn populate_all(&self) -> io::Result<()> {
        let populate = || self.populate(0..self.size_bytes()).map_err(|error| error.kind());
        Ok((*self.populated.get_or_init(populate))?)
    }

    /// The device's memory, if the blocks are on a device.
    pub fn device(&self) -> Option<&dyn DeviceMemory> {
        match &self.memory {
            Memory::Host { .. } => None,
            Memory::Device(memory) => Some(&**memory),
        }
    }

    /// Whether the blocks are divided among several devices, some heads on each.
    pub fn is_divided(&self) -> bool {
        self.device().is_some_and(|memory| memory.address().is_none())
    }

    /// Address of the first byte, for a device that reads or writes directly.
    ///
    /// # Panics
    /// When the memory [is divided](Self::is_divided): it has no single address.
    pub fn address(&self) -> u64 {
        match &self.memory {
            Memory::Host { base, .. } => base.as_ptr() as u64,
            Memory::Device(memory) => memory.address().expect("blocks on one device"),
        }
    }

    /// The memory's descriptor, for a peer.
    ///
    /// # Panics
    /// When the blocks are on a device.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match &self.memory {
            Memory::Host { fd, .. } => fd.as_fd(),
            Memory::Device(memory) => panic!("blocks of device {} have no descriptor", memory.device()),
        }
    }

    /// Offset of a piece (one layer of one block) from the first byte. The piece has [`KvLayout::layer_bytes`] bytes.
    ///
    /// # Panics
    /// When the block or layer does not exist: such an id was never handed out.
    #[inline]
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
    /// As [`layer_offset`](Self::layer_offset), and when the blocks are on a device: the host cannot address them.
    #[inline]
    pub fn layer_ptr(&self, block: BlockId, layer_idx: usize) -> NonNull<u8> {
        let offset = self.layer_offset(block, layer_idx);
        match &self.memory {
            // SAFETY: block and layer were checked, so the offset is inside the mapping.
            Memory::Host { base, .. } => unsafe { base.add(offset) },
            Memory::Device(memory) => panic!("blocks of device {} are not the host's", memory.device()),
        }
    }

    /// Writes the bytes of a piece, and waits for them.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The piece is not read or written otherwise during the call.
    pub unsafe fn store(&self, block: BlockId, layer_idx: usize, bytes: &[u8]) -> io::Result<()> {
        assert_eq!(bytes.len(), self.layout.layer_bytes(), "bytes of a piece");
        match &self.memory {
            // SAFETY: the caller guarantees exclusive access.
            Memory::Host { .. } => unsafe { self.layer_mut(block, layer_idx) }.copy_from_slice(bytes),
            // SAFETY: in bounds by `layer_offset`; the caller guarantees exclusive access.
            Memory::Device(memory) => unsafe { memory.write(self.layer_offset(block, layer_idx), bytes) }?,
        }
        Ok(())
    }

    /// Copies pieces (layers of blocks) one after the other to `bytes`.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The pieces are not written during the call.
    pub unsafe fn load_all(&self, pieces: &[(BlockId, usize)], bytes: &mut [u8]) -> io::Result<()> {
        assert_eq!(bytes.len(), pieces.len() * self.layout.layer_bytes(), "bytes of the pieces");
        if let Some(mut kernels) = self.kernels() {
            // SAFETY: in bounds by `layer_offset`; the caller guarantees that the pieces are not written.
            return unsafe { kernels.gather(&self.places(pieces), bytes) };
        }
        for (&(block, layer_idx), bytes) in
            pieces.iter().zip(bytes.chunks_exact_mut(self.layout.layer_bytes()))
        {
            match &self.memory {
                // SAFETY: the caller guarantees that the pieces are not written.
                Memory::Host { .. } => bytes.copy_from_slice(unsafe { self.layer(block, layer_idx) }),
                // SAFETY: as above.
                Memory::Device(memory) => unsafe { memory.read(self.layer_offset(block, layer_idx), bytes) }?,
            }
        }
        Ok(())
    }

    /// Writes pieces, which follow each other in `bytes`, and waits for them.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The pieces are not read or written otherwise during the call.
    pub unsafe fn store_all(&self, pieces: &[(BlockId, usize)], bytes: &[u8]) -> io::Result<()> {
        assert_eq!(bytes.len(), pieces.len() * self.layout.layer_bytes(), "bytes of the pieces");
        if let Some(mut kernels) = self.kernels() {
            // SAFETY: in bounds by `layer_offset`; the caller guarantees exclusive access.
            return unsafe { kernels.scatter(&self.places(pieces), bytes) };
        }
        for (&(block, layer_idx), bytes) in pieces.iter().zip(bytes.chunks_exact(self.layout.layer_bytes())) {
            // SAFETY: the caller guarantees exclusive access.
            unsafe { self.store(block, layer_idx, bytes) }?;
        }
        Ok(())
    }

    /// The device's kernels, if it has any.
    pub(crate) fn kernels(&self) -> Option<MutexGuard<'_, Box<dyn BlockKernels>>> {
        let kernels = self.device()?.kernels()?;
        Some(kernels.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Addresses of pieces in the memory of the device, or their offsets in memory without an address.
    pub(crate) fn places(&self, pieces: &[(BlockId, usize)]) -> Vec<u64> {
        let base = self.device().and_then(DeviceMemory::address).unwrap_or(0);
        pieces.iter().map(|&(block, layer_idx)| base + self.layer_offset(block, layer_idx) as u64).collect()
    }

    /// The bytes of a piece.
    ///
    /// # Safety
    /// The piece is not written while the slice lives.
    pub unsafe fn layer(&self, block: BlockId, layer_idx: usize) -> &[u8] {
        // SAFETY: in bounds by `layer_ptr`; the caller guarantees that the piece is not written.
        unsafe {
            std::slice::from_raw_parts(self.layer_ptr(block, layer_idx).as_ptr(), self.layout.layer_bytes())
        }
    }

    /// The bytes of a piece, mutable.
    ///
    /// # Safety
    /// The piece is not read or written otherwise while the slice lives.
    #[allow(clippy::mut_from_ref)] // the caller has the exclusive right to the piece
    pub unsafe fn layer_mut(&self, block: BlockId, layer_idx: usize) -> &mut [u8] {
        // SAFETY: in bounds by `layer_ptr`; the caller guarantees exclusive access.
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
            // SAFETY: the mapping was made with this size, and no borrow of it is alive.
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
