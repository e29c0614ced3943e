//! Random weights for measurements.

use baton_cuda::CudaError;
use baton_cuda_kernels::device::TimedDevice;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::noise::Noise;
use baton_cuda_kernels::products::{Scales, WeightKind};
use baton_model_spec::{DecoderSpec, LayerSpec, MlpSpec};

use crate::weights::{
    DeviceLayer, DeviceLinear, DeviceMatrix, DeviceMlp, DeviceRope, DeviceWeightBytes, DeviceWeights,
};

/// Bytes of all matrices of [`random_weights`].
pub fn weight_bytes(spec: &DecoderSpec) -> usize {
    let of_layer = |layer: &LayerSpec| {
        let attention = 2 * spec.query_width() + 2 * spec.kv_width();
        (attention + 3 * layer.mlp.intermediate_size()) * spec.hidden_size
    };
    let embeddings = 2 * spec.vocab_size * spec.hidden_size;
    2 * (spec.layers.iter().map(of_layer).sum::<usize>() + embeddings)
}

/// Weights of a model without experts, biases and head norms.
pub fn random_weights<D: TimedDevice>(
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
