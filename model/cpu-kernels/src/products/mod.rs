//! Matrix products `C[M][N] = A[M][K] W[N][K]^T` with weights that were packed once.
//!
//! Weights lie in panels of 32 outputs ([`panels`]), activations in tiles of a few rows ([`left`]), and a kernel holds a
//! tile's 32 columns of C in registers while it walks down K. Which kernel is decided by what the panels hold:
//!
//! | panels | activations | kernel |
//! |---|---|---|
//! | f32, f16, bf16 | f32 | [`floats`] |
//! | pairs of bf16 | bf16 | [`pairs`] |
//! | integers | eight bits, by group | [`levels`] |
//!
//! In each of them an element of C is summed up in one order, whatever the tile and the number of threads: a row of C
//! does not depend on how many rows there are or where it lies.

mod floats;
mod left;
mod levels;
mod multiply;
mod pairs;
mod panels;
mod tile;

pub(crate) use left::bf16_bits;
pub use levels::integers_loop;
pub use multiply::multiply;
pub use pairs::{has_pairs, pairs_loop};
pub use panels::{PANEL, PanelFormat, PanelsRef, RowOrder, pack_floats, pack_integers};
pub use tile::Output;
