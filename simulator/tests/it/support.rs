//! Small clusters.

use std::time::Duration;

use baton_cluster_record::Role;
use baton_cost::{LinkLine, StepLine};
use baton_kv_cache::{KvDtype, KvFormat};
use baton_simulator::{ClusterSpec, PolicyName, SimTime, SloTarget, WorkerSpec};

pub(crate) fn worker(role: Role, step: StepLine) -> WorkerSpec {
    WorkerSpec {
        role,
        num_devices: 1,
        step,
        slowness: 1.0,
        kv_format: KvFormat {
            model_revision: "r".into(),
            dtype: KvDtype::Bf16,
            block_size: 16,
            num_layers: 4,
            num_kv_heads: 2,
            head_dim: 64,
            tensor_parallel: 1,
            rope: String::new(),
        },
        kv_bytes_per_token: 4096.0,
        num_blocks: 20_000,
        tiers: Vec::new(),
        max_running: 256,
        max_waiting: 1 << 30,
        token_budget: 2048,
        itl_target: None,
        context_length: 1 << 17,
        compute: None,
    }
}

/// A model of a few billion parameters on a GPU.
pub(crate) const GPU: StepLine =
    StepLine { fixed: 0.008, per_token: 30e-6, per_context_token: 50e-9, per_pair: 1e-9 };

pub(crate) fn cluster(workers: Vec<WorkerSpec>) -> ClusterSpec {
    ClusterSpec {
        workers,
        num_routers: 1,
        policy: PolicyName::Baton,
        slo_ttft: SloTarget::TimesAlone(10.0),
        slo_tpot: SloTarget::TimesAlone(3.0),
        report_interval: SimTime::from_seconds(0.05),
        call: SimTime::from_seconds(0.0005),
        link: LinkLine { latency_seconds: 0.001, bytes_per_second: 10e9 },
        max_attempts: 16,
        balances: false,
        recovery_timeout: Duration::from_secs(60),
        noise: 0.0,
        changes: Vec::new(),
        seed: 1,
    }
}

pub(crate) fn workers(num_decode: usize, num_prefill: usize) -> Vec<WorkerSpec> {
    let of = |role: Role, num: usize| (0..num).map(move |_| worker(role, GPU));
    of(Role::Decode, num_decode).chain(of(Role::Prefill, num_prefill)).collect()
}
