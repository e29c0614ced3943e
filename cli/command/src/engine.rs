//! The flags of an engine, and the same flags for a child process.

use std::path::PathBuf;

use baton_kv_cache::KvDtype;
use baton_model::{Activations, Quantisation};
use baton_worker::{Device, ThreadPinning};
use clap::{Args, ValueEnum};

use crate::size::{Size, at_least_one, parse_size};

/// The engine's sizes.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// Memory for the KV cache of each worker, such as 512M or 4G.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size, env = "BATON_KV_MEMORY")]
    pub kv_memory: Size,
    /// Tokens in a KV block.
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = at_least_one, env = "BATON_BLOCK_SIZE")]
    pub block_size: usize,
    /// Type of KV elements: f32, f16, bf16, fp8 or int8. Default: that of the weights.
    #[arg(long, value_name = "TYPE", value_parser = parse_kv_dtype, env = "BATON_KV_DTYPE")]
    pub kv_dtype: Option<KvDtype>,
    /// Sequences that run at once.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one, env = "BATON_MAX_RUNNING")]
    pub max_running: usize,
    /// Requests that may wait in a worker; more are refused.
    #[arg(long, value_name = "N", default_value_t = 1024, env = "BATON_MAX_WAITING")]
    pub max_waiting: usize,
    /// Tokens that one step computes at most: the size of a prefill chunk.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least_one, env = "BATON_TOKEN_BUDGET")]
    pub token_budget: usize,
    /// Milliseconds between two tokens to aim at: prompts that are computed beside running answers come in chunks that
    /// keep it, by what steps were measured to take. Default: chunks of the token budget.
    #[arg(long, value_name = "MS", value_parser = at_least_one, env = "BATON_ITL_TARGET")]
    pub itl_target: Option<usize>,
    /// Do not keep the KV of finished prompts for later ones that begin alike.
    #[arg(long, env = "BATON_NO_PREFIX_CACHE")]
    pub no_prefix_cache: bool,
    /// Threads that compute. Default: one per core, at most 64.
    #[arg(long, value_name = "N", value_parser = at_least_one, env = "BATON_THREADS")]
    pub threads: Option<usize>,
    /// Divide the model among so many ranks that compute each step together, each with its part of the weights and of the
    /// threads: heads, neurons and KV heads are divided, and must be divisible. Prefill and decode workers may have
    /// different numbers. On GPUs each rank has one of its own: with --device cuda:0, 2 takes cuda:0 and cuda:1, which NCCL
    /// connects (CUDA_VISIBLE_DEVICES says which GPUs these are); their KV does not travel over nccl. Not run on GPUs yet. On
    /// processors it is for trying out what devices do: threads alone compute as much.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, env = "BATON_TENSOR_PARALLEL")]
    pub tensor_parallel: usize,
    /// Keep each thread that computes to a processor of its own: "auto" takes those that this process may use (by taskset,
    /// cpuset or container), or a list such as 0-3,8. The list then also says how many threads there are, unless
    /// --threads asks for fewer. `baton up` divides the processors among its workers.
    #[arg(long, value_name = "none|auto|CPUS", default_value = "none", env = "BATON_PIN_THREADS")]
    pub pin_threads: ThreadPinning,
    /// Round the weights of layers when loading: int8 or int4, perhaps with the number of weights that share a scale,
    /// as in int4:64. Half or a quarter of the memory of bf16, and as much faster per token.
    #[arg(long, value_name = "TYPE", env = "BATON_QUANTIZE")]
    pub quantize: Option<Quantisation>,
    /// How activations meet weights in bf16: auto takes what is faster on this processor, f32 rounds nothing (and widens
    /// the integers of quantised files), bf16 needs a processor with avx512_bf16. On a GPU they are in bf16; with auto those of
    /// prompts are rounded to fp8 where weights are in fp8 and the GPU multiplies such.
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = parse_activations, env = "BATON_ACTIVATIONS")]
    pub activations: Activations,
    /// What computes: cpu, cuda:N for a GPU of NVIDIA's, or auto for the first GPU if there is one. The GPU's part has been
    /// checked by an emulator, not run on a GPU yet: so the default is cpu. With --tensor-parallel it is the first rank's.
    #[arg(long, value_name = "auto|cpu|cuda:N", default_value = "cpu", env = "BATON_DEVICE")]
    pub device: Device,
    /// Share that KV takes, on a GPU, of the memory that weights and the largest step leave; --kv-memory is for processors.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, env = "BATON_GPU_MEMORY_UTILIZATION")]
    pub gpu_memory_utilization: f64,
    /// Directory for weights in the layout of the kernels, one copy for all processes of this host; "none": each
    /// process keeps its own. Default: a directory in the user's cache.
    #[arg(long, value_name = "DIR", env = "BATON_WEIGHT_CACHE")]
    pub weight_cache: Option<PathBuf>,
    /// Propose several tokens cheaply and verify them in one step of the model: answers are the same, and can come
    /// faster where a step is bound by reading weights, as with large models and few requests at a time. Decode
    /// workers do it; prefill workers ignore it.
    #[arg(long, value_enum, default_value_t = Speculate::Off, env = "BATON_SPECULATE")]
    pub speculate: Speculate,
    /// Directory or .gguf file of the draft model, for `--speculate draft`: smaller, with the same vocabulary. The
    /// model that is part of this program brings one. Its KV counts towards `--kv-memory`.
    /// On a GPU it is on the same one, or on the first rank's.
    #[arg(long, value_name = "DIR|FILE", env = "BATON_DRAFT_MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Tokens proposed for a request in one step at most. How many it is follows from how many were right.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one, env = "BATON_MAX_DRAFT_TOKENS")]
    pub max_draft_tokens: usize,
}

impl EngineArgs {
    /// These settings as flags of a worker, without `--pin-threads`: `baton up` divides the processors among its workers.
    // Every field is named, so that none is forgotten.
    pub fn flags(&self) -> Vec<String> {
        let EngineArgs {
            kv_memory,
            block_size,
            kv_dtype,
            max_running,
            max_waiting,
            token_budget,
            itl_target,
            no_prefix_cache,
            threads,
            tensor_parallel,
            pin_threads: _,
            quantize,
            activations,
            device,
            gpu_memory_utilization,
            weight_cache,
            speculate,
            draft_model,
            max_draft_tokens,
        } = self;
        let speculate = speculate.to_possible_value().expect("no drafter is hidden");
        let flags = [
            Some(format!("--kv-memory={kv_memory}")),
            Some(format!("--block-size={block_size}")),
            kv_dtype.map(|dtype| format!("--kv-dtype={}", dtype.name())),
            Some(format!("--max-running={max_running}")),
            Some(format!("--max-waiting={max_waiting}")),
            Some(format!("--token-budget={token_budget}")),
            itl_target.map(|ms| format!("--itl-target={ms}")),
            no_prefix_cache.then(|| "--no-prefix-cache".to_owned()),
            threads.map(|threads| format!("--threads={threads}")),
            Some(format!("--tensor-parallel={tensor_parallel}")),
            quantize.map(|quantisation| format!("--quantize={quantisation}")),
            Some(format!("--activations={}", activations.name())),
            Some(format!("--device={device}")),
            Some(format!("--gpu-memory-utilization={gpu_memory_utilization}")),
            weight_cache.as_ref().map(|dir| format!("--weight-cache={}", dir.display())),
            Some(format!("--speculate={}", speculate.get_name())),
            draft_model.as_ref().map(|dir| format!("--draft-model={}", dir.display())),
            Some(format!("--max-draft-tokens={max_draft_tokens}")),
        ];
        flags.into_iter().flatten().collect()
    }
}

/// Who proposes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Speculate {
    /// Nobody: one token a step.
    Off,
    /// The text itself: what followed the same few tokens earlier. For answers that repeat their prompt.
    Ngram,
    /// A smaller model.
    Draft,
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
