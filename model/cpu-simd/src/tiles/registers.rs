//! Tile registers: their shapes, and the operations on them.

/// Rows of a tile.
pub const ROWS: usize = 16;
/// Bytes of a row of a tile.
pub const ROW_BYTES: usize = 64;
/// Bytes of a tile.
pub const TILE_BYTES: usize = ROWS * ROW_BYTES;

/// The shapes of the eight tiles, as `ldtilecfg` reads them.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct TileShapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    pub(super) row_bytes: [u16; 16],
    pub(super) rows: [u8; 16],
}

impl TileShapes {
    /// Sums 0 to 3 of two tiles of rows (4 and 5) with two tiles of weights (6 and 7): `rows` are those of each tile
    /// of rows, `depth_bytes` the bytes along K of each. Tiles of no rows are not used.
    pub fn of_product(rows: [usize; 2], depth_bytes: usize) -> TileShapes {
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

/// Operations on tiles, which are named by their index.
///
/// # Safety (of all methods)
/// The CPU has the instructions and the process their permission; tiles are configured, and the shapes of the operands
/// fit each other. Pointers are valid for all rows of the tile, `stride` bytes apart.
#[allow(clippy::missing_safety_doc)] // said once, above
pub trait Tiles {
    /// Whether the tiles keep their shapes for the next kernel of this thread.
    const KEEPS_SHAPES: bool;
    /// Gives the tiles their shapes and sets them to zero.
    unsafe fn configure(&mut self, shapes: &TileShapes);
    /// Ends the use of tiles, so that the system need not save them.
    unsafe fn release(&mut self);
    /// Sets a tile to zero.
    unsafe fn zero<const T: u8>(&mut self);
    /// Reads a tile's rows.
    unsafe fn load<const T: u8>(&mut self, p: *const u8, stride: usize);
    /// As [`load`](Self::load), for memory that is read once: it does not displace what the first-level cache holds.
    #[inline(always)]
    unsafe fn load_once<const T: u8>(&mut self, p: *const u8, stride: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.load::<T>(p, stride) }
    }
    /// Writes a tile's rows.
    unsafe fn store<const T: u8>(&mut self, p: *mut u8, stride: usize);
    /// `C += A B` of bf16: for each element of C a chain of the even products and one of the odd ones, from zero, whose
    /// sum is added. Subnormal operands and results count as zero.
    unsafe fn dot_bf16<const C: u8, const A: u8, const B: u8>(&mut self);
    /// `C += A B` of signed with unsigned eight-bit integers.
    unsafe fn dot_i8_u8<const C: u8, const A: u8, const B: u8>(&mut self);
}
