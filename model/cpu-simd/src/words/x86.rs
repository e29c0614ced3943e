//! Words in registers of AVX-512 and AVX2.
#![allow(clippy::undocumented_unsafe_blocks)] // the trait's contract, instruction by instruction

use std::arch::x86_64::*;

use super::{LANES, Words};
use crate::stored::{E4M3_BITS, E4M3_SCALE};
use crate::x86::{Avx2, Avx512};

impl Words for Avx512 {
    #[inline(always)]
    unsafe fn transpose(r: [__m512; LANES]) -> [__m512; LANES] {
        unsafe {
            // Quarter `l` of `fours[4 q + j]` is column 4 l + j of rows 4 q to 4 q + 3.
            let mut fours = r;
            let mut q = 0;
            while q < LANES {
                let (a, b) = (_mm512_unpacklo_ps(r[q], r[q + 1]), _mm512_unpackhi_ps(r[q], r[q + 1]));
                let (c, d) = (_mm512_unpacklo_ps(r[q + 2], r[q + 3]), _mm512_unpackhi_ps(r[q + 2], r[q + 3]));
                fours[q] = low_pairs(a, c);
                fours[q + 1] = high_pairs(a, c);
                fours[q + 2] = low_pairs(b, d);
                fours[q + 3] = high_pairs(b, d);
                q += 4;
            }
            let mut columns = r;
            let mut j = 0;
            while j < 4 {
                let (a, b) = (even_quarters(fours[j], fours[4 + j]), odd_quarters(fours[j], fours[4 + j]));
                let (c, d) =
                    (even_quarters(fours[8 + j], fours[12 + j]), odd_quarters(fours[8 + j], fours[12 + j]));
                columns[j] = even_quarters(a, c);
                columns[4 + j] = even_quarters(b, d);
                columns[8 + j] = odd_quarters(a, c);
                columns[12 + j] = odd_quarters(b, d);
                j += 1;
            }
            columns
        }
    }
    #[inline(always)]
    unsafe fn unpack_bf16(words: __m512, idx: usize) -> __m512 {
        unsafe {
            let words = _mm512_castps_si512(words);
            _mm512_castsi512_ps(match idx {
                0 => _mm512_slli_epi32::<16>(words),
                _ => _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32)),
            })
        }
    }
    #[inline(always)]
    unsafe fn unpack_f16(words: __m512, idx: usize) -> __m512 {
        unsafe {
            let words = _mm512_castps_si512(words);
            let words = if idx == 0 { words } else { _mm512_srli_epi32::<16>(words) };
            _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))
        }
    }
    #[inline(always)]
    unsafe fn unpack_e4m3(words: __m512, idx: usize) -> __m512 {
        unsafe {
            let words = _mm512_srai_epi32::<4>(top_byte(words, idx));
            let bits = _mm512_and_si512(words, _mm512_set1_epi32(E4M3_BITS));
            _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(E4M3_SCALE))
        }
    }
    #[inline(always)]
    unsafe fn unpack_i8(words: __m512, idx: usize) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top_byte(words, idx))) }
    }
    #[inline(always)]
    unsafe fn dot_bf16(a: __m512, b: __m512, sums: __m512) -> __m512 {
        unsafe {
            let a = std::mem::transmute::<__m512, __m512bh>(a);
            let b = std::mem::transmute::<__m512, __m512bh>(b);
            _mm512_dpbf16_ps(sums, a, b)
        }
    }
    #[inline(always)]
    unsafe fn pack_bf16(lower: Self::V, upper: Self::V) -> Self::V {
        unsafe {
            let lower = _mm512_srli_epi32::<16>(_mm512_castps_si512(lower));
            _mm512_castsi512_ps(_mm512_or_si512(lower, _mm512_castps_si512(upper)))
        }
    }
    #[inline(always)]
    unsafe fn round_to_pairs(lower: __m512, upper: __m512) -> __m512 {
        unsafe {
            let half = _mm512_set1_epi32(0x8000);
            let lower = _mm512_add_epi32(_mm512_castps_si512(lower), half);
            let upper = _mm512_add_epi32(_mm512_castps_si512(upper), half);
            // The compiler would make a permutation of 16-bit numbers of it, which takes three times as long.
            let words = _mm512_ternarylogic_epi32::<0xf8>(
                _mm512_srli_epi32::<16>(lower),
                upper,
                _mm512_set1_epi32(0xffff_0000_u32 as i32),
            );
            _mm512_castsi512_ps(words)
        }
    }
    #[inline(always)]
    unsafe fn join_bf16(lower: *const u16, upper: *const u16) -> __m512 {
        unsafe {
            let lower = _mm512_castsi256_si512(_mm256_loadu_si256(lower.cast()));
            let upper = _mm512_castsi256_si512(_mm256_loadu_si256(upper.cast()));
            let places = _mm512_loadu_si512(ALTERNATING.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_permutex2var_epi16(lower, places, upper))
        }
    }
}

/// Numbers of sixteen bits of two vectors, alternating.
const ALTERNATING: [u16; 32] = {
    let mut places = [0; 32];
    let mut lane = 0;
    while lane < 16 {
        places[2 * lane] = lane as u16;
        places[2 * lane + 1] = 32 + lane as u16;
        lane += 1;
    }
    places
};

/// Moves byte `idx` of each word to its highest byte.
#[inline(always)]
unsafe fn top_byte(words: __m512, idx: usize) -> __m512i {
    unsafe { _mm512_sll_epi32(_mm512_castps_si512(words), _mm_cvtsi32_si128(24 - 8 * idx as i32)) }
}

#[inline(always)]
unsafe fn low_pairs(a: __m512, b: __m512) -> __m512 {
    unsafe { _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))) }
}

#[inline(always)]
unsafe fn high_pairs(a: __m512, b: __m512) -> __m512 {
    unsafe { _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))) }
}

/// Quarters 0 and 2 of both vectors.
#[inline(always)]
unsafe fn even_quarters(a: __m512, b: __m512) -> __m512 {
    unsafe { _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b) }
}

/// Quarters 1 and 3 of both vectors.
#[inline(always)]
unsafe fn odd_quarters(a: __m512, b: __m512) -> __m512 {
    unsafe { _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b) }
}

impl Words for Avx2 {
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
    unsafe fn transpose(rows: [Self::V; LANES]) -> [Self::V; LANES] {
        unsafe {
            let mut columns = rows;
            let mut quarter = [rows[0].0; 8];
            for (half, first_column) in [(0, 0), (1, 8)] {
                for first_row in [0, 8] {
                    for i in 0..8 {
                        let row = rows[first_row + i];
                        quarter[i] = if half == 0 { row.0 } else { row.1 };
                    }
                    let turned = transpose8(quarter);
                    for i in 0..8 {
                        if first_row == 0 {
                            columns[first_column + i].0 = turned[i];
                        } else {
                            columns[first_column + i].1 = turned[i];
                        }
                    }
                }
            }
            columns
        }
    }
    #[inline(always)]
    unsafe fn unpack_bf16(words: Self::V, idx: usize) -> Self::V {
        unsafe { (unpack8_bf16(words.0, idx), unpack8_bf16(words.1, idx)) }
    }
    #[inline(always)]
    unsafe fn unpack_f16(words: Self::V, idx: usize) -> Self::V {
        unsafe {
            let count = _mm_cvtsi32_si128(16 - 16 * idx as i32);
            let low = _mm256_sll_epi32(_mm256_castps_si256(words.0), count);
            let high = _mm256_sll_epi32(_mm256_castps_si256(words.1), count);
            widen_halves(_mm256_srli_epi32::<16>(low), _mm256_srli_epi32::<16>(high))
        }
    }
    #[inline(always)]
    unsafe fn unpack_e4m3(words: Self::V, idx: usize) -> Self::V {
        unsafe { (unpack8_e4m3(words.0, idx), unpack8_e4m3(words.1, idx)) }
    }
    #[inline(always)]
    unsafe fn unpack_i8(words: Self::V, idx: usize) -> Self::V {
        unsafe {
            let (low, high) = (top_byte8(words.0, idx), top_byte8(words.1, idx));
            (
                _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(low)),
                _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(high)),
            )
        }
    }
}

#[inline(always)]
unsafe fn unpack8_bf16(words: __m256, idx: usize) -> __m256 {
    unsafe {
        let words = _mm256_castps_si256(words);
        _mm256_castsi256_ps(match idx {
            0 => _mm256_slli_epi32::<16>(words),
            _ => _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32)),
        })
    }
}

#[inline(always)]
unsafe fn top_byte8(words: __m256, idx: usize) -> __m256i {
    unsafe { _mm256_sll_epi32(_mm256_castps_si256(words), _mm_cvtsi32_si128(24 - 8 * idx as i32)) }
}

#[inline(always)]
unsafe fn unpack8_e4m3(words: __m256, idx: usize) -> __m256 {
    unsafe {
        let words = _mm256_srai_epi32::<4>(top_byte8(words, idx));
        let bits = _mm256_and_si256(words, _mm256_set1_epi32(E4M3_BITS));
        _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(E4M3_SCALE))
    }
}

/// Widens f16 in the lower halves of words whose upper halves are zero.
#[inline(always)]
unsafe fn widen_halves(low: __m256i, high: __m256i) -> (__m256, __m256) {
    unsafe {
        let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
        (
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed)),
            _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(packed)),
        )
    }
}

#[inline(always)]
unsafe fn transpose8(r: [__m256; 8]) -> [__m256; 8] {
    unsafe {
        // Half `l` of `fours[4 q + j]` is column 4 l + j of rows 4 q to 4 q + 3.
        let mut fours = r;
        let mut q = 0;
        while q < 8 {
            let (a, b) = (_mm256_unpacklo_ps(r[q], r[q + 1]), _mm256_unpackhi_ps(r[q], r[q + 1]));
            let (c, d) = (_mm256_unpacklo_ps(r[q + 2], r[q + 3]), _mm256_unpackhi_ps(r[q + 2], r[q + 3]));
            fours[q] = _mm256_shuffle_ps::<0b01_00_01_00>(a, c);
            fours[q + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(a, c);
            fours[q + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(b, d);
            fours[q + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(b, d);
            q += 4;
        }
        let mut columns = r;
        let mut j = 0;
        while j < 4 {
            columns[j] = _mm256_permute2f128_ps::<0x20>(fours[j], fours[4 + j]);
            columns[4 + j] = _mm256_permute2f128_ps::<0x31>(fours[j], fours[4 + j]);
            j += 1;
        }
        columns
    }
}
