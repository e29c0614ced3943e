//! The arrangement of a block's bytes.
//!
//! Block-major: `[block][layer][k|v][kv_head][token][head_dim]`. A block is contiguous. So is one layer of it (a
//! *piece*, the unit of the layer-wise push), and so is a range of kv heads of K or V of a layer (for different
//! tensor-parallel degrees on the two sides).
//!
//! ```text
//! block    |<------------------------- block_bytes -------------------------->|
//!          | layer 0                        | layer 1        | ...            |
//! piece    |<-------- layer_bytes --------->|
//!          | K                | V           |
//! half     |<-- half_bytes -->|
//!          | head 0 | head 1  |  head_bytes each
//! head     | [token][head_dim] elements | [token] scales of 8-bit types, bf16 |
//! ```
//!
//! The value of an FP8 or INT8 element is the element times the scale of its token. The scales of a head follow its
//! elements, so every range above stays contiguous.

use crate::BlockId;

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
    /// E4M3 (Open Compute Project, 8-bit floating point): 448 is the largest value, there are no infinities. Scaled.
    Fp8,
    /// Integers in -127..=127. Scaled.
    Int8,
}

impl KvDtype {
    /// All types.
    pub const ALL: [KvDtype; 5] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8, KvDtype::Int8];

    /// Bytes of one element, without its share of a scale.
    #[inline]
    pub fn size_bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::Fp8 | KvDtype::Int8 => 1,
        }
    }

    /// Bytes of the scale of one head's key (or value) of one token; 0 for types without scales.
    #[inline]
    pub fn scale_bytes(self) -> usize {
        match self {
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => 0,
            KvDtype::Fp8 | KvDtype::Int8 => 2,
        }
    }

    /// Bytes of one head's key (or value) of one token: elements and scale.
    #[inline]
    pub fn vector_bytes(self, head_dim: usize) -> usize {
        head_dim * self.size_bytes() + self.scale_bytes()
    }

    /// "f32", "f16", "bf16", "fp8" or "int8".
    pub fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
            KvDtype::Fp8 => "fp8",
            KvDtype::Int8 => "int8",
        }
    }

    /// The inverse of [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<KvDtype> {
        KvDtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// All names, as a message lists them.
    pub fn names() -> String {
        KvDtype::ALL.map(KvDtype::name).join(", ")
    }
}

/// Sizes of one block and offsets inside it. See the picture in the module's documentation.
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
    /// Bytes of one head's K (or V) of one layer of one block: `[block_size][head_dim]` elements, then scales.
    #[inline]
    pub fn head_bytes(&self) -> usize {
        self.block_size * self.dtype.vector_bytes(self.head_dim)
    }

    /// Bytes of K (or V) of one layer of one block.
    #[inline]
    pub fn half_bytes(&self) -> usize {
        self.num_kv_heads * self.head_bytes()
    }

    /// Bytes of a piece: one layer of one block, K and V.
    #[inline]
    pub fn layer_bytes(&self) -> usize {
        2 * self.half_bytes()
    }

    /// Bytes of one block.
    #[inline]
    pub fn block_bytes(&self) -> usize {
        self.num_layers * self.layer_bytes()
    }

    /// Bytes that one token takes in all layers.
    pub fn token_bytes(&self) -> usize {
        self.block_bytes() / self.block_size
    }

    /// Blocks that `num_tokens` tokens need, the last one perhaps in part.
    pub fn num_blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Offset of a piece in its block.
    #[inline]
    pub fn layer_offset(&self, layer_idx: usize) -> usize {
        debug_assert!(layer_idx < self.num_layers);
        layer_idx * self.layer_bytes()
    }

    /// Offset of a piece in memory of blocks.
    #[inline]
    pub fn piece_offset(&self, block: BlockId, layer_idx: usize) -> usize {
        block.idx() * self.block_bytes() + self.layer_offset(layer_idx)
    }

    /// Offset in a piece of the key of `head_idx`. Its value is [`half_bytes`](Self::half_bytes) further.
    pub fn head_offset(&self, head_idx: usize) -> usize {
        debug_assert!(head_idx < self.num_kv_heads);
        head_idx * self.head_bytes()
    }

    /// Offset of a token's elements in its head's K (or V).
    #[inline]
    pub fn token_offset(&self, token_idx: usize) -> usize {
        debug_assert!(token_idx < self.block_size);
        token_idx * self.head_dim * self.dtype.size_bytes()
    }

    /// Offset of a token's scale in its head's K (or V), for types with scales.
    #[inline]
    pub fn scale_offset(&self, token_idx: usize) -> usize {
        debug_assert!(token_idx < self.block_size);
        self.block_size * self.head_dim * self.dtype.size_bytes() + token_idx * self.dtype.scale_bytes()
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
    fn scales_follow_the_elements_of_their_head() {
        for dtype in [KvDtype::Fp8, KvDtype::Int8] {
            let layout = KvLayout { block_size: 5, num_layers: 2, num_kv_heads: 3, head_dim: 7, dtype };
            assert_eq!(layout.token_offset(4) + 7, layout.scale_offset(0));
            assert_eq!(layout.scale_offset(4) + 2, layout.head_bytes());
            assert_eq!(layout.head_offset(2) + layout.head_bytes(), layout.half_bytes());
            assert_eq!(layout.token_bytes(), 2 * 2 * 3 * (7 + 2));
            assert_eq!(layout.block_bytes(), 5 * layout.token_bytes());
        }
    }

    #[test]
    fn dtype_names_round_trip() {
        for dtype in KvDtype::ALL {
            assert_eq!(KvDtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(KvDtype::from_name("fp4"), None);
    }
}
