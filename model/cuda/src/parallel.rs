//! Several devices of this host that compute one model together: a rank on each, with a thread of its own.

use std::panic::resume_unwind;
use std::thread;

use baton_checkpoint::{DeviceModel, LoadProgress};
use baton_cuda::CudaError;
use baton_cuda_kernels::device::KernelDevice;
use baton_model_spec::Rank;

use crate::error::StartError;
use crate::executor::DeviceExecutor;
use crate::inputs::BatchLimits;

/// Has all ranks, or one that is alone, join each other and take what they need of their devices: at once, each on a thread,
/// as they meet there.
///
/// # Errors
/// Of the rank that failed first, if others only missed it.
pub fn start_ranks<D: KernelDevice + 'static>(
    ranks: Vec<(D, DeviceModel)>,
    limits: BatchLimits,
    join: impl Fn(&mut D, Rank) -> Result<(), CudaError> + Sync,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Vec<DeviceExecutor<D>>, StartError> {
    let start = |(mut device, model): (D, DeviceModel), progress: &mut dyn FnMut(LoadProgress)| {
        let (rank, name) = (model.shard().rank(), device.name().to_owned());
        let joined = join(&mut device, rank).map_err(StartError::from);
        (rank, name, joined.and_then(|()| DeviceExecutor::new(device, model, limits, progress)))
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
    for (rank, device, started) in outcomes {
        match started {
            Ok(executor) => executors.push(executor),
            Err(source) => failures.push((rank, device, source)),
        }
    }
    // Who misses another rank is not who began.
    failures.sort_by_key(|(_, _, source)| matches!(source, StartError::Cuda(CudaError::RankGone { .. })));
    match failures.into_iter().next() {
        None => Ok(executors),
        Some((rank, device, source)) => Err(source.of(rank, device)),
    }
}
