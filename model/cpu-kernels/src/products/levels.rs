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
#[cfg(target_arch = "x86_64")]
mod x86;

use super::panels::{GROUP_SCALE_BYTES, LINE_BYTES, PANEL, ROW_SCALE_BYTES};
use super::tile::TileArgs;
use baton_cpu_simd::CHAINS;
use baton_cpu_simd::{Isa, LANES, Portable, Simd};
use baton_model_spec::{IntegerFormat, IntegerWidth};

/// Prefetch distance in bytes.
const PREFETCH: usize = 4096;

/// Integer operations on sixteen lanes of i32, beside the f32 lanes of [`Simd`].
///
/// # Safety (of all methods)
/// As for [`Simd`]; `p` is valid for sixty-four bytes, or four for `activations`.
trait IntegerSimd {
    type Floats: Simd;
    /// A vector of sums.
    type I: Copy;
    /// Four levels for each of sixteen outputs.
    type Levels: Copy;
    /// Four activations, the same for all lanes.
    type Activations: Copy;
    /// Rows of the largest tile whose sums fit into registers.
    const ROWS: usize;
    /// Halves of a panel computed at a time: 2 or 1.
    const HALVES: usize;
    /// Whether `levels` subtracts the middle level, because only signed bytes are multiplied. `nibbles` does not.
    const IS_SIGNED: bool = false;

    unsafe fn splat(x: i32) -> Self::I;
    unsafe fn levels(p: *const u8) -> Self::Levels;
    /// The levels in the low nibbles and in the high ones.
    unsafe fn nibbles(p: *const u8) -> [Self::Levels; 2];
    unsafe fn activations(p: *const u8) -> Self::Activations;
    /// Adds the sum of four products to each lane.
    unsafe fn dot(sums: Self::I, levels: Self::Levels, activations: Self::Activations) -> Self::I;
    unsafe fn to_floats(sums: Self::I) -> <Self::Floats as Simd>::V;
    /// Adds the products of a group's `len` numbers to the sums of `R` rows and of `H` halves from `FIRST` on. Returns
    /// the addresses after the weights and the activations.
    #[inline(always)]
    unsafe fn add_group<const NIBBLES: bool, const R: usize, const H: usize, const FIRST: usize>(
        w: *const u8,
        a: *const u8,
        len: usize,
        sums: &mut [[Self::I; H]; R],
    ) -> (*const u8, *const u8)
    where
        Self: Sized,
    {
        // SAFETY: guaranteed by the caller.
        unsafe { add_lines::<Self, NIBBLES, R, H, FIRST>(w, a, len, sums) }
    }
}

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

/// Rows of the largest tile for `num_rows` rows.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) fn tile_rows(isa: Isa, num_rows: usize) -> usize {
    match IntegerIsa::of(isa) {
        // One tile streams the weights once and is faster than two, although some of its sums are in memory.
        #[cfg(target_arch = "x86_64")]
        IntegerIsa::Vnni if num_rows <= 2 * x86::Vnni::ROWS => 2 * x86::Vnni::ROWS,
        #[cfg(target_arch = "x86_64")]
        IntegerIsa::Vnni => x86::Vnni::ROWS,
        #[cfg(target_arch = "x86_64")]
        IntegerIsa::Avx2 => x86::Avx2Integers::ROWS,
        #[cfg(target_arch = "aarch64")]
        IntegerIsa::Matrices | IntegerIsa::Dots => neon::NeonIntegers::<true>::ROWS,
        IntegerIsa::Portable => Portable::ROWS,
    }
}

/// # Safety
/// As for [`TileArgs`].
pub(super) unsafe fn tile_kernel(isa: Isa, args: &TileArgs, format: IntegerFormat) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn vnni(args: &TileArgs, format: IntegerFormat) {
        // SAFETY: guaranteed by the caller.
        unsafe { tile::<x86::Vnni>(args, format) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(args: &TileArgs, format: IntegerFormat) {
        // SAFETY: guaranteed by the caller.
        unsafe { tile::<x86::Avx2Integers>(args, format) }
    }
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "dotprod,i8mm")]
    unsafe fn matrices(args: &TileArgs, format: IntegerFormat) {
        // SAFETY: guaranteed by the caller.
        unsafe { tile::<neon::NeonIntegers<true>>(args, format) }
    }
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "dotprod")]
    unsafe fn dots(args: &TileArgs, format: IntegerFormat) {
        // SAFETY: guaranteed by the caller.
        unsafe { tile::<neon::NeonIntegers<false>>(args, format) }
    }
    // SAFETY: an instruction set is only selected if the CPU has it; the rest is guaranteed by the caller.
    unsafe {
        match IntegerIsa::of(isa) {
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Vnni => vnni(args, format),
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx2 => avx2(args, format),
            #[cfg(target_arch = "aarch64")]
            IntegerIsa::Matrices => matrices(args, format),
            #[cfg(target_arch = "aarch64")]
            IntegerIsa::Dots => dots(args, format),
            IntegerIsa::Portable => tile::<Portable>(args, format),
        }
    }
}

/// A loop of products alone, for measuring the peak rate.
///
/// # Safety
/// The instruction set must be present.
pub unsafe fn integers_loop(isa: Isa, rounds: usize) -> f32 {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn vnni(rounds: usize) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { products::<x86::Vnni>(rounds) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2(rounds: usize) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { products::<x86::Avx2Integers>(rounds) }
    }
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "dotprod")]
    unsafe fn dots(rounds: usize) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { products::<neon::NeonIntegers<false>>(rounds) }
    }
    // SAFETY: an instruction set is only selected if the CPU has it.
    unsafe {
        match IntegerIsa::of(isa) {
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Vnni => vnni(rounds),
            #[cfg(target_arch = "x86_64")]
            IntegerIsa::Avx2 => avx2(rounds),
            #[cfg(target_arch = "aarch64")]
            IntegerIsa::Matrices | IntegerIsa::Dots => dots(rounds),
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
        let (levels, activations) = (S::levels(bytes.as_ptr()), S::activations(bytes.as_ptr()));
        for _ in 0..rounds {
            for i in 0..CHAINS {
                sums[i] = S::dot(sums[i], levels, activations);
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
unsafe fn tile<S: IntegerSimd>(args: &TileArgs, format: IntegerFormat) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (format.width, format.has_zeros) {
            (IntegerWidth::Eight, false) => tile_of::<S, false, false>(args, format),
            (IntegerWidth::Eight, true) => tile_of::<S, false, true>(args, format),
            (IntegerWidth::Four, false) => tile_of::<S, true, false>(args, format),
            (IntegerWidth::Four, true) => tile_of::<S, true, true>(args, format),
        }
    }
}

#[inline(always)]
unsafe fn tile_of<S: IntegerSimd, const NIBBLES: bool, const ZEROS: bool>(
    args: &TileArgs,
    format: IntegerFormat,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if S::HALVES == 2 {
            match args.rows {
                1 => panels::<S, NIBBLES, ZEROS, 1, 2>(args, format),
                2 => panels::<S, NIBBLES, ZEROS, 2, 2>(args, format),
                4 => panels::<S, NIBBLES, ZEROS, 4, 2>(args, format),
                6 => panels::<S, NIBBLES, ZEROS, 6, 2>(args, format),
                8 => panels::<S, NIBBLES, ZEROS, 8, 2>(args, format),
                10 => panels::<S, NIBBLES, ZEROS, 10, 2>(args, format),
                _ => panels::<S, NIBBLES, ZEROS, 12, 2>(args, format),
            }
        } else {
            match args.rows {
                1 => panels::<S, NIBBLES, ZEROS, 1, 1>(args, format),
                4 if S::ROWS >= 4 => panels::<S, NIBBLES, ZEROS, 4, 1>(args, format),
                _ => panels::<S, NIBBLES, ZEROS, 2, 1>(args, format),
            }
        }
    }
}

#[inline(always)]
unsafe fn panels<S: IntegerSimd, const NIBBLES: bool, const ZEROS: bool, const R: usize, const H: usize>(
    args: &TileArgs,
    format: IntegerFormat,
) {
    for panel in 0..args.panels {
        // SAFETY: panel indices are below their number.
        unsafe {
            one_tile::<S, NIBBLES, ZEROS, R, H, 0>(args, format, panel);
            if H == 1 {
                one_tile::<S, NIBBLES, ZEROS, R, H, 1>(args, format, panel);
            }
        }
    }
}

/// Multiplies `R` rows with `H` halves, from `FIRST` on, of a panel.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn one_tile<
    S: IntegerSimd,
    const NIBBLES: bool,
    const ZEROS: bool,
    const R: usize,
    const H: usize,
    const FIRST: usize,
>(
    args: &TileArgs,
    format: IntegerFormat,
    panel: usize,
) {
    // SAFETY: weights and activations are packed as `panels` and `left` say; a prefetched address need not be valid.
    unsafe {
        let row_scales = args.w.add(panel * args.panel_bytes);
        let mut w = row_scales.add(ROW_SCALE_BYTES);
        let mut a = args.a;
        let num_groups = args.k.div_ceil(format.group);
        // Lines to prefetch with each group.
        let ahead_lines = args.ahead.len().div_ceil(64 * args.panels * num_groups);
        let mut ahead = args.ahead.as_ptr().wrapping_add(panel * num_groups * ahead_lines * 64);
        let mut sums = [[S::Floats::splat(0.0); H]; R];
        let mut left = args.k;
        while left > 0 {
            let mut shared_left =
                if left < format.activation_group() { left } else { format.activation_group() };
            left -= shared_left;
            let mut shared = [[S::Floats::splat(0.0); H]; R];
            let scales = a.cast::<f32>();
            a = a.add(4 * R);
            while shared_left > 0 {
                let len = if shared_left < format.group { shared_left } else { format.group };
                shared_left -= len;
                let weight_scales = w.cast::<u16>();
                // Points to the scales if there are no zero points; it is not read then.
                let zeros = weight_scales.add(if ZEROS { PANEL } else { 0 });
                w = w.add(GROUP_SCALE_BYTES * if ZEROS { 2 } else { 1 });
                for _ in 0..ahead_lines {
                    S::Floats::prefetch_for_later(ahead);
                    ahead = ahead.wrapping_add(64);
                }
                let activation_sums = a;
                a = a.add(4 * R);

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
                (w, a) = S::add_group::<NIBBLES, R, H, FIRST>(w, a, len, &mut group_sums);
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

/// As [`IntegerSimd::add_group`], one line of a panel at a time.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn add_lines<
    S: IntegerSimd,
    const NIBBLES: bool,
    const R: usize,
    const H: usize,
    const FIRST: usize,
>(
    mut w: *const u8,
    mut a: *const u8,
    len: usize,
    sums: &mut [[S::I; H]; R],
) -> (*const u8, *const u8) {
    // SAFETY: the group has these lines; a prefetched address need not be valid.
    unsafe {
        for _ in 0..len.div_ceil(if NIBBLES { 8 } else { 4 }) {
            for h in 0..H {
                S::Floats::prefetch(w.wrapping_add(PREFETCH + h * 64));
            }
            if NIBBLES {
                let mut halves = [S::nibbles(w.add(FIRST * 64)); H];
                for h in 1..H {
                    halves[h] = S::nibbles(w.add((FIRST + h) * 64));
                }
                for part in 0..2 {
                    for r in 0..R {
                        let x = S::activations(a.add((part * R + r) * 4));
                        for h in 0..H {
                            sums[r][h] = S::dot(sums[r][h], halves[h][part], x);
                        }
                    }
                }
                a = a.add(8 * R);
            } else {
                let mut halves = [S::levels(w.add(FIRST * 64)); H];
                for h in 1..H {
                    halves[h] = S::levels(w.add((FIRST + h) * 64));
                }
                for r in 0..R {
                    let x = S::activations(a.add(r * 4));
                    for h in 0..H {
                        sums[r][h] = S::dot(sums[r][h], halves[h], x);
                    }
                }
                a = a.add(4 * R);
            }
            w = w.add(LINE_BYTES);
        }
    }
    (w, a)
}

// SAFETY of the blocks below: the trait's contract, for each instruction.
#[allow(clippy::undocumented_unsafe_blocks)]
impl IntegerSimd for Portable {
    type Floats = Portable;
    type I = [i32; LANES];
    type Levels = [[u8; 4]; LANES];
    type Activations = [i8; 4];
    const ROWS: usize = 2;
    const HALVES: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn levels(p: *const u8) -> Self::Levels {
        unsafe { p.cast::<Self::Levels>().read() }
    }
    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [Self::Levels; 2] {
        let both = unsafe { p.cast::<Self::Levels>().read() };
        [both.map(|four| four.map(|byte| byte & 15)), both.map(|four| four.map(|byte| byte >> 4))]
    }
    #[inline(always)]
    unsafe fn activations(p: *const u8) -> Self::Activations {
        unsafe { p.cast::<[i8; 4]>().read() }
    }
    #[inline(always)]
    unsafe fn dot(sums: Self::I, levels: Self::Levels, activations: Self::Activations) -> Self::I {
        std::array::from_fn(|lane| {
            let products = levels[lane].iter().zip(activations).map(|(w, x)| i32::from(*w) * i32::from(x));
            sums[lane] + products.sum::<i32>()
        })
    }
    #[inline(always)]
    unsafe fn to_floats(sums: Self::I) -> [f32; LANES] {
        sums.map(|sum| sum as f32)
    }
}
