//! The flags of an engine, and the same flags for a child process.

use std::path::PathBuf;

use baton_kv_cache::KvDtype;
use baton_model::{Activations, Quantisation};
use baton_worker::{ComputeDevice, ThreadPinning};
use clap::{Args, ValueEnum};

use crate::size::{Size, at_least_one, parse_size};

/// Settings of the engine.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// Memory for the KV cache of each worker on processors, such as 512M or 4G. GPUs: see
    /// --gpu-memory-utilization.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size, env = "BATON_KV_MEMORY")]
    pub kv_memory: Size,
    /// Tokens in a KV block.
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = at_least_one, env = "BATON_BLOCK_SIZE")]
    pub block_size: usize,
    /// Type of KV elements: f32, f16, bf16, fp8 or int8. Default: that of the weights, on GPUs bf16.
    #[arg(long, value_name = "TYPE", value_parser = parse_kv_dtype, env = "BATON_KV_DTYPE")]
    pub kv_dtype: Option<KvDtype>,
    /// Sequences that run at the same time. Default: 64 on processors, 256 on a GPU.
    #[arg(long, value_name = "N", value_parser = at_least_one, env = "BATON_MAX_RUNNING")]
    pub max_running: Option<usize>,
    /// Requests that may wait in a worker. Further requests are rejected.
    #[arg(long, value_name = "N", default_value_t = 1024, env = "BATON_MAX_WAITING")]
    pub max_waiting: usize,
    /// Most tokens that one step computes. This is also the size of a prefill chunk. Default: 512 on processors, 2048 on a GPU.
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one, env = "BATON_TOKEN_BUDGET")]
    pub token_budget: Option<usize>,
    /// Target for the time between two tokens, in milliseconds. Prompts beside running requests are then
    /// computed in chunks that keep it, by the measured time of steps. Default: chunks of the token budget.
    #[arg(long, value_name = "MS", value_parser = at_least_one, env = "BATON_ITL_TARGET")]
    pub itl_target: Option<usize>,
    /// Do not keep the KV of finished prompts for later prompts with the same beginning.
    #[arg(long, env = "BATON_NO_PREFIX_CACHE")]
    pub no_prefix_cache: bool,
    /// Host memory for KV that the pool no longer holds, such as 64G. For pools on GPUs: give at least twice the pool.
    ///
    /// Blocks of finished requests are copied there, and come back before a later prompt with the same beginning is computed.
    /// On processors the pool is in host memory itself: it becomes larger by this, and copies nothing.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, env = "BATON_HOST_KV")]
    pub host_kv: Option<Size>,
    /// Directory below /dev/shm for --host-kv, shared by all workers of this machine that name it.
    ///
    /// Those of one model, KV type, block size and --host-kv have that memory together, and each uses what another one saved. It
    /// outlives them. When no worker of a kind runs, the next one of another kind frees its memory; so does removing the directory.
    #[arg(long, value_name = "DIR", requires = "host_kv", env = "BATON_HOST_KV_DIR")]
    pub host_kv_dir: Option<PathBuf>,
    /// Directory for KV that outlives this worker. Each worker needs one of its own: `baton up` adds the worker's name.
    ///
    /// Blocks of finished requests are written there, and come back after a restart, too. Needs --disk-kv-size. What is stored
    /// can be read by users who may read the directory: it is made for its owner alone.
    #[arg(long, value_name = "DIR", requires = "disk_kv_size", env = "BATON_DISK_KV")]
    pub disk_kv: Option<PathBuf>,
    /// Size of the files in --disk-kv, such as 50G. They are reserved at the start.
    #[arg(long, value_name = "SIZE", requires = "disk_kv", value_parser = parse_size, env = "BATON_DISK_KV_SIZE")]
    pub disk_kv_size: Option<Size>,
    /// Object store for KV that outlives this worker, shared by all workers that name it: s3://bucket/prefix or file:///dir.
    ///
    /// Blocks that a second request used are written there. Any worker with this model, KV type and block size gets them back
    /// when that takes less time than computing them. Needs --object-kv-size. Region, endpoint and credentials are those of the
    /// usual variables (AWS_REGION, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …); plain http needs AWS_ALLOW_HTTP=true.
    #[arg(long, value_name = "URL", requires = "object_kv_size", env = "BATON_OBJECT_KV")]
    pub object_kv: Option<String>,
    /// What each worker may keep in --object-kv, such as 500G. It deletes its own oldest objects.
    #[arg(long, value_name = "SIZE", requires = "object_kv", value_parser = parse_size, env = "BATON_OBJECT_KV_SIZE")]
    pub object_kv_size: Option<Size>,
    /// File with a key of 64 hexadecimal digits (openssl rand -hex 32), which seals KV in --disk-kv and --object-kv.
    ///
    /// Records are encrypted (AES-256-GCM) under keys of their own, derived for each tenant and cache salt. Workers that share
    /// an object store need the same key. What another key sealed is not used.
    #[arg(long, value_name = "FILE", env = "BATON_KV_KEY_FILE")]
    pub kv_key_file: Option<PathBuf>,
    /// Threads that compute. Default: one for each processor that this process may use; hyper-threads count.
    #[arg(long, value_name = "N", value_parser = at_least_one, env = "BATON_THREADS")]
    pub threads: Option<usize>,
    /// Number of ranks that compute each step together.
    ///
    /// Each rank holds its part of the weights and computes with its part of the threads. The number must divide
    /// the attention heads and the neurons. Of the number and the KV heads one must be a multiple of the other: with
    /// fewer KV heads, ranks hold replicas. Prefill and decode workers may have different numbers. On GPUs each rank
    /// has its own GPU: with --device cuda:0 and 2 ranks these are cuda:0 and cuda:1, connected by NCCL
    /// (CUDA_VISIBLE_DEVICES selects the GPUs); their KV does not travel over nccl. Not yet run on GPUs. On processors
    /// it only tries out what GPUs do: threads alone are as fast.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, env = "BATON_TENSOR_PARALLEL")]
    pub tensor_parallel: usize,
    /// Pin each computing thread to a processor of its own: none, auto, or a list such as 0-3,8.
    ///
    /// auto takes the processors that this process may use (by taskset, cpuset or container). A list also
    /// sets the number of threads, unless --threads is smaller. `baton up` divides the processors among its
    /// workers.
    #[arg(long, value_name = "none|auto|CPUS", default_value = "none", env = "BATON_PIN_THREADS")]
    pub pin_threads: ThreadPinning,
    /// Quantise the weights of layers when loading: int8 or int4.
    ///
    /// A group size may follow, as in int4:64: that many weights share a scale. Takes half (int8) or a
    /// quarter (int4) of the memory of bf16, and decodes that much faster.
    #[arg(long, value_name = "TYPE", env = "BATON_QUANTIZE")]
    pub quantize: Option<Quantisation>,
    /// Precision of activations that meet weights in bf16: auto, f32 or bf16.
    ///
    /// auto takes what is faster on this processor. f32 keeps full precision, and converts the integers of
    /// quantised files to f32. bf16 needs a processor with AMX or avx512_bf16, or with bf16 of aarch64. On a GPU
    /// activations are in bf16; with auto, those of prompts are quantised to fp8 where the weights are in fp8 and
    /// the GPU multiplies fp8.
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = parse_activations, env = "BATON_ACTIVATIONS")]
    pub activations: Activations,
    /// On a GPU: products whose last bits do not depend on the other requests of a step.
    ///
    /// Without it cuBLASLt takes the fastest algorithm for each number of rows, and algorithms add in different orders.
    /// Prompts of quantised weights become several times slower. On processors products are always so.
    #[arg(long, env = "BATON_DETERMINISTIC")]
    pub deterministic: bool,
    /// What computes: cpu, cuda:N for an NVIDIA GPU, or auto for the first GPU if there is one; or nothing: sim:H100.
    ///
    /// The default is cpu, which needs no libraries. With --tensor-parallel this is the device of the first rank.
    /// With sim:A100, sim:H100 or sim:H200 steps take what a roofline of --model says for so many of these GPUs (or
    /// --step-profile), and tokens are made up: to try out clusters that one does not have. Of the model only
    /// config.json and the tokenizer are read.
    #[arg(long, value_name = "auto|cpu|cuda:N|sim:GPU", default_value = "cpu", env = "BATON_DEVICE")]
    pub device: ComputeDevice,
    /// What steps take until some were measured, as `baton bench steps --json FILE` writes it.
    ///
    /// Routers plan with it. Default: a roofline of the model on the device.
    #[arg(long, value_name = "FILE", env = "BATON_STEP_PROFILE")]
    pub step_profile: Option<PathBuf>,
    /// On a GPU: the share for KV of the memory that weights and the largest step leave free.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, env = "BATON_GPU_MEMORY_UTILIZATION")]
    pub gpu_memory_utilization: f64,
    /// Directory for weights in the layout of the kernels, one copy for all processes of this host. none:
    /// each process keeps its own copy. Default: a directory in the user's cache.
    #[arg(long, value_name = "DIR", env = "BATON_WEIGHT_CACHE")]
    pub weight_cache: Option<PathBuf>,
    /// Speculative decoding: propose several tokens cheaply, and verify them in one step of the model.
    ///
    /// The answers are the same. They come faster where reading weights limits a step: with large models and
    /// few requests at a time. Decode workers do it; prefill workers ignore it.
    #[arg(long, value_enum, default_value_t = Speculate::Off, env = "BATON_SPECULATE")]
    pub speculate: Speculate,
    /// Directory or .gguf file of the draft model, for --speculate draft.
    ///
    /// It is a smaller model with the same vocabulary. The embedded model brings one. Its KV counts towards
    /// --kv-memory. On a GPU it is on the same GPU, or on the first rank's.
    #[arg(long, value_name = "DIR|FILE", env = "BATON_DRAFT_MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Most tokens that are proposed for a request in one step. Fewer are proposed when proposals are often
    /// wrong.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one, env = "BATON_MAX_DRAFT_TOKENS")]
    pub max_draft_tokens: usize,
    /// Reuse the KV of passages that requests mark, wherever they are in a prompt: off or auto.
    ///
    /// A part of each passage is computed again. How much, is measured with the first passages that come: as much as keeps
    /// an answer's first tokens near to those of a full prefill (--blend-max-kl). Answers differ from those of full prefills, a
    /// little: therefore it is off. Processors and single GPUs do it; several ranks and models with sliding windows compute in full.
    #[arg(long, value_enum, default_value_t = Blend::Off, env = "BATON_BLEND")]
    pub blend: Blend,
    /// Memory of each worker for the KV of passages.
    ///
    /// While a prompt is blended its passages may take four times as much; a prompt with more is computed in full.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size, env = "BATON_BLEND_MEMORY")]
    pub blend_memory: Size,
    /// Mean divergence of an answer's first eight tokens that blending may cost, in nats. Above it prompts are computed in full.
    #[arg(long, value_name = "NATS", default_value_t = 0.02, env = "BATON_BLEND_MAX_KL")]
    pub blend_max_kl: f64,
    /// The part of blended prompts, from 0 to 1, that is also computed in full, to compare.
    #[arg(long, value_name = "PART", default_value_t = 0.01, env = "BATON_BLEND_AUDIT")]
    pub blend_audit: f64,
}

impl EngineArgs {
    /// Sequences that run at the same time.
    pub fn max_running(&self) -> usize {
        self.max_running.unwrap_or(if self.has_gpu() { 256 } else { 64 })
    }

    /// Most tokens that one step computes. A GPU computes some hundreds in the time in which it reads the weights.
    pub fn token_budget(&self) -> usize {
        self.token_budget.unwrap_or(if self.has_gpu() { 2048 } else { 512 })
    }

    /// Bytes of the pool on processors, and of a tier of host memory below the pool.
    ///
    /// A pool on processors is in host memory already. A tier there would keep copies of its blocks, and a hit would copy them
    /// back; so the pool gets the tier's bytes, and finds the blocks where they are, unless other workers are to find them, too.
    pub fn kv_and_host_bytes(&self) -> (usize, Option<usize>) {
        match self.host_kv {
            // Without a prefix cache the worker refuses the tier.
            Some(host)
                if self.device == ComputeDevice::Cpu
                    && !self.no_prefix_cache
                    && self.host_kv_dir.is_none() =>
            {
                (self.kv_memory.0.saturating_add(host.0), None)
            }
            host => (self.kv_memory.0, host.map(|size| size.0)),
        }
    }

    /// Whether a GPU computes, or is simulated.
    pub fn has_gpu(&self) -> bool {
        self.device.ordinal().is_some() || matches!(self.device, ComputeDevice::Sim(_))
    }

    /// These settings as flags of a worker, without `--pin-threads`: `baton up` divides the processors among its workers.
    pub fn flags(&self) -> Vec<String> {
        // Every field is named, so that none is forgotten.
        let EngineArgs {
            kv_memory,
            block_size,
            kv_dtype,
            max_running,
            max_waiting,
            token_budget,
            itl_target,
            no_prefix_cache,
            host_kv,
            host_kv_dir,
            disk_kv,
            disk_kv_size,
            object_kv,
            object_kv_size,
            kv_key_file,
            threads,
            tensor_parallel,
            pin_threads: _,
            quantize,
            activations,
            deterministic,
            device,
            step_profile,
            gpu_memory_utilization,
            weight_cache,
            speculate,
            draft_model,
            max_draft_tokens,
            blend,
            blend_memory,
            blend_max_kl,
            blend_audit,
        } = self;
        let blend = blend.to_possible_value().expect("no mode is hidden");
        let speculate = speculate.to_possible_value().expect("no drafter is hidden");
        let flags = [
            Some(format!("--kv-memory={kv_memory}")),
            Some(format!("--block-size={block_size}")),
            kv_dtype.map(|dtype| format!("--kv-dtype={}", dtype.name())),
            max_running.map(|num| format!("--max-running={num}")),
            Some(format!("--max-waiting={max_waiting}")),
            token_budget.map(|tokens| format!("--token-budget={tokens}")),
            itl_target.map(|ms| format!("--itl-target={ms}")),
            no_prefix_cache.then(|| "--no-prefix-cache".to_owned()),
            host_kv.map(|size| format!("--host-kv={size}")),
            host_kv_dir.as_ref().map(|dir| format!("--host-kv-dir={}", dir.display())),
            disk_kv.as_ref().map(|dir| format!("--disk-kv={}", dir.display())),
            disk_kv_size.map(|size| format!("--disk-kv-size={size}")),
            object_kv.as_ref().map(|url| format!("--object-kv={url}")),
            object_kv_size.map(|size| format!("--object-kv-size={size}")),
            kv_key_file.as_ref().map(|file| format!("--kv-key-file={}", file.display())),
            threads.map(|threads| format!("--threads={threads}")),
            Some(format!("--tensor-parallel={tensor_parallel}")),
            quantize.map(|quantisation| format!("--quantize={quantisation}")),
            Some(format!("--activations={}", activations.name())),
            deterministic.then(|| "--deterministic".to_owned()),
            Some(format!("--device={device}")),
            step_profile.as_ref().map(|file| format!("--step-profile={}", file.display())),
            Some(format!("--gpu-memory-utilization={gpu_memory_utilization}")),
            weight_cache.as_ref().map(|dir| format!("--weight-cache={}", dir.display())),
            Some(format!("--speculate={}", speculate.get_name())),
            draft_model.as_ref().map(|dir| format!("--draft-model={}", dir.display())),
            Some(format!("--max-draft-tokens={max_draft_tokens}")),
            Some(format!("--blend={}", blend.get_name())),
            Some(format!("--blend-memory={blend_memory}")),
            Some(format!("--blend-max-kl={blend_max_kl}")),
            Some(format!("--blend-audit={blend_audit}")),
        ];
        flags.into_iter().flatten().collect()
    }
}

/// How tokens are proposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Speculate {
    /// No speculation: one token a step.
    Off,
    /// Tokens that followed the same few tokens earlier in the text. For answers that repeat their prompt.
    Ngram,
    /// Tokens of a smaller model.
    Draft,
}

/// Whether passages are blended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Blend {
    /// Prompts are computed in full.
    Off,
    /// Where it is measured to cost little.
    Auto,
}

fn parse_activations(text: &str) -> Result<Activations, String> {
    Activations::from_name(text).ok_or_else(|| "expected auto, f32 or bf16".to_owned())
}

/// Parses the type of KV elements.
///
/// # Errors
/// When there is no such type.
pub fn parse_kv_dtype(name: &str) -> Result<KvDtype, String> {
    KvDtype::from_name(name).ok_or_else(|| format!("expected one of {}", KvDtype::names()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        engine: EngineArgs,
    }

    #[test]
    fn steps_are_as_large_as_the_device_fills() {
        for (line, expected) in [
            ("--device cpu", (64, 512)),
            ("--device cuda:1", (256, 2048)),
            ("--device sim:H100", (256, 2048)),
            ("--device cuda:0 --max-running 7 --token-budget 9", (7, 9)),
            ("--device cpu --max-running 7", (7, 512)),
        ] {
            let words = ["worker"].into_iter().chain(line.split(' '));
            let engine = Line::parse_from(words).engine;
            assert_eq!((engine.max_running(), engine.token_budget()), expected, "{line}");
            let again = Line::parse_from(["worker".to_owned()].into_iter().chain(engine.flags())).engine;
            assert_eq!(
                (again.max_running, again.token_budget),
                (engine.max_running, engine.token_budget),
                "{line}"
            );
        }
    }

    #[test]
    fn on_processors_host_memory_makes_the_pool_larger() {
        for (line, expected) in [
            ("--kv-memory 1K", (1 << 10, None)),
            ("--kv-memory 1K --host-kv 2K", (3 << 10, None)),
            ("--kv-memory 1K --host-kv 2K --host-kv-dir /dev/shm/kv", (1 << 10, Some(2 << 10))),
            ("--kv-memory 1K --host-kv 2K --device sim:H100", (1 << 10, Some(2 << 10))),
            ("--kv-memory 1K --host-kv 2K --device cuda:0", (1 << 10, Some(2 << 10))),
            ("--kv-memory 1K --host-kv 2K --no-prefix-cache", (1 << 10, Some(2 << 10))),
        ] {
            let words = ["worker"].into_iter().chain(line.split(' '));
            assert_eq!(Line::parse_from(words).engine.kv_and_host_bytes(), expected, "{line}");
        }
    }
}
