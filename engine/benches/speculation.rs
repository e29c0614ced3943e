//! What speculative decoding gains with the tiny model: the same requests with and without drafts, in turns
//! within one run, so that a busy machine disturbs both alike.
//!
//! `cargo bench -p baton-engine --bench speculation [-- MODEL_DIR DRAFT_DIR]`

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use baton_engine::{
    Drafter, EngineConfig, EngineHandle, EngineThread, Request, SamplingParams, Speculation, SpeculationMode,
    TokenEvent, sampler::random_unit,
};
use baton_model::{LoadOptions, LoadedModel, ThreadPool, load};

/// Turns of either kind.
const NUM_TURNS: u64 = 10;
const NUM_PROMPT: u64 = 64;
const NUM_OUTPUT: u32 = 256;

fn main() {
    let dirs: Vec<PathBuf> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).map(PathBuf::from).collect();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let (dir, draft_dir) = match &dirs[..] {
        [dir, draft_dir] => (dir.clone(), draft_dir.clone()),
        _ => (tiny.clone(), tiny.join("draft")),
    };
    let (target, draft) = (open(&dir), open(&draft_dir));
    let pool = Arc::new(ThreadPool::new(target.num_threads()).expect("threads can be started"));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
    println!("{:<8}{:>12}{:>14}{:>12}{:>12}", "drafter", "sequences", "temperature", "accepted", "speed-up");
    for name in ["ngram", "draft"] {
        for num_sequences in [1, 4] {
            for temperature in [0.0, 0.7] {
                let drafter = match name {
                    "ngram" => Drafter::Ngram,
                    _ => Drafter::Model {
                        executor: Box::new(draft.cpu_executor_on(Arc::clone(&pool))),
                        cost: draft.weight_bytes() as f64 / target.weight_bytes() as f64,
                    },
                };
                let (engine, _thread) = start(&target, &pool, drafter);
                let mut elapsed = [Duration::ZERO; 2];
                for turn in 0..2 * NUM_TURNS {
                    // A B B A, each with a text of its own, so that no cache helps.
                    let kind = ((turn + turn / 2) % 2) as usize;
                    let mode = [SpeculationMode::Auto, SpeculationMode::Off][kind];
                    let wave = wave(&engine, turn, num_sequences, temperature, mode);
                    elapsed[kind] += runtime.block_on(wave);
                }
                let (_, counts) = engine.drafts().expect("it has a drafter");
                println!(
                    "{name:<8}{num_sequences:>12}{temperature:>14}{:>10.0} %{:>12.2}",
                    100.0 * counts.accepted as f64 / counts.drafted.max(1) as f64,
                    elapsed[1].as_secs_f64() / elapsed[0].as_secs_f64()
                );
            }
        }
    }
}

fn open(dir: &Path) -> LoadedModel {
    load(dir, &LoadOptions::default(), &mut |_| {}).expect("the model is there")
}

fn start(target: &LoadedModel, pool: &Arc<ThreadPool>, drafter: Drafter) -> (EngineHandle, EngineThread) {
    let config = EngineConfig {
        num_blocks: 1024,
        max_running: 64,
        token_budget: 512,
        itl_target: None,
        context_length: target.config().context_length,
        max_waiting: 64,
        prefix_cache: false,
        model_revision: "bench".into(),
    };
    let speculation = Speculation { drafter, max_draft_tokens: 8, max_step_tokens: 32, clock: Instant::now };
    let executor = Box::new(target.cpu_executor_on(Arc::clone(pool)));
    baton_engine::start(executor, Some(speculation), config).expect("an engine starts")
}

/// Runs so many requests at once; how long their tokens took after the first ones.
async fn wave(
    engine: &EngineHandle,
    turn: u64,
    num_sequences: u64,
    temperature: f32,
    speculation: SpeculationMode,
) -> Duration {
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
    let mut started = None;
    for mut stream in streams {
        while let Some(event) = stream.next().await {
            if let TokenEvent::Token(_) = event {
                started.get_or_insert_with(Instant::now);
            }
        }
    }
    started.expect("tokens came").elapsed()
}
