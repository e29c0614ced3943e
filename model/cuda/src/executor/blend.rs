//! Blends prompts on a device.
//!
//! A passage's keys and values stay as their projection left them, in memory of the host. Those of a layer are loaded while
//! earlier layers are computed. The kernel that stores a step's KV stores them, too: so they get the bias, the norm and the
//! rotation that they would have got at their position.
//!
//! ```text
//! copies   | layer s | layer s + 1 | ... as far ahead as there is room
//! device   | layers < s, keys of layer s, all tokens | layer s, selected | layer s + 1: store kept, compute selected | ...
//! host                                      select --^
//! ```
//!
//! Keys of layer s decide. What passages have for layers before it is not loaded.
//!
//! Rows of a step are a part of a prompt that is longer than the largest step. The selected tokens are rows of one sequence at
//! the positions that they have: attention masks by position.

use std::ops::Range;

use baton_cuda::CudaError;
use baton_cuda_kernels::blend::{DeviateKeys, KeepKv};
use baton_cuda_kernels::device::{HostLoad, HostMemory, KernelDevice, NUM_LOADS};
use baton_cuda_kernels::embed::Embed;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::rope::StoreQkv;
use baton_cuda_kernels::rows::NONE;
use baton_kv_cache::{BlockId, BlockStorage};
use baton_model_spec::{
    Batch, BatchSequence, BlendPassage, Blended, BlendedPrompt, BlendingExecutor, ExecuteError,
    FIRST_KEPT_LAYER, PassageKv, RankError, select,
};

use super::device_executor::{DeviceExecutor, of_rank};
use crate::blend_buffers::BlendBuffers;
use crate::forward_pass::{ForwardPass, PlacedRows};

impl<D: KernelDevice + 'static> BlendingExecutor for DeviceExecutor<D> {
    fn max_blended_tokens(&self) -> usize {
        self.limits.num_blended
    }

    fn passage_token_bytes(&self) -> usize {
        (self.weights.layers.len() - FIRST_KEPT_LAYER) * BlendBuffers::token_bytes(self.part.spec())
    }

    unsafe fn compute_passage(
        &mut self,
        tokens: &[u32],
        blocks: &[BlockId],
        storage: &BlockStorage,
    ) -> Result<PassageKv, ExecuteError> {
        self.compute_alone(tokens, blocks, storage).map_err(|error| self.failed(error))
    }

    unsafe fn blend(
        &mut self,
        prompt: &BlendedPrompt<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Blended<'_>, ExecuteError> {
        match self.compute_blended(prompt, storage, on_layer) {
            Ok(computed) => Ok(Blended { computed, logits: &self.blended_logits }),
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl<D: KernelDevice> DeviceExecutor<D> {
    /// Keeps `[layers][tokens][2 kv_width]`, bf16, from layer [`FIRST_KEPT_LAYER`] on.
    fn compute_alone(
        &mut self,
        tokens: &[u32],
        blocks: &[BlockId],
        storage: &BlockStorage,
    ) -> Result<PassageKv, RankError> {
        let num_layers = self.weights.layers.len();
        let token_bytes = BlendBuffers::token_bytes(self.part.spec());
        let size_bytes = (num_layers - FIRST_KEPT_LAYER) * tokens.len() * token_bytes;
        let kept = self.device.allocate_on_host(size_bytes).map_err(of_rank)?;
        let first = kept.at;
        self.by_chunks(tokens, blocks, storage, |device, pass, start_idx| {
            pass.begin(device)?;
            for layer_idx in 0..num_layers {
                pass.store(device, layer_idx)?;
                if let Some(stored_idx) = layer_idx.checked_sub(FIRST_KEPT_LAYER) {
                    let row_idx = stored_idx * tokens.len() + start_idx;
                    // SAFETY: the rows were just computed, and there is room for all of them.
                    unsafe { device.launch(&keep_rows(pass, first.offset_by(row_idx * token_bytes))) }?;
                }
                // Nothing needs what follows the last layer's KV.
                if layer_idx + 1 < num_layers {
                    pass.finish(device, layer_idx)?;
                }
            }
            Ok(())
        })?;
        self.device.mark(0).and_then(|()| self.device.wait_for(0)).map_err(of_rank)?;
        Ok(PassageKv::new(tokens.len(), size_bytes, kept))
    }

    fn compute_blended(
        &mut self,
        prompt: &BlendedPrompt<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Vec<usize>, RankError> {
        let passages = prompt.ranges();
        assert!(prompt.tokens.len() <= self.limits.num_blended, "a prompt of {} tokens", prompt.tokens.len());
        let selecting_idx = prompt.selection.layer_in(self.weights.layers.len());
        let deviations = self.compute_first_layers(prompt, &passages, selecting_idx, storage)?;
        let selected = select(&deviations, &passages, &prompt.selection);
        self.compute_selected(prompt, &selected, selecting_idx, on_layer).map_err(of_rank)?;
        Ok(selected)
    }

    /// Computes all tokens up to the keys of the selecting layer. Returns how far each token's are from its passage's; only
    /// tokens of passages count. A part of a long prompt attends to the KV that earlier parts have stored in these layers.
    fn compute_first_layers(
        &mut self,
        prompt: &BlendedPrompt<'_>,
        passages: &[Range<usize>],
        selecting_idx: usize,
        storage: &BlockStorage,
    ) -> Result<Vec<f32>, RankError> {
        // As many layers as there is room for.
        for layer_idx in selecting_idx..selecting_idx + NUM_LOADS {
            self.load_kept(prompt, layer_idx).map_err(of_rank)?;
        }
        let hidden_bytes = self.part.spec().hidden_size * 2;
        let &BlendBuffers { x, deviations: apart, .. } = self.blend_buffers();
        let kept = self.blend_buffers().kept(selecting_idx);
        let token_bytes = BlendBuffers::token_bytes(self.part.spec());
        self.by_chunks(prompt.tokens, prompt.blocks, storage, |device, pass, start_idx| {
            let pass = ForwardPass { x: x.offset_by(start_idx * hidden_bytes), ..pass.clone() };
            pass.begin(device)?;
            for layer_idx in 0..selecting_idx {
                pass.store(device, layer_idx)?;
                pass.finish(device, layer_idx)?;
            }
            pass.store(device, selecting_idx)?;
            if start_idx == 0 {
                device.await_loads(selecting_idx % NUM_LOADS)?;
            }
            let rows = start_idx..start_idx + pass.inputs.num_rows;
            for passage in passages {
                let (start, end) = (passage.start.max(rows.start), passage.end.min(rows.end));
                if start >= end {
                    continue;
                }
                let kept = kept.offset_by(start * token_bytes);
                let deviations = apart.offset_by(start * 4);
                let of_passage = start - start_idx..end - start_idx;
                let kernel = deviate_keys(&pass, selecting_idx, of_passage, kept, deviations);
                // SAFETY: the rows were just computed, and what their passage has is loaded.
                unsafe { device.launch(&kernel) }?;
            }
            Ok(())
        })?;
        let mut deviations = vec![0.0f32; prompt.tokens.len()];
        // SAFETY: there is a number for each token. Those of other text are not read.
        unsafe { self.device.download(apart, bytemuck::cast_slice_mut(&mut deviations)) }.map_err(of_rank)?;
        Ok(deviations)
    }

    /// Computes the selected tokens from the selecting layer on, and stores what passages have for the others in later layers.
    fn compute_selected(
        &mut self,
        prompt: &BlendedPrompt<'_>,
        selected: &[usize],
        selecting_idx: usize,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<(), CudaError> {
        let num_layers = self.weights.layers.len();
        let rows: Vec<u32> = selected.iter().map(|&position| position as u32).collect();
        let num_chunks = rows.len().div_ceil(self.limits.num_rows).max(1);
        // The host has waited for the distances, so these layers are done.
        (0..selecting_idx).for_each(&mut *on_layer);
        let mut next_layer = selecting_idx;
        for chunk_idx in 0..num_chunks {
            let (is_first, is_last) = (chunk_idx == 0, chunk_idx + 1 == num_chunks);
            let chunk = rows.chunks(self.limits.num_rows).nth(chunk_idx).unwrap_or_default();
            let DeviceExecutor { inputs, shape, tables, .. } = self;
            let wants_logits = is_last && prompt.wants_logits;
            let blocks = &prompt.blocks[..prompt.tokens.len().div_ceil(shape.block_size)];
            inputs.fill_rows(chunk, wants_logits, blocks, shape, tables);
            self.upload()?;
            if is_first {
                self.place_kept(prompt.tokens.len(), selected)?;
                self.load_kept(prompt, selecting_idx + NUM_LOADS)?;
            }
            let has_rows = !chunk.is_empty();
            if has_rows {
                self.gather(selecting_idx)?;
            }
            for layer_idx in selecting_idx..num_layers {
                if is_first && layer_idx > selecting_idx {
                    self.device.await_loads(layer_idx % NUM_LOADS)?;
                    let buffers = self.blend_buffers();
                    let (kept, slots) = (buffers.kept(layer_idx), buffers.slots);
                    let cos_sin = buffers.cos_sin[self.part.spec().layers[layer_idx].rope_idx];
                    let (device, pass) = self.pass();
                    let rows = StoreQkv { qkv: kept, slots, cos_sin, ..pass.store_rows(layer_idx) };
                    // SAFETY: what passages have is loaded. A token is either kept or computed.
                    unsafe { device.launch(&without_queries(rows, &pass, prompt.tokens.len())) }?;
                    self.load_kept(prompt, layer_idx + NUM_LOADS)?;
                }
                let (device, pass) = self.pass();
                if has_rows {
                    pass.store(device, layer_idx)?;
                }
                if is_last {
                    device.mark(layer_idx)?;
                }
                // Only logits need what follows the last layer's KV.
                if has_rows && (layer_idx + 1 < num_layers || wants_logits) {
                    pass.finish(device, layer_idx)?;
                }
                while is_last && next_layer <= layer_idx && device.has_passed(next_layer)? {
                    on_layer(next_layer);
                    next_layer += 1;
                }
            }
        }
        let num_logits = if prompt.wants_logits { self.part.spec().vocab_size } else { 0 };
        if num_logits > 0 {
            let (device, pass) = self.pass();
            pass.norm_wanted(device)?;
            pass.logits(device, 0, 1)?;
        }
        for layer_idx in next_layer..num_layers {
            self.device.wait_for(layer_idx)?;
            on_layer(layer_idx);
        }
        self.blended_logits.resize(num_logits, 0.0);
        let to = bytemuck::cast_slice_mut(&mut self.blended_logits);
        // SAFETY: as many were computed.
        unsafe { self.device.download(self.buffers.logits, to) }
    }

    /// Queues the loads of what passages have for a layer, if the model has it.
    fn load_kept(&mut self, prompt: &BlendedPrompt<'_>, layer_idx: usize) -> Result<(), CudaError> {
        if layer_idx >= self.weights.layers.len() {
            return Ok(());
        }
        let to = self.blend_buffers().kept(layer_idx);
        let token_bytes = BlendBuffers::token_bytes(self.part.spec());
        let of_passage = |passage: &BlendPassage<'_>| {
            let num_bytes = passage.kv.num_tokens() * token_bytes;
            let first = passage.kv.numbers::<HostMemory>().at;
            let from = first.offset_by((layer_idx - FIRST_KEPT_LAYER) * num_bytes);
            HostLoad { to: to.offset_by(passage.start_idx * token_bytes), from, num_bytes }
        };
        let loads: Vec<HostLoad> = prompt.passages.iter().map(of_passage).collect();
        // SAFETY: the caller holds the passages until the blend is done, and the buffer has a row for each token.
        unsafe { self.device.begin_loads(&loads, layer_idx % NUM_LOADS) }
    }

    /// Looks up the slots and rotations of the tokens that keep what their passage has. The step's sequence is in the first slot of
    /// the block tables.
    fn place_kept(&mut self, num_tokens: usize, selected: &[usize]) -> Result<(), CudaError> {
        let mut tables = vec![0; num_tokens];
        selected.iter().for_each(|&position| tables[position] = NONE);
        let &BlendBuffers { positions, tables: tables_at, slots, .. } = self.blend_buffers();
        // SAFETY: there is a word for each token.
        unsafe { self.device.upload(tables_at, bytemuck::cast_slice(&tables)) }?;
        let cos_sin = self.blend_buffers().cos_sin.clone();
        let (device, pass) = self.pass();
        let rows = PlacedRows { positions, slots, cos_sin: &cos_sin };
        pass.place_rows(device, &rows, tables_at, num_tokens)
    }

    /// Takes the residual stream of the step's rows from that of all tokens, and norms it for the selecting layer.
    fn gather(&mut self, selecting_idx: usize) -> Result<(), CudaError> {
        let (table, num_held) = (self.blend_buffers().x, self.limits.num_blended as u32);
        let (device, pass) = self.pass();
        pass.place(device)?;
        let gather = Embed {
            table,
            tokens: pass.at.positions,
            x: pass.x,
            hidden: pass.spec.hidden_size as u32,
            first_token: 0,
            num_held,
            scale: 1.0,
            num_rows: pass.inputs.num_rows as u64,
        };
        // SAFETY: the stream has a row for each position.
        unsafe { device.launch(&gather) }?;
        let layer = &pass.weights.layers[selecting_idx];
        pass.add_norm(device, Address::NULL, layer.attention_norm, Some(&layer.qkv))
    }

    fn blend_buffers(&self) -> &BlendBuffers {
        self.blending.as_ref().expect("only an executor that blends is asked to")
    }

    /// Queues the passes of a sequence that starts at position 0, in steps of the largest size. `compute` queues the pass of a
    /// step whose inputs are on the device, and gets the position of its first token.
    fn by_chunks(
        &mut self,
        tokens: &[u32],
        blocks: &[BlockId],
        storage: &BlockStorage,
        mut compute: impl FnMut(&mut D, &ForwardPass<'_>, usize) -> Result<(), CudaError>,
    ) -> Result<(), RankError> {
        let num_rows = self.limits.num_rows;
        for (chunk_idx, tokens) in tokens.chunks(num_rows).enumerate() {
            let start_idx = chunk_idx * num_rows;
            let sequences = vec![BatchSequence { tokens, start_idx, blocks, num_logits: 0 }];
            self.take(&Batch { sequences }, storage).map_err(RankError::Failed)?;
            self.upload().map_err(of_rank)?;
            let (device, pass) = self.pass();
            compute(device, &pass, start_idx).map_err(of_rank)?;
        }
        Ok(())
    }
}

/// Keeps the keys and values of the step's rows at `to`.
fn keep_rows(pass: &ForwardPass<'_>, to: Address) -> KeepKv {
    let kv_width = 2 * pass.spec.kv_width();
    KeepKv {
        qkv: pass.buffers.qkv,
        to,
        width: (pass.spec.query_width() + kv_width) as u32,
        kv_width: kv_width as u32,
        num_rows: pass.inputs.num_rows as u64,
    }
}

/// How far the keys of a layer of some of the step's rows are from those of their passage.
fn deviate_keys(
    pass: &ForwardPass<'_>,
    layer_idx: usize,
    rows: Range<usize>,
    kept: Address,
    deviations: Address,
) -> DeviateKeys {
    let spec = pass.spec;
    let layer = &pass.weights.layers[layer_idx];
    let width = spec.query_width() + 2 * spec.kv_width();
    DeviateKeys {
        qkv: pass.buffers.qkv.offset_by(rows.start * width * 2),
        kept,
        bias: bias_of_keys(layer.qkv_bias, spec.query_width()),
        key_norm: layer.key_norm,
        deviations,
        width: width as u32,
        num_heads: spec.num_heads as u32,
        num_kv_heads: spec.num_kv_heads as u32,
        head_dim: spec.head_dim as u32,
        eps: spec.norm_eps,
        num_rows: rows.len() as u32,
    }
}

/// The store of rows of keys and values alone.
fn without_queries(rows: StoreQkv, pass: &ForwardPass<'_>, num_rows: usize) -> StoreQkv {
    StoreQkv {
        query_norm: Address::NULL,
        bias: bias_of_keys(rows.bias, pass.spec.query_width()),
        num_rows: num_rows as u32,
        num_heads: 0,
        ..rows
    }
}

/// The keys' part of a projection's bias, if it has one.
fn bias_of_keys(bias: Address, query_width: usize) -> Address {
    if bias == Address::NULL { bias } else { bias.offset_by(query_width * 4) }
}
