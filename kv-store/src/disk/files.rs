//! The directory of a disk tier, and its files.
//!
//! ```text
//! lock     locked by the process that uses the directory
//! index    superblock of one page | head of slot 0 | head of slot 1 | …      through the page cache
//! slabs    body of slot 0 | body of slot 1 | …      whole pages, past the page cache where the file system can
//! ```

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FallocateFlags, OFlags},
    io::Errno,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::{buffer::PAGE, record::RecordShape};

type Magic = [u8; 8];
const MAGIC: &Magic = b"BATONKVS";
/// Of slots that [processes share](crate::shared).
pub(crate) const SHARED_MAGIC: &Magic = b"BATONKVH";
const VERSION: u32 = 3;
/// The part of the superblock that its checksum covers.
const SUPERBLOCK_BYTES: usize = 48;

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreOpenError {
    /// Another process uses it.
    #[error("{}: another worker uses this directory; each needs one of its own", dir.display())]
    InUse {
        /// The directory.
        dir: PathBuf,
    },
    /// It holds KV of another model or format.
    #[error(
        "{}: holds KV of another model, KV type or block size, or is sealed by a key and this worker has none, or the other way \
         round; remove the directory, or give another one",
        dir.display()
    )]
    Foreign {
        /// The directory.
        dir: PathBuf,
    },
    /// Its index is not one.
    #[error("{}: the index is damaged or of another version of Baton; remove the directory", dir.display())]
    Damaged {
        /// The directory.
        dir: PathBuf,
    },
    /// It is to be in memory, and is not.
    #[error("{}: not in memory; give a directory below /dev/shm, or --disk-kv for one on a disk", dir.display())]
    NotMemory {
        /// The directory.
        dir: PathBuf,
    },
    /// Others could read prompts from KV there, or put KV there.
    #[error("{}: {problem}; a host tier needs a directory that no other user can change", dir.display())]
    NotPrivate {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Not one record fits.
    #[error("{max_bytes} bytes are too few: a block of this model takes {slot_bytes}")]
    TooSmall {
        /// What was given.
        max_bytes: u64,
        /// What a slot takes.
        slot_bytes: u64,
    },
    /// The file system has no room.
    #[error("{}: the file system has no room for {bytes} bytes; give fewer", dir.display())]
    Full {
        /// The directory.
        dir: PathBuf,
        /// What was given.
        bytes: u64,
    },
    /// The file system refuses.
    #[error("{}: {action}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Its error.
        source: io::Error,
    },
}

/// An open directory, locked until this is dropped.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) index: File,
    pub(crate) slabs: File,
    pub(crate) kept: File,
    pub(crate) num_slots: u32,
    pub(crate) lock: DirLock,
}

/// A locked file. It is unlocked before it is closed: a process that another thread is about to start has it open, too,
/// until its program runs, and would keep the lock.
#[derive(Debug)]
pub(crate) struct DirLock(pub(crate) File);

impl Drop for DirLock {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

impl Files {
    /// Opens a directory for at most `max_bytes`, and makes it first if it does not exist. Slots that an earlier size had and
    /// this one lacks are lost.
    pub(crate) fn open(dir: &Path, max_bytes: u64, shape: &RecordShape) -> Result<Files, StoreOpenError> {
        let num_slots = num_slots(max_bytes, shape)?;
        // Prompts can be read from KV, and the index holds their tokens.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(failed(dir, "cannot make the directory"))?;
        let lock_path = dir.join("lock");
        let lock = options().open(&lock_path).map_err(failed(&lock_path, "cannot open"))?;
        let is_alone = is_locked(lock.try_lock()).map_err(failed(&lock_path, "cannot lock"))?;
        if !is_alone {
            return Err(StoreOpenError::InUse { dir: dir.to_owned() });
        }
        let lock = DirLock(lock);
        let (index_path, slabs_path) = (dir.join("index"), dir.join("slabs"));
        let index = options().open(&index_path).map_err(failed(&index_path, "cannot open"))?;
        let slabs = open_past_cache(&slabs_path).map_err(failed(&slabs_path, "cannot open"))?;
        let superblock = superblock(MAGIC, shape);
        check(&index, &superblock, dir)?;
        let [index_bytes, slabs_bytes] = index_and_slabs_bytes(num_slots, shape);
        for (file, path, bytes) in [(&index, &index_path, index_bytes), (&slabs, &slabs_path, slabs_bytes)] {
            reserve(file, bytes).map_err(|source| not_reserved(source, path, index_bytes + slabs_bytes))?;
        }
        let kept_path = dir.join("kept");
        let kept = options().open(&kept_path).map_err(failed(&kept_path, "cannot open"))?;
        kept.set_len(u64::from(num_slots) * 8).map_err(failed(&kept_path, "cannot reserve room"))?;
        index.write_all_at(&superblock, 0).map_err(failed(&index_path, "cannot write"))?;
        Ok(Files { index, slabs, kept, num_slots, lock })
    }
}

/// What becomes of an error of the file system.
pub(crate) fn failed(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> StoreOpenError + use<> {
    let path = path.to_owned();
    move |source| StoreOpenError::Io { path, action, source }
}

/// Whether a file was locked, or is locked by another process.
pub(crate) fn is_locked(result: Result<(), TryLockError>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Bytes of the files.
pub(crate) fn index_and_slabs_bytes(num_slots: u32, shape: &RecordShape) -> [u64; 2] {
    let num_slots = u64::from(num_slots);
    [PAGE as u64 + num_slots * shape.head_bytes() as u64, num_slots * shape.body_pages_bytes() as u64]
}

/// An index that has a superblock has this one.
fn check(index: &File, superblock: &Superblock, dir: &Path) -> Result<(), StoreOpenError> {
    let mut found = [0; size_of::<Superblock>()];
    match index.read_exact_at(&mut found, 0) {
        Ok(()) if found == *superblock => Ok(()),
        Ok(()) if is_superblock(&found) => Err(StoreOpenError::Foreign { dir: dir.to_owned() }),
        Ok(()) if found.iter().any(|&byte| byte != 0) => Err(StoreOpenError::Damaged { dir: dir.to_owned() }),
        // New, or the end of the process that made it was earlier than this.
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(()),
        Err(error) => Err(failed(&dir.join("index"), "cannot read")(error)),
    }
}

/// How many slots fit.
pub(crate) fn num_slots(max_bytes: u64, shape: &RecordShape) -> Result<u32, StoreOpenError> {
    let slot_bytes = (shape.head_bytes() + shape.body_pages_bytes()) as u64;
    let num_slots = max_bytes.saturating_sub(PAGE as u64) / slot_bytes;
    if num_slots == 0 {
        return Err(StoreOpenError::TooSmall { max_bytes, slot_bytes });
    }
    Ok(u32::try_from(num_slots).unwrap_or(u32::MAX - 1))
}

/// Why there is no room of `bytes` for a file.
pub(crate) fn not_reserved(source: io::Error, path: &Path, bytes: u64) -> StoreOpenError {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            StoreOpenError::Full { dir: path.parent().unwrap_or(path).to_owned(), bytes }
        }
        _ => failed(path, "cannot reserve room")(source),
    }
}

pub(crate) fn options() -> OpenOptions {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options
}

/// Some file systems have no way past the page cache.
fn open_past_cache(path: &Path) -> io::Result<File> {
    match options().custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Err(error) if error.kind() == ErrorKind::InvalidInput => options().open(path),
        opened => opened,
    }
}

/// Makes the file so long, and has the file system keep room for it, if it can. After an error the file is as long as before.
pub(crate) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    let found = file.metadata()?;
    let old_bytes = found.len();
    // Asked first: some file systems hand out all that is left before they refuse, which others would miss meanwhile.
    let free = rustix::fs::fstatvfs(file)?;
    if bytes.saturating_sub(found.blocks() * 512) > free.f_bavail.saturating_mul(free.f_frsize) {
        return Err(ErrorKind::StorageFull.into());
    }
    let reserve = || {
        file.set_len(bytes)?;
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => Err(error.into()),
        }
    };
    reserve().inspect_err(|_| {
        // What was reserved beyond it is of no use, and the records before it are.
        let _ = file.set_len(old_bytes);
    })
}

pub(crate) type Superblock = [u8; SUPERBLOCK_BYTES + 8];

pub(crate) fn superblock(magic: &Magic, shape: &RecordShape) -> Superblock {
    let mut bytes = [0; SUPERBLOCK_BYTES + 8];
    bytes[..8].copy_from_slice(magic);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..28].copy_from_slice(&shape.fingerprint.0);
    bytes[28..32].copy_from_slice(&(shape.block_size as u32).to_le_bytes());
    bytes[32..40].copy_from_slice(&(shape.body.bytes as u64).to_le_bytes());
    bytes[40..48].copy_from_slice(&u64::from(shape.key.is_some()).to_le_bytes());
    let checksum = xxh3_64(&bytes[..SUPERBLOCK_BYTES]);
    bytes[SUPERBLOCK_BYTES..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Whether these bytes are a whole superblock of this version, of any format.
fn is_superblock(bytes: &Superblock) -> bool {
    let (start, checksum) = bytes.split_at(SUPERBLOCK_BYTES);
    bytes[..8] == *MAGIC && bytes[8..12] == VERSION.to_le_bytes() && xxh3_64(start).to_le_bytes() == checksum
}
