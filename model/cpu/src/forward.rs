//! The decoder's forward pass over a batch: its operations, their order, and their memory.
//!
//! The rows of all sequences form one matrix of activations. Only attention knows where a sequence ends. Memory grows
//! to the largest batch so far; after that no step allocates.

use baton_checkpoint::{DecoderWeights, LayerWeights, Mlp};
use baton_cpu_attention::{AttentionShape, attend, store_rows};
use baton_cpu_kernels::{
    Cpu, Output, PanelsRef, add_scaled, multiply, rms_norm, rms_norm_in_place, soft_cap,
};
use baton_cpu_threads::{Aligned, SharedMut};
use baton_kv_cache::BlockStorage;
use baton_model_spec::{
    BatchSequence, Communicator, CommunicatorError, DecoderShard, DecoderSpec, MlpSpec, Rank,
};

use crate::experts::{self, ExpertBuffers, Routing};
use crate::linear::{apply, dense_mlp, gate_and_up};
use crate::model::CpuModel;
use crate::packed::PackedMatrix;
use crate::rope::RopeTables;

/// A rank's connection to the other ranks of the model.
pub(crate) type Ranks = dyn Communicator;

/// Activation buffers; each is `[rows][...]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// The hidden state (residual stream), `[hidden]`.
    pub(crate) x: Aligned,
    /// Output of a norm or a projection, `[hidden]`.
    pub(crate) hidden: Aligned,
    /// Queries, keys and values of a row, one after the other.
    pub(crate) qkv: Aligned,
    /// Output of attention, `[heads * head_dim]`.
    pub(crate) attended: Aligned,
    /// Inner activations of a dense MLP or of one expert.
    pub(crate) gated: Aligned,
    pub(crate) experts: ExpertBuffers,
    /// `[requested][vocab]`; with several ranks `[requested][tokens of this rank]` until the first rank collects
    /// them.
    pub(crate) logits: Aligned,
    /// `[ranks][requested][tokens of each]`
    pub(crate) gathered: Aligned,
    /// The position of each row.
    pub(crate) positions: Vec<usize>,
    /// The first row of each sequence.
    pub(crate) first_rows: Vec<usize>,
}

impl Buffers {
    /// Gives each token of the batch a row. Returns the number of rows.
    fn place(&mut self, sequences: &[BatchSequence<'_>]) -> usize {
        self.positions.clear();
        self.first_rows.clear();
        for sequence in sequences {
            assert!(!sequence.tokens.is_empty(), "a sequence without tokens");
            assert!(sequence.num_logits <= sequence.tokens.len(), "more logits than tokens");
            self.first_rows.push(self.positions.len());
            self.positions.extend(sequence.start_idx..sequence.start_idx + sequence.tokens.len());
        }
        self.positions.len()
    }
}

/// The index of a row's sequence. Sequences are ordered by their first row.
fn sequence_of(first_rows: &[usize], row_idx: usize) -> usize {
    first_rows.partition_point(|&first_row| first_row <= row_idx) - 1
}

/// The rows whose logits are requested, in ascending order.
fn wanted_rows(sequences: &[BatchSequence<'_>], first_rows: &[usize]) -> impl Iterator<Item = usize> {
    sequences.iter().zip(first_rows).flat_map(|(sequence, first_row)| {
        let end = first_row + sequence.tokens.len();
        end - sequence.num_logits..end
    })
}

/// The state of one call of `execute`.
pub(crate) struct ForwardPass<'a> {
    pub(crate) shard: &'a DecoderShard,
    /// The decoder of this rank's shard.
    pub(crate) spec: &'a DecoderSpec,
    pub(crate) bf16_pairs: bool,
    pub(crate) cpu: &'a mut Cpu,
    pub(crate) buffers: &'a mut Buffers,
    pub(crate) sequences: &'a [BatchSequence<'a>],
    pub(crate) num_rows: usize,
    /// `None` if one rank computes the whole model.
    pub(crate) ranks: Option<&'a mut Ranks>,
}

impl<'a> ForwardPass<'a> {
    /// A pass over the tokens of `sequences`.
    pub(crate) fn new(
        model: &'a CpuModel,
        cpu: &'a mut Cpu,
        buffers: &'a mut Buffers,
        sequences: &'a [BatchSequence<'a>],
        ranks: Option<&'a mut Ranks>,
    ) -> ForwardPass<'a> {
        let shard = model.decoder().shard();
        let num_rows = buffers.place(sequences);
        let (spec, bf16_pairs) = (shard.spec(), model.bf16_pairs());
        ForwardPass { shard, spec, bf16_pairs, cpu, buffers, sequences, num_rows, ranks }
    }

    /// Goes on with the hidden states and projections of `rows` alone, in ascending order. They are the tokens of
    /// `sequences`.
    pub(crate) fn narrow(&mut self, rows: &[usize], sequences: &'a [BatchSequence<'a>]) {
        let hidden = self.spec.hidden_size;
        let width = self.spec.query_width() + 2 * self.spec.kv_width();
        for (to, &from) in rows.iter().enumerate() {
            self.buffers.x.copy_within(from * hidden..(from + 1) * hidden, to * hidden);
            self.buffers.qkv.copy_within(from * width..(from + 1) * width, to * width);
        }
        self.sequences = sequences;
        self.num_rows = self.buffers.place(sequences);
        debug_assert_eq!(self.num_rows, rows.len());
    }

    /// Goes on with the rows whose logits are requested alone. They are the tokens of `wanted`.
    pub(crate) fn narrow_to_wanted(&mut self, wanted: &'a [BatchSequence<'a>]) {
        let rows: Vec<usize> = wanted_rows(self.sequences, &self.buffers.first_rows).collect();
        self.narrow(&rows, wanted);
    }

    /// Stores the embeddings of the tokens in the residual stream.
    pub(crate) fn embed(&mut self, weights: &DecoderWeights<PackedMatrix>) -> Result<(), CommunicatorError> {
        let own = self.shard.vocabulary();
        let (hidden, scale) = (self.spec.hidden_size, self.spec.embedding_scale);
        let (sequences, first_rows) = (self.sequences, &self.buffers.first_rows);
        // Here, because the message of a panic on another thread is lost.
        for &token in sequences.iter().flat_map(|sequence| sequence.tokens) {
            assert!((token as usize) < self.spec.vocab_size, "token {token} outside the vocabulary");
        }
        let x = self.buffers.x.grown(self.num_rows * hidden);
        let to = SharedMut::new(x);
        self.cpu.for_rows(self.num_rows, hidden, |row_idx| {
            let at = sequence_of(first_rows, row_idx);
            let token = sequences[at].tokens[row_idx - first_rows[at]] as usize;
            // SAFETY: each work item has its own row.
            let row = unsafe { to.row(row_idx, hidden) };
            match &weights.embedding {
                Some(embedding) => {
                    embedding.read_row(token, row);
                    row.iter_mut().for_each(|x| *x *= scale);
                }
                None if own.contains(&token) => {
                    weights.head.as_ref().read_row(token - own.start, scale, row);
                }
                // Exactly one rank holds the token's row; the others add zeros.
                None => row.fill(0.0),
            }
        });
        match (&mut self.ranks, &weights.embedding) {
            (Some(ranks), None) => ranks.all_reduce_sum(x),
            _ => Ok(()),
        }
    }

    /// Computes queries, keys and values of every row.
    pub(crate) fn project(&mut self, layer: &LayerWeights<PackedMatrix>) {
        let spec = self.spec;
        let rows = self.num_rows;
        let hidden = self.buffers.hidden.grown(rows * spec.hidden_size);
        normalise(self.cpu, spec, &self.buffers.x, &layer.attention_norm, hidden);
        let width = spec.query_width() + 2 * spec.kv_width();
        let qkv = self.buffers.qkv.grown(rows * width);
        apply(self.cpu, rows, hidden, &layer.qkv, qkv, Output::Store);
    }

    /// Normalises and rotates heads in place and writes keys and values to their blocks. Calls `observe` with each row,
    /// its keys before they are rotated, and its values.
    ///
    /// # Safety
    /// No other code reads or writes this layer's slots of these rows.
    pub(crate) unsafe fn store(
        &mut self,
        layer_idx: usize,
        layer: &LayerWeights<PackedMatrix>,
        ropes: &RopeTables,
        storage: &BlockStorage,
        observe: impl Fn(usize, &[f32], &[f32]) + Sync,
    ) {
        let spec = self.spec;
        let (query, kv) = (spec.query_width(), spec.kv_width());
        let width = query + 2 * kv;
        let cpu = &*self.cpu;
        let qkv = SharedMut::new(&mut self.buffers.qkv[..self.num_rows * width]);
        let rope_idx = spec.layers[layer_idx].rope_idx;
        let positions = &self.buffers.positions;
        let (writes_kv, first_head) = (self.shard.writes_kv(), self.shard.kv_heads().start);
        let (sequences, first_rows) = (self.sequences, &self.buffers.first_rows);
        cpu.for_rows(self.num_rows, width, |row_idx| {
            // SAFETY: each work item has its own row.
            let row = unsafe { qkv.row(row_idx, width) };
            let (queries, key_values) = row.split_at_mut(query);
            let (keys, values) = key_values.split_at_mut(kv);
            for (heads, norm) in [(&mut *queries, &layer.query_norm), (&mut *keys, &layer.key_norm)] {
                let Some(norm) = norm else { continue };
                for head in heads.chunks_exact_mut(spec.head_dim) {
                    rms_norm_in_place(cpu, head, norm, spec.norm_eps);
                }
            }
            observe(row_idx, keys, values);
            for heads in [&mut *queries, &mut *keys] {
                ropes.rotate(cpu, rope_idx, row_idx, heads, spec.head_dim);
            }
            if writes_kv {
                let blocks = sequences[sequence_of(first_rows, row_idx)].blocks;
                let position = positions[row_idx];
                // SAFETY: rows of a sequence have distinct positions, sequences do not share the blocks that they
                // write, and one rank writes each head. The caller guarantees that no other code accesses them.
                unsafe { store_rows(storage, layer_idx, blocks, position, first_head, keys, values) };
            }
        });
    }

    /// Computes what follows a layer's KV: attention and the MLP.
    ///
    /// # Safety
    /// No other code writes this layer of the batch's blocks during the call.
    pub(crate) unsafe fn finish_layer(
        &mut self,
        layer_idx: usize,
        layer: &LayerWeights<PackedMatrix>,
        storage: &BlockStorage,
    ) -> Result<(), CommunicatorError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.attend(layer_idx, storage) };
        self.finish_attention(layer)?;
        self.mlp(&self.spec.layers[layer_idx].mlp, layer)
    }

    /// # Safety
    /// No other code writes this layer of the batch's blocks during the call.
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
        // SAFETY: guaranteed by the caller. The model was loaded with pairs only if the CPU has them.
        unsafe {
            let (sequences, rows) = (self.sequences, &self.buffers.first_rows);
            attend(self.cpu, &shape, storage, layer_idx, sequences, rows, queries, width, attended);
        };
    }

    /// How a rank's partial sum enters the residual stream. The first rank adds it to the stream, the others replace
    /// the stream by it; the sum over ranks is the new stream.
    fn to_stream(&self) -> Output {
        if self.shard.rank().is_first() { Output::Add } else { Output::Store }
    }

    /// Applies the output projection and adds it to the residual stream.
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
                // The products have read their input when the last output is written.
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
                let routing = Routing { num_active, renormalise, activation: spec.activation };
                let memory = (&mut buffers.experts, &mut buffers.gated);
                experts::run(self.cpu, &routing, rows, hidden, router, experts, memory, x, to_stream);
                sum_over(&mut self.ranks, x)
            }
        }
    }

    /// Gathers and normalises the rows whose logits are requested. Returns their number.
    pub(crate) fn normalise_wanted(&mut self, norm: &[f32]) -> usize {
        let size = self.spec.hidden_size;
        let num_wanted = self.sequences.iter().map(|sequence| sequence.num_logits).sum();
        let hidden = self.buffers.hidden.grown(num_wanted * size);
        let rows = wanted_rows(self.sequences, &self.buffers.first_rows);
        for (row, out) in rows.zip(hidden.chunks_exact_mut(size)) {
            let x = &self.buffers.x[row * size..(row + 1) * size];
            rms_norm(self.cpu, x, norm, self.spec.norm_eps, out);
        }
        num_wanted
    }

    /// Computes the logits. Returns how many numbers they are.
    pub(crate) fn logits(
        &mut self,
        head: PanelsRef<'_>,
        num_wanted: usize,
    ) -> Result<usize, CommunicatorError> {
        let num_own = self.shard.vocabulary().len();
        // Every rank has the same number of columns; the surplus columns of the last ranks stay unset.
        let Rank { num_ranks, .. } = self.shard.rank();
        let part = num_wanted * self.spec.vocab_size.div_ceil(num_ranks);
        let part = self.buffers.logits.grown(part);
        let logits = &mut part[..num_wanted * num_own];
        multiply(self.cpu, num_wanted, &self.buffers.hidden, head, None, logits, Output::Store);
        if let Some(cap) = self.spec.logit_soft_cap {
            soft_cap(self.cpu, logits, cap);
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

    /// Merges the ranks' parts into `[requested][vocab]`.
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

/// Sums `buffer` over the ranks, if there are several.
fn sum_over(ranks: &mut Option<&mut Ranks>, buffer: &mut [f32]) -> Result<(), CommunicatorError> {
    ranks.as_mut().map_or(Ok(()), |ranks| ranks.all_reduce_sum(buffer))
}

fn normalise(cpu: &Cpu, spec: &DecoderSpec, x: &[f32], norm: &[f32], out: &mut [f32]) {
    let size = spec.hidden_size;
    let num_rows = out.len() / size;
    let out = SharedMut::new(out);
    cpu.for_rows(num_rows, size, |row| {
        // SAFETY: each work item has its own row.
        let out = unsafe { out.row(row, size) };
        rms_norm(cpu, &x[row * size..(row + 1) * size], norm, spec.norm_eps, out);
    });
}

/// `x += norm(y)`; overwrites `y`.
fn add_normalised(cpu: &Cpu, spec: &DecoderSpec, y: &mut [f32], norm: &[f32], x: &mut [f32]) {
    let size = spec.hidden_size;
    let num_rows = x.len() / size;
    let (x, y) = (SharedMut::new(x), SharedMut::new(y));
    cpu.for_rows(num_rows, 2 * size, |row| {
        // SAFETY: each work item has its own row of both.
        let (x, y) = unsafe { (x.row(row, size), y.row(row, size)) };
        rms_norm_in_place(cpu, y, norm, spec.norm_eps);
        add_scaled(cpu, x, y, 1.0);
    });
}
