//! Blended prompts on CPUs: the forward pass over all tokens up to the selection, and over the selected tokens after it.
//!
//! A run of consecutive selected tokens is a sequence of the batch over the blocks of the prompt. So attention sees every
//! position before a token's own, and a row has the numbers that a full prefill over the same KV gives it.
//!
//! It does not know where passages are kept.

use std::ops::Range;

use baton_checkpoint::DecoderWeights;
use baton_cpu_attention::store_rows;
use baton_cpu_kernels::Cpu;
use baton_cpu_threads::SharedMut;
use baton_kv_cache::{BlockId, BlockStorage};
use baton_model_spec::{
    Batch, BatchSequence, Blended, BlendedPrompt, BlendingExecutor, CommunicatorError, ExecuteError,
    Executor, FIRST_KEPT_LAYER, PassageKv, RopeSpec, select,
};

use crate::executor::CpuExecutor;
use crate::forward::ForwardPass;
use crate::packed::PackedMatrix;
use crate::rope::RopeTables;

/// Tokens of the longest prompt that is blended, as on a GPU: buffers of a pass have a row for each.
const MAX_BLENDED: usize = 32 << 10;

const ONE_RANK: &str = "a single rank cannot lose another";

/// What processors keep of a passage: keys without rotation and without the scaling of cosines and sines.
pub struct PassageNumbers {
    num_tokens: usize,
    width: usize,
    /// `[layers][k|v][tokens][width]`, from layer [`FIRST_KEPT_LAYER`] on.
    numbers: Vec<f32>,
}

/// Tokens that keep the KV of their passage.
struct KeptTokens {
    positions: Vec<usize>,
    ropes: RopeTables,
}

impl BlendingExecutor for CpuExecutor {
    fn max_blended_tokens(&self) -> usize {
        MAX_BLENDED
    }

    fn passage_token_bytes(&self) -> usize {
        let spec = self.model.decoder().shard().spec();
        spec.layers.len().saturating_sub(FIRST_KEPT_LAYER) * 2 * spec.kv_width() * size_of::<f32>()
    }

    unsafe fn compute_passage(
        &mut self,
        tokens: &[u32],
        blocks: &[BlockId],
        storage: &BlockStorage,
    ) -> Result<PassageKv, ExecuteError> {
        // SAFETY: guaranteed by the caller.
        Ok(unsafe { self.compute_alone(tokens, blocks, storage) }.expect(ONE_RANK))
    }

    unsafe fn blend(
        &mut self,
        prompt: &BlendedPrompt<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Blended<'_>, ExecuteError> {
        // SAFETY: guaranteed by the caller.
        let (computed, num_logits) =
            unsafe { self.compute_blended(prompt, storage, on_layer) }.expect(ONE_RANK);
        Ok(Blended { computed, logits: self.logits(num_logits) })
    }
}

impl CpuExecutor {
    /// # Safety
    /// As for [`BlendingExecutor::compute_passage`].
    unsafe fn compute_alone(
        &mut self,
        tokens: &[u32],
        blocks: &[BlockId],
        storage: &BlockStorage,
    ) -> Result<PassageKv, CommunicatorError> {
        let whole = [BatchSequence { tokens, start_idx: 0, blocks, num_logits: 0 }];
        let (mut pass, weights, ropes) = self.begin(&whole, storage)?;
        let layers = &weights.layers;
        let width = pass.spec.kv_width();
        let mut passage = PassageNumbers::zeroed(tokens.len(), layers.len(), width);
        for (layer_idx, layer) in layers.iter().enumerate() {
            let to = (layer_idx >= FIRST_KEPT_LAYER).then(|| {
                let (keys, values) = passage.layer_mut(layer_idx);
                [keys, values].map(SharedMut::new)
            });
            let keep = |row_idx: usize, keys: &[f32], values: &[f32]| {
                for (to, row) in to.iter().flatten().zip([keys, values]) {
                    // SAFETY: each row has its own place, and the passage has as many rows.
                    unsafe { to.row(row_idx, width) }.copy_from_slice(row);
                }
            };
            pass.project(layer);
            // SAFETY: the caller gives this call exclusive access to the blocks.
            unsafe { pass.store(layer_idx, layer, ropes, storage, keep) };
            // Nothing needs what follows the last layer's KV.
            if layer_idx + 1 < layers.len() {
                // SAFETY: as above, and the layer's KV is written.
                unsafe { pass.finish_layer(layer_idx, layer, storage) }?;
            }
        }
        let size_bytes = size_of_val(&passage.numbers[..]);
        Ok(PassageKv::new(tokens.len(), size_bytes, passage))
    }

    /// Returns the positions that were computed in all layers, and the number of logits.
    ///
    /// # Safety
    /// As for [`BlendingExecutor::blend`].
    unsafe fn compute_blended(
        &mut self,
        prompt: &BlendedPrompt<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<(Vec<usize>, usize), CommunicatorError> {
        let passages = prompt.ranges();
        let (tokens, blocks) = (prompt.tokens, prompt.blocks);
        assert!(tokens.len() <= MAX_BLENDED, "a prompt of {} tokens", tokens.len());
        let whole = [BatchSequence { tokens, start_idx: 0, blocks, num_logits: 0 }];
        let (mut pass, weights, ropes) = self.begin(&whole, storage)?;
        let layers = &weights.layers;
        let selecting_idx = prompt.selection.layer_in(layers.len());
        for (layer_idx, layer) in layers[..selecting_idx].iter().enumerate() {
            pass.project(layer);
            // SAFETY: the caller gives this call exclusive access to the blocks.
            unsafe { pass.store(layer_idx, layer, ropes, storage, |_, _, _| {}) };
            on_layer(layer_idx);
            // SAFETY: as above, and the layer's KV is written.
            unsafe { pass.finish_layer(layer_idx, layer, storage) }?;
        }

        let layer = &layers[selecting_idx];
        let mut deviations = vec![0.0; tokens.len()];
        let to = SharedMut::new(&mut deviations);
        let deviate = |row_idx: usize, keys: &[f32], _: &[f32]| {
            if let Some((own, _)) = kept_at(prompt, row_idx, selecting_idx) {
                // SAFETY: each row has its own number.
                unsafe { *to.ptr().add(row_idx) = squared_distance(keys, own) };
            }
        };
        pass.project(layer);
        // SAFETY: as above. Row indices are positions.
        unsafe { pass.store(selecting_idx, layer, ropes, storage, deviate) };
        on_layer(selecting_idx);

        let selected = select(&deviations, &passages, &prompt.selection);
        let runs = Batch { sequences: runs_of(&selected, prompt) };
        let wanted = runs.wanted();
        let kept = KeptTokens::new(&pass.spec.ropes, &selected, tokens.len());
        pass.narrow(&selected, &runs.sequences);
        ropes.prepare(&pass.buffers.positions);
        for (layer_idx, layer) in layers.iter().enumerate().skip(selecting_idx) {
            if layer_idx > selecting_idx {
                // SAFETY: as above; a token is either kept or computed.
                unsafe {
                    kept.store(pass.cpu, prompt, layer_idx, pass.spec.layers[layer_idx].rope_idx, storage)
                };
                if pass.num_rows > 0 {
                    pass.project(layer);
                    // SAFETY: as above.
                    unsafe { pass.store(layer_idx, layer, ropes, storage, |_, _, _| {}) };
                }
                on_layer(layer_idx);
            }
            // Only logits need what follows the last layer's KV.
            if let Some(wanted) = wanted.as_ref().filter(|_| layer_idx + 1 == layers.len()) {
                pass.narrow_to_wanted(&wanted.sequences);
            }
            if pass.num_rows > 0 {
                // SAFETY: as above, and the layer's KV is written.
                unsafe { pass.finish_layer(layer_idx, layer, storage) }?;
            }
        }
        let num_wanted = pass.normalise_wanted(&weights.norm);
        let num_logits = pass.logits(weights.head.as_ref(), num_wanted)?;
        Ok((selected, num_logits))
    }

    /// A pass over `sequences` with the embeddings of their tokens, the layers, and the rotations of the rows.
    fn begin<'a>(
        &'a mut self,
        sequences: &'a [BatchSequence<'a>],
        storage: &BlockStorage,
    ) -> Result<(ForwardPass<'a>, &'a DecoderWeights<PackedMatrix>, &'a mut RopeTables), CommunicatorError>
    {
        assert_eq!(*storage.layout(), self.kv_layout(), "blocks of another layout");
        let CpuExecutor { model, cpu, buffers, ropes } = self;
        let weights = model.decoder().weights();
        let mut pass = ForwardPass::new(model, cpu, buffers, sequences, None);
        ropes.prepare(&pass.buffers.positions);
        pass.embed(weights)?;
        Ok((pass, weights, ropes))
    }
}

impl PassageNumbers {
    /// Zeros for a passage of a model with `num_layers` layers and `width` numbers in the keys of a token.
    fn zeroed(num_tokens: usize, num_layers: usize, width: usize) -> PassageNumbers {
        let num_stored = num_layers.saturating_sub(FIRST_KEPT_LAYER);
        PassageNumbers { num_tokens, width, numbers: vec![0.0; num_stored * 2 * num_tokens * width] }
    }

    /// The keys of a layer, `[tokens][width]`, and its values.
    ///
    /// # Panics
    /// When passages have no such layer.
    pub fn layer(&self, layer_idx: usize) -> (&[f32], &[f32]) {
        self.numbers[self.range(layer_idx)].split_at(self.num_tokens * self.width)
    }

    fn layer_mut(&mut self, layer_idx: usize) -> (&mut [f32], &mut [f32]) {
        let range = self.range(layer_idx);
        self.numbers[range].split_at_mut(self.num_tokens * self.width)
    }

    fn range(&self, layer_idx: usize) -> Range<usize> {
        let size = 2 * self.num_tokens * self.width;
        let stored_idx = layer_idx.checked_sub(FIRST_KEPT_LAYER).expect("a passage has no earlier layers");
        stored_idx * size..(stored_idx + 1) * size
    }
}

/// The keys and the values that the passage at `position` has for it in a layer; `None` if no passage is there.
fn kept_at<'a>(
    prompt: &'a BlendedPrompt<'_>,
    position: usize,
    layer_idx: usize,
) -> Option<(&'a [f32], &'a [f32])> {
    let (passage, at) = prompt.kept(position)?;
    let numbers: &PassageNumbers = passage.numbers();
    let (keys, values) = numbers.layer(layer_idx);
    let row = at * numbers.width..(at + 1) * numbers.width;
    Some((&keys[row.clone()], &values[row]))
}

impl KeptTokens {
    /// All but the `selected` ones of `num_tokens` tokens.
    fn new(ropes: &[RopeSpec], selected: &[usize], num_tokens: usize) -> KeptTokens {
        let mut selected = selected.iter().peekable();
        let positions: Vec<usize> =
            (0..num_tokens).filter(|position| selected.next_if_eq(&position).is_none()).collect();
        let mut ropes = RopeTables::new(ropes);
        ropes.prepare(&positions);
        KeptTokens { positions, ropes }
    }

    /// Writes the KV that the passages have for these tokens, keys rotated to their positions.
    ///
    /// # Safety
    /// No other code reads or writes this layer's slots of these tokens.
    unsafe fn store(
        &self,
        cpu: &Cpu,
        prompt: &BlendedPrompt<'_>,
        layer_idx: usize,
        rope_idx: usize,
        storage: &BlockStorage,
    ) {
        let layout = storage.layout();
        let width = layout.num_kv_heads * layout.head_dim;
        cpu.for_rows(self.positions.len(), 2 * width, |row_idx| {
            let position = self.positions[row_idx];
            let (keys, values) =
                kept_at(prompt, position, layer_idx).expect("only tokens of passages are kept");
            let mut keys = keys.to_vec();
            self.ropes.rotate(cpu, rope_idx, row_idx, &mut keys, layout.head_dim);
            // SAFETY: tokens have distinct positions; the caller guarantees that no other code accesses them.
            unsafe { store_rows(storage, layer_idx, prompt.blocks, position, 0, &keys, values) };
        });
    }
}

/// The selected tokens as sequences of consecutive ones.
fn runs_of<'a>(selected: &[usize], prompt: &BlendedPrompt<'a>) -> Vec<BatchSequence<'a>> {
    let runs = selected.chunk_by(|one, next| one + 1 == *next);
    let has_last = |run: &[usize]| run.last() == Some(&(prompt.tokens.len() - 1));
    let sequence = |run: &[usize]| BatchSequence {
        tokens: &prompt.tokens[run[0]..run[0] + run.len()],
        start_idx: run[0],
        blocks: prompt.blocks,
        num_logits: usize::from(prompt.wants_logits && has_last(run)),
    };
    runs.map(sequence).collect()
}

fn squared_distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
}
