//! Transposes sixteen rows of memory to sixteen columns, and unpacks columns to factors of products.
//!
//! Rows are transposed as words of 32 bits, whatever a word holds: one f32, two numbers of sixteen bits, or four of
//! eight. So narrower types need fewer shuffles per number. A transposed word is then unpacked to its numbers, or is
//! itself a factor: two bf16 that are multiplied with two others at once.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::marker::PhantomData;

use crate::lanes::{LANES, Portable, Simd};
use crate::stored::{Bf16, E4m3, F16, F32, I8, Stored};

/// Vectors of words.
///
/// # Safety (of all methods)
/// As for [`Simd`].
#[allow(clippy::missing_safety_doc)] // said once, above
pub trait Words: Simd {
    /// Lane `i` of row `j` becomes lane `j` of row `i`.
    unsafe fn transpose(rows: [Self::V; LANES]) -> [Self::V; LANES];
    /// The lower (0) or upper (1) bf16 of each word.
    unsafe fn unpack_bf16(words: Self::V, idx: usize) -> Self::V;
    /// The lower (0) or upper (1) f16 of each word.
    unsafe fn unpack_f16(words: Self::V, idx: usize) -> Self::V;
    /// The E4M3 in byte `idx` of each word, the lowest byte being 0. None is NaN, as for [`Simd::load_e4m3`].
    unsafe fn unpack_e4m3(words: Self::V, idx: usize) -> Self::V;
    /// The integer in byte `idx` of each word.
    unsafe fn unpack_i8(words: Self::V, idx: usize) -> Self::V;
    /// Adds to each lane of `sums` the products of the two bf16 in that lane of `a` and `b`, the upper product first, or
    /// as the instruction of the processor does. It may treat subnormal numbers as zero.
    #[inline(always)]
    unsafe fn dot_bf16(a: Self::V, b: Self::V, sums: Self::V) -> Self::V {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let upper = Self::fma(Self::unpack_bf16(a, 1), Self::unpack_bf16(b, 1), sums);
            Self::fma(Self::unpack_bf16(a, 0), Self::unpack_bf16(b, 0), upper)
        }
    }
    /// Joins numbers of f32 that bf16 holds exactly to words of two bf16.
    #[inline(always)]
    unsafe fn pack_bf16(lower: Self::V, upper: Self::V) -> Self::V {
        let mut numbers = [[0f32; LANES]; 2];
        // SAFETY: the arrays have room for sixteen numbers each.
        unsafe {
            Self::store(numbers[0].as_mut_ptr(), lower);
            Self::store(numbers[1].as_mut_ptr(), upper);
            let [lower, upper] = numbers;
            let mut lane = 0;
            while lane < LANES {
                numbers[0][lane] = f32::from_bits(lower[lane].to_bits() >> 16 | upper[lane].to_bits());
                lane += 1;
            }
            Self::load(numbers[0].as_ptr())
        }
    }
    /// Rounds numbers to bf16 and joins them to words of two. A NaN stays one if its upper 16 bits say that it is.
    #[inline(always)]
    unsafe fn round_to_pairs(lower: Self::V, upper: Self::V) -> Self::V {
        let mut numbers = [[0u32; LANES]; 2];
        // SAFETY: the arrays have room for sixteen numbers each.
        unsafe {
            Self::store(numbers[0].as_mut_ptr().cast(), lower);
            Self::store(numbers[1].as_mut_ptr().cast(), upper);
            let [mut lower, upper] = numbers;
            let mut lane = 0;
            while lane < LANES {
                let [low, high] = [lower[lane].wrapping_add(0x8000), upper[lane].wrapping_add(0x8000)];
                lower[lane] = low >> 16 | high & 0xffff_0000;
                lane += 1;
            }
            Self::load(lower.as_ptr().cast())
        }
    }
    /// Joins sixteen bf16 at `lower` and sixteen at `upper` to sixteen words.
    #[inline(always)]
    unsafe fn join_bf16(lower: *const u16, upper: *const u16) -> Self::V {
        let mut words = [0u32; LANES];
        for (lane, word) in words.iter_mut().enumerate() {
            // SAFETY: the caller guarantees sixteen of each.
            let [lower, upper] = unsafe { [lower, upper].map(|half| half.add(lane).read_unaligned()) };
            *word = u32::from(lower) | u32::from(upper) << 16;
        }
        // SAFETY: the array has sixteen words.
        unsafe { Self::load(words.as_ptr().cast()) }
    }
}

/// How kernels multiply stored numbers: one by one in f32, or two at once ([as stored](Bf16Pair) or [converted](Pair)).
pub trait Factor {
    /// The stored type.
    type Number: Stored;
    /// Stored numbers per factor.
    const NUM: usize;

    /// Factor `idx` of each word.
    ///
    /// # Safety
    /// As for [`Simd`]; `idx` is below [`PER_WORD`](Self::PER_WORD).
    unsafe fn unpack<S: Words>(words: S::V, idx: usize) -> S::V;

    /// Factors in a word.
    const PER_WORD: usize = 4 / Self::Number::SIZE / Self::NUM;

    /// `x * y + sums`
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    unsafe fn multiply_add<S: Words>(x: S::V, y: S::V, sums: S::V) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { S::fma(x, y, sums) }
    }

    /// Sixteen factors from byte `at` of the rows on; a factor of one number reads the first row only.
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    unsafe fn line<S: Words>(rows: [*const u8; 2], at: usize) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::Number::load::<S>(rows[0].add(at)) }
    }
}

/// As [`kernel!`](crate::kernel), for CPUs that multiply bf16, and in plain Rust for tests.
#[macro_export]
macro_rules! pair_kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident / $generic:ident $(<$factor:ty>)? ($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::Avx512 $(, $factor)?>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "bf16")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn neon($($arg: $ty),*) {
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::Neon $(, $factor)?>($($arg),*) }
            }
            // SAFETY: guaranteed by the caller.
            unsafe {
                match isa {
                    #[cfg(target_arch = "aarch64")]
                    $crate::Isa::Neon => neon($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Amx | $crate::Isa::Avx512 => avx512($($arg),*),
                    _ => $generic::<$crate::Portable $(, $factor)?>($($arg),*),
                }
            }
        }
    };
}
/// Two bf16 that are multiplied at once with two others.
pub struct Bf16Pair;

// SAFETY of the blocks below: the callers guarantee the instruction set.
impl Factor for Bf16Pair {
    type Number = Bf16;
    const NUM: usize = 2;
    #[inline(always)]
    unsafe fn unpack<S: Words>(words: S::V, _: usize) -> S::V {
        words
    }
    #[inline(always)]
    unsafe fn multiply_add<S: Words>(x: S::V, y: S::V, sums: S::V) -> S::V {
        // SAFETY: see above.
        unsafe { S::dot_bf16(x, y, sums) }
    }
    #[inline(always)]
    unsafe fn line<S: Words>(rows: [*const u8; 2], at: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::join_bf16(rows[0].add(at).cast(), rows[1].add(at).cast()) }
    }
}

/// Two numbers of a type of eight bits, converted to bf16, which holds each exactly, and multiplied at once with two bf16.
pub struct Pair<F>(PhantomData<F>);

impl<F: Factor> Factor for Pair<F> {
    type Number = F::Number;
    const NUM: usize = 2;
    #[inline(always)]
    unsafe fn unpack<S: Words>(words: S::V, idx: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::pack_bf16(F::unpack::<S>(words, 2 * idx), F::unpack::<S>(words, 2 * idx + 1)) }
    }
    #[inline(always)]
    unsafe fn multiply_add<S: Words>(x: S::V, y: S::V, sums: S::V) -> S::V {
        // SAFETY: see above.
        unsafe { S::dot_bf16(x, y, sums) }
    }
    #[inline(always)]
    unsafe fn line<S: Words>(rows: [*const u8; 2], at: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::pack_bf16(F::line::<S>([rows[0]; 2], at), F::line::<S>([rows[1]; 2], at)) }
    }
}

impl Factor for F32 {
    type Number = F32;
    const NUM: usize = 1;
    #[inline(always)]
    unsafe fn unpack<S: Words>(words: S::V, _: usize) -> S::V {
        words
    }
}

impl Factor for F16 {
    type Number = F16;
    const NUM: usize = 1;
    #[inline(always)]
    unsafe fn unpack<S: Words>(words: S::V, idx: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::unpack_f16(words, idx) }
    }
}

impl Factor for Bf16 {
    type Number = Bf16;
    const NUM: usize = 1;
    #[inline(always)]
    unsafe fn unpack<S: Words>(words: S::V, idx: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::unpack_bf16(words, idx) }
    }
}

impl Factor for E4m3 {
    type Number = E4m3;
    const NUM: usize = 1;
    #[inline(always)]
    unsafe fn unpack<S: Words>(words: S::V, idx: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::unpack_e4m3(words, idx) }
    }
}

impl Factor for I8 {
    type Number = I8;
    const NUM: usize = 1;
    #[inline(always)]
    unsafe fn unpack<S: Words>(words: S::V, idx: usize) -> S::V {
        // SAFETY: see above.
        unsafe { S::unpack_i8(words, idx) }
    }
}

impl Words for Portable {
    #[inline(always)]
    unsafe fn transpose(rows: [Self::V; LANES]) -> [Self::V; LANES] {
        let mut columns = rows;
        for (i, column) in columns.iter_mut().enumerate() {
            for (j, row) in rows.iter().enumerate() {
                column[j] = row[i];
            }
        }
        columns
    }
    #[inline(always)]
    unsafe fn unpack_bf16(words: Self::V, idx: usize) -> Self::V {
        words.map(|word| f32::from_bits(word.to_bits() >> (16 * idx) << 16))
    }
    #[inline(always)]
    unsafe fn unpack_f16(words: Self::V, idx: usize) -> Self::V {
        words.map(|word| half::f16::from_bits((word.to_bits() >> (16 * idx)) as u16).to_f32())
    }
    #[inline(always)]
    unsafe fn unpack_e4m3(words: Self::V, idx: usize) -> Self::V {
        words.map(|word| baton_kv_cache::e4m3::to_f32(word.to_bits().to_le_bytes()[idx]))
    }
    #[inline(always)]
    unsafe fn unpack_i8(words: Self::V, idx: usize) -> Self::V {
        words.map(|word| f32::from(word.to_bits().to_le_bytes()[idx] as i8))
    }
}
