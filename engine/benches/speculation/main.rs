//! The gain of speculative decoding, by the cost of a step of the draft model relative to one of the target: for the
//! tiny model, and for wider models with the same output. Requests with and without drafts alternate within one run,
//! so that a busy machine disturbs both alike.
//!
//! `cargo bench -p baton-engine --bench speculation [-- MODEL_DIR DRAFT_DIR]`

mod steps;
mod wider;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use baton_engine::{
    Drafter, EngineConfig, EngineHandle, EngineThread, Request, SamplingParams, Speculation, SpeculationMode,
    TokenEvent, sampler::random_unit,
};
use baton_model::{Backend, LoadOptions, LoadedModel, ThreadPool, load};
use steps::DraftCosts;

/// Factors by which the MLPs of the targets are wider than the tiny model's.
const FACTORS: [usize; 3] = [1, 8, 32];
/// Rounds of either kind.
const NUM_TURNS: u64 = 8;
const NUM_PROMPT: u64 = 64;
const NUM_OUTPUT: u32 = 192;
const MAX_DRAFT_TOKENS: usize = 8;

/// The results of concurrent requests.
#[derive(Default)]
struct Wave {
    /// Time from the first token on.
    elapsed: Duration,
    tokens: Vec<u32>,
    num_accepted: u64,
    /// Drafts with a rejected token.
    num_rejected: u64,
}

fn main() {
    let dirs: Vec<PathBuf> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).map(PathBuf::from).collect();
    println!(
        "{:>10}{:>8}{:>8}  {:<8}{:>10}{:>13}{:>10}{:>10}{:>10}  middle half",
        "parameters",
        "draft",
        "verify",
        "drafter",
        "sequences",
        "temperature",
        "accepted",
        "at best",
        "speed-up"
    );
    if let [dir, draft_dir] = &dirs[..] {
        return measure(&open(dir), &open(draft_dir), &mut Vec::new());
    }
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let draft = open(&tiny.join("draft"));
    let mut said = Vec::new();
    for factor in FACTORS {
        let dir = wider::widen(&tiny, factor);
        measure(&open(dir.path()), &draft, &mut said);
    }
}

/// `said` has the output of an earlier target with the same output, if there was one.
fn measure(target: &LoadedModel, draft: &LoadedModel, said: &mut Vec<Vec<u32>>) {
    let pool = Arc::new(ThreadPool::new(target.num_threads()).expect("threads can be started"));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
    let mut saying = Vec::new();
    for num_sequences in [1, 4] {
        let costs = DraftCosts::measure(target, draft, &pool, num_sequences);
        for name in ["ngram", "draft"] {
            for temperature in [0.0, 0.7] {
                let (drafter, cost) = match name {
                    "ngram" => (Drafter::Ngram, 0.0),
                    _ => {
                        let cost = (draft.weight_bytes() as f64 / target.weight_bytes() as f64).min(0.9);
                        let executor = Box::new(draft.cpu_executor_on(Arc::clone(&pool)));
                        (Drafter::Model { executor, storage: None, cost }, costs.draft)
                    }
                };
                let (engine, _thread) = start(target, &pool, drafter);
                let mut run = |turn: u64| {
                    // A B B A, each with its own text, so that no cache helps.
                    let kind = ((turn + turn / 2) % 2) as usize;
                    let mode = [SpeculationMode::Auto, SpeculationMode::Off][kind];
                    let wave = runtime.block_on(wave(&engine, turn, num_sequences as u64, temperature, mode));
                    saying.push(wave.tokens.clone());
                    (kind, wave)
                };
                let (mut ratios, mut num_accepted, mut num_rejected) = (Vec::new(), 0, 0);
                for turn in 0..NUM_TURNS {
                    let mut pair = [run(2 * turn), run(2 * turn + 1)];
                    pair.sort_by_key(|&(kind, _)| kind);
                    let [(_, with), (_, without)] = pair;
                    ratios.push(without.elapsed.as_secs_f64() / with.elapsed.as_secs_f64());
                    num_accepted += with.num_accepted;
                    num_rejected += with.num_rejected;
                }
                ratios.sort_by(f64::total_cmp);
                let at = |share: f64| ratios[(share * (ratios.len() - 1) as f64).round() as usize];
                let acceptance = num_accepted as f64 / (num_accepted + num_rejected).max(1) as f64;
                println!(
                    "{:>8.1} M{:>8.2}{:>8.2}  {name:<8}{num_sequences:>10}{temperature:>13}{:>8.0} %{:>10.2}{:>10.2}  \
                     {:.2} to {:.2}",
                    target.num_parameters() as f64 / 1e6,
                    costs.draft,
                    costs.verify,
                    100.0 * acceptance,
                    best(acceptance, cost + costs.verify),
                    at(0.5),
                    at(0.25),
                    at(0.75)
                );
            }
        }
    }
    if !said.is_empty() {
        assert!(*said == saying, "neither drafts nor inputs that count nothing change what is said");
    }
    *said = saying;
}

/// What the best length of a draft gains when each token is accepted that often and costs so many steps; see
/// `baton_drafting::length`.
fn best(acceptance: f64, cost: f64) -> f64 {
    let gain = |length: i32| {
        (0..=length).map(|n| acceptance.powi(n)).sum::<f64>() / (1.0 + f64::from(length) * cost)
    };
    (0..=MAX_DRAFT_TOKENS as i32).map(gain).fold(1.0, f64::max)
}

fn open(dir: &Path) -> LoadedModel {
    load(dir, Backend::Cpu, &LoadOptions::default(), &mut |_| {}).expect("the model is there")
}

fn start(target: &LoadedModel, pool: &Arc<ThreadPool>, drafter: Drafter) -> (EngineHandle, EngineThread) {
    let config = EngineConfig {
        num_blocks: 256,
        max_running: 64,
        token_budget: 512,
        max_drafted_step_tokens: 32,
        itl_target: None,
        context_length: target.config().context_length,
        max_waiting: 64,
        prefix_cache: false,
        model_revision: "bench".into(),
        step_prior: None,
        grammars: None,
        blending: None,
        clock: Instant::now,
        thread_waits: || std::time::Duration::ZERO,
    };
    let speculation = Speculation { drafter, max_draft_tokens: MAX_DRAFT_TOKENS };
    let executor = Box::new(target.cpu_executor_on(Arc::clone(pool)));
    baton_engine::start(executor, Some(speculation), config).expect("an engine starts")
}

/// Runs concurrent requests.
async fn wave(
    engine: &EngineHandle,
    turn: u64,
    num_sequences: u64,
    temperature: f32,
    speculation: SpeculationMode,
) -> Wave {
    let vocab_size = engine.vocab_size() as f64;
    let token = |seed: u64, idx: u64| (random_unit(seed, idx) * vocab_size) as u32;
    let request = |idx: u64| Request {
        prompt: (0..NUM_PROMPT).map(|at| token(turn * num_sequences + idx, at)).collect(),
        sampling: SamplingParams { max_tokens: NUM_OUTPUT, temperature, seed: idx, ..Default::default() },
        speculation,
        ..Request::default()
    };
    let streams: Vec<_> =
        (0..num_sequences).map(|idx| engine.generate(request(idx)).expect("accepted")).collect();
    let (mut wave, mut started) = (Wave::default(), None);
    for mut stream in streams {
        while let Some(event) = stream.next().await {
            match event {
                TokenEvent::Token(token) => {
                    started.get_or_insert_with(Instant::now);
                    wave.tokens.push(token.id);
                }
                TokenEvent::Verified(counts) => {
                    wave.num_accepted += counts.accepted;
                    wave.num_rejected += u64::from(counts.accepted < counts.drafted);
                }
                _ => {}
            }
        }
    }
    wave.elapsed = started.expect("tokens came").elapsed();
    wave
}
