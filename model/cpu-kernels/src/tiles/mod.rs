//! Tile registers: eight matrices of at most sixteen rows of 64 bytes, and their products.
//!
//! Kernels are written over [`Tiles`]. [`Amx`] is the hardware; the software model [`TileModel`] computes the same bits
//! on every processor, for tests.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(test)]
mod model;

use crate::simd::Isa;
#[cfg(target_arch = "x86_64")]
pub(crate) use amx::Amx;
#[cfg(test)]
pub(crate) use model::TileModel;

/// As [`kernel!`](crate::simd::kernel), for CPUs that have tiles, and over their software model.
///
/// `tile_kernel! { fn name / generic(args) }` makes `unsafe fn name(isa, args)` of `generic::<S, T>(&mut tiles, args)`.
macro_rules! tile_kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident / $generic:ident ($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$meta])*
        $vis unsafe fn $name(isa: $crate::simd::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
            unsafe fn amx($($arg: $ty),*) {
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::simd::Avx512, $crate::tiles::Amx>(&mut $crate::tiles::Amx, $($arg),*) }
            }
            #[cfg(test)]
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn model($($arg: $ty),*) {
                let mut tiles = $crate::tiles::TileModel::new();
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::simd::Avx2, $crate::tiles::TileModel>(&mut tiles, $($arg),*) }
            }
            // SAFETY: guaranteed by the caller.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    $crate::simd::Isa::Amx => amx($($arg),*),
                    #[cfg(test)]
                    #[cfg(target_arch = "x86_64")]
                    $crate::simd::Isa::TileModel => model($($arg),*),
                    _ => unreachable!("only where there are tiles"),
                }
            }
        }
    };
}
pub(crate) use tile_kernel;

/// Rows of a tile.
pub(crate) const ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(crate) const ROW_BYTES: usize = 64;
/// Operations, multiplications and additions, of one round of [`tiles_loop`], of bf16; twice as many of eight bits.
pub const TILE_OPERATIONS: usize = 4 * 2 * ROWS * ROWS * ROW_BYTES / 2;
/// Bytes of a tile.
pub(crate) const TILE_BYTES: usize = ROWS * ROW_BYTES;

/// Divides rows between two tiles.
fn split(rows: usize) -> [usize; 2] {
    [rows.min(ROWS), rows.saturating_sub(ROWS)]
}

/// The shapes of the eight tiles, as `ldtilecfg` reads them.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileShapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileShapes {
    /// Sums 0 to 3 of two tiles of rows (4 and 5) with two tiles of weights (6 and 7): `rows` are those of each tile
    /// of rows, `depth_bytes` the bytes along K of each. Tiles of no rows are not used.
    pub(crate) fn of_product(rows: [usize; 2], depth_bytes: usize) -> TileShapes {
        let mut shapes =
            TileShapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut set = |tile: usize, rows: usize, bytes: usize| {
            if rows > 0 {
                (shapes.rows[tile], shapes.row_bytes[tile]) = (rows as u8, bytes as u16);
            }
        };
        for (idx, rows) in rows.into_iter().enumerate() {
            set(2 * idx, rows, ROW_BYTES);
            set(2 * idx + 1, rows, ROW_BYTES);
            set(4 + idx, rows, depth_bytes);
        }
        set(6, depth_bytes / 4, ROW_BYTES);
        set(7, depth_bytes / 4, ROW_BYTES);
        shapes
    }
}

/// The shapes of the current thread's tiles, which are slow to set. Dropped, it ends the use of tiles, so that the
/// system need not save them.
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
unsafe fn end_use<S, T: Tiles>(tiles: &mut T) {
    // SAFETY: guaranteed by the caller.
    unsafe { tiles.release() }
}

/// Operations on tiles, which are named by their index.
///
/// # Safety (of all methods)
/// The CPU has the instructions and the process their permission; tiles are configured, and the shapes of the operands
/// fit each other. Pointers are valid for all rows of the tile, `stride` bytes apart.
pub(crate) trait Tiles {
    /// Whether the tiles keep their shapes for the next kernel of this thread.
    const KEEPS_SHAPES: bool;
    /// Gives the tiles their shapes and sets them to zero.
    unsafe fn configure(&mut self, shapes: &TileShapes);
    /// Ends the use of tiles, so that the system need not save them.
    unsafe fn release(&mut self);
    unsafe fn zero<const T: u8>(&mut self);
    unsafe fn load<const T: u8>(&mut self, p: *const u8, stride: usize);
    unsafe fn store<const T: u8>(&mut self, p: *mut u8, stride: usize);
    /// `C += A B` of bf16: for each element of C a chain of the even products and one of the odd ones, from zero, whose
    /// sum is added. Subnormal operands and results count as zero.
    unsafe fn dot_bf16<const C: u8, const A: u8, const B: u8>(&mut self);
    /// `C += A B` of signed eight-bit integers.
    unsafe fn dot_i8<const C: u8, const A: u8, const B: u8>(&mut self);
    /// `C += A B` of signed with unsigned eight-bit integers.
    unsafe fn dot_i8_u8<const C: u8, const A: u8, const B: u8>(&mut self);
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
