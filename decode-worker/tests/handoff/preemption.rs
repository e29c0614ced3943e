//! Prompts and preempted sequences that get their KV back from host memory.
//!
//! `cargo test -p baton-decode-worker --test handoff -- preempted_sequence --nocapture` prints what it saves.

use std::{
    thread,
    time::{Duration, Instant},
};

use futures_util::future::join_all;

use crate::harness::{BLOCK_SIZE, decode, expected, generate, prompt, request};

const NUM_REQUESTS: u32 = 8;
const NUM_PROMPT: usize = 40;
/// The pool has room for three sequences of this length.
const NUM_ANSWER: usize = 120;

/// What a worker did for all requests.
struct Served {
    num_computed: u64,
    num_preempted: u64,
    num_recalled: u64,
    elapsed: Duration,
}

/// Answers all requests at once. A step takes a millisecond, and a tenth of one for each token.
async fn serve(host_kv_bytes: Option<u64>) -> Served {
    let worker = decode().with(|config| config.host_kv_bytes = host_kv_bytes).hook(Box::new(|batch| {
        let num_tokens: usize = batch.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        thread::sleep(Duration::from_millis(1) + Duration::from_micros(100) * num_tokens as u32);
        Ok(())
    }));
    let worker = worker.start().await;
    let client = &worker.client().await;
    let started = Instant::now();
    let answers = (0..NUM_REQUESTS).map(|nth| async move {
        let prompt = prompt(nth, NUM_PROMPT);
        let answer = generate(client, request(&prompt, NUM_ANSWER as u32, None)).await.unwrap();
        assert_eq!(answer.finished(), expected(&prompt, NUM_ANSWER), "request {nth}");
    });
    join_all(answers).await;
    let elapsed = started.elapsed();
    worker.assert_all_free().await;
    let metrics = worker.metrics().await;
    let name = "baton_preempted_recalled_tokens_total ";
    let num_recalled = metrics.lines().find_map(|line| line.strip_prefix(name)).expect("it is counted");
    Served {
        num_computed: worker.worker.engine().num_computed_tokens(),
        num_preempted: worker.worker.engine().totals().num_preempted,
        num_recalled: num_recalled.parse().expect("a number"),
        elapsed,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preempted_sequence_is_recalled_from_host_memory() {
    let (without, with) = (serve(None).await, serve(Some(1 << 20)).await);
    for (name, served) in [("without a tier", &without), ("with host memory", &with)] {
        let Served { num_computed, num_preempted, num_recalled, elapsed } = served;
        println!(
            "{name}: {num_preempted} preempted, {num_computed} computed, {num_recalled} recalled, {elapsed:?}"
        );
    }
    assert!(without.num_preempted > 0 && with.num_preempted > 0);
    assert_eq!(without.num_recalled, 0);
    assert!(with.num_recalled > 0);
}

#[tokio::test]
async fn host_memory_brings_back_what_the_pool_evicted() {
    const NUM_BLOCKS: usize = 25;
    let worker = decode().with(|config| config.host_kv_bytes = Some(1 << 20)).start().await;
    let client = &worker.client().await;
    let num_prompts = 8;
    let answer = async |seed| {
        let prompt = prompt(seed, NUM_BLOCKS * BLOCK_SIZE + 1);
        let answer = generate(client, request(&prompt, 2, None)).await.unwrap();
        assert_eq!(answer.finished(), expected(&prompt, 2), "prompt {seed}");
    };
    for seed in 0..num_prompts {
        answer(seed).await;
    }
    let num_saved = num_prompts as usize * NUM_BLOCKS;
    worker.await_metric(&format!("baton_kv_tier_blocks{{tier=\"host\"}} {num_saved}")).await;
    let before = worker.worker.engine().num_computed_tokens();
    for seed in 0..num_prompts {
        answer(seed).await;
    }
    let num_computed = worker.worker.engine().num_computed_tokens() - before;
    assert_eq!(num_computed, u64::from(2 * num_prompts), "one prompt token, and the first of the answer");
    worker.await_metric(&format!("baton_kv_tier_hits_total{{tier=\"host\"}} {num_saved}")).await;
    worker.assert_all_free().await;
}
