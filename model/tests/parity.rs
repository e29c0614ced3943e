//! Every architecture against what `transformers` computed (`tests/parity/`), by every path.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use baton_kv_cache::{BlockId, BlockStorage, KvDtype};
use baton_model::{Activations, Batch, BatchSequence, CpuExecutor, Executor, LoadOptions, load};
use safetensors::SafeTensors;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/fixtures");

/// Of the largest logit.
const TOLERANCE: f32 = 1e-4;

/// All that `record.py` makes: a fixture that is lost must be missed.
const CASES: &[&str] = &[
    "gemma2",
    "gemma3",
    "gemma3-legacy-linear",
    "llama",
    "llama-bf16-sharded",
    "llama-rope-linear",
    "llama-rope-llama3",
    "llama-rope-yarn",
    "mistral",
    "mixtral",
    "phi3",
    "phi3-partial-rotary",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-moe",
    "qwen3-moe-sparse-step",
];

struct Expected {
    prompt: Vec<u32>,
    positions: Vec<usize>,
    /// `[positions][vocab]`
    logits: Vec<f32>,
    greedy: Vec<u32>,
}

fn expected(dir: &Path) -> Expected {
    let bytes = std::fs::read(dir.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> {
        tensors.tensor(name).unwrap().data().chunks_exact(4).map(|word| word.try_into().unwrap()).collect()
    };
    let ids = |name: &str| words(name).into_iter().map(u32::from_le_bytes).collect::<Vec<_>>();
    Expected {
        prompt: ids("prompt"),
        positions: ids("positions").into_iter().map(|position| position as usize).collect(),
        logits: words("logits").into_iter().map(f32::from_le_bytes).collect(),
        greedy: ids("greedy"),
    }
}

fn dir_of(name: &str) -> PathBuf {
    Path::new(FIXTURES).join(name)
}

/// As transformers computed the fixtures.
fn exact() -> LoadOptions {
    LoadOptions {
        kv_dtype: Some(KvDtype::F32),
        threads: Some(2),
        activations: Activations::F32,
        ..LoadOptions::default()
    }
}

/// Ways to round, and how far logits may be from those of transformers, in parts of the largest, where
/// that can be said: the models are small and of random weights, to which four bits do anything. What a trained one
/// loses is in docs/benchmarks.
fn roundings() -> Vec<(LoadOptions, Option<f32>)> {
    let quantised = |text: &str| LoadOptions { quantise: Some(text.parse().unwrap()), ..exact() };
    vec![
        (exact(), Some(TOLERANCE)),
        (LoadOptions { activations: Activations::Auto, ..exact() }, Some(0.06)),
        (quantised("int8"), Some(0.3)),
        (quantised("int4"), None),
        (quantised("int4:64"), None),
    ]
}

/// An executor with blocks of its own.
struct Machine {
    executor: CpuExecutor,
    storage: BlockStorage,
    next_block: u32,
}

/// A sequence's place in the blocks.
#[derive(Clone)]
struct Place {
    blocks: Vec<BlockId>,
    block_size: usize,
}

impl Machine {
    fn new(dir: &Path, options: &LoadOptions) -> Machine {
        let model = load(dir, options, &mut |_| {}).unwrap();
        let storage = BlockStorage::new(model.kv_layout(), 2000 / options.block_size).unwrap();
        // What is not written yet must not matter.
        for block in 0..storage.num_blocks() {
            for layer_idx in 0..storage.layout().num_layers {
                // SAFETY: nobody else uses the storage.
                unsafe { storage.layer_mut(BlockId(block as u32), layer_idx) }.fill(0xff);
            }
        }
        Machine { executor: model.cpu_executor().unwrap(), storage, next_block: 0 }
    }

    /// Blocks for `len` tokens, every other one so that they are not contiguous.
    fn place(&mut self, len: usize) -> Place {
        let block_size = self.storage.layout().block_size;
        let blocks = (0..len.div_ceil(block_size)).map(|_| {
            self.next_block = (self.next_block + 7) % self.storage.num_blocks() as u32;
            BlockId(self.next_block)
        });
        Place { blocks: blocks.collect(), block_size }
    }

    fn run(&mut self, sequences: Vec<BatchSequence<'_>>) -> Vec<Vec<f32>> {
        let num_layers = self.storage.layout().num_layers;
        let mut layers = Vec::new();
        let batch = Batch { sequences };
        let vocab = self.executor.vocab_size();
        // SAFETY: nobody else uses the storage.
        let logits = unsafe {
            self.executor.execute(&batch, &self.storage, &mut |layer_idx| layers.push(layer_idx)).unwrap()
        };
        assert_eq!(layers, (0..num_layers).collect::<Vec<_>>());
        logits.chunks_exact(vocab).map(<[f32]>::to_vec).collect()
    }

    /// Computes `tokens[start..]` in chunks; the logits after the last one.
    fn prefill(&mut self, place: &Place, tokens: &[u32], start: usize, chunk: usize) -> Vec<f32> {
        let mut last = Vec::new();
        for first in (start..tokens.len()).step_by(chunk) {
            let end = tokens.len().min(first + chunk);
            last = self.run(vec![BatchSequence {
                tokens: &tokens[first..end],
                start_idx: first,
                blocks: &place.blocks[..end.div_ceil(place.block_size)],
                num_logits: usize::from(end == tokens.len()),
            }]);
        }
        assert_eq!(last.len(), 1);
        last.remove(0)
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    best as u32
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
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
            let largest = logits.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            let error = got.iter().zip(logits).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
            assert!(error <= TOLERANCE * largest, "{name}: off by {error} of {largest} at {position}");
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

/// The largest difference of logits over the prompt, and the largest logit.
fn error(machine: &mut Machine, expected: &Expected) -> (f32, f32) {
    let vocab = machine.executor.vocab_size();
    let (mut error, mut largest) = (0.0f32, 0.0f32);
    for (position, logits) in expected.positions.iter().zip(expected.logits.chunks_exact(vocab)) {
        let place = machine.place(position + 1);
        let got = machine.prefill(&place, &expected.prompt[..position + 1], 0, usize::MAX);
        largest = logits.iter().fold(largest, |max, x| max.max(x.abs()));
        error = got.iter().zip(logits).fold(error, |max, (a, b)| max.max((a - b).abs()));
    }
    (error, largest)
}

#[test]
fn rounded_models_stay_near() {
    // Where rounding tips the choice of an expert, another one answers.
    for name in CASES.iter().filter(|name| !name.contains("moe") && **name != "mixtral") {
        let dir = dir_of(name);
        let expected = expected(&dir);
        for (options, tolerance) in roundings() {
            let Some(tolerance) = tolerance else { continue };
            let (error, largest) = error(&mut Machine::new(&dir, &options), &expected);
            assert!(
                error <= tolerance * largest,
                "{name}, activations {:?}, weights {:?}: off by {error} of {largest}",
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
        for (rounding, _) in roundings() {
            // KV in the type of the weights, as it is used, and with scales.
            for (kv_dtype, block_size, threads) in
                [(None, 16, 1), (None, 5, 3), (Some(KvDtype::Fp8), 16, 3), (Some(KvDtype::Int8), 5, 2)]
            {
                let options =
                    LoadOptions { kv_dtype, block_size, threads: Some(threads), ..rounding.clone() };
                check_paths(name, &expected, &mut Machine::new(&dir, &options));
            }
        }
    }
}

fn check_paths(name: &str, expected: &Expected, machine: &mut Machine) {
    let prompt = &expected.prompt;
    let whole = machine.place(prompt.len());
    let reference = bits(&machine.prefill(&whole, prompt, 0, usize::MAX));

    for chunk in [1, 3, 7, 16, 17, 40] {
        let place = machine.place(prompt.len());
        let got = machine.prefill(&place, prompt, 0, chunk);
        assert_eq!(bits(&got), reference, "{name}: chunks of {chunk}");
    }

    // A prefix lies in blocks that another sequence computed, the rest in blocks of its own.
    for num_shared in [1, 2, 3] {
        let start = num_shared * machine.storage.layout().block_size;
        let mut place = machine.place(prompt.len());
        place.blocks[..num_shared].copy_from_slice(&whole.blocks[..num_shared]);
        let got = machine.prefill(&place, prompt, start, 11);
        assert_eq!(bits(&got), reference, "{name}: {start} tokens cached");
    }

    // Among strangers: two that decode, one that begins, one whose logits nobody wants.
    let strangers: Vec<(Vec<u32>, usize)> = [(30, 29), (90, 89), (50, 0), (20, 4)]
        .iter()
        .enumerate()
        .map(|(idx, &(len, start))| {
            ((0..len).map(|i| (i as u32 * 37 + idx as u32 * 11) % 250).collect(), start)
        })
        .collect();
    let places: Vec<Place> = strangers.iter().map(|(tokens, _)| machine.place(tokens.len())).collect();
    let mut alone = Vec::new();
    for ((tokens, start), place) in strangers.iter().zip(&places) {
        alone.push(bits(&machine.prefill(place, tokens, 0, usize::MAX)));
        assert!(*start < tokens.len());
    }
    let place = machine.place(prompt.len());
    machine.prefill(&place, &prompt[..10], 0, 10);
    let mut sequences: Vec<BatchSequence<'_>> = strangers
        .iter()
        .zip(&places)
        .map(|((tokens, start), place)| BatchSequence {
            tokens: &tokens[*start..],
            start_idx: *start,
            blocks: &place.blocks,
            num_logits: 1,
        })
        .collect();
    sequences[3].num_logits = 0;
    sequences.insert(
        2,
        BatchSequence { tokens: &prompt[10..], start_idx: 10, blocks: &place.blocks, num_logits: 1 },
    );
    let together: Vec<_> = machine.run(sequences).iter().map(|logits| bits(logits)).collect();
    let [one, two, three, _] = alone.try_into().unwrap();
    assert_eq!(together, [one, two, reference, three], "{name}: among strangers");

    // The logits of several rows, as drafted tokens are verified, are those of one row after the other. What
    // rejected tokens wrote before is overwritten.
    let (place, other) = (machine.place(prompt.len()), machine.place(prompt.len()));
    for num_logits in [2, 5, 15] {
        let start_idx = prompt.len() - num_logits;
        machine.prefill(&place, &prompt[..start_idx], 0, usize::MAX);
        let rejected: Vec<u32> = prompt.iter().rev().take(num_logits).copied().collect();
        let sequence = |tokens| vec![BatchSequence { tokens, start_idx, blocks: &place.blocks, num_logits }];
        machine.run(sequence(&rejected));
        let together = machine.run(sequence(&prompt[start_idx..]));
        assert_eq!(together.len(), num_logits);
        for (idx, logits) in together.iter().enumerate() {
            let alone = machine.prefill(&other, &prompt[..=start_idx + idx], 0, usize::MAX);
            assert_eq!(bits(logits), bits(&alone), "{name}: row {idx} of {num_logits}");
        }
    }
}

#[test]
fn decoding_among_strangers_gives_the_greedy_tokens() {
    for name in CASES {
        let dir = dir_of(name);
        let expected = expected(&dir);
        let mut machine = Machine::new(&dir, &exact());
        let total = expected.prompt.len() + expected.greedy.len();
        // The same request three times at different stages, each from its own start.
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
