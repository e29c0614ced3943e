//! Packs weights once into the layout that kernels stream, and shares them among the processes of a host.
//!
//! ```text
//! safetensors --- Packer::add, matrix by matrix ---> a plan --- finish ---> a file in the cache, mapped by all
//!                                                                     \---> or memory of this process
//! ```
//! The name of a packed file encodes its origin (the model's revision, and the path, size and time of its files) and its
//! layout (the plan). The file is written under a temporary name, synced and renamed, so it is complete or absent. Of
//! processes that start together one writes the file and the others wait for it. Files of an older state of the same
//! model, and unfinished ones, are removed; files of the same weights in another layout stay. If the cache cannot be
//! used, or its disk has too little room, every process packs for itself.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use baton_checkpoint::{IntegerChoice, LoadProgress, Matrix, MatrixSink, ProductKind, SplitGroup, Tolerance};
use baton_cpu_kernels::{PANEL, PanelFormat, PanelsRef, RowOrder, pack_floats, pack_integers};
use baton_kv_cache::MemoryLimit;
use baton_model_spec::{FloatDtype, IntegerFormat, IntegerRow, LoadError, PrivateWeights, Rank};
use memmap2::{Mmap, MmapMut};

use crate::weight_files;
use crate::whole_pages::WholePages;

/// Raised when the layout changes: files of another version are not read.
const LAYOUT_VERSION: u32 = 4;
/// Size of a file's header, which starts with the key.
const HEADER_BYTES: usize = 4096;
/// Matrices start at multiples of this.
const ALIGNMENT: usize = 4096;
/// Bytes packed between two progress reports, about.
const PIECE_BYTES: usize = 16 << 20;

/// A matrix in packed memory. Usable after its packer has finished.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    memory: Arc<OnceLock<Memory>>,
    offset: usize,
    format: PanelFormat,
    rows: usize,
    cols: usize,
    order: RowOrder,
}

#[derive(Debug)]
enum Memory {
    File(Mmap),
    Private(MmapMut),
}

impl PackedMatrix {
    /// Columns: inputs of a product.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn as_ref(&self) -> PanelsRef<'_> {
        let memory: &[u8] = match self.memory() {
            Memory::File(map) => &map[HEADER_BYTES..],
            Memory::Private(map) => map,
        };
        let num_bytes = self.format.matrix_bytes(self.rows, self.cols);
        PanelsRef::new(&memory[self.offset..][..num_bytes], self.format, self.rows, self.cols)
            .in_order(self.order)
    }

    /// Bytes of all matrices of its model.
    pub(crate) fn packed_bytes(&self) -> usize {
        match self.memory() {
            Memory::File(map) => map.len() - HEADER_BYTES,
            Memory::Private(map) => map.len(),
        }
    }

    /// Those of them that are in memory of this process's own.
    pub(crate) fn private_bytes(&self) -> usize {
        match self.memory() {
            Memory::File(_) => 0,
            Memory::Private(map) => map.len(),
        }
    }

    fn memory(&self) -> &Memory {
        self.memory.get().expect("loading ends with packing")
    }
}

/// The layout of packed weights.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Packing {
    /// Weights in bf16 are multiplied in pairs, with activations in bf16.
    pub(crate) bf16_pairs: bool,
    /// Which weights are integers.
    pub(crate) integers: IntegerChoice,
}

/// Memory of this process's own, for packed weights that no file holds.
pub(crate) struct PrivateMemory<'a> {
    limit: MemoryLimit<'a>,
    /// What another model takes of it.
    beside: Option<PrivateWeights>,
    /// What packed weights take of it so far.
    num_bytes: usize,
}

impl<'a> PrivateMemory<'a> {
    pub(crate) fn new(limit: MemoryLimit<'a>, beside: Option<PrivateWeights>) -> PrivateMemory<'a> {
        let beside = beside.filter(|weights| weights.bytes > 0);
        PrivateMemory { limit, beside, num_bytes: 0 }
    }

    /// Refuses weights that can never fit. A copy is mapped at once and filled piece by piece: a kill would tell instead.
    fn take(&mut self, num_bytes: usize, model: &Path) -> Result<(), LoadError> {
        let bytes = self.num_bytes.saturating_add(num_bytes);
        let beside = self.beside.clone();
        let all = beside.as_ref().map_or(bytes, |weights| bytes.saturating_add(weights.bytes));
        if let Some(limit) = self.limit.bytes().filter(|&limit| all > limit) {
            return Err(LoadError::WeightsTooLarge { path: model.to_owned(), bytes, beside, limit });
        }
        self.num_bytes = bytes;
        Ok(())
    }
}

/// Collects the matrices to pack.
pub(crate) struct Packer {
    packing: Packing,
    /// The rank whose parts of tensors are packed.
    rank: Rank,
    memory: Arc<OnceLock<Memory>>,
    jobs: Vec<Job>,
    num_bytes: usize,
}

/// One packed matrix: matrices whose outputs are one after the other.
struct Job {
    parts: Vec<Matrix>,
    /// The type of rows that are not integers.
    dtype: FloatDtype,
    format: PanelFormat,
    rows: usize,
    cols: usize,
    order: RowOrder,
    offset: usize,
}

/// Keeps packed weights for the next start and for other processes.
#[derive(Clone, Debug)]
pub(crate) struct WeightCache<'a> {
    pub(crate) dir: &'a Path,
    /// The directory or file of the model. Its packed files under another key are obsolete.
    pub(crate) model: &'a Path,
    /// Identifies the weights: equal keys mean equal bytes.
    pub(crate) key: blake3::Hash,
}

impl WeightCache<'_> {
    /// Identifies the weights and the version of the layout.
    fn layout_key(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&LAYOUT_VERSION.to_le_bytes());
        hasher.update(self.key.as_bytes());
        hasher.finalize()
    }
}

impl Packer {
    pub(crate) fn new(packing: Packing, rank: Rank) -> Packer {
        Packer { packing, rank, memory: Arc::default(), jobs: vec![], num_bytes: 0 }
    }

    /// Packs all matrices of `model` on `num_threads` threads, or maps a packed file. The matrices are usable
    /// afterwards.
    ///
    /// # Errors
    /// When there is not enough `memory`.
    pub(crate) fn finish(
        self,
        model: &Path,
        cache: Option<&WeightCache<'_>>,
        memory: &mut PrivateMemory<'_>,
        num_threads: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<(), LoadError> {
        progress(LoadProgress { bytes_done: 0, bytes_total: self.num_bytes as u64 });
        let mapped = cache.and_then(|cache| match self.cached(cache, num_threads, progress) {
            Ok(map) => Some(Memory::File(map)),
            Err((path, error)) => {
                let path = path.display();
                tracing::warn!(%path, %error, "cannot use the cache of packed weights: this process packs a copy of its own");
                None
            }
        });
        let packed = match mapped {
            Some(file) => file,
            None => {
                memory.take(self.num_bytes, model)?;
                let packed = self.private(num_threads, progress);
                Memory::Private(packed.map_err(|source| LoadError::io(model, source))?)
            }
        };
        assert!(self.memory.set(packed).is_ok(), "packed once");
        Ok(())
    }

    fn private(&self, num_threads: usize, progress: &mut dyn FnMut(LoadProgress)) -> io::Result<MmapMut> {
        let mut map = MmapMut::map_anon(self.num_bytes.max(1))?;
        // Only a hint: large pages need fewer page-table entries.
        let _ = map.advise(memmap2::Advice::HugePage);
        self.pack(num_threads, progress, &mut |offset, panels| {
            map[offset..offset + panels.len()].copy_from_slice(panels);
            Ok(())
        })?;
        Ok(map)
    }

    /// Maps the packed file and creates it first if it is missing. Errors name the path.
    fn cached(
        &self,
        cache: &WeightCache<'_>,
        num_threads: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Mmap, (PathBuf, io::Error)> {
        let key = self.key(cache);
        let model = cache.model.canonicalize().map_err(|error| (cache.model.to_owned(), error))?;
        let place = blake3::hash(model.as_os_str().as_encoded_bytes()).to_hex();
        let weights = format!("{}-{}", &place[..16], &cache.layout_key().to_hex()[..16]);
        let path = cache.dir.join(format!("{weights}-{}.{}", &key.to_hex()[..16], weight_files::COMPLETE));
        let lock_path = cache.dir.join(format!("{}.lock", &place[..16]));
        let at = |path: &Path| {
            let path = path.to_owned();
            move |error| (path, error)
        };
        if let Some(map) = self.open(&path, &key) {
            // Another process may be writing in another layout: it has the lock then.
            if let Ok(lock) = File::open(&lock_path)
                && lock.try_lock().is_ok()
            {
                weight_files::remove_unfinished(cache.dir, &place[..16]);
            }
            read_ahead(&map, progress);
            return Ok(map);
        }
        fs::create_dir_all(cache.dir).map_err(at(cache.dir))?;
        // A second process waits here and then finds the file. The lock ends when its file descriptor is closed.
        let lock = File::create(&lock_path).map_err(at(&lock_path))?;
        lock.lock().map_err(at(&lock_path))?;
        if self.open(&path, &key).is_none() {
            weight_files::remove_unfinished(cache.dir, &place[..16]);
            weight_files::remove_old(cache.dir, &place[..16], &weights);
            let free = weight_files::free_bytes(cache.dir);
            self.create(&path, &key, free, num_threads, progress).map_err(at(&path))?;
            tracing::info!(path = %path.display(), bytes = self.num_bytes, "packed weights written");
        }
        self.open(&path, &key)
            .ok_or_else(|| (path, io::Error::other("the file that was just written has another key")))
    }

    /// Writes the file where `free` bytes are left on the disk. Nothing of it stays after an error.
    fn create(
        &self,
        path: &Path,
        key: &blake3::Hash,
        free: Option<u64>,
        num_threads: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> io::Result<()> {
        let dir = path.parent().unwrap_or(path);
        weight_files::check_room(dir, (HEADER_BYTES + self.num_bytes) as u64, free)?;
        let unfinished = path.with_extension(weight_files::UNFINISHED);
        let written = self.write(&unfinished, key, num_threads, progress);
        written.and_then(|()| fs::rename(&unfinished, path)).inspect_err(|_| {
            let _ = fs::remove_file(&unfinished);
        })
    }

    fn write(
        &self,
        path: &Path,
        key: &blake3::Hash,
        num_threads: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> io::Result<()> {
        // The file is written, not mapped: a full disk is then an error instead of a signal.
        let file = File::create(path)?;
        let mut writer = WholePages::new(&file);
        writer.write(0, key.as_bytes())?;
        self.pack(num_threads, progress, &mut |offset, panels| writer.write(HEADER_BYTES + offset, panels))?;
        writer.finish(HEADER_BYTES + self.num_bytes)?;
        file.sync_all()
    }

    /// Maps the file if it exists and has the right key.
    fn open(&self, path: &Path, key: &blake3::Hash) -> Option<Mmap> {
        let file = File::open(path).ok()?;
        // SAFETY: a read-only mapping of a file that is replaced, never rewritten.
        let map = unsafe { Mmap::map(&file) }.ok()?;
        let is_right = map.len() == HEADER_BYTES + self.num_bytes && map[..32] == *key.as_bytes();
        is_right.then_some(map)
    }

    fn key(&self, cache: &WeightCache<'_>) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(cache.layout_key().as_bytes());
        for job in &self.jobs {
            for number in [job.offset, job.rows, job.cols] {
                hasher.update(&(number as u64).to_le_bytes());
            }
            hasher.update(format!("{:?} {:?}", job.format, job.order).as_bytes());
        }
        // Parts of other ranks have the same size and other contents.
        if self.rank != Rank::ONLY {
            hasher.update(format!("{:?}", self.rank).as_bytes());
        }
        hasher.finalize()
    }

    /// Packs all matrices in pieces on `num_threads` threads and passes each piece with its offset to `sink`.
    fn pack(
        &self,
        num_threads: usize,
        progress: &mut dyn FnMut(LoadProgress),
        sink: &mut dyn FnMut(usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut piece = Vec::new();
        for job in &self.jobs {
            let panel_bytes = job.format.panel_bytes(job.cols);
            let num_panels = job.rows.div_ceil(PANEL);
            let panels_per_piece = (PIECE_BYTES / panel_bytes).max(num_threads);
            for first in (0..num_panels).step_by(panels_per_piece) {
                let num = panels_per_piece.min(num_panels - first);
                piece.resize(num * panel_bytes, 0);
                let panels_per_thread = num.div_ceil(num_threads);
                std::thread::scope(|scope| {
                    for (share_idx, share) in piece.chunks_mut(panels_per_thread * panel_bytes).enumerate() {
                        scope.spawn(move || {
                            for (idx, panel) in share.chunks_mut(panel_bytes).enumerate() {
                                job.pack(first + share_idx * panels_per_thread + idx, panel);
                            }
                        });
                    }
                });
                let offset = job.offset + first * panel_bytes;
                sink(offset, &piece)?;
                let bytes_done = (offset + piece.len()) as u64;
                progress(LoadProgress { bytes_done, bytes_total: self.num_bytes as u64 });
            }
        }
        Ok(())
    }
}

/// Rows become f32 if the types of the parts differ.
impl MatrixSink for Packer {
    type Matrix = PackedMatrix;

    fn add(
        &mut self,
        parts: Vec<Matrix>,
        tolerance: Tolerance,
        kind: ProductKind,
    ) -> Result<PackedMatrix, SplitGroup> {
        let (cols, first) = (parts[0].cols, parts[0].dtype());
        assert!(parts.iter().all(|part| part.cols == cols), "parts of one product");
        let dtype = if !self.packing.integers.widen && parts.iter().all(Matrix::is_fp8) {
            // E4M3 has four significant bits; with its scale, rounding to bf16 changes it by 1/32 of its last bit.
            FloatDtype::Bf16
        } else if parts.iter().all(|part| part.dtype() == first) {
            first
        } else {
            FloatDtype::F32
        };
        let rows = parts.iter().map(|part| part.rows).sum();
        let offset = self.num_bytes;
        let format = match self.packing.integers.format_of(&parts, tolerance)? {
            Some(format) => PanelFormat::Integers(format),
            None if dtype == FloatDtype::Bf16 && self.packing.bf16_pairs => PanelFormat::Bf16Pairs,
            None => PanelFormat::Floats(dtype),
        };
        let order = match kind {
            ProductKind::Plain => RowOrder::Plain,
            ProductKind::Gated => RowOrder::Gated,
        };
        self.num_bytes = (offset + format.matrix_bytes(rows, cols)).next_multiple_of(ALIGNMENT);
        self.jobs.push(Job { parts, dtype, format, rows, cols, order, offset });
        Ok(PackedMatrix { memory: Arc::clone(&self.memory), offset, format, rows, cols, order })
    }
}

impl Job {
    fn pack(&self, panel_idx: usize, to: &mut [u8]) {
        let rows = (0..PANEL).map(|output| self.order.row(self.rows, panel_idx, output));
        match self.format {
            PanelFormat::Integers(format) => {
                let zeroes = || IntegerRow::zeroes(self.cols, format);
                let rows: Vec<_> =
                    rows.map(|row| row.map_or_else(zeroes, |row| self.integer_row(row, format))).collect();
                pack_integers(&rows, format, self.cols, to);
            }
            _ => {
                let zeroes = || Cow::Owned(vec![0; self.cols * self.dtype.size_bytes()]);
                let rows: Vec<_> =
                    rows.map(|row| row.map_or_else(zeroes, |row| self.float_row(row))).collect();
                pack_floats(&rows, self.format, to);
            }
        }
    }

    /// The part that contains a row, and the row's index in that part.
    fn find(&self, mut row_idx: usize) -> (&Matrix, usize) {
        let mut parts = self.parts.iter();
        loop {
            let part = parts.next().expect("rows are counted from the same parts");
            if row_idx < part.rows {
                return (part, row_idx);
            }
            row_idx -= part.rows;
        }
    }

    fn integer_row(&self, row_idx: usize, format: IntegerFormat) -> IntegerRow {
        let (part, row_idx) = self.find(row_idx);
        part.integers_in(format, row_idx)
    }

    /// The bytes of a row as packed.
    fn float_row(&self, row_idx: usize) -> Cow<'_, [u8]> {
        let (part, row_idx) = self.find(row_idx);
        match part.row(row_idx) {
            Some(bytes) if part.dtype() == self.dtype => Cow::Borrowed(bytes),
            _ if self.dtype == FloatDtype::Bf16 => {
                let values = part.row_values(row_idx).map(half::bf16::from_f32);
                Cow::Owned(values.flat_map(half::bf16::to_le_bytes).collect())
            }
            _ => Cow::Owned(part.row_values(row_idx).flat_map(f32::to_le_bytes).collect()),
        }
    }
}

/// Reads a mapped file into memory.
fn read_ahead(map: &Mmap, progress: &mut dyn FnMut(LoadProgress)) {
    let bytes_total = (map.len() - HEADER_BYTES) as u64;
    // Only a hint: other pages are read on first use.
    let _ = map.advise(memmap2::Advice::WillNeed);
    let mut bytes_done = 0;
    for (piece_idx, piece) in map[HEADER_BYTES..].chunks(PIECE_BYTES).enumerate() {
        let offset = HEADER_BYTES + piece_idx * PIECE_BYTES;
        // Maps many pages with one call, if the kernel supports it.
        if map.advise_range(memmap2::Advice::PopulateRead, offset, piece.len()).is_err() {
            let touched = piece.iter().step_by(4096).fold(0u8, |all, byte| all ^ byte);
            std::hint::black_box(touched);
        }
        bytes_done += piece.len() as u64;
        progress(LoadProgress { bytes_done, bytes_total });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_does_not_fit_on_its_disk_is_not_begun() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("place-weights-key.panels");
        let mut packer = Packer::new(Packing::default(), Rank::ONLY);
        packer.num_bytes = ALIGNMENT;
        let create = |free| {
            packer.create(&path, &blake3::hash(b"key"), free, 1, &mut |_| {})?;
            fs::metadata(&path).map(|file| file.len())
        };
        let size = HEADER_BYTES + ALIGNMENT;
        let error = create(Some(size as u64 - 1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
        assert_eq!(create(Some(size as u64)).unwrap(), size as u64);
    }

    fn finish(
        num_bytes: usize,
        cache: Option<&WeightCache<'_>>,
        memory: &mut PrivateMemory<'_>,
    ) -> Result<(), LoadError> {
        let mut packer = Packer::new(Packing::default(), Rank::ONLY);
        packer.num_bytes = num_bytes;
        packer.finish(Path::new("model"), cache, memory, 1, &mut |_| {})
    }

    #[test]
    fn weights_that_the_control_group_never_holds_are_refused_unless_a_file_holds_them() {
        let dir = tempfile::tempdir().unwrap();
        let [proc, cgroups, files] = ["proc", "cgroup", "files"].map(|name| dir.path().join(name));
        for dir in [&proc.join("self"), &cgroups] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(proc.join("self/cgroup"), "0::/\n").unwrap();
        fs::write(cgroups.join("memory.max"), "8192\n").unwrap();
        let limit = MemoryLimit { proc: &proc, cgroups: &cgroups };
        let cache = WeightCache { dir: &files, model: dir.path(), key: blake3::hash(b"model") };
        let memory = || PrivateMemory::new(limit, None);
        finish(8192, None, &mut memory()).unwrap();
        finish(12_288, Some(&cache), &mut memory()).unwrap();
        let error = finish(12_288, None, &mut memory()).unwrap_err().to_string();
        for expected in ["12288 bytes", "may use 8192", "--quantize int8", "--weight-cache"] {
            assert!(error.contains(expected), "{error}");
        }

        // Ranks of one process: what files hold does not count.
        let mut memory = memory();
        finish(12_288, Some(&cache), &mut memory).unwrap();
        finish(4096, None, &mut memory).unwrap();
        let error = finish(8192, None, &mut memory).unwrap_err().to_string();
        assert!(error.contains("12288 bytes"), "{error}");
        finish(4096, None, &mut memory).unwrap();

        // A draft model beside its target.
        let beside = |bytes| PrivateMemory::new(limit, Some(PrivateWeights { path: "target".into(), bytes }));
        finish(4096, None, &mut beside(4096)).unwrap();
        finish(12_288, Some(&cache), &mut beside(8192)).unwrap();
        let error = finish(4096, None, &mut beside(8192)).unwrap_err().to_string();
        assert!(
            error.starts_with("model: the weights take 4096 bytes of memory beside 8192 of target, but"),
            "{error}"
        );
        let error = finish(12_288, None, &mut beside(0)).unwrap_err().to_string();
        assert!(!error.contains("beside"), "{error}");
    }
}
