//! Between the messages and the types of `baton-cluster-record`: a worker's record and its KV format.

use baton_cluster_record::{Capacity, Compute, RecordError, Role, WorkerId, WorkerRecord};
use baton_kv_layout::{KvDtype, KvFormat};

use crate::worker;

impl From<&WorkerRecord> for worker::WorkerRecord {
    fn from(record: &WorkerRecord) -> worker::WorkerRecord {
        worker::WorkerRecord {
            id: record.id.0.clone(),
            incarnation: record.incarnation,
            role: worker::Role::from(record.role).into(),
            address: record.address.clone(),
            model: record.model.clone(),
            kv_format: Some(kv_format_to_proto(&record.kv_format)),
            capacity: Some(worker::Capacity {
                num_blocks: saturate(record.capacity.num_blocks),
                block_size: saturate(record.capacity.block_size),
                max_running: saturate(record.capacity.max_running),
                context_length: saturate(record.capacity.context_length),
            }),
            compute: record.compute.as_ref().map(|compute| worker::Compute {
                machine: compute.machine.clone(),
                device: compute.device.clone(),
                units: compute.units.clone(),
            }),
        }
    }
}

impl TryFrom<worker::WorkerRecord> for WorkerRecord {
    type Error = RecordError;

    fn try_from(message: worker::WorkerRecord) -> Result<WorkerRecord, RecordError> {
        let role = match message.role() {
            worker::Role::Prefill => Role::Prefill,
            worker::Role::Decode => Role::Decode,
            worker::Role::Unspecified => return Err(RecordError::Missing("role")),
        };
        let capacity = message.capacity.ok_or(RecordError::Missing("capacity"))?;
        let kv_format = message.kv_format.ok_or(RecordError::Missing("kv_format"))?;
        let record = WorkerRecord {
            kv_format: kv_format_from_proto(kv_format)?,
            id: WorkerId(message.id),
            incarnation: message.incarnation,
            role,
            address: message.address,
            model: message.model,
            capacity: Capacity {
                num_blocks: capacity.num_blocks as usize,
                block_size: capacity.block_size as usize,
                max_running: capacity.max_running as usize,
                context_length: capacity.context_length as usize,
            },
            compute: message.compute.map(|compute| Compute {
                machine: compute.machine,
                device: compute.device,
                units: compute.units,
            }),
        };
        record.validate()?;
        Ok(record)
    }
}

impl From<Role> for worker::Role {
    fn from(role: Role) -> worker::Role {
        match role {
            Role::Prefill => worker::Role::Prefill,
            Role::Decode => worker::Role::Decode,
        }
    }
}

/// The protocol's form of a KV format.
pub fn kv_format_to_proto(format: &KvFormat) -> worker::KvFormat {
    worker::KvFormat {
        model_revision: format.model_revision.clone(),
        dtype: format.dtype.name().to_owned(),
        block_size: saturate(format.block_size),
        num_layers: saturate(format.num_layers),
        num_kv_heads: saturate(format.num_kv_heads),
        head_dim: saturate(format.head_dim),
        tensor_parallel: saturate(format.tensor_parallel),
        rope: format.rope.clone(),
    }
}

/// The inverse of [`kv_format_to_proto`].
///
/// # Errors
/// When the element type is unknown here.
pub fn kv_format_from_proto(format: worker::KvFormat) -> Result<KvFormat, RecordError> {
    let dtype = KvDtype::from_name(&format.dtype).ok_or_else(|| RecordError::Invalid {
        id: String::new(),
        field: "kv_format.dtype",
        value: format!("{:?}, expected one of {}", format.dtype, KvDtype::names()),
    })?;
    Ok(KvFormat {
        model_revision: format.model_revision,
        dtype,
        block_size: format.block_size as usize,
        num_layers: format.num_layers as usize,
        num_kv_heads: format.num_kv_heads as usize,
        head_dim: format.head_dim as usize,
        tensor_parallel: format.tensor_parallel as usize,
        rope: format.rope,
    })
}

fn saturate(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use baton_kv_layout::KvLayout;

    use super::*;

    #[test]
    fn a_record_survives_its_message_and_a_broken_message_is_refused_by_name() {
        let layout =
            KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::F32 };
        let record = WorkerRecord {
            id: "p0".into(),
            incarnation: 1,
            role: Role::Prefill,
            address: "http://127.0.0.1:9".into(),
            model: "tiny".into(),
            kv_format: KvFormat::new("r1".into(), &layout, "theta=10000".into()),
            capacity: Capacity { num_blocks: 8, block_size: 16, max_running: 4, context_length: 128 },
            compute: Some(Compute { machine: "m".into(), device: "cpu".into(), units: vec![0, 3] }),
        };
        let message = worker::WorkerRecord::from(&record);
        assert_eq!(WorkerRecord::try_from(message.clone()), Ok(record));
        let roleless = worker::WorkerRecord { role: 0, ..message.clone() };
        assert_eq!(WorkerRecord::try_from(roleless), Err(RecordError::Missing("role")));
        let formatless = worker::WorkerRecord { kv_format: None, ..message };
        assert_eq!(WorkerRecord::try_from(formatless), Err(RecordError::Missing("kv_format")));
    }
}
