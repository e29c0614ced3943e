//! The recorded models of `tests/parity/`, and an executor with blocks to compute them.
#![allow(dead_code)] // each test has use for some of it

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_kv_cache::{BlockId, BlockStorage, KvDtype};
use baton_model::{
    Activations, Backend, Batch, BatchSequence, Executor, LoadOptions, ParallelCpuExecutor, ThreadPool, load,
    load_ranks,
};
use baton_model_cpu::testing::{Isa, load_on};
use safetensors::SafeTensors;

pub const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/fixtures");

/// Relative to the largest logit.
pub const TOLERANCE: f32 = 1e-4;

/// All fixtures of `record.py`, so that a lost fixture is noticed.
pub const CASES: &[&str] = &[
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

/// Whether the model selects experts for each row. A difference of number formats may select others.
pub fn has_experts(name: &str) -> bool {
    name.contains("moe") || name == "mixtral"
}

pub struct Expected {
    pub prompt: Vec<u32>,
    pub positions: Vec<usize>,
    /// `[positions][vocab]`
    pub logits: Vec<f32>,
    pub greedy: Vec<u32>,
}

pub fn expected(dir: &Path) -> Expected {
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

pub fn dir_of(name: &str) -> PathBuf {
    Path::new(FIXTURES).join(name)
}

/// The options under which transformers computed the fixtures.
pub fn exact() -> LoadOptions {
    LoadOptions {
        kv_dtype: Some(KvDtype::F32),
        threads: Some(2),
        activations: Activations::F32,
        ..LoadOptions::default()
    }
}

/// An executor with its own blocks.
pub struct Machine {
    pub executor: Box<dyn Executor>,
    pub storage: BlockStorage,
    next_block: u32,
}

/// A sequence's blocks.
#[derive(Clone)]
pub struct Place {
    pub blocks: Vec<BlockId>,
    pub block_size: usize,
}

impl Machine {
    pub fn new(model: &Path, options: &LoadOptions) -> Machine {
        let model = load(model, Backend::Cpu, options, &mut |_| {}).unwrap();
        Machine::on(Box::new(model.cpu_executor().unwrap()))
    }

    /// The model computed by the software model of tiles.
    pub fn in_tiles(model: &Path, options: &LoadOptions) -> Machine {
        let model = load_on(Isa::TileModel, model, options, &mut |_| {}).unwrap();
        Machine::on(Box::new(model.executor().unwrap()))
    }

    fn on(executor: Box<dyn Executor>) -> Machine {
        let layout = executor.kv_layout();
        let storage = BlockStorage::new(layout, 2000 / layout.block_size).unwrap();
        // Contents that are not written yet must not matter.
        for block in 0..storage.num_blocks() {
            for layer_idx in 0..storage.layout().num_layers {
                // SAFETY: no other code uses the storage.
                unsafe { storage.layer_mut(BlockId(block as u32), layer_idx) }.fill(0xff);
            }
        }
        Machine { executor, storage, next_block: 0 }
    }

    /// The model computed by `num_ranks` ranks.
    pub fn parallel(model: &Path, options: &LoadOptions, num_ranks: usize) -> Machine {
        let ranks = load_ranks(model, Backend::Cpu, num_ranks, options, &mut |_| {}).unwrap();
        let ranks = ranks.into_iter().map(|rank| {
            let pool = ThreadPool::new(rank.num_threads()).unwrap();
            (rank.into_cpu(), Arc::new(pool))
        });
        Machine::on(Box::new(ParallelCpuExecutor::new(ranks.collect()).unwrap()))
    }

    /// Blocks for `len` tokens; every other one, so that they are not contiguous.
    pub fn place(&mut self, len: usize) -> Place {
        let block_size = self.storage.layout().block_size;
        let blocks = (0..len.div_ceil(block_size)).map(|_| {
            self.next_block = (self.next_block + 7) % self.storage.num_blocks() as u32;
            BlockId(self.next_block)
        });
        Place { blocks: blocks.collect(), block_size }
    }

    pub fn run(&mut self, sequences: Vec<BatchSequence<'_>>) -> Vec<Vec<f32>> {
        let num_layers = self.storage.layout().num_layers;
        let mut layers = Vec::new();
        let batch = Batch { sequences };
        let vocab = self.executor.vocab_size();
        // SAFETY: no other code uses the storage.
        let logits = unsafe {
            self.executor.execute(&batch, &self.storage, &mut |layer_idx| layers.push(layer_idx)).unwrap()
        };
        assert_eq!(layers, (0..num_layers).collect::<Vec<_>>());
        logits.chunks_exact(vocab).map(<[f32]>::to_vec).collect()
    }

    /// Computes `tokens` in chunks of these sizes and returns the logits after each of them.
    pub fn all_logits(&mut self, tokens: &[u32], chunks: &[usize]) -> Vec<Vec<f32>> {
        let place = self.place(tokens.len());
        let mut all = Vec::new();
        for &num_logits in chunks {
            let start_idx = all.len();
            let end = start_idx + num_logits;
            all.extend(self.run(vec![BatchSequence {
                tokens: &tokens[start_idx..end],
                start_idx,
                blocks: &place.blocks[..end.div_ceil(place.block_size)],
                num_logits,
            }]));
        }
        assert_eq!(all.len(), tokens.len());
        all
    }

    /// Computes `tokens[start..]` in chunks and returns the logits after the last token.
    pub fn prefill(&mut self, place: &Place, tokens: &[u32], start: usize, chunk: usize) -> Vec<f32> {
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

pub fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    best as u32
}

/// The largest difference of logits, relative to the largest one expected.
pub fn difference(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max) / largest
}

pub fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

pub fn check_paths(name: &str, expected: &Expected, machine: &mut Machine) {
    let prompt = &expected.prompt;
    let whole = machine.place(prompt.len());
    let reference = bits(&machine.prefill(&whole, prompt, 0, usize::MAX));

    for chunk in [1, 3, 7, 16, 17, 40] {
        let place = machine.place(prompt.len());
        let got = machine.prefill(&place, prompt, 0, chunk);
        assert_eq!(bits(&got), reference, "{name}: chunks of {chunk}");
    }

    // A prefix is in blocks that another sequence computed, the rest in blocks of its own.
    for num_shared in [1, 2, 3] {
        let start = num_shared * machine.storage.layout().block_size;
        let mut place = machine.place(prompt.len());
        place.blocks[..num_shared].copy_from_slice(&whole.blocks[..num_shared]);
        let got = machine.prefill(&place, prompt, start, 11);
        assert_eq!(bits(&got), reference, "{name}: {start} tokens cached");
    }

    // Beside other sequences: two that decode, one that starts, one whose logits are not requested.
    let others: Vec<(Vec<u32>, usize)> = [(30, 29), (90, 89), (50, 0), (20, 4)]
        .iter()
        .enumerate()
        .map(|(idx, &(len, start))| {
            ((0..len).map(|i| (i as u32 * 37 + idx as u32 * 11) % 250).collect(), start)
        })
        .collect();
    let places: Vec<Place> = others.iter().map(|(tokens, _)| machine.place(tokens.len())).collect();
    let mut alone = Vec::new();
    for ((tokens, start), place) in others.iter().zip(&places) {
        alone.push(bits(&machine.prefill(place, tokens, 0, usize::MAX)));
        assert!(*start < tokens.len());
    }
    let place = machine.place(prompt.len());
    machine.prefill(&place, &prompt[..10], 0, 10);
    let mut sequences: Vec<BatchSequence<'_>> = others
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
    assert_eq!(together, [one, two, reference, three], "{name}: among others");

    // Logits of several rows, as for verifying draft tokens, equal those of one row after the other. KV that rejected
    // tokens wrote is overwritten.
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
