//! Causal attention over paged KV.
//!
//! A work item is one KV head of a few consecutive rows of one sequence. The query heads of its group times the rows
//! form a small matrix Q. KV is processed in tiles, and tiles are grouped in spans, at fixed absolute positions.
//!
//! ```text
//! positions   0        64       128              512                           1024
//! tiles       |--------|--------|--------| ...   |--------|--------| ...       |
//! spans       |---------------------------------|------------------------------|---
//! row p, window w               [p-w+1 ............... p]    what the row sees; the rest weighs zero
//! ```
//! Softmax is computed tile by tile with a running maximum. It restarts at each span, and the states of spans are
//! folded from the first to the last. If there are few items, as with one long sequence that decodes, spans are items
//! of their own and are folded afterwards: the same sums, computed by more threads. Tiles, spans and the order inside
//! them depend on positions alone, so a row's result does not depend on other rows, on chunks or on threads.
//!
//! If KV is bf16, FP8 or INT8 and the CPU multiplies pairs of bf16, queries and weights are also rounded to bf16, and one
//! operation takes a pair of dimensions or of positions. Sums and softmax stay f32. With AMX, blocks of 128 positions in tile
//! registers take the place of tiles.
//!
//! It does not know models, weights or what comes before and after attention.

mod attend;
mod direct;
mod division;
mod kv;
mod method;
mod pass;
mod product;
mod shape;
mod softmax;
mod tiles;
mod widen;

pub use attend::attend;
pub use kv::store_rows;
pub use shape::AttentionShape;
