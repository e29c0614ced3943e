//! One model, and its replies to prompts.

use baton_kv_cache::{BlockId, BlockStorage, WireCodec, WireFormat, WireScratch};
use baton_model::{Backend, Batch, BatchSequence, CpuExecutor, Executor, LoadOptions, load};

use crate::prompts::model_dir;

/// Tokens of a prompt and its reply.
const MAX_TOKENS: usize = 1024;
/// Tokens of a reply.
const MAX_REPLY: usize = 64;
/// Sequences that decode together, which changes no bit of their logits.
const BATCH: usize = 8;

/// The tiny model as some options load it.
pub(crate) struct Runner {
    executor: CpuExecutor,
    storage: BlockStorage,
    /// Of each place in a batch.
    blocks: [Vec<BlockId>; BATCH],
    /// Wire format of a prompt's KV.
    codec: Option<WireCodec>,
    end: u32,
}

/// The tokens after a prompt.
pub(crate) struct Reply {
    /// Without the token that ends it.
    pub(crate) tokens: Vec<u32>,
    /// The logits from which each token and the end were chosen.
    pub(crate) logits: Vec<Vec<f32>>,
}

impl Runner {
    /// `wire` is the wire format of a prompt's KV, `end` the token that ends a reply.
    pub(crate) fn new(options: &LoadOptions, wire: WireFormat, end: u32) -> Runner {
        // The tests of this program run side by side.
        let options = LoadOptions { threads: Some(1), ..options.clone() };
        let model = load(&model_dir(), Backend::Cpu, &options, &mut |_| {}).expect("the tiny model loads");
        let layout = model.kv_layout();
        let num_blocks = layout.num_blocks_for(MAX_TOKENS);
        let mut ids = (0..).map(BlockId);
        Runner {
            executor: model.cpu_executor().expect("threads start"),
            storage: BlockStorage::new(layout, BATCH * num_blocks).expect("memory for the blocks"),
            blocks: std::array::from_fn(|_| ids.by_ref().take(num_blocks).collect()),
            codec: WireCodec::new(&layout, wire),
            end,
        }
    }

    /// The greedy replies to all prompts.
    pub(crate) fn replies(&mut self, prompts: &[&[u32]]) -> Vec<Reply> {
        prompts.chunks(BATCH).flat_map(|prompts| self.batch(prompts)).collect()
    }

    /// Those to at most `BATCH` prompts.
    fn batch(&mut self, prompts: &[&[u32]]) -> Vec<Reply> {
        let prefill = |(place, prompt): (usize, &&[u32])| Reply {
            tokens: Vec::new(),
            logits: vec![self.prefill(place, prompt)],
        };
        let mut replies: Vec<Reply> = prompts.iter().enumerate().map(prefill).collect();
        loop {
            // The places whose replies go on, and the next token of each.
            let mut next = Vec::new();
            for (place, reply) in replies.iter().enumerate() {
                let token = argmax(&reply.logits[reply.tokens.len()]);
                if token != self.end && reply.tokens.len() < MAX_REPLY {
                    next.push((place, token));
                }
            }
            if next.is_empty() {
                return replies;
            }
            let step = |(place, token): &(usize, u32)| {
                (*place, vec![*token], prompts[*place].len() + replies[*place].tokens.len())
            };
            let logits = self.step(&next.iter().map(step).collect::<Vec<_>>());
            for ((place, token), logits) in next.into_iter().zip(logits) {
                replies[place].tokens.push(token);
                replies[place].logits.push(logits);
            }
        }
    }

    /// The logits of this model at each token of another model's reply.
    pub(crate) fn follow(&mut self, prompt: &[u32], reply: &[u32]) -> Vec<Vec<f32>> {
        let mut logits = vec![self.prefill(0, prompt)];
        for (idx, &token) in reply.iter().enumerate() {
            logits.extend(self.step(&[(0, vec![token], prompt.len() + idx)]));
        }
        logits
    }

    /// Computes a prompt in a place, and converts its KV to the wire format and back.
    fn prefill(&mut self, place: usize, prompt: &[u32]) -> Vec<f32> {
        let logits = self.step(&[(place, prompt.to_vec(), 0)]).remove(0);
        if let Some(codec) = &self.codec {
            let layout = self.storage.layout();
            let (mut coded, mut scratch) = (vec![0; codec.piece_bytes()], WireScratch::default());
            for &block in &self.blocks[place][..layout.num_blocks_for(prompt.len())] {
                for layer_idx in 0..layout.num_layers {
                    // SAFETY: no other code uses the storage.
                    let piece = unsafe { self.storage.layer_mut(block, layer_idx) };
                    codec.encode(piece, &mut coded, &mut scratch);
                    codec.decode(&coded, piece, &mut scratch);
                }
            }
        }
        logits
    }

    /// The logits after the tokens of each place. A sequence is its place, its new tokens, and the position of the first.
    fn step(&mut self, sequences: &[(usize, Vec<u32>, usize)]) -> Vec<Vec<f32>> {
        let sequences = sequences.iter().map(|(place, tokens, start_idx)| BatchSequence {
            tokens,
            start_idx: *start_idx,
            blocks: &self.blocks[*place],
            num_logits: 1,
        });
        let batch = Batch { sequences: sequences.collect() };
        // SAFETY: no other code uses the storage.
        let logits = unsafe { self.executor.execute(&batch, &self.storage, &mut |_| {}) };
        let logits = logits.expect("processors do not fail");
        logits.chunks(logits.len() / batch.sequences.len()).map(<[f32]>::to_vec).collect()
    }
}

/// The likeliest token.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)));
    best.expect("a vocabulary is not empty") as u32
}

/// The Kullback-Leibler divergence of `other` from `reference`, in nats.
pub(crate) fn divergence(reference: &[f32], other: &[f32]) -> f64 {
    let log_probabilities = |logits: &[f32]| {
        let max = f64::from(logits.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x)));
        let total: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
        logits.iter().map(|&x| f64::from(x) - max - total.ln()).collect::<Vec<f64>>()
    };
    let (reference, other) = (log_probabilities(reference), log_probabilities(other));
    reference.iter().zip(&other).map(|(p, q)| p.exp() * (p - q)).sum()
}
