//! A software model of the tile instructions, after Intel's Software Developer's Manual, volume 2 (TDPBF16PS, TDPBSUD,
//! TILELOADD).

use super::{ROW_BYTES, ROWS, TileShapes, Tiles};
use crate::Isa;

/// The vectors beside the software model.
#[cfg(target_arch = "x86_64")]
pub type ModelVectors = crate::Avx2;
#[cfg(target_arch = "aarch64")]
pub type ModelVectors = crate::Neon;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub type ModelVectors = crate::Portable;

/// The instruction sets to test: those of this CPU, and the software model of tiles.
pub fn tested_isas() -> Vec<Isa> {
    let mut all = Isa::available();
    if Isa::TileModel.is_available() {
        all.push(Isa::TileModel);
    }
    all
}

/// Eight tiles in memory.
pub struct TileModel {
    tiles: [[[u8; ROW_BYTES]; ROWS]; 8],
    shapes: Option<TileShapes>,
}

impl Default for TileModel {
    /// Tiles that are not configured.
    fn default() -> TileModel {
        TileModel { tiles: [[[0; ROW_BYTES]; ROWS]; 8], shapes: None }
    }
}

impl TileModel {
    /// Rows and bytes of a row. A processor raises an exception where this panics.
    fn shape(&self, tile: u8) -> (usize, usize) {
        let shapes = self.shapes.as_ref().expect("tiles are configured");
        let (rows, bytes) = (shapes.rows[tile as usize], shapes.row_bytes[tile as usize]);
        assert!(rows > 0, "tile {tile} is not configured");
        (usize::from(rows), usize::from(bytes))
    }

    /// Adds the products of each element's words of 32 bits to the element, word after word.
    fn dot(
        &mut self,
        [c, a, b]: [u8; 3],
        element: impl Fn(u32, &mut dyn Iterator<Item = [[u8; 4]; 2]>) -> u32,
    ) {
        let ((rows, bytes), (a_rows, depth), (b_rows, b_bytes)) =
            (self.shape(c), self.shape(a), self.shape(b));
        assert!(a_rows == rows && b_bytes == bytes && depth == 4 * b_rows, "shapes of a product");
        let word = |tile: u8, row: usize, idx: usize| -> [u8; 4] {
            self.tiles[tile as usize][row][4 * idx..][..4].try_into().expect("four bytes")
        };
        let mut sums = self.tiles[c as usize];
        for (row, sums) in sums.iter_mut().enumerate().take(rows) {
            for column in 0..bytes / 4 {
                let sum = u32::from_le_bytes(word(c, row, column));
                let mut words = (0..b_rows).map(|k| [word(a, row, k), word(b, k, column)]);
                sums[4 * column..][..4].copy_from_slice(&element(sum, &mut words).to_le_bytes());
            }
            sums[bytes..].fill(0);
        }
        sums[rows..].fill([0; ROW_BYTES]);
        self.tiles[c as usize] = sums;
    }
}

/// The number, or zero if it is subnormal.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

impl Tiles for TileModel {
    const KEEPS_SHAPES: bool = false;
    unsafe fn configure(&mut self, shapes: &TileShapes) {
        *self = TileModel { shapes: Some(*shapes), ..TileModel::default() };
    }
    unsafe fn release(&mut self) {
        *self = TileModel::default();
    }
    unsafe fn zero<const T: u8>(&mut self) {
        self.shape(T);
        self.tiles[T as usize] = [[0; ROW_BYTES]; ROWS];
    }
    unsafe fn load<const T: u8>(&mut self, p: *const u8, stride: usize) {
        let (rows, bytes) = self.shape(T);
        self.tiles[T as usize] = [[0; ROW_BYTES]; ROWS];
        for (row, to) in self.tiles[T as usize].iter_mut().enumerate().take(rows) {
            // SAFETY: the caller guarantees the rows.
            to[..bytes].copy_from_slice(unsafe { std::slice::from_raw_parts(p.add(row * stride), bytes) });
        }
    }
    unsafe fn store<const T: u8>(&mut self, p: *mut u8, stride: usize) {
        let (rows, bytes) = self.shape(T);
        for (row, from) in self.tiles[T as usize].iter().enumerate().take(rows) {
            // SAFETY: the caller guarantees the rows.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), p.add(row * stride), bytes) };
        }
    }
    unsafe fn dot_bf16<const C: u8, const A: u8, const B: u8>(&mut self) {
        self.dot([C, A, B], |sum, words| {
            let halves = |word: [u8; 4]| {
                [u16::from_le_bytes([word[0], word[1]]), u16::from_le_bytes([word[2], word[3]])]
                    .map(|half| flushed(f32::from_bits(u32::from(half) << 16)))
            };
            let mut chains = [0.0f32; 2];
            for [a, b] in words {
                let (a, b) = (halves(a), halves(b));
                for (chain, (a, b)) in chains.iter_mut().zip(a.into_iter().zip(b)) {
                    *chain = flushed(a.mul_add(b, *chain));
                }
            }
            let both = flushed(chains[0] + chains[1]);
            flushed(flushed(f32::from_bits(sum)) + both).to_bits()
        });
    }
    unsafe fn dot_i8_u8<const C: u8, const A: u8, const B: u8>(&mut self) {
        self.dot([C, A, B], |sum, words| {
            words.fold(sum, |sum, [a, b]| {
                let products = a.into_iter().zip(b).map(|(a, b)| i32::from(a as i8) * i32::from(b));
                sum.wrapping_add(products.sum::<i32>() as u32)
            })
        });
    }
}
