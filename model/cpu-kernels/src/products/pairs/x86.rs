//! Pairs of bf16 in registers of AVX-512.

use std::arch::x86_64::*;

use super::super::panels::PANEL;
use super::super::tile::TileArgs;
use super::PREFETCH;
use baton_cpu_simd::{Avx512, CHAINS, Simd};

/// Rows of the largest tile. Smaller tiles have an even number of rows, or one.
pub(in super::super) const TILE_ROWS: usize = 14;

/// # Safety
/// As for [`TileArgs`]; the CPU has the instruction.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(in super::super) unsafe fn tile_kernel(args: &TileArgs) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match args.rows {
            1 => panels::<1>(args),
            2 => panels::<2>(args),
            4 => panels::<4>(args),
            6 => panels::<6>(args),
            8 => panels::<8>(args),
            10 => panels::<10>(args),
            12 => panels::<12>(args),
            _ => panels::<14>(args),
        }
    }
}

/// A loop of products alone, for measuring the peak rate.
///
/// # Safety
/// The CPU has the instruction.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn pairs_loop(rounds: usize) -> f32 {
    // SAFETY: a vector of integers has the size of a vector of bf16, and any bits are valid.
    let x = unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(std::hint::black_box(0))) };
    let mut sums = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, x);
        }
    }
    sums.iter().fold(0.0, |all, sum| all + _mm512_reduce_add_ps(*sum))
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn panels<const R: usize>(args: &TileArgs) {
    const LINE_BYTES: usize = 4 * PANEL;
    for panel in 0..args.panels {
        // SAFETY: indices of panels, rows and pairs are in range; a prefetched address need not be valid.
        unsafe {
            let mut w = args.w.add(panel * args.panel_bytes);
            let mut a = args.a.cast::<i32>();
            let mut sums = [[_mm512_setzero_ps(); 2]; R];
            for _ in 0..args.k.div_ceil(2) {
                Avx512::prefetch(w.wrapping_add(PREFETCH));
                Avx512::prefetch(w.wrapping_add(PREFETCH + 64));
                let low = std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(w.cast()));
                let high = std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(w.add(64).cast()));
                for r in 0..R {
                    let x = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(
                        a.add(r).read_unaligned(),
                    ));
                    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], low, x);
                    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], high, x);
                }
                w = w.add(LINE_BYTES);
                a = a.add(R);
            }
            for r in 0..R {
                if r >= args.real_rows {
                    break;
                }
                for half in 0..2 {
                    args.finish::<Avx512>(r, panel, half, sums[r][half]);
                }
            }
        }
    }
}
