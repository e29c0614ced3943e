//! How the bytes of a block are arranged.
//!
//! Block-major: `[block][layer][k|v][kv_head][token][head_dim]`. A block is one contiguous run, so
//! is a layer of it (a *piece*, the unit of the layer-wise push), and so is a range of kv heads of
//! K or V of a layer (for different tensor-parallel degrees on the two sides).
//!
//! ```text
//! block    |<------------------------- block_bytes -------------------------->|
//!          | layer 0                        | layer 1        | ...            |
//! piece    |<-------- layer_bytes --------->|
//!          | K                | V           |
//! half     |<-- half_bytes -->|
//!          | head 0 | head 1  |  head_bytes each, [token][head_dim] inside
//! ```

use serde::{Deserialize, Serialize};

/// Type of a KV element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
        }
    }

    /// "f32", "f16" or "bf16".
    pub fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
        }
    }

    /// The inverse of [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<KvDtype> {
        [KvDtype::F32, KvDtype::F16, KvDtype::Bf16].into_iter().find(|dtype| dtype.name() == name)
    }
}

/// Sizes of one block and offsets inside it. See the module's picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Tokens in a block.
    pub block_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Key/value heads in a layer.
    pub num_kv_heads: usize,
    /// Elements of one head's key, and of its value.
    pub head_dim: usize,
    /// Element type.
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Bytes of one head's K (or V) of one layer of one block: `[block_size][head_dim]`.
    pub fn head_bytes(&self) -> usize {
        self.block_size * self.head_dim * self.dtype.size_bytes()
    }

    /// Bytes of K (or V) of one layer of one block.
    pub fn half_bytes(&self) -> usize {
        self.num_kv_heads * self.head_bytes()
    }

    /// Bytes of a piece: one layer of one block, K and V.
    pub fn layer_bytes(&self) -> usize {
        2 * self.half_bytes()
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.num_layers * self.layer_bytes()
    }

    /// Bytes that one token takes in all layers.
    pub fn token_bytes(&self) -> usize {
        self.block_bytes() / self.block_size
    }

    /// Blocks that hold `num_tokens` tokens, the last one perhaps in part.
    pub fn num_blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Offset of a piece in its block.
    pub fn layer_offset(&self, layer_idx: usize) -> usize {
        debug_assert!(layer_idx < self.num_layers);
        layer_idx * self.layer_bytes()
    }

    /// Offset in a piece of the key of `head_idx`; its value lies [`half_bytes`](Self::half_bytes) further.
    pub fn head_offset(&self, head_idx: usize) -> usize {
        debug_assert!(head_idx < self.num_kv_heads);
        head_idx * self.head_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_the_whole() {
        let layout =
            KvLayout { block_size: 16, num_layers: 3, num_kv_heads: 2, head_dim: 64, dtype: KvDtype::Bf16 };
        assert_eq!(layout.head_bytes(), 16 * 64 * 2);
        assert_eq!(layout.layer_bytes(), 2 * 2 * layout.head_bytes());
        assert_eq!(layout.block_bytes(), 3 * layout.layer_bytes());
        assert_eq!(layout.token_bytes(), 3 * 2 * 2 * 64 * 2);
        assert_eq!(layout.layer_offset(2) + layout.layer_bytes(), layout.block_bytes());
        assert_eq!(layout.num_blocks_for(0), 0);
        assert_eq!(layout.num_blocks_for(16), 1);
        assert_eq!(layout.num_blocks_for(17), 2);
    }

    #[test]
    fn dtype_names_come_back() {
        for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
            assert_eq!(KvDtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(KvDtype::from_name("fp8"), None);
    }
}
