//! Integers in registers of AVX-512 and AVX2.
#![allow(clippy::undocumented_unsafe_blocks)] // the trait's contract, instruction by instruction
#![allow(clippy::needless_range_loop)] // no closures around vectors, see `Simd`

use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::super::panels::LINE_BYTES;
use super::operations::{IntegerSimd, PREFETCH, Place, add_lines};
use baton_cpu_simd::{Avx2, Avx512, CHAINS, Simd};
use baton_model_spec::IntegerWidth;

/// Whether AMD made this CPU. Its cores read one row's weights fastest without prefetching far ahead, Intel's with it.
fn is_amd() -> bool {
    static AMD: OnceLock<bool> = OnceLock::new();
    *AMD.get_or_init(|| {
        let CpuidResult { ebx, ecx, edx, .. } = __cpuid(0);
        [ebx, edx, ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    })
}

/// AVX-512 with VNNI, which sums four products per instruction.
pub(super) struct Vnni;

impl IntegerSimd for Vnni {
    type Floats = Avx512;
    type I = __m512i;
    type Levels = __m512i;
    type Activations = __m512i;
    const ROWS: usize = 8;
    const HALVES: usize = 2;
    const IS_FUSED: bool = true;

    fn reads_far() -> bool {
        !is_amd()
    }

    #[inline(always)]
    unsafe fn splat(x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn levels(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [__m512i; 2] {
        unsafe {
            let both = _mm512_loadu_si512(p.cast());
            let mask = _mm512_set1_epi8(15);
            [_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask)]
        }
    }
    #[inline(always)]
    unsafe fn activations(p: *const u8) -> __m512i {
        unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn dot(sums: __m512i, levels: __m512i, activations: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sums, levels, activations) }
    }
    #[inline(always)]
    unsafe fn to_floats(sums: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
}

/// AVX2, which multiplies unsigned bytes with signed ones, and adds two products in 16 bits.
///
/// Levels of eight bits get the sign of their activations: `|w| x sign(w) x`. Two such products are at most 2 x 128 x 127, which 16
/// bits hold. Of nibbles they hold [`NIBBLE_LINES`] lines: 8 x 2 x 15 x 127.
pub(super) struct Avx2Integers;

/// Lines of nibbles whose products are added in 16 bits.
const NIBBLE_LINES: usize = 4;

impl IntegerSimd for Avx2Integers {
    type Floats = Avx2;
    /// Outputs 0 to 7 and 8 to 15.
    type I = (__m256i, __m256i);
    type Levels = (__m256i, __m256i);
    type Activations = __m256i;
    const ROWS: usize = 4;
    const HALVES: usize = 1;
    const IS_SIGNED: bool = true;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self::I {
        unsafe { (_mm256_set1_epi32(x), _mm256_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn levels(p: *const u8) -> Self::Levels {
        unsafe {
            let middle = _mm256_set1_epi8(IntegerWidth::Eight.middle() as i8);
            let (low, high) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast()));
            (_mm256_xor_si256(low, middle), _mm256_xor_si256(high, middle))
        }
    }
    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [Self::Levels; 2] {
        unsafe {
            let (low, high) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast()));
            let mask = _mm256_set1_epi8(15);
            let (next_low, next_high) = (_mm256_srli_epi16::<4>(low), _mm256_srli_epi16::<4>(high));
            [
                (_mm256_and_si256(low, mask), _mm256_and_si256(high, mask)),
                (_mm256_and_si256(next_low, mask), _mm256_and_si256(next_high, mask)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn activations(p: *const u8) -> __m256i {
        unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn dot(sums: Self::I, levels: Self::Levels, x: __m256i) -> Self::I {
        unsafe { (add_products(sums.0, levels.0, x), add_products(sums.1, levels.1, x)) }
    }
    #[inline(always)]
    unsafe fn to_floats(sums: Self::I) -> (__m256, __m256) {
        unsafe { (_mm256_cvtepi32_ps(sums.0), _mm256_cvtepi32_ps(sums.1)) }
    }
    #[inline(always)]
    unsafe fn add_group<const NIBBLES: bool, const AHEAD: usize, const R: usize, const H: usize>(
        mut at: Place,
        len: usize,
        sums: &mut [[Self::I; H]; R],
    ) -> Place {
        unsafe {
            if !NIBBLES {
                return add_lines::<Self, false, AHEAD, R, H>(at, len, sums);
            }
            let mut left = len.div_ceil(8);
            while left > 0 {
                let num_lines = if left < NIBBLE_LINES { left } else { NIBBLE_LINES };
                left -= num_lines;
                let zero = _mm256_setzero_si256();
                let mut short = [[(zero, zero); H]; R];
                for _ in 0..num_lines {
                    let Place { w, a, .. } = at;
                    at.prefetch::<Avx2, AHEAD>();
                    for h in 0..H {
                        _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(PREFETCH + h * 64).cast());
                        let parts = Self::nibbles(w.add(h * 64));
                        for part in 0..2 {
                            for r in 0..R {
                                let x = Self::activations(a.add((part * R + r) * 4));
                                short[r][h] = add_nibbles(short[r][h], parts[part], x);
                            }
                        }
                    }
                    at.w = w.add(LINE_BYTES);
                    at.a = a.add(8 * R);
                }
                for r in 0..R {
                    for h in 0..H {
                        sums[r][h] = add_widened(sums[r][h], short[r][h]);
                    }
                }
            }
            at
        }
    }
}

/// The loop of products of nibbles: as many a round as of bytes, with sums in 16 bits that are widened as in a group.
///
/// # Safety
/// The instruction set must be present.
#[inline(always)]
pub(super) unsafe fn products_of_nibbles(rounds: usize) -> f32 {
    const ROWS: usize = Avx2Integers::ROWS;
    /// A line has two nibbles in each byte.
    const STEPS: usize = 2 * NIBBLE_LINES;
    const _: () = assert!(STEPS * ROWS == 2 * CHAINS, "two rounds between additions in 32 bits");
    let bytes = std::hint::black_box([0u8; 64]);
    unsafe {
        let zero = _mm256_setzero_si256();
        let mut activations = [zero; ROWS];
        for r in 0..ROWS {
            activations[r] = Avx2Integers::activations(bytes.as_ptr().add(4 * r));
        }
        let mut sums = [(zero, zero); ROWS];
        for _ in 0..rounds.div_ceil(2) {
            let mut short = [(zero, zero); ROWS];
            for _ in 0..STEPS {
                // Not known to be the same each time: else only additions would be left in the loop.
                let levels = std::hint::black_box(bytes.as_ptr());
                let low = _mm256_loadu_si256(levels.cast());
                let high = _mm256_loadu_si256(levels.add(32).cast());
                for r in 0..ROWS {
                    short[r] = add_nibbles(short[r], (low, high), activations[r]);
                }
            }
            for r in 0..ROWS {
                sums[r] = add_widened(sums[r], short[r]);
            }
        }
        let mut all = Avx2Integers::to_floats(sums[0]);
        for r in 1..ROWS {
            all = Avx2::add(all, Avx2Integers::to_floats(sums[r]));
        }
        Avx2::sum(all)
    }
}

/// Adds two products of nibbles to each of sixteen sums in 16 bits, of both halves.
#[inline(always)]
unsafe fn add_nibbles(
    sums: (__m256i, __m256i),
    levels: (__m256i, __m256i),
    x: __m256i,
) -> (__m256i, __m256i) {
    unsafe {
        let (low, high) = (_mm256_maddubs_epi16(levels.0, x), _mm256_maddubs_epi16(levels.1, x));
        (_mm256_add_epi16(sums.0, low), _mm256_add_epi16(sums.1, high))
    }
}

/// Adds sums in 16 bits to those in 32.
#[inline(always)]
unsafe fn add_widened(sums: (__m256i, __m256i), short: (__m256i, __m256i)) -> (__m256i, __m256i) {
    unsafe {
        let (low, high) = (widened(short.0), widened(short.1));
        (_mm256_add_epi32(sums.0, low), _mm256_add_epi32(sums.1, high))
    }
}

/// Adds four products to each of eight sums.
#[inline(always)]
unsafe fn add_products(sums: __m256i, levels: __m256i, x: __m256i) -> __m256i {
    unsafe {
        let products = _mm256_maddubs_epi16(_mm256_abs_epi8(levels), _mm256_sign_epi8(x, levels));
        _mm256_add_epi32(sums, widened(products))
    }
}

/// The sums of neighbours.
#[inline(always)]
unsafe fn widened(sums: __m256i) -> __m256i {
    unsafe { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) }
}
