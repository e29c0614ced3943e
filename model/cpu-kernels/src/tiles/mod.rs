//! Tile registers: eight matrices of at most sixteen rows of 64 bytes, and their products.
//!
//! Kernels are written over [`Tiles`]. [`Amx`] is the hardware; the software model `TileModel` computes the same bits
//! on every processor, for tests.
#![cfg_attr(not(any(test, target_arch = "x86_64")), allow(dead_code))] // only x86-64 has tiles

#[cfg(target_arch = "x86_64")]
mod amx;
mod registers;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::Amx;
use baton_cpu_simd::{Isa, Simd};
pub(crate) use registers::{ROW_BYTES, ROWS, TileShapes, Tiles};
#[cfg(test)]
pub(crate) use tests::{ModelVectors, model::TileModel, tested};

/// As [`kernel!`](baton_cpu_simd::kernel), for CPUs that have tiles, and over their software model.
///
/// `tile_kernel! { fn name / generic(args) }` makes `unsafe fn name(isa, args)` of `generic::<S, T>(&mut tiles, args)`.
macro_rules! tile_kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident / $generic:ident ($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        #[cfg_attr(not(any(test, target_arch = "x86_64")), allow(unused_variables, unused_unsafe))]
        $vis unsafe fn $name(isa: baton_cpu_simd::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
            unsafe fn amx($($arg: $ty),*) {
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<baton_cpu_simd::Avx512, $crate::tiles::Amx>(&mut $crate::tiles::Amx, $($arg),*) }
            }
            #[cfg(test)]
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
            unsafe fn model($($arg: $ty),*) {
                let mut tiles = $crate::tiles::TileModel::new();
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::tiles::ModelVectors, $crate::tiles::TileModel>(&mut tiles, $($arg),*) }
            }
            // SAFETY: guaranteed by the caller.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    baton_cpu_simd::Isa::Amx => amx($($arg),*),
                    #[cfg(test)]
                    baton_cpu_simd::Isa::TileModel => model($($arg),*),
                    _ => unreachable!("only where there are tiles"),
                }
            }
        }
    };
}
pub(crate) use tile_kernel;

/// Operations, multiplications and additions, of one round of [`tiles_loop`], of bf16; twice as many of eight bits.
pub const TILE_OPERATIONS: usize = 4 * 2 * ROWS * ROWS * ROW_BYTES / 2;
/// Divides rows between two tiles.
fn split(rows: usize) -> [usize; 2] {
    [rows.min(ROWS), rows.saturating_sub(ROWS)]
}

/// The shapes of the current thread's tiles, which are slow to set. Dropped, it ends the use of tiles, so that the
/// system need not save them, and other threads see what kernels stored past the caches.
pub(crate) struct TileUse {
    isa: Isa,
    rows: usize,
    depth_bytes: usize,
}

impl TileUse {
    pub(crate) fn new(isa: Isa) -> TileUse {
        TileUse { isa, rows: 0, depth_bytes: 0 }
    }

    /// Gives the tiles the shapes [of a product](TileShapes::of_product) with `rows` rows, if they have others.
    ///
    /// # Safety
    /// As for [`Tiles`].
    #[inline(always)]
    pub(crate) unsafe fn set<T: Tiles>(&mut self, tiles: &mut T, rows: usize, depth_bytes: usize) {
        if !T::KEEPS_SHAPES || (self.rows, self.depth_bytes) != (rows, depth_bytes) {
            // SAFETY: guaranteed by the caller.
            unsafe { tiles.configure(&TileShapes::of_product(split(rows), depth_bytes)) };
            (self.rows, self.depth_bytes) = (rows, depth_bytes);
        }
    }
}

impl Drop for TileUse {
    fn drop(&mut self) {
        if self.rows > 0 {
            // SAFETY: the tiles were used, so the CPU has them.
            unsafe { release(self.isa) };
        }
    }
}

tile_kernel! {
    /// # Safety
    /// The CPU has tiles.
    fn release / end_use ()
}

#[inline(always)]
unsafe fn end_use<S: Simd, T: Tiles>(tiles: &mut T) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        S::fence();
        tiles.release();
    }
}

/// A loop of products alone, for measuring the peak rate: of bf16, or else of eight-bit integers. `rounds` times four
/// products of whole tiles.
///
/// # Safety
/// This CPU has tiles.
#[cfg(target_arch = "x86_64")]
pub unsafe fn tiles_loop(bf16: bool, rounds: usize) -> f32 {
    let mut tiles = Amx;
    // SAFETY: guaranteed by the caller; all tiles are whole.
    unsafe {
        tiles.configure(&TileShapes::of_product([ROWS; 2], ROW_BYTES));
        for _ in 0..rounds {
            if bf16 {
                tiles.dot_bf16::<0, 4, 6>();
                tiles.dot_bf16::<1, 4, 7>();
                tiles.dot_bf16::<2, 5, 6>();
                tiles.dot_bf16::<3, 5, 7>();
            } else {
                tiles.dot_i8::<0, 4, 6>();
                tiles.dot_i8::<1, 4, 7>();
                tiles.dot_i8::<2, 5, 6>();
                tiles.dot_i8::<3, 5, 7>();
            }
        }
        tiles.release();
    }
    0.0
}

/// # Safety
/// Never called.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn tiles_loop(_bf16: bool, _rounds: usize) -> f32 {
    unreachable!("only where there are tiles")
}

#[cfg(test)]
mod tests;
