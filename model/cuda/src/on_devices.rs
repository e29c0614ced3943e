//! A model on NVIDIA devices: on one device, or on several with a rank each.

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

/// A model on one NVIDIA device, or on several devices that are connected by NCCL, with a rank on each. Activations
/// are bf16. Several devices have not run yet; emulators have run the same pass with the same kernels, connected in
/// host memory.
///
/// The result of a row depends on its sequence only, with one exception: cuBLASLt may add in a different order for a
/// different number of rows, unless the model was loaded with `is_deterministic`. Logits can therefore differ in their
/// last bits with the rest of the batch and with the chunks of a prompt. The same batch gives the same bits. Several devices round their sums to bf16 at another point
/// than one device does; their logits differ in the last bits too.
pub struct ModelOnDevices {
    /// Runs the steps.
    pub executor: Box<dyn Executor>,
    /// Bytes left for blocks after the weights and the memory of the largest batch. With several devices: the
    /// smallest of their values. The blocks of a rank hold its own kv heads.
    pub free_bytes: usize,
    /// Bytes of the matrices of all ranks together.
    pub weight_bytes: DeviceWeightBytes,
}

impl ModelOnDevices {
    /// Starts the model. Rank `i` runs on device `ordinals[i]`. Batches stay within `limits`. Kernels come from
    /// `code`. Several ranks need NCCL's library: `nccl` is the file or its folder, and without it the system's
    /// loader finds it. `progress` reports the upload of the first rank's weights.
    ///
    /// # Errors
    /// When a device or a library is missing, there is too little memory, the devices cannot connect, or there are no
    /// kernels for the model's shape.
    ///
    /// # Panics
    /// When the ranks are not all parts of one model in order, or the number of devices differs.
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
        // One device after the other: the first one fills the cache of compiled kernels for the rest.
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
