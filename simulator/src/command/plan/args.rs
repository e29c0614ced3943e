//! The flags of `baton plan`.

use std::path::PathBuf;

use anyhow::ensure;
use baton_cost::GpuKind;
use baton_model_spec::WeightFormat;
use clap::Args;

use super::{
    super::{args::SimulateArgs, load::LoadArgs, slo::parse_seconds, tiers::TierArgs},
    deployment::Deployment,
};
use crate::{cluster::SloTarget, model::ModelOnDevice};

const EXAMPLES: &str = "\
Examples:
  Sixteen H100s, three requests a second of 8,000 tokens, answers of 300:
    baton plan --model llama-70b --device H100 --gpus 16 --rate 3 --prompt-tokens 8000 --output-tokens 300
  Your own model and a trace of your own requests, twice as many as there were; Helm values into a file:
    baton plan --model path/to/config.json --gpus 32 --trace requests.csv --speed 2 \\
      --slo-ttft 1.5s --slo-tpot 50ms --values values.yaml
    helm template baton helm/baton --values values.yaml
  With steps as they were measured on a worker of two GPUs:
    baton bench steps path/to/model --device cuda:0 --tensor-parallel 2 --json steps.json
    baton plan --model path/to/model --gpus 16 --trace requests.csv --step-profile steps.json
  What 512 GiB of each host's memory for KV are worth:
    baton plan --model llama-70b --gpus 16 --trace requests.csv --host-kv 512

What it does: it plays the requests against deployments that differ in how many GPUs compute a model together, how many workers
compute prompts for others, how many tokens a step computes, and how many sequences run at a time. Each is simulated with the
scheduler and the planner that Baton serves with. The best are repeated with other seeds, which gives the error of the numbers.

What it does not know: your kernels, your network, and sliding windows: every layer attends to all positions. Times are of a
roofline, unless --step-profile has measured ones. They rank deployments; measure the one that you take (baton bench) before you
promise a latency.";

/// What to plan for.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PlanArgs {
    /// The model: llama-8b, llama-70b, qwen-32b, a config.json, or a directory with one.
    #[arg(long, value_name = "NAME|FILE", default_value = "llama-70b")]
    pub model: String,
    /// The GPUs: A100, H100 or H200.
    #[arg(long, value_name = "NAME", default_value = "H100")]
    pub device: String,
    /// How many there are.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub gpus: usize,
    /// GPUs of one host, at most so many of which compute a model together.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub gpus_per_host: usize,
    /// What steps took on a worker, as `baton bench steps --json FILE` writes it, of the same model on the same devices. Where
    /// another number of them computes together, the roofline is corrected by it. Default: the roofline.
    #[arg(long, value_name = "FILE")]
    pub step_profile: Option<PathBuf>,
    /// Which requests come.
    #[command(flatten)]
    pub load: LoadArgs,
    /// Time to the first token that a request should meet, such as 2s or 500ms; seconds without a unit.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_seconds)]
    pub slo_ttft: f64,
    /// Mean time between tokens that a request should meet, as above.
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse_seconds)]
    pub slo_tpot: f64,
    /// What a GPU sends to other workers, in gigabytes per second.
    #[arg(long, value_name = "GB/S", default_value_t = 25.0)]
    pub link: f64,
    /// Tokens in a KV block. Must divide the blocks of the trace.
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    pub block_size: usize,
    /// Memory of each host that holds KV below the pools of its workers, in GiB. Each worker has an equal share here; Baton's
    /// workers use all of it together. Default: there is none.
    #[arg(long, value_name = "GIB")]
    pub host_kv: Option<usize>,
    /// Every step takes up to this part more or less, at random.
    #[arg(long, value_name = "PART", default_value_t = 0.05)]
    pub noise: f64,
    /// Seeds with which the best deployments are repeated.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,3")]
    pub seeds: Vec<u64>,
    /// Write Helm values here instead of printing them.
    #[arg(long, value_name = "FILE")]
    pub values: Option<PathBuf>,
}

impl PlanArgs {
    /// Checks what no simulation checks.
    pub(super) fn validate(&self) -> anyhow::Result<()> {
        ensure!((1..=100_000).contains(&self.gpus), "--gpus is {}; 1 to 100000 are possible", self.gpus);
        ensure!(self.gpus_per_host > 0, "--gpus-per-host is 0");
        let (device, names) = (&self.device, GpuKind::names());
        ensure!(GpuKind::named(device).is_some(), "no device is called {device:?}; there are {names}");
        ensure!(!self.seeds.is_empty(), "--seeds is empty");
        let host_kv = self.host_kv.unwrap_or(1);
        ensure!((1..=1 << 20).contains(&host_kv), "--host-kv is {host_kv} GiB; 1 to 1048576 are possible");
        Ok(())
    }

    /// What is planned for, for people.
    pub(super) fn describe(&self, weights: WeightFormat) -> String {
        let load = &self.load;
        let requests = match (&load.trace, load.rate) {
            (Some(path), None) => format!("{} at {} x its speed", path.display(), load.speed),
            (Some(path), Some(rate)) => format!("{}, {rate} requests a second", path.display()),
            (None, rate) => format!(
                "prompts of {} tokens, answers of {}, {} a second",
                load.prompt_tokens,
                load.output_tokens,
                rate.unwrap_or_default()
            ),
        };
        format!(
            "{} with {weights} weights on {} x {}: {requests}\nSLOs: first token within {} s, mean time between tokens at most {} s",
            self.model, self.gpus, self.device, self.slo_ttft, self.slo_tpot
        )
    }

    /// Tokens of host memory that a worker of so many GPUs has, if there is any.
    pub(super) fn host_tokens(&self, model: &ModelOnDevice, tensor_parallel: usize) -> Option<usize> {
        let workers_of_host = (self.gpus.min(self.gpus_per_host) / tensor_parallel).max(1);
        let share = (self.host_kv? << 30) as f64 / workers_of_host as f64;
        Some((share / model.kv_bytes_per_token) as usize)
    }

    /// The simulation of a deployment.
    pub(super) fn simulation(&self, deployment: &Deployment, seed: u64) -> SimulateArgs {
        SimulateArgs {
            model: self.model.clone(),
            device: self.device.clone(),
            tensor_parallel: deployment.tensor_parallel,
            step_profile: self.step_profile.clone(),
            prefill: deployment.num_prefill,
            decode: deployment.num_decode,
            load: self.load.clone(),
            copies: 1,
            policy: vec!["baton".to_owned()],
            slo_ttft: SloTarget::Seconds(self.slo_ttft),
            slo_tpot: SloTarget::Seconds(self.slo_tpot),
            routers: 1,
            balance: false,
            report_interval: 50.0,
            call: 0.5,
            link: self.link,
            block_size: self.block_size,
            token_budget: deployment.token_budget,
            itl_target: None,
            max_running: deployment.max_running,
            kv_tokens: None,
            tiers: TierArgs::host(deployment.host_tokens),
            noise: self.noise,
            slow: Vec::new(),
            fail: Vec::new(),
            join: Vec::new(),
            seeds: vec![seed],
            sweep: Vec::new(),
            tune: false,
            hit_rate: false,
            html: None,
        }
    }
}
