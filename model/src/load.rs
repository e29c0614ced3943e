//! Loading a model: configuration, weights, and what identifies them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_kv_cache::{KvDtype, KvFormat, KvLayout};

use crate::cpu::{CpuExecutor, ThreadPool, bf16_is_faster, multiplies_bf16};
use crate::decoder::{DecoderWeights, is_redundant, take_weights};
use crate::packed::{Packer, Packing, WeightCache};
use crate::weights::Checkpoint;
use crate::{Activations, Backend, DecoderShard, LoadError, ModelConfig, Quantisation, Rank};

/// How a model is to be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Type of KV; that of the weights when `None`, as they are computed with.
    pub kv_dtype: Option<KvDtype>,
    /// Tokens in a block.
    pub block_size: usize,
    /// Threads of the executor; one per processor when `None`.
    pub threads: Option<usize>,
    /// How activations enter products.
    pub activations: Activations,
    /// Weights are rounded to integers.
    pub quantise: Option<Quantisation>,
    /// Directory for packed weights, which processes of this host share; `None`: each keeps its own.
    pub weight_cache: Option<PathBuf>,
    /// What will compute.
    pub backend: Backend,
    /// Whose part of the model is loaded, where several ranks compute it together.
    pub rank: Rank,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            kv_dtype: None,
            block_size: 16,
            threads: None,
            activations: Activations::Auto,
            quantise: None,
            weight_cache: None,
            backend: Backend::Cpu,
            rank: Rank::ONLY,
        }
    }
}

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of weights in memory.
    pub bytes_done: u64,
    /// Bytes of all weights that are multiplied.
    pub bytes_total: u64,
}

/// A model, or one rank's part of it, ready to compute. Clones share the weights.
#[derive(Clone, Debug)]
pub struct LoadedModel {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: ModelConfig,
    shard: DecoderShard,
    weights: DecoderWeights,
    layout: KvLayout,
    bf16_pairs: bool,
    rounds_activations: bool,
    revision: String,
    threads: usize,
    backend: Backend,
    weight_bytes: u64,
    num_parameters: u64,
}

impl LoadedModel {
    /// What the model says it is.
    pub fn config(&self) -> &ModelConfig {
        &self.inner.config
    }

    /// What of it was loaded.
    pub fn shard(&self) -> &DecoderShard {
        &self.inner.shard
    }

    /// How KV lies in blocks: that of the whole model, whatever was loaded.
    pub fn kv_layout(&self) -> KvLayout {
        self.inner.layout
    }

    /// How it lies in blocks of this rank's own: that of its kv heads.
    pub(crate) fn kv_layout_of_rank(&self) -> KvLayout {
        KvLayout { num_kv_heads: self.inner.shard.kv_heads().len(), ..self.inner.layout }
    }

    /// The fingerprint of KV that this model computes. Ranks that share one memory divide it among them, not the KV: the
    /// fingerprint is that of the whole.
    pub fn kv_format(&self) -> KvFormat {
        KvFormat::new(self.inner.revision.clone(), &self.inner.layout, self.inner.config.decoder.rope_text())
    }

    /// Identity of the weights: a hash of the configuration, of the weight files' headers and sizes, and of the rounding.
    pub fn revision(&self) -> &str {
        &self.inner.revision
    }

    /// Numbers in the weights that the decoder uses.
    pub fn num_parameters(&self) -> u64 {
        self.inner.num_parameters
    }

    /// Bytes of the weight files.
    pub fn weight_bytes(&self) -> u64 {
        self.inner.weight_bytes
    }

    /// Threads that it was loaded with.
    pub fn num_threads(&self) -> usize {
        self.inner.threads
    }

    /// An executor on this machine's processors, with threads of its own, as many as the model was loaded with.
    ///
    /// # Errors
    /// When threads cannot be started.
    ///
    /// # Panics
    /// As [`cpu_executor_on`](Self::cpu_executor_on).
    pub fn cpu_executor(&self) -> std::io::Result<CpuExecutor> {
        Ok(self.cpu_executor_on(Arc::new(ThreadPool::new(self.inner.threads)?)))
    }

    /// An executor on threads that it shares with others.
    ///
    /// # Panics
    /// When it was loaded for a device, or is one of several ranks' parts: those compute together, in a
    /// [`ParallelCpuExecutor`](crate::ParallelCpuExecutor).
    pub fn cpu_executor_on(&self, pool: Arc<ThreadPool>) -> CpuExecutor {
        assert_eq!(self.inner.shard.rank(), Rank::ONLY, "a part of a model does not compute alone");
        CpuExecutor::new(self.clone(), pool)
    }

    /// # Panics
    /// When they are not all the parts of one model, in order.
    pub(crate) fn check_ranks<'a>(ranks: impl ExactSizeIterator<Item = &'a LoadedModel> + Clone) {
        let found: Vec<Rank> = ranks.clone().map(|model| model.shard().rank()).collect();
        assert_eq!(found, Rank::all(ranks.len()).collect::<Vec<_>>(), "all the parts, in order");
        let identity = |model: &LoadedModel| (model.revision().to_owned(), model.kv_layout());
        let mut identities = ranks.map(identity);
        let first = identities.next();
        assert!(identities.all(|other| Some(other) == first), "parts of one model");
    }

    /// Whether what is stored in bf16 is multiplied in pairs, with activations in bf16.
    pub(crate) fn bf16_pairs(&self) -> bool {
        self.inner.bf16_pairs
    }

    /// Whether a device may round activations to eight bits, where weights are in fp8.
    pub(crate) fn rounds_activations(&self) -> bool {
        self.inner.rounds_activations
    }

    pub(crate) fn backend(&self) -> Backend {
        self.inner.backend
    }

    pub(crate) fn weights(&self) -> &DecoderWeights {
        &self.inner.weights
    }
}

/// Loads `model`, a Hugging Face directory or a GGUF file.
///
/// `progress` is called now and then while the weights are read, the first time with zero bytes done.
///
/// # Errors
/// When something is missing, broken or not supported: one sentence that says what.
pub fn load(
    model: &Path,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, LoadError> {
    load_packed(model, options, packing(options)?, progress)
}

fn load_packed(
    model: &Path,
    options: &LoadOptions,
    packing: Packing,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, LoadError> {
    if !(1..=4096).contains(&options.block_size) {
        let (option, found) = ("block_size", options.block_size);
        return Err(LoadError::Option { option, found, expected: "1 to 4096 tokens" });
    }
    let threads =
        options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    if !(1..=1024).contains(&threads) {
        return Err(LoadError::Option { option: "threads", found: threads, expected: "1 to 1024" });
    }
    let config = ModelConfig::load(model)?;
    let spec = &config.decoder;
    let shard = DecoderShard::new(spec, options.rank)?;
    let mut checkpoint = Checkpoint::open(model, &config)?;
    let bf16_pairs = packing.bf16_pairs;
    let mut packer = Packer::new(packing, options.rank);
    let weights = take_weights(spec, &shard, &mut checkpoint, &mut packer)?;
    checkpoint.refuse_rest(&config.architecture, |name| is_redundant(spec, name))?;
    let hasher = identity(model, &checkpoint)?;
    let revision = revision(hasher.clone(), options.quantise);
    let cache = match &options.weight_cache {
        None => None,
        Some(cache_dir) => {
            // However they are rounded, they are the same weights.
            let mut hasher = hasher;
            checkpoint.hash_files_into(&mut hasher)?;
            Some(WeightCache { dir: cache_dir, model, key: hasher.finalize() })
        }
    };
    // A device takes them when its executor is made.
    if options.backend == Backend::Cpu {
        packer.finish(cache.as_ref(), threads, progress).map_err(|source| LoadError::io(model, source))?;
        checkpoint.release_pages();
    }

    let layout = KvLayout {
        block_size: options.block_size,
        num_layers: spec.layers.len(),
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        dtype: options.kv_dtype.unwrap_or(match options.backend {
            Backend::Cpu => weights.kv_dtype,
            Backend::Cuda => KvDtype::Bf16,
        }),
    };
    Ok(LoadedModel {
        inner: Arc::new(Inner {
            revision,
            weight_bytes: checkpoint.size_bytes(),
            num_parameters: checkpoint.num_parameters(),
            shard,
            weights,
            layout,
            bf16_pairs,
            rounds_activations: options.activations == Activations::Auto,
            threads,
            backend: options.backend,
            config,
        }),
    })
}

/// Loads the parts of so many ranks, to compute together in this process. `options` are theirs, but for the rank.
///
/// # Errors
/// As [`load`], and when the model cannot be divided so.
pub fn load_ranks(
    model: &Path,
    num_ranks: usize,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Vec<LoadedModel>, LoadError> {
    // What is faster is measured once, so that all compute alike.
    let packing = packing(options)?;
    let ranks = Rank::all(num_ranks)
        .map(|rank| load_packed(model, &LoadOptions { rank, ..options.clone() }, packing, progress));
    ranks.collect()
}

fn packing(options: &LoadOptions) -> Result<Packing, LoadError> {
    if options.backend == Backend::Cuda {
        if options.activations == Activations::F32 {
            return Err(LoadError::NotOnDevice { what: "activations in f32" });
        }
        let quantise = options.quantise.map(Quantisation::format);
        return Ok(Packing { quantise, is_for_device: true, ..Packing::default() });
    }
    let bf16_pairs = match options.activations {
        Activations::F32 => false,
        Activations::Bf16 if !multiplies_bf16() => return Err(LoadError::NoBf16),
        Activations::Bf16 => true,
        Activations::Auto => bf16_is_faster(),
    };
    Ok(Packing {
        bf16_pairs,
        widen: options.activations == Activations::F32,
        quantise: options.quantise.map(Quantisation::format),
        is_for_device: false,
    })
}

/// A hash of what the files say: the configuration, and the weight files' headers and sizes.
fn identity(model: &Path, checkpoint: &Checkpoint) -> Result<blake3::Hasher, LoadError> {
    let mut hasher = blake3::Hasher::new();
    // The header of a GGUF file is its configuration, too.
    if model.is_dir() {
        let path = model.join("config.json");
        let config = std::fs::read(&path).map_err(|source| LoadError::io(&path, source))?;
        hasher.update(&(config.len() as u64).to_le_bytes());
        hasher.update(&config);
    }
    checkpoint.hash_into(&mut hasher);
    Ok(hasher)
}

/// Identity of the weights as they are computed with.
fn revision(mut hasher: blake3::Hasher, quantise: Option<Quantisation>) -> String {
    // Rounded weights are another model: its KV is not mixed with that of the one it was made of.
    if let Some(quantisation) = quantise {
        hasher.update(quantisation.to_string().as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}
