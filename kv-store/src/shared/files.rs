//! The directories of shared slots: who makes one, who of those that use it is alive, and when it is removed.
//!
//! Below the directory that workers name, those of one format and size have one of their own. So workers of several models may name the
//! same, and an update that changes the model starts beside the workers that it replaces.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant, SystemTime},
};

use rustix::process::geteuid;
use xxhash_rust::xxh3::xxh3_64;

use super::words::SlotWords;
use crate::{
    disk::{
        DirLock, StoreOpenError,
        files::{self, Superblock, failed},
    },
    record::RecordShape,
};

/// How long another process may take to make a directory: it zeroes all of its memory.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long a directory stays that no process uses: a worker that was killed finds it again after it has loaded its model.
const STAYS: Duration = Duration::from_secs(600);
/// Workers that use a directory.
const MAX_NUMBERS: u16 = 1024;
/// The file system of `/dev/shm`, by the kernel's `magic.h`.
const TMPFS: u64 = 0x0102_1994;
/// Names of directories begin so, and of such that are being removed.
const PREFIX: &str = "baton-kv-";
const REMOVED: &str = "baton-kv-removed-";
static NUM_REMOVED: AtomicU32 = AtomicU32::new(0);

/// An open directory.
pub(super) struct SharedFiles {
    /// Below the directory that workers name.
    pub(super) dir: PathBuf,
    pub(super) index: File,
    pub(super) slabs: File,
    pub(super) words: File,
    pub(super) num_slots: u32,
    pub(super) lock: DirLock,
}

impl SharedFiles {
    /// Opens the directory for this format and size below `base`, and makes it if no other process uses it.
    pub(super) fn open(
        base: &Path,
        max_bytes: u64,
        shape: &RecordShape,
    ) -> Result<SharedFiles, StoreOpenError> {
        let num_slots = files::num_slots(max_bytes, shape)?;
        let superblock = files::superblock(files::SHARED_MAGIC, shape);
        let dir = base.join(format!("{PREFIX}{:016x}-{num_slots}", xxh3_64(&superblock)));
        // Before anything is made.
        let there = base.ancestors().find(|there| there.exists()).unwrap_or(Path::new("."));
        let kind = File::open(there).and_then(|there| Ok(rustix::fs::fstatfs(there)?));
        if kind.map_err(failed(there, "cannot look at"))?.f_type as u64 != TMPFS {
            return Err(StoreOpenError::NotMemory { dir: base.to_owned() });
        }
        let made = DirBuilder::new().recursive(true).mode(0o700).create(base);
        made.map_err(failed(base, "cannot make the directory"))?;
        check_base(base)?;
        let deadline = Instant::now() + PATIENCE;
        let mut has_made_room = false;
        loop {
            let opened = SharedFiles::try_open(&dir, num_slots, shape, &superblock);
            if let Err(StoreOpenError::Full { .. }) = opened
                && !has_made_room
            {
                // What no process uses would be removed later.
                remove_unused(base, &dir, Duration::ZERO);
                has_made_room = true;
                continue;
            }
            if let Some(files) = opened? {
                tidy(base, &dir, &files.lock);
                return Ok(files);
            }
            if Instant::now() > deadline {
                return Err(StoreOpenError::InUse { dir });
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// `None` while another process makes or removes the directory, or after it was killed meanwhile.
    fn try_open(
        dir: &Path,
        num_slots: u32,
        shape: &RecordShape,
        superblock: &Superblock,
    ) -> Result<Option<SharedFiles>, StoreOpenError> {
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(dir, "cannot make the directory")(error));
            }
            _ => {}
        }
        match check_own(dir) {
            // It has been removed meanwhile.
            Err(StoreOpenError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            checked => checked?,
        }
        let open = |file| {
            let path = dir.join(file);
            match files::options().open(&path) {
                Ok(file) => Ok(Some(file)),
                // The directory has been removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(failed(&path, "cannot open")(error)),
            }
        };
        let Some(lock) = open("lock")?.map(DirLock) else { return Ok(None) };
        let locked = |result| files::is_locked(result).map_err(failed(dir, "cannot lock"));
        let is_alone = locked(lock.0.try_lock())?;
        if is_alone && !is_lock_of(&lock, dir) {
            return Ok(None);
        }
        let (Some(index), Some(slabs), Some(words)) = (open("index")?, open("slabs")?, open("words")?) else {
            return Ok(None);
        };
        let files = [&index, &slabs, &words];
        let bytes = files_bytes(num_slots, shape);
        if is_alone && !is_whole(files, bytes, superblock) {
            make(files, bytes, dir).inspect_err(|_| remove(dir))?;
            index.write_all_at(superblock, 0).map_err(failed(dir, "cannot write"))?;
        }
        // Between the two locks another process may be alone: it keeps what it finds, or removes all.
        if !locked(lock.0.try_lock_shared())? || !is_lock_of(&lock, dir) {
            return Ok(None);
        }
        match is_whole(files, bytes, superblock) {
            true => Ok(Some(SharedFiles { dir: dir.to_owned(), index, slabs, words, num_slots, lock })),
            // The process that made them was killed since this one asked for the lock.
            false if !is_alone => Ok(None),
            false => Err(StoreOpenError::Damaged { dir: dir.to_owned() }),
        }
    }
}

/// The directory that workers name, such as one in `/dev/shm`, where any user may have made it first: no other user may rename what this
/// one makes there.
fn check_base(dir: &Path) -> Result<(), StoreOpenError> {
    const STICKY: u32 = 0o1000;
    let found = fs::metadata(dir).map_err(failed(dir, "cannot look at"))?;
    let problem = match found.mode() {
        _ if ![geteuid().as_raw(), 0].contains(&found.uid()) => "it belongs to another user",
        mode if mode & 0o022 != 0 && mode & STICKY == 0 => "other users may change it",
        _ => return Ok(()),
    };
    Err(StoreOpenError::NotPrivate { dir: dir.to_owned(), problem })
}

/// A directory with KV: it is this user's alone.
fn check_own(dir: &Path) -> Result<(), StoreOpenError> {
    let found = fs::symlink_metadata(dir).map_err(failed(dir, "cannot look at"))?;
    let problem = match found.mode() {
        _ if found.uid() != geteuid().as_raw() => "it belongs to another user",
        _ if !found.is_dir() => "it is no directory",
        mode if mode & 0o077 != 0 => "other users may look into it",
        _ => return Ok(()),
    };
    Err(StoreOpenError::NotPrivate { dir: dir.to_owned(), problem })
}

/// Notes that `own` is in use, and removes directories beside it that no process has used for a while.
pub(super) fn tidy(base: &Path, own: &Path, lock: &DirLock) {
    if let Err(error) = lock.0.set_modified(SystemTime::now()) {
        tracing::debug!(dir = %own.display(), %error, "not noted that the host tier is in use");
    }
    remove_unused(base, own, STAYS);
}

/// Directories of tiers beside `own`, and whether each is being removed.
fn others(base: &Path, own: &Path) -> impl Iterator<Item = (PathBuf, bool)> {
    fs::read_dir(base).into_iter().flatten().flatten().filter_map(move |entry| {
        let (dir, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        (name.starts_with(PREFIX) && dir != own).then_some((dir, name.starts_with(REMOVED)))
    })
}

/// Removes directories beside `own` that no process has used for so long.
fn remove_unused(base: &Path, own: &Path, stays: Duration) {
    for (dir, is_removed) in others(base, own) {
        if is_removed {
            // By a process that was killed meanwhile, or by one that does so now.
            let _ = fs::remove_dir_all(&dir);
        } else if let Ok(lock) = File::options().read(true).write(true).open(dir.join("lock")).map(DirLock)
            && lock.0.try_lock().is_ok()
            && is_lock_of(&lock, &dir)
            && unused_for(&lock) >= stays
        {
            tracing::info!(dir = %dir.display(), "removing a host tier that no worker uses");
            remove(&dir);
        }
    }
}

/// Whether a process uses a directory beside `own`.
pub(super) fn is_other_used(base: &Path, own: &Path) -> bool {
    others(base, own).any(|(dir, is_removed)| {
        !is_removed && File::open(dir.join("lock")).is_ok_and(|lock| DirLock(lock).0.try_lock().is_err())
    })
}

/// Removes a directory that this process has locked alone. Another one that opens it meanwhile makes a new one: the old one has another
/// name then.
fn remove(dir: &Path) {
    let nth = NUM_REMOVED.fetch_add(1, Ordering::Relaxed);
    let removed = dir.with_file_name(format!("{REMOVED}{}-{nth}", std::process::id()));
    if let Err(error) = fs::rename(dir, &removed).and_then(|()| fs::remove_dir_all(&removed)) {
        tracing::warn!(dir = %dir.display(), %error, "cannot remove a host tier");
    }
}

/// Whether this is still the lock of a directory: another process may have removed that, and made a new one.
fn is_lock_of(lock: &DirLock, dir: &Path) -> bool {
    let found = fs::metadata(dir.join("lock")).and_then(|found| Ok((found.ino(), lock.0.metadata()?.ino())));
    found.is_ok_and(|(found, own)| found == own)
}

/// How long ago a process noted that it uses the directory.
fn unused_for(lock: &DirLock) -> Duration {
    let noted = lock.0.metadata().and_then(|found| found.modified());
    // A time to come is that of a clock that was set.
    noted.ok().and_then(|noted| noted.elapsed().ok()).unwrap_or_default()
}

/// Bytes of index, slabs and words.
fn files_bytes(num_slots: u32, shape: &RecordShape) -> [u64; 3] {
    let [index_bytes, slabs_bytes] = files::index_and_slabs_bytes(num_slots, shape);
    [index_bytes, slabs_bytes, SlotWords::num_bytes(num_slots)]
}

/// Whether index, slabs and words were made: the superblock is written last. A file that was made shorter since is not whole: to touch what
/// is mapped beyond its end would kill this process.
fn is_whole(files: [&File; 3], bytes: [u64; 3], superblock: &Superblock) -> bool {
    let mut found = [0; size_of::<Superblock>()];
    let is_long = |(file, bytes): (&File, u64)| file.metadata().is_ok_and(|found| found.len() >= bytes);
    files[0].read_exact_at(&mut found, 0).is_ok_and(|()| found == *superblock)
        && files.into_iter().zip(bytes).all(is_long)
}

/// Makes index, slabs and words empty, of these lengths.
fn make(files: [&File; 3], bytes: [u64; 3], dir: &Path) -> Result<(), StoreOpenError> {
    let all: u64 = bytes.iter().sum();
    tracing::info!(dir = %dir.display(), bytes = all, "making a host tier for all workers of this machine");
    let failed = |source| files::not_reserved(source, &dir.join("slabs"), all);
    for file in files {
        file.set_len(0).map_err(failed)?;
    }
    for (file, bytes) in files.into_iter().zip(bytes) {
        files::reserve(file, bytes).map_err(failed)?;
    }
    Ok(())
}

/// The numbers of the processes that use a directory.
pub(super) struct Numbers<'a>(pub(super) &'a Path);

impl Numbers<'_> {
    /// A number that no other process has while the lock lives.
    pub(super) fn take(&self) -> Result<(u16, DirLock), StoreOpenError> {
        for number in 0..MAX_NUMBERS {
            if let Some(lock) = self.lock(number).map_err(failed(&self.path(number), "cannot lock"))? {
                return Ok((number, lock));
            }
        }
        Err(StoreOpenError::InUse { dir: self.0.to_owned() })
    }

    /// Whether no process has a number.
    pub(super) fn is_free(&self, number: u16) -> bool {
        matches!(self.lock(number), Ok(Some(_)))
    }

    fn lock(&self, number: u16) -> io::Result<Option<DirLock>> {
        let file = files::options().open(self.path(number))?;
        Ok(files::is_locked(file.try_lock())?.then(|| DirLock(file)))
    }

    fn path(&self, number: u16) -> PathBuf {
        self.0.join(format!("worker-{number}"))
    }
}
