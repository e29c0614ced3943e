//! The cost of a step besides the forward pass: planning it, and sampling from its logits.
//!
//! `cargo bench -p baton-engine`
#![allow(missing_docs)] // criterion's macros

use std::hint::black_box;

use baton_engine::{
    Request, SamplingParams,
    sampler::{Sampler, ScoredToken, TokenHistory, random_unit},
};
use baton_kv_cache::HashRoot;
use baton_scheduler::{Scheduler, SchedulerConfig, Sequence, SequenceId, SequenceRole, StepPlan};
use criterion::{Criterion, criterion_group, criterion_main};

/// A step in which every sequence decodes: plan, count, one token each.
fn scheduler(c: &mut Criterion) {
    const NUM_RUNNING: u64 = 256;
    let config = SchedulerConfig {
        num_blocks: 65_536,
        block_size: 16,
        max_running: 256,
        token_budget: 100_000,
        itl_target: None,
    };
    let root = Some(HashRoot::new("bench", "", ""));
    let start = || {
        let mut scheduler = Scheduler::new(config);
        for id in 0..NUM_RUNNING {
            let prompt = (0..256).map(|idx| id as u32 * 256 + idx).collect();
            scheduler.add(Sequence::new(
                SequenceId::new(0, id),
                SequenceRole::Generate,
                prompt,
                4096,
                16,
                root,
            ));
        }
        scheduler
    };
    let step = |scheduler: &mut Scheduler, plan: &mut StepPlan| {
        scheduler.step(plan);
        scheduler.advance(plan);
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token) {
            scheduler.push_token(chunk.id, 7);
        }
    };
    let mut plan = StepPlan::default();
    let mut scheduler = start();
    let mut num_steps = 0;
    c.bench_function("scheduler/256 decodes", |bencher| {
        bencher.iter(|| {
            num_steps += 1;
            if num_steps == 3500 {
                (scheduler, num_steps) = (start(), 0); // before a sequence reaches its greatest length
            }
            step(&mut scheduler, &mut plan);
            black_box(plan.chunks.len())
        });
    });
}

fn sampler(c: &mut Criterion) {
    const VOCAB_SIZE: u64 = 128_256;
    // Similar to a model's logits: noise, and a few large ones.
    let logits: Vec<f32> = (0..VOCAB_SIZE)
        .map(|id| 4.0 * random_unit(1, id) as f32 + if id % 5000 == 0 { 10.0 } else { 0.0 })
        .collect();
    let warm = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let cases = [
        ("greedy", SamplingParams::default()),
        ("temperature", warm.clone()),
        ("top_p", SamplingParams { top_p: 0.95, ..warm.clone() }),
        ("top_k", SamplingParams { top_k: 50, ..warm.clone() }),
        (
            "top_k, top_p, penalties",
            SamplingParams { top_k: 50, top_p: 0.9, repetition_penalty: 1.1, ..warm },
        ),
        ("greedy, 20 logprobs", SamplingParams { logprobs: Some(20), ..SamplingParams::default() }),
    ];
    for (name, sampling) in cases {
        let request = Request { prompt: (0..500).collect(), sampling, ..Request::default() };
        let history = TokenHistory::new(&request);
        let mut sampler = Sampler::default();
        c.bench_function(&format!("sampler/{name}"), |bencher| {
            bencher.iter(|| sampler.sample(black_box(&logits), &request.sampling, &history));
        });
    }
    for num_top in [0, 20] {
        c.bench_function(&format!("sampler/score a prompt's token, {num_top} logprobs"), |bencher| {
            bencher.iter(|| ScoredToken::new(black_box(&logits), 77, num_top));
        });
    }
}

criterion_group!(benches, scheduler, sampler);
criterion_main!(benches);
