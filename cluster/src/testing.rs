//! Records and waiting, for this crate's own tests.

use std::{sync::Arc, time::Duration};

use baton_kv_cache::{KvDtype, KvFormat, KvLayout};

use tokio::time::timeout;

use crate::{Capacity, Members, Membership, Registration, RegistrationState, Role, WorkerRecord};

/// A valid record.
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
        compute: None,
    }
}

/// The same with another rotation of keys.
pub(crate) fn other_format(mut record: WorkerRecord) -> WorkerRecord {
    record.kv_format.rope = "theta=500000".into();
    record
}

/// The same with blocks of another size and type.
pub(crate) fn other_blocks(mut record: WorkerRecord) -> WorkerRecord {
    record.kv_format.block_size *= 2;
    record.kv_format.dtype = KvDtype::Int8;
    record
}

/// A bound for waits that should take milliseconds. A test that reaches it has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for a membership for which `is` holds.
pub(crate) async fn until(membership: &mut Membership, is: impl FnMut(&Arc<Members>) -> bool) {
    let reached = timeout(PATIENCE, membership.wait_for(is)).await.map(|reached| reached.map(|_| ()));
    match reached {
        Ok(reached) => reached.expect("discovery runs"),
        Err(_) => panic!("membership stays {:?}", membership.borrow()),
    }
}

/// Waits for a registration state for which `is` holds, and returns it.
pub(crate) async fn until_state(
    registration: &Registration,
    is: impl FnMut(&RegistrationState) -> bool,
) -> RegistrationState {
    let mut state = registration.state();
    let reached = timeout(PATIENCE, state.wait_for(is)).await;
    reached.expect("registration gets there in time").expect("registration runs").clone()
}
