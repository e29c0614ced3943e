//! `baton bench steps`: what a step of a worker takes, by what it computes.
//!
//! It starts a decode worker of its own, gives it prompts and batches of all sizes, and takes the line that the worker
//! learned from its steps, on average over the second half of the load. Then it compares what the line predicts with new prompts and batches.

mod report;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use baton_cluster::Dialer;
use baton_command::{EngineArgs, at_least_one, print};
use baton_cost::{ProfiledWork, PromptWork, StepLine, StepProfile, StepWork};
use baton_proto::worker::{WatchLoadRequest, worker_client::WorkerClient};
use baton_random::Random;
use clap::Args;
use tokio::task::JoinSet;

use self::report::Report;
use super::{
    process::WorkerProcess,
    progress::Progress,
    stats::Summary,
    target::{Answer, WorkerTarget},
    workload::Prompt,
};

const EXAMPLES: &str = "\
Examples:
  Measure the embedded model, then plan with what was measured from the first request on:
    baton bench steps --json steps.json
    baton up --step-profile steps.json
  Measure a worker on two GPUs, then plan sixteen of them:
    baton bench steps MODEL --device cuda:0 --tensor-parallel 2 --json steps.json
    baton plan --model MODEL --device H100 --gpus 16 --rate 3 --step-profile steps.json

A step takes
  fixed + per_token x tokens + per_context_token x tokens whose KV is read + per_pair x pairs of attention
Measure with the settings that workers have: --threads, --quantize, --device, --tensor-parallel, --token-budget.
Without a profile a worker starts with a roofline of its model on its device, and learns from its own steps.";

/// The arguments of `baton bench steps`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StepsArgs {
    /// Directory of a Hugging Face model, or a .gguf file. Default: the tiny model that is embedded in this
    /// program.
    model: Option<PathBuf>,
    /// Seconds of load from which the worker learns.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one)]
    seconds: usize,
    /// Most tokens of a prompt.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    max_input_tokens: usize,
    #[command(flatten)]
    engine: EngineArgs,
    /// Prompts are sampled from token ids below this.
    #[arg(long, value_name = "N", default_value_t = 1800)]
    vocabulary: u32,
    /// Show no progress on standard error.
    #[arg(long, short)]
    quiet: bool,
    /// Write the report as JSON to a file, or with - to standard output instead of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures, and prints the report.
pub(crate) async fn run(args: StepsArgs) -> anyhow::Result<()> {
    ensure!(args.vocabulary > 300, "--vocabulary must be more than 300");
    let mut flags = args.engine.flags();
    if !args.engine.no_prefix_cache {
        flags.push("--no-prefix-cache".to_owned());
    }
    flags.push(format!("--pin-threads={}", args.engine.pin_threads));
    let worker = WorkerProcess::spawn("decode-worker", args.model.as_deref(), &flags)?.ready().await?;
    let capacity = worker.record.capacity.unwrap_or_default();
    let longest = (capacity.context_length as usize).saturating_sub(BATCH_TOKENS).min(args.max_input_tokens);
    ensure!(longest >= SHORTEST, "the worker serves too few tokens to measure: {longest}");
    let mut bench = Bench {
        target: WorkerTarget::new(&Dialer::default(), &worker.record.address, 0.0, 1)?,
        random: Random::new(1),
        vocabulary: args.vocabulary,
        longest,
        max_running: args.engine.max_running(),
        next_id: 0,
    };
    let progress = if args.quiet { Progress::hidden() } else { Progress::new(args.seconds, "seconds") };
    let taught = Duration::from_secs(args.seconds as u64);
    let (learned, ()) =
        tokio::try_join!(watch(&worker.record.address, taught), bench.teach(taught, &progress))?;
    progress.finish();
    let rows = bench.check(&learned.line, learned.chunk).await?;
    let profile = StepProfile {
        model: worker.record.model.clone(),
        device: args.engine.device.to_string(),
        tensor_parallel: Some(args.engine.tensor_parallel),
        num_steps: learned.num_steps,
        step: learned.line,
        rows,
    };
    print(&Report(profile), args.json.as_deref())
}

const SHORTEST: usize = 16;
/// Tokens that each sequence of a batch generates.
const BATCH_TOKENS: usize = 24;
/// Prompt tokens of each sequence of a batch that is checked.
const BATCH_PROMPT: usize = 64;
/// Times that a prompt or a batch is measured; the median counts.
const ROUNDS: usize = 5;

struct Bench {
    target: WorkerTarget,
    random: Random,
    vocabulary: u32,
    longest: usize,
    max_running: usize,
    next_id: u64,
}

impl Bench {
    /// Loads the worker with prompts alone and with batches that decode, of all sizes.
    async fn teach(&mut self, time: Duration, progress: &Progress) -> anyhow::Result<()> {
        let start = Instant::now();
        let mut num_seconds = 0;
        while start.elapsed() < time {
            let spread = (self.longest as f64 / SHORTEST as f64).powf(self.random.unit());
            let length = ((SHORTEST as f64 * spread) as usize).min(self.longest);
            if self.random.below(2) == 0 {
                self.send(1, length, 1).await?;
            } else {
                let most = self.max_running.min(32).min(1 + self.longest / length) as u64;
                let num_sequences = 1 + self.random.below(most) as usize;
                self.send(num_sequences, length, BATCH_TOKENS).await?;
            }
            while num_seconds < start.elapsed().as_secs().min(time.as_secs()) {
                progress.done(true);
                num_seconds += 1;
            }
        }
        Ok(())
    }

    /// Compares the line with new prompts and batches.
    async fn check(&mut self, line: &StepLine, chunk: usize) -> anyhow::Result<Vec<ProfiledWork>> {
        let mut rows = Vec::new();
        let (longest, max_running) = (self.longest, self.max_running);
        for length in [64, 256, 1024, 4096, 16_384].into_iter().filter(|&length| length <= longest) {
            let mut measured = Vec::new();
            for _ in 0..ROUNDS {
                measured.extend(self.send(1, length, 1).await?.iter().map(|times| times.ttft));
            }
            let prompt = PromptWork::new(length, 0);
            let predicted = line.prompt_seconds(&prompt, &StepWork::default(), chunk as f64);
            rows.push(ProfiledWork::new(format!("prompt of {length} tokens"), predicted, median(measured)?));
        }
        for batch in [1, 8, 32].into_iter().filter(|&batch| batch <= max_running) {
            let mut measured = Vec::new();
            for _ in 0..ROUNDS {
                // The first half may still wait for the prompts of others.
                let gaps = self.send(batch, BATCH_PROMPT.min(self.longest), BATCH_TOKENS).await?;
                measured.extend(gaps.iter().flat_map(|times| times.gaps[times.gaps.len() / 2..].to_vec()));
            }
            let context = BATCH_PROMPT.min(self.longest) as f64 + 0.75 * BATCH_TOKENS as f64;
            let predicted = line.seconds(&StepWork::decode(batch as f64, batch as f64 * context));
            rows.push(ProfiledWork::new(
                format!("token of a batch of {batch}"),
                predicted,
                median(measured)?,
            ));
        }
        Ok(rows)
    }

    /// Sends so many requests at once, and waits for all of them.
    async fn send(
        &mut self,
        num_sequences: usize,
        length: usize,
        output_tokens: usize,
    ) -> anyhow::Result<Vec<Times>> {
        let mut running = JoinSet::new();
        for _ in 0..num_sequences {
            self.next_id += 1;
            let range = u64::from(self.vocabulary - 300);
            let ids = (0..length).map(|_| 300 + self.random.below(range) as u32).collect();
            let request = self.target.request(Prompt::Ids(ids), output_tokens, self.next_id)?;
            let target = self.target.clone();
            running.spawn(async move {
                let start = Instant::now();
                target.send(request).await.map(|answer| Times::of(start, &answer))
            });
        }
        let mut all = Vec::with_capacity(num_sequences);
        while let Some(times) = running.join_next().await {
            all.push(times.context("a request's task failed")?.context("a request failed")?);
        }
        Ok(all)
    }
}

/// Of one request, in seconds.
struct Times {
    ttft: f64,
    gaps: Vec<f64>,
}

impl Times {
    fn of(start: Instant, answer: &Answer) -> Times {
        let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        Times {
            ttft: answer.arrivals.first().map_or(0.0, |&first| seconds(start, first)),
            gaps: answer.arrivals.windows(2).map(|pair| seconds(pair[0], pair[1])).collect(),
        }
    }
}

fn median(sample: Vec<f64>) -> anyhow::Result<f64> {
    Ok(Summary::of(sample).context("no request was measured")?.p50)
}

/// What the worker has learned.
struct Learned {
    line: StepLine,
    num_steps: u64,
    /// Tokens that a step computes at most.
    chunk: usize,
}

/// Follows the worker's reports for `time`. The line has the geometric means of the second half's coefficients: each of them
/// follows its newest steps, and other processes disturb some.
async fn watch(address: &str, time: Duration) -> anyhow::Result<Learned> {
    let start = Instant::now();
    let mut client = WorkerClient::connect(address.to_owned()).await?;
    let mut reports = client.watch_load(WatchLoadRequest::default()).await?.into_inner();
    let (mut logs, mut num_reports, mut num_steps, mut chunk) = ([0.0; 4], 0.0, 0, 1);
    while start.elapsed() < time || num_reports == 0.0 {
        let load = reports.message().await?.context("the worker's reports ended")?;
        let step = load.step.context("the worker reports no step line")?;
        if step.num_steps > 0 && start.elapsed() >= time / 2 {
            let parts = [step.fixed, step.per_token, step.per_context_token, step.per_pair];
            logs.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part.ln());
            num_reports += 1.0;
        }
        (num_steps, chunk) = (step.num_steps, load.max_step_tokens.max(1) as usize);
    }
    let [fixed, per_token, per_context_token, per_pair] = logs.map(|sum| (sum / num_reports).exp());
    let line = StepLine { fixed, per_token, per_context_token, per_pair }.checked();
    Ok(Learned { line: line.context("the worker's step line cannot be true")?, num_steps, chunk })
}
