//! Weights on a device: matrices in bf16, norms and biases in f32.
//!
//! They are read where they are mapped, a few rows at a time: no second copy of them is made in the host's memory.

use baton_cuda::CudaError;

use super::device::Device;
use super::kernel::Address;
use crate::decoder::{self, DecoderWeights, DenseMlp, LayerWeights, Mlp};
use crate::matrix::Matrix;
use crate::packed::PackedMatrix;
use crate::spec::DecoderSpec;
use crate::{FloatDtype, LoadProgress, RopeSpec};

/// As [`DecoderWeights`].
#[derive(Debug)]
pub(crate) struct DeviceWeights {
    /// `[vocab][hidden]`, bf16. With a tied head it is the head, too.
    pub(crate) embedding: Address,
    pub(crate) layers: Vec<DeviceLayer>,
    /// `[hidden]`, f32, as all norms.
    pub(crate) norm: Address,
    pub(crate) head: DeviceMatrix,
    /// As [`DecoderSpec::ropes`].
    pub(crate) ropes: Vec<DeviceRope>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceRope {
    /// `[rotary_dim / 2]`, f32.
    pub(crate) inverse_frequencies: Address,
    pub(crate) factor: f32,
    pub(crate) rotary_dim: usize,
}

#[derive(Debug)]
pub(crate) struct DeviceLayer {
    pub(crate) attention_norm: Address,
    pub(crate) qkv: DeviceLinear,
    /// Null where there is none; so the others.
    pub(crate) query_norm: Address,
    pub(crate) key_norm: Address,
    pub(crate) output: DeviceLinear,
    pub(crate) attention_post_norm: Address,
    pub(crate) mlp_norm: Address,
    pub(crate) mlp: DeviceMlp,
    pub(crate) mlp_post_norm: Address,
}

/// `[num_out][num_in]`, bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceMatrix {
    pub(crate) at: Address,
    pub(crate) num_out: usize,
    pub(crate) num_in: usize,
}

#[derive(Debug)]
pub(crate) struct DeviceLinear {
    pub(crate) weight: DeviceMatrix,
    /// `[num_out]`, f32; null where there is none.
    pub(crate) bias: Address,
}

#[derive(Debug)]
pub(crate) enum DeviceMlp {
    Dense {
        /// Gates, then as many rows that they let through.
        gate_up: DeviceLinear,
        down: DeviceLinear,
    },
    Experts {
        router: DeviceMatrix,
        /// Of the first expert; those of the others follow.
        gate_up: DeviceMatrix,
        down: DeviceMatrix,
    },
}

/// Bytes that are put together before they are copied.
const STAGED_BYTES: usize = 8 << 20;

/// Copies the weights of a model that was loaded for a device.
///
/// # Errors
/// When the device has not the memory, or fails.
pub(crate) fn upload<D: Device>(
    device: &mut D,
    spec: &DecoderSpec,
    weights: &DecoderWeights,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<DeviceWeights, CudaError> {
    let bytes_total = (matrices(weights).map(|matrix| matrix.rows * matrix.cols * 2).sum::<usize>()
        + weights.embedding.as_ref().map_or(0, |embedding| embedding.rows * embedding.cols * 2))
        as u64;
    let progress_now = LoadProgress { bytes_done: 0, bytes_total };
    progress(progress_now);
    let mut uploader = Uploader { device, progress, progress_now, staged: vec![], row: vec![] };
    let head = uploader.matrix(&weights.head)?;
    let embedding = match &weights.embedding {
        Some(embedding) => uploader.parts(&[embedding], embedding.rows * embedding.cols * 2)?,
        None => head.at,
    };
    let layers: Result<_, CudaError> = weights.layers.iter().map(|layer| uploader.layer(layer)).collect();
    let ropes: Result<_, CudaError> = spec.ropes.iter().map(|rope| uploader.rope(rope)).collect();
    let norm = uploader.vector(&weights.norm)?;
    Ok(DeviceWeights { embedding, layers: layers?, norm, head, ropes: ropes? })
}

/// All that are multiplied.
fn matrices(weights: &DecoderWeights) -> impl Iterator<Item = &PackedMatrix> {
    fn of_dense(mlp: &DenseMlp) -> [&PackedMatrix; 2] {
        [&mlp.gate_up.weight, &mlp.down.weight]
    }
    fn of_layer(layer: &LayerWeights) -> Vec<&PackedMatrix> {
        let mut all = vec![&layer.qkv.weight, &layer.output.weight];
        match &layer.mlp {
            Mlp::Dense(dense) => all.extend(of_dense(dense)),
            Mlp::Experts { router, experts } => {
                all.push(&router.weight);
                all.extend(experts.iter().flat_map(of_dense));
            }
        }
        all
    }
    weights.layers.iter().flat_map(of_layer).chain([&weights.head])
}

struct Uploader<'a, D> {
    device: &'a mut D,
    progress: &'a mut dyn FnMut(LoadProgress),
    progress_now: LoadProgress,
    staged: Vec<u8>,
    row: Vec<f32>,
}

impl<D: Device> Uploader<'_, D> {
    fn layer(&mut self, layer: &LayerWeights) -> Result<DeviceLayer, CudaError> {
        Ok(DeviceLayer {
            attention_norm: self.vector(&layer.attention_norm)?,
            qkv: self.linear(&layer.qkv)?,
            query_norm: self.optional(layer.query_norm.as_ref())?,
            key_norm: self.optional(layer.key_norm.as_ref())?,
            output: self.linear(&layer.output)?,
            attention_post_norm: self.optional(layer.attention_post_norm.as_ref())?,
            mlp_norm: self.vector(&layer.mlp_norm)?,
            mlp: match &layer.mlp {
                Mlp::Dense(mlp) => {
                    DeviceMlp::Dense { gate_up: self.linear(&mlp.gate_up)?, down: self.linear(&mlp.down)? }
                }
                Mlp::Experts { router, experts } => DeviceMlp::Experts {
                    router: self.matrix(&router.weight)?,
                    gate_up: self.matrices(experts.iter().map(|expert| &expert.gate_up.weight))?,
                    down: self.matrices(experts.iter().map(|expert| &expert.down.weight))?,
                },
            },
            mlp_post_norm: self.optional(layer.mlp_post_norm.as_ref())?,
        })
    }

    fn linear(&mut self, linear: &decoder::Linear) -> Result<DeviceLinear, CudaError> {
        Ok(DeviceLinear { weight: self.matrix(&linear.weight)?, bias: self.optional(linear.bias.as_ref())? })
    }

    fn matrix(&mut self, matrix: &PackedMatrix) -> Result<DeviceMatrix, CudaError> {
        self.matrices(std::iter::once(matrix))
    }

    /// Matrices of one shape, one behind the other; the first.
    fn matrices<'m>(
        &mut self,
        matrices: impl Iterator<Item = &'m PackedMatrix> + Clone,
    ) -> Result<DeviceMatrix, CudaError> {
        let first = matrices.clone().next().expect("there is one");
        let (num_out, num_in) = (first.rows, first.cols);
        let parts: Vec<&Matrix> = matrices.flat_map(PackedMatrix::parts).collect();
        let size_bytes = parts.iter().map(|part| part.rows * part.cols * 2).sum();
        Ok(DeviceMatrix { at: self.parts(&parts, size_bytes)?, num_out, num_in })
    }

    fn parts(&mut self, parts: &[&Matrix], size_bytes: usize) -> Result<Address, CudaError> {
        let at = self.device.allocate(size_bytes)?;
        let mut end = at;
        for part in parts {
            for row_idx in 0..part.rows {
                self.stage(part, row_idx);
                if self.staged.len() >= STAGED_BYTES {
                    end = self.flush(end)?;
                }
            }
        }
        end = self.flush(end)?;
        debug_assert_eq!(end, at.add(size_bytes), "all rows, and no more");
        Ok(at)
    }

    fn stage(&mut self, part: &Matrix, row_idx: usize) {
        match part.row(row_idx) {
            Some(bytes) if part.dtype() == FloatDtype::Bf16 => self.staged.extend_from_slice(bytes),
            _ => {
                self.row.resize(part.cols, 0.0);
                part.read_row(row_idx, &mut self.row);
                let rounded = self.row.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes());
                self.staged.extend(rounded);
            }
        }
    }

    /// Copies what is staged to `to`; where that ends.
    fn flush(&mut self, to: Address) -> Result<Address, CudaError> {
        // SAFETY: the caller allocated as much as it stages.
        unsafe { self.device.upload(to, &self.staged) }?;
        let end = to.add(self.staged.len());
        self.progress_now.bytes_done += self.staged.len() as u64;
        self.staged.clear();
        (self.progress)(self.progress_now);
        Ok(end)
    }

    fn rope(&mut self, rope: &RopeSpec) -> Result<DeviceRope, CudaError> {
        Ok(DeviceRope {
            inverse_frequencies: self.vector(&rope.inverse_frequencies())?,
            factor: rope.attention_factor(),
            rotary_dim: rope.rotary_dim,
        })
    }

    fn optional(&mut self, vector: Option<&Vec<f32>>) -> Result<Address, CudaError> {
        vector.map_or(Ok(Address::NULL), |vector| self.vector(vector))
    }

    fn vector(&mut self, vector: &[f32]) -> Result<Address, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(vector);
        let at = self.device.allocate(bytes.len())?;
        // SAFETY: allocated for them.
        unsafe { self.device.upload(at, bytes) }?;
        Ok(at)
    }
}
