//! Where each worker computes: on processors of its own, or on GPUs that as few workers as possible share.

use baton_command::EngineArgs;
use baton_model::CpuListError;
use baton_worker::{Device, ThreadPinning};

/// The processors or the GPU of a worker.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) cpus: ThreadPinning,
    pub(super) device: Device,
    /// Its share of the GPU's memory that weights leave free.
    pub(super) gpu_memory_utilization: f64,
}

impl Place {
    /// The settings of its worker, without the processors.
    pub(super) fn engine(&self, engine: &EngineArgs) -> EngineArgs {
        let Place { device, gpu_memory_utilization, .. } = *self;
        EngineArgs { device, gpu_memory_utilization, ..engine.clone() }
    }
}

/// One place for each worker. The GPUs from `--device` up to `num_gpus` are taken in turn, one for each rank of a worker.
/// Workers on the same GPU divide its memory.
///
/// # Errors
/// When there are too few processors.
pub(super) fn divide(
    engine: &EngineArgs,
    num_workers: usize,
    num_gpus: usize,
) -> Result<Vec<Place>, CpuListError> {
    let cpus = divide_cpus(engine, num_workers)?;
    let num_ranks = engine.tensor_parallel;
    let num_places = engine.device.ordinal().map(|first| {
        let num_gpus = num_gpus.saturating_sub(first as usize);
        (first, (num_gpus / num_ranks).clamp(1, num_workers.max(1)))
    });
    let place = |(idx, cpus)| {
        let Some((first, num_places)) = num_places else {
            let EngineArgs { device, gpu_memory_utilization, .. } = *engine;
            return Place { cpus, device, gpu_memory_utilization };
        };
        let nth: usize = idx % num_places;
        let num_sharing = (num_workers - nth).div_ceil(num_places);
        Place {
            cpus,
            device: Device::Cuda(first + (nth * num_ranks) as u32),
            gpu_memory_utilization: engine.gpu_memory_utilization / num_sharing as f64,
        }
    };
    Ok(cpus.into_iter().enumerate().map(place).collect())
}

/// The processors of each worker's threads. Threads of two workers on one processor would wait for each other.
fn divide_cpus(engine: &EngineArgs, num_workers: usize) -> Result<Vec<ThreadPinning>, CpuListError> {
    let Some(cpus) = engine.pin_threads.cpus(None)? else {
        return Ok(vec![ThreadPinning::None; num_workers]);
    };
    cpus.check()?;
    let parts = cpus.divide(num_workers)?.into_iter().map(|part| match engine.threads {
        Some(num_threads) => part.first(num_threads),
        None => Ok(part),
    });
    parts.map(|part| part.map(ThreadPinning::Cpus)).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use baton_model::CpuList;

    use crate::args::{Cli, Command};

    fn divide(flags: &str, num_workers: usize, num_gpus: usize) -> Result<Vec<Place>, String> {
        let cli = Cli::parse_from(format!("baton up {flags}").split_whitespace());
        let Command::Up(args) = cli.command else { panic!("not up") };
        super::divide(&args.engine, num_workers, num_gpus).map_err(|error| error.to_string())
    }

    #[test]
    fn workers_share_no_processor() {
        let divide = |flags: &str, num_workers| {
            let places = divide(flags, num_workers, 0)?;
            let parts: Vec<_> = places.iter().map(|place| place.cpus.to_string()).collect();
            Ok::<_, String>(parts.join(" "))
        };
        let allowed = CpuList::allowed().unwrap();
        assert_eq!(divide("", 3).unwrap(), "none none none");
        assert_eq!(divide("--pin-threads auto", 1).unwrap(), allowed.to_string());
        let first = allowed.first(1).unwrap();
        assert_eq!(divide("--pin-threads auto --threads 1", 1).unwrap(), first.to_string());
        let error = divide(&format!("--pin-threads {first}"), 2).unwrap_err();
        assert_eq!(error, format!("2 CPUs are needed, and there are 1: {first}"));
        let error = divide("--pin-threads 8191", 1).unwrap_err();
        assert!(error.contains("no CPU 8191"), "{error}");
    }

    #[test]
    fn workers_share_gpus_only_where_there_are_too_few() {
        let divide = |flags: &str, num_workers, num_gpus| {
            let places = divide(&format!("--gpu-memory-utilization 0.8 {flags}"), num_workers, num_gpus);
            let text = |place: Place| format!("{} {}", place.device, place.gpu_memory_utilization);
            places.unwrap().into_iter().map(text).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(divide("--device cpu", 2, 8), "cpu 0.8, cpu 0.8");
        assert_eq!(divide("--device cuda:0", 2, 8), "cuda:0 0.8, cuda:1 0.8");
        assert_eq!(divide("--device cuda:2", 2, 3), "cuda:2 0.4, cuda:2 0.4");
        assert_eq!(divide("--device cuda:0", 3, 2), "cuda:0 0.4, cuda:1 0.8, cuda:0 0.4");
        assert_eq!(divide("--device cuda:1 --tensor-parallel 2", 2, 5), "cuda:1 0.8, cuda:3 0.8");
        // The worker reports that there are too few.
        assert_eq!(divide("--device cuda:1 --tensor-parallel 2", 2, 2), "cuda:1 0.4, cuda:1 0.4");
    }
}
