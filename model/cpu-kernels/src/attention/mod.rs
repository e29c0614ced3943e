//! Causal attention over paged KV.
//!
//! An item of work is one kv head of a few consecutive rows of one sequence: the query heads of its group times the
//! rows form a small matrix Q, and KV passes by in tiles, and tiles in spans, at fixed absolute positions.
//!
//! ```text
//! positions   0        64       128              512                           1024
//! tiles       |--------|--------|--------| ...   |--------|--------| ...       |
//! spans       |---------------------------------|------------------------------|---
//! row p, window w               [p-w+1 ............... p]    what the row sees; the rest weighs zero
//! ```
//! Softmax goes tile by tile with a running maximum; it starts anew at each span, and the states of spans are
//! folded together from the first to the last. Where there are few items, as with one long sequence that decodes,
//! spans are items of their own and are folded afterwards: the same sums, shared by more threads. Tiles, spans and
//! the order inside them are functions of positions alone, so a row's result does not depend on its neighbours, on
//! chunks or on threads.
//!
//! Where KV is bf16 and the processor multiplies pairs of such, queries and weights are rounded to bf16, too, and a pair
//! of dimensions, or of positions, is one operation; sums and softmax stay f32.

mod attend;
mod direct;
mod division;
mod pass;
mod product;
mod shape;
mod softmax;
mod widen;
mod words;

pub use attend::attend;
pub use shape::AttentionShape;
