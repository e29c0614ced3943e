//! A cluster from flags.

use std::time::Duration;

use anyhow::ensure;
use baton_cluster_record::Role;
use baton_cost::{LinkLine, PromptWork, StepWork};
use baton_kv_cache::KvFormat;

use super::{args::SimulateArgs, variants::Variant};
use crate::{
    cluster::{Change, ClusterSpec, WorkerSpec},
    model::{self, ModelOnDevice},
    time::SimTime,
    trace::{Trace, TraceRequest},
};

/// A call, a grant, a first write and a commit.
const LINK_LATENCY: f64 = 0.001;
/// A worker's default.
const MAX_WAITING: usize = 1024;
/// A router's defaults.
const MAX_ATTEMPTS: u32 = 16;
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// What all variants have in common.
#[derive(Debug)]
pub(super) struct Setup {
    model: ModelOnDevice,
    num_workers: usize,
    changes: Vec<Change>,
}

impl Setup {
    pub(super) fn new(args: &SimulateArgs, trace: &Trace) -> anyhow::Result<Setup> {
        ensure!(args.decode > 0, "--decode is 0: a request needs a worker that decodes");
        ensure!(args.tensor_parallel > 0, "--tensor-parallel is 0");
        ensure!(args.prefill + args.decode <= 100_000, "there are at most 100000 workers");
        for (name, value) in [
            ("--block-size", args.block_size),
            ("--token-budget", args.token_budget),
            ("--max-running", args.max_running),
        ] {
            ensure!(value > 0, "{name} is 0");
        }
        for (name, value) in [("--report-interval", args.report_interval), ("--call", args.call)] {
            ensure!((0.0..=1e6).contains(&value), "{name} is {value} ms");
        }
        ensure!((1e-6..=1e6).contains(&args.link), "--link is {} GB/s", args.link);
        ensure!((0.0..1.0).contains(&args.noise), "--noise is {}; it is a part, below 1", args.noise);
        ensure!(args.routers > 0, "--routers is 0");
        ensure!(
            trace.block_tokens == 0 || trace.block_tokens.is_multiple_of(args.block_size),
            "--block-size {} does not divide the {} tokens of the trace's blocks",
            args.block_size,
            trace.block_tokens
        );
        let model = ModelOnDevice::new(
            &args.model,
            &args.device,
            args.tensor_parallel,
            model::step_profile(args.step_profile.as_deref())?.as_ref(),
        )?;
        Ok(Setup { model, num_workers: args.prefill + args.decode, changes: args.changes()? })
    }

    pub(super) fn num_workers(&self) -> usize {
        self.num_workers
    }

    /// Mean seconds until the first token, if each prompt is computed alone and at once by a worker that has so many of its tokens
    /// cached: no policy is below it with such a cache.
    pub(super) fn least_mean_ttft(&self, args: &SimulateArgs, trace: &Trace, num_cached: &[usize]) -> f64 {
        let alone = |(request, &num_cached): (&TraceRequest, &usize)| {
            let num_tokens = request.num_prompt_tokens as usize;
            let prompt = PromptWork::new(num_tokens, num_cached.min(num_tokens.saturating_sub(1)));
            self.model.step.prompt_seconds(&prompt, &StepWork::default(), args.token_budget as f64)
        };
        let sum: f64 = trace.requests.iter().zip(num_cached).map(alone).sum();
        sum / trace.requests.len().max(1) as f64
    }

    fn num_kv_tokens(&self, args: &SimulateArgs) -> usize {
        args.kv_tokens.unwrap_or(self.model.num_kv_tokens)
    }

    /// One line for people.
    pub(super) fn describe(&self, args: &SimulateArgs, trace: &Trace) -> String {
        let step = &self.model.step;
        let requests = match &args.load.trace {
            Some(path) => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                format!(
                    "{} requests of {name} in {:.0} s, {} copies",
                    trace.requests.len(),
                    trace.seconds(),
                    args.copies
                )
            }
            None => format!(
                "prompts of {} tokens, answers of {}",
                args.load.prompt_tokens, args.load.output_tokens
            ),
        };
        format!(
            "{} on {} workers of {} x {}: a step reads {} weights in {:.1} ms, {:.0} prompt tokens take a second, {} tokens of KV \
             fit\n{requests}",
            args.model,
            self.num_workers,
            args.tensor_parallel,
            args.device,
            self.model.weights,
            1e3 * step.fixed,
            1.0 / step.per_token,
            self.num_kv_tokens(args)
        )
    }

    pub(super) fn cluster(
        &self,
        args: &SimulateArgs,
        variant: &Variant,
        seed: u64,
    ) -> anyhow::Result<ClusterSpec> {
        let block_size = args.block_size;
        let num_blocks = self.num_kv_tokens(args) / block_size;
        ensure!(num_blocks > 0, "not one block of {block_size} tokens fits on a worker");
        if let Some(ms) = args.itl_target {
            ensure!((0.001..=1e6).contains(&ms), "--itl-target is {ms}; 0.001 to 1000000 ms are possible");
        }
        let tiers = args.tiers.specs(block_size, args.tensor_parallel)?;
        let worker = |role: Role| WorkerSpec {
            role,
            num_devices: args.tensor_parallel,
            step: self.model.step,
            slowness: 1.0,
            kv_format: KvFormat { block_size, ..self.model.kv_format.clone() },
            kv_bytes_per_token: self.model.kv_bytes_per_token,
            num_blocks,
            tiers: tiers.clone(),
            max_running: args.max_running,
            max_waiting: MAX_WAITING,
            token_budget: variant.token_budget,
            itl_target: args.itl_target.map(|ms| Duration::from_secs_f64(ms / 1e3)),
            context_length: self.model.context_length,
            compute: None,
        };
        let of = |role: Role, num: usize| std::iter::repeat_n(role, num).map(worker);
        let (num_decode, num_prefill) = (variant.num_decode, variant.num_prefill);
        Ok(ClusterSpec {
            workers: of(Role::Decode, num_decode).chain(of(Role::Prefill, num_prefill)).collect(),
            num_routers: args.routers,
            policy: variant.policy.policy,
            slo_ttft: args.slo_ttft,
            slo_tpot: args.slo_tpot,
            report_interval: SimTime::from_seconds(args.report_interval / 1e3),
            call: SimTime::from_seconds(args.call / 1e3),
            link: LinkLine {
                latency_seconds: LINK_LATENCY,
                bytes_per_second: args.link * 1e9 * args.tensor_parallel as f64,
            },
            max_attempts: MAX_ATTEMPTS,
            balances: args.balance,
            recovery_timeout: RECOVERY_TIMEOUT,
            noise: args.noise,
            changes: self.changes.clone(),
            seed,
        })
    }
}
