//! A model on NVIDIA's devices: one that computes it alone, or several with a rank each.

use std::path::Path;

use baton_checkpoint::{DeviceModel, LoadProgress};
use baton_cuda::CudaError;
use baton_cuda::nccl::Nccl;
use baton_cuda_kernels::driver::nccl::NcclGroup;
use baton_cuda_kernels::driver::{DriverDevice, OpenError};
use baton_cuda_kernels::kernel::KernelCode;
use baton_model_spec::{Executor, ParallelExecutor, Rank};

use crate::error::StartError;
use crate::executor::{DeviceExecutor, check_shape, sources};
use crate::inputs::BatchLimits;
use crate::parallel::start_ranks;
use crate::weights::DeviceWeightBytes;

/// A model on one of NVIDIA's devices, or on several by NCCL, a rank on each; with activations in bf16. Not run on a GPU
/// yet: the same pass, over the same kernels, was run by emulators, of which several meet in the host's memory.
///
/// Attention, and whatever else is done to a row, depends on the sequence alone. Products are cuBLASLt's: it may add in
/// another order for another number of rows, so that logits can differ in their last bits by what else is in the batch and
/// how a prompt is cut into chunks. The same batch gives the same bits. Sums of several devices are rounded to bf16 in
/// another place than those of one: logits differ in their last bits.
pub struct ModelOnDevices {
    /// What computes it.
    pub executor: Box<dyn Executor>,
    /// Bytes that are left for blocks, weights and the memory of the largest batch being taken; of several devices on that
    /// which has the fewest. Each rank's blocks are of its own kv heads.
    pub free_bytes: usize,
    /// What the matrices of all ranks are, together; some are on each.
    pub weight_bytes: DeviceWeightBytes,
}

impl ModelOnDevices {
    /// `ranks` in their order, each on the device of `ordinals` that has its place, for batches within `limits`. Kernels
    /// come from `code`. Several need NCCL's library: it is `nccl`, the file or its
    /// folder, or where the system's loader finds it. `progress` tells of the first rank's weights that are copied.
    ///
    /// # Errors
    /// When a device or a library is missing, the memory does not suffice, the devices do not meet, or there are no kernels
    /// for such a model.
    ///
    /// # Panics
    /// When the ranks are not all the parts of one model, in order, with a device each.
    pub fn new(
        ranks: Vec<DeviceModel>,
        ordinals: &[u32],
        limits: BatchLimits,
        code: &KernelCode,
        nccl: Option<&Path>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<ModelOnDevices, StartError> {
        DeviceModel::check_ranks(ranks.iter());
        assert_eq!(ranks.len(), ordinals.len(), "a device for each rank");
        for model in &ranks {
            check_shape(model)?;
        }
        let group = if ranks.len() > 1 { Some(NcclGroup::new(Nccl::load(nccl)?)?) } else { None };
        // One after the other: what the first compiles, the others find.
        let open = |(model, &ordinal): (DeviceModel, &u32)| {
            let device = DriverDevice::open(ordinal, &sources(&model), code.clone());
            let of_rank = |error: OpenError| {
                StartError::from(error).of(model.shard().rank(), format!("cuda:{ordinal}"))
            };
            Ok((device.map_err(of_rank)?, model))
        };
        let ranks = ranks.into_iter().zip(ordinals).map(open).collect::<Result<Vec<_>, StartError>>()?;
        let join = |device: &mut DriverDevice, rank: Rank| match &group {
            Some(group) => device.join(group, rank).inspect_err(|_| group.lose(rank)),
            None => Ok(()),
        };
        let mut executors = start_ranks(ranks, limits, join, progress)?;
        let free_bytes =
            executors.iter_mut().map(DeviceExecutor::free_bytes).collect::<Result<Vec<_>, _>>()?;
        let free_bytes = free_bytes.into_iter().min().unwrap_or(0);
        let weight_bytes = executors.iter().map(DeviceExecutor::weight_bytes).sum();
        Ok(ModelOnDevices { executor: together(executors)?, free_bytes, weight_bytes })
    }
}

fn together(mut ranks: Vec<DeviceExecutor<DriverDevice>>) -> Result<Box<dyn Executor>, CudaError> {
    if let [_] = ranks[..] {
        return Ok(Box::new(ranks.remove(0)));
    }
    match ParallelExecutor::new(ranks) {
        Ok(executor) => Ok(Box::new(executor)),
        Err(error) => Err(CudaError::Failed { call: "starting a rank's thread", why: error.to_string() }),
    }
}
