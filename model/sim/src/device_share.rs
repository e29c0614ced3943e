//! What a step of a model takes on GPUs, and how much KV fits beside the weights.

use baton_cost::{GpuKind, ModelShape, StepLine, prior};
use baton_kv_cache::KvDtype;
use baton_model_spec::{DecoderShard, DecoderSpec, LoadError, Rank, cost::ModelCost};

/// Bytes of a weight in BF16.
const WEIGHT_BYTES: f64 = 2.0;
/// Fewer are no use.
const LEAST_KV_TOKENS: usize = 1024;

/// A model on so many GPUs of one kind that compute it together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceShare {
    /// What a step takes, by a roofline.
    pub step: StepLine,
    /// The part of every step that the host needs, in seconds; `step` contains it.
    pub host_seconds: f64,
    /// Bytes of weights, in BF16.
    pub weight_bytes: f64,
    /// Bytes of a token's KV, in BF16.
    pub kv_bytes_per_token: f64,
    /// Tokens whose KV fits beside the weights.
    pub num_kv_tokens: usize,
}

/// A model that so many GPUs cannot compute together.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// Its heads or neurons cannot be divided among them, as real workers refuse it.
    #[error(transparent)]
    Indivisible(#[from] LoadError),
    /// The weights leave no room for KV.
    #[error(
        "{num_gpus} x {} hold {:.0} GB, and the weights alone take {:.0} GB; raise the tensor-parallel degree",
        gpu.name(), room_bytes / 1e9, weight_bytes / 1e9
    )]
    DoesNotFit {
        /// What it should fit on.
        gpu: GpuKind,
        /// How many of them.
        num_gpus: usize,
        /// Bytes for weights and KV.
        room_bytes: f64,
        /// Bytes of the weights.
        weight_bytes: f64,
    },
}

impl DeviceShare {
    /// `utilisation` is the part of the memory that weights and KV may take; the rest is for activations and the runtime.
    ///
    /// # Errors
    /// When the model cannot be divided among the GPUs, or the weights leave no room for KV.
    pub fn new(
        spec: &DecoderSpec,
        gpu: GpuKind,
        num_gpus: usize,
        utilisation: f64,
    ) -> Result<DeviceShare, ShareError> {
        DecoderShard::new(spec, Rank { idx: 0, num_ranks: num_gpus })?;
        let cost = ModelCost::new(spec, WEIGHT_BYTES, KvDtype::Bf16);
        let shape = ModelShape {
            weight_bytes: cost.weight_bytes() as f64,
            flops_per_token: cost.flops_per_token(),
            flops_per_pair: cost.flops_per_pair(),
            kv_bytes_per_token: cost.kv_bytes_per_token() as f64,
            num_layers: spec.layers.len() as f64,
            sum_bytes_per_token: cost.sum_bytes_per_token(),
        };
        let ModelShape { weight_bytes, kv_bytes_per_token, .. } = shape;
        let room_bytes = gpu.memory_bytes() * num_gpus as f64 * utilisation;
        let num_kv_tokens = ((room_bytes - weight_bytes) / kv_bytes_per_token).max(0.0) as usize;
        if num_kv_tokens < LEAST_KV_TOKENS {
            return Err(ShareError::DoesNotFit { gpu, num_gpus, room_bytes, weight_bytes });
        }
        let profile = gpu.profile().times(num_gpus);
        Ok(DeviceShare {
            step: prior(&shape, &profile),
            host_seconds: profile.overhead_seconds,
            weight_bytes,
            kv_bytes_per_token,
            num_kv_tokens,
        })
    }
}
