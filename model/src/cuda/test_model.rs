//! Whole models on what tests run on, the emulated device or another one: for tests of this crate, and of those that use
//! executors.

use std::io;

use baton_kv_cache::{BlockStorage, DeviceMemory, KvLayout};

use super::device::{Device, Fp8Products};
use super::emulator::Threads;
use super::executor::{DeviceExecutor, check_shape, sources};
use super::inputs::BatchLimits;
use super::kernel::Address;
use super::start::StartError;
use super::test_device::TestDevice;
use crate::{Batch, ExecuteError, Executor, LoadedModel};

/// What the emulated device has: enough.
const MEMORY_BYTES: usize = 64 << 20;

/// Memory that nobody reaches but the executor.
#[derive(Debug)]
struct Pool(Address);

// SAFETY: the device frees it with everything else.
unsafe impl DeviceMemory for Pool {
    fn device(&self) -> u32 {
        0
    }

    fn address(&self) -> Option<u64> {
        Some(self.0.0)
    }

    unsafe fn read(&self, _: usize, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    unsafe fn write(&self, _: usize, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        None
    }

    fn bind(&self) -> io::Result<()> {
        Ok(())
    }
}

/// An executor of `model` and blocks that it computes on, full of NaN: what is not written yet must not matter.
///
/// # Panics
/// When the model was loaded for processors, or does not fit.
pub fn test_model(
    model: LoadedModel,
    limits: BatchLimits,
    num_blocks: usize,
) -> (Box<dyn Executor>, BlockStorage) {
    let mut executor = on_device(model, limits, Fp8Products::None).expect("the model fits");
    let storage = blocks(&mut executor, num_blocks);
    (Box::new(executor), storage)
}

/// Multiplying E4M3 so.
pub(crate) fn on_device(
    model: LoadedModel,
    limits: BatchLimits,
    fp8_products: Fp8Products,
) -> Result<DeviceExecutor<TestDevice>, StartError> {
    check_shape(&model)?;
    let mut device = TestDevice::new(&sources(&model), MEMORY_BYTES, Threads::Shuffled);
    assert!(device.pretend_fp8(fp8_products), "not on this device");
    DeviceExecutor::new(device, model, limits, &mut |_| {})
}

pub(crate) fn blocks(executor: &mut DeviceExecutor<TestDevice>, num_blocks: usize) -> BlockStorage {
    let layout = executor.kv_layout();
    let size_bytes = BlockStorage::bytes_of(&layout, num_blocks).expect("a number of bytes");
    let pool = executor.device().allocate(size_bytes).expect("there is room");
    BlockStorage::on_device(Box::new(Pool(pool)), layout, num_blocks)
}

/// The same executor, but for drawing: its logits come to the host.
pub fn drawn_by_host(executor: Box<dyn Executor>) -> Box<dyn Executor> {
    Box::new(DrawnByHost(executor))
}

struct DrawnByHost(Box<dyn Executor>);

impl Executor for DrawnByHost {
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
}
