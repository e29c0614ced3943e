//! Products of f32 activations with weights that are widened to f32 in registers.
//!
//! The kernel walks along K: one line of weights times one number of each row. So weights are read once, in order,
//! and small tiles (decode) and large ones (prefill) run the same code. An output is one chain of fused multiply-adds
//! in the order of K.

use super::panels::PANEL;
use super::tile::{FAR, TileArgs};
#[cfg(target_arch = "aarch64")]
use baton_cpu_simd::Neon;
#[cfg(target_arch = "x86_64")]
use baton_cpu_simd::{Avx2, Avx512};
use baton_cpu_simd::{Bf16, F16, F32, Isa, LANES, Portable, Simd, Stored, kernel};
use baton_model_spec::FloatDtype as Dtype;

/// The largest number of panels that a kernel takes at once.
pub(super) const MAX_PANELS: usize = 4;
/// Prefetch distance in bytes.
const PREFETCH: usize = 2048;

kernel! {
    /// # Safety
    /// As for [`TileArgs`].
    pub(super) fn tile_kernel / tile (args: &TileArgs, dtype: Dtype)
}

#[inline(always)]
unsafe fn tile<S: Simd>(args: &TileArgs, dtype: Dtype) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match dtype {
            Dtype::F32 => tile_of::<S, F32>(args),
            Dtype::F16 => tile_of::<S, F16>(args),
            Dtype::Bf16 => tile_of::<S, Bf16>(args),
        }
    }
}

/// Selects the kernel. A tile of few rows takes several panels at once, because the sums of one alone would wait for
/// each other. With few registers a panel is taken in two halves.
#[inline(always)]
unsafe fn tile_of<S: Simd, W: Panel>(args: &TileArgs) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if S::PANEL_ROWS == 14 {
            match args.rows {
                1 => panels::<S, W, 1, 4, 2>(args),
                2 => panels::<S, W, 2, 4, 2>(args),
                4 => panels::<S, W, 4, 2, 2>(args),
                6 => panels::<S, W, 6, 2, 2>(args),
                8 => panels::<S, W, 8, 1, 2>(args),
                10 => panels::<S, W, 10, 1, 2>(args),
                12 => panels::<S, W, 12, 1, 2>(args),
                _ => panels::<S, W, 14, 1, 2>(args),
            }
        } else {
            match args.rows {
                1 => panels::<S, W, 1, 2, 2>(args),
                2 => panels::<S, W, 2, 1, 2>(args),
                4 => panels::<S, W, 4, 1, 1>(args),
                _ => panels::<S, W, 6, 1, 1>(args),
            }
        }
    }
}

/// Rows of the largest tile. Smaller tiles have an even number of rows, or one.
pub(super) fn tile_rows(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::Avx512 => Avx512::PANEL_ROWS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::TileModel => Avx2::PANEL_ROWS,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::TileModel => Neon::PANEL_ROWS,
        _ => Portable::PANEL_ROWS,
    }
}

/// Multiplies all panels, `P` at a time, the last ones one by one.
#[inline(always)]
unsafe fn panels<S: Simd, W: Panel, const R: usize, const P: usize, const H: usize>(args: &TileArgs) {
    let mut panel = 0;
    // SAFETY: panel indices are below their number.
    unsafe {
        while panel + P <= args.panels {
            one_tile::<S, W, R, P, H, 0>(args, panel);
            if H == 1 {
                one_tile::<S, W, R, P, H, 1>(args, panel);
            }
            panel += P;
        }
        while panel < args.panels {
            one_tile::<S, W, R, 1, H, 0>(args, panel);
            if H == 1 {
                one_tile::<S, W, R, 1, H, 1>(args, panel);
            }
            panel += 1;
        }
    }
}

/// Multiplies `R` rows with `H` halves, from `FIRST` on, of each of `P` panels.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn one_tile<S, W, const R: usize, const P: usize, const H: usize, const FIRST: usize>(
    args: &TileArgs,
    first_panel: usize,
) where
    S: Simd,
    W: Panel,
{
    let line = PANEL * W::SIZE;
    let stride = args.panel_bytes;
    // SAFETY: indices along K and of panels are in range; a prefetched address need not be valid.
    unsafe {
        let mut acc = [[[S::splat(0.0); H]; P]; R];
        let mut ws = [[S::splat(0.0); 2]; P];
        let mut w = args.w.add(first_panel * stride);
        let mut a = args.a.cast::<f32>();
        // Invariant 8: each output adds its products in the order of K, whatever `R`, `P` and `H`.
        for _ in 0..args.k {
            for p in 0..P {
                S::prefetch(w.wrapping_add(p * stride + PREFETCH));
                if S::PANEL_ROWS == 14 {
                    S::prefetch_for_later(w.wrapping_add(p * stride + FAR));
                }
                ws[p] = W::load_pair::<S>(w.add(p * stride));
            }
            for r in 0..R {
                let x = S::splat(a.add(r).read_unaligned());
                for p in 0..P {
                    for h in 0..H {
                        acc[r][p][h] = S::fma(x, ws[p][FIRST + h], acc[r][p][h]);
                    }
                }
            }
            w = w.add(line);
            a = a.add(R);
        }
        for r in 0..R {
            if r >= args.real_rows {
                break;
            }
            for p in 0..P {
                for h in 0..H {
                    args.finish::<S>(r, first_panel + p, FIRST + h, acc[r][p][h]);
                }
            }
        }
    }
}

/// Stored numbers; a panel's line of them widens to two vectors.
trait Panel: Stored {
    /// Loads a line: outputs 0 to 15 and 16 to 31.
    ///
    /// # Safety
    /// As for [`Simd`], for thirty-two elements.
    unsafe fn load_pair<S: Simd>(p: *const u8) -> [S::V; 2];
}

impl Panel for F32 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(p: *const u8) -> [S::V; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { [S::load(p.cast()), S::load(p.cast::<f32>().add(LANES))] }
    }
}

impl Panel for F16 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(p: *const u8) -> [S::V; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { [S::load_f16(p.cast()), S::load_f16(p.cast::<u16>().add(LANES))] }
    }
}

impl Panel for Bf16 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(p: *const u8) -> [S::V; 2] {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_bf16_pair(p.cast()) }
    }
}
