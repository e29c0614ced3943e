//! Whole models on the emulated device or on a GPU, for tests of this crate and of users of executors.

use baton_checkpoint::DeviceModel;
use baton_cuda_kernels::device::{Fp8Products, KernelDevice};
use baton_kv_cache::{BlockStorage, DeviceMemory, DividedMemory, KvLayout};
use baton_model_cuda::error::StartError;
use baton_model_cuda::executor::{DeviceExecutor, check_shape, sources};
use baton_model_cuda::inputs::BatchLimits;
use baton_model_cuda::parallel::start_ranks;
use baton_model_cuda::pool::PoolAddress;
use baton_model_spec::{Batch, ExecuteError, Executor, ParallelExecutor, Rank, ThreadCommunicator};

use crate::emulated_device::{EmulatedDevice, Sums};
use crate::session::Threads;
use crate::test_device::TestDevice;

/// Memory of the emulated device: enough for all tests.
pub const MEMORY_BYTES: usize = 64 << 20;

/// An executor and its blocks.
pub type OnBlocks = (Box<dyn Executor>, BlockStorage);

/// An executor of `model` and its blocks. The blocks are full of NaN, so that a read of an unwritten block shows.
///
/// # Panics
/// When the model was loaded for processors, or does not fit.
pub fn test_model(model: DeviceModel, limits: BatchLimits, num_blocks: usize) -> OnBlocks {
    let executor = on_device(model, limits, Fp8Products::None).expect("the model fits");
    with_blocks(executor, num_blocks)
}

/// Like [`test_model`], with a draft model on the same device. Each model allocates its own memory, and the rest
/// becomes an equal number of blocks for both. The emulated device has `memory_bytes` bytes.
///
/// # Errors
/// When the draft model cannot start.
///
/// # Panics
/// As for [`test_model`], and when there is no room for the blocks.
pub fn test_models(
    model: DeviceModel,
    draft: DeviceModel,
    limits: BatchLimits,
    num_blocks: usize,
    memory_bytes: usize,
) -> Result<(OnBlocks, OnBlocks), StartError> {
    let mut target = on_device_of(memory_bytes, model, limits, Fp8Products::None).expect("the model fits");
    let left = target.device().free_bytes()?;
    let mut draft = on_device_of(left, draft, limits, Fp8Products::None)?;
    let block_bytes = target.kv_layout().block_bytes() + draft.kv_layout().block_bytes();
    assert!(num_blocks * block_bytes <= draft.device().free_bytes()?, "there is room for blocks");
    Ok((with_blocks(target, num_blocks), with_blocks(draft, num_blocks)))
}

fn with_blocks(mut executor: DeviceExecutor<TestDevice>, num_blocks: usize) -> OnBlocks {
    let storage = blocks(&mut executor, num_blocks);
    (Box::new(executor), storage)
}

/// Sets the E4M3 products of the device.
pub fn on_device(
    model: DeviceModel,
    limits: BatchLimits,
    fp8_products: Fp8Products,
) -> Result<DeviceExecutor<TestDevice>, StartError> {
    on_device_of(MEMORY_BYTES, model, limits, fp8_products)
}

fn on_device_of(
    memory_bytes: usize,
    model: DeviceModel,
    limits: BatchLimits,
    fp8_products: Fp8Products,
) -> Result<DeviceExecutor<TestDevice>, StartError> {
    check_shape(&model)?;
    let mut device = TestDevice::new(&sources(&model), memory_bytes, Threads::Shuffled);
    assert!(device.limit_fp8(fp8_products), "not on this device");
    DeviceExecutor::new(device, model, limits, &mut |_| {})
}

pub fn blocks(executor: &mut DeviceExecutor<TestDevice>, num_blocks: usize) -> BlockStorage {
    blocks_of(std::slice::from_mut(executor), num_blocks)
}

/// Blocks of all ranks.
pub fn blocks_of<D: KernelDevice + 'static>(
    ranks: &mut [DeviceExecutor<D>],
    num_blocks: usize,
) -> BlockStorage {
    let whole = Executor::kv_layout(&ranks[0]);
    let mut pools = ranks.iter_mut().map(|rank| -> Box<dyn DeviceMemory> {
        let size_bytes = BlockStorage::bytes_of(&rank.layout(), num_blocks).expect("a number of bytes");
        Box::new(PoolAddress(rank.device().allocate(size_bytes).expect("there is room")))
    });
    let memory: Box<dyn DeviceMemory> = match pools.len() {
        1 => pools.next().expect("one"),
        _ => Box::new(DividedMemory::new(whole, pools.collect()).expect("parts of one pool")),
    };
    BlockStorage::on_device(memory, whole, num_blocks)
}

/// An executor of several ranks, each on an emulated device of its own, and its blocks.
///
/// # Panics
/// As for [`test_model`], and when these are not all the ranks of a model.
pub fn test_model_of_ranks(ranks: Vec<DeviceModel>, limits: BatchLimits, num_blocks: usize) -> OnBlocks {
    ranks_with_blocks(emulated_ranks(ranks, limits), num_blocks)
}

/// Like [`test_model_of_ranks`], with a draft model on the first rank's device.
///
/// # Panics
/// As for [`test_model_of_ranks`].
pub fn test_models_of_ranks(
    ranks: Vec<DeviceModel>,
    draft: DeviceModel,
    limits: BatchLimits,
    num_blocks: usize,
) -> (OnBlocks, OnBlocks) {
    let mut ranks = emulated_ranks(ranks, limits);
    let left = ranks[0].device().free_bytes().expect("an emulated device");
    let draft = on_device_of(left, draft, limits, Fp8Products::None).expect("the draft model fits");
    (ranks_with_blocks(ranks, num_blocks), with_blocks(draft, num_blocks))
}

fn emulated_ranks(ranks: Vec<DeviceModel>, limits: BatchLimits) -> Vec<DeviceExecutor<EmulatedDevice>> {
    DeviceModel::check_ranks(ranks.iter());
    let ranks = start_ranks(devices(ranks, Sums::Late), limits, |_, _| Ok(()), &mut |_| {});
    ranks.expect("the parts fit")
}

fn ranks_with_blocks(mut ranks: Vec<DeviceExecutor<EmulatedDevice>>, num_blocks: usize) -> OnBlocks {
    let storage = blocks_of(&mut ranks, num_blocks);
    (Box::new(ParallelExecutor::new(ranks).expect("threads")), storage)
}

/// Devices that have joined each other, with their parts of the model.
pub fn devices(models: Vec<DeviceModel>, sums: Sums) -> Vec<(EmulatedDevice, DeviceModel)> {
    let ends = ThreadCommunicator::group(models.len());
    let joined = models.into_iter().zip(ends).map(|(model, end)| {
        let device = EmulatedDevice::new(&sources(&model), MEMORY_BYTES, Threads::Shuffled);
        (if model.shard().rank() == Rank::ONLY { device } else { device.join(end, sums) }, model)
    });
    joined.collect()
}

/// The same executor without sampling: it returns logits to the host.
pub fn sampled_by_host(executor: Box<dyn Executor>) -> Box<dyn Executor> {
    Box::new(SampledByHost(executor))
}

struct SampledByHost(Box<dyn Executor>);

impl Executor for SampledByHost {
    fn kv_layout(&self) -> KvLayout {
        self.0.kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        // SAFETY: the caller has the same duties.
        unsafe { self.0.execute(batch, storage, on_layer) }
    }
}
