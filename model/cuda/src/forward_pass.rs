//! The decoder's forward pass on a device: its kernels and products, their order, and their memory. It computes what
//! the forward pass on processors computes, with activations in bf16.

use std::ops::Range;

use baton_cuda::CudaError;
use baton_cuda_kernels::attention::{
    AttentionArgs, AttentionRows, DecodeAttention, MIN_SPLIT, PlainAttention, PrefillAttention,
    WgmmaAttention, has_tensor_cores, max_splits, takes_wgmma,
};
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::embed::Embed;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::norm::{AddNorm, AddNormQuantise};
use baton_cuda_kernels::products::{Dequantise, WeightKind};
use baton_cuda_kernels::ranks::{JoinLogits, logit_stride};
use baton_cuda_kernels::rope::{PlaceRows, RopeTable, StoreQkv, lanes};
use baton_cuda_kernels::rows::{NormWanted, PostNorm, SoftCap};
use baton_kv_cache::KvLayout;
use baton_model_spec::{DecoderSpec, Rank};

use crate::buffers::Buffers;
use crate::inputs::{InputAddresses, Inputs};
use crate::multiply::{ProductScratch, QuantisedRows, Rows, dequantise_rows};
use crate::weights::{DeviceLinear, DeviceMlp, DeviceWeights};

/// One step. The executor has allocated all addresses for the largest batch.
#[derive(Clone)]
pub struct ForwardPass<'a> {
    /// The decoder, or this rank's part of it, and the layout of its blocks.
    pub spec: &'a DecoderSpec,
    pub layout: &'a KvLayout,
    pub rank: Rank,
    /// The tokens of this rank's part of the embedding. `None`: this rank has the whole embedding.
    pub embedded: Option<Range<usize>>,
    pub weights: &'a DeviceWeights,
    pub buffers: &'a Buffers,
    pub scratch: &'a ProductScratch,
    pub inputs: &'a Inputs,
    /// `[rows][hidden]`: the residual stream.
    pub x: Address,
    /// The addresses of the inputs.
    pub at: InputAddresses,
    /// The address of the first block.
    pub pool: Address,
}

/// Rows, their slots in the pool, and their rotations.
pub struct PlacedRows<'a> {
    /// `[rows]`, u32.
    pub positions: Address,
    /// `[rows]`, u32, output.
    pub slots: Address,
    /// For each rope, `[rows][2][rotary_dim / 2]`, f32, output.
    pub cos_sin: &'a [Address],
}

impl ForwardPass<'_> {
    /// Queues everything before the first layer.
    pub fn begin<D: KernelDevice>(&self, device: &mut D) -> Result<(), CudaError> {
        let table = self.weights.embedding;
        let held = self.embedded.clone().unwrap_or(0..self.spec.vocab_size);
        let embed = Embed {
            table: table.at,
            tokens: self.at.tokens,
            x: self.x,
            hidden: self.spec.hidden_size as u32,
            first_token: held.start as u32,
            num_held: held.len() as u32,
            scale: self.spec.embedding_scale,
            num_rows: self.inputs.num_rows as u64,
        };
        // SAFETY: as `ForwardPass` says.
        unsafe {
            match table.kind {
                WeightKind::Bf16 => device.launch(&embed)?,
                _ => device.launch(&Dequantise {
                    first_row: embed.first_token,
                    ..dequantise_rows(table, embed.tokens, embed.x, self.inputs.num_rows, embed.scale)
                })?,
            }
            if self.embedded.is_some() {
                // Exactly one rank holds the token's row. The others have zeros.
                device.begin_sum(embed.x, self.inputs.num_rows * self.spec.hidden_size)?;
                device.end_sums()?;
            }
        }
        self.place(device)?;
        let first = &self.weights.layers[0];
        self.add_norm(device, Address::NULL, first.attention_norm, Some(&first.qkv))
    }

    /// Queues the look-up of the rows' slots and rotations.
    pub fn place<D: KernelDevice>(&self, device: &mut D) -> Result<(), CudaError> {
        let buffers = self.buffers;
        let rows =
            PlacedRows { positions: self.at.positions, slots: buffers.slots, cos_sin: &buffers.cos_sin };
        self.place_rows(device, &rows, self.at.row_slots, self.inputs.num_rows)
    }

    /// The same for `num_rows` other rows; `sequence_of` has the slot of each row's sequence.
    pub fn place_rows<D: KernelDevice>(
        &self,
        device: &mut D,
        rows: &PlacedRows<'_>,
        sequence_of: Address,
        num_rows: usize,
    ) -> Result<(), CudaError> {
        let place = PlaceRows {
            positions: rows.positions,
            sequence_of,
            block_tables: self.buffers.block_tables,
            slots: rows.slots,
            max_blocks: self.buffers.max_blocks as u32,
            block_size: self.layout.block_size as u32,
            num_rows: num_rows as u64,
        };
        // SAFETY: as `ForwardPass` says.
        unsafe {
            device.launch(&place)?;
            for (rope, &cos_sin) in self.weights.ropes.iter().zip(rows.cos_sin) {
                device.launch(&RopeTable {
                    positions: rows.positions,
                    inverse_frequencies: rope.inverse_frequencies,
                    cos_sin,
                    factor: rope.factor,
                    num_rows: num_rows as u32,
                    rotary_dim: rope.rotary_dim as u64,
                })?;
            }
        }
        Ok(())
    }

    /// Queues the queries, keys and values of a layer, and the stores of keys and values in their blocks.
    pub fn store<D: KernelDevice>(&self, device: &mut D, layer_idx: usize) -> Result<(), CudaError> {
        let layer = &self.weights.layers[layer_idx];
        let before = layer_idx.checked_sub(1).map(|before| self.weights.layers[before].mlp_post_norm);
        self.apply_normed(device, &layer.qkv, before.unwrap_or(Address::NULL), self.buffers.qkv)?;
        // SAFETY: as `ForwardPass` says. The caller of the executor guarantees that no other row has these slots.
        unsafe { device.launch(&self.store_rows(layer_idx)) }
    }

    /// Stores the keys and values of the rows in their blocks.
    pub fn store_rows(&self, layer_idx: usize) -> StoreQkv {
        let layer = &self.weights.layers[layer_idx];
        let rope_idx = self.spec.layers[layer_idx].rope_idx;
        StoreQkv {
            qkv: self.buffers.qkv,
            slots: self.buffers.slots,
            cos_sin: self.buffers.cos_sin[rope_idx],
            query_norm: layer.query_norm,
            key_norm: layer.key_norm,
            bias: layer.qkv_bias,
            layer: self.pool.offset_by(self.layout.layer_offset(layer_idx)),
            block_bytes: self.layout.block_bytes() as u64,
            num_rows: self.inputs.num_rows as u32,
            num_heads: self.spec.num_heads as u32,
            num_kv_heads: self.spec.num_kv_heads as u32,
            block_size: self.layout.block_size as u32,
            eps: self.spec.norm_eps,
            lanes: lanes(self.spec.head_dim, self.weights.ropes[rope_idx].rotary_dim),
        }
    }

    /// Queues the rest of the layer and the norm of the next layer.
    pub fn finish<D: KernelDevice>(&self, device: &mut D, layer_idx: usize) -> Result<(), CudaError> {
        let layer = &self.weights.layers[layer_idx];
        let buffers = self.buffers;
        self.attend(device, layer_idx)?;
        self.apply_to_sum(device, &layer.output, Rows { at: buffers.attended, are_quantised: false })?;
        let next = match &layer.mlp {
            DeviceMlp::Dense { gate_up, .. } => Some(gate_up),
            DeviceMlp::Experts { .. } => None,
        };
        self.add(device, layer.attention_post_norm, layer.mlp_norm, next)?;
        self.mlp(device, &self.spec.layers[layer_idx].mlp, layer)?;
        match self.weights.layers.get(layer_idx + 1) {
            Some(next) => self.add(device, layer.mlp_post_norm, next.attention_norm, Some(&next.qkv)),
            // The norm of the wanted rows adds the last output.
            None if layer.mlp_post_norm == Address::NULL => Ok(()),
            None => self.add(device, layer.mlp_post_norm, Address::NULL, None),
        }
    }

    /// Norms the wanted rows into `hidden`.
    pub fn norm_wanted<D: KernelDevice>(&self, device: &mut D) -> Result<(), CudaError> {
        let last = self.weights.layers.last().expect("a model has layers");
        let is_added = last.mlp_post_norm != Address::NULL;
        let kernel = NormWanted {
            x: self.x,
            added: if is_added { Address::NULL } else { self.buffers.added },
            weight: self.weights.norm,
            indices: self.at.wanted,
            out: self.buffers.hidden,
            hidden: self.spec.hidden_size as u32,
            eps: self.spec.norm_eps,
            num_rows: self.inputs.num_wanted as u64,
        };
        // SAFETY: as `ForwardPass` says.
        unsafe { device.launch(&kernel) }
    }

    /// Computes logits of `num_rows` wanted rows from `first` on. The first of several ranks gets them.
    pub fn logits<D: KernelDevice>(
        &self,
        device: &mut D,
        first: usize,
        num_rows: usize,
    ) -> Result<(), CudaError> {
        let (head, rank, vocab_size) = (self.weights.head, self.rank, self.spec.vocab_size);
        let left = self.buffers.hidden.offset_by(first * head.num_in * 2);
        let (x, stride) = match rank.num_ranks {
            1 => (self.buffers.logits, vocab_size),
            num_ranks => (self.buffers.logit_parts, logit_stride(vocab_size, num_ranks)),
        };
        let len = num_rows * stride;
        // SAFETY: as `ForwardPass` says.
        unsafe {
            // The last of many ranks may have no tokens.
            if head.num_out > 0 {
                self.scratch.multiply_exactly(device, head, left, x, num_rows)?;
            }
            if let Some(cap) = self.spec.logit_soft_cap {
                device.launch(&SoftCap { x, len: len as u64, cap, unused: 0 })?;
            }
            if rank.num_ranks == 1 {
                return Ok(());
            }
            device.gather(x, len)?;
            if !rank.is_first() {
                return Ok(());
            }
            device.launch(&JoinLogits {
                parts: x,
                out: self.buffers.logits,
                part: vocab_size.div_ceil(rank.num_ranks) as u32,
                stride: stride as u32,
                vocab: vocab_size as u32,
                num_rows: num_rows as u32,
            })
        }
    }

    fn attend<D: KernelDevice>(&self, device: &mut D, layer_idx: usize) -> Result<(), CudaError> {
        let inputs = self.inputs;
        let (num_decoded, num_sequences) = (inputs.num_decoded, inputs.num_sequences);
        let [max_decode_rows, max_prefill_rows] = inputs.max_rows.map(|num_rows| num_rows as u32);
        // SAFETY: as `ForwardPass` says.
        unsafe {
            if !has_tensor_cores(self.layout) {
                let attention = self.attention(layer_idx, 0, num_sequences);
                let max_rows = u64::from(max_decode_rows.max(max_prefill_rows));
                return device.launch(&PlainAttention { attention, max_rows });
            }
            if num_decoded > 0 {
                let decode = DecodeAttention {
                    attention: self.attention(layer_idx, 0, num_decoded),
                    scratch: self.buffers.splits,
                    max_splits: max_splits(self.layout.num_kv_heads),
                    min_split: MIN_SPLIT,
                    max_rows: max_decode_rows,
                    unused: 0,
                };
                device.launch(&decode)?;
            }
            if num_sequences > num_decoded {
                let attention = self.attention(layer_idx, num_decoded, num_sequences - num_decoded);
                let (tiles, num_tiles) = (self.at.tiles, inputs.num_tiles as u64);
                let prefill = PrefillAttention { attention, tiles, num_tiles };
                match device.wgmma().attention && takes_wgmma(self.layout) {
                    true => device.launch(&WgmmaAttention(prefill))?,
                    false => device.launch(&prefill)?,
                }
            }
        }
        Ok(())
    }

    /// Arguments for `num_sequences` slots from `first` on.
    fn attention(&self, layer_idx: usize, first: usize, num_sequences: usize) -> AttentionArgs {
        let spec = self.spec;
        let rows = AttentionRows {
            q: self.buffers.qkv,
            out: self.buffers.attended,
            block_tables: self.buffers.block_tables.offset_by(first * self.buffers.max_blocks * 4),
            first_row: self.at.first_row.offset_by(first * 4),
            num_rows: self.at.num_rows.offset_by(first * 4),
            start_idx: self.at.start_idx.offset_by(first * 4),
            positions: self.at.positions,
            max_blocks: self.buffers.max_blocks as u32,
            num_sequences: num_sequences as u32,
        };
        let group = spec.num_heads / spec.num_kv_heads;
        let window = spec.layers[layer_idx].window.and_then(|window| u32::try_from(window).ok());
        let (layout, scale) = (self.layout, spec.attention_scale);
        let mut attention = AttentionArgs::new(layout, self.pool, layer_idx, group, scale, &rows);
        attention.window = window.unwrap_or(u32::MAX);
        attention.soft_cap = spec.attention_soft_cap.unwrap_or(0.0);
        attention
    }

    /// Adds the output of a part of a layer to the residual stream, and norms the stream for the next part, which
    /// begins with the product `next`.
    fn add<D: KernelDevice>(
        &self,
        device: &mut D,
        post_weight: Address,
        weight: Address,
        next: Option<&DeviceLinear>,
    ) -> Result<(), CudaError> {
        let buffers = self.buffers;
        if post_weight == Address::NULL {
            return self.add_norm(device, buffers.added, weight, next);
        }
        let kernel = PostNorm {
            x: self.x,
            added: buffers.added,
            post_weight,
            weight,
            out: if weight == Address::NULL { Address::NULL } else { buffers.hidden },
            hidden: self.spec.hidden_size as u32,
            eps: self.spec.norm_eps,
            num_rows: self.inputs.num_rows as u64,
        };
        // SAFETY: as `ForwardPass` says.
        unsafe { device.launch(&kernel) }
    }

    /// Also quantises the normed rows if the product `next` multiplies them in E4M3.
    pub fn add_norm<D: KernelDevice>(
        &self,
        device: &mut D,
        added: Address,
        weight: Address,
        next: Option<&DeviceLinear>,
    ) -> Result<(), CudaError> {
        let norm = AddNorm {
            x: self.x,
            added,
            weight,
            out: self.buffers.hidden,
            hidden: self.spec.hidden_size as u32,
            eps: self.spec.norm_eps,
            num_rows: self.inputs.num_rows as u64,
        };
        // SAFETY: as `ForwardPass` says.
        unsafe {
            match next.and_then(|next| self.scratch.quantised_rows(next.weight, self.inputs.num_rows)) {
                None => device.launch(&norm),
                Some(QuantisedRows { at, scales, stride }) => {
                    device.launch(&AddNormQuantise { norm, quantised: at, scales, stride, unused: 0 })
                }
            }
        }
    }

    /// Whether the products that are summed over ranks are computed in two halves.
    pub(crate) fn is_sum_divided<D: KernelDevice>(&self) -> bool {
        self.rank.num_ranks > 1 && self.inputs.num_rows >= D::ROWS_TO_OVERLAP
    }

    /// The output of a part of a layer: a product of all rows, summed over ranks. With many rows, the sum of the
    /// first half overlaps the product of the second.
    pub(crate) fn apply_to_sum<D: KernelDevice>(
        &self,
        device: &mut D,
        linear: &DeviceLinear,
        Rows { at: from, are_quantised }: Rows,
    ) -> Result<(), CudaError> {
        let (num_rows, hidden) = (self.inputs.num_rows, self.spec.hidden_size);
        let half = if self.is_sum_divided::<D>() { num_rows / 2 } else { num_rows };
        for rows in [0..half, half..num_rows].into_iter().filter(|rows| !rows.is_empty()) {
            let first = rows.start;
            let from = Rows { at: from.offset_by(first * linear.weight.num_in * 2), are_quantised };
            let out = self.buffers.added.offset_by(first * hidden * 2);
            // SAFETY: as `ForwardPass` says.
            unsafe { self.scratch.apply_to(device, linear, from, out, rows.len()) }?;
            self.begin_sum(device, rows)?;
        }
        self.end_sums(device)
    }

    pub(crate) fn end_sums<D: KernelDevice>(&self, device: &mut D) -> Result<(), CudaError> {
        if self.rank.num_ranks == 1 { Ok(()) } else { device.end_sums() }
    }

    /// Queues the sum of some output rows over the ranks, if there are several ranks.
    pub(crate) fn begin_sum<D: KernelDevice>(
        &self,
        device: &mut D,
        rows: Range<usize>,
    ) -> Result<(), CudaError> {
        if self.rank.num_ranks == 1 {
            return Ok(());
        }
        let hidden = self.spec.hidden_size;
        // SAFETY: as `ForwardPass` says.
        unsafe {
            device.begin_sum(self.buffers.added.offset_by(rows.start * hidden * 2), rows.len() * hidden)
        }
    }

    /// A product of all normed rows, plus its bias. `post_weight` is that of the norm.
    pub(crate) fn apply_normed<D: KernelDevice>(
        &self,
        device: &mut D,
        linear: &DeviceLinear,
        post_weight: Address,
        out: Address,
    ) -> Result<(), CudaError> {
        let num_rows = self.inputs.num_rows;
        let are_quantised =
            post_weight == Address::NULL && self.scratch.quantised_rows(linear.weight, num_rows).is_some();
        let rows = Rows { at: self.buffers.hidden, are_quantised };
        // SAFETY: as `ForwardPass` says.
        unsafe { self.scratch.apply_to(device, linear, rows, out, num_rows) }
    }
}
