//! What the unit tests of the data plane share.

use baton_handoff::{AccessKey, Generation, Secret};
use baton_kv_cache::{KvDtype, KvLayout};

pub(crate) const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 3, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::F32 };

/// An access key of no grant.
pub(crate) fn some_access_key(generation: u64) -> AccessKey {
    AccessKey { generation: Generation(generation), secret: Secret::default() }
}
