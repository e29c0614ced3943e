//! Products of f32 activations with weights that are widened to f32 in registers.
//!
//! The kernel walks along K: one line of weights times one number of each row. So weights are read once, in order,
//! and small tiles (decode) and large ones (prefill) run the same code. An output is one chain of fused multiply-adds
//! in the order of K.

use super::panels::PANEL;
use super::slabs::{Block, Order, SLAB};
use super::tile::{FAR, Part, TileArgs};
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
/// Rows of the largest tile of vectors that hold few sums: they multiply many tiles by parts of K. Vectors that hold more sums take
/// all of K. Code that loads and stores their sums around a part makes the compiler keep some of them in memory in the loop, too.
const FEW_ROWS: usize = 6;
/// Tiles of rows from which on the order of slabs is faster: sums wait in memory, for nothing if there are few tiles.
const MIN_TILES: usize = 11;

kernel! {
    /// Multiplies tiles of rows, one after the other.
    ///
    /// # Safety
    /// As for [`TileArgs`].
    pub(super) fn kernel / multiply (block: &Block<'_>, dtype: Dtype)
}

#[inline(always)]
unsafe fn multiply<S: Simd>(block: &Block<'_>, dtype: Dtype) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match dtype {
            Dtype::F32 => tiles::<S, F32>(block),
            Dtype::F16 => tiles::<S, F16>(block),
            Dtype::Bf16 => tiles::<S, Bf16>(block),
        }
    }
}

#[inline(always)]
unsafe fn tiles<S: Simd, W: Panel>(block: &Block<'_>) {
    let mut ahead = block.ahead((block.end - block.first) * PANEL * W::SIZE);
    for args in block.rows {
        // SAFETY: guaranteed by the caller.
        unsafe {
            ahead.prefetch_step::<S>();
            tile::<S, W>(args, &block.part_of(args));
        }
    }
}

/// Selects the kernel. A tile of few rows takes several panels at once, because the sums of one alone would wait for
/// each other. With few registers a panel is taken in two halves.
#[inline(always)]
unsafe fn tile<S: Simd, W: Panel>(args: &TileArgs, part: &Part) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if S::PANEL_ROWS == 14 {
            match args.rows {
                1 => panels::<S, W, 1, 4, 2>(args, part),
                2 => panels::<S, W, 2, 4, 2>(args, part),
                4 => panels::<S, W, 4, 2, 2>(args, part),
                6 => panels::<S, W, 6, 2, 2>(args, part),
                8 => panels::<S, W, 8, 1, 2>(args, part),
                10 => panels::<S, W, 10, 1, 2>(args, part),
                12 => panels::<S, W, 12, 1, 2>(args, part),
                _ => panels::<S, W, 14, 1, 2>(args, part),
            }
        } else {
            match args.rows {
                1 => panels::<S, W, 1, 2, 2>(args, part),
                2 => panels::<S, W, 2, 1, 2>(args, part),
                4 => panels::<S, W, 4, 1, 1>(args, part),
                _ => panels::<S, W, 6, 1, 1>(args, part),
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

/// The order in which vectors that hold few sums multiply many tiles.
pub(super) fn order(isa: Isa, num_tiles: usize) -> Option<Order> {
    let rows = tile_rows(isa);
    (rows == FEW_ROWS && num_tiles >= MIN_TILES).then(|| Order::of_vectors(SLAB / 2, rows))
}

/// Multiplies all panels, `P` at a time, the last ones one by one.
#[inline(always)]
unsafe fn panels<S: Simd, W: Panel, const R: usize, const P: usize, const H: usize>(
    args: &TileArgs,
    part: &Part,
) {
    let mut panel = 0;
    // SAFETY: panel indices are below their number.
    unsafe {
        while panel + P <= args.panels {
            one_tile::<S, W, R, P, H, 0>(args, panel, part);
            if H == 1 {
                one_tile::<S, W, R, P, H, 1>(args, panel, part);
            }
            panel += P;
        }
        while panel < args.panels {
            one_tile::<S, W, R, 1, H, 0>(args, panel, part);
            if H == 1 {
                one_tile::<S, W, R, 1, H, 1>(args, panel, part);
            }
            panel += 1;
        }
    }
}

/// Multiplies `R` rows with `H` halves, from `FIRST` on, of each of `P` panels; of one panel if the part has not all of K.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn one_tile<S, W, const R: usize, const P: usize, const H: usize, const FIRST: usize>(
    args: &TileArgs,
    first_panel: usize,
    part: &Part,
) where
    S: Simd,
    W: Panel,
{
    let line = PANEL * W::SIZE;
    let stride = args.panel_bytes;
    let by_parts = S::PANEL_ROWS == FEW_ROWS;
    // SAFETY: indices along K and of panels are in range; a prefetched address need not be valid.
    unsafe {
        let mut acc = [[[S::splat(0.0); H]; P]; R];
        let mut ws = [[S::splat(0.0); 2]; P];
        let mut w = args.w.add(first_panel * stride + part.first * line);
        let mut a = args.a.cast::<f32>().add(part.first * R);
        if by_parts && part.first > 0 {
            for r in 0..R {
                for h in 0..H {
                    acc[r][0][h] = S::load(part.sums_of(r, FIRST + h));
                }
            }
        }
        // Invariant 8: each output adds its products in the order of K, whatever `R`, `P`, `H` and the parts of K.
        for _ in part.first..part.end {
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
        if by_parts && part.end < args.k {
            for r in 0..R {
                for h in 0..H {
                    S::store(part.sums_of(r, FIRST + h), acc[r][0][h]);
                }
            }
            return;
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
