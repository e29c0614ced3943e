//! Plans over arbitrary records and loads of workers.
//!
//! A plan asks only workers that may be asked, each for what its role is, and no worker for its own prefix.
#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use baton_cluster::{Role, WorkerRecord};
use baton_fuzz::{Change, pick};
use baton_planner::{
    ClusterView, HeldPrefix, LinkLine, Load, Plan, PlanByTime, PlanRequest, Policy, Prefill, PrefillMode,
    SentWork, Slo, StepLine, StepYield, StorePace, Usability, WorkerKey, WorkerPace, WorkerView,
};
use baton_proto::worker as proto;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    num_tokens: Change,
    max_tokens: Change,
    mode: u8,
    slo: [Option<f64>; 2],
    seed: u64,
    workers: Vec<Worker>,
}

#[derive(Arbitrary, Debug)]
struct Worker {
    role: u8,
    block_size: Change,
    context_length: Change,
    load: [Change; 6],
    /// A line, and five counts. `None`: an older worker.
    pace: Option<([f64; 4], [Change; 5])>,
    link: Option<[f64; 2]>,
    sent: [Change; 5],
    shares: bool,
    num_assigned: u8,
    usability: u8,
    cached: Option<Change>,
    is_excluded: bool,
}

fuzz_target!(|input: Input| {
    let mut request = PlanRequest {
        // A prompt fits into a message.
        num_tokens: input.num_tokens.of(8) as u32 as usize,
        max_tokens: input.max_tokens.of(16) as u32 as usize,
        prefill: *pick(&[PrefillMode::Auto, PrefillMode::Local, PrefillMode::Remote], input.mode),
        slo: Slo { ttft: input.slo[0], tpot: input.slo[1] },
        seed: input.seed,
        explain: true,
        ..PlanRequest::default()
    };
    let mut view = ClusterView::default();
    for (idx, worker) in input.workers.iter().enumerate() {
        let Ok(record) = WorkerRecord::try_from(worker.record(idx)) else { continue };
        let key = WorkerKey::of(&record);
        if let Some(cached) = worker.cached {
            let [num_tokens, pooled, in_memory, with_store] =
                [8, 3, 5, 9].map(|bound| cached.of(bound) as u32 as usize);
            let (worker, above) = (key.clone().into(), [pooled, in_memory]);
            request.cached.push(HeldPrefix { worker, num_tokens, above, with_store });
        }
        if worker.is_excluded {
            request.excluded.push(key);
        }
        let [num_waiting, num_running, num_free_blocks, num_total_blocks, num_queued_tokens, speed] =
            worker.load.map(|change| change.of(4));
        // As many bits as in the message.
        let load = Load {
            num_waiting: num_waiting as u32 as usize,
            num_running: num_running as u32 as usize,
            num_free_blocks: num_free_blocks as u32 as usize,
            num_total_blocks: num_total_blocks as u32 as usize,
            age: std::time::Duration::from_nanos(num_queued_tokens.rotate_left(17)),
            num_queued_tokens,
            num_queued_blocks: num_queued_tokens.rotate_left(11) as u32 as usize,
            prefill_tokens_per_second: speed,
            pace: worker.pace.map(|(step, counts)| {
                let [num_decoding, context, pairs, max_step_tokens, itl] = counts.map(|change| change.of(4));
                WorkerPace {
                    step: StepLine {
                        fixed: step[0],
                        per_token: step[1],
                        per_context_token: step[2],
                        per_pair: step[3],
                    },
                    is_measured: num_decoding % 2 == 0,
                    num_decoding: num_decoding as u32 as usize,
                    num_context_tokens: context,
                    num_queued_pairs: pairs,
                    recent_itl: f64::from_bits(itl),
                    // What a report says is checked before.
                    step_yield: StepYield::checked(1.0 + (itl % 1024) as f64).unwrap_or_default(),
                    max_step_tokens: max_step_tokens as u32 as usize,
                    itl_target: f64::from_bits(itl.rotate_left(32)),
                }
            }),
            blends: num_queued_tokens % 2 == 0,
            link_within: None,
            link_beyond: worker
                .link
                .map(|[latency_seconds, bytes_per_second]| LinkLine { latency_seconds, bytes_per_second }),
            is_home_of_another: num_waiting % 3 == 0,
            recall_token_seconds: [5, 23].map(|bits| f64::from_bits(num_queued_tokens.rotate_left(bits))),
            store_pace: (num_running % 2 == 0).then(|| StorePace {
                latency_seconds: f64::from_bits(num_queued_tokens.rotate_left(31)),
                token_seconds: f64::from_bits(num_queued_tokens.rotate_left(41)),
            }),
        };
        let [num_requests, num_tokens, num_pairs, num_context_tokens, num_blocks] =
            worker.sent.map(|change| change.of(4));
        let sent = SentWork { num_requests, num_tokens, num_pairs, num_context_tokens, num_blocks };
        let all = [Usability::Ready, Usability::Unreachable, Usability::BackingOff, Usability::Draining];
        let usability = *pick(&all, worker.usability);
        let num_assigned = worker.num_assigned.into();
        let kv_class = record.kv_format.class();
        view.workers.push(WorkerView {
            record: Arc::new(record),
            kv_class,
            usability,
            load,
            num_assigned,
            sent,
        });
    }
    if let Ok(plan) = PlanByTime::default().plan(&request, &view) {
        check(&plan, &request, &view);
    }
});

/// Asserts that the plan asks nothing of a worker that it must not ask of it.
fn check(plan: &Plan, request: &PlanRequest, view: &ClusterView) {
    let usability_of = |record: &WorkerRecord| {
        let key = WorkerKey::of(record);
        assert!(!request.excluded.contains(&key), "{key} must not be asked");
        let worker = view.workers.iter().find(|worker| WorkerKey::of(&worker.record) == key);
        worker.expect("a worker of the view").usability
    };
    assert_eq!((plan.decode.role, usability_of(&plan.decode)), (Role::Decode, Usability::Ready));
    let computing = match &plan.prefill {
        Prefill::Local => &plan.decode,
        Prefill::Remote(worker) => {
            assert_eq!((worker.role, usability_of(worker)), (Role::Prefill, Usability::Ready));
            worker
        }
    };
    if let Some(source) = &plan.prefix_source {
        assert!(matches!(usability_of(source), Usability::Ready | Usability::Draining));
        assert_ne!(WorkerKey::of(source), WorkerKey::of(computing), "fetches from itself");
    }
}

impl Worker {
    fn record(&self, idx: usize) -> proto::WorkerRecord {
        let block_size = self.block_size.of(16) as u32;
        proto::WorkerRecord {
            id: format!("w{idx}"),
            role: i32::from(self.role % 2) + 1,
            address: "http://host:1".into(),
            kv_format: Some(proto::KvFormat {
                dtype: "f32".into(),
                block_size,
                ..proto::KvFormat::default()
            }),
            capacity: Some(proto::Capacity {
                context_length: self.context_length.of(64) as u32,
                ..proto::Capacity::default()
            }),
            compute: self.shares.then(|| proto::Compute {
                machine: "m".into(),
                device: "cpu".into(),
                units: vec![0, idx as u32 + 1],
            }),
            ..proto::WorkerRecord::default()
        }
    }
}
