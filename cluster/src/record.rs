//! What a worker publishes about itself: [`WorkerRecord`], as a protobuf message and (through serde) as JSON in
//! etcd. It does not know how a record is sent.

use std::fmt;

use baton_kv_cache::{KvDtype, KvFormat};
use baton_proto::worker as proto;
use serde::{Deserialize, Serialize};

/// A worker's name: unique in the cluster and kept over restarts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub String);

impl WorkerId {
    /// The name itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for WorkerId {
    fn from(id: &str) -> WorkerId {
        WorkerId(id.to_owned())
    }
}

impl From<String> for WorkerId {
    fn from(id: String) -> WorkerId {
        WorkerId(id)
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which phase a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Owns requests, and generates all tokens after the first.
    Decode,
}

impl Role {
    /// "prefill" or "decode".
    pub fn name(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How much a worker can hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Blocks in its pool.
    pub num_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Sequences it computes at a time.
    pub max_running: usize,
    /// Tokens a sequence may have, prompt and output together.
    pub context_length: usize,
}

/// One worker, as others know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Its name.
    pub id: WorkerId,
    /// New at every start of the process: a worker with the same id and another incarnation has lost its state.
    pub incarnation: u64,
    /// What it serves.
    pub role: Role,
    /// Where its gRPC services listen: `http://host:port`.
    pub address: String,
    /// Name of the model.
    pub model: String,
    /// The format of its KV blocks.
    pub kv_format: KvFormat,
    /// How much it can hold.
    pub capacity: Capacity,
}

/// Why a record is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// A field is absent or empty.
    #[error("worker record without {0}")]
    Missing(&'static str),
    /// A field has a value that no worker can have.
    #[error("worker record of {id}: {field} is {value}")]
    Invalid {
        /// The worker.
        id: String,
        /// Which field.
        field: &'static str,
        /// What it held.
        value: String,
    },
    /// The record's JSON cannot be read.
    #[error("worker record is not readable: {0}")]
    Json(String),
}

impl WorkerRecord {
    /// Checks what the types cannot express.
    ///
    /// # Errors
    /// Names the first field that is not valid.
    pub fn validate(&self) -> Result<(), RecordError> {
        let invalid = |field, value: &dyn fmt::Display| {
            Err(RecordError::Invalid { id: self.id.0.clone(), field, value: value.to_string() })
        };
        if self.id.0.is_empty() {
            return Err(RecordError::Missing("id"));
        }
        if self.id.0.len() > 256 || self.id.0.chars().any(|c| c == '/' || c.is_control()) {
            return invalid(
                "id",
                &format!("{:?} (at most 256 bytes, no slash, no control character)", self.id.0),
            );
        }
        if !is_url(&self.address) {
            return invalid("address", &format!("{:?}, expected http://host:port", self.address));
        }
        if self.kv_format.block_size == 0 {
            return invalid("kv_format.block_size", &0);
        }
        Ok(())
    }

    /// The form in which etcd keeps it.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a record is plain data with string keys")
    }

    /// The inverse of [`to_json`](Self::to_json), checked.
    ///
    /// # Errors
    /// When it is no record, or not a valid one.
    pub fn from_json(json: &[u8]) -> Result<WorkerRecord, RecordError> {
        let record: WorkerRecord =
            serde_json::from_slice(json).map_err(|error| RecordError::Json(error.to_string()))?;
        record.validate()?;
        Ok(record)
    }
}

fn is_url(address: &str) -> bool {
    let Some(authority) = address.strip_prefix("http://").or_else(|| address.strip_prefix("https://")) else {
        return false;
    };
    address.parse::<tonic::transport::Uri>().is_ok_and(|uri| {
        uri.host().is_some_and(|host| !host.is_empty())
            && uri.port_u16().is_some_and(|port| port != 0)
            && !authority.trim_end_matches('/').contains('/')
    })
}

impl From<&WorkerRecord> for proto::WorkerRecord {
    fn from(record: &WorkerRecord) -> proto::WorkerRecord {
        proto::WorkerRecord {
            id: record.id.0.clone(),
            incarnation: record.incarnation,
            role: proto::Role::from(record.role).into(),
            address: record.address.clone(),
            model: record.model.clone(),
            kv_format: Some(kv_format_to_proto(&record.kv_format)),
            capacity: Some(proto::Capacity {
                num_blocks: saturate(record.capacity.num_blocks),
                block_size: saturate(record.capacity.block_size),
                max_running: saturate(record.capacity.max_running),
                context_length: saturate(record.capacity.context_length),
            }),
        }
    }
}

impl TryFrom<proto::WorkerRecord> for WorkerRecord {
    type Error = RecordError;

    fn try_from(message: proto::WorkerRecord) -> Result<WorkerRecord, RecordError> {
        let role = match message.role() {
            proto::Role::Prefill => Role::Prefill,
            proto::Role::Decode => Role::Decode,
            proto::Role::Unspecified => return Err(RecordError::Missing("role")),
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
        };
        record.validate()?;
        Ok(record)
    }
}

impl From<Role> for proto::Role {
    fn from(role: Role) -> proto::Role {
        match role {
            Role::Prefill => proto::Role::Prefill,
            Role::Decode => proto::Role::Decode,
        }
    }
}

/// The protocol's form of a KV format.
pub fn kv_format_to_proto(format: &KvFormat) -> proto::KvFormat {
    proto::KvFormat {
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
pub fn kv_format_from_proto(format: proto::KvFormat) -> Result<KvFormat, RecordError> {
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
    use super::*;
    use crate::testing::record;

    #[test]
    fn a_record_survives_both_of_its_other_forms() {
        let record = record("p0", Role::Prefill);
        assert_eq!(WorkerRecord::from_json(&record.to_json()), Ok(record.clone()));
        assert_eq!(WorkerRecord::try_from(proto::WorkerRecord::from(&record)), Ok(record));
    }

    #[test]
    fn records_that_cannot_be_true_are_refused_by_name() {
        let good = record("p0", Role::Prefill);
        let cases = [
            (WorkerRecord { id: "".into(), ..good.clone() }, "without id"),
            (WorkerRecord { id: "a/b".into(), ..good.clone() }, "id is"),
            (WorkerRecord { address: "localhost:1".into(), ..good.clone() }, "address is \"localhost:1\""),
            (WorkerRecord { address: "http://host".into(), ..good.clone() }, "address is"),
            (WorkerRecord { address: "http://:80".into(), ..good.clone() }, "address is"),
        ];
        for (record, expected) in cases {
            let error = record.validate().unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} does not say {expected:?}");
        }
        let message = proto::WorkerRecord { role: 0, ..proto::WorkerRecord::from(&good) };
        assert_eq!(WorkerRecord::try_from(message), Err(RecordError::Missing("role")));
        let message = proto::WorkerRecord { kv_format: None, ..proto::WorkerRecord::from(&good) };
        assert_eq!(WorkerRecord::try_from(message), Err(RecordError::Missing("kv_format")));
    }
}
