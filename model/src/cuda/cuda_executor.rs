//! The executor on a device of NVIDIA's.

use std::path::PathBuf;

use baton_kv_cache::{BlockStorage, KvLayout};

use super::driver::DriverDevice;
use super::executor::{DeviceExecutor, check_shape, sources};
use super::inputs::BatchLimits;
use super::start::StartError;
use super::weights::DeviceWeightBytes;
use crate::{Backend, Batch, DrawingExecutor, ExecuteError, Executor, LoadProgress, LoadedModel, Rank};

/// Computes on one of NVIDIA's devices, with activations in bf16. Not run on a GPU yet: the same pass, over the same
/// kernels, was run by an emulator.
///
/// Attention, and whatever else is done to a row, depends on the sequence alone. Products are cuBLASLt's: it may add in
/// another order for another number of rows, so that logits can differ in their last bits by what else is in the batch and
/// how a prompt is cut into chunks. The same batch gives the same bits.
pub struct CudaExecutor(DeviceExecutor<DriverDevice>);

impl CudaExecutor {
    /// Bytes of the device's memory that are left for blocks: weights and the memory of the largest batch are taken.
    ///
    /// # Errors
    /// When the device fails.
    pub fn free_bytes(&mut self) -> Result<usize, StartError> {
        Ok(self.0.free_bytes()?)
    }

    /// What its matrices are.
    pub fn weight_bytes(&self) -> DeviceWeightBytes {
        self.0.weight_bytes()
    }
}

impl LoadedModel {
    /// An executor on the `ordinal`th device, for batches within `limits`. Kernels that `kernel_cache` does not hold are
    /// compiled, and kept there. `progress` tells of weights that are copied.
    ///
    /// # Errors
    /// When the device or a library is missing, the memory does not suffice, or there are no kernels for such a model.
    ///
    /// # Panics
    /// When the model was loaded for processors, or is one of several ranks' parts: those compute together, in a
    /// [`ParallelCudaExecutor`](crate::ParallelCudaExecutor).
    pub fn cuda_executor(
        &self,
        ordinal: u32,
        limits: BatchLimits,
        kernel_cache: Option<PathBuf>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<CudaExecutor, StartError> {
        assert_eq!(self.backend(), Backend::Cuda, "weights were packed for processors");
        assert_eq!(self.shard().rank(), Rank::ONLY, "a part of a model does not compute alone");
        check_shape(self)?;
        let device = DriverDevice::open(ordinal, &sources(self), kernel_cache)?;
        DeviceExecutor::new(device, self.clone(), limits, progress).map(CudaExecutor)
    }
}

impl Executor for CudaExecutor {
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
        // SAFETY: passed on to the caller.
        unsafe { self.0.execute(batch, storage, on_layer) }
    }

    fn drawing(&mut self) -> Option<&mut dyn DrawingExecutor> {
        self.0.drawing()
    }
}
