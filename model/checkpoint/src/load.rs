//! Loading a decoder: configuration, weights, and what identifies them.
//!
//! It does not know what a backend makes of the weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_kv_cache::{KvDtype, KvFormat, KvLayout};
use baton_model_spec::{Activations, Backend, DecoderShard, LoadError, ModelConfig, Quantisation, Rank};

use crate::checkpoint::Checkpoint;
use crate::decoder::{DecoderWeights, is_redundant, take_weights};
use crate::gguf;
use crate::sink::MatrixSink;

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
    /// Weights are quantised to integers.
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

/// A model, or one rank's part of it: what is known of it, and its weights. Clones share the weights.
#[derive(Debug)]
pub struct LoadedDecoder<M> {
    inner: Arc<Inner<M>>,
}

#[derive(Debug)]
struct Inner<M> {
    config: ModelConfig,
    shard: DecoderShard,
    weights: DecoderWeights<M>,
    layout: KvLayout,
    activations: Activations,
    revision: String,
    threads: usize,
    weight_bytes: u64,
    num_parameters: u64,
}

impl<M> Clone for LoadedDecoder<M> {
    fn clone(&self) -> Self {
        LoadedDecoder { inner: Arc::clone(&self.inner) }
    }
}

impl<M> LoadedDecoder<M> {
    /// What the model says it is.
    pub fn config(&self) -> &ModelConfig {
        &self.inner.config
    }

    /// What of it was loaded.
    pub fn shard(&self) -> &DecoderShard {
        &self.inner.shard
    }

    /// Its weights, or the rank's part of them.
    pub fn weights(&self) -> &DecoderWeights<M> {
        &self.inner.weights
    }

    /// How KV is stored in blocks: that of the whole model, whatever was loaded.
    pub fn kv_layout(&self) -> KvLayout {
        self.inner.layout
    }

    /// How it is stored in blocks of this rank's own: that of its kv heads.
    pub fn kv_layout_of_rank(&self) -> KvLayout {
        KvLayout { num_kv_heads: self.inner.shard.kv_heads().len(), ..self.inner.layout }
    }

    /// The fingerprint of KV that this model computes. Ranks that share one memory divide it among them, not the KV: the
    /// fingerprint is that of the whole.
    pub fn kv_format(&self) -> KvFormat {
        KvFormat::new(self.inner.revision.clone(), &self.inner.layout, self.inner.config.decoder.rope_text())
    }

    /// Identity of the weights: a hash of the configuration, of the weight files' headers and sizes, and of quantising.
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

    /// How activations are to enter products.
    pub fn activations(&self) -> Activations {
        self.inner.activations
    }

    /// Refuses ranks that cannot compute one model together.
    ///
    /// # Panics
    /// When they are not all the parts of one model, in order.
    pub fn check_ranks<'a>(ranks: impl ExactSizeIterator<Item = &'a LoadedDecoder<M>> + Clone)
    where
        M: 'a,
    {
        let found: Vec<Rank> = ranks.clone().map(|model| model.shard().rank()).collect();
        assert_eq!(found, Rank::all(ranks.len()).collect::<Vec<_>>(), "all the parts, in order");
        let identity = |model: &LoadedDecoder<M>| (model.revision().to_owned(), model.kv_layout());
        let mut identities = ranks.map(identity);
        let first = identities.next();
        assert!(identities.all(|other| Some(other) == first), "parts of one model");
    }
}

/// The files of a loaded model, for what is done with them once.
pub struct LoadedFiles {
    checkpoint: Checkpoint,
    identity: blake3::Hasher,
}

impl LoadedFiles {
    /// What the weights are, however they are quantised: the same key, the same bytes in the files.
    ///
    /// # Errors
    /// When the system does not say when they were written.
    pub fn key(&self) -> Result<blake3::Hash, LoadError> {
        let mut hasher = self.identity.clone();
        self.checkpoint.hash_places_into(&mut hasher)?;
        Ok(hasher.finalize())
    }

    /// Gives the files' pages back to the system: what was packed is read once. What is still looked up there comes
    /// back by itself.
    pub fn release_pages(&self) {
        self.checkpoint.release_pages();
    }
}

/// Reads `config.json` of the directory `model`, or the metadata of the GGUF file `model`.
///
/// # Errors
/// When it is missing, broken, or describes what the decoder cannot compute.
pub fn load_config(model: &Path) -> Result<ModelConfig, LoadError> {
    if model.is_dir() { ModelConfig::of_directory(model) } else { gguf::load_config(model) }
}

/// Takes the weights of `model`, a Hugging Face directory or a GGUF file, and gives `sink` what is multiplied.
///
/// # Errors
/// When something is missing, broken or not supported: one sentence that says what.
pub fn load_decoder<S: MatrixSink>(
    model: &Path,
    options: &LoadOptions,
    sink: &mut S,
) -> Result<(LoadedDecoder<S::Matrix>, LoadedFiles), LoadError> {
    if !(1..=4096).contains(&options.block_size) {
        let (option, found) = ("block_size", options.block_size);
        return Err(LoadError::Option { option, found, expected: "1 to 4096 tokens" });
    }
    let threads =
        options.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    if !(1..=1024).contains(&threads) {
        return Err(LoadError::Option { option: "threads", found: threads, expected: "1 to 1024" });
    }
    let config = load_config(model)?;
    let spec = &config.decoder;
    let shard = DecoderShard::new(spec, options.rank)?;
    let mut checkpoint = Checkpoint::open(model, &config)?;
    let weights = take_weights(spec, &shard, &mut checkpoint, sink)?;
    checkpoint.refuse_rest(&config.architecture, |name| is_redundant(spec, name))?;
    let identity = identity(model, &checkpoint)?;
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
    let inner = Inner {
        revision: revision(identity.clone(), options.quantise),
        weight_bytes: checkpoint.size_bytes(),
        num_parameters: checkpoint.num_parameters(),
        shard,
        weights,
        layout,
        activations: options.activations,
        threads,
        config,
    };
    Ok((LoadedDecoder { inner: Arc::new(inner) }, LoadedFiles { checkpoint, identity }))
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
    // Quantised weights are another model: its KV is not mixed with that of the one it was made of.
    if let Some(quantisation) = quantise {
        hasher.update(quantisation.to_string().as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}
