//! The shape of a layer's attention, and the fixed sizes of its division.

/// Positions in a tile of KV; a multiple of the lanes.
pub(super) const TILE: usize = 64;
/// Positions in a span; a multiple of a tile.
pub(super) const SPAN: usize = 512;
/// The number of queries of an item if there are otherwise too few items for the threads.
pub(super) const MIN_QUERIES: usize = 24;
/// The wanted number of items per thread.
pub(super) const ITEMS_PER_THREAD: usize = 4;
/// The shape of a layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// The first of these heads among the heads of the storage.
    pub first_kv_head: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// Scores are `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// The number of positions that a row sees, its own included.
    pub window: Option<usize>,
    /// KV of bf16, FP8 and INT8 is multiplied in pairs of bf16; the CPU has the instruction.
    pub bf16_pairs: bool,
}

impl AttentionShape {
    /// Query heads that share a KV head.
    pub(super) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}
