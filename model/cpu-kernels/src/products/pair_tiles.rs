//! Products of bf16 with bf16 in tiles.
//!
//! A panel of pairs is stored as tiles want it: sixteen lines of a panel are two tiles of weights, one for each half.
//! Two tiles of rows and those two give four tiles of sums. All rows of a matrix are multiplied so, few or many:
//! a step of 32 numbers of K adds its even products and its odd ones to one sum each, and both to the sum of the slab
//! ([`Tiles::dot_bf16`]), which no other instruction does. Slabs are added one after the other.
//!
//! Integers in small groups are multiplied so, too ([`widened`](super::widened)): a sum of integers for each group would
//! cost more than its products. The first tile of rows widens a slab as it comes to it.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only x86-64 has tiles

use super::panels::{LINE_BYTES, PAIR_STEP as STEP, PANEL};
use super::slabs::{Ahead, Block, SLAB, SUMS, store_sums, zero_sums};
use super::tile::{Output, TileArgs};
use super::widened::{Group, UNCUT, Widened};
use baton_cpu_simd::tile_kernel;
use baton_cpu_simd::tiles::{ROW_BYTES, ROWS, TileUse, Tiles};
use baton_cpu_simd::{LANES, Simd};
use baton_model_spec::{IntegerFormat, IntegerWidth};

const _: () = assert!(STEP == ROW_BYTES / 2);
/// Bytes of a panel in a step.
const STEP_BYTES: usize = STEP * PANEL * 2;

/// Numbers of the kernel's memory: the products of a slab, and a widened slab.
pub(super) const SCRATCH: usize = SUMS + SLAB * PANEL / 2;
/// Steps that are widened before they are multiplied, so that stored lines have reached the cache.
const WIDENED_AHEAD: usize = 3;
/// Prefetch distance of integers, in bytes.
const PREFETCH: usize = 2048;

tile_kernel! {
    /// Multiplies tiles of rows with a block of one panel of pairs.
    ///
    /// # Safety
    /// As for [`TileArgs`]; the memory has the size of the block.
    pub(super) fn kernel / of_pairs (shapes: &mut TileUse, block: &Block<'_>)
}

tile_kernel! {
    /// As [`kernel`], with a panel of integers.
    ///
    /// # Safety
    /// As for [`TileArgs`]; the memory has the size of the block.
    pub(super) fn integers_kernel / of_integers (shapes: &mut TileUse, block: &Block<'_>, format: IntegerFormat)
}

#[inline(always)]
unsafe fn of_pairs<S: Simd, T: Tiles>(tiles: &mut T, shapes: &mut TileUse, block: &Block<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe { product::<S, T, Stored>(tiles, shapes, block, &Stored) }
}

#[inline(always)]
unsafe fn of_integers<S: Simd, T: Tiles>(
    tiles: &mut T,
    shapes: &mut TileUse,
    block: &Block<'_>,
    format: IntegerFormat,
) {
    let widened = Widened::new(format);
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (format.width, format.has_zeros) {
            (IntegerWidth::Eight, false) => {
                product::<S, T, _>(tiles, shapes, block, &OfWidth::<false, false>(widened))
            }
            (IntegerWidth::Eight, true) => {
                product::<S, T, _>(tiles, shapes, block, &OfWidth::<false, true>(widened))
            }
            (IntegerWidth::Four, false) => {
                product::<S, T, _>(tiles, shapes, block, &OfWidth::<true, false>(widened))
            }
            (IntegerWidth::Four, true) => {
                product::<S, T, _>(tiles, shapes, block, &OfWidth::<true, true>(widened))
            }
        }
    }
}

/// Where a panel's pairs of bf16 come from.
trait Source {
    /// Whether they are widened from other numbers, and rows have a scale.
    const WIDENS: bool;
    /// Bytes of the panel before a step.
    fn offset(&self, step: usize) -> usize;
    /// Widens a step to `[16][32][2]` bf16.
    ///
    /// # Safety
    /// The panel has the step.
    unsafe fn widen<S: Simd>(&self, args: &TileArgs, step: usize, to: *mut u8);
}

/// The panel holds them.
struct Stored;

impl Source for Stored {
    const WIDENS: bool = false;
    #[inline(always)]
    fn offset(&self, step: usize) -> usize {
        step * STEP_BYTES
    }
    #[inline(always)]
    unsafe fn widen<S: Simd>(&self, _args: &TileArgs, _step: usize, _to: *mut u8) {}
}

/// The panel holds integers.
struct OfWidth<const FOUR: bool, const ZEROS: bool>(Widened);

impl<const FOUR: bool, const ZEROS: bool> Source for OfWidth<FOUR, ZEROS> {
    const WIDENS: bool = true;
    #[inline(always)]
    fn offset(&self, step: usize) -> usize {
        self.0.offset(step * STEP)
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
    unsafe fn widen<S: Simd>(&self, args: &TileArgs, step: usize, to: *mut u8) {
        let per_line = if FOUR { 8 } else { 4 };
        let left = args.k - step * STEP;
        let num_lines = if left < STEP { left.div_ceil(per_line) } else { STEP / per_line };
        // SAFETY: the panel has the group and these lines; the memory has room for a step.
        unsafe {
            let head = args.w.add(self.0.head(step * STEP));
            let from = args.w.add(self.offset(step) + self.0.head_bytes);
            // All words are loaded first: a load waits for earlier stores with the same lower twelve bits of the address.
            let mut words = [[[0u32; LANES]; STEP / 4]; 2];
            for half in 0..2 {
                for line in 0..STEP / per_line {
                    if line < num_lines {
                        let from = from.add(line * LINE_BYTES + half * ROW_BYTES);
                        S::prefetch(from.wrapping_add(PREFETCH));
                        words[half][line] = from.cast::<[u32; LANES]>().read_unaligned();
                    }
                }
            }
            for half in 0..2 {
                let group = Group::load::<S, FOUR, ZEROS>(head, half);
                let mut to = to.add(half * ROW_BYTES);
                for line in 0..STEP / per_line {
                    for pair in 0..per_line / 2 {
                        let [even, odd] = group.pair::<FOUR>(&words[half][line], pair);
                        let mut pairs = [0u32; LANES];
                        for i in 0..LANES {
                            pairs[i] = even[i].to_bits() >> 16 | odd[i].to_bits();
                        }
                        to.cast::<[u32; LANES]>().write_unaligned(pairs);
                        to = to.add(2 * ROW_BYTES);
                    }
                }
            }
        }
    }
}

/// Products of a tile with a slab, whose rows are yet to be added to the sums.
struct Pending<'a> {
    args: &'a TileArgs,
    products: *const f32,
    sums: *mut f32,
    is_first: bool,
    is_last: bool,
    /// The next row.
    row: usize,
}

impl Pending<'_> {
    /// Adds the next rows, and writes the output after the last slab.
    #[inline(always)]
    unsafe fn add<S: Simd, W: Source>(&mut self, num: usize) {
        let end = if self.row + num < self.args.real_rows { self.row + num } else { self.args.real_rows };
        while self.row < end {
            let at = self.row * PANEL;
            // SAFETY: rows and columns are in range.
            unsafe {
                let mut sums = [S::load(self.products.add(at)), S::load(self.products.add(at + LANES))];
                if !self.is_first {
                    sums[0] = S::add(S::load(self.sums.add(at)), sums[0]);
                    sums[1] = S::add(S::load(self.sums.add(at + LANES)), sums[1]);
                }
                if W::WIDENS && self.is_last {
                    let scales = self.args.w.cast::<f32>();
                    sums[0] = S::mul(S::mul(sums[0], S::splat(UNCUT)), S::load(scales));
                    sums[1] = S::mul(S::mul(sums[1], S::splat(UNCUT)), S::load(scales.add(LANES)));
                }
                if !self.is_last {
                    S::store(self.sums.add(at), sums[0]);
                    S::store(self.sums.add(at + LANES), sums[1]);
                } else {
                    self.args.finish_row::<S>(self.row, sums);
                }
            }
            self.row += 1;
        }
    }
}

#[inline(always)]
unsafe fn product<S: Simd, T: Tiles, W: Source>(
    tiles: &mut T,
    shapes: &mut TileUse,
    block: &Block<'_>,
    source: &W,
) {
    let rows = block.rows;
    let mut pending = Pending {
        args: &rows[0],
        products: block.scratch,
        sums: block.sums,
        is_first: true,
        is_last: true,
        row: usize::MAX / 2,
    };
    let mut first = block.first;
    while first < block.end {
        let end = if first + SLAB < block.end { first + SLAB } else { block.end };
        for (idx, args) in rows.iter().enumerate() {
            let slab = Slab {
                args,
                first: first / STEP,
                end: end.div_ceil(STEP),
                is_last: end == args.k,
                next: if end < block.end {
                    args.w.wrapping_add(source.offset(end / STEP))
                } else {
                    block.next
                },
            };
            // SAFETY: guaranteed by the caller.
            unsafe {
                shapes.set(tiles, args.rows, ROW_BYTES);
                match (args.rows > ROWS, rows.len() > 1) {
                    (false, false) => {
                        multiply::<S, T, W, false, false>(tiles, source, &slab, block, &mut pending)
                    }
                    (false, true) => {
                        multiply::<S, T, W, false, true>(tiles, source, &slab, block, &mut pending)
                    }
                    (true, false) => {
                        multiply::<S, T, W, true, false>(tiles, source, &slab, block, &mut pending)
                    }
                    (true, true) => {
                        multiply::<S, T, W, true, true>(tiles, source, &slab, block, &mut pending)
                    }
                }
                pending = Pending {
                    args,
                    products: block.scratch,
                    sums: block.sums.add(idx * SUMS),
                    is_first: first == 0,
                    is_last: slab.is_last,
                    row: 0,
                };
            }
        }
        first = end;
    }
    // SAFETY: as above.
    unsafe { pending.add::<S, W>(pending.args.rows) }
}

/// A tile of rows and a slab of a panel.
struct Slab<'a> {
    args: &'a TileArgs,
    /// Steps along K.
    first: usize,
    end: usize,
    /// Whether it ends with the last column.
    is_last: bool,
    /// The weights of the next slab.
    next: *const u8,
}

/// Multiplies a tile of rows with a slab, while the products before are added.
///
/// `TWO`: the rows need two tile registers. `MANY`: of several tiles of rows, which pass while the slab stays in the
/// first-level cache. With one tile rows stay there.
#[inline(always)]
unsafe fn multiply<S: Simd, T: Tiles, W: Source, const TWO: bool, const MANY: bool>(
    tiles: &mut T,
    source: &W,
    slab: &Slab<'_>,
    block: &Block<'_>,
    pending: &mut Pending<'_>,
) {
    let args = slab.args;
    let step_bytes = args.rows * ROW_BYTES;
    let num_steps = slab.end - slab.first;
    // Vectors that load what tiles have just stored would wait.
    let delay = num_steps / 4;
    let pending_rows = pending.args.real_rows.div_ceil(num_steps - delay);
    let bytes = source.offset(slab.end) - source.offset(slab.first);
    let bytes = if W::WIDENS && !MANY { 0 } else { bytes };
    let mut next = Ahead::new(slab.next, bytes, (args.idx, block.rows.len()), num_steps);
    // The rows of the next block: each of its slabs takes a part.
    let slab_rows =
        args.a.wrapping_add((block.end - block.first) / STEP * step_bytes + slab.first * step_bytes);
    let bytes = if block.end < args.k { num_steps * step_bytes } else { 0 };
    let mut next_rows = Ahead::new(slab_rows, bytes, block.part, num_steps);
    let mut out = args.out;
    // SAFETY: indices of steps and rows are in range; a prefetched address need not be valid.
    unsafe {
        let widened = block.scratch.add(SUMS).cast::<u8>();
        let mut w = if W::WIDENS { widened.cast_const() } else { args.w.add(slab.first * STEP_BYTES) };
        if W::WIDENS && args.idx == 0 {
            let num = if num_steps < WIDENED_AHEAD { num_steps } else { WIDENED_AHEAD };
            for step in 0..num {
                source.widen::<S>(args, slab.first + step, widened.add(step * STEP_BYTES));
            }
        }
        let mut a = args.a.add(slab.first * step_bytes);
        zero_sums::<T, TWO>(tiles);
        for step in 0..num_steps {
            if W::WIDENS && args.idx == 0 && step + WIDENED_AHEAD < num_steps {
                source.widen::<S>(
                    args,
                    slab.first + step + WIDENED_AHEAD,
                    w.add(WIDENED_AHEAD * STEP_BYTES).cast_mut(),
                );
            }
            next.prefetch::<S>();
            if MANY {
                next_rows.prefetch::<S>();
                tiles.load_once::<4>(a, ROW_BYTES);
            } else {
                tiles.load::<4>(a, ROW_BYTES);
            }
            tiles.load::<6>(w, 2 * ROW_BYTES);
            tiles.dot_bf16::<0, 4, 6>();
            next.prefetch::<S>();
            tiles.load::<7>(w.add(ROW_BYTES), 2 * ROW_BYTES);
            tiles.dot_bf16::<1, 4, 7>();
            next.prefetch::<S>();
            if step >= delay {
                pending.add::<S, W>(pending_rows);
            }
            if slab.is_last && (!args.streams || args.output == Output::Add) {
                for _ in 0..pending_rows {
                    S::prefetch_to_write(out);
                    S::prefetch_to_write(out.wrapping_add(LANES));
                    out = out.wrapping_add(args.out_stride);
                }
            }
            if TWO {
                if MANY {
                    tiles.load_once::<5>(a.add(ROWS * ROW_BYTES), ROW_BYTES);
                } else {
                    tiles.load::<5>(a.add(ROWS * ROW_BYTES), ROW_BYTES);
                }
                tiles.dot_bf16::<2, 5, 6>();
                tiles.dot_bf16::<3, 5, 7>();
            }
            next.prefetch::<S>();
            w = w.add(STEP_BYTES);
            a = a.add(step_bytes);
        }
        store_sums::<T, TWO>(tiles, block.scratch.cast());
    }
}
