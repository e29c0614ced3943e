//! Loads a model's files into an executor that an engine can run.

use std::{
    io::IsTerminal,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use baton_cluster::{Compute, Role};
use baton_cost::{GpuKind, StepLine};
use baton_engine::Drafter;
use baton_grammar::GrammarCompiler;
use baton_kv_cache::{BlockKernels, KvLayout, KvShard};
use baton_model::{
    Backend, BatchLimits, CpuList, DeviceWeightBytes, Executor, KernelCode, LoadOptions, LoadProgress,
    LoadedModel, ModelConfig, ModelOnDevices, ParallelCpuExecutor, PrivateWeights, ThreadPool,
    cuda_block_kernels, kernel_code, load_config, num_cuda_devices,
};
use baton_model_sim::{DeviceShare, SimExecutor};
use baton_tokenizer::GenerationDefaults;
use baton_worker_metrics::LoadGauges;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::oneshot;

use crate::block_device::BlockDevice;
use crate::config::{ConfigError, DrafterConfig, KvMemory, WorkerConfig};
use crate::device::ComputeDevice;
use crate::grammars;
use crate::pace::{Devices, step_prior, step_profile, unshared};

/// A loaded model.
pub struct Model {
    /// Computes steps.
    pub executor: Box<dyn Executor>,
    /// The GPU that holds its blocks; `None`: the host's memory does.
    pub block_device: Option<BlockDevice>,
    /// Blocks that a simulated device would hold; `None`: the device is real.
    pub simulated_blocks: Option<usize>,
    /// Drafts tokens for it.
    pub drafter: Option<Drafter>,
    /// Name that clients ask for.
    pub name: String,
    /// Identity of the weights.
    pub revision: String,
    /// Canonical text of the rotary embedding's parameters.
    pub rope: String,
    /// Longest sequence, prompt and output together.
    pub context_length: usize,
    /// What a step takes before any was measured; `None`: the first one tells.
    pub step_prior: Option<StepLine>,
    /// Compiles grammars for its vocabulary; `None`: requests with a grammar are refused.
    pub grammars: Option<Arc<GrammarCompiler>>,
    /// The processors that compute; `None`: others than those of this machine's other workers, as far as is known.
    pub compute: Option<Compute>,
}

impl Model {
    fn new(
        executor: Box<dyn Executor>,
        block_device: Option<BlockDevice>,
        drafter: Option<Drafter>,
        name: String,
        loaded: &LoadedModel,
        weight_bytes: u64,
        devices: Devices,
    ) -> Model {
        let format = loaded.kv_format();
        let prior = step_prior(&loaded.config().decoder, weight_bytes, format.dtype, devices.profile);
        Model {
            executor,
            block_device,
            simulated_blocks: None,
            drafter,
            name,
            revision: format.model_revision,
            rope: format.rope,
            context_length: loaded.config().context_length,
            step_prior: prior,
            grammars: None,
            compute: devices.compute,
        }
    }

    /// Bytes of KV that a draft model keeps beside each block.
    pub(crate) fn draft_block_bytes(&self) -> usize {
        match &self.drafter {
            Some(Drafter::Model { executor, .. }) => executor.kv_layout().block_bytes(),
            Some(Drafter::Ngram) | None => 0,
        }
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Loads the model of `config` and shows the progress, also in `gauges`.
///
/// It loads on a thread of its own, so that a process that is told to end does not wait for it.
pub(crate) async fn load(config: &WorkerConfig, gauges: LoadGauges) -> anyhow::Result<Model> {
    let profile = config.step_profile.as_deref().map(step_profile).transpose()?;
    let (config, (done, loaded)) = (config.clone(), oneshot::channel());
    std::thread::Builder::new().name("model-load".into()).spawn(move || {
        // A caller that left needs no answer.
        let loaded = load_blocking(&config, &gauges).map(|model| {
            let grammars = Some(grammars::compiler(&config.model, model.executor.vocab_size()));
            Model { grammars, ..model }
        });
        let _ = done.send(loaded);
    })?;
    let mut model = loaded.await.context("loading the model broke")??;
    model.step_prior = profile.or(model.step_prior);
    Ok(model)
}

fn load_blocking(config: &WorkerConfig, gauges: &LoadGauges) -> anyhow::Result<Model> {
    let name = config.model_name();
    if let ComputeDevice::Sim(gpu) = config.device {
        return simulate(gpu, name, config);
    }
    if let Some(ordinal) = config.device.ordinal() {
        return load_on_gpu(ordinal, &name, config, gauges);
    }
    let cpus = config.pin_threads.cpus(config.threads).context("--pin-threads")?;
    let threads = cpus.as_ref().map_or(config.threads, |cpus| Some(cpus.num_cpus()));
    let num_ranks = config.tensor_parallel;
    let options = load_options(config, threads);
    let ranks = load_model(&config.model, &name, Backend::Cpu, num_ranks, &options, gauges)?;
    let loaded = ranks[0].clone();
    let weight_bytes = ranks.iter().map(LoadedModel::packed_bytes).sum();
    let pools = start_pools(ranks.len(), loaded.num_threads(), cpus.clone())?;
    let num_threads = pools.iter().map(|pool| pool.num_threads()).sum();
    let drafter = match &config.drafter {
        // The first rank's threads compute the draft while the other ranks wait.
        Some(drafter) if config.role == Role::Decode => {
            let bytes = ranks.iter().map(LoadedModel::private_bytes).sum();
            let beside = Some(PrivateWeights { path: config.model.clone(), bytes });
            Some(load_drafter(drafter, weight_bytes, &pools[0], LoadOptions { beside, ..options }, gauges)?)
        }
        _ => None,
    };
    let executor: Box<dyn Executor> = match ranks.len() {
        1 => Box::new(loaded.cpu_executor_on(Arc::clone(&pools[0]))),
        _ => {
            let ranks = ranks.into_iter().map(LoadedModel::into_cpu).zip(pools).collect();
            Box::new(ParallelCpuExecutor::new(ranks).context("cannot start the ranks")?)
        }
    };
    let devices = Devices::processors(num_threads, cpus);
    Ok(Model::new(executor, None, drafter, name, &loaded, weight_bytes, devices))
}

/// A model of which only the configuration is read: it says what steps would take on the device, and how much KV would fit.
fn simulate(gpu: GpuKind, name: String, config: &WorkerConfig) -> anyhow::Result<Model> {
    let ModelConfig { architecture, context_length, eos_token_ids, decoder, weights, stored, dtype, .. } =
        load_config(&config.model)?;
    let held = (stored, dtype);
    let share = DeviceShare::new(&decoder, held, gpu, config.tensor_parallel, config.gpu_memory_utilisation)
        .with_context(|| format!("{} on --device {}", config.model.display(), config.device))?;
    let measured = config.step_profile.as_deref().map(step_profile).transpose()?;
    let step = measured.unwrap_or(share.step);
    // Without the tokenizer's own end: a process has many of these workers, and each would load a tokenizer for it.
    let ends = [eos_token_ids, GenerationDefaults::load(&config.model)?.eos_token_ids].concat();
    let executor = SimExecutor::new(config.block_size, decoder.vocab_size, step, share.host_seconds, ends);
    tracing::warn!(
        model = name,
        %weights,
        step_seconds = step.fixed,
        prompt_tokens_per_second = (1.0 / step.per_token) as u64,
        "nothing is computed: --device {} makes tokens up, in the time that a roofline says",
        config.device
    );
    let simulated_blocks = match config.kv {
        KvMemory::Blocks(num_blocks) => num_blocks,
        KvMemory::Bytes(_) => share.num_kv_tokens / config.block_size,
    };
    Ok(Model {
        executor: Box::new(executor),
        block_device: None,
        simulated_blocks: Some(simulated_blocks),
        drafter: None,
        name,
        revision: format!("sim:{architecture}:{:.0}", share.weight_bytes),
        rope: String::new(),
        context_length,
        step_prior: Some(step),
        grammars: None,
        compute: unshared("sim"),
    })
}

fn load_on_gpu(
    ordinal: u32,
    name: &str,
    config: &WorkerConfig,
    gauges: &LoadGauges,
) -> anyhow::Result<Model> {
    // Before files are read.
    let num_devices = num_cuda_devices().with_context(|| no_gpu(ordinal))?;
    let num_ranks = config.tensor_parallel;
    if ordinal as usize + num_ranks > num_devices {
        return Err(ConfigError::TooFewGpus { ordinal, num_ranks, num_devices }.into());
    }
    tracing::info!(num_devices, ordinal, num_ranks, "computing on GPUs");
    let options = load_options(config, config.threads);
    let ranks = load_model(&config.model, name, Backend::Cuda, num_ranks, &options, gauges)?;
    let loaded = ranks[0].clone();
    let limits = BatchLimits {
        num_rows: config.token_budget,
        num_sequences: config.max_running.min(config.token_budget),
        context_length: loaded.config().context_length,
        num_blended: config.blend.as_ref().map_or(0, |_| loaded.config().context_length),
    };
    let code = kernel_code(config.weight_cache.as_ref().map(|dir| dir.join("kernels")));
    let ordinals = BlockDevice::ordinals(ordinal, num_ranks);
    let kernels = block_kernels(&ordinals, &loaded.kv_layout(), &code).with_context(|| no_gpu(ordinal))?;
    let nccl = config.nccl.as_deref();
    let ranks = ranks.into_iter().map(LoadedModel::into_device).collect();
    let mut shown = Shown::new(gauges);
    let on_gpus = ModelOnDevices::new(ranks, &ordinals, limits, &code, nccl, &mut |it| shown.update(it));
    shown.finish();
    let ModelOnDevices { executor, free_bytes, weight_bytes } = on_gpus.with_context(|| no_gpu(ordinal))?;
    tell_weights(name, weight_bytes);
    let num_bytes = weight_bytes.total();
    let mut block_device = BlockDevice { ordinal, num_ranks, free_bytes, kernels };
    let drafter = match &config.drafter {
        Some(drafter) if config.role == Role::Decode => {
            Some(load_drafter_on_gpu(drafter, num_bytes, &mut block_device, limits, &code, &options, gauges)?)
        }
        _ => None,
    };
    let devices = Devices::gpus(ordinal, num_ranks);
    Ok(Model::new(executor, Some(block_device), drafter, name.to_owned(), &loaded, num_bytes, devices))
}

/// The kernels with which each rank's GPU gathers, scatters and hashes the blocks of its kv heads.
fn block_kernels(
    ordinals: &[u32],
    layout: &KvLayout,
    code: &KernelCode,
) -> anyhow::Result<Vec<Box<dyn BlockKernels>>> {
    let of_rank = |(rank, &ordinal)| {
        let shard = KvShard::new(layout, ordinals.len(), rank)?;
        Ok(cuda_block_kernels(ordinal, shard.layout(), code)?)
    };
    ordinals.iter().enumerate().map(of_rank).collect()
}

fn no_gpu(ordinal: u32) -> String {
    format!("cannot compute on --device cuda:{ordinal}; --device cpu computes on processors")
}

fn tell_weights(model: &str, bytes: DeviceWeightBytes) {
    let DeviceWeightBytes { bf16, fp8, int8, int4, widened } = bytes;
    tracing::info!(model, bf16, fp8, int8, int4, "bytes of weights on GPUs, by what they are");
    if widened > 0 {
        tracing::warn!(
            model,
            bytes = widened,
            "weights are in bf16 on GPUs that files hold in fewer bits: no kernel takes rows or groups like theirs"
        );
    }
}

/// A draft model is loaded onto the GPU of its target, or onto the first one. Its weights and its largest step take their
/// memory before the blocks do.
fn load_drafter_on_gpu(
    drafter: &DrafterConfig,
    target_bytes: u64,
    device: &mut BlockDevice,
    limits: BatchLimits,
    code: &KernelCode,
    options: &LoadOptions,
    gauges: &LoadGauges,
) -> anyhow::Result<Drafter> {
    let DrafterConfig::Model(dir) = drafter else { return Ok(Drafter::Ngram) };
    let limits = BatchLimits { num_blended: 0, ..limits };
    let (draft, name) = load_draft_model(dir, Backend::Cuda, options, gauges)?;
    let mut shown = Shown::new(gauges);
    let mut progress = |progress| shown.update(progress);
    let on_gpu =
        ModelOnDevices::new(vec![draft.into_device()], &[device.ordinal], limits, code, None, &mut progress);
    shown.finish();
    let on_gpu = on_gpu.with_context(|| no_room(dir, device.ordinal))?;
    let ModelOnDevices { executor, free_bytes, weight_bytes } = on_gpu;
    tell_weights(&name, weight_bytes);
    let cost = draft_cost(weight_bytes.total(), target_bytes, device.num_ranks);
    device.free_bytes = device.free_bytes.min(free_bytes);
    Ok(Drafter::Model { executor, storage: None, cost })
}

fn no_room(dir: &Path, ordinal: u32) -> String {
    format!(
        "cannot compute draft model {} beside the model on --device cuda:{ordinal}; take a smaller one with --draft-model, \
         or --speculate ngram",
        dir.display()
    )
}

/// Threads for each rank, of `num_threads` in all, or one for each processor. A rank has at least one.
fn start_pools(
    num_ranks: usize,
    num_threads: usize,
    cpus: Option<CpuList>,
) -> anyhow::Result<Vec<Arc<ThreadPool>>> {
    let pools: Vec<ThreadPool> = match cpus {
        Some(cpus) => {
            tracing::info!(%cpus, "threads are pinned");
            let parts = cpus.divide(num_ranks).context("--pin-threads with --tensor-parallel")?;
            let pools = parts.into_iter().map(ThreadPool::pinned);
            pools.collect::<Result<_, _>>().context("--pin-threads")?
        }
        None => {
            let num_of = |rank| num_threads / num_ranks + usize::from(rank < num_threads % num_ranks);
            let pools = (0..num_ranks).map(|rank| ThreadPool::new(num_of(rank).max(1)));
            pools.collect::<Result<_, _>>().context("cannot start the threads that compute")?
        }
    };
    Ok(pools.into_iter().map(Arc::new).collect())
}

fn load_options(config: &WorkerConfig, threads: Option<usize>) -> LoadOptions {
    LoadOptions {
        kv_dtype: config.kv_dtype,
        block_size: config.block_size,
        threads,
        quantise: config.quantise,
        activations: config.activations,
        is_deterministic: config.is_deterministic,
        weight_cache: config.weight_cache.clone(),
        ..LoadOptions::default()
    }
}

/// The shards of so many ranks.
fn load_model(
    path: &Path,
    name: &str,
    backend: Backend,
    num_ranks: usize,
    options: &LoadOptions,
    gauges: &LoadGauges,
) -> anyhow::Result<Vec<LoadedModel>> {
    let started = Instant::now();
    let mut shown = Shown::new(gauges);
    let progress = &mut |progress| shown.update(progress);
    let ranks = baton_model::load_ranks(path, backend, num_ranks, options, progress)?;
    shown.finish();
    let loaded = &ranks[0];
    tracing::info!(
        model = name,
        architecture = loaded.config().architecture,
        weight_bytes = loaded.weight_bytes(),
        num_ranks,
        elapsed = ?started.elapsed(),
        "model loaded"
    );
    Ok(ranks)
}

fn load_drafter(
    drafter: &DrafterConfig,
    target_bytes: u64,
    pool: &Arc<ThreadPool>,
    options: LoadOptions,
    gauges: &LoadGauges,
) -> anyhow::Result<Drafter> {
    let DrafterConfig::Model(dir) = drafter else { return Ok(Drafter::Ngram) };
    let options = LoadOptions { threads: Some(pool.num_threads()), ..options };
    let (draft, _) = load_draft_model(dir, Backend::Cpu, &options, gauges)?;
    // Both models compute in turns, on the engine's thread.
    let executor = Box::new(draft.cpu_executor_on(Arc::clone(pool)));
    // All ranks share the memory.
    let cost = draft_cost(draft.packed_bytes(), target_bytes, 1);
    Ok(Drafter::Model { executor, storage: None, cost })
}

/// A draft model and its name. It is not divided: for a small model the all-reduce costs more than it saves.
fn load_draft_model(
    dir: &Path,
    backend: Backend,
    options: &LoadOptions,
    gauges: &LoadGauges,
) -> anyhow::Result<(LoadedModel, String)> {
    let name = dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy().into_owned();
    let draft = load_model(dir, &name, backend, 1, options, gauges);
    let draft = draft.with_context(|| format!("draft model {}", dir.display()))?.swap_remove(0);
    Ok((draft, name))
}

/// The cost of a step of a draft model, in steps of the target, whose weights are in so many memories; of both the bytes of
/// weights. A step of few tokens takes as long as reading them. The guess is below 1, so that the engine drafts and measures it.
fn draft_cost(draft_bytes: u64, target_bytes: u64, num_memories: usize) -> f64 {
    (draft_bytes as f64 * num_memories as f64 / target_bytes as f64).min(0.9)
}

/// Shows progress: in the gauges, and as a bar on a terminal, else as a log line now and then.
struct Shown {
    gauges: LoadGauges,
    to_people: ShownToPeople,
}

enum ShownToPeople {
    Bar(ProgressBar),
    Lines { next: Instant },
}

const LINE_EVERY: Duration = Duration::from_secs(2);

impl Shown {
    fn new(gauges: &LoadGauges) -> Shown {
        let to_people = match std::io::stderr().is_terminal() {
            true => {
                let style = ProgressStyle::with_template(
                    "loading {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
                );
                let style = style.expect("the template is right");
                ShownToPeople::Bar(ProgressBar::new(0).with_style(style))
            }
            false => ShownToPeople::Lines { next: Instant::now() + LINE_EVERY },
        };
        Shown { gauges: gauges.clone(), to_people }
    }

    fn update(&mut self, progress: LoadProgress) {
        let LoadProgress { bytes_done, bytes_total } = progress;
        self.gauges.set(bytes_done, bytes_total);
        match &mut self.to_people {
            ShownToPeople::Bar(bar) => {
                bar.set_length(bytes_total);
                bar.set_position(bytes_done);
            }
            ShownToPeople::Lines { next } if Instant::now() >= *next => {
                *next = Instant::now() + LINE_EVERY;
                let percent = (bytes_done * 100).checked_div(bytes_total).unwrap_or(100);
                tracing::info!(bytes_done, bytes_total, "loading the model: {percent} %");
            }
            ShownToPeople::Lines { .. } => {}
        }
    }

    fn finish(self) {
        if let ShownToPeople::Bar(bar) = self.to_people {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::with;

    #[test]
    fn a_prior_counts_weights_as_they_are_held() {
        let fixed = |quantise: Option<&str>| {
            let config = with(|c| {
                c.model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/fixtures/llama").into();
                c.threads = Some(1);
                c.quantise = quantise.map(|name| name.parse().unwrap());
            });
            load_blocking(&config, &LoadGauges::default()).unwrap().step_prior.unwrap().fixed
        };
        assert!(fixed(Some("int8")) < fixed(None));
    }

    #[test]
    fn a_draft_model_without_room_says_what_to_do() {
        let said = no_room(Path::new("/models/draft"), 3);
        for part in ["/models/draft", "cuda:3", "--draft-model", "--speculate ngram"] {
            assert!(said.contains(part), "{said:?} does not say {part:?}");
        }
    }
}
