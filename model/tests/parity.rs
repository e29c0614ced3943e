//! Compares every architecture with logits of `transformers` (`tests/parity/`), on every path.

mod machine;

use std::collections::BTreeSet;

use baton_kv_cache::KvDtype;
use baton_model::{Activations, BatchSequence, LoadOptions};

use machine::{
    CASES, Expected, FIXTURES, Machine, Place, TOLERANCE, argmax, bits, check_paths, difference, dir_of,
    exact, expected, has_experts,
};

/// Number formats, and the tolerated difference of logits from those of transformers, relative to the largest logit.
/// `None` where no bound holds: the models are small with random weights, and four bits may change anything.
/// docs/benchmarks has the loss of a trained model.
fn number_formats() -> Vec<(LoadOptions, Option<f32>)> {
    let quantised = |text: &str| LoadOptions { quantise: Some(text.parse().unwrap()), ..exact() };
    #[allow(unused_mut)] // some processors add one
    let mut formats = vec![
        (exact(), Some(TOLERANCE)),
        (LoadOptions { activations: Activations::Auto, ..exact() }, Some(0.06)),
        (quantised("int8"), Some(0.3)),
        (quantised("int4"), None),
        (quantised("int4:64"), None),
    ];
    // In an emulator f32 is faster, so `Auto` would leave bf16 untested.
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("bf16") {
        formats.push((LoadOptions { activations: Activations::Bf16, ..exact() }, Some(0.06)));
    }
    formats
}

#[test]
fn every_fixture_is_there() {
    let found: BTreeSet<String> = std::fs::read_dir(FIXTURES)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found, CASES.iter().map(ToString::to_string).collect());
}

#[test]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    for name in CASES {
        let dir = dir_of(name);
        let expected = expected(&dir);
        let mut machine = Machine::new(&dir, &exact());
        let total = expected.prompt.len() + expected.greedy.len();

        let vocab = machine.executor.vocab_size();
        for (position, logits) in expected.positions.iter().zip(expected.logits.chunks_exact(vocab)) {
            let place = machine.place(total);
            let got = machine.prefill(&place, &expected.prompt[..position + 1], 0, usize::MAX);
            let error = difference(&got, logits);
            assert!(error <= TOLERANCE, "{name}: off by {error} at {position}");
        }

        let place = machine.place(total);
        let mut tokens = expected.prompt.clone();
        let mut logits = machine.prefill(&place, &tokens, 0, usize::MAX);
        for (step, &token) in expected.greedy.iter().enumerate() {
            assert_eq!(argmax(&logits), token, "{name}: greedy token {step}");
            tokens.push(token);
            logits = machine.prefill(&place, &tokens, tokens.len() - 1, 1);
        }
    }
}

/// The logits after each position that is recorded.
fn recorded_logits(machine: &mut Machine, expected: &Expected) -> Vec<f32> {
    let mut all = Vec::new();
    for position in &expected.positions {
        let place = machine.place(position + 1);
        all.extend(machine.prefill(&place, &expected.prompt[..position + 1], 0, usize::MAX));
    }
    all
}

#[test]
fn quantised_models_stay_near_the_exact_ones() {
    for name in CASES.iter().filter(|name| !has_experts(name)) {
        let dir = dir_of(name);
        let expected = expected(&dir);
        for (options, tolerance) in number_formats() {
            let Some(tolerance) = tolerance else { continue };
            let got = recorded_logits(&mut Machine::new(&dir, &options), &expected);
            let error = difference(&got, &expected.logits);
            assert!(
                error <= tolerance,
                "{name}, activations {:?}, weights {:?}: off by {error}",
                options.activations,
                options.quantise
            );
        }
    }
}

#[test]
fn every_path_gives_the_same_bits() {
    for name in CASES {
        let dir = dir_of(name);
        let expected = expected(&dir);
        for (format, _) in number_formats() {
            // KV in the type of the weights, and quantised with scales.
            for (kv_dtype, block_size, threads) in
                [(None, 16, 1), (None, 5, 3), (Some(KvDtype::Fp8), 16, 3), (Some(KvDtype::Int8), 5, 2)]
            {
                let options = LoadOptions { kv_dtype, block_size, threads: Some(threads), ..format.clone() };
                check_paths(name, &expected, &mut Machine::new(&dir, &options));
            }
        }
    }
}

#[test]
fn batches_of_more_rows_than_a_thread_takes_at_once_give_the_same_bits() {
    // 960 rows of 48 numbers. A thread takes 16,384 numbers at a time.
    const PROMPT_LEN: usize = 120;
    let prompts: Vec<Vec<u32>> =
        (0..8).map(|idx| (0..PROMPT_LEN as u32).map(|i| (i * 37 + idx * 11) % 250).collect()).collect();
    // A tied head and norms after the layers' parts, an embedding of its own, experts.
    for name in ["gemma2", "llama", "mixtral"] {
        for threads in [1, 3] {
            let options = LoadOptions { threads: Some(threads), ..exact() };
            let mut machine = Machine::new(&dir_of(name), &options);
            let mut alone = Vec::new();
            for tokens in &prompts {
                let place = machine.place(PROMPT_LEN);
                alone.push(bits(&machine.prefill(&place, tokens, 0, usize::MAX)));
            }
            let places: Vec<Place> = prompts.iter().map(|_| machine.place(PROMPT_LEN)).collect();
            let sequences = prompts.iter().zip(&places).map(|(tokens, place)| BatchSequence {
                tokens,
                start_idx: 0,
                blocks: &place.blocks,
                num_logits: 1,
            });
            let together = machine.run(sequences.collect());
            let together: Vec<_> = together.iter().map(|logits| bits(logits)).collect();
            assert_eq!(together, alone, "{name}, {threads} threads");
        }
    }
}

#[test]
fn decoding_among_other_sequences_gives_the_greedy_tokens() {
    for name in CASES {
        let dir = dir_of(name);
        let expected = expected(&dir);
        let mut machine = Machine::new(&dir, &exact());
        let total = expected.prompt.len() + expected.greedy.len();
        // The same request three times, at different stages, each started at another step.
        let mut runs: Vec<(Place, Vec<u32>, usize)> =
            (0..3).map(|idx| (machine.place(total), expected.prompt.clone(), idx * 9)).collect();
        let mut computed = [0; 3];
        while runs.iter().any(|(_, tokens, _)| tokens.len() < total) {
            let mut sequences = Vec::new();
            let mut members = Vec::new();
            for (idx, (place, tokens, wait)) in runs.iter_mut().enumerate() {
                if *wait > 0 {
                    *wait -= 1;
                } else if tokens.len() < total {
                    members.push(idx);
                    sequences.push(BatchSequence {
                        tokens: &tokens[computed[idx]..],
                        start_idx: computed[idx],
                        blocks: &place.blocks,
                        num_logits: 1,
                    });
                    computed[idx] = tokens.len();
                }
            }
            let logits = machine.run(sequences);
            for (idx, logits) in members.into_iter().zip(logits) {
                runs[idx].1.push(argmax(&logits));
            }
        }
        for (idx, (_, tokens, _)) in runs.iter().enumerate() {
            assert_eq!(tokens[expected.prompt.len()..], expected.greedy, "{name}: run {idx}");
        }
    }
}
