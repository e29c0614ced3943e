//! The left side of a product: rows of activations, as a kernel reads them.
//!
//! ```text
//! tiles of R rows, one after the other; zeroes where rows or columns are missing
//! floats    [K][R] f32
//! pairs     [K / 2][R][2] bf16
//! levels    for every activation group of K: [R] f32 scales, then for every group of weights in it:
//!           [R] sums, [K / 4][R][4] i8
//! ```

use crate::cpu::Cpu;
use crate::shared::SharedMut;
use crate::simd::{Simd, kernel};
use baton_model_spec::{IntegerFormat, MAX_GROUP};

/// What becomes of activations.
#[derive(Clone, Copy, Debug)]
pub(super) enum LeftKind {
    Floats,
    Pairs,
    /// Rounded to -127..=127, each [activation group](IntegerFormat::activation_group) of a row by a scale of its own.
    Levels(IntegerFormat),
}

impl LeftKind {
    /// Bytes of a packed row of `k` numbers.
    pub(super) fn row_bytes(self, k: usize) -> usize {
        match self {
            LeftKind::Floats => k * 4,
            LeftKind::Pairs => k.next_multiple_of(2) * 2,
            LeftKind::Levels(format) => {
                (k.div_ceil(format.activation_group()) + k.div_ceil(format.group)) * 4 + k.next_multiple_of(8)
            }
        }
    }

    /// Bytes of a row before column `column`, where a chunk begins.
    fn bytes_before(self, column: usize) -> usize {
        match self {
            LeftKind::Floats => column * 4,
            LeftKind::Pairs => column * 2,
            LeftKind::Levels(format) => {
                (column / format.activation_group() + column / format.group) * 4 + column
            }
        }
    }

    /// Numbers of a row that are packed at a time, about `about`.
    fn chunk(self, about: usize) -> usize {
        match self {
            LeftKind::Floats | LeftKind::Pairs => about,
            LeftKind::Levels(format) => about.next_multiple_of(format.activation_group()),
        }
    }
}

/// How rows are divided: tiles of nearly equal heights, all of them heights that a kernel exists for.
pub(super) struct Tiles {
    num_rows: usize,
    /// Of the first tiles, and how many they are.
    high: (usize, usize),
    /// Of the rest.
    low: (usize, usize),
}

impl Tiles {
    /// Heights are even numbers up to `max_rows`, or one.
    pub(super) fn new(num_rows: usize, max_rows: usize) -> Tiles {
        let num_tiles = num_rows.div_ceil(max_rows);
        let even = |rows: usize| if rows == 1 { 1 } else { rows.next_multiple_of(2) };
        let high = even(num_rows.div_ceil(num_tiles));
        let low = if high > 2 { high - 2 } else { high };
        // As many low ones as still hold all rows.
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

    /// Those that are not padding.
    pub(super) fn real_rows_of(&self, tile_idx: usize) -> usize {
        self.rows_of(tile_idx).min(self.num_rows - self.first_row(tile_idx))
    }

    /// Also the number of packed rows before the tile.
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
        // SAFETY: an item's chunk of the packed tile is its own.
        let to = unsafe {
            packed.ptr().cast::<u8>().add(first_row * row_bytes + rows * kind.bytes_before(first_column))
        };
        let real_rows = tiles.real_rows_of(tile_idx);
        let from = &a[first_row * k + first_column..(first_row + real_rows - 1) * k + first_column + len];
        let args = ChunkArgs { kind, from: from.as_ptr(), stride: k, len, rows, real_rows, to };
        // SAFETY: the rows lie in `a`, and the chunk has room for them.
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
    stride: usize,
    len: usize,
    rows: usize,
    real_rows: usize,
    to: *mut u8,
}

kernel! {
    /// # Safety
    /// `from` is valid for the real rows and `to` for what becomes of all rows.
    fn chunk_kernel / pack_chunk (args: &ChunkArgs)
}

#[inline(always)]
unsafe fn pack_chunk<S: Simd>(args: &ChunkArgs) {
    // SAFETY: passed on to the caller.
    unsafe {
        match args.kind {
            LeftKind::Floats => pack_floats(args),
            LeftKind::Pairs => pack_pairs(args),
            LeftKind::Levels(format) => pack_groups(args, format),
        }
    }
}

#[inline(always)]
unsafe fn pack_floats(args: &ChunkArgs) {
    let to = args.to.cast::<f32>();
    for row in 0..args.rows {
        for k in 0..args.len {
            // SAFETY: rows and columns stay below their numbers.
            unsafe {
                let value = if row < args.real_rows { *args.from.add(row * args.stride + k) } else { 0.0 };
                *to.add(k * args.rows + row) = value;
            }
        }
    }
}

#[inline(always)]
unsafe fn pack_pairs(args: &ChunkArgs) {
    let to = args.to.cast::<[u16; 2]>();
    for row in 0..args.rows {
        for pair in 0..args.len.div_ceil(2) {
            // SAFETY: rows and columns stay below their numbers; the last pair may be half a one.
            unsafe {
                let from = args.from.add(row.min(args.real_rows - 1) * args.stride + pair * 2);
                let second = if pair * 2 + 1 < args.len { *from.add(1) } else { 0.0 };
                let values = [*from, second].map(bf16_bits);
                *to.add(pair * args.rows + row) = if row < args.real_rows { values } else { [0, 0] };
            }
        }
    }
}

/// Rounds to the nearest, to even between two; as [`half::bf16::from_f32`], but for what a vector unit can do: NaN
/// stays NaN only where its upper half says so, which is where arithmetic makes one.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
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
        // SAFETY: activation groups follow each other as `bytes_before` counts them.
        to = unsafe { pack_group(args, format, first, len, to) };
        first += len;
    }
}

/// One activation group of all rows; where the next one begins.
#[inline(always)]
unsafe fn pack_group(
    args: &ChunkArgs,
    format: IntegerFormat,
    first: usize,
    len: usize,
    to: *mut u8,
) -> *mut u8 {
    let rows = args.rows;
    // SAFETY: rows and columns stay below their numbers.
    unsafe {
        for row in 0..rows {
            let is_real = row < args.real_rows;
            // What is missing is zero.
            let from = args.from.add(if is_real { row * args.stride + first } else { 0 });
            let mut largest = 0u32;
            if is_real {
                // Bits of magnitudes order as they do; a NaN is above all and makes the scale NaN.
                for k in 0..len {
                    largest = largest.max((*from.add(k)).to_bits() & 0x7fff_ffff);
                }
            }
            let scale = f32::from_bits(largest) * (1.0 / 127.0);
            let scale = if scale.is_finite() { scale } else { f32::NAN };
            let inverse = if scale > f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
            to.cast::<f32>().add(row).write_unaligned(scale);

            let mut sums = to.cast::<u32>().wrapping_add(rows);
            let mut done = 0;
            while done < len {
                let group = format.group.min(len - done);
                let num_words = group.div_ceil(8) * 2;
                // In two loops, of which the compiler makes vectors.
                let mut rounded = [[0i8; 4]; MAX_GROUP / 4];
                let flat = rounded.as_mut_ptr().cast::<i8>();
                let mut sum = 0i32;
                for k in 0..if is_real { group } else { 0 } {
                    let level = round(*from.add(done + k) * inverse);
                    sum = sum.wrapping_add(level);
                    *flat.add(k) = level as i8;
                }
                let levels = sums.add(rows);
                for word in 0..num_words {
                    let four = rounded.as_ptr().add(word).cast::<u32>().read_unaligned();
                    levels.add(word * rows + row).write_unaligned(four);
                }
                sums.add(row).write_unaligned(if format.has_zeros {
                    (sum as f32).to_bits()
                } else {
                    // What the sums of products begin with.
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

/// The nearest whole number, the even one of two, of a number that is far below 2^22: the low bits of a sum in which
/// they count ones. What comes of other numbers is of no use, but does no harm. A cast would be one number at a time.
#[inline(always)]
fn round(x: f32) -> i32 {
    const ONES: f32 = 1.5 * (1 << 23) as f32;
    (x + ONES).to_bits().wrapping_sub(ONES.to_bits()) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_hold_all_rows_and_few_more() {
        for max_rows in [2, 6, 14] {
            for num_rows in 1..200 {
                let tiles = Tiles::new(num_rows, max_rows);
                let total = tiles.first_row(tiles.len());
                assert!(total >= num_rows && total < num_rows + 2, "{num_rows} rows in {total}");
                for tile_idx in 0..tiles.len() {
                    let rows = tiles.rows_of(tile_idx);
                    assert!(
                        rows <= max_rows && (rows == 1 || rows.is_multiple_of(2)),
                        "{num_rows}: a tile of {rows}"
                    );
                    assert!(tiles.first_row(tile_idx) < num_rows, "an empty tile");
                }
            }
        }
    }

    #[test]
    fn bf16_is_rounded_to_even() {
        for (value, expected) in [
            (1.0f32, 0x3f80),
            (f32::from_bits(0x3f80_8000), 0x3f80),
            (f32::from_bits(0x3f81_8000), 0x3f82),
            (f32::from_bits(0x3f80_8001), 0x3f81),
            (f32::MAX, 0x7f80),
            (f32::INFINITY, 0x7f80),
            (f32::NEG_INFINITY, 0xff80),
            (-0.0, 0x8000),
        ] {
            assert_eq!(bf16_bits(value), expected, "{value}");
            assert_eq!(half::bf16::from_f32(value).to_bits(), expected);
        }
        assert!(half::bf16::from_bits(bf16_bits(f32::NAN)).is_nan());
    }
}
