//! Types of KV against KV in f32.

use baton_kv_cache::KvDtype;
use baton_model::LoadOptions;
use baton_tokenizer::Tokenizer;

use crate::prompts::{TASKS, examples, model_dir};
use crate::runner::{Reply, Runner, argmax, divergence};

/// What one type of KV may cost.
struct Bound {
    dtype: KvDtype,
    /// Of all examples, of which f32 gets 99 %.
    right: f64,
    /// Mean over the tokens of the replies.
    divergence: f64,
}

const BOUNDS: [Bound; 5] = [
    Bound { dtype: KvDtype::F32, right: 0.98, divergence: 0.0 },
    Bound { dtype: KvDtype::F16, right: 0.98, divergence: 1e-6 },
    Bound { dtype: KvDtype::Bf16, right: 0.98, divergence: 2e-5 },
    Bound { dtype: KvDtype::Fp8, right: 0.97, divergence: 1e-3 },
    Bound { dtype: KvDtype::Int8, right: 0.97, divergence: 3e-4 },
];

#[test]
fn compressed_kv_recalls_what_f32_recalls() {
    let tokenizer = Tokenizer::load(&model_dir()).expect("the tiny model has a tokenizer");
    let end = tokenizer.token_id("<|end|>").expect("the tiny model's replies end");
    let examples = examples(&tokenizer);
    let runner = |dtype| Runner::new(&LoadOptions { kv_dtype: Some(dtype), ..LoadOptions::default() }, end);
    let mut reference = runner(KvDtype::F32);
    let replies: Vec<Reply> = examples.iter().map(|example| reference.reply(&example.prompt)).collect();

    println!(
        "{:<6}{}{:>8}{:>12}{:>12}{:>8}",
        "kv",
        TASKS.map(|task| format!("{task:>14}")).concat(),
        "all",
        "mean KL",
        "largest",
        "same"
    );
    for Bound { dtype, right, divergence: allowed } in BOUNDS {
        let mut runner = runner(dtype);
        let mut num_right = [0; TASKS.len()];
        let mut num_of = [0; TASKS.len()];
        let (mut num_tokens, mut num_same, mut sum, mut largest) = (0, 0, 0.0, 0.0f64);
        for (example, reply) in examples.iter().zip(&replies) {
            let own = runner.reply(&example.prompt);
            let task_idx =
                TASKS.iter().position(|task| *task == example.task).expect("an example has a task");
            num_of[task_idx] += 1;
            num_right[task_idx] += usize::from(example.is_right(&tokenizer.decode(&own.tokens, true)));
            let logits = match own.tokens == reply.tokens {
                true => own.logits,
                false => runner.follow(&example.prompt, &reply.tokens),
            };
            for (got, expected) in logits.iter().zip(&reply.logits) {
                let divergence = divergence(expected, got);
                num_tokens += 1;
                num_same += usize::from(argmax(got) == argmax(expected));
                sum += divergence;
                largest = largest.max(divergence);
            }
        }
        let share = num_right.iter().sum::<usize>() as f64 / examples.len() as f64;
        let mean = sum / f64::from(num_tokens);
        let by_task: String = (0..TASKS.len())
            .map(|idx| format!("{:>14}", format!("{} of {}", num_right[idx], num_of[idx])))
            .collect();
        let same = num_same as f64 / f64::from(num_tokens);
        println!(
            "{:<6}{by_task}{:>7.1}%{mean:>12.1e}{largest:>12.1e}{:>7.1}%",
            dtype.name(),
            100.0 * share,
            100.0 * same
        );
        assert!(share >= right, "{}: {share:.3} right", dtype.name());
        assert!(mean <= allowed, "{}: mean divergence of {mean:.1e}", dtype.name());
    }
}
