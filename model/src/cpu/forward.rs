//! The decoder's forward pass over a batch: which operations, in which order, on which memory.
//!
//! The rows of all sequences lie one after the other in one matrix of activations; only attention
//! knows where one sequence ends. Memory grows to the largest batch seen, then nothing is allocated.

use std::sync::Arc;

use baton_kv_cache::{BlockStorage, KvLayout};

use super::attention::{AttentionShape, attend};
use super::experts::ExpertBuffers;
use super::kv::store_rows;
use super::products::{Output, PanelsRef, multiply};
use super::rope::RopeTables;
use super::rows::{Gate, rms_norm, rms_norm_in_place, soft_cap};
use super::simd::Isa;
use super::{Aligned, Cpu, SharedMut, ThreadPool};
use crate::CpuModel;
use crate::packed::PackedMatrix;
use baton_checkpoint::{DecoderWeights, DenseMlp, LayerWeights, Linear, Mlp};
use baton_model_spec::{Activation, DecoderSpec, MlpSpec};
use baton_model_spec::{
    Batch, BatchSequence, Communicator, CommunicatorError, DecoderShard, ExecuteError, Executor, Rank,
};

/// The ranks that compute a model together, as one of them reaches the others.
pub(super) type Ranks = dyn Communicator;

/// Computes on this machine's processors.
pub struct CpuExecutor {
    model: CpuModel,
    cpu: Cpu,
    buffers: Buffers,
    ropes: RopeTables,
}

/// Activations, `[rows][...]` each.
#[derive(Default)]
struct Buffers {
    /// The residual stream, `[hidden]`.
    x: Aligned,
    /// What a norm or a projection made of it, `[hidden]`.
    hidden: Aligned,
    /// Queries, keys and values side by side.
    qkv: Aligned,
    /// What attention found, `[heads * head_dim]`.
    attended: Aligned,
    /// Inside a dense MLP, or one expert.
    gated: Aligned,
    experts: ExpertBuffers,
    /// `[wanted][vocab]`; of one rank of several `[wanted][its tokens]`, until the first collects them.
    logits: Aligned,
    /// `[ranks][wanted][tokens of each]`
    gathered: Aligned,
    /// Of each row.
    positions: Vec<usize>,
    /// Of each sequence.
    first_rows: Vec<usize>,
}

impl CpuExecutor {
    pub(crate) fn new(model: CpuModel, pool: Arc<ThreadPool>) -> CpuExecutor {
        let isa = Isa::detect();
        tracing::debug!(threads = pool.num_threads(), instructions = isa.name(), "cpu executor");
        let ropes = RopeTables::new(&model.decoder().shard().spec().ropes);
        CpuExecutor { model, cpu: Cpu::on(pool, isa), buffers: Buffers::default(), ropes }
    }

    /// The model that it computes.
    pub fn model(&self) -> &CpuModel {
        &self.model
    }

    /// "avx512", "avx2" or "portable".
    pub fn instruction_set(&self) -> &'static str {
        self.cpu.isa.name()
    }
}

impl Executor for CpuExecutor {
    fn kv_layout(&self) -> KvLayout {
        self.model.decoder().kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.model.decoder().config().vocab_size()
    }

    fn attach_thread(&mut self) -> Result<(), ExecuteError> {
        let refused =
            |error| ExecuteError { device: "cpu".into(), message: format!("cannot pin a thread: {error}") };
        self.cpu.pool.attach_thread().map_err(refused)
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        // SAFETY: by the caller's word.
        let num_logits = unsafe { self.compute(batch, storage, on_layer, None) };
        Ok(self.logits(num_logits.expect("no rank can be lost where there is but one")))
    }
}

impl CpuExecutor {
    /// The first logits of the last step.
    pub(super) fn logits(&self, num_logits: usize) -> &[f32] {
        &self.buffers.logits[..num_logits]
    }

    /// One step, of a whole model or together with other `ranks`; how many logits there are, 0 for all ranks but the
    /// first.
    ///
    /// # Errors
    /// When another rank is gone.
    ///
    /// # Safety
    /// As [`Executor::execute`]; all ranks execute the same batch on the same storage.
    pub(super) unsafe fn compute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
        ranks: Option<&mut Ranks>,
    ) -> Result<usize, CommunicatorError> {
        assert_eq!(*storage.layout(), self.kv_layout(), "blocks of another layout");
        let CpuExecutor { model, cpu, buffers, ropes } = self;
        let weights = model.decoder().weights();
        buffers.positions.clear();
        buffers.first_rows.clear();
        for sequence in &batch.sequences {
            assert!(!sequence.tokens.is_empty(), "a sequence without tokens");
            assert!(sequence.num_logits <= sequence.tokens.len(), "more logits than tokens");
            buffers.first_rows.push(buffers.positions.len());
            buffers.positions.extend(sequence.start_idx..sequence.start_idx + sequence.tokens.len());
        }
        let mut pass = Pass {
            shard: model.decoder().shard(),
            spec: model.decoder().shard().spec(),
            bf16_pairs: model.bf16_pairs(),
            cpu,
            num_rows: buffers.positions.len(),
            buffers,
            sequences: &batch.sequences,
            ranks,
        };
        ropes.prepare(&pass.buffers.positions);
        let tokens = batch.sequences.iter().flat_map(|sequence| sequence.tokens);
        pass.embed(weights, tokens)?;
        for (layer_idx, layer) in weights.layers.iter().enumerate() {
            pass.project(layer);
            // SAFETY: the caller gives this call the blocks of the batch.
            unsafe { pass.store(layer_idx, layer, ropes, storage) };
            // A rank may attend to heads that another one writes.
            if let Some(ranks) = &mut pass.ranks {
                ranks.barrier()?;
            }
            on_layer(layer_idx);
            // SAFETY: as above, and the layer's KV has been written.
            unsafe { pass.attend(layer_idx, storage) };
            pass.finish_attention(layer)?;
            pass.mlp(&pass.spec.layers[layer_idx].mlp, layer)?;
        }
        let num_wanted = pass.normalise_wanted(&weights.norm);
        pass.logits(weights.head.as_ref(), num_wanted)
    }
}

/// One call of `execute`.
struct Pass<'a> {
    shard: &'a DecoderShard,
    /// That of the shard.
    spec: &'a DecoderSpec,
    bf16_pairs: bool,
    cpu: &'a mut Cpu,
    buffers: &'a mut Buffers,
    sequences: &'a [BatchSequence<'a>],
    num_rows: usize,
    /// `None` where one computes the whole model.
    ranks: Option<&'a mut Ranks>,
}

impl Pass<'_> {
    fn embed<'t>(
        &mut self,
        weights: &DecoderWeights<PackedMatrix>,
        tokens: impl Iterator<Item = &'t u32>,
    ) -> Result<(), CommunicatorError> {
        let own = self.shard.vocabulary();
        let (hidden, scale) = (self.spec.hidden_size, self.spec.embedding_scale);
        let x = self.buffers.x.grown(self.num_rows * hidden);
        for (row, &token) in x.chunks_exact_mut(hidden).zip(tokens) {
            let token = token as usize;
            assert!(token < self.spec.vocab_size, "token {token} outside the vocabulary");
            match &weights.embedding {
                Some(embedding) => {
                    embedding.read_row(token, row);
                    row.iter_mut().for_each(|x| *x *= scale);
                }
                None if own.contains(&token) => {
                    weights.head.as_ref().read_row(token - own.start, scale, row);
                }
                // Of all ranks one has the token's row.
                None => row.fill(0.0),
            }
        }
        match (&mut self.ranks, &weights.embedding) {
            (Some(ranks), None) => ranks.all_reduce_sum(x),
            _ => Ok(()),
        }
    }

    /// Queries, keys and values of every row.
    fn project(&mut self, layer: &LayerWeights<PackedMatrix>) {
        let spec = self.spec;
        let rows = self.num_rows;
        let hidden = self.buffers.hidden.grown(rows * spec.hidden_size);
        normalise(self.cpu, spec, &self.buffers.x, &layer.attention_norm, hidden);
        let width = spec.query_width() + 2 * spec.kv_width();
        let qkv = self.buffers.qkv.grown(rows * width);
        apply(self.cpu, rows, hidden, &layer.qkv, qkv, Output::Store);
    }

    /// Norms and rotates heads in place and puts keys and values into their blocks.
    ///
    /// # Safety
    /// Nobody else reads or writes the rows' places in this layer of their blocks.
    unsafe fn store(
        &mut self,
        layer_idx: usize,
        layer: &LayerWeights<PackedMatrix>,
        ropes: &RopeTables,
        storage: &BlockStorage,
    ) {
        let spec = self.spec;
        let (query, kv) = (spec.query_width(), spec.kv_width());
        let width = query + 2 * kv;
        let isa = self.cpu.isa;
        let qkv = SharedMut::new(&mut self.buffers.qkv[..self.num_rows * width]);
        let rope_idx = spec.layers[layer_idx].rope_idx;
        let positions = &self.buffers.positions;
        let (writes_kv, first_head) = (self.shard.writes_kv(), self.shard.kv_heads().start);
        let (sequences, first_rows) = (self.sequences, &self.buffers.first_rows);
        self.cpu.for_rows(self.num_rows, width, |row_idx| {
            // SAFETY: every row is its own.
            let row = unsafe { std::slice::from_raw_parts_mut(qkv.ptr().add(row_idx * width), width) };
            let (queries, key_values) = row.split_at_mut(query);
            let (keys, values) = key_values.split_at_mut(kv);
            for (heads, norm) in [(queries, &layer.query_norm), (&mut *keys, &layer.key_norm)] {
                for head in heads.chunks_exact_mut(spec.head_dim) {
                    if let Some(norm) = norm {
                        rms_norm_in_place(isa, head, norm, spec.norm_eps);
                    }
                    ropes.rotate(rope_idx, row_idx, head);
                }
            }
            // Sequences are in the order of their rows.
            let at = first_rows.partition_point(|&first_row| first_row <= row_idx) - 1;
            if writes_kv {
                let (blocks, position) = (sequences[at].blocks, positions[row_idx]);
                // SAFETY: positions differ between rows of a sequence, sequences do not share the blocks they write, and
                // a head has one rank that writes it; nobody else uses them by the caller's word.
                unsafe { store_rows(storage, layer_idx, blocks, position, first_head, keys, values) };
            }
        });
    }

    /// # Safety
    /// Nobody writes this layer of the batch's blocks meanwhile.
    unsafe fn attend(&mut self, layer_idx: usize, storage: &BlockStorage) {
        let spec = self.spec;
        let shape = AttentionShape {
            num_heads: spec.num_heads,
            num_kv_heads: spec.num_kv_heads,
            first_kv_head: self.shard.kv_heads().start,
            head_dim: spec.head_dim,
            scale: spec.attention_scale,
            soft_cap: spec.attention_soft_cap,
            window: spec.layers[layer_idx].window,
            bf16_pairs: self.bf16_pairs,
        };
        let width = spec.query_width() + 2 * spec.kv_width();
        let attended = self.buffers.attended.grown(self.num_rows * spec.query_width());
        let queries = &self.buffers.qkv[..self.num_rows * width];
        // SAFETY: passed on to the caller.
        unsafe {
            let (sequences, rows) = (self.sequences, &self.buffers.first_rows);
            attend(self.cpu, &shape, storage, layer_idx, sequences, rows, queries, width, attended);
        };
    }

    /// How a rank's part of a sum enters the residual stream: the first adds it to what all have, the others replace what
    /// they have, and the sum over ranks is the new stream.
    fn to_stream(&self) -> Output {
        if self.shard.rank().is_first() { Output::Add } else { Output::Store }
    }

    /// The output projection, added to the residual stream.
    fn finish_attention(&mut self, layer: &LayerWeights<PackedMatrix>) -> Result<(), CommunicatorError> {
        let to_stream = self.to_stream();
        let rows = self.num_rows;
        let x = &mut self.buffers.x[..rows * self.spec.hidden_size];
        let attended = &self.buffers.attended;
        match &layer.attention_post_norm {
            None => {
                apply(self.cpu, rows, attended, &layer.output, x, to_stream);
                sum_over(&mut self.ranks, x)?;
            }
            Some(norm) => {
                let hidden = self.buffers.hidden.grown(x.len());
                apply(self.cpu, rows, attended, &layer.output, hidden, Output::Store);
                sum_over(&mut self.ranks, hidden)?;
                add_normalised(self.cpu, self.spec, hidden, norm, x);
            }
        }
        Ok(())
    }

    fn mlp(&mut self, mlp: &MlpSpec, layer: &LayerWeights<PackedMatrix>) -> Result<(), CommunicatorError> {
        let (spec, to_stream) = (self.spec, self.to_stream());
        let rows = self.num_rows;
        let buffers = &mut *self.buffers;
        let x = &mut buffers.x[..rows * spec.hidden_size];
        let hidden = buffers.hidden.grown(x.len());
        normalise(self.cpu, spec, x, &layer.mlp_norm, hidden);
        match (&layer.mlp, &layer.mlp_post_norm) {
            (Mlp::Dense(dense), None) => {
                dense_mlp(self.cpu, spec.activation, rows, hidden, dense, &mut buffers.gated, x, to_stream);
                sum_over(&mut self.ranks, x)
            }
            (Mlp::Dense(dense), Some(norm)) => {
                // The products no longer need their input when the last one is written.
                let gated = gate_and_up(self.cpu, spec.activation, rows, hidden, dense, &mut buffers.gated);
                apply(self.cpu, rows, gated, &dense.down, hidden, Output::Store);
                sum_over(&mut self.ranks, hidden)?;
                add_normalised(self.cpu, spec, hidden, norm, x);
                Ok(())
            }
            (Mlp::Experts { router, experts }, _) => {
                let MlpSpec::Experts { num_active, renormalise, .. } = *mlp else {
                    unreachable!("weights were taken by this spec")
                };
                let routing =
                    super::experts::Routing { num_active, renormalise, activation: spec.activation };
                let memory = (&mut buffers.experts, &mut buffers.gated);
                super::experts::run(self.cpu, &routing, rows, hidden, router, experts, memory, x, to_stream);
                sum_over(&mut self.ranks, x)
            }
        }
    }

    /// The rows whose logits are wanted, normed; how many there are.
    fn normalise_wanted(&mut self, norm: &[f32]) -> usize {
        let size = self.spec.hidden_size;
        let num_wanted = self.sequences.iter().map(|sequence| sequence.num_logits).sum();
        let hidden = self.buffers.hidden.grown(num_wanted * size);
        let rows = self.sequences.iter().zip(&self.buffers.first_rows).flat_map(|(sequence, first_row)| {
            let end = first_row + sequence.tokens.len();
            end - sequence.num_logits..end
        });
        for (row, out) in rows.zip(hidden.chunks_exact_mut(size)) {
            let x = &self.buffers.x[row * size..(row + 1) * size];
            rms_norm(self.cpu.isa, x, norm, self.spec.norm_eps, out);
        }
        num_wanted
    }

    /// Fills in the logits; how many numbers they are.
    fn logits(&mut self, head: PanelsRef<'_>, num_wanted: usize) -> Result<usize, CommunicatorError> {
        let num_own = self.shard.vocabulary().len();
        // As many numbers for each rank: what the last ones lack is left as it is.
        let Rank { num_ranks, .. } = self.shard.rank();
        let part = num_wanted * self.spec.vocab_size.div_ceil(num_ranks);
        let part = self.buffers.logits.grown(part);
        let logits = &mut part[..num_wanted * num_own];
        multiply(self.cpu, num_wanted, &self.buffers.hidden, head, None, logits, Output::Store);
        if let Some(cap) = self.spec.logit_soft_cap {
            soft_cap(self.cpu.isa, logits, cap);
        }
        match &mut self.ranks {
            None => Ok(logits.len()),
            Some(ranks) if !self.shard.rank().is_first() => ranks.gather(part, None).map(|()| 0),
            Some(ranks) => {
                let gathered = self.buffers.gathered.grown(num_ranks * part.len());
                ranks.gather(part, Some(gathered))?;
                Ok(self.interleave(num_wanted, num_ranks))
            }
        }
    }

    /// Makes `[wanted][vocab]` of the ranks' parts.
    fn interleave(&mut self, num_wanted: usize, num_ranks: usize) -> usize {
        let size = self.spec.vocab_size;
        let len_of_part = num_wanted * size.div_ceil(num_ranks);
        let logits = self.buffers.logits.grown(num_wanted * size);
        for rank in Rank::all(num_ranks) {
            let tokens = rank.part_of(size);
            let part = &self.buffers.gathered[rank.idx * len_of_part..];
            for (row_idx, row) in logits.chunks_exact_mut(size).enumerate() {
                row[tokens.clone()].copy_from_slice(&part[row_idx * tokens.len()..][..tokens.len()]);
            }
        }
        logits.len()
    }
}

/// Sums up what the ranks have of `buffer`, if there are several.
fn sum_over(ranks: &mut Option<&mut Ranks>, buffer: &mut [f32]) -> Result<(), CommunicatorError> {
    ranks.as_mut().map_or(Ok(()), |ranks| ranks.all_reduce_sum(buffer))
}

pub(super) fn apply(
    cpu: &mut Cpu,
    num_rows: usize,
    a: &[f32],
    linear: &Linear<PackedMatrix>,
    out: &mut [f32],
    output: Output,
) {
    multiply(cpu, num_rows, a, linear.weight.as_ref(), linear.bias.as_deref(), out, output);
}

fn normalise(cpu: &mut Cpu, spec: &DecoderSpec, x: &[f32], norm: &[f32], out: &mut [f32]) {
    let size = spec.hidden_size;
    let isa = cpu.isa;
    let num_rows = out.len() / size;
    let out = SharedMut::new(out);
    cpu.for_rows(num_rows, size, |row| {
        // SAFETY: every row is its own.
        let out = unsafe { std::slice::from_raw_parts_mut(out.ptr().add(row * size), size) };
        rms_norm(isa, &x[row * size..(row + 1) * size], norm, spec.norm_eps, out);
    });
}

/// `x += norm(y)`, `y` is used up.
fn add_normalised(cpu: &mut Cpu, spec: &DecoderSpec, y: &mut [f32], norm: &[f32], x: &mut [f32]) {
    let size = spec.hidden_size;
    for (x, y) in x.chunks_exact_mut(size).zip(y.chunks_exact_mut(size)) {
        rms_norm_in_place(cpu.isa, y, norm, spec.norm_eps);
        for (x, y) in x.iter_mut().zip(y) {
            *x += *y;
        }
    }
}

/// `activation(gate(a)) * up(a)`
fn gate_and_up<'m>(
    cpu: &mut Cpu,
    activation: Activation,
    num_rows: usize,
    a: &[f32],
    mlp: &DenseMlp<PackedMatrix>,
    memory: &'m mut Aligned,
) -> &'m [f32] {
    let gate = match activation {
        Activation::Silu => Gate::Silu,
        Activation::Gelu => Gate::GeluErf,
        Activation::GeluTanh => Gate::GeluTanh,
    };
    let gated = memory.grown(num_rows * mlp.down.weight.cols);
    apply(cpu, num_rows, a, &mlp.gate_up, gated, Output::Gated(gate));
    gated
}

#[allow(clippy::too_many_arguments)]
pub(super) fn dense_mlp(
    cpu: &mut Cpu,
    activation: Activation,
    num_rows: usize,
    a: &[f32],
    mlp: &DenseMlp<PackedMatrix>,
    memory: &mut Aligned,
    out: &mut [f32],
    output: Output,
) {
    let gated = gate_and_up(cpu, activation, num_rows, a, mlp, memory);
    apply(cpu, num_rows, gated, &mlp.down, out, output);
}
