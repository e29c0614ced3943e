//! Matrix products `C[M][N] = A[M][K] W[N][K]^T` with packed weights.
//!
//! Weights are packed in panels of 32 outputs ([`panels`]), activations in tiles of a few rows ([`left`]). A kernel
//! holds a tile's 32 columns of C in registers while it walks along K. The panels' format selects the kernel:
//!
//! | panels | activations | kernel |
//! |---|---|---|
//! | f32, f16, bf16 | f32 | [`floats`] |
//! | pairs of bf16 | bf16 | [`pairs`]; [`pair_tiles`] where there are tiles |
//! | integers | eight bits, by group | [`levels`], for many rows after nibbles are [`unpacked`]; [`level_tiles`] where there are tiles, from some rows on |
//! | integers in small groups or of four bits, where there are tiles | bf16 | [`pair_tiles`]; [`widened`] with one or two rows |
//!
//! Each kernel sums an element of C in one fixed order, whatever the tile and the number of threads. So a row of C
//! does not depend on the number of rows or on its index.

#[cfg(target_arch = "aarch64")]
mod blocks;
mod floats;
mod left;
mod level_tiles;
mod levels;
mod multiply;
mod pair_tiles;
mod pairs;
mod panels;
mod slabs;
#[cfg(feature = "testing")]
pub mod testing;
mod tile;
mod unpacked;
mod widened;

pub use left::bf16_bits;
pub use level_tiles::multiplies as level_tiles_multiply;
pub use levels::{integers_loop, nibbles_differ};
pub use multiply::multiply;
pub use pairs::{has_pairs, pairs_loop};
pub use panels::{PANEL, PanelFormat, PanelsRef, RowOrder, pack_floats, pack_integers};
pub use tile::Output;
