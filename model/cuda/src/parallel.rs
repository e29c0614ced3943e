//! Starts several devices of this host that compute one model together, with a rank on each and a thread for each.

use std::panic::resume_unwind;
use std::thread;

use baton_checkpoint::{DeviceModel, LoadProgress};
use baton_cuda::CudaError;
use baton_cuda_kernels::device::KernelDevice;
use baton_model_spec::Rank;

use crate::error::StartError;
use crate::executor::DeviceExecutor;
use crate::inputs::BatchLimits;

/// Joins the ranks and starts their executors. The ranks meet in these calls, so each runs on a thread of its own, at
/// the same time.
///
/// # Errors
/// The error of the rank that failed first. Errors of ranks that only lost another rank come last.
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
    // A rank that lost another rank is not the cause.
    failures.sort_by_key(|(_, _, source)| matches!(source, StartError::Cuda(CudaError::RankGone { .. })));
    match failures.into_iter().next() {
        None => Ok(executors),
        Some((rank, device, source)) => Err(source.of(rank, device)),
    }
}
