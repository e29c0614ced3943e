//! The shape of a layer's attention, and the fixed sizes by which it is divided.

/// Positions in a tile of KV; a multiple of the lanes.
pub(super) const TILE: usize = 64;
/// Positions in a span; a multiple of a tile.
pub(super) const SPAN: usize = 512;
/// Queries in an item, about: widened tiles of KV are used by so many.
pub(super) const QUERIES: usize = 256;
/// Queries in an item when there would be too few items for the threads.
pub(super) const MIN_QUERIES: usize = 24;
/// Items that a thread should find.
pub(super) const ITEMS_PER_THREAD: usize = 4;
/// What a layer's attention looks like.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Where these begin among the heads of the storage.
    pub first_kv_head: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Scores are `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Positions that a row sees, its own included.
    pub window: Option<usize>,
    /// What is in bf16 is multiplied in pairs; the processor can.
    pub bf16_pairs: bool,
}

impl AttentionShape {
    /// Query heads that share a kv head.
    pub(super) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}
