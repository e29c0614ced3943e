//! Device memory of a forward pass. It is allocated once, for the largest batch, so that repeated launches find the
//! same addresses.

use baton_cuda::CudaError;
use baton_cuda_kernels::attention::{SplitScratch, has_tensor_cores, max_splits};
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::ranks::logit_stride;
use baton_kv_cache::KvLayout;
use baton_model_spec::{DecoderSpec, MlpSpec, Rank};

use crate::block_tables::BlockTables;
use crate::inputs::{BatchLimits, InputShape, Inputs, padded};
use crate::samplings::{SamplingBuffers, SamplingInputs};

/// Numbers are bf16 unless a comment says otherwise. Each layer overwrites the results of the layer before.
#[derive(Debug)]
pub struct Buffers {
    pub inputs: Address,
    /// `[slots][max_blocks]`, u32.
    pub block_tables: Address,
    pub max_blocks: usize,
    /// `[rows][hidden]`: the residual stream.
    pub x: Address,
    /// `[rows][hidden]`: the normed residual stream.
    pub hidden: Address,
    /// `[rows][hidden]`: the output of a part of a layer, which the next norm adds to the stream.
    pub added: Address,
    /// `[rows][query_width + 2 kv_width]`
    pub qkv: Address,
    /// `[rows]`, u32: the slots of their KV in the pool.
    pub slots: Address,
    /// For each rope, `[rows][2][rotary_dim / 2]`, f32.
    pub cos_sin: Vec<Address>,
    /// `[rows][query_width]`
    pub attended: Address,
    /// `[rows][2 intermediate]`
    pub gate_up: Address,
    /// `[rows][intermediate]`
    pub gated: Address,
    /// `[logit_rows][vocab]`, f32.
    pub logits: Address,
    pub logit_rows: usize,
    /// f32: `[ranks][logit_rows][stride]` on the first of several ranks, `[logit_rows][stride]` on the others. Null
    /// for a single rank.
    pub logit_parts: Address,
    /// Scratch of decode attention.
    pub splits: SplitScratch,
    pub samplings: SamplingBuffers,
    pub routed: RoutedBuffers,
}

/// Buffers of rows on their way through experts, for the layer that needs most. A pair is a row and one of its
/// experts. Null for models without experts.
#[derive(Debug)]
pub struct RoutedBuffers {
    /// `[rows][num_experts]`, f32.
    pub logits: Address,
    /// `[pairs]`, u32.
    pub experts: Address,
    /// `[pairs]`, f32.
    pub weights: Address,
    /// `[num_experts + 1]`, u32.
    pub offsets: Address,
    /// `[pairs]`, u32.
    pub rows: Address,
    /// `[pairs]`, u32.
    pub places: Address,
    /// `[pairs][hidden]`
    pub outputs: Address,
}

impl RoutedBuffers {
    fn new<D: KernelDevice>(
        device: &mut D,
        spec: &DecoderSpec,
        rows: usize,
    ) -> Result<RoutedBuffers, CudaError> {
        let routed = spec.layers.iter().filter_map(|layer| match layer.mlp {
            MlpSpec::Dense { .. } => None,
            MlpSpec::Experts { num_experts, num_active, .. } => Some((num_experts, num_active)),
        });
        let most = routed.reduce(|(a, b), (c, d)| (a.max(c), b.max(d)));
        let mut allocate = |len: fn(usize, usize, usize) -> usize, element_bytes: usize| match most {
            Some((num_experts, num_active)) => {
                device.allocate(len(num_experts, rows, rows * num_active) * element_bytes)
            }
            None => Ok(Address::NULL),
        };
        Ok(RoutedBuffers {
            logits: allocate(|num_experts, rows, _| rows * num_experts, 4)?,
            experts: allocate(|_, _, pairs| pairs, 4)?,
            weights: allocate(|_, _, pairs| pairs, 4)?,
            offsets: allocate(|num_experts, _, _| num_experts + 1, 4)?,
            rows: allocate(|_, _, pairs| pairs, 4)?,
            places: allocate(|_, _, pairs| pairs, 4)?,
            outputs: allocate(|_, _, pairs| pairs, 2 * spec.hidden_size)?,
        })
    }
}

impl Buffers {
    /// # Errors
    /// When the device has too little memory.
    pub fn new<D: KernelDevice>(
        device: &mut D,
        spec: &DecoderSpec,
        layout: &KvLayout,
        limits: &BatchLimits,
        shape: &InputShape,
        tables: &BlockTables,
        rank: Rank,
    ) -> Result<Buffers, CudaError> {
        let rows = padded(limits.num_rows);
        let logit_rows = padded(limits.num_sequences);
        let mut bf16 = |width: usize| device.allocate(rows * width * 2);
        let (x, hidden, added) = (bf16(spec.hidden_size)?, bf16(spec.hidden_size)?, bf16(spec.hidden_size)?);
        let qkv = bf16(spec.query_width() + 2 * spec.kv_width())?;
        let attended = bf16(spec.query_width())?;
        let dense = spec.layers.iter().map(|layer| match layer.mlp {
            MlpSpec::Dense { intermediate_size } => intermediate_size,
            MlpSpec::Experts { intermediate_size, num_active, .. } => intermediate_size * num_active,
        });
        let width = dense.max().expect("a model has layers");
        let (gate_up, gated) = (bf16(2 * width)?, bf16(width)?);
        let splits = match has_tensor_cores(layout) {
            true => {
                let max_splits = max_splits(spec.num_kv_heads);
                SplitScratch::new(device, shape.max_decode_rows, spec.num_heads, spec.head_dim, max_splits)?
            }
            false => SplitScratch::NONE,
        };
        let slots = device.allocate(rows * 4)?;
        let of_rope = spec.ropes.iter().map(|rope| device.allocate(rows * rope.rotary_dim * 4));
        let cos_sin = of_rope.collect::<Result<_, CudaError>>()?;
        let [results, saved] = SamplingInputs::buffer_bytes(rows);
        let samplings = SamplingBuffers {
            results: device.allocate(results)?,
            saved: device.allocate(saved)?,
            masks: device.allocate(logit_rows * spec.vocab_size.div_ceil(32) * 4)?,
            max_masked: logit_rows,
        };
        Ok(Buffers {
            inputs: device.allocate(Inputs::max_bytes(limits, shape) + SamplingInputs::max_bytes(rows))?,
            block_tables: device.allocate(tables.size_bytes())?,
            max_blocks: tables.max_blocks,
            x,
            hidden,
            added,
            qkv,
            slots,
            cos_sin,
            attended,
            gate_up,
            gated,
            logits: match rank.is_first() {
                true => device.allocate(logit_rows * spec.vocab_size * 4)?,
                false => Address::NULL,
            },
            logit_rows,
            logit_parts: match rank.num_ranks {
                1 => Address::NULL,
                num_ranks => {
                    let num_parts = if rank.is_first() { num_ranks } else { 1 };
                    let stride = logit_stride(spec.vocab_size, num_ranks);
                    device.allocate(num_parts * logit_rows * stride * 4)?
                }
            },
            splits,
            samplings,
            routed: RoutedBuffers::new(device, spec, rows)?,
        })
    }
}
