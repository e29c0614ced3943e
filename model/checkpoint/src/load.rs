//! Loads a decoder: its configuration, its weights and their identity.
//!
//! It does not know a backend's layout of weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_kv_cache::{KvDtype, KvFormat, KvLayout};
use baton_model_spec::{
    Activations, DecoderShard, LoadError, ModelConfig, PrivateWeights, Quantisation, Rank,
};

use crate::checkpoint::Checkpoint;
use crate::decoder::{DecoderWeights, has_other_head, is_redundant, take_weights};
use crate::gguf;
use crate::sink::MatrixSink;

/// Options of loading a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Type of KV; `None` takes that of the weights on CPUs, and BF16 on GPUs.
    pub kv_dtype: Option<KvDtype>,
    /// Tokens in a block.
    pub block_size: usize,
    /// Threads of the executor; `None` takes one per CPU.
    pub threads: Option<usize>,
    /// Number format of activations in products.
    pub activations: Activations,
    /// On GPUs: products are slower, and the bits of a row do not depend on the other rows. On processors they never
    /// do.
    pub is_deterministic: bool,
    /// Quantises weights to integers when loading.
    pub quantise: Option<Quantisation>,
    /// Directory for packed weights, shared by the processes of this host. `None`: each process keeps its own copy.
    pub weight_cache: Option<PathBuf>,
    /// The rank whose part is loaded, if several ranks compute the model together.
    pub rank: Rank,
    /// Weights of another model in memory of this process's own, such as those of a draft model's target. All must fit together.
    pub beside: Option<PrivateWeights>,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            kv_dtype: None,
            block_size: 16,
            threads: None,
            activations: Activations::Auto,
            is_deterministic: false,
            quantise: None,
            weight_cache: None,
            rank: Rank::ONLY,
            beside: None,
        }
    }
}

/// Progress of loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of weights in memory.
    pub bytes_done: u64,
    /// Bytes of all weights that are used in products.
    pub bytes_total: u64,
}

/// A loaded model, or one rank's part of it: its description and its weights. Clones share the weights.
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
    is_deterministic: bool,
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
    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.inner.config
    }

    /// The loaded part of the model.
    pub fn shard(&self) -> &DecoderShard {
        &self.inner.shard
    }

    /// The weights, or the rank's part of them.
    pub fn weights(&self) -> &DecoderWeights<M> {
        &self.inner.weights
    }

    /// Layout of the whole model's KV in blocks, also if only a part is loaded.
    pub fn kv_layout(&self) -> KvLayout {
        self.inner.layout
    }

    /// Layout of this rank's KV in blocks of its own: only the rank's KV heads.
    pub fn kv_layout_of_rank(&self) -> KvLayout {
        KvLayout { num_kv_heads: self.inner.shard.kv_heads().len(), ..self.inner.layout }
    }

    /// Fingerprint of the KV that this model computes. It is that of the whole model: ranks that share one memory
    /// divide the work, not the KV.
    pub fn kv_format(&self) -> KvFormat {
        KvFormat::new(self.inner.revision.clone(), &self.inner.layout, self.inner.config.decoder.rope_text())
    }

    /// Identity of the weights: a hash of the configuration, of the weight files' headers and sizes, of parts of each tensor, and of the
    /// quantisation.
    pub fn revision(&self) -> &str {
        &self.inner.revision
    }

    /// The number of weights that the decoder uses.
    pub fn num_parameters(&self) -> u64 {
        self.inner.num_parameters
    }

    /// Bytes of the weight files.
    pub fn weight_bytes(&self) -> u64 {
        self.inner.weight_bytes
    }

    /// The number of threads of the executor.
    pub fn num_threads(&self) -> usize {
        self.inner.threads
    }

    /// Number format of activations in products.
    pub fn activations(&self) -> Activations {
        self.inner.activations
    }

    /// Whether the bits of a row must not depend on the other rows of a step.
    pub fn is_deterministic(&self) -> bool {
        self.inner.is_deterministic
    }

    /// Checks that these ranks are the parts of one model.
    ///
    /// # Panics
    /// When they are not all parts of one model, in order.
    pub fn check_ranks<'a>(ranks: impl ExactSizeIterator<Item = &'a LoadedDecoder<M>> + Clone)
    where
        M: 'a,
    {
        let found: Vec<Rank> = ranks.clone().map(|model| model.shard().rank()).collect();
        assert_eq!(found, Rank::all(ranks.len()).collect::<Vec<_>>(), "all ranks, in order");
        let identity = |model: &LoadedDecoder<M>| (model.revision().to_owned(), model.kv_layout());
        let mut identities = ranks.map(identity);
        let first = identities.next();
        assert!(identities.all(|other| Some(other) == first), "parts of one model");
    }
}

/// The files of a loaded model.
pub struct LoadedFiles {
    checkpoint: Checkpoint,
    identity: blake3::Hasher,
}

impl LoadedFiles {
    /// Identifies the weights, whatever their quantisation: equal keys mean equal bytes in the files.
    ///
    /// # Errors
    /// When the system does not report the files' times of modification.
    pub fn key(&self) -> Result<blake3::Hash, LoadError> {
        let mut hasher = self.identity.clone();
        self.checkpoint.hash_places_into(&mut hasher)?;
        Ok(hasher.finalize())
    }

    /// Returns the files' pages to the system: packed weights are not read again. A page that is read again is mapped
    /// in again.
    pub fn release_pages(&self) {
        self.checkpoint.release_pages();
    }
}

/// What the first rank finds in the files of a model, so that the ranks that are loaded after it need not look again.
#[derive(Debug, Default)]
pub struct SharedFindings {
    /// Whether the head is another one although the configuration ties it. Both may have to be read in full.
    has_other_head: Option<bool>,
}

/// Reads `config.json` of the directory `model`, or the metadata of the GGUF file `model`. As in [`load_decoder`], the head is
/// not tied if the directory's files have another one.
///
/// # Errors
/// When it is missing or malformed, or describes a model that the decoder cannot compute.
pub fn load_config(model: &Path) -> Result<ModelConfig, LoadError> {
    let mut config = read_config(model)?;
    // The header of a GGUF file says it. Of a directory without all of its files the configuration is believed.
    if model.is_dir()
        && config.decoder.tied_head
        && let Ok(checkpoint) = Checkpoint::open(model, &config)
    {
        config.decoder.tied_head = !has_other_head(&config.decoder, &checkpoint);
    }
    Ok(config)
}

fn read_config(model: &Path) -> Result<ModelConfig, LoadError> {
    if model.is_dir() { ModelConfig::of_directory(model) } else { gguf::load_config(model) }
}

/// Loads the weights of `model`, a Hugging Face directory or a GGUF file, and passes the matrices of products to
/// `sink`. `findings` are those of the model's ranks, empty for the first one.
///
/// # Errors
/// When a part is missing, malformed or not supported; the message names it.
pub fn load_decoder<S: MatrixSink>(
    model: &Path,
    options: &LoadOptions,
    findings: &mut SharedFindings,
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
    let mut config = read_config(model)?;
    if options.rank.is_first() && !config.unknown_rope_fields.is_empty() {
        tracing::warn!(
            path = %model.display(),
            fields = config.unknown_rope_fields.join(", "),
            "the configuration has fields of the rotary embedding that are not known: the model is computed without them"
        );
    }
    let mut checkpoint = Checkpoint::open(model, &config)?;
    let has_other_head =
        *findings.has_other_head.get_or_insert_with(|| has_other_head(&config.decoder, &checkpoint));
    if has_other_head {
        config.decoder.tied_head = false;
        if options.rank.is_first() {
            tracing::warn!(
                path = %model.display(),
                "lm_head is not the embedding, although the configuration ties them: the model is computed with this lm_head"
            );
        }
    }
    let is_as_stored = options.quantise.is_none() && options.activations != Activations::F32;
    if is_as_stored && options.rank.is_first() && !model.is_dir() {
        gguf::log_widened(model)?;
    }
    let spec = &config.decoder;
    let shard = DecoderShard::new(spec, options.rank)?;
    let mut weights = take_weights(spec, &shard, &mut checkpoint, sink)?;
    // Tools save a head that was trained, in f32, beside a model in 16 bits: KV stays that of the model.
    if let Some(embedding) = weights.embedding.as_ref().filter(|_| has_other_head) {
        weights.kv_dtype = embedding.kv_dtype();
    }
    checkpoint.refuse_rest(&config.architecture, |name| is_redundant(spec, name))?;
    let mut identity = identity(model, &checkpoint)?;
    // Only a part of each tensor is hashed, which does not show whether the head is another one.
    if has_other_head {
        identity.update(b"a head of its own");
    }
    let layout = KvLayout {
        block_size: options.block_size,
        num_layers: spec.layers.len(),
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        dtype: options.kv_dtype.unwrap_or(weights.kv_dtype),
    };
    let inner = Inner {
        revision: revision(identity.clone(), options.quantise),
        weight_bytes: checkpoint.size_bytes(),
        num_parameters: checkpoint.num_parameters(),
        shard,
        weights,
        layout,
        activations: options.activations,
        is_deterministic: options.is_deterministic,
        threads,
        config,
    };
    Ok((LoadedDecoder { inner: Arc::new(inner) }, LoadedFiles { checkpoint, identity }))
}

/// A hash of the configuration, of the weight files' headers and sizes, and of parts of each tensor.
fn identity(model: &Path, checkpoint: &Checkpoint) -> Result<blake3::Hasher, LoadError> {
    let mut hasher = blake3::Hasher::new();
    // The header of a GGUF file contains its configuration.
    if model.is_dir() {
        let path = model.join("config.json");
        let config = std::fs::read(&path).map_err(|source| LoadError::io(&path, source))?;
        hasher.update(&(config.len() as u64).to_le_bytes());
        hasher.update(&config);
    }
    checkpoint.hash_into(&mut hasher);
    Ok(hasher)
}

/// Identity of the weights in the format in which they are used.
fn revision(mut hasher: blake3::Hasher, quantise: Option<Quantisation>) -> String {
    // Quantised weights are a model of their own: its KV must not be mixed with that of the original.
    if let Some(quantisation) = quantise {
        hasher.update(quantisation.to_string().as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceSink;

    #[test]
    fn a_rank_takes_the_findings_of_the_first_one() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures/qwen2");
        let load = |findings: &mut SharedFindings| {
            load_decoder(&model, &LoadOptions::default(), findings, &mut DeviceSink::default()).map(|_| ())
        };
        let mut findings = SharedFindings::default();
        load(&mut findings).unwrap();
        assert_eq!(findings.has_other_head, Some(false));
        // Not found again: there is no such head.
        findings.has_other_head = Some(true);
        let error = load(&mut findings).unwrap_err().to_string();
        assert!(error.contains("tensor lm_head.weight is missing"), "{error}");
    }
}
