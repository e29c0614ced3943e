//! Integers widened to bf16, where there are tiles, and their products with one or two rows.
//!
//! A level less the zero point, times the scale of its group, is cut to bf16. Activations are rounded to bf16. Sums are
//! multiplied by [`UNCUT`] and by the scale of the row. [`pair_tiles`](super::pair_tiles) multiplies many rows. With few,
//! vectors are faster, which add in the order of tiles: in a step of 32 numbers of K a chain of the even products and
//! one of the odd ones, each slab from zero. So both have the same bits, unless a sum is subnormal, which is zero in tiles.
//!
//! A level becomes a float without a conversion: its bits are put into the mantissa of a power of two, which the fused
//! multiply-add subtracts again.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only x86-64 has tiles

use super::panels::{LINE_BYTES, PAIR_STEP as STEP, PANEL, ROW_SCALE_BYTES, group_head_bytes, per_line};
use super::slabs::SLAB;
use super::tile::TileArgs;
use baton_cpu_simd::{LANES, Simd, kernel};
use baton_model_spec::{IntegerFormat, IntegerWidth};

/// Up to this number of rows, vectors are faster than tiles.
pub(super) const MAX_ROWS: usize = 2;
/// Prefetch distance in bytes.
const PREFETCH: usize = 2048;
/// What cutting a number to bf16 takes from it on average.
pub const UNCUT: f32 = 1.0 + 1.0 / 369.0;
/// Where a level's lowest bit may be in a word, and the power of two for which that bit is one.
const PLACES: [(u32, f32); 3] = [(8, 32768.0), (12, 2048.0), (16, 128.0)];
/// For each of eight numbers of a word of nibbles: the shift of the word to the left, or to the right if negative, and
/// the [place](PLACES) of the level then.
const NIBBLES: [(i32, usize); 8] = [(8, 0), (0, 0), (0, 2), (-12, 1), (8, 1), (0, 1), (-12, 0), (-12, 2)];
/// The same for each of four bytes.
const BYTES: [(i32, usize); 4] = [(8, 0), (0, 0), (-8, 0), (-16, 0)];

/// The places of the parts of a panel.
#[derive(Clone, Copy)]
pub(super) struct Widened {
    format: IntegerFormat,
    group_bytes: usize,
    /// Bytes of a group before its lines.
    pub(super) head_bytes: usize,
}

impl Widened {
    #[inline(always)]
    pub(super) fn new(format: IntegerFormat) -> Widened {
        let head_bytes = group_head_bytes(format);
        let group_bytes = head_bytes + format.group / per_line(format.width) * LINE_BYTES;
        Widened { format, group_bytes, head_bytes }
    }

    /// The scales of a column's group.
    #[inline(always)]
    pub(super) fn head(&self, column: usize) -> usize {
        ROW_SCALE_BYTES + column / self.format.group * self.group_bytes
    }

    /// A column's line, less [`head_bytes`](Self::head_bytes).
    #[inline(always)]
    pub(super) fn offset(&self, column: usize) -> usize {
        self.head(column) + column % self.format.group / per_line(self.format.width) * LINE_BYTES
    }
}

/// The scales of a group, for half a panel.
#[derive(Clone, Copy)]
pub(super) struct Group {
    scales: [f32; LANES],
    /// What is subtracted of a level at each place, times the scale.
    subtracted: [[f32; LANES]; PLACES.len()],
}

impl Group {
    /// # Safety
    /// `head` is that of a group.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
    pub(super) unsafe fn load<S: Simd, const FOUR: bool, const ZEROS: bool>(
        head: *const u8,
        half: usize,
    ) -> Group {
        let mut group = Group { scales: [0.0; LANES], subtracted: [[0.0; LANES]; PLACES.len()] };
        let mut zeros = [if FOUR { 8.0 } else { 128.0f32 }; LANES];
        // SAFETY: guaranteed by the caller.
        unsafe {
            let head = head.cast::<u16>().add(half * LANES);
            S::store(group.scales.as_mut_ptr(), S::load_f16(head));
            if ZEROS {
                S::store(zeros.as_mut_ptr(), S::load_f16(head.add(PANEL)));
            }
        }
        for place in 0..PLACES.len() {
            for i in 0..LANES {
                group.subtracted[place][i] = -(PLACES[place].1 + zeros[i]) * group.scales[i];
            }
        }
        group
    }

    /// Two neighbours along K, cut to bf16.
    #[inline(always)]
    pub(super) fn pair<const FOUR: bool>(&self, words: &[u32; LANES], pair: usize) -> [[f32; LANES]; 2] {
        let [mut even, mut odd] = [[0.0; LANES]; 2];
        let places = if FOUR {
            [NIBBLES[2 * pair], NIBBLES[2 * pair + 1]]
        } else {
            [BYTES[2 * pair], BYTES[2 * pair + 1]]
        };
        for i in 0..LANES {
            even[i] = self.cut(level::<FOUR>(words[i], places[0]), places[0].1, i);
            odd[i] = self.cut(level::<FOUR>(words[i], places[1]), places[1].1, i);
        }
        [even, odd]
    }

    #[inline(always)]
    fn cut(&self, level: f32, place: usize, i: usize) -> f32 {
        f32::from_bits(level.mul_add(self.scales[i], self.subtracted[place][i]).to_bits() & 0xffff_0000)
    }
}

/// A level of a word, plus the power of two of its place.
#[inline(always)]
fn level<const FOUR: bool>(word: u32, (shift, place): (i32, usize)) -> f32 {
    let word = if shift >= 0 { word << shift } else { word >> -shift };
    let (bit, power) = PLACES[place];
    let mask = if FOUR { 15 } else { 255 };
    f32::from_bits(word & mask << bit | power.to_bits())
}

/// Number `k` of a row as kernels widen it.
#[cfg(feature = "testing")]
pub fn cut(width: IntegerWidth, k: usize, level: u8, zero: f32, scale: f32) -> f32 {
    let (_, place) = if width == IntegerWidth::Four { NIBBLES[k % 8] } else { BYTES[k % 4] };
    let (_, power) = PLACES[place];
    let exact = (power + f32::from(level)).mul_add(scale, -(power + zero) * scale);
    f32::from_bits(exact.to_bits() & 0xffff_0000)
}

kernel! {
    /// # Safety
    /// As for [`TileArgs`], with up to [`MAX_ROWS`] rows.
    pub(super) fn tile_kernel / tile (args: &TileArgs, format: IntegerFormat)
}

#[inline(always)]
unsafe fn tile<S: Simd>(args: &TileArgs, format: IntegerFormat) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (format.width, format.has_zeros) {
            (IntegerWidth::Eight, false) => rows::<S, false, false>(args, format),
            (IntegerWidth::Eight, true) => rows::<S, false, true>(args, format),
            (IntegerWidth::Four, false) => rows::<S, true, false>(args, format),
            (IntegerWidth::Four, true) => rows::<S, true, true>(args, format),
        }
    }
}

#[inline(always)]
unsafe fn rows<S: Simd, const FOUR: bool, const ZEROS: bool>(args: &TileArgs, format: IntegerFormat) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if args.rows == 1 {
            panels::<S, FOUR, ZEROS, 1>(args, format);
        } else {
            panels::<S, FOUR, ZEROS, 2>(args, format);
        }
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn panels<S: Simd, const FOUR: bool, const ZEROS: bool, const R: usize>(
    args: &TileArgs,
    format: IntegerFormat,
) {
    let widened = Widened::new(format);
    let per_line = if FOUR { 8 } else { 4 };
    for panel in 0..args.panels {
        // SAFETY: indices of panels, rows and columns are in range; a prefetched address need not be valid.
        unsafe {
            let w = args.w.add(panel * args.panel_bytes);
            let mut a = args.a.cast::<f32>();
            let mut totals = [[S::splat(0.0); 2]; R];
            let mut sums = totals;
            let mut first = 0;
            while first < args.k {
                let mut chains = [[[S::splat(0.0); 2]; 2]; R];
                let head = w.add(widened.head(first));
                let groups = [Group::load::<S, FOUR, ZEROS>(head, 0), Group::load::<S, FOUR, ZEROS>(head, 1)];
                let from = w.add(widened.offset(first) + widened.head_bytes);
                let num_lines =
                    if args.k - first < STEP { (args.k - first).div_ceil(per_line) } else { STEP / per_line };
                for line in 0..STEP / per_line {
                    let from = from.wrapping_add(line * LINE_BYTES);
                    S::prefetch(from.wrapping_add(PREFETCH));
                    S::prefetch(from.wrapping_add(PREFETCH + 64));
                    for half in 0..2 {
                        let mut words = [0u32; LANES];
                        if line < num_lines {
                            words = from.add(half * 64).cast::<[u32; LANES]>().read_unaligned();
                        }
                        for pair in 0..per_line / 2 {
                            let both = groups[half].pair::<FOUR>(&words, pair);
                            for odd in 0..2 {
                                let weights = S::load(both[odd].as_ptr());
                                for r in 0..R {
                                    let x = S::splat(*a.add((line * per_line + 2 * pair + odd) * R + r));
                                    chains[r][half][odd] = S::fma(x, weights, chains[r][half][odd]);
                                }
                            }
                        }
                    }
                }
                a = a.add(STEP * R);
                let ends = (first + STEP).is_multiple_of(SLAB) || first + STEP >= args.k;
                for r in 0..R {
                    for half in 0..2 {
                        let chain = S::add(chains[r][half][0], chains[r][half][1]);
                        sums[r][half] = S::add(sums[r][half], chain);
                        if ends {
                            // The first slab is not added to anything.
                            let of_slab = sums[r][half];
                            totals[r][half] =
                                if first < SLAB { of_slab } else { S::add(totals[r][half], of_slab) };
                            sums[r][half] = S::splat(0.0);
                        }
                    }
                }
                first += STEP;
            }
            let scales = w.cast::<f32>();
            for r in 0..R {
                if r >= args.real_rows {
                    break;
                }
                for half in 0..2 {
                    let sum = S::mul(totals[r][half], S::splat(UNCUT));
                    args.finish::<S>(r, panel, half, S::mul(sum, S::load(scales.add(half * LANES))));
                }
            }
        }
    }
}
