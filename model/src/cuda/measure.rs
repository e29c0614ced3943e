//! How fast a device is, and how much of that the kernels and whole steps reach: for `cargo xtask gpu-check`.
//!
//! Ceilings are measured in the same run: a large copy, counted as bytes read and written, and a large product of bf16.
//! Times are medians, by the device's clock, or by the host's where a step is as the engine sees it. Weights and KV are
//! noise: of zeroes products are quicker than of anything else.

mod attention;
mod ceilings;
pub(crate) mod noise;
mod steps;

use std::path::PathBuf;

use baton_cuda::CudaError;
use baton_kv_cache::{KvDtype, KvLayout};

use self::ceilings::Ceilings;
use super::device::Device;
use super::driver::DriverDevice;
use super::executor::sources_of;
use super::kernel::Address;
use super::start::StartError;
use baton_model_spec::{Activation, RopeScaling, RopeSpec};
use baton_model_spec::{DecoderSpec, LayerSpec, MlpSpec};

/// A device with a clock, that copies within its memory.
pub(crate) trait Timed: Device + 'static {
    /// A place of the queue.
    type Stamp;

    /// Looks at the clock when all that was asked for is done.
    fn stamp(&mut self) -> Result<Self::Stamp, CudaError>;

    /// Waits for both.
    fn seconds_between(&mut self, from: &Self::Stamp, to: &Self::Stamp) -> Result<f64, CudaError>;

    /// # Safety
    /// Both places are there, and do not overlap.
    unsafe fn copy(&mut self, to: Address, from: Address, num_bytes: usize) -> Result<(), CudaError>;
}

/// What was measured of one thing.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// "decode attention, 32 x 4096"
    pub what: String,
    /// Seconds, the median.
    pub seconds: f64,
    /// Bytes, or operations, in that time.
    pub amount: Amount,
    /// Of the ceiling; `None` of a ceiling itself.
    pub share: Option<f64>,
    /// What the share is to be at least.
    pub target: Option<f64>,
}

impl Figure {
    /// Whether it is below what it is to be.
    pub fn is_missed(&self) -> bool {
        // Not a number is no success.
        matches!((self.share, self.target), (Some(share), Some(target)) if share.is_nan() || share < target)
    }
}

/// What takes time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// Through the device's memory.
    Bytes(f64),
    /// Of the matrix units.
    Operations(f64),
}

/// How large everything is.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    pub(crate) spec: DecoderSpec,
    /// Tokens in the cache of a sequence that decodes, the newest included.
    pub(crate) context: usize,
    pub(crate) batch: usize,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    pub(crate) copied_bytes: usize,
    /// Rows and columns of the product.
    pub(crate) product: usize,
    pub(crate) repetitions: usize,
}

impl Sizes {
    /// A model of the shape of Llama 3.1 8B.
    fn full() -> Sizes {
        let (hidden_size, num_heads, num_kv_heads, head_dim) = (4096, 32, 8, 128);
        let mlp = MlpSpec::Dense { intermediate_size: 14336 };
        let shape = [hidden_size, num_heads, num_kv_heads, head_dim];
        Sizes {
            spec: llama(shape, vec![LayerSpec { window: None, rope_idx: 0, mlp }; 32], 128_256),
            context: 4096,
            batch: 32,
            prompt: 8192,
            copied_bytes: 4 << 30,
            product: 8192,
            repetitions: 15,
        }
    }

    fn layout(&self) -> KvLayout {
        KvLayout {
            block_size: 16,
            num_layers: self.spec.layers.len(),
            num_kv_heads: self.spec.num_kv_heads,
            head_dim: self.spec.head_dim,
            dtype: KvDtype::Bf16,
        }
    }
}

/// Of such sizes: hidden, heads, kv heads, and of a head.
pub(crate) fn llama(shape: [usize; 4], layers: Vec<LayerSpec>, vocab_size: usize) -> DecoderSpec {
    let [hidden_size, num_heads, num_kv_heads, head_dim] = shape;
    DecoderSpec {
        vocab_size,
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        layers,
        ropes: vec![RopeSpec { theta: 500_000.0, rotary_dim: head_dim, scaling: RopeScaling::None }],
        norm_eps: 1e-5,
        norm_unit_offset: false,
        post_norms: false,
        qk_norm: false,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        fused_projections: false,
        attention_scale: 1.0 / (head_dim as f32).sqrt(),
        attention_soft_cap: None,
        activation: Activation::Silu,
        embedding_scale: 1.0,
        tied_head: false,
        logit_soft_cap: None,
        tensor_prefix: String::new(),
    }
}

/// What a device is.
#[derive(Clone, Debug)]
pub struct Card {
    /// "NVIDIA H100 80GB HBM3"
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Of all its memory.
    pub memory_bytes: usize,
}

/// The `ordinal`th device.
///
/// # Errors
/// What is missing.
pub fn card(ordinal: u32) -> Result<Card, CudaError> {
    let device = baton_cuda::Device::open(ordinal)?;
    let failed = |error| baton_cuda::failed("cuDeviceGetAttribute", error);
    let capability = device.context().compute_capability().map_err(failed)?;
    let name = device.context().name().map_err(failed)?;
    Ok(Card { name, capability, memory_bytes: device.memory()?.1 })
}

/// Compiles the kernels that are measured, unless `kernel_cache` holds them, and measures; `report` is told of each figure as it comes.
///
/// # Errors
/// When something is missing, the memory does not suffice, or the device fails.
pub fn measure(
    ordinal: u32,
    kernel_cache: Option<PathBuf>,
    report: &mut dyn FnMut(&Figure),
) -> Result<(), StartError> {
    let sizes = Sizes::full();
    let sources = sources_of(&sizes.spec, &sizes.layout());
    // What one part allocates is free again for the next.
    let open = || DriverDevice::open(ordinal, &sources, kernel_cache.clone());
    let ceilings = Ceilings::measure(&mut open()?, &sizes, report)?;
    attention::measure(&mut open()?, &sizes, &ceilings, report)?;
    steps::measure(open()?, &sizes, &ceilings, report)
}

/// Seconds by the device's clock, of so many repetitions after three that do not count.
fn median<D: Timed>(
    repetitions: usize,
    device: &mut D,
    work: &mut dyn FnMut(&mut D) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    (0..3).try_for_each(|_| work(device))?;
    let mut seconds = Vec::with_capacity(repetitions);
    for _ in 0..repetitions {
        let from = device.stamp()?;
        work(device)?;
        let to = device.stamp()?;
        seconds.push(device.seconds_between(&from, &to)?);
    }
    Ok(middle(seconds))
}

fn middle(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Of one layer: each row meets those before it and itself, twice, by a multiplication and an addition.
fn attention_operations(spec: &DecoderSpec, num_tokens: usize) -> f64 {
    let pairs = num_tokens as f64 * (num_tokens as f64 + 1.0) / 2.0;
    4.0 * spec.query_width() as f64 * pairs
}

#[cfg(test)]
mod tests;
