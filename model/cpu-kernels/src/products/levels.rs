//! Products of integers: quantised weights times activations that are quantised to eight bits.
//!
//! Within a group sums are exact with all instruction sets. A group's sum is converted to f32, its zero point is
//! subtracted, and it is added with the weights' scale to the sum of the groups whose activations share a scale. That
//! sum is added with the activations' scale to the row's sum. All additions are in the order of K:
//!
//! ```text
//! shared = fma(group_sum - zero * activation_sum, weight_scale, shared)
//! sum    = fma(shared, activation_scale, sum)
//! ```
//! So results do not depend on tiles, on threads, or on the choice between AVX-512, AVX2 and NEON.

#[cfg(target_arch = "aarch64")]
mod neon;
mod operations;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::left::LeftKind;
use super::panels::{
    GROUP_SCALE_BYTES, LINE_BYTES, PANEL, PanelFormat, ROW_SCALE_BYTES, group_head_bytes, per_line,
};
use super::slabs::{Block, Order, SLAB};
use super::tile::{FAR, Part, TileArgs};
use baton_cpu_simd::{CHAINS, Isa, LANES, Portable, Simd};
use baton_model_spec::{IntegerFormat, IntegerWidth};
use operations::{IntegerSimd, Place};

/// The instruction sets of integer kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IntegerIsa {
    #[cfg(target_arch = "x86_64")]
    Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON with `sdot` and `smmla`.
    #[cfg(target_arch = "aarch64")]
    Matrices,
    /// NEON with `sdot`.
    #[cfg(target_arch = "aarch64")]
    Dots,
    Portable,
}

impl IntegerIsa {
    fn of(isa: Isa) -> IntegerIsa {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => IntegerIsa::Vnni,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if is_x86_feature_detected!("avx512vnni") => IntegerIsa::Vnni,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 | Isa::TileModel => IntegerIsa::Avx2,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::TileModel if std::arch::is_aarch64_feature_detected!("dotprod") => {
                if std::arch::is_aarch64_feature_detected!("i8mm") {
                    IntegerIsa::Matrices
                } else {
                    IntegerIsa::Dots
                }
            }
            _ => IntegerIsa::Portable,
        }
    }
}

/// Rows that AVX-512 multiplies in one tile: it reads the weights once and is faster than two.
#[cfg(target_arch = "x86_64")]
const ONLY_ROWS: usize = 12;

/// Rows of the largest tile for `num_rows` rows.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) fn tile_rows(isa: Isa, num_rows: usize) -> usize {
    match IntegerIsa::of(isa) {
        #[cfg(target_arch = "x86_64")]
        IntegerIsa::Vnni if num_rows <= ONLY_ROWS => ONLY_ROWS,
        #[cfg(target_arch = "x86_64")]
        IntegerIsa::Vnni => x86::Vnni::ROWS,
        #[cfg(target_arch = "x86_64")]
        IntegerIsa::Avx2 => x86::Avx2Integers::ROWS,
        #[cfg(target_arch = "aarch64")]
        IntegerIsa::Matrices | IntegerIsa::Dots => neon::NeonIntegers::<true>::ROWS,
        IntegerIsa::Portable => Portable::ROWS,
    }
}

/// Whether products of bytes take less time than those of nibbles, which are unsigned in both.
pub(super) fn reads_bytes_faster(isa: Isa) -> bool {
    match IntegerIsa::of(isa) {
        #[cfg(target_arch = "x86_64")]
        IntegerIsa::Vnni => true,
        _ => false,
    }
}

/// Tiles of rows from which on the order of slabs is faster.
const MIN_TILES: usize = 3;

/// The order of slabs for so many tiles of rows, if they are multiplied in it. Fused instructions of x86 need fewer
/// weights a second; they were not measured with it.
pub(super) fn order(isa: Isa, format: IntegerFormat, num_tiles: usize) -> Option<Order> {
    let rows = match IntegerIsa::of(isa) {
        #[cfg(target_arch = "x86_64")]
        IntegerIsa::Vnni => return None,
        _ => tile_rows(isa, usize::MAX),
    };
    let shared = format.activation_group();
    (num_tiles >= MIN_TILES).then(|| Order::of_vectors((SLAB / shared).max(1) * shared, rows))
}

/// Multiplies tiles of rows, one after the other.
///
/// # Safety
/// As for [`TileArgs`]; the CPU has `isa`.
pub(super) unsafe fn kernel(isa: Isa, block: &Block<'_>, format: IntegerFormat) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn vnni(block: &Block<'_>, format: IntegerFormat) {
        // SAFETY: guaranteed by the caller.
        unsafe { multiply::<x86::Vnni>(block, format) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(block: &Block<'_>, format: IntegerFormat) {
        // SAFETY: guaranteed by the caller.
        unsafe { multiply::<x86::Avx2Integers>(block, format) }
    }
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "dotprod,i8mm")]
    unsafe fn matrices(block: &Block<'_>, format: IntegerFormat) {
        // SAFETY: guaranteed by the caller.
        unsafe { multiply::<neon::NeonIntegers<true>>(block, format) }
    }
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "dotprod")]
    unsafe fn dots(block: &Block<'_>, format: IntegerFormat) {
        // SAFETY: guaranteed by the caller.
        unsafe { multiply::<neon::NeonIntegers<false>>(block, format) }
    }
    // SAFETY: the CPU has what `isa` says and what `IntegerIsa::of` asked for; the rest is guaranteed by the caller.
    unsafe {
        match IntegerIsa::of(isa) {
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Vnni => vnni(block, format),
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx2 => avx2(block, format),
            #[cfg(target_arch = "aarch64")]
            IntegerIsa::Matrices => matrices(block, format),
            #[cfg(target_arch = "aarch64")]
            IntegerIsa::Dots => dots(block, format),
            IntegerIsa::Portable => multiply::<Portable>(block, format),
        }
    }
}

/// Whether products of nibbles take other instructions than those of bytes, so that they have a peak rate of their own.
pub fn nibbles_differ(isa: Isa) -> bool {
    match IntegerIsa::of(isa) {
        #[cfg(target_arch = "x86_64")]
        IntegerIsa::Avx2 => true,
        _ => false,
    }
}

/// A loop of products of several rows with weights of this width alone, for measuring the peak rate.
///
/// # Safety
/// The instruction set must be present.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub unsafe fn integers_loop(isa: Isa, width: IntegerWidth, rounds: usize) -> f32 {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn vnni(rounds: usize) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { products::<x86::Vnni>(rounds) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(width: IntegerWidth, rounds: usize) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match width {
                IntegerWidth::Eight => products::<x86::Avx2Integers>(rounds),
                IntegerWidth::Four => x86::products_of_nibbles(rounds),
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "i8mm")]
    unsafe fn matrices(rounds: usize) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { neon::products_of_matrices(rounds) }
    }
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "dotprod")]
    unsafe fn dots(rounds: usize) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { products::<neon::NeonIntegers<false>>(rounds) }
    }
    // SAFETY: the CPU has what `isa` says and what `IntegerIsa::of` asked for.
    unsafe {
        match IntegerIsa::of(isa) {
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Vnni => vnni(rounds),
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx2 => avx2(width, rounds),
            #[cfg(target_arch = "aarch64")]
            IntegerIsa::Matrices => matrices(rounds),
            #[cfg(target_arch = "aarch64")]
            IntegerIsa::Dots => dots(rounds),
            IntegerIsa::Portable => products::<Portable>(rounds),
        }
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn products<S: IntegerSimd>(rounds: usize) -> f32 {
    let bytes = std::hint::black_box([0u8; 64]);
    // SAFETY: the array has as many bytes as are read.
    unsafe {
        let mut sums = [S::splat(0); CHAINS];
        let mut levels = S::levels(bytes.as_ptr());
        let mut activations = [S::activations(bytes.as_ptr()); CHAINS];
        if !S::IS_FUSED {
            for i in 1..CHAINS {
                activations[i] = S::activations(bytes.as_ptr().add(4 * i));
            }
        }
        // Sums that fit into registers.
        let num_sums = if S::IS_FUSED { CHAINS } else { S::ROWS };
        for _ in 0..rounds {
            if !S::IS_FUSED {
                // Not known to be the same each time: else only additions would be left in the loop.
                levels = S::levels(std::hint::black_box(bytes.as_ptr()));
            }
            for i in 0..CHAINS {
                sums[i % num_sums] = S::dot(sums[i % num_sums], levels, activations[i]);
            }
        }
        let mut all = S::to_floats(sums[0]);
        for i in 1..CHAINS {
            all = S::Floats::add(all, S::to_floats(sums[i]));
        }
        S::Floats::sum(all)
    }
}

#[inline(always)]
unsafe fn multiply<S: IntegerSimd>(block: &Block<'_>, format: IntegerFormat) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (format.width, format.has_zeros) {
            (IntegerWidth::Eight, false) => tiles::<S, false, false>(block, format),
            (IntegerWidth::Eight, true) => tiles::<S, false, true>(block, format),
            (IntegerWidth::Four, false) => tiles::<S, true, false>(block, format),
            (IntegerWidth::Four, true) => tiles::<S, true, true>(block, format),
        }
    }
}

#[inline(always)]
unsafe fn tiles<S: IntegerSimd, const NIBBLES: bool, const ZEROS: bool>(
    block: &Block<'_>,
    format: IntegerFormat,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let columns = block.end - block.first;
        let mut ahead = block.ahead(PanelFormat::Integers(format).panel_bytes(columns) - ROW_SCALE_BYTES);
        for args in block.rows {
            ahead.prefetch_step::<S::Floats>();
            tile::<S, NIBBLES, ZEROS>(args, format, &block.part_of(args));
        }
    }
}

/// Multiplies a tile of rows with a part of its panels.
#[inline(always)]
unsafe fn tile<S: IntegerSimd, const NIBBLES: bool, const ZEROS: bool>(
    args: &TileArgs,
    format: IntegerFormat,
    part: &Part,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if S::HALVES == 2 {
            match args.rows {
                1 if args.is_only && S::reads_far() => {
                    panels::<S, NIBBLES, ZEROS, 1, 2, FAR_LINES>(args, format, part)
                }
                1 if args.is_only => panels::<S, NIBBLES, ZEROS, 1, 2, NO_LINES>(args, format, part),
                1 => panels::<S, NIBBLES, ZEROS, 1, 2, ANY_LINES>(args, format, part),
                2 => panels::<S, NIBBLES, ZEROS, 2, 2, ANY_LINES>(args, format, part),
                4 => panels::<S, NIBBLES, ZEROS, 4, 2, ANY_LINES>(args, format, part),
                6 => panels::<S, NIBBLES, ZEROS, 6, 2, ANY_LINES>(args, format, part),
                8 => panels::<S, NIBBLES, ZEROS, 8, 2, ANY_LINES>(args, format, part),
                10 => panels::<S, NIBBLES, ZEROS, 10, 2, ANY_LINES>(args, format, part),
                _ => panels::<S, NIBBLES, ZEROS, 12, 2, ANY_LINES>(args, format, part),
            }
        } else {
            match args.rows {
                1 => panels::<S, NIBBLES, ZEROS, 1, 1, ANY_LINES>(args, format, part),
                4 if S::ROWS >= 4 => panels::<S, NIBBLES, ZEROS, 4, 1, ANY_LINES>(args, format, part),
                _ => panels::<S, NIBBLES, ZEROS, 2, 1, ANY_LINES>(args, format, part),
            }
        }
    }
}

/// With each line of weights no other line is prefetched for later.
const NO_LINES: usize = 0;
/// With each line of weights both halves of the line that is [`FAR`] ahead are prefetched.
const FAR_LINES: usize = 2;
/// The arguments say for each group what is prefetched. Where one row alone is multiplied, in groups of 32, that takes 4 % of
/// the time.
const ANY_LINES: usize = usize::MAX;

#[inline(always)]
unsafe fn panels<
    S: IntegerSimd,
    const NIBBLES: bool,
    const ZEROS: bool,
    const R: usize,
    const H: usize,
    const AHEAD: usize,
>(
    args: &TileArgs,
    format: IntegerFormat,
    part: &Part,
) {
    for panel in 0..args.panels {
        // SAFETY: panel indices are below their number.
        unsafe {
            one_tile::<S, NIBBLES, ZEROS, R, H, 0, AHEAD>(args, format, panel, part);
            if H == 1 {
                one_tile::<S, NIBBLES, ZEROS, R, H, 1, AHEAD>(args, format, panel, part);
            }
        }
    }
}

/// Multiplies `R` rows with `H` halves, from `FIRST` on, of a panel, and prefetches `AHEAD` lines; a part has whole activation groups.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn one_tile<
    S: IntegerSimd,
    const NIBBLES: bool,
    const ZEROS: bool,
    const R: usize,
    const H: usize,
    const FIRST: usize,
    const AHEAD: usize,
>(
    args: &TileArgs,
    format: IntegerFormat,
    panel: usize,
    part: &Part,
) {
    // SAFETY: weights and activations are packed as `panels` and `left` say; a prefetched address need not be valid.
    unsafe {
        let row_scales = args.w.add(panel * args.panel_bytes);
        // Lines to prefetch along the panel, one with each line of weights, so in the first groups.
        let passes = 2 / H;
        let num_ahead = args.ahead.1.div_ceil(64 * args.panels * passes);
        let mut ahead_groups = num_ahead.div_ceil(format.group.div_ceil(if NIBBLES { 8 } else { 4 }));
        let groups_before = part.first / format.group;
        let group_bytes =
            group_head_bytes(format) + format.group.div_ceil(per_line(format.width)) * LINE_BYTES;
        let mut at = Place {
            w: row_scales.add(ROW_SCALE_BYTES + groups_before * group_bytes + FIRST * 64),
            a: args.a.add(R * LeftKind::Levels(format).bytes_before(part.first)),
            ahead: args.ahead.0.wrapping_add((panel * passes + FIRST) * num_ahead * 64),
        };
        let mut sums = [[S::Floats::splat(0.0); H]; R];
        if part.first > 0 {
            for r in 0..R {
                for h in 0..H {
                    sums[r][h] = S::Floats::load(part.sums_of(r, FIRST + h));
                }
            }
        }
        let mut left = part.end - part.first;
        while left > 0 {
            let mut shared_left =
                if left < format.activation_group() { left } else { format.activation_group() };
            left -= shared_left;
            let mut shared = [[S::Floats::splat(0.0); H]; R];
            let scales = at.a.cast::<f32>();
            at.a = at.a.add(4 * R);
            while shared_left > 0 {
                let len = if shared_left < format.group { shared_left } else { format.group };
                shared_left -= len;
                let weight_scales = at.w.sub(FIRST * 64).cast::<u16>();
                // Points to the scales if there are no zero points; it is not read then.
                let zeros = weight_scales.add(if ZEROS { PANEL } else { 0 });
                at.w = at.w.add(GROUP_SCALE_BYTES * if ZEROS { 2 } else { 1 });
                let activation_sums = at.a;
                at.a = at.a.add(4 * R);

                let mut group_sums = [[S::splat(0); H]; R];
                for r in 0..R {
                    if S::IS_SIGNED && !NIBBLES {
                        // Levels come without the middle. With zero points its share of the sum is added again.
                        if ZEROS {
                            let sum = activation_sums.cast::<f32>().add(r).read_unaligned() as i32;
                            group_sums[r] = [S::splat(sum * i32::from(IntegerWidth::Eight.middle())); H];
                        }
                    } else if !ZEROS {
                        group_sums[r] = [S::splat(activation_sums.cast::<i32>().add(r).read_unaligned()); H];
                    }
                }
                at = if AHEAD == NO_LINES {
                    S::add_group::<NIBBLES, NO_LINES, R, H>(at, len, &mut group_sums)
                } else if AHEAD == FAR_LINES || (args.is_only && H == 2) {
                    at.ahead = at.w.wrapping_add(FAR);
                    S::add_group::<NIBBLES, FAR_LINES, R, H>(at, len, &mut group_sums)
                } else if ahead_groups > 0 {
                    ahead_groups -= 1;
                    S::add_group::<NIBBLES, 1, R, H>(at, len, &mut group_sums)
                } else {
                    S::add_group::<NIBBLES, 0, R, H>(at, len, &mut group_sums)
                };
                for h in 0..H {
                    let weight_scale = S::Floats::load_f16(weight_scales.add((FIRST + h) * LANES));
                    let zero = S::Floats::load_f16(zeros.add((FIRST + h) * LANES));
                    for r in 0..R {
                        let mut sum = S::to_floats(group_sums[r][h]);
                        if ZEROS {
                            let minus =
                                S::Floats::splat(-activation_sums.cast::<f32>().add(r).read_unaligned());
                            sum = S::Floats::fma(zero, minus, sum);
                        }
                        shared[r][h] = S::Floats::fma(sum, weight_scale, shared[r][h]);
                    }
                }
            }
            for r in 0..R {
                let scale = S::Floats::splat(scales.add(r).read_unaligned());
                for h in 0..H {
                    sums[r][h] = S::Floats::fma(shared[r][h], scale, sums[r][h]);
                }
            }
        }
        if part.end < args.k {
            for r in 0..R {
                for h in 0..H {
                    S::Floats::store(part.sums_of(r, FIRST + h), sums[r][h]);
                }
            }
            return;
        }
        for h in 0..H {
            let row_scale = S::Floats::load(row_scales.cast::<f32>().add((FIRST + h) * LANES));
            for r in 0..R {
                if r < args.real_rows {
                    args.finish::<S::Floats>(r, panel, FIRST + h, S::Floats::mul(sums[r][h], row_scale));
                }
            }
        }
    }
}
