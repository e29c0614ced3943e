//! Blended prompts: which part of a sequence is blended, under which hashes, and from which passages.
//!
//! The head of a sequence reaches to the end of its last passage. One step computes it as a whole: passages that the
//! [`PassageStore`] does not have are computed on their own, then the executor blends all of them. From there on the
//! sequence is like any other. A passage's KV depends on its tokens alone, and the head is never cut. So the tokens of a
//! request depend neither on what the store has nor on the batch, preemption or retries (invariant 7).
//!
//! It does not know when a head is computed, or how.

use std::{
    iter,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use baton_kv_cache::{BlockId, BlockStorage, HashRoot};
use baton_model_spec::{
    BlendPassage, BlendRatio, BlendedPrompt, Executor, PassageKv, Selection, SelectionOrder,
};
use baton_request::{BlendMarks, Request};

use crate::{
    config::{BlendConfig, EngineConfig},
    events::EngineError,
    execution::{blend, compute_passage},
    passage_store::{PassageKey, PassageStore},
};

/// What an engine has blended since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlendCounts {
    /// Prompts with passages that were computed as ever, because the engine does not blend.
    pub refused: u64,
    /// Heads that were blended; again after a preemption.
    pub blended: u64,
    /// Their passages that the store had.
    pub passages_found: u64,
    /// Their passages that were computed.
    pub passages_computed: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Of those, the ones that were computed in all layers.
    pub tokens_computed: u64,
}

/// [`BlendCounts`] as they grow.
#[derive(Debug, Default)]
pub(crate) struct BlendCounters {
    refused: AtomicU64,
    blended: AtomicU64,
    passages_found: AtomicU64,
    passages_computed: AtomicU64,
    tokens: AtomicU64,
    tokens_computed: AtomicU64,
}

/// The head of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct Head<'a> {
    pub(crate) request: &'a Request,
    pub(crate) tokens: &'a [u32],
    /// Of the whole sequence; none of them is shared.
    pub(crate) blocks: &'a [BlockId],
}

/// Blends heads. It owns the passages.
pub(crate) struct Blender {
    config: BlendConfig,
    model_revision: String,
    store: PassageStore,
    counters: Arc<BlendCounters>,
}

/// The root of a request's block hashes.
///
/// The KV of a blended prompt is another one than that of a full prefill, and it depends on all of its head. So its root is
/// a hash of that, too: only prompts that are blended alike share its blocks.
pub(crate) fn hash_root(config: &EngineConfig, request: &Request) -> HashRoot {
    let (model, salt) = (&config.model_revision[..], &request.cache_salt[..]);
    let root = HashRoot::new(model, "", salt);
    let Some((blend, marks)) = config.blending.as_ref().zip(marks(request)) else { return root };
    let ratio = blend.ratio_of(marks).get();
    let bounds = marks.passages.iter().flat_map(|passage| [passage.start as u32, passage.end as u32]);
    let settings: Vec<u32> =
        iter::once(ratio.to_bits()).chain([blend.num_first_tokens as u32]).chain(bounds).collect();
    let head = root.hash().child(&request.prompt[..marks.end_idx()]).child(&settings);
    HashRoot::new(model, &format!("blend {head:?}"), salt)
}

/// The passages of a request, if it has any.
pub(crate) fn marks(request: &Request) -> Option<&BlendMarks> {
    request.blend.as_ref().filter(|marks| !marks.passages.is_empty())
}

impl Blender {
    pub(crate) fn new(config: BlendConfig, model_revision: String, counters: Arc<BlendCounters>) -> Blender {
        Blender { config, model_revision, store: PassageStore::new(config.max_store_bytes), counters }
    }

    /// Computes the KV of a head into its blocks.
    pub(crate) fn blend(
        &mut self,
        executor: &mut dyn Executor,
        head: &Head<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<(), EngineError> {
        let marks = marks(head.request).expect("a head has passages");
        let mut kvs = Vec::with_capacity(marks.passages.len());
        for passage in &marks.passages {
            kvs.push(self.passage(executor, head, &head.tokens[passage.clone()], storage)?);
        }
        let passage = |(range, kv): (&std::ops::Range<usize>, _)| BlendPassage { start_idx: range.start, kv };
        let passages: Vec<BlendPassage<'_>> =
            marks.passages.iter().zip(kvs.iter().map(|kv| &**kv)).map(passage).collect();
        let selection = Selection {
            num_first_tokens: self.config.num_first_tokens,
            ratio: self.config.ratio_of(marks),
            order: SelectionOrder::Deviation,
        };
        let prompt =
            BlendedPrompt { tokens: head.tokens, blocks: head.blocks, passages: &passages, selection };
        let num_computed = blend(executor, &prompt, storage, on_layer)?;
        count(&self.counters.blended, 1);
        count(&self.counters.tokens, head.tokens.len());
        count(&self.counters.tokens_computed, num_computed);
        Ok(())
    }

    /// The KV of one passage of a head.
    fn passage(
        &mut self,
        executor: &mut dyn Executor,
        head: &Head<'_>,
        tokens: &[u32],
        storage: &BlockStorage,
    ) -> Result<Arc<PassageKv>, EngineError> {
        let key = PassageKey::new(&self.model_revision, &head.request.cache_salt, tokens);
        if let Some(kv) = self.store.get(key) {
            count(&self.counters.passages_found, 1);
            return Ok(kv);
        }
        // Computed in the blocks of the head, which it fills afterwards.
        let kv = Arc::new(compute_passage(executor, tokens, head.blocks, storage)?);
        count(&self.counters.passages_computed, 1);
        self.store.insert(key, kv.clone());
        Ok(kv)
    }
}

impl BlendConfig {
    /// What a request asks for, or the default.
    fn ratio_of(&self, marks: &BlendMarks) -> BlendRatio {
        let asked = marks.ratio.map(|ratio| BlendRatio::new(ratio).expect("a request's ratio was validated"));
        asked.unwrap_or(self.ratio)
    }
}

impl BlendCounters {
    pub(crate) fn add_refused(&self) {
        count(&self.refused, 1);
    }

    pub(crate) fn read(&self) -> BlendCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        BlendCounts {
            refused: read(&self.refused),
            blended: read(&self.blended),
            passages_found: read(&self.passages_found),
            passages_computed: read(&self.passages_computed),
            tokens: read(&self.tokens),
            tokens_computed: read(&self.tokens_computed),
        }
    }
}

fn count(counter: &AtomicU64, num: usize) {
    counter.fetch_add(num as u64, Ordering::Relaxed);
}
