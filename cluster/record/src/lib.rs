//! What a worker says about itself: [`WorkerRecord`], and (through serde) the JSON that etcd keeps. It does not know how
//! a record travels, nor the protocol's message of it. [`BalanceGrants`] is what a decode worker decides about its own load.
#![forbid(unsafe_code)]

mod balance;

use std::fmt;

pub use baton_kv_layout::KvClass;
use baton_kv_layout::KvFormat;
use baton_random::{GOLDEN, mix};
use serde::{Deserialize, Serialize};

pub use balance::{BalanceArrival, BalanceGrants, BalanceRefused};

/// A worker's name: unique in the cluster and kept over restarts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub String);

impl WorkerId {
    /// The name itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Of these routers, by their names, the one that this worker belongs to. Each of several routers is the one of about as many
    /// workers, all agree on it without talking to each other, and one more router takes workers from others only as far as it
    /// gets them (rendezvous hashing; Thaler, Ravishankar 1998).
    pub fn home_router(&self, routers: impl IntoIterator<Item = u64>) -> Option<u64> {
        // FNV-1a of the name, mixed with the router.
        let own = self.0.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
        });
        let weight = |router: u64| mix(own ^ router.wrapping_mul(GOLDEN));
        routers.into_iter().max_by_key(|&router| (weight(router), router))
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
    /// What computes for it, and where. `None`: it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<Compute>,
}

/// The machine and the devices that compute for a worker. Workers that have one in common share its arithmetic: while both compute,
/// each is slower.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compute {
    /// Boot id of the machine.
    pub machine: String,
    /// "cpu", "cuda" or "sim".
    pub device: String,
    /// Numbers of processors of that machine. Empty: no other worker shares what computes, as far as is known.
    pub units: Vec<u32>,
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

impl Compute {
    /// Whether a processor is in both.
    pub fn shares(&self, other: &Compute) -> bool {
        self.machine == other.machine
            && self.device == other.device
            && self.units.iter().any(|unit| other.units.contains(unit))
    }
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
    address.parse::<http::Uri>().is_ok_and(|uri| {
        uri.host().is_some_and(|host| !host.is_empty())
            && uri.port_u16().is_some_and(|port| port != 0)
            && !authority.trim_end_matches('/').contains('/')
    })
}

#[cfg(test)]
mod tests {
    use baton_kv_layout::{KvDtype, KvLayout};

    use super::*;

    fn record() -> WorkerRecord {
        let layout =
            KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::F32 };
        WorkerRecord {
            id: "p0".into(),
            incarnation: 1,
            role: Role::Prefill,
            address: "http://127.0.0.1:9".into(),
            model: "tiny".into(),
            kv_format: KvFormat::new("r1".into(), &layout, "theta=10000".into()),
            capacity: Capacity { num_blocks: 8, block_size: 16, max_running: 4, context_length: 128 },
            compute: Some(Compute { machine: "m".into(), device: "cpu".into(), units: vec![0, 1] }),
        }
    }

    #[test]
    fn every_router_is_the_home_of_its_part_and_keeps_it() {
        let workers: Vec<WorkerId> = (0..400).map(|idx| WorkerId(format!("d{idx:05}"))).collect();
        let homes = |routers: std::ops::Range<u64>| {
            workers.iter().map(move |worker| worker.home_router(routers.clone())).collect::<Vec<_>>()
        };
        let (four, five) = (homes(0..4), homes(0..5));
        for router in 0..4 {
            let num = four.iter().filter(|&&home| home == Some(router)).count();
            assert!((70..130).contains(&num), "{router} has {num}");
        }
        for (before, after) in four.iter().zip(&five) {
            assert!(before == after || *after == Some(4), "{before:?} {after:?}");
        }
        assert_eq!(homes(0..0)[0], None);
    }

    #[test]
    fn workers_share_what_both_name() {
        let compute = |machine: &str, units: &[u32]| Compute {
            machine: machine.into(),
            device: "cpu".into(),
            units: units.to_vec(),
        };
        assert!(compute("m", &[0, 1]).shares(&compute("m", &[1, 2])));
        assert!(!compute("m", &[0, 1]).shares(&compute("m", &[2, 3])));
        assert!(!compute("m", &[0, 1]).shares(&compute("n", &[0, 1])));
    }

    #[test]
    fn a_record_of_an_older_worker_is_read() {
        let older = WorkerRecord { compute: None, ..record() };
        let json = String::from_utf8(older.to_json()).unwrap();
        assert!(!json.contains("compute"), "{json}");
        assert_eq!(WorkerRecord::from_json(json.as_bytes()), Ok(older));
    }

    #[test]
    fn a_record_survives_its_json() {
        assert_eq!(WorkerRecord::from_json(&record().to_json()), Ok(record()));
    }

    #[test]
    fn records_that_cannot_be_true_are_refused_by_name() {
        let cases = [
            (WorkerRecord { id: "".into(), ..record() }, "without id"),
            (WorkerRecord { id: "a/b".into(), ..record() }, "id is"),
            (WorkerRecord { address: "localhost:1".into(), ..record() }, "address is \"localhost:1\""),
            (WorkerRecord { address: "http://host".into(), ..record() }, "address is"),
            (WorkerRecord { address: "http://:80".into(), ..record() }, "address is"),
        ];
        for (record, expected) in cases {
            let error = record.validate().unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} does not say {expected:?}");
        }
    }
}
