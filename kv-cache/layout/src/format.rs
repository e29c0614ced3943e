//! The fingerprint of a worker's KV. Two workers compare it to know whether one can use the other's KV.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::{KvDtype, KvLayout};

/// Everything that defines the meaning of a block's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvFormat {
    /// Identity of the weights: a hash of the configuration, of the weight files' headers and sizes, and of parts of each tensor.
    pub model_revision: String,
    /// Element type.
    pub dtype: KvDtype,
    /// Tokens in a block.
    pub block_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Key/value heads in a layer, of the whole model.
    pub num_kv_heads: usize,
    /// Elements of one head's key.
    pub head_dim: usize,
    /// Ranks among which the heads are divided.
    pub tensor_parallel: usize,
    /// Canonical text of the rotary embedding's parameters: keys are stored rotated.
    pub rope: String,
}

/// What formats without a [difference](KvFormat::difference) have in common, and others only by a chance of 2^-64: a number that
/// is compared sooner than a format. Of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvClass(u64);

impl KvFormat {
    /// The format of undivided KV of `layout`.
    pub fn new(model_revision: String, layout: &KvLayout, rope: String) -> KvFormat {
        KvFormat {
            model_revision,
            dtype: layout.dtype,
            block_size: layout.block_size,
            num_layers: layout.num_layers,
            num_kv_heads: layout.num_kv_heads,
            head_dim: layout.head_dim,
            tensor_parallel: 1,
            rope,
        }
    }

    /// The first difference that prevents a handoff between two workers, as text for a message; `None` when there is
    /// none. Block size and element type may differ: a [`KvMapping`](crate::KvMapping) converts between them.
    pub fn difference(&self, other: &KvFormat) -> Option<String> {
        fn differ<T: PartialEq + std::fmt::Debug>(what: &str, a: &T, b: &T) -> Option<String> {
            (a != b).then(|| format!("{what} {a:?} against {b:?}"))
        }
        differ("model revision", &self.model_revision, &other.model_revision)
            .or_else(|| differ("layers", &self.num_layers, &other.num_layers))
            .or_else(|| differ("kv heads", &self.num_kv_heads, &other.num_kv_heads))
            .or_else(|| differ("head dim", &self.head_dim, &other.head_dim))
            .or_else(|| differ("tensor parallel", &self.tensor_parallel, &other.tensor_parallel))
            .or_else(|| differ("rope", &self.rope, &other.rope))
    }

    /// The class of the format.
    pub fn class(&self) -> KvClass {
        let KvFormat { model_revision, num_layers, num_kv_heads, head_dim, tensor_parallel, rope, .. } = self;
        let mut hasher = DefaultHasher::new();
        (model_revision, num_layers, num_kv_heads, head_dim, tensor_parallel, rope).hash(&mut hasher);
        KvClass(hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_mapping_converts_may_differ() {
        let layout =
            KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 2, head_dim: 64, dtype: KvDtype::Bf16 };
        let format = KvFormat::new("r1".into(), &layout, "theta=10000".into());
        assert_eq!(format.difference(&format.clone()), None);
        let others = [
            KvFormat { model_revision: "r2".into(), ..format.clone() },
            KvFormat { num_layers: 3, ..format.clone() },
            KvFormat { num_kv_heads: 1, ..format.clone() },
            KvFormat { head_dim: 32, ..format.clone() },
            KvFormat { tensor_parallel: 2, ..format.clone() },
            KvFormat { rope: "theta=500000".into(), ..format.clone() },
        ];
        for other in others {
            assert!(format.difference(&other).is_some() && format.class() != other.class(), "{other:?}");
        }
        let other = KvFormat { dtype: KvDtype::Int8, block_size: 32, ..format.clone() };
        assert_eq!(format.difference(&other), None);
        assert_eq!(format.class(), other.class());
    }
}
