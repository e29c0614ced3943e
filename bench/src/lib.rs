//! `baton bench`: loads a server, and measures latency, throughput and goodput.
//!
//! It knows nothing of how the target works: an OpenAI endpoint, or the gRPC service of one worker. [`transfer`] and
//! [`overlap`] measure one part of the system alone.

mod comparison;
mod config;
mod drive;
mod overlap;
mod plan;
mod process;
mod progress;
mod report;
mod stats;
mod steps;
mod target;
#[cfg(test)]
mod tests;
mod trace;
mod transfer;
mod workload;

use std::{
    io,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, bail, ensure};
use baton_cluster::Dialer;
use baton_command::{
    ApiKeyArgs,
    dial::ClientTlsArgs,
    openai::{OpenAi, RequestError},
    print,
};
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Map, Value};
use tokio::{signal::ctrl_c, task::spawn_blocking};
use tokio_util::sync::CancellationToken;

pub use self::stats::Summary;
use self::{
    comparison::Comparison,
    config::{Config, Replay},
    drive::Load,
    plan::Plan,
    progress::Progress,
    report::{Report, Slo},
    target::{OpenAiTarget, Target, WorkerTarget},
    trace::Fit,
    workload::{Lengths, Material, Planned, Prompts, Synthetic},
};

const DEFAULT_URL: &str = "http://127.0.0.1:8080";
const DEFAULT_REQUESTS: usize = 100;

/// Requests of a load without a number of them whose prompts are checked at the start.
const NUM_CHECKED: usize = 10_000;

const EXAMPLES: &str = "\
Examples:
  8 clients and 100 requests, against `baton up`:
    baton bench
  A fixed rate, and goodput under limits of TTFT and TPOT:
    baton bench --rate 5 --duration 60 --slo-ttft 500 --slo-tpot 50
  A recorded day, ten times as fast:
    baton bench --trace azure.csv --time-scale 10 --max-input-tokens 1500
  The overhead of the router over a single worker:
    baton bench --compare --concurrency 1 --prompt ids --extra-body '{\"prefill_mode\": \"local\"}' \\
      --url http://127.0.0.1:8080 --worker http://127.0.0.1:50051
  The gain of speculative decoding, on `baton up --speculate draft` (A / B of TPOT):
    baton bench --compare --concurrency 1 --body-b '{\"speculation_mode\": \"off\"}'
  What a constrained request costs seven others in its batch:
    baton bench --compare --concurrency 7 --neighbour-b '{\"guided_regex\": \"[a-z ]{600}\"}'

What is measured:
  TTFT  from when a request was due to its first token
  ITL   each gap between two arrivals
  TPOT  (end - first arrival) / (tokens - 1), as in vLLM
  E2E   from when a request was due to its end
A request is due by the plan (--rate, --trace), or as soon as its client is free.
The intervals of --compare resample whole turns; with --rate or --trace whole windows of time.";

/// The arguments of `baton bench`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(crate) part: Option<Part>,
    /// OpenAI endpoint to load; https:// needs --tls-ca. [default: http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    pub(crate) url: Vec<String>,
    /// Decode worker to load directly over gRPC; it prefills by itself. https:// needs --tls-cert, --tls-key
    /// and --tls-ca.
    #[arg(long, value_name = "URL")]
    pub(crate) worker: Vec<String>,
    /// Compare two targets: they take turns, and the report shows their difference. A is the first --url.
    /// With --concurrency N, each turn is N requests at once to one target while the other idles.
    #[arg(long)]
    pub(crate) compare: bool,
    /// Compare the --url with itself: target B gets these fields in every request body, instead of those of
    /// --extra-body.
    #[arg(long, value_name = "JSON", value_parser = parse_object, requires = "compare", conflicts_with = "worker")]
    pub(crate) body_b: Option<Map<String, Value>>,
    /// Compare the --url with itself: beside each turn's requests goes one more, which is not counted. In the turns of B it
    /// has these fields.
    #[arg(long, value_name = "JSON", value_parser = parse_object, requires = "compare", conflicts_with_all = ["worker", "body_b", "rate", "trace"])]
    pub(crate) neighbour_b: Option<Map<String, Value>>,
    /// API of the endpoint.
    #[arg(long, value_enum, default_value_t = Api::Completions)]
    pub(crate) api: Api,
    /// Model to request. Default: the first that the endpoint lists.
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) api_key: ApiKeyArgs,

    /// Closed loop: this many clients, each sending its next request when the last one is answered. After failures in a row a
    /// client waits, up to a second.
    #[arg(long, value_name = "N", default_value_t = 8, conflicts_with_all = ["rate", "trace"], help_heading = "Load")]
    pub(crate) concurrency: usize,
    /// Open loop: requests per second at random (Poisson) times, independent of the answers; with --compare, to each
    /// target.
    #[arg(long, value_name = "R", conflicts_with = "trace", help_heading = "Load")]
    pub(crate) rate: Option<f64>,
    /// Replay the arrivals and lengths of a trace: Azure CSV or Mooncake jsonl.
    #[arg(long, value_name = "FILE", help_heading = "Load")]
    pub(crate) trace: Option<PathBuf>,
    /// Number of requests; with --compare, to each target. [default: 100; with --duration as many as there is time for,
    /// with --trace all of them]
    #[arg(long, value_name = "M", help_heading = "Load")]
    pub(crate) requests: Option<usize>,
    /// Start no request after this many seconds. Without --requests the load lasts until then.
    #[arg(long, value_name = "SECONDS", help_heading = "Load")]
    pub(crate) duration: Option<f64>,
    /// Warm-up requests to each target before the measurement; they are not counted.
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Load")]
    pub(crate) warmup: usize,
    /// Seconds after which a request counts as failed.
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, help_heading = "Load")]
    pub(crate) timeout: f64,
    /// Replay a trace this many times faster.
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "trace", help_heading = "Load")]
    pub(crate) time_scale: f64,
    /// Multiply the lengths of a trace.
    #[arg(long, value_name = "X", default_value_t = 1.0, requires = "trace", help_heading = "Load")]
    pub(crate) length_scale: f64,

    /// Prompt tokens: 128, 64..256, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA or exponential:MEAN.
    #[arg(long, value_name = "N", default_value_t = Lengths::Fixed(128), conflicts_with = "trace", help_heading = "Requests")]
    input_tokens: Lengths,
    /// Tokens to generate, in the same forms.
    #[arg(long, value_name = "N", default_value_t = Lengths::Fixed(64), conflicts_with = "trace", help_heading = "Requests")]
    output_tokens: Lengths,
    /// Most tokens of a prompt.
    #[arg(long, value_name = "N", help_heading = "Requests")]
    pub(crate) max_input_tokens: Option<usize>,
    /// Most tokens of an answer.
    #[arg(long, value_name = "N", help_heading = "Requests")]
    pub(crate) max_output_tokens: Option<usize>,
    /// Tokens at the beginning that all prompts share. Prompts that are not longer are equal.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Requests")]
    pub(crate) shared_prefix: usize,
    /// Kind of prompts. Default: text; ids if --worker is given.
    #[arg(long, value_enum, help_heading = "Requests")]
    pub(crate) prompt: Option<PromptKind>,
    /// Token ids that prompts are sampled from, for --prompt ids. All must be ordinary tokens of the model.
    #[arg(long, value_name = "LOW..HIGH", default_value = "300..1800", value_parser = parse_token_range, help_heading = "Requests")]
    pub(crate) token_range: (u32, u32),
    /// Sampling temperature; 0 is greedy.
    #[arg(long, value_name = "T", default_value_t = 0.0, help_heading = "Requests")]
    pub(crate) temperature: f64,
    /// Let the model end its answers, instead of generating all tokens (ignore_eos).
    #[arg(long, help_heading = "Requests")]
    pub(crate) stop_at_eos: bool,
    /// JSON object whose fields are added to every request body.
    #[arg(long, value_name = "JSON", value_parser = parse_object, help_heading = "Requests")]
    pub(crate) extra_body: Option<Map<String, Value>>,
    /// Seed of the load: the same seed makes the same requests. A server that keeps running may have their
    /// prompts cached.
    #[arg(long, default_value_t = 1, help_heading = "Requests")]
    pub(crate) seed: u64,

    /// Goodput limit for TTFT, in milliseconds.
    #[arg(long, value_name = "MS", help_heading = "Report")]
    pub(crate) slo_ttft: Option<f64>,
    /// Goodput limit for TPOT, in milliseconds.
    #[arg(long, value_name = "MS", help_heading = "Report")]
    pub(crate) slo_tpot: Option<f64>,
    /// Show no progress on standard error.
    #[arg(long, short, help_heading = "Report")]
    pub(crate) quiet: bool,
    /// Write the report as JSON to a file, or with - to standard output instead of the table.
    #[arg(long, value_name = "FILE", help_heading = "Report")]
    pub(crate) json: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) tls: ClientTlsArgs,
}

/// One part of the system, by itself.
#[derive(Debug, Subcommand)]
pub(crate) enum Part {
    /// Measure how fast KV blocks travel between two processes, by each transport.
    Transfer(Box<transfer::TransferArgs>),
    /// Measure how much of the transfer of KV is hidden behind prefill.
    Overlap(Box<overlap::OverlapArgs>),
    /// Measure what a worker's steps take, for --step-profile.
    Steps(Box<steps::StepsArgs>),
    /// The second process of `transfer`.
    #[command(hide = true)]
    TransferPeer,
}

/// Which API of an OpenAI endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Api {
    /// /v1/completions
    Completions,
    /// /v1/chat/completions
    Chat,
}

/// What prompts are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PromptKind {
    /// English words. A few requests at the start measure how many tokens they are.
    Text,
    /// Token ids: lengths are exact.
    Ids,
}

fn parse_token_range(text: &str) -> Result<(u32, u32), String> {
    let range = text.split_once("..").and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
    range.filter(|(low, high)| low < high).ok_or_else(|| format!("{text:?} is not a range such as 300..1800"))
}

fn parse_object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))
}

/// Runs what the arguments ask for, and prints its report.
///
/// # Errors
/// When the arguments do not fit together, nothing can be measured, or the report cannot be written.
pub fn run(mut args: BenchArgs) -> anyhow::Result<()> {
    match args.part.take() {
        None => block_on(load(args)),
        Some(Part::Overlap(args)) => block_on(overlap::run(*args)),
        Some(Part::Steps(args)) => block_on(steps::run(*args)),
        Some(Part::Transfer(args)) => transfer::run(*args),
        Some(Part::TransferPeer) => transfer::serve(),
    }
}

fn block_on(future: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(future);
    // What `unless` left running is not waited for.
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

/// Computes on a thread of its own. It is an error if Ctrl-C comes first: once a program has listened to it, Ctrl-C ends
/// nothing by itself.
async fn unless<T: Send + 'static>(
    interrupted: impl Future<Output = io::Result<()>>,
    compute: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<T> {
    tokio::select! {
        result = spawn_blocking(compute) => Ok(result?),
        Ok(()) = interrupted => bail!("interrupted"),
    }
}

/// Runs the load and prints the report. Ctrl-C ends it early and reports the requests so far.
async fn load(args: BenchArgs) -> anyhow::Result<()> {
    let mut plan = args.plan()?;
    let targets = args.targets().await?;
    let material = args.material(&targets).await?;
    let prompts = Prompts {
        material,
        seed: args.seed,
        block_tokens: args.fit().block_tokens(),
        shared_prefix: args.shared_prefix,
    };
    args.check_prefix(&mut plan, &prompts)?;
    let neighbours = args.neighbours(&targets);
    let timeout = seconds("--timeout", args.timeout)?;
    warm_up(&targets, &prompts, args.warmup, timeout).await?;

    let progress = if args.quiet { Progress::hidden() } else { Progress::new(plan.num_left(), "requests") };
    let load = Load {
        plan: Mutex::new(plan),
        prompts,
        targets: targets.clone(),
        neighbours: neighbours.clone(),
        concurrency: args.concurrency.max(1),
        timeout,
        duration: args.duration()?,
    };
    let stop = CancellationToken::new();
    let on_ctrl_c = tokio::spawn({
        let stop = stop.clone();
        async move {
            if ctrl_c().await.is_ok() {
                stop.cancel();
            }
        }
    });
    let outcomes = load.run(progress, stop.clone()).await;
    on_ctrl_c.abort();
    let outcomes = outcomes?;
    if stop.is_cancelled() {
        eprintln!("interrupted; the report covers the requests so far");
    }

    let (config, slo) = (args.config(), args.slo()?);
    let report = |target_idx: usize| {
        let name = match neighbours.get(target_idx) {
            Some(neighbour) => format!("beside {}", neighbour.name()),
            None => targets[target_idx].name(),
        };
        Report::of(&outcomes, target_idx, name, &config, slo)
    };
    let is_answered = outcomes.requests.iter().any(|outcome| outcome.result.is_ok());
    if targets.len() == 2 {
        let (reports, seed) = ([report(0), report(1)], args.seed);
        let comparison = unless(ctrl_c(), move || Comparison::of(&outcomes, reports, seed)).await?;
        print(&comparison, args.json.as_deref())?;
    } else {
        print(&report(0), args.json.as_deref())?;
    }
    ensure!(is_answered, "no request was answered");
    Ok(())
}

impl BenchArgs {
    fn fit(&self) -> Fit {
        Fit {
            time_scale: self.time_scale,
            length_scale: self.length_scale,
            max_input_tokens: self.max_input_tokens.unwrap_or(usize::MAX).max(1),
            max_output_tokens: self.max_output_tokens.unwrap_or(usize::MAX).max(1),
        }
    }

    fn duration(&self) -> anyhow::Result<Option<Duration>> {
        self.duration.map(|value| seconds("--duration", value)).transpose()
    }

    /// `None`: time or the trace ends the load.
    fn num_requests(&self) -> Option<usize> {
        let default = (self.trace.is_none() && self.duration.is_none()).then_some(DEFAULT_REQUESTS);
        self.requests.or(default)
    }

    /// Whether requests have planned times (an open loop).
    fn is_timed(&self) -> bool {
        self.trace.is_some() || self.rate.is_some()
    }

    fn plan(&self) -> anyhow::Result<Plan> {
        let fit = self.fit();
        fit.check()?;
        if let Some(rate) = self.rate {
            ensure!(rate.is_finite() && rate > 0.0, "--rate must be more than 0");
        }
        let duration = self.duration()?;
        let mut requests: Box<dyn Iterator<Item = Planned> + Send> = match &self.trace {
            Some(path) => Box::new(workload::of_trace(trace::read(path)?, &fit).into_iter()),
            None => Box::new(Synthetic::new(self.rate, self.input_tokens, self.output_tokens, self.seed)),
        };
        let is_timed = self.is_timed();
        if let Some(duration) = duration {
            requests =
                Box::new(requests.take_while(move |planned| planned.at.is_none_or(|at| at <= duration)));
        }
        let num_requests = self.num_requests();
        if let Some(num_requests) = num_requests {
            requests = Box::new(requests.take(num_requests));
        }
        let requests = requests.map(move |planned| Planned {
            input_tokens: planned.input_tokens.min(fit.max_input_tokens),
            output_tokens: planned.output_tokens.min(fit.max_output_tokens),
            ..planned
        });
        let requests: Box<dyn Iterator<Item = Planned> + Send> = if self.compare {
            // Clients that wait for answers send in waves, see `Load::run`.
            Box::new(plan::twice(requests, if is_timed { 1 } else { self.concurrency.max(1) }))
        } else {
            Box::new(requests)
        };
        if num_requests.is_none() && !is_timed {
            return Ok(Plan::endless(requests));
        }
        let requests: Vec<Planned> = requests.collect();
        ensure!(!requests.is_empty(), "there is nothing to send: --requests 0");
        Ok(Plan::of(requests))
    }

    /// Refuses what requests to a worker cannot say.
    fn check_workers(&self) -> anyhow::Result<()> {
        if self.worker.is_empty() {
            return Ok(());
        }
        ensure!(!self.stop_at_eos, "--stop-at-eos does not go with --worker: a worker generates all tokens");
        ensure!(
            !self.url.is_empty() || (self.extra_body.is_none() && self.model.is_none()),
            "--extra-body and --model are for a --url: a worker alone reads neither"
        );
        Ok(())
    }

    async fn targets(&self) -> anyhow::Result<Vec<Target>> {
        self.check_workers()?;
        let mut urls = self.url.clone();
        if urls.is_empty() && self.worker.is_empty() {
            urls.push(DEFAULT_URL.to_owned());
        }
        if self.body_b.is_some() || self.neighbour_b.is_some() {
            ensure!(urls.len() == 1, "--body-b and --neighbour-b compare one --url with itself");
            urls.push(urls[0].clone());
        }
        let num_targets = urls.len() + self.worker.len();
        match (self.compare, num_targets) {
            (true, 2) | (false, 1) => {}
            (true, _) => bail!("--compare needs two targets: --url twice, --url and --worker, or --body-b"),
            (false, _) => bail!("{num_targets} targets: add --compare to let two take turns"),
        }
        let all: Vec<&str> = urls.iter().chain(&self.worker).map(String::as_str).collect();
        let tls = self.tls.load(&all)?;
        let mut targets = Vec::new();
        for (idx, url) in urls.into_iter().enumerate() {
            let extra = self.body_b.as_ref().filter(|_| idx == 1).or(self.extra_body.as_ref());
            let server = OpenAi::new(&url, self.api_key.key(), tls.clone())?;
            let model = match &self.model {
                Some(model) => model.clone(),
                None => first_model(&server).await?,
            };
            targets.push(Target::OpenAi(OpenAiTarget {
                server,
                chat: self.api == Api::Chat,
                model,
                temperature: self.temperature,
                ignore_eos: !self.stop_at_eos,
                extra: extra.cloned().unwrap_or_default(),
            }));
        }
        let run = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        for address in &self.worker {
            let dialer = Dialer::new(match address.starts_with("https:") {
                true => self.tls.of_workers()?,
                false => None,
            });
            targets.push(Target::Worker(WorkerTarget::new(&dialer, address, self.temperature, run)?));
        }
        Ok(targets)
    }

    /// The neighbours of both targets' requests, if there are to be any.
    fn neighbours(&self, targets: &[Target]) -> Vec<Target> {
        let Some(fields) = &self.neighbour_b else { return Vec::new() };
        let mut neighbours = targets.to_vec();
        if let Some(Target::OpenAi(target)) = neighbours.last_mut() {
            target.extra.extend(fields.clone());
        }
        neighbours
    }

    async fn material(&self, targets: &[Target]) -> anyhow::Result<Material> {
        let default = if self.worker.is_empty() { PromptKind::Text } else { PromptKind::Ids };
        let kind = self.prompt.unwrap_or(default);
        ensure!(
            kind == PromptKind::Text || self.api == Api::Completions,
            "a chat is made of text: --prompt ids needs --api completions"
        );
        ensure!(
            kind == PromptKind::Ids || self.worker.is_empty(),
            "a worker reads token ids: use --prompt ids"
        );
        match (kind, targets.first()) {
            (PromptKind::Text, Some(Target::OpenAi(target))) => calibrate(target).await,
            _ => Ok(Material::Ids { low: self.token_range.0, high: self.token_range.1 }),
        }
    }

    fn slo(&self) -> anyhow::Result<Slo> {
        let limit = |name, value: Option<f64>| value.map(|ms| seconds(name, ms / 1e3)).transpose();
        Ok(Slo { ttft: limit("--slo-ttft", self.slo_ttft)?, tpot: limit("--slo-tpot", self.slo_tpot)? })
    }

    /// Warns of prompts that are equal as they are not longer than the shared prefix.
    ///
    /// # Errors
    /// When more than a tenth of them are, or a trace says what they share.
    fn check_prefix(&self, plan: &mut Plan, prompts: &Prompts) -> anyhow::Result<()> {
        let prefix = self.shared_prefix;
        if prefix == 0 {
            return Ok(());
        }
        let (mut num_prompts, mut num_equal) = (0, 0);
        for planned in plan.first(NUM_CHECKED) {
            ensure!(
                planned.blocks.is_empty(),
                "--shared-prefix does not go with a trace whose hash ids say what prompts share"
            );
            num_prompts += 1;
            num_equal += usize::from(!prompts.exceeds_prefix(planned));
        }
        let equal = format!(
            "{num_equal} of {num_prompts} prompts would be equal: --shared-prefix {prefix} is all of them"
        );
        ensure!(num_equal * 10 <= num_prompts, "{equal}");
        if num_equal > 0 {
            eprintln!("{equal}");
        }
        Ok(())
    }

    fn config(&self) -> Config {
        let lengths = |lengths: Lengths| self.trace.is_none().then(|| lengths.to_string());
        Config {
            seed: self.seed,
            temperature: self.temperature,
            warmup: self.warmup,
            timeout_s: self.timeout,
            requests: self.num_requests(),
            duration_s: self.duration,
            compare: self.compare,
            concurrency: (!self.is_timed()).then_some(self.concurrency.max(1)),
            rate: self.rate,
            trace: self.trace.as_ref().map(|path| Replay {
                file: path.display().to_string(),
                time_scale: self.time_scale,
                length_scale: self.length_scale,
            }),
            input_tokens: lengths(self.input_tokens),
            output_tokens: lengths(self.output_tokens),
            max_input_tokens: self.max_input_tokens,
            max_output_tokens: self.max_output_tokens,
            shared_prefix: self.shared_prefix,
        }
    }
}

fn seconds(name: &str, value: f64) -> anyhow::Result<Duration> {
    let duration = Duration::try_from_secs_f64(value).ok().filter(|duration| !duration.is_zero());
    duration.with_context(|| format!("{name} must be more than 0"))
}

async fn first_model(server: &OpenAi) -> anyhow::Result<String> {
    let models = server.models().await.with_context(|| {
        format!("no answer from {}; start a server with `baton up`, or name one with --url", server.base())
    })?;
    let first = models.into_iter().next().with_context(|| format!("{} serves no model", server.base()))?;
    Ok(first.name)
}

/// Measures the tokens per word: the server counts the tokens of short and of long prompts.
async fn calibrate(target: &OpenAiTarget) -> anyhow::Result<Material> {
    const NUM_WORDS: [usize; 2] = [16, 112];
    // Words differ: with one prompt of each length the estimate was up to 8 % off.
    const NUM_PROMPTS: u64 = 8;
    // The load has no such ids, so it finds none of these prompts in a cache.
    const FIRST_ID: u64 = 1 << 61;
    let plain = Material::Words { tokens_per_word: 1.0, overhead: 0.0 };
    let prompts = Prompts { material: plain, seed: 0, block_tokens: 1, shared_prefix: 0 };
    let mut counts = [0.0; 2];
    for (count, input_tokens) in counts.iter_mut().zip(NUM_WORDS) {
        for id in FIRST_ID..FIRST_ID + NUM_PROMPTS {
            let planned = Planned { at: None, input_tokens, output_tokens: 1, blocks: Vec::new(), id };
            let workload::Prompt::Text(text) = prompts.make(&planned) else {
                unreachable!("words make text");
            };
            let counted = target.count_tokens(text).await.context("the first request failed")?;
            let Some(counted) = counted else {
                eprintln!("the server does not count tokens; assuming 1.3 tokens per word");
                return Ok(Material::Words { tokens_per_word: 1.3, overhead: 0.0 });
            };
            *count += counted as f64 / NUM_PROMPTS as f64;
        }
    }
    let tokens_per_word = ((counts[1] - counts[0]) / (NUM_WORDS[1] - NUM_WORDS[0]) as f64).max(0.25);
    let overhead = (counts[0] - tokens_per_word * NUM_WORDS[0] as f64).max(0.0);
    Ok(Material::Words { tokens_per_word, overhead })
}

/// Opens connections and loads code before the measurement. If a request fails here, all would fail.
async fn warm_up(
    targets: &[Target],
    prompts: &Prompts,
    num_requests: usize,
    timeout: Duration,
) -> anyhow::Result<()> {
    for target in targets {
        for idx in 0..num_requests as u64 {
            let planned =
                Planned { at: None, input_tokens: 32, output_tokens: 4, blocks: Vec::new(), id: !idx };
            let prepared = target.prepare(prompts.make(&planned), planned.output_tokens, planned.id)?;
            let answer = tokio::time::timeout(timeout, target.send(prepared)).await;
            answer
                .unwrap_or(Err(RequestError::Timeout))
                .with_context(|| format!("the first request to {} failed", target.name()))?;
        }
    }
    Ok(())
}
