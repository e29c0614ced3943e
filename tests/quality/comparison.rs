//! Compressed models, each compared with the uncompressed one.

use baton_kv_cache::WireFormat;
use baton_model::LoadOptions;
use baton_tokenizer::Tokenizer;

use crate::prompts::{Example, TASKS, examples, model_dir};
use crate::runner::{Runner, argmax, divergence};

/// The smallest share of right answers of the uncompressed model.
const RIGHT: f64 = 0.97;

/// One compression, and the loss that it may cause.
pub(crate) struct Compression {
    pub(crate) name: &'static str,
    pub(crate) options: LoadOptions,
    /// Wire format of a prompt's KV.
    pub(crate) wire: WireFormat,
    /// The largest share of the answers that it may lose: how many more are wrong than without compression.
    pub(crate) lost: f64,
    /// The largest mean divergence of the logits from those of the uncompressed model, over the tokens of its replies.
    pub(crate) divergence: f64,
}

/// Prints a table of `title` and asserts the bounds. `reference` is the uncompressed model.
pub(crate) fn compare(title: &str, reference: &LoadOptions, compressions: &[Compression]) {
    let tokenizer = Tokenizer::load(&model_dir()).expect("the tiny model has a tokenizer");
    let end = tokenizer.token_id("<|end|>").expect("the tiny model's replies end");
    let examples = examples(&tokenizer);
    let prompts: Vec<&[u32]> = examples.iter().map(|example| &*example.prompt).collect();
    let replies = Runner::new(reference, WireFormat::AsIs, end).replies(&prompts);

    let is_right =
        |example: &Example, tokens: &[u32]| usize::from(example.is_right(&tokenizer.decode(tokens, true)));
    let share_of = |num_right: usize| num_right as f64 / examples.len() as f64;
    let of_reference = share_of(
        examples.iter().zip(&replies).map(|(example, reply)| is_right(example, &reply.tokens)).sum(),
    );
    assert!(of_reference >= RIGHT, "{title}: {of_reference:.3} right without compression");
    println!(
        "{title:<14}{}{:>8}{:>12}{:>12}{:>8}",
        TASKS.map(|task| format!("{task:>14}")).concat(),
        "right",
        "mean KL",
        "largest",
        "same"
    );
    for Compression { name, options, wire, lost, divergence: allowed } in compressions {
        let mut runner = Runner::new(options, *wire, end);
        let mut num_right = [0; TASKS.len()];
        let mut num_of = [0; TASKS.len()];
        let (mut num_tokens, mut num_same, mut sum, mut largest) = (0, 0, 0.0, 0.0f64);
        for ((example, reply), own) in examples.iter().zip(&replies).zip(runner.replies(&prompts)) {
            let task_idx =
                TASKS.iter().position(|task| *task == example.task).expect("an example has a task");
            num_of[task_idx] += 1;
            num_right[task_idx] += is_right(example, &own.tokens);
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
        let share = share_of(num_right.iter().sum());
        let mean = sum / f64::from(num_tokens);
        let by_task: String = (0..TASKS.len())
            .map(|idx| format!("{:>14}", format!("{} of {}", num_right[idx], num_of[idx])))
            .collect();
        let same = num_same as f64 / f64::from(num_tokens);
        println!(
            "{name:<14}{by_task}{:>7.1}%{mean:>12.1e}{largest:>12.1e}{:>7.1}%",
            100.0 * share,
            100.0 * same
        );
        assert!(
            of_reference - share <= lost + 1e-9,
            "{name}: {share:.3} right, {of_reference:.3} without it"
        );
        assert!(mean <= *allowed, "{name}: mean divergence of {mean:.1e}");
    }
}
