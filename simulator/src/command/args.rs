//! The flags of `baton simulate`.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Args;

use super::{load::LoadArgs, slo::parse_slo, tiers::TierArgs};
use crate::{
    cluster::{Change, ChangeKind, PolicyName, SloTarget},
    policies::{Baseline, BaselineChoice},
    time::SimTime,
};

const EXAMPLES: &str = "\
Examples:
  Two requests a second on eight H100s, half of which compute prompts:
    baton simulate --model llama-70b --tensor-parallel 2 --prefill 2 --decode 2 --rate 2
  A published trace, and three policies beside each other, as a picture:
    baton simulate --trace mooncake.jsonl --prefill 4 --decode 4 --policy baton,least-loaded,separated --html sim.html
  Goodput against load:
    baton simulate --trace azure.csv --model llama-8b --tensor-parallel 1 --decode 8 --rate 40 \\
      --sweep 0.5,0.75,1,1.25,1.5 --html sweep.html
  A worker that is slow, one that fails after ten minutes and comes back:
    baton simulate --decode 4 --rate 3 --slow d1=3 --fail d0@600 --join d0@660
  The best setting of each policy:
    baton simulate --trace mooncake.jsonl --prefill 4 --decode 4 --policy all --tune

Times are of a roofline: the model's arithmetic and memory traffic on the device's data sheet. They rank deployments and
policies; measure before you promise a latency: a worker by `baton bench steps`, whose file --step-profile reads.";

/// What to simulate.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct SimulateArgs {
    /// The model: llama-8b, llama-70b, qwen-32b, a config.json, or a directory with one.
    #[arg(long, value_name = "NAME|FILE", default_value = "llama-70b")]
    pub model: String,
    /// The device: A100, H100 or H200.
    #[arg(long, value_name = "NAME", default_value = "H100")]
    pub device: String,
    /// Devices that compute together as one worker.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub tensor_parallel: usize,
    /// What steps took on a worker, as `baton bench steps --json FILE` writes it, of the same model on the same devices. Where
    /// another number of them computes together, the roofline is corrected by it. Default: the roofline.
    #[arg(long, value_name = "FILE")]
    pub step_profile: Option<PathBuf>,
    /// Workers that compute prompts for others.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub prefill: usize,
    /// Workers that decode, and compute prompts where that is sooner.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub decode: usize,
    /// Which requests come.
    #[command(flatten)]
    pub load: LoadArgs,
    /// Copies of --trace at the same time, each with prefixes of its own.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub copies: u32,
    /// How routers choose, or several: baton, constants (baton's before it predicted times), round-robin, least-loaded,
    /// prefix-only, lmetric (new tokens x batch), separated, separated-lmetric, or all.
    ///
    /// With round-robin, least-loaded, prefix-only and lmetric every worker computes prompts in chunks beside decoding, also
    /// those of --prefill. With separated every prompt goes to a prefill worker.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "baton")]
    pub policy: Vec<String>,
    /// Time to the first token that a request should meet: 10x of its time alone on a worker, or a time such as 2s or 500ms.
    #[arg(long, value_name = "Nx|TIME", default_value = "10x", value_parser = parse_slo)]
    pub slo_ttft: SloTarget,
    /// Mean time between tokens that a request should meet, as above.
    #[arg(long, value_name = "Nx|TIME", default_value = "3x", value_parser = parse_slo)]
    pub slo_tpot: SloTarget,
    /// Routers. Each knows only what it sent itself, and what reports say.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub routers: usize,
    /// Running requests migrate from much fuller decode workers to emptier ones, as routers do by default. A request pauses while it
    /// migrates.
    #[arg(long)]
    pub balance: bool,
    /// Shortest time between two load reports of a worker, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 50.0)]
    pub report_interval: f64,
    /// What a call from router to worker takes, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 0.5)]
    pub call: f64,
    /// What a device sends to other workers, in gigabytes per second.
    #[arg(long, value_name = "GB/S", default_value_t = 25.0)]
    pub link: f64,
    /// Tokens in a KV block. Must divide the blocks of the trace.
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    pub block_size: usize,
    /// Tokens that a step computes at most.
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    pub token_budget: usize,
    /// Target time between tokens, in milliseconds: chunks of prompts beside decoding keep it.
    #[arg(long, value_name = "MS")]
    pub itl_target: Option<f64>,
    /// Sequences that run at a time on a worker.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_running: usize,
    /// Tokens whose KV fits on a worker. Default: what the device's memory holds beside the weights.
    #[arg(long, value_name = "TOKENS")]
    pub kv_tokens: Option<usize>,
    /// The tiers below a worker's pool.
    #[command(flatten)]
    pub tiers: TierArgs,
    /// Every step takes up to this part more or less, at random.
    #[arg(long, value_name = "PART", default_value_t = 0.0)]
    pub noise: f64,
    /// Workers whose steps take longer: d1=3 is three times as long. d0 is the first one of --decode, p0 the first one of --prefill,
    /// also where a policy or --tune uses it for something else; half=2: every other worker.
    #[arg(long, value_name = "WORKER=FACTOR", value_delimiter = ',')]
    pub slow: Vec<String>,
    /// Workers that die, and when, in seconds: d0@600.
    #[arg(long, value_name = "WORKER@SECONDS", value_delimiter = ',')]
    pub fail: Vec<String>,
    /// Workers that start, or start again: d0@660. One that did not fail before is absent until then.
    #[arg(long, value_name = "WORKER@SECONDS", value_delimiter = ',')]
    pub join: Vec<String>,
    /// Seeds. The numbers of several are averaged.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    pub seeds: Vec<u64>,
    /// Loads, as multiples of --rate or of the trace's speed.
    #[arg(long, value_name = "FACTORS", value_delimiter = ',')]
    pub sweep: Vec<f64>,
    /// Try settings of each policy (prefill workers, token budgets, its own parameters), and print all.
    #[arg(long)]
    pub tune: bool,
    /// Print how many blocks of the trace hit in one pool of 3 M, 50 M and unlimited tokens, and stop. With --kv-tokens also
    /// how many prompt tokens hit in the workers' pools, and in one pool as large as all of them.
    #[arg(long)]
    pub hit_rate: bool,
    /// Write a picture: workers over time, percentiles, goodput against load. One file, without a network.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// A policy by its name on the command line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ParsedPolicy {
    pub(super) name: &'static str,
    pub(super) policy: PolicyName,
}

const IMBALANCE: f64 = 2.0;

/// All policies, by name.
fn known_policies() -> [ParsedPolicy; 8] {
    use BaselineChoice::{LeastLoaded, NewTokensTimesBatch, PrefixOnly, RoundRobin};
    let baseline = |name, choice, is_separated| ParsedPolicy {
        name,
        policy: PolicyName::Baseline(Baseline { choice, is_separated }),
    };
    [
        ParsedPolicy { name: "baton", policy: PolicyName::Baton },
        ParsedPolicy { name: "constants", policy: PolicyName::Constants },
        baseline("round-robin", RoundRobin, false),
        baseline("least-loaded", LeastLoaded, false),
        baseline("prefix-only", PrefixOnly { most_imbalance: IMBALANCE }, false),
        baseline("lmetric", NewTokensTimesBatch, false),
        baseline("separated", LeastLoaded, true),
        baseline("separated-lmetric", NewTokensTimesBatch, true),
    ]
}

impl SimulateArgs {
    pub(super) fn loads(&self) -> Vec<f64> {
        if self.sweep.is_empty() { vec![1.0] } else { self.sweep.clone() }
    }

    pub(super) fn policies(&self) -> anyhow::Result<Vec<ParsedPolicy>> {
        let known = known_policies();
        if self.policy == ["all"] {
            return Ok(known.into());
        }
        let find = |name: &String| {
            let names = || known.iter().map(|policy| policy.name).collect::<Vec<_>>().join(", ");
            let found = known.iter().find(|policy| policy.name == name);
            found.cloned().with_context(|| format!("no policy is called {name:?}; there are {}", names()))
        };
        self.policy.iter().map(find).collect()
    }

    /// What happens to workers. They have the names that the flags give them, whatever a policy uses them for.
    pub(super) fn changes(&self) -> anyhow::Result<Vec<Change>> {
        let (num_decode, num_prefill) = (self.decode, self.prefill);
        let place = |name: &str| -> anyhow::Result<usize> {
            let number = |rest: &str, num: usize, first: usize| {
                rest.parse::<usize>().ok().filter(|&idx| idx < num).map(|idx| first + idx)
            };
            let place = match (name.strip_prefix('d'), name.strip_prefix('p')) {
                (Some(rest), _) => number(rest, num_decode, 0),
                (_, Some(rest)) => number(rest, num_prefill, num_decode),
                _ => None,
            };
            place.with_context(|| {
                format!("no worker is called {name:?}; there are {num_decode} from d0 on and {num_prefill} from p0 on")
            })
        };
        let mut changes = Vec::new();
        let mut add = |texts: &[String], separator: char, kind: &dyn Fn(f64) -> (f64, ChangeKind)| {
            for text in texts {
                let parts = text.split_once(separator);
                let (name, value) =
                    parts.with_context(|| format!("{text:?} is not WORKER{separator}NUMBER"))?;
                let value: f64 =
                    value.parse().with_context(|| format!("{text:?}: {value:?} is no number"))?;
                ensure!(value.is_finite() && value >= 0.0, "{text:?}: {value} is not possible");
                let (at, kind) = kind(value);
                if kind == ChangeKind::Slow(0.0) {
                    bail!("{text:?}: a step takes some time");
                }
                if let ChangeKind::Slow(factor) = kind {
                    ensure!(factor <= MAX_SLOWNESS, "{text:?}: at most {MAX_SLOWNESS} times is possible");
                }
                let places: Vec<usize> = match name {
                    "half" => (0..num_decode + num_prefill).filter(|idx| idx % 2 == 1).collect(),
                    name => vec![place(name)?],
                };
                let at = SimTime::from_seconds(at);
                changes.extend(places.into_iter().map(|worker_idx| Change { at, worker_idx, kind }));
            }
            Ok(())
        };
        add(&self.slow, '=', &|factor| (0.0, ChangeKind::Slow(factor)))?;
        add(&self.fail, '@', &|at| (at, ChangeKind::Fail))?;
        add(&self.join, '@', &|at| (at, ChangeKind::Join))?;
        changes.sort_by_key(|change| change.at);
        Ok(changes)
    }
}

/// A worker that is slower than this serves nothing.
const MAX_SLOWNESS: f64 = 1000.0;
