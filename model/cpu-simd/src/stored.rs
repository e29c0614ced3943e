//! Stored number types, widened to lanes of f32.

use baton_kv_cache::e4m3;

use super::lanes::Simd;

/// A stored number type that widens to f32.
pub trait Stored {
    /// Bytes of a number.
    const SIZE: usize;
    /// Loads sixteen numbers.
    ///
    /// # Safety
    /// As for [`Simd`].
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
    /// Loads one number.
    ///
    /// # Safety
    /// `p` is valid for one element.
    unsafe fn load_one(p: *const u8) -> f32;
}

/// Single precision.
pub struct F32;
/// Half precision.
pub struct F16;
/// The upper half of an f32.
pub struct Bf16;
/// Eight bits: four of exponent, three of mantissa.
pub struct E4m3;
/// Integers of eight bits.
pub struct I8;

/// The bits of an f32 that hold an E4M3's sign, exponent and mantissa...
pub const E4M3_BITS: i32 = 0x87f0_0000_u32 as i32;
/// ... and the factor by which that f32 is too small: the ratio of the exponents' biases.
pub const E4M3_SCALE: f32 = f32::from_bits((127 + 120) << 23);

// SAFETY of the blocks below: the callers guarantee the elements; no alignment is assumed.
impl Stored for F32 {
    const SIZE: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: see above.
        unsafe { S::load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: see above.
        unsafe { p.cast::<f32>().read_unaligned() }
    }
}

impl Stored for F16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: see above.
        unsafe { S::load_f16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: see above.
        half::f16::from_bits(unsafe { p.cast::<u16>().read_unaligned() }).to_f32()
    }
}

impl Stored for Bf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: see above.
        unsafe { S::load_bf16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: see above.
        half::bf16::from_bits(unsafe { p.cast::<u16>().read_unaligned() }).to_f32()
    }
}

impl Stored for E4m3 {
    const SIZE: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: see above.
        unsafe { S::load_e4m3(p) }
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: see above.
        e4m3::to_f32(unsafe { *p })
    }
}

impl Stored for I8 {
    const SIZE: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: see above.
        unsafe { S::load_i8(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: see above.
        f32::from(unsafe { *p.cast::<i8>() })
    }
}
