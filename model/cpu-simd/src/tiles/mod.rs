//! Tile registers: eight matrices of at most sixteen rows of 64 bytes, and their products.
//!
//! Kernels are written over [`Tiles`]. [`Amx`] is the hardware; the software model `TileModel` computes the same bits
//! on every processor, for tests.

#[cfg(target_arch = "x86_64")]
mod amx;
mod kernel;
#[cfg(any(test, feature = "testing"))]
mod model;
mod registers;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub use amx::Amx;
#[cfg(any(test, feature = "testing"))]
pub use model::{ModelVectors, TileModel, tested_isas};
pub use registers::{ROW_BYTES, ROWS, TILE_BYTES, TileShapes, Tiles};

use crate::{Isa, Simd, tile_kernel};

/// Operations, multiplications and additions, of one round of [`tiles_loop`], of bf16; twice as many of eight bits.
pub const TILE_OPERATIONS: usize = 4 * 2 * ROWS * ROWS * ROW_BYTES / 2;

/// Divides rows between two tiles.
fn split(rows: usize) -> [usize; 2] {
    [rows.min(ROWS), rows.saturating_sub(ROWS)]
}

/// The shapes of the current thread's tiles, which are slow to set. Dropped, it ends the use of tiles, so that the
/// system need not save them, and other threads see what kernels stored past the caches.
pub struct TileUse {
    isa: Isa,
    rows: usize,
    depth_bytes: usize,
}

impl TileUse {
    /// The tiles of `isa`, not used yet.
    pub fn new(isa: Isa) -> TileUse {
        TileUse { isa, rows: 0, depth_bytes: 0 }
    }

    /// Gives the tiles the shapes [of a product](TileShapes::of_product) with `rows` rows, if they have others.
    ///
    /// # Safety
    /// As for [`Tiles`].
    #[inline(always)]
    pub unsafe fn set<T: Tiles>(&mut self, tiles: &mut T, rows: usize, depth_bytes: usize) {
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
                tiles.dot_i8_u8::<0, 4, 6>();
                tiles.dot_i8_u8::<1, 4, 7>();
                tiles.dot_i8_u8::<2, 5, 6>();
                tiles.dot_i8_u8::<3, 5, 7>();
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
