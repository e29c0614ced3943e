//! `baton bench overlap`: how much a remote prefill delays the tokens of a request.
//!
//! It starts a prefill and a decode worker of its own and sends one request at a time, so that a request waits for
//! nothing but the handoff. The decode worker keeps no prefix cache, the prefill worker does. Each round of a
//! length sends a new prompt three times:
//!
//! ```text
//! local    the decode worker computes it          TTFT without a handoff
//! remote   the prefill worker computes it         TTFT with one; what was exposed: from the first token's
//!                                                 arrival, or the grant of blocks if that is later, until
//!                                                 the KV was verified
//! alone    again: the prefill worker has it all   how long the KV takes when no computing hides it
//! ```

mod report;
mod workers;

use std::{path::PathBuf, time::Instant};

use anyhow::{Context, ensure};
use baton_cluster::Dialer;
use baton_command::{EngineArgs, Transport, at_least_one, print};
use baton_random::Random;
use clap::Args;

use self::{
    report::{Report, Row, Sample},
    workers::Workers,
};
use super::{
    progress::Progress,
    target::{Answer, WorkerTarget},
    workload::Prompt,
};

const EXAMPLES: &str = "\
What is measured, for one request at a time:
  local, remote  TTFT when the decode worker computes the prompt, and when the
                 prefill worker does
  added          remote - local, within rounds; below 0 where two processes
                 compute the same at different speeds
  allowed        what may be added: one layer of a chunk, at the mean speed of
                 the prompt, and 1 ms
  exposed        from the first token's arrival at the decode worker, or from
                 when it had blocks, until all KV was there and verified
  worst          the largest of the rounds
  alone          the whole handoff of a prompt that the prefill worker has
                 cached: a step for its last token, and all KV
  hidden         1 - exposed / alone

Give each worker a processor of its own (--threads 1 on two cores): threads that
share one hide nothing.";

/// The arguments of `baton bench overlap`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct OverlapArgs {
    /// Directory of a Hugging Face model, or a .gguf file. Default: the tiny model that is embedded in this
    /// program.
    pub(crate) model: Option<PathBuf>,
    /// Prompt lengths in tokens, separated by commas.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "256,512,1024,2048,4096,8192,16384", value_parser = at_least_one)]
    lengths: Vec<usize>,
    /// Rounds of each length.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one)]
    rounds: usize,
    /// Transports for KV blocks.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "shm,tcp")]
    pub(crate) transports: Vec<Transport>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
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
pub(crate) async fn run(args: OverlapArgs) -> anyhow::Result<()> {
    ensure!(args.vocabulary > 300, "--vocabulary must be more than 300");
    let workers = Workers::start(args.model.as_deref(), &args.transports, &args.engine).await?;
    let longest = workers.context_length().saturating_sub(OUTPUT_TOKENS);
    let (lengths, too_long): (Vec<_>, Vec<_>) = args.lengths.iter().partition(|&&length| length <= longest);
    if !too_long.is_empty() {
        eprintln!("the model takes at most {longest} prompt tokens; leaving out {too_long:?}");
    }
    let progress = if args.quiet { Progress::hidden() } else { Progress::new(lengths.len(), "lengths") };
    let mut bench = Bench {
        target: WorkerTarget::new(&Dialer::default(), workers.decode_address(), 0.0, 1)?,
        workers,
        random: Random::new(1),
        next_id: 0,
    };
    // A warm-up: opens connections, touches memory and loads code before the measurement.
    bench.round(lengths.iter().copied().max().unwrap_or(256).min(2048), args.vocabulary).await?;
    let mut rows = Vec::new();
    for length in lengths {
        let mut samples = Vec::new();
        for _ in 0..args.rounds {
            samples.push(bench.round(length, args.vocabulary).await?);
        }
        rows.push(Row::of(length, args.engine.token_budget(), bench.workers.num_layers(), &samples));
        progress.done(true);
    }
    progress.finish();
    print(&Report { threads: args.engine.threads, rows }, args.json.as_deref())
}

/// The first token comes from the prefill worker, the second waits for the KV, the third does not wait.
const OUTPUT_TOKENS: usize = 3;

struct Bench {
    target: WorkerTarget,
    workers: Workers,
    random: Random,
    next_id: u64,
}

/// One request's times in seconds.
struct Times {
    ttft: f64,
    /// From the first token to the second.
    gap: f64,
}

impl Bench {
    async fn round(&mut self, length: usize, vocabulary: u32) -> anyhow::Result<Sample> {
        let ids: Vec<_> =
            (0..length).map(|_| 300 + self.random.below(u64::from(vocabulary - 300)) as u32).collect();
        let local = self.send(&ids, false).await?;
        let before = self.workers.counts().await?;
        let remote = self.send(&ids, true).await?;
        let between = self.workers.counts().await?;
        self.send(&ids, true).await?;
        let after = self.workers.counts().await?;
        for (earlier, later) in [(&before, &between), (&between, &after)] {
            ensure!(
                later.num_committed == earlier.num_committed + 1.0,
                "a handoff failed; see the worker's log"
            );
        }
        Ok(Sample {
            local_ttft: local.ttft,
            remote_ttft: remote.ttft,
            local_gap: local.gap,
            remote_gap: remote.gap,
            exposed: between.exposed_seconds - before.exposed_seconds,
            alone: after.handoff_seconds - between.handoff_seconds,
            kv_bytes: between.bytes - before.bytes,
        })
    }

    async fn send(&mut self, ids: &[u32], is_remote: bool) -> anyhow::Result<Times> {
        self.next_id += 1;
        let mut request = self.target.request(Prompt::Ids(ids.to_vec()), OUTPUT_TOKENS, self.next_id)?;
        request.prefill = is_remote.then(|| self.workers.prefill_peer());
        let start = Instant::now();
        let Answer { arrivals, .. } = self.target.send(request).await.context("a request failed")?;
        let [first, second, ..] = arrivals[..] else {
            anyhow::bail!("{} of {OUTPUT_TOKENS} tokens came", arrivals.len())
        };
        Ok(Times { ttft: (first - start).as_secs_f64(), gap: (second - first).as_secs_f64() })
    }
}
