//! Sixteen lanes of f32, and the portable implementation that all others agree with.
//!
//! It does not know tensors.

use baton_kv_cache::e4m3;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Independent vectors of sums that hide the latency of an instruction.
pub const CHAINS: usize = if cfg!(target_arch = "aarch64") { 6 } else { 16 };

/// Operations on sixteen f32 lanes.
///
/// Kernels use plain loops and functions that are `#[inline(always)]`. A closure, also one that `map` or `from_fn`
/// calls, is compiled without the instruction set of the surrounding kernel and costs a call per vector.
///
/// # Safety (of all methods)
/// The CPU has the instructions of the implementation, and pointers are valid for sixteen (or `n`) elements of the
/// type in the name. No alignment is required.
#[allow(clippy::missing_safety_doc)] // said once, above
pub trait Simd: Copy {
    /// Sixteen lanes.
    type V: Copy;
    /// The room of the registers: 32 if they hold as many vectors, or 16 if they hold half as many lanes as 16 vectors.
    const NUM_REGISTERS: usize;
    /// Rows of the largest tile over packed weights whose sums fit into registers: 14 with 32 columns, or 6 with 16.
    const PANEL_ROWS: usize;

    /// The same number in all lanes.
    unsafe fn splat(x: f32) -> Self::V;
    /// Loads sixteen numbers.
    unsafe fn load(p: *const f32) -> Self::V;
    /// Loads sixteen bf16.
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// Loads sixteen f16.
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// Loads sixteen E4M3 that are not NaN; the result for NaN is unspecified.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    /// Loads sixteen integers of eight bits.
    unsafe fn load_i8(p: *const i8) -> Self::V;
    /// Loads sixteen integers, rounded to f32.
    unsafe fn load_i32(p: *const i32) -> Self::V;
    /// Loads thirty-two bf16, alternately for lane `i` of the first vector and of the second.
    unsafe fn load_bf16_pair(p: *const u16) -> [Self::V; 2];
    /// Prefetches the cache line at `p`, which need not be valid.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
    /// As [`prefetch`](Self::prefetch), into the second-level cache only, for data that is needed later.
    #[inline(always)]
    unsafe fn prefetch_for_later(_p: *const u8) {}
    /// Prefetches the cache line at `p`, which need not be valid, to be written.
    #[inline(always)]
    unsafe fn prefetch_to_write(_p: *mut f32) {}
    /// Stores sixteen numbers.
    unsafe fn store(p: *mut f32, v: Self::V);
    /// As [`store`](Self::store), to an address that is a multiple of 64 and is not read soon. Other threads may see the
    /// numbers only after a [`fence`](Self::fence).
    #[inline(always)]
    unsafe fn store_past_caches(p: *mut f32, v: Self::V) {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::store(p, v) }
    }
    /// Orders [`store_past_caches`](Self::store_past_caches) before later stores.
    #[inline(always)]
    unsafe fn fence() {}
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a + b`
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a` if it is greater, else `b`, also if one is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a` if it is less, else `b`, also if one is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// Rounds to the nearest integer.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `2^a` of integers in -126..=127.
    unsafe fn pow2(a: Self::V) -> Self::V;
    /// Adds the lanes as a tree: `i` with `i + 8`, then + 4, + 2, + 1.
    unsafe fn sum(a: Self::V) -> f32;

    /// Loads `n < 16` elements; the other lanes are zero.
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the caller guarantees `n` elements, and `n < LANES`.
        unsafe {
            std::ptr::copy_nonoverlapping(p.cast::<u8>(), lanes.as_mut_ptr().cast(), n * 4);
            Self::load(lanes.as_ptr())
        }
    }

    /// Stores the first `n < 16` lanes.
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: Self::V, n: usize) {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: as above.
        unsafe {
            Self::store(lanes.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }

    /// The largest lane.
    #[inline(always)]
    unsafe fn max_lane(a: Self::V) -> f32 {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: `lanes` holds sixteen.
        unsafe { Self::store(lanes.as_mut_ptr(), a) };
        lanes.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x))
    }

    /// `a` less the next integer below, rounded down; zero for infinity.
    #[inline(always)]
    unsafe fn fraction(a: Self::V) -> Self::V {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: `lanes` holds sixteen.
        unsafe {
            Self::store(lanes.as_mut_ptr(), a);
            for x in &mut lanes {
                let exact = if x.is_infinite() { 0.0 } else { f64::from(*x) - f64::from(x.floor()) };
                *x = if f64::from(exact as f32) > exact { (exact as f32).next_down() } else { exact as f32 };
            }
            Self::load(lanes.as_ptr())
        }
    }
    /// `a` times 2 to the power of the next integer below `b`. A result that would be subnormal may be zero.
    #[inline(always)]
    unsafe fn times_pow2(a: Self::V, b: Self::V) -> Self::V {
        let mut lanes = [[0.0f32; LANES]; 2];
        // SAFETY: the arrays hold sixteen.
        unsafe {
            Self::store(lanes[0].as_mut_ptr(), a);
            Self::store(lanes[1].as_mut_ptr(), b);
            let [mut lanes, powers] = lanes;
            for (x, power) in lanes.iter_mut().zip(powers) {
                *x *= match power.floor() {
                    power if power < -126.0 => 0.0,
                    power if power > 127.0 => f32::INFINITY,
                    power => f32::from_bits(((power as i32 + 127) as u32) << 23),
                };
            }
            Self::load(lanes.as_ptr())
        }
    }

    /// 2^x for x up to 127 with a relative error of 8.6e-5, a twentieth of what rounding to bf16 may cost. 2^0 is exactly
    /// one; results that would be subnormal may be zero.
    ///
    /// x = n + r. 2^r is a polynomial of degree three, fitted for the least relative error on 0..=1.
    #[inline(always)]
    unsafe fn exp2_short(x: Self::V) -> Self::V {
        // SAFETY: no pointers.
        unsafe {
            let r = Self::fraction(x);
            let mut p = Self::splat(0.077_067_04);
            for c in [0.227_645, 0.695_116_8, 1.0] {
                p = Self::fma(p, r, Self::splat(c));
            }
            Self::times_pow2(p, x)
        }
    }

    /// e^x with an error of at most two units in the last place; zero below -87.7, where results would be subnormal.
    ///
    /// Cephes' expf: x = n ln 2 + r, and a polynomial of degree five for e^r.
    #[inline(always)]
    unsafe fn exp(x: Self::V) -> Self::V {
        // SAFETY: no pointers.
        unsafe {
            // A NaN stays one.
            let x = Self::min(Self::splat(88.02), Self::max(Self::splat(-88.02), x));
            let n = Self::round(Self::mul(x, Self::splat(std::f32::consts::LOG2_E)));
            let r = Self::fma(n, Self::splat(-0.693_359_4), x);
            let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = Self::fma(p, r, Self::splat(c));
            }
            let p = Self::add(Self::fma(Self::mul(r, r), p, r), Self::splat(1.0));
            Self::mul(p, Self::pow2(n))
        }
    }
}

/// Plain arrays: the reference for the other implementations, and the one of other CPUs.
#[derive(Clone, Copy)]
pub struct Portable;

#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

impl Simd for Portable {
    type V = [f32; LANES];
    const NUM_REGISTERS: usize = 16;
    const PANEL_ROWS: usize = 6;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: the caller guarantees sixteen elements of any alignment.
        unsafe { p.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::V {
        // SAFETY: as above; bytes need no alignment.
        unsafe { *p.cast::<[u8; LANES]>() }.map(e4m3::to_f32)
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self::V {
        // SAFETY: as above.
        unsafe { *p.cast::<[i8; LANES]>() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_i32(p: *const i32) -> Self::V {
        // SAFETY: as above.
        unsafe { p.cast::<[i32; LANES]>().read_unaligned() }.map(|x| x as f32)
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u16) -> [Self::V; 2] {
        // SAFETY: the caller guarantees thirty-two elements of any alignment.
        let bits = unsafe { p.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        [0, 1].map(|half| bits.map(|pair| f32::from_bits(u32::from(pair[half]) << 16)))
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: as above.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Without an instruction for it, `mul_add` is a slow library call.
        std::array::from_fn(|lane| {
            if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                a[lane].mul_add(b[lane], c[lane])
            } else {
                a[lane] * b[lane] + c[lane]
            }
        })
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn pow2(a: Self::V) -> Self::V {
        a.map(|a| f32::from_bits(((a as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn sum(a: Self::V) -> f32 {
        let a: [f32; 8] = std::array::from_fn(|i| a[i] + a[i + 8]);
        let a: [f32; 4] = std::array::from_fn(|i| a[i] + a[i + 4]);
        (a[0] + a[2]) + (a[1] + a[3])
    }
}
