//! Several devices of this host that compute one model together: a rank on each, with a thread of its own.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use baton_cuda::CudaError;
use baton_cuda::nccl::Nccl;
use baton_kv_cache::{BlockStorage, KvLayout};

use super::device::Device;
use super::driver::DriverDevice;
use super::executor::{DeviceExecutor, check_shape, sources};
use super::inputs::BatchLimits;
use super::nccl::Group;
use super::start::StartError;
use crate::parallel::ParallelExecutor;
use crate::{
    Backend, Batch, DeviceWeightBytes, DrawingExecutor, ExecuteError, Executor, LoadProgress, LoadedModel,
    Rank,
};

/// Computes on several of NVIDIA's devices by NCCL, a rank of the model on each. Not run on GPUs yet: the same pass, over the
/// same kernels, was run by emulators that meet in the host's memory.
///
/// Sums are rounded to bf16 in another place than those of one device: logits differ in their last bits, and so they do as
/// [`CudaExecutor`](crate::CudaExecutor) says.
pub struct ParallelCudaExecutor {
    executor: ParallelExecutor<DeviceExecutor<DriverDevice>>,
    free_bytes: usize,
    weight_bytes: DeviceWeightBytes,
}

impl ParallelCudaExecutor {
    /// `ranks` in their order, each on the device of `ordinals` that has its place, for batches within `limits`. NCCL's
    /// library is `nccl`, the file or its folder, or where the system's loader finds it; the rest is as of
    /// [`LoadedModel::cuda_executor`].
    ///
    /// # Errors
    /// When a device or a library is missing, the memory does not suffice, the devices do not meet, or there are no kernels
    /// for such a model.
    ///
    /// # Panics
    /// When the ranks are not all the parts of one model, in order, with a device each, or were loaded for processors.
    pub fn new(
        ranks: Vec<LoadedModel>,
        ordinals: &[u32],
        limits: BatchLimits,
        kernel_cache: Option<PathBuf>,
        nccl: Option<&Path>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<ParallelCudaExecutor, StartError> {
        LoadedModel::check_ranks(ranks.iter());
        assert_eq!(ranks.len(), ordinals.len(), "a device for each rank");
        for model in &ranks {
            assert_eq!(model.backend(), Backend::Cuda, "weights were packed for processors");
            check_shape(model)?;
        }
        let group = Group::new(Nccl::load(nccl)?)?;
        // One after the other: what the first compiles, the others find.
        let open = |(model, &ordinal): (LoadedModel, &u32)| {
            let device = DriverDevice::open(ordinal, &sources(&model), kernel_cache.clone());
            let device = device.map_err(|source| StartError::Rank {
                rank: model.shard().rank().idx,
                device: format!("cuda:{ordinal}"),
                source: Box::new(source),
            })?;
            Ok((device, model))
        };
        let ranks = ranks.into_iter().zip(ordinals).map(open).collect::<Result<Vec<_>, StartError>>()?;
        let join = |device: &mut DriverDevice, rank: Rank| {
            device.join(&group, rank).inspect_err(|_| group.lose(rank))
        };
        let mut executors = start_ranks(ranks, limits, join, progress)?;
        let free_bytes =
            executors.iter_mut().map(DeviceExecutor::free_bytes).collect::<Result<Vec<_>, _>>()?;
        let weight_bytes = executors.iter().map(DeviceExecutor::weight_bytes).sum();
        let executor = ParallelExecutor::new(executors);
        let executor = executor.map_err(|error| CudaError::Failed {
            call: "starting a rank's thread",
            why: error.to_string(),
        })?;
        let free_bytes = free_bytes.into_iter().min().unwrap_or(0);
        Ok(ParallelCudaExecutor { executor, free_bytes, weight_bytes })
    }

    /// Bytes that are left for blocks on the device that has the fewest; each rank's blocks are of its own kv heads.
    pub fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    /// What the matrices of all ranks are, together; some are on each.
    pub fn weight_bytes(&self) -> DeviceWeightBytes {
        self.weight_bytes
    }
}

/// Has all ranks join each other and take what they need of their devices: at once, each on a thread, as they meet there.
///
/// # Errors
/// Of the rank that failed first, if others only missed it.
pub(crate) fn start_ranks<D: Device + 'static>(
    ranks: Vec<(D, LoadedModel)>,
    limits: BatchLimits,
    join: impl Fn(&mut D, Rank) -> Result<(), CudaError> + Sync,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Vec<DeviceExecutor<D>>, StartError> {
    let start = |(mut device, model): (D, LoadedModel), progress: &mut dyn FnMut(LoadProgress)| {
        let (rank, name) = (model.shard().rank(), device.name().to_owned());
        let joined = join(&mut device, rank).map_err(StartError::from);
        let started = joined.and_then(|()| DeviceExecutor::new(device, model, limits, progress));
        started.map_err(|source| (rank.idx, name, source))
    };
    let mut ranks = ranks.into_iter();
    let first = ranks.next().expect("a model has at least one part");
    let outcomes: Vec<_> = thread::scope(|scope| {
        let others: Vec<_> = ranks.map(|rank| scope.spawn(|| start(rank, &mut |_| {}))).collect();
        let first = start(first, progress);
        let others =
            others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        std::iter::once(first).chain(others).collect()
    });
    let (mut executors, mut failures) = (Vec::new(), Vec::new());
    for outcome in outcomes {
        match outcome {
            Ok(executor) => executors.push(executor),
            Err(failure) => failures.push(failure),
        }
    }
    // Who misses another rank is not who began.
    failures.sort_by_key(|(_, _, source)| matches!(source, StartError::Cuda(CudaError::RankGone { .. })));
    match failures.into_iter().next() {
        None => Ok(executors),
        Some((rank, device, source)) => Err(StartError::Rank { rank, device, source: Box::new(source) }),
    }
}

impl Executor for ParallelCudaExecutor {
    fn kv_layout(&self) -> KvLayout {
        self.executor.kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.executor.vocab_size()
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        // SAFETY: passed on to the caller.
        unsafe { self.executor.execute(batch, storage, on_layer) }
    }

    fn drawing(&mut self) -> Option<&mut dyn DrawingExecutor> {
        self.executor.drawing()
    }
}
