//! Memory of a device full of numbers that mean nothing: for measurements.

use baton_cuda::CudaError;

use super::Timed;
use crate::cuda::device::Device;
use crate::cuda::kernel::Address;
use crate::cuda::products::{Scales, WeightKind};
use crate::cuda::weights::{
    DeviceLayer, DeviceLinear, DeviceMatrix, DeviceMlp, DeviceRope, DeviceWeightBytes, DeviceWeights,
};
use baton_model_spec::{DecoderSpec, MlpSpec};

/// Bytes of noise that the host makes; the device copies them as often as it needs.
const NOISE_BYTES: usize = 1 << 20;

/// Numbers of bf16 in -1/32..1/32, for weights of some thousand columns: they neither grow nor vanish.
pub(crate) struct Noise(Address);

impl Noise {
    pub(crate) fn new<D: Device>(device: &mut D) -> Result<Noise, CudaError> {
        Ok(Noise(device.allocate_holding(&bf16(NOISE_BYTES / 2, 1.0 / 32.0))?))
    }

    /// New memory full of it.
    pub(crate) fn fill_new<D: Timed>(&self, device: &mut D, num_bytes: usize) -> Result<Address, CudaError> {
        let at = device.allocate(num_bytes)?;
        for from in (0..num_bytes).step_by(NOISE_BYTES) {
            // SAFETY: within the two allocations.
            unsafe { device.copy(at.add(from), self.0, NOISE_BYTES.min(num_bytes - from)) }?;
        }
        Ok(at)
    }
}

/// So many numbers of bf16 in `-magnitude..magnitude`.
pub(crate) fn bf16(num: usize, magnitude: f32) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let numbers = (0..num).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let number = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        half::bf16::from_f32(number * magnitude).to_le_bytes()
    });
    numbers.collect()
}

/// Of a model without experts, biases and norms of heads.
pub(crate) fn random_weights<D: Timed>(
    device: &mut D,
    spec: &DecoderSpec,
    noise: &Noise,
) -> Result<DeviceWeights, CudaError> {
    let vector = |device: &mut D, numbers: &[f32]| device.allocate_holding(bytemuck::cast_slice(numbers));
    let matrix = |device: &mut D, num_out: usize, num_in: usize| {
        Ok::<_, CudaError>(DeviceMatrix {
            at: noise.fill_new(device, num_out * num_in * 2)?,
            kind: WeightKind::Bf16,
            scales: Scales::NONE,
            num_out,
            num_in,
        })
    };
    let linear = |device: &mut D, num_out, num_in| {
        Ok::<_, CudaError>(DeviceLinear { weight: matrix(device, num_out, num_in)?, bias: Address::NULL })
    };
    let norm = vector(device, &vec![1.0; spec.hidden_size])?;
    let layer = |device: &mut D, mlp: &MlpSpec| {
        let hidden = spec.hidden_size;
        Ok(DeviceLayer {
            attention_norm: norm,
            qkv: linear(device, spec.query_width() + 2 * spec.kv_width(), hidden)?,
            qkv_bias: Address::NULL,
            query_norm: Address::NULL,
            key_norm: Address::NULL,
            output: linear(device, hidden, spec.query_width())?,
            attention_post_norm: Address::NULL,
            mlp_norm: norm,
            mlp: DeviceMlp::Dense {
                gate_up: linear(device, 2 * mlp.intermediate_size(), hidden)?,
                down: linear(device, hidden, mlp.intermediate_size())?,
            },
            mlp_post_norm: Address::NULL,
        })
    };
    let layers: Result<_, CudaError> = spec.layers.iter().map(|it| layer(device, &it.mlp)).collect();
    let rope = |device: &mut D, rope: &baton_model_spec::RopeSpec| {
        Ok(DeviceRope {
            inverse_frequencies: vector(device, &rope.inverse_frequencies())?,
            factor: rope.attention_factor(),
            rotary_dim: rope.rotary_dim,
        })
    };
    let ropes: Result<_, CudaError> = spec.ropes.iter().map(|it| rope(device, it)).collect();
    Ok(DeviceWeights {
        embedding: matrix(device, spec.vocab_size, spec.hidden_size)?,
        layers: layers?,
        norm,
        head: matrix(device, spec.vocab_size, spec.hidden_size)?,
        ropes: ropes?,
        bytes: DeviceWeightBytes::default(),
    })
}
