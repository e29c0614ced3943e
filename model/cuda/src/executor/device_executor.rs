//! Runs steps on a device. One copy carries a batch to the device, and one copy carries the sampled tokens back. A
//! step without sampling copies its logits back, [`Buffers::logit_rows`] rows at a time.
//!
//! Layers are reported as soon as their KV is in the device's memory, while the step goes on. A mark follows the
//! kernel that writes a layer's KV. Between the launches of later layers, this thread queries the marks and calls
//! `on_layer` for those that have passed. A report can therefore be late by the time of one layer's launches, but
//! never early. After the last launch the thread waits for the remaining marks in order.
//!
//! Each rank of a model has an executor on a device of its own, with its part of the weights and blocks of its own kv
//! heads. All ranks run the same steps and meet in the sums of the pass.

use std::collections::VecDeque;

use baton_checkpoint::{DeviceModel, LoadProgress};
use baton_cuda::CudaError;
use baton_cuda_kernels::device::{KernelDevice, NUM_RETURNS};
use baton_cuda_kernels::kernel::Address;
use baton_kv_cache::{BlockStorage, KvLayout};
use baton_model_spec::{
    Activations, Batch, BlendRefusal, BlendingExecutor, ExecuteError, Executor, Rank, RankError,
    RankExecutor, SamplingExecutor, SamplingRank,
};

use super::launched::{Collected, Launched, Reported};
use super::shape::check_shape;
use crate::blend_buffers::BlendBuffers;
use crate::block_tables::BlockTables;
use crate::buffers::Buffers;
use crate::error::StartError;
use crate::forward_pass::ForwardPass;
use crate::inputs::{BatchLimits, InputShape, Inputs, MAX_DECODE_ROWS, padded};
use crate::limits::MAX_BLENDED;
use crate::multiply::{ProductRule, ProductScratch};
use crate::part::Part;
use crate::samplings::SamplingInputs;
use crate::weights::{self, DeviceWeightBytes, DeviceWeights};

/// Memory left to libraries and the driver for later allocations: code for other product sizes, graphs.
const SPARE_BYTES: usize = 256 << 20;

/// Computes a whole model, or one rank's part, on one device.
pub struct DeviceExecutor<D> {
    pub device: D,
    pub part: Part,
    pub weights: DeviceWeights,
    pub buffers: Buffers,
    pub scratch: ProductScratch,
    pub(super) limits: BatchLimits,
    pub shape: InputShape,
    pub tables: BlockTables,
    pub(super) inputs: Inputs,
    pub(super) samplings: SamplingInputs,
    /// Logits of the step that `execute` runs, or of the unsampled rows of each step in flight.
    pub(super) logits: [Vec<f32>; NUM_RETURNS],
    /// Steps in flight, the oldest first.
    pub(super) launched: VecDeque<Launched>,
    /// The samples of the step that was collected last.
    pub(super) collected: Collected,
    /// The return place of the next step's tokens.
    pub(super) next_place: usize,
    /// The memory of the blocks. Repeated work contains its address, so it must not change.
    pub(super) pool: Option<Address>,
    /// `None`: it does not blend.
    pub(super) blending: Option<BlendBuffers>,
    /// After the prompt that was blended last, if they were wanted.
    pub(super) blended_logits: Vec<f32>,
}

impl<D: KernelDevice> DeviceExecutor<D> {
    /// Uploads the weights and allocates all memory of the pass. The device was opened with the kernels of
    /// [`sources`](super::sources).
    ///
    /// # Errors
    /// When the device has too little memory or fails, or there are no kernels for the model's shape.
    pub fn new(
        mut device: D,
        model: DeviceModel,
        limits: BatchLimits,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<DeviceExecutor<D>, StartError> {
        check_shape(&model)?;
        let part = Part::of(&model);
        let weights =
            weights::upload(&mut device, part.spec(), model.weights(), model.num_threads(), progress);
        let rule = match model.activations() {
            _ if model.is_deterministic() => ProductRule::Fixed,
            Activations::Auto => ProductRule::Fast,
            _ => ProductRule::Bf16,
        };
        let remedy = "--quantize makes them smaller, --tensor-parallel divides them among GPUs";
        let weights = weights.map_err(StartError::taking("the weights", remedy))?;
        DeviceExecutor::with_weights(device, part, weights, limits, rule)
    }

    /// Like [`new`](Self::new), with weights that are on the device already.
    ///
    /// # Errors
    /// When the device has too little memory or fails.
    pub fn with_weights(
        mut device: D,
        part: Part,
        weights: DeviceWeights,
        limits: BatchLimits,
        rule: ProductRule,
    ) -> Result<DeviceExecutor<D>, StartError> {
        if rule == ProductRule::Fixed {
            device.fix_products();
        }
        let (spec, layout) = (part.spec(), part.layout);
        let num_blended = if part.rank() == Rank::ONLY { limits.num_blended.min(MAX_BLENDED) } else { 0 };
        let limits = BatchLimits { num_blended, ..limits };
        let shape = InputShape {
            block_size: layout.block_size,
            group: spec.num_heads / spec.num_kv_heads,
            head_dim: spec.head_dim,
            // Enough rows for all drafts of a sequence, also when it runs alone.
            max_decode_rows: (2 * padded(limits.num_sequences))
                .max(padded(MAX_DECODE_ROWS))
                .min(padded(limits.num_rows)),
        };
        let remedy = "a smaller --token-budget or --max-running takes less";
        let no_room = StartError::taking("the largest step", remedy);
        let tables = BlockTables::new(&limits, layout.block_size);
        let buffers = Buffers::new(&mut device, spec, &layout, &limits, &shape, &tables, part.rank());
        let buffers = buffers.map_err(no_room)?;
        let scratch = ProductScratch::new(&mut device, spec, &weights, &limits, rule);
        let scratch = scratch.map_err(no_room)?;
        let blending =
            (limits.num_blended > 0).then(|| BlendBuffers::new(&mut device, spec, limits.num_blended));
        let blending = blending.transpose().map_err(no_room)?;
        let mut executor = DeviceExecutor {
            device,
            part,
            weights,
            buffers,
            scratch,
            limits,
            shape,
            tables,
            inputs: Inputs::default(),
            samplings: SamplingInputs::default(),
            logits: Default::default(),
            launched: VecDeque::new(),
            collected: Collected::default(),
            next_place: 0,
            pool: None,
            blending,
            blended_logits: Vec::new(),
        };
        executor.warm_up().map_err(no_room)?;
        Ok(executor)
    }

    /// Bytes that are left for blocks.
    pub fn free_bytes(&mut self) -> Result<usize, CudaError> {
        Ok(self.device.free_bytes()?.saturating_sub(SPARE_BYTES))
    }

    /// The bytes of its matrices.
    pub fn weight_bytes(&self) -> DeviceWeightBytes {
        self.weights.bytes
    }

    /// The part of the model that it computes.
    pub fn part(&self) -> &Part {
        &self.part
    }

    /// The layout of its blocks.
    pub fn layout(&self) -> KvLayout {
        self.part.layout
    }

    /// Its device.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// Runs steps of many sizes, the largest one with all layers. Libraries and the driver thereby load code and
    /// allocate memory before the rest of the memory goes to blocks, and the device chooses how it multiplies. The
    /// steps touch no block, and later steps overwrite their results.
    fn warm_up(&mut self) -> Result<(), CudaError> {
        self.device.begin_choice();
        let DeviceExecutor { device, part, weights, buffers, scratch, inputs, limits, .. } = self;
        let smaller = std::iter::successors(Some(1), |num_rows| Some(2 * num_rows));
        let smaller = smaller.take_while(|&num_rows| num_rows < limits.num_rows);
        for num_rows in smaller.chain([limits.num_rows]) {
            let num_layers = if num_rows == limits.num_rows { weights.layers.len() } else { 1 };
            for are_decoded in [false, true] {
                let num_sequences = if are_decoded { num_rows.min(limits.num_sequences) } else { 1 };
                let num_rows = if are_decoded { num_sequences } else { num_rows };
                inputs.fill_up(num_rows, num_sequences, are_decoded);
                // SAFETY: there is room for the largest batch.
                unsafe { device.upload(buffers.inputs, inputs.bytes()) }?;
                let pass = part.pass(weights, buffers, scratch, inputs, Address::NULL);
                pass.begin(device)?;
                for layer_idx in 0..num_layers {
                    pass.store(device, layer_idx)?;
                    pass.finish(device, layer_idx)?;
                }
                pass.norm_wanted(device)?;
                pass.logits(device, 0, inputs.num_wanted)?;
            }
        }
        self.warm_up_sampling()?;
        self.device.end_choice();
        self.device.mark(0)?;
        self.device.wait_for(0)
    }

    fn check_limits(&self, batch: &Batch<'_>) -> Result<(), String> {
        let limits = &self.limits;
        let num_rows: usize = batch.sequences.iter().map(|it| it.tokens.len()).sum();
        let ends = batch.sequences.iter().map(|it| it.start_idx + it.tokens.len());
        let found = BatchLimits {
            num_rows,
            num_sequences: batch.sequences.len(),
            context_length: ends.max().unwrap_or(0),
            num_blended: limits.num_blended,
        };
        let fits = found.num_rows <= limits.num_rows
            && found.num_sequences <= limits.num_sequences
            && found.context_length <= limits.context_length;
        if fits { Ok(()) } else { Err(format!("a batch of {found:?}, expected at most {limits:?}")) }
    }

    /// Checks that the blocks of this executor's rank have not moved.
    fn check_blocks(&mut self, storage: &BlockStorage) {
        assert_eq!(*storage.layout(), self.part.whole_layout, "blocks of another layout");
        let rank = self.part.rank();
        assert_eq!(storage.num_ranks(), rank.num_ranks, "blocks divided among another number of ranks");
        let region = storage.region(rank.idx);
        assert!(region.device().is_some(), "blocks in the host's memory");
        let pool = Address(region.address());
        assert_eq!(*self.pool.get_or_insert(pool), pool, "blocks of another storage");
    }

    /// Fills the inputs with a batch on the blocks of `storage`. Returns the reason if this executor cannot run it.
    pub(super) fn take(&mut self, batch: &Batch<'_>, storage: &BlockStorage) -> Result<(), String> {
        self.check_blocks(storage);
        self.check_limits(batch)?;
        self.inputs.fill(batch, &self.shape, &mut self.tables);
        Ok(())
    }

    pub(super) fn failed(&self, error: RankError) -> ExecuteError {
        let (RankError::Missed(message) | RankError::Failed(message)) = error;
        ExecuteError { device: self.device.name().to_owned(), message }
    }

    /// Queues the copy of the inputs, and changes the block tables. Steps in flight read the tables before that.
    pub(super) fn upload(&mut self) -> Result<(), CudaError> {
        let Buffers { inputs, block_tables, .. } = self.buffers;
        // SAFETY: there is room for the largest batch and its samplings, and for the tables of all slots.
        unsafe {
            self.device.upload(inputs, self.inputs.bytes())?;
            match self.inputs.change_tables(inputs, block_tables) {
                Some(change) => self.device.launch(&change),
                None => Ok(()),
            }
        }
    }

    /// The device, and the pass of the current inputs.
    pub(super) fn pass(&mut self) -> (&mut D, ForwardPass<'_>) {
        let DeviceExecutor { device, part, weights, buffers, scratch, inputs, pool, .. } = self;
        let pool = pool.expect("a batch was taken");
        (device, part.pass(weights, buffers, scratch, inputs, pool))
    }

    /// Queues all work up to the first logits. Reports layers that become ready meanwhile.
    pub(super) fn forward(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Reported, CudaError> {
        let (device, pass) = self.pass();
        let num_layers = pass.weights.layers.len();
        let num_logits = pass.inputs.num_wanted.min(pass.buffers.logit_rows);
        if let Some(key) = pass.inputs.key {
            device.repeat(key, &mut |device| {
                pass.begin(device)?;
                for layer_idx in 0..num_layers {
                    pass.store(device, layer_idx)?;
                    pass.finish(device, layer_idx)?;
                }
                pass.norm_wanted(device)?;
                pass.logits(device, 0, num_logits)
            })?;
            return Ok(Reported { num_layers: 0, is_marked: false });
        }
        pass.begin(device)?;
        let mut next_layer = 0;
        for layer_idx in 0..num_layers {
            pass.store(device, layer_idx)?;
            device.mark(layer_idx)?;
            // Only logits need what follows the last layer's KV.
            if layer_idx + 1 < num_layers || num_logits > 0 {
                pass.finish(device, layer_idx)?;
            }
            while next_layer <= layer_idx && device.has_passed(next_layer)? {
                on_layer(next_layer);
                next_layer += 1;
            }
        }
        if num_logits > 0 {
            pass.norm_wanted(device)?;
            pass.logits(device, 0, num_logits)?;
        }
        Ok(Reported { num_layers: next_layer, is_marked: true })
    }

    /// Reports the remaining layers, each when it is ready.
    pub(super) fn report(
        &mut self,
        reported: Reported,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<(), CudaError> {
        for layer_idx in reported.num_layers..self.weights.layers.len() {
            if reported.is_marked {
                self.device.wait_for(layer_idx)?;
            }
            on_layer(layer_idx);
        }
        Ok(())
    }

    /// Runs one step. The first rank gets the logits in `self.logits[0]`.
    fn step(&mut self, num_rows: usize, on_layer: &mut dyn FnMut(usize)) -> Result<(), CudaError> {
        self.upload()?;
        let reported = self.forward(on_layer)?;
        if reported.is_marked {
            self.report(reported, on_layer)?;
        }
        let vocab_size = self.part.spec().vocab_size;
        let num_downloaded = if self.part.rank().is_first() { num_rows } else { 0 };
        let mut logits = std::mem::take(&mut self.logits[0]);
        logits.resize(num_downloaded * vocab_size, 0.0);
        let (device, pass) = self.pass();
        let (at, logit_rows) = (pass.buffers.logits, pass.buffers.logit_rows);
        let mut chunks = logits.chunks_mut(logit_rows * vocab_size);
        for first in (0..num_rows).step_by(logit_rows) {
            if first > 0 {
                pass.logits(device, first, logit_rows.min(num_rows - first))?;
            }
            if let Some(chunk) = chunks.next() {
                // SAFETY: this many logits were just computed.
                unsafe { device.download(at, bytemuck::cast_slice_mut(chunk)) }?;
            }
        }
        // A step without logits must be done too when this returns.
        device.mark(0)?;
        device.wait_for(0)?;
        self.logits[0] = logits;
        if reported.is_marked { Ok(()) } else { self.report(reported, on_layer) }
    }
}

impl<D: KernelDevice + 'static> Executor for DeviceExecutor<D> {
    fn kv_layout(&self) -> KvLayout {
        self.part.whole_layout
    }

    fn vocab_size(&self) -> usize {
        self.part.spec().vocab_size
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        // SAFETY: the caller has the same duties.
        match unsafe { self.compute(batch, storage, on_layer) } {
            Ok(num_logits) => Ok(self.logits(num_logits)),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn sampling(&mut self) -> Option<&mut dyn SamplingExecutor> {
        Some(self)
    }

    fn blending(&mut self) -> Result<&mut dyn BlendingExecutor, BlendRefusal> {
        self.part.spec().check_blending()?;
        if self.blending.is_some() { Ok(self) } else { Err(BlendRefusal::Backend) }
    }
}

/// Whether this rank failed, or another rank is gone.
pub(super) fn of_rank(error: CudaError) -> RankError {
    match error {
        CudaError::RankGone { .. } => RankError::Missed(error.to_string()),
        error => RankError::Failed(error.to_string()),
    }
}

impl<D: KernelDevice + 'static> RankExecutor for DeviceExecutor<D> {
    const MEETS_FOR_LAYERS: bool = false;

    fn device(&self) -> &str {
        self.device.name()
    }

    fn kv_layout(&self) -> KvLayout {
        self.part.whole_layout
    }

    fn vocab_size(&self) -> usize {
        self.part.spec().vocab_size
    }

    fn attach_thread(&mut self) -> Result<(), ExecuteError> {
        Ok(())
    }

    unsafe fn compute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<usize, RankError> {
        assert!(self.launched.is_empty(), "a step is in flight");
        self.take(batch, storage).map_err(RankError::Failed)?;
        let num_rows = batch.sequences.iter().map(|it| it.num_logits).sum();
        self.step(num_rows, on_layer).map_err(of_rank)?;
        Ok(self.logits[0].len())
    }

    fn logits(&self, num_logits: usize) -> &[f32] {
        &self.logits[0][..num_logits]
    }

    fn sampling(&mut self) -> Option<&mut dyn SamplingRank> {
        Some(self)
    }

    fn leave(&mut self) {
        self.device.leave_ranks();
    }
}
