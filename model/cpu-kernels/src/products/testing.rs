//! What tests of products use beside the products: constants and parts that references depend on.

use std::ops::Range;

use super::left::Tiles;

pub use super::slabs::SLAB;
pub use super::unpacked::Unpacked;
pub use super::widened::{UNCUT, cut};

/// The packed rows of each tile of at most `max_rows` rows, and the number of packed rows of all tiles.
pub fn tiles_of_rows(num_rows: usize, max_rows: usize) -> (Vec<Range<usize>>, usize) {
    let tiles = Tiles::new(num_rows, max_rows);
    let rows_of = |tile_idx: usize| {
        let first = tiles.first_row(tile_idx);
        first..first + tiles.rows_of(tile_idx)
    };
    ((0..tiles.len()).map(rows_of).collect(), tiles.first_row(tiles.len()))
}
