//! The left side of a product: rows of activations, packed for a kernel.
//!
//! ```text
//! tiles of R rows, one after the other; zeroes where rows or columns are missing
//! floats    [K][R] f32; or rounded to bf16, with zeroes up to a multiple of 32 of K
//! pairs     [K / 2][R][2] bf16
//! levels    for every activation group of K: [R] f32 scales, then for every group of weights in it:
//!           [R] sums, [K / 4][R][4] i8
//!
//! for tiles, with steps of as many numbers of K as a tile's row has, and zeroes up to whole steps:
//! pairs     [steps][R][32] bf16
//! levels    [steps][R][32 or 64] i8, then [activation groups][R] f32 scales, then [groups][R] f32 sums
//! ```

use super::{level_tiles, panels::PAIR_STEP};
use crate::cpu::Cpu;
use baton_cpu_simd::{Simd, kernel};
use baton_cpu_threads::SharedMut;
use baton_model_spec::{IntegerFormat, MAX_GROUP};

/// The packed format of activations.
#[derive(Clone, Copy, Debug)]
pub(super) enum LeftKind {
    Floats,
    RoundedFloats,
    Pairs,
    /// Quantised to -127..=127, with one scale per [activation group](IntegerFormat::activation_group) of a row.
    Levels(IntegerFormat),
    /// As `Pairs` and `Levels`, in the order of tiles.
    PairTiles,
    LevelTiles(IntegerFormat),
}

impl LeftKind {
    /// Bytes of a packed row of `k` numbers.
    pub(super) fn row_bytes(self, k: usize) -> usize {
        match self {
            LeftKind::Floats => k * 4,
            LeftKind::RoundedFloats => k.next_multiple_of(PAIR_STEP) * 4,
            LeftKind::Pairs => k.next_multiple_of(2) * 2,
            LeftKind::PairTiles => k.next_multiple_of(PAIR_STEP) * 2,
            // Tiles' rows are read in whole cache lines.
            LeftKind::LevelTiles(format) => {
                let scales = (k.div_ceil(format.activation_group()) + k.div_ceil(format.group)) * 4;
                (level_tiles::padded(format, k) + scales).next_multiple_of(64)
            }
            LeftKind::Levels(format) => {
                (k.div_ceil(format.activation_group()) + k.div_ceil(format.group)) * 4 + k.next_multiple_of(8)
            }
        }
    }

    /// Bytes of a row before `column`, where a chunk starts.
    pub(super) fn bytes_before(self, column: usize) -> usize {
        match self {
            LeftKind::Floats | LeftKind::RoundedFloats => column * 4,
            LeftKind::Pairs | LeftKind::PairTiles => column * 2,
            LeftKind::LevelTiles(_) => 0,
            LeftKind::Levels(format) => {
                (column / format.activation_group() + column / format.group) * 4 + column
            }
        }
    }

    /// The number of columns packed at a time, about `about`.
    fn chunk(self, about: usize) -> usize {
        match self {
            LeftKind::Floats | LeftKind::RoundedFloats | LeftKind::Pairs | LeftKind::PairTiles => about,
            LeftKind::Levels(format) | LeftKind::LevelTiles(format) => {
                about.next_multiple_of(format.activation_group())
            }
        }
    }
}

/// Divides rows into tiles of nearly equal heights; every height has a kernel.
pub(super) struct Tiles {
    num_rows: usize,
    /// Rows of the first tiles, and the number of those tiles.
    high: (usize, usize),
    /// The same for the other tiles.
    low: (usize, usize),
}

impl Tiles {
    /// Heights are even numbers up to `max_rows`, or one.
    pub(super) fn new(num_rows: usize, max_rows: usize) -> Tiles {
        let num_tiles = num_rows.div_ceil(max_rows);
        let even = |rows: usize| if rows == 1 { 1 } else { rows.next_multiple_of(2) };
        let high = even(num_rows.div_ceil(num_tiles));
        let low = if high > 2 { high - 2 } else { high };
        // As many low tiles as possible while all rows fit.
        let spare = num_tiles * high - num_rows;
        let num_low = if high > low { (spare / (high - low)).min(num_tiles) } else { 0 };
        Tiles { num_rows, high: (high, num_tiles - num_low), low: (low, num_low) }
    }

    pub(super) fn len(&self) -> usize {
        self.high.1 + self.low.1
    }

    pub(super) fn rows_of(&self, tile_idx: usize) -> usize {
        if tile_idx < self.high.1 { self.high.0 } else { self.low.0 }
    }

    /// Rows of a tile without padding.
    pub(super) fn real_rows_of(&self, tile_idx: usize) -> usize {
        self.rows_of(tile_idx).min(self.num_rows - self.first_row(tile_idx))
    }

    /// The first row of a tile; also the number of packed rows before it.
    pub(super) fn first_row(&self, tile_idx: usize) -> usize {
        let high = tile_idx.min(self.high.1);
        high * self.high.0 + (tile_idx - high) * self.low.0
    }
}

/// Packs the rows `[num_rows][k]` of `a` into `cpu.packed`.
pub(super) fn pack_left(cpu: &mut Cpu, kind: LeftKind, tiles: &Tiles, a: &[f32], k: usize, shared: bool) {
    let chunk = kind.chunk(512);
    let Cpu { packed, pool, isa, .. } = cpu;
    let row_bytes = kind.row_bytes(k);
    let num_bytes = tiles.first_row(tiles.len()) * row_bytes;
    let packed = SharedMut::new(packed.grown(num_bytes.div_ceil(4)));
    let num_chunks = k.div_ceil(chunk);
    let item = |_: usize, item_idx: usize| {
        let (tile_idx, chunk_idx) = (item_idx / num_chunks, item_idx % num_chunks);
        let (rows, first_row) = (tiles.rows_of(tile_idx), tiles.first_row(tile_idx));
        let first_column = chunk_idx * chunk;
        let len = chunk.min(k - first_column);
        // SAFETY: each work item has its own chunk of the packed tile.
        let to = unsafe {
            packed.ptr().cast::<u8>().add(first_row * row_bytes + rows * kind.bytes_before(first_column))
        };
        let real_rows = tiles.real_rows_of(tile_idx);
        let from = &a[first_row * k + first_column..(first_row + real_rows - 1) * k + first_column + len];
        let args = ChunkArgs { kind, from: from.as_ptr(), first_column, stride: k, len, rows, real_rows, to };
        // SAFETY: the rows are inside `a`, and the chunk has room for them.
        unsafe { chunk_kernel(*isa, &args) };
    };
    let num_items = tiles.len() * num_chunks;
    if shared && num_items > 1 {
        pool.for_each(num_items, item);
    } else {
        (0..num_items).for_each(|idx| item(0, idx));
    }
}

struct ChunkArgs {
    kind: LeftKind,
    from: *const f32,
    first_column: usize,
    /// Columns of the matrix.
    stride: usize,
    len: usize,
    rows: usize,
    real_rows: usize,
    /// The place of the chunk; that of the whole tile for `LevelTiles`.
    to: *mut u8,
}

kernel! {
    /// # Safety
    /// `from` is valid for the real rows and `to` for all packed rows.
    fn chunk_kernel / pack_chunk (args: &ChunkArgs)
}

#[inline(always)]
#[allow(clippy::extra_unused_type_parameters)] // `kernel` gives it
unsafe fn pack_chunk<S: Simd>(args: &ChunkArgs) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match args.kind {
            LeftKind::Floats => pack_floats::<false>(args),
            LeftKind::RoundedFloats => pack_floats::<true>(args),
            LeftKind::Pairs => pack_pairs(args),
            LeftKind::Levels(format) => pack_groups(args, format),
            LeftKind::PairTiles => pack_pair_tiles(args),
            LeftKind::LevelTiles(format) => pack_level_tiles(args, format),
        }
    }
}

#[inline(always)]
unsafe fn pack_floats<const ROUNDED: bool>(args: &ChunkArgs) {
    let to = args.to.cast::<f32>();
    for row in 0..args.rows {
        for k in 0..args.len {
            // SAFETY: row and column indices are in range.
            unsafe {
                let mut value =
                    if row < args.real_rows { *args.from.add(row * args.stride + k) } else { 0.0 };
                if ROUNDED {
                    value = f32::from_bits(u32::from(bf16_bits(value)) << 16);
                }
                *to.add(k * args.rows + row) = value;
            }
        }
    }
    if ROUNDED {
        let len = args.len.next_multiple_of(PAIR_STEP) - args.len;
        // SAFETY: rows have as many numbers.
        unsafe { std::slice::from_raw_parts_mut(to.add(args.len * args.rows), len * args.rows).fill(0.0) };
    }
}

#[inline(always)]
unsafe fn pack_pairs(args: &ChunkArgs) {
    let to = args.to.cast::<[u16; 2]>();
    for row in 0..args.rows {
        for pair in 0..args.len.div_ceil(2) {
            // SAFETY: row and column indices are in range; the last pair may have one number.
            unsafe {
                let from = args.from.add(row.min(args.real_rows - 1) * args.stride + pair * 2);
                let second = if pair * 2 + 1 < args.len { *from.add(1) } else { 0.0 };
                let values = [*from, second].map(bf16_bits);
                *to.add(pair * args.rows + row) = if row < args.real_rows { values } else { [0, 0] };
            }
        }
    }
}

#[inline(always)]
unsafe fn pack_pair_tiles(args: &ChunkArgs) {
    const STEP: usize = PAIR_STEP;
    let to = args.to.cast::<[u16; STEP]>();
    for row in 0..args.rows {
        for step in 0..args.len.div_ceil(STEP) {
            // SAFETY: row and column indices are in range.
            unsafe {
                let to = to.add(step * args.rows + row);
                let mut line = [0.0f32; STEP];
                if row < args.real_rows {
                    let from = args.from.add(row * args.stride + step * STEP);
                    if args.len - step * STEP >= STEP {
                        line = from.cast::<[f32; STEP]>().read();
                    } else {
                        std::ptr::copy_nonoverlapping(from, line.as_mut_ptr(), args.len - step * STEP);
                    }
                }
                // By value, so that the compiler vectorises it.
                let mut rounded = [0u16; STEP];
                for i in 0..STEP {
                    rounded[i] = bf16_bits(line[i]);
                }
                to.write_unaligned(rounded);
            }
        }
    }
}

/// Rounds to nearest even, as [`half::bf16::from_f32`], with one exception for vector units: a NaN stays NaN only if
/// its upper 16 bits are one, which holds for every NaN that arithmetic produces.
#[inline(always)]
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let is_finite = bits & 0x7f80_0000 != 0x7f80_0000;
    ((if is_finite { rounded } else { bits }) >> 16) as u16
}

#[inline(always)]
unsafe fn pack_groups(args: &ChunkArgs, format: IntegerFormat) {
    let mut to = args.to;
    let mut first = 0;
    while first < args.len {
        let len = format.activation_group().min(args.len - first);
        // SAFETY: activation groups follow each other as in `bytes_before`.
        to = unsafe { pack_group(args, format, first, len, to) };
        first += len;
    }
}

/// Packs one activation group of all rows. Returns the address of the next group.
#[inline(always)]
unsafe fn pack_group(
    args: &ChunkArgs,
    format: IntegerFormat,
    first: usize,
    len: usize,
    to: *mut u8,
) -> *mut u8 {
    let rows = args.rows;
    // SAFETY: row and column indices are in range.
    unsafe {
        for row in 0..rows {
            let is_real = row < args.real_rows;
            // Padding rows are zero.
            let from = args.from.add(if is_real { row * args.stride + first } else { 0 });
            let (scale, inverse) = scale_of(from, if is_real { len } else { 0 });
            to.cast::<f32>().add(row).write_unaligned(scale);

            let mut sums = to.cast::<u32>().wrapping_add(rows);
            let mut done = 0;
            while done < len {
                let group = format.group.min(len - done);
                let num_words = group.div_ceil(8) * 2;
                let (rounded, sum) = quantise(from.add(done), if is_real { group } else { 0 }, inverse);
                let levels = sums.add(rows);
                for word in 0..num_words {
                    let four = rounded.as_ptr().add(word).cast::<u32>().read_unaligned();
                    levels.add(word * rows + row).write_unaligned(four);
                }
                sums.add(row).write_unaligned(if format.has_zeros {
                    (sum as f32).to_bits()
                } else {
                    // The initial value of the products' sums.
                    sum.wrapping_mul(-i32::from(format.width.middle())) as u32
                });
                sums = levels.add(num_words * rows);
                done += group;
            }
        }
        let num_groups = len.div_ceil(format.group);
        to.add(rows * (4 + 4 * num_groups + len.next_multiple_of(8)))
    }
}

/// Packs activation groups of all rows for tiles.
#[inline(always)]
unsafe fn pack_level_tiles(args: &ChunkArgs, format: IntegerFormat) {
    let (rows, shared, step) = (args.rows, format.activation_group(), level_tiles::step(format));
    let mut first = 0;
    // SAFETY: row and column indices are in range.
    unsafe {
        let scales = args.to.add(rows * level_tiles::padded(format, args.stride)).cast::<f32>();
        let sums = scales.add(args.stride.div_ceil(shared) * rows);
        while first < args.len {
            let len = if shared < args.len - first { shared } else { args.len - first };
            let column = args.first_column + first;
            for row in 0..rows {
                let is_real = row < args.real_rows;
                let from = args.from.add(if is_real { row * args.stride + first } else { 0 });
                let (scale, inverse) = scale_of(from, if is_real { len } else { 0 });
                *scales.add(column / shared * rows + row) = scale;
                let mut done = 0;
                while done < len {
                    let group = if format.group < len - done { format.group } else { len - done };
                    let (rounded, sum) = quantise(from.add(done), if is_real { group } else { 0 }, inverse);
                    *sums.add((column + done) / format.group * rows + row) = sum as f32;
                    let levels = args.to.add((column + done) * rows + row * step);
                    for idx in 0..group.div_ceil(step) {
                        let from = rounded.as_ptr().cast::<u8>().add(idx * step);
                        std::ptr::copy_nonoverlapping(from, levels.add(idx * rows * step), step);
                    }
                    done += group;
                }
            }
            first += len;
        }
    }
}

/// The scale of an activation group and its inverse.
#[inline(always)]
unsafe fn scale_of(from: *const f32, len: usize) -> (f32, f32) {
    // Bit patterns of magnitudes have the order of the numbers. A NaN is above all of them and makes the scale NaN.
    let mut largest = 0u32;
    for k in 0..len {
        // SAFETY: the caller guarantees `len` numbers.
        largest = largest.max(unsafe { *from.add(k) }.to_bits() & 0x7fff_ffff);
    }
    let scale = f32::from_bits(largest) * (1.0 / 127.0);
    let scale = if scale.is_finite() { scale } else { f32::NAN };
    (scale, if scale > f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 })
}

/// The levels of a group, zeroes after them, and their sum.
#[inline(always)]
unsafe fn quantise(from: *const f32, len: usize, inverse: f32) -> ([[i8; 4]; MAX_GROUP / 4], i32) {
    let mut rounded = [[0i8; 4]; MAX_GROUP / 4];
    let flat = rounded.as_mut_ptr().cast::<i8>();
    let mut sum = 0i32;
    for k in 0..len {
        // SAFETY: the caller guarantees `len` numbers, at most `MAX_GROUP`.
        unsafe {
            let level = round(*from.add(k) * inverse);
            sum = sum.wrapping_add(level);
            *flat.add(k) = level as i8;
        }
    }
    (rounded, sum)
}

/// Rounds a number far below 2^22 to the nearest integer, ties to even: adding a constant leaves the integer in the
/// low bits of the sum. The result for other numbers is unspecified and not used. A cast would convert one number at
/// a time.
#[inline(always)]
fn round(x: f32) -> i32 {
    const ONES: f32 = 1.5 * (1 << 23) as f32;
    (x + ONES).to_bits().wrapping_sub(ONES.to_bits()) as i32
}
