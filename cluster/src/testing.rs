//! Records for this crate's own tests.

use baton_kv_cache::{KvDtype, KvFormat, KvLayout};

use crate::{Capacity, Role, WorkerRecord};

/// A plausible record.
pub(crate) fn record(id: &str, role: Role) -> WorkerRecord {
    let layout =
        KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::F32 };
    WorkerRecord {
        id: id.into(),
        incarnation: 1,
        role,
        address: "http://127.0.0.1:9".into(),
        model: "tiny".into(),
        kv_format: KvFormat::new("r1".into(), &layout, "theta=10000".into()),
        capacity: Capacity { num_blocks: 8, block_size: 16, max_running: 4, context_length: 128 },
    }
}

/// The same with blocks of twice the size.
pub(crate) fn other_format(mut record: WorkerRecord) -> WorkerRecord {
    record.kv_format.block_size *= 2;
    record
}
