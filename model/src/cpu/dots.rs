//! Dot products of rows that lie one after the other in memory: queries with keys.
//!
//! Sixteen lanes step along both rows, then a fixed tree adds them up. Tiles share loads between products
//! but never change the order inside one.

use super::simd::{LANES, Simd, Stored};

/// Widens `n` stored numbers.
///
/// # Safety
/// Both pointers are valid for `n` elements.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd, W: Stored>(from: *const u8, to: *mut f32, n: usize) {
    // SAFETY: indices stay below `n`.
    unsafe {
        let mut i = 0;
        while i + LANES <= n {
            S::store(to.add(i), W::load::<S>(from.add(i * W::SIZE)));
            i += LANES;
        }
        for i in i..n {
            *to.add(i) = W::load_one(from.add(i * W::SIZE));
        }
    }
}

/// The dot products of `R` rows of `a` with `C` rows of `w`, strides in elements.
///
/// # Safety
/// Both pointers are valid for their rows of `k` elements.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
pub(super) unsafe fn dot_tile<S: Simd, W: Stored, const R: usize, const C: usize>(
    a: *const f32,
    a_stride: usize,
    w: *const u8,
    w_stride: usize,
    k: usize,
) -> [[f32; C]; R] {
    // SAFETY: indices stay below `k`.
    unsafe {
        let mut acc = [[S::splat(0.0); C]; R];
        let mut ws = [S::splat(0.0); C];
        let whole = k - k % LANES;
        let mut i = 0;
        while i < whole {
            for c in 0..C {
                ws[c] = W::load::<S>(w.add((c * w_stride + i) * W::SIZE));
            }
            for r in 0..R {
                let x = S::load(a.add(r * a_stride + i));
                for c in 0..C {
                    acc[r][c] = S::fma(x, ws[c], acc[r][c]);
                }
            }
            i += LANES;
        }
        if i < k {
            let n = k - i;
            for c in 0..C {
                ws[c] = W::load_part::<S>(w.add((c * w_stride + i) * W::SIZE), n);
            }
            for r in 0..R {
                let x = S::load_part(a.add(r * a_stride + i), n);
                for c in 0..C {
                    acc[r][c] = S::fma(x, ws[c], acc[r][c]);
                }
            }
        }
        let mut dots = [[0.0; C]; R];
        for r in 0..R {
            dots[r] = S::sums(acc[r]);
        }
        dots
    }
}
