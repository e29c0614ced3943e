//! Device memory of a prompt that is blended, beside that of the step that computes a part of it.

use baton_cuda::CudaError;
use baton_cuda_kernels::device::{KernelDevice, NUM_LOADS};
use baton_cuda_kernels::kernel::Address;
use baton_model_spec::DecoderSpec;

/// Memory for all tokens of the longest prompt. A row is a token, in the order of positions.
pub struct BlendBuffers {
    /// `[tokens][hidden]`, bf16: the residual stream after the layers that all tokens are computed in.
    pub x: Address,
    /// `[tokens][2 kv_width]`, bf16: what passages have for a layer, and for the next ones.
    kept: [Address; NUM_LOADS],
    /// `[tokens]`, f32.
    pub deviations: Address,
    /// `[tokens]`, u32: 0, 1, ..
    pub positions: Address,
    /// `[tokens]`, u32: slots of the block tables; `NONE` for tokens that are computed.
    pub tables: Address,
    /// `[tokens]`, u32: slots of the KV in the pool.
    pub slots: Address,
    /// For each rope, `[tokens][2][rotary_dim / 2]`, f32.
    pub cos_sin: Vec<Address>,
}

impl BlendBuffers {
    /// # Errors
    /// When the device has too little memory.
    pub fn new<D: KernelDevice>(
        device: &mut D,
        spec: &DecoderSpec,
        num_tokens: usize,
    ) -> Result<BlendBuffers, CudaError> {
        let kept_bytes = num_tokens * BlendBuffers::token_bytes(spec);
        let mut words = || device.allocate(num_tokens * 4);
        let [deviations, tables, slots] = [words()?, words()?, words()?];
        let positions: Vec<u32> = (0..num_tokens as u32).collect();
        let positions = device.allocate_holding(bytemuck::cast_slice(&positions))?;
        let kept = (0..NUM_LOADS).map(|_| device.allocate(kept_bytes)).collect::<Result<Vec<_>, _>>()?;
        let kept = kept.try_into().expect("one for each load");
        let cos_sin = spec.ropes.iter().map(|rope| device.allocate(num_tokens * rope.rotary_dim * 4));
        Ok(BlendBuffers {
            cos_sin: cos_sin.collect::<Result<_, CudaError>>()?,
            x: device.allocate(num_tokens * spec.hidden_size * 2)?,
            kept,
            deviations,
            positions,
            tables,
            slots,
        })
    }

    /// What passages have for a layer.
    pub fn kept(&self, layer_idx: usize) -> Address {
        self.kept[layer_idx % NUM_LOADS]
    }

    /// Bytes that a passage has for a token in a layer.
    pub fn token_bytes(spec: &DecoderSpec) -> usize {
        2 * spec.kv_width() * 2
    }
}
