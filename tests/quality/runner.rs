//! One model that computes one sequence at a time.

use baton_kv_cache::{BlockId, BlockStorage, WireCodec, WireFormat, WireScratch};
use baton_model::{Backend, Batch, BatchSequence, CpuExecutor, Executor, LoadOptions, load};

use crate::prompts::model_dir;

/// Tokens of a prompt and its reply.
const MAX_TOKENS: usize = 1024;
/// Tokens of a reply.
const MAX_REPLY: usize = 64;

/// The tiny model as some options load it.
pub(crate) struct Runner {
    executor: CpuExecutor,
    storage: BlockStorage,
    blocks: Vec<BlockId>,
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
        Runner {
            executor: model.cpu_executor().expect("threads start"),
            storage: BlockStorage::new(layout, num_blocks).expect("memory for the blocks"),
            blocks: (0..num_blocks as u32).map(BlockId).collect(),
            codec: WireCodec::new(&layout, wire),
            end,
        }
    }

    /// The greedy reply.
    pub(crate) fn reply(&mut self, prompt: &[u32]) -> Reply {
        let mut reply = Reply { tokens: Vec::new(), logits: vec![self.prefill(prompt)] };
        loop {
            let token = argmax(&reply.logits[reply.tokens.len()]);
            if token == self.end || reply.tokens.len() == MAX_REPLY {
                return reply;
            }
            let logits = self.step(&[token], prompt.len() + reply.tokens.len());
            reply.tokens.push(token);
            reply.logits.push(logits);
        }
    }

    /// The logits of this model at each token of another model's reply.
    pub(crate) fn follow(&mut self, prompt: &[u32], reply: &[u32]) -> Vec<Vec<f32>> {
        let mut logits = vec![self.prefill(prompt)];
        for (idx, &token) in reply.iter().enumerate() {
            logits.push(self.step(&[token], prompt.len() + idx));
        }
        logits
    }

    /// Computes a prompt and converts its KV to the wire format and back.
    fn prefill(&mut self, prompt: &[u32]) -> Vec<f32> {
        let logits = self.step(prompt, 0);
        if let Some(codec) = &self.codec {
            let layout = self.storage.layout();
            let (mut coded, mut scratch) = (vec![0; codec.piece_bytes()], WireScratch::default());
            for &block in &self.blocks[..layout.num_blocks_for(prompt.len())] {
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

    fn step(&mut self, tokens: &[u32], start_idx: usize) -> Vec<f32> {
        let sequence = BatchSequence { tokens, start_idx, blocks: &self.blocks, num_logits: 1 };
        let batch = Batch { sequences: vec![sequence] };
        // SAFETY: no other code uses the storage.
        let logits = unsafe { self.executor.execute(&batch, &self.storage, &mut |_| {}) };
        logits.expect("processors do not fail").to_vec()
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
