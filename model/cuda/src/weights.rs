//! Weights on a device: matrices in a suitable [form](crate::form), norms and biases in f32.
//!
//! Weights are read from their mapped file a few rows at a time. Host memory holds no second copy of them.

use baton_checkpoint::{
    DecoderWeights, DenseMlp, DeviceSource, LayerWeights, Linear, LoadProgress, Matrix, Mlp,
};
use baton_cuda::CudaError;
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::products::{Scales, WeightKind};
use baton_model_spec::{DecoderSpec, RopeSpec};

use crate::form::{Tables, WeightForm, WeightRows};

/// The weights of [`DecoderWeights`] on a device.
#[derive(Debug)]
pub struct DeviceWeights {
    /// `[vocab][hidden]`. With a tied head this matrix is also the head.
    pub embedding: DeviceMatrix,
    pub layers: Vec<DeviceLayer>,
    /// `[hidden]`, f32, like all norms.
    pub norm: Address,
    pub head: DeviceMatrix,
    /// In the order of [`DecoderSpec::ropes`].
    pub ropes: Vec<DeviceRope>,
    pub bytes: DeviceWeightBytes,
}

/// Bytes of matrices on a device, including scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceWeightBytes {
    /// Matrices in bf16.
    pub bf16: u64,
    /// Matrices in E4M3.
    pub fp8: u64,
    /// Matrices in 8-bit integers.
    pub int8: u64,
    /// Matrices in 4-bit integers.
    pub int4: u64,
    /// The part of `bf16` that files hold in fewer bits, in formats without kernels.
    pub widened: u64,
}

impl DeviceWeightBytes {
    /// Of all kinds.
    pub fn total(self) -> u64 {
        let DeviceWeightBytes { bf16, fp8, int8, int4, widened: _ } = self;
        bf16 + fp8 + int8 + int4
    }

    fn of(&mut self, kind: WeightKind) -> &mut u64 {
        match kind {
            WeightKind::Bf16 => &mut self.bf16,
            WeightKind::Fp8 => &mut self.fp8,
            WeightKind::Int8 => &mut self.int8,
            WeightKind::Int4 => &mut self.int4,
        }
    }
}

/// The bytes of several devices together.
impl std::iter::Sum for DeviceWeightBytes {
    fn sum<I: Iterator<Item = DeviceWeightBytes>>(all: I) -> DeviceWeightBytes {
        all.fold(DeviceWeightBytes::default(), |sum, it| DeviceWeightBytes {
            bf16: sum.bf16 + it.bf16,
            fp8: sum.fp8 + it.fp8,
            int8: sum.int8 + it.int8,
            int4: sum.int4 + it.int4,
            widened: sum.widened + it.widened,
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct DeviceRope {
    /// `[rotary_dim / 2]`, f32.
    pub inverse_frequencies: Address,
    pub factor: f32,
    pub rotary_dim: usize,
}

#[derive(Debug)]
pub struct DeviceLayer {
    pub attention_norm: Address,
    /// Without its bias. The kernel that stores the heads adds it.
    pub qkv: DeviceLinear,
    /// Null if the model has none, like the other optional vectors.
    pub qkv_bias: Address,
    pub query_norm: Address,
    pub key_norm: Address,
    pub output: DeviceLinear,
    pub attention_post_norm: Address,
    pub mlp_norm: Address,
    pub mlp: DeviceMlp,
    pub mlp_post_norm: Address,
}

/// `[num_out][num_in]`.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMatrix {
    pub at: Address,
    pub kind: WeightKind,
    pub scales: Scales,
    pub num_out: usize,
    pub num_in: usize,
}

impl DeviceMatrix {
    /// `num_out` rows from `first` on. `first` is a multiple of [`MAX_SCALE_ROWS`](crate::form::MAX_SCALE_ROWS) or of
    /// the rows per scale. The rows may belong to a matrix that follows this one.
    pub fn rows_at(self, first: usize, num_out: usize) -> DeviceMatrix {
        DeviceMatrix {
            at: self.at.offset_by(first * self.kind.row_bytes(self.num_in)),
            scales: self.scales.after(first),
            num_out,
            ..self
        }
    }
}

#[derive(Debug)]
pub struct DeviceLinear {
    pub weight: DeviceMatrix,
    /// `[num_out]`, f32. Null if there is none.
    pub bias: Address,
}

#[derive(Debug)]
pub enum DeviceMlp {
    Dense {
        /// The gate rows, then the up rows.
        gate_up: DeviceLinear,
        down: DeviceLinear,
    },
    Experts {
        /// In bf16.
        router: DeviceMatrix,
        /// The first expert's matrix. The matrices of the other experts follow it.
        gate_up: DeviceMatrix,
        down: DeviceMatrix,
    },
}

/// Bytes that are assembled before each copy.
const STAGED_BYTES: usize = 8 << 20;

/// Uploads the weights of a model that was loaded for a device. Prepares rows on `num_threads` threads.
///
/// # Errors
/// When the device has too little memory, or fails.
pub fn upload<D: KernelDevice>(
    device: &mut D,
    spec: &DecoderSpec,
    weights: &DecoderWeights<DeviceSource>,
    num_threads: usize,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<DeviceWeights, CudaError> {
    let bytes_total = stacks(weights).map(|stack| stack.size_bytes() as u64).sum();
    let progress_now = LoadProgress { bytes_done: 0, bytes_total };
    progress(progress_now);
    let bytes = DeviceWeightBytes::default();
    let mut uploader = Uploader { device, num_threads, progress, progress_now, bytes };
    let head = uploader.matrix(&weights.head)?;
    let embedding = match &weights.embedding {
        Some(table) => uploader.stack(&Stack::of_table(table))?,
        None => head,
    };
    let layers: Result<_, CudaError> = weights.layers.iter().map(|layer| uploader.layer(layer)).collect();
    let ropes: Result<_, CudaError> = spec.ropes.iter().map(|rope| uploader.rope(rope)).collect();
    let norm = uploader.vector(&weights.norm)?;
    Ok(DeviceWeights { embedding, layers: layers?, norm, head, ropes: ropes?, bytes: uploader.bytes })
}

/// The kinds of matrices that a device will hold, each once.
pub fn kinds(weights: &DecoderWeights<DeviceSource>) -> Vec<WeightKind> {
    let mut kinds: Vec<WeightKind> = stacks(weights).map(|stack| stack.form.kind()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// Matrices of one shape that follow each other in device memory.
struct Stack<'m> {
    form: WeightForm,
    parts: Vec<&'m Matrix>,
    /// Rows of one matrix.
    num_out: usize,
    num_in: usize,
}

impl<'m> Stack<'m> {
    fn of(matrices: impl Iterator<Item = &'m DeviceSource> + Clone) -> Stack<'m> {
        let first = matrices.clone().next().expect("there is one");
        let form = WeightForm::of(matrices.clone());
        let (num_out, num_in) = (first.rows, first.cols);
        Stack { form, parts: matrices.flat_map(DeviceSource::parts).collect(), num_out, num_in }
    }

    fn of_table(table: &'m Matrix) -> Stack<'m> {
        Stack {
            form: WeightForm::of_table(table),
            parts: vec![table],
            num_out: table.rows,
            num_in: table.cols,
        }
    }

    /// The router chooses experts, so it has the precision of activations.
    fn of_router(router: &'m DeviceSource) -> Stack<'m> {
        Stack { form: WeightForm::Bf16, ..Stack::of(std::iter::once(router)) }
    }

    fn num_rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    fn size_bytes(&self) -> usize {
        self.form.size_bytes(self.num_rows(), self.num_in)
    }
}

/// Everything that a device will hold.
fn stacks(weights: &DecoderWeights<DeviceSource>) -> impl Iterator<Item = Stack<'_>> {
    fn one(matrix: &DeviceSource) -> Stack<'_> {
        Stack::of(std::iter::once(matrix))
    }
    fn of_layer(layer: &LayerWeights<DeviceSource>) -> Vec<Stack<'_>> {
        let mut all = vec![one(&layer.qkv.weight), one(&layer.output.weight)];
        match &layer.mlp {
            Mlp::Dense(DenseMlp { gate_up, down }) => all.extend([one(&gate_up.weight), one(&down.weight)]),
            Mlp::Experts { router, experts } => all.extend([
                Stack::of_router(&router.weight),
                Stack::of(experts.iter().map(|expert| &expert.gate_up.weight)),
                Stack::of(experts.iter().map(|expert| &expert.down.weight)),
            ]),
        }
        all
    }
    let head = std::iter::once(one(&weights.head));
    head.chain(weights.embedding.as_ref().map(Stack::of_table))
        .chain(weights.layers.iter().flat_map(of_layer))
}

struct Uploader<'a, D> {
    device: &'a mut D,
    num_threads: usize,
    progress: &'a mut dyn FnMut(LoadProgress),
    progress_now: LoadProgress,
    bytes: DeviceWeightBytes,
}

impl<D: KernelDevice> Uploader<'_, D> {
    fn layer(&mut self, layer: &LayerWeights<DeviceSource>) -> Result<DeviceLayer, CudaError> {
        let qkv = self.linear(&layer.qkv)?;
        Ok(DeviceLayer {
            attention_norm: self.vector(&layer.attention_norm)?,
            qkv_bias: qkv.bias,
            qkv: DeviceLinear { bias: Address::NULL, ..qkv },
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
                    router: self.stack(&Stack::of_router(&router.weight))?,
                    gate_up: self.stack(&Stack::of(experts.iter().map(|expert| &expert.gate_up.weight)))?,
                    down: self.stack(&Stack::of(experts.iter().map(|expert| &expert.down.weight)))?,
                },
            },
            mlp_post_norm: self.optional(layer.mlp_post_norm.as_ref())?,
        })
    }

    fn linear(&mut self, linear: &Linear<DeviceSource>) -> Result<DeviceLinear, CudaError> {
        Ok(DeviceLinear { weight: self.matrix(&linear.weight)?, bias: self.optional(linear.bias.as_ref())? })
    }

    fn matrix(&mut self, matrix: &DeviceSource) -> Result<DeviceMatrix, CudaError> {
        self.stack(&Stack::of(std::iter::once(matrix)))
    }

    /// Uploads the stack and returns its first matrix.
    fn stack(&mut self, stack: &Stack<'_>) -> Result<DeviceMatrix, CudaError> {
        let Stack { form, parts, num_out, num_in, .. } = stack;
        let (num_rows, row_bytes) = (stack.num_rows(), form.kind().row_bytes(*num_in));
        let at = self.device.allocate(num_rows * row_bytes)?;
        let places: Vec<(&Matrix, usize)> =
            parts.iter().flat_map(|part| (0..part.rows).map(|row_idx| (*part, row_idx))).collect();
        let mut rows = WeightRows::new(*form, *num_in);
        let mut tables = Tables::new(*form, num_rows, *num_in);
        let rows_per_piece = (STAGED_BYTES / row_bytes).max(1);
        for (nth, places) in places.chunks(rows_per_piece).enumerate() {
            let first = nth * rows_per_piece;
            rows.fill(places, self.num_threads);
            rows.place_scales(first, &mut tables);
            // SAFETY: the allocation has room for all rows.
            unsafe { self.device.upload(at.offset_by(first * row_bytes), &rows.bytes) }?;
            self.advance(rows.bytes.len());
        }
        let mut scales = form.scales(num_rows, *num_in);
        if *form != WeightForm::Bf16 {
            scales.scales = self.vector(&tables.scales)?;
            self.advance(tables.scales.len() * 4);
        }
        if form.has_zeros() {
            scales.zeros = self.vector(&tables.zeros)?;
            self.advance(tables.zeros.len() * 4);
        }
        let size_bytes = stack.size_bytes() as u64;
        *self.bytes.of(form.kind()) += size_bytes;
        if *form == WeightForm::Bf16 && parts.iter().any(|part| part.is_integers() || part.is_fp8()) {
            self.bytes.widened += size_bytes;
        }
        Ok(DeviceMatrix { at, kind: form.kind(), scales, num_out: *num_out, num_in: *num_in })
    }

    fn advance(&mut self, num_bytes: usize) {
        self.progress_now.bytes_done += num_bytes as u64;
        (self.progress)(self.progress_now);
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
        self.device.allocate_holding(bytemuck::cast_slice(vector))
    }
}
