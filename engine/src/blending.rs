//! Blended prompts: which part of a sequence is blended, under which hashes, and from which passages.
//!
//! The head of a sequence reaches to the end of its last passage. One step computes it as a whole, and a short rest with it: passages that the
//! [`PassageStore`] does not have are computed on their own, then the executor blends all of them. From there on the
//! sequence is like any other. A passage's KV depends on its tokens alone, and the head is never cut. So the tokens of a
//! request depend neither on what the store has nor on the batch, preemption or retries (invariant 7).
//!
//! It does not know when a head is computed, or how.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use baton_kv_cache::{BlockId, BlockStorage, HashRoot};
use baton_kv_events::CacheEvent;
use baton_model_spec::{
    BlendPassage, BlendRatio, Blended, BlendedPrompt, Executor, PassageKv, Selection, SelectionOrder,
};
use baton_request::{NUM_FIRST_TOKENS, Request};

use crate::{
    events::EngineError,
    execution::{blend, compute_passage},
    passage_store::{PassageKey, PassageStore},
};

/// What an engine has blended since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlendCounts {
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
    /// Of those, the ones whose KV the store had.
    pub tokens_reused: u64,
    /// Bytes of passages in the store now.
    pub store_bytes: u64,
}

/// [`BlendCounts`] as they grow.
#[derive(Debug, Default)]
pub(crate) struct BlendCounters {
    blended: AtomicU64,
    passages_found: AtomicU64,
    passages_computed: AtomicU64,
    tokens: AtomicU64,
    tokens_computed: AtomicU64,
    tokens_reused: AtomicU64,
    store_bytes: AtomicU64,
}

/// The head of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct Head<'a> {
    pub(crate) request: &'a Request,
    /// From position 0 on, perhaps with what follows the last passage.
    pub(crate) tokens: &'a [u32],
    /// Whether a token is sampled after the last one.
    pub(crate) wants_token: bool,
    /// Of the whole sequence; none of them is shared.
    pub(crate) blocks: &'a [BlockId],
}

/// Blends heads. It owns the passages.
pub(crate) struct Blender {
    model_revision: String,
    store: PassageStore,
    counters: Arc<BlendCounters>,
}

/// The root of a request's block hashes.
pub(crate) fn hash_root(model_revision: &str, request: &Request) -> HashRoot {
    match request.blended() {
        Some(marks) => HashRoot::blended(
            model_revision,
            &request.cache_salt,
            &request.prompt[..marks.end_idx()],
            &marks.settings(),
        ),
        None => HashRoot::new(model_revision, "", &request.cache_salt),
    }
}

impl Blender {
    pub(crate) fn new(
        max_store_bytes: usize,
        model_revision: String,
        counters: Arc<BlendCounters>,
    ) -> Blender {
        Blender { model_revision, store: PassageStore::new(max_store_bytes), counters }
    }

    /// Computes the KV of a head into its blocks. Returns how many of its tokens have KV that the store had, and the logits after it, if a
    /// token is sampled there.
    pub(crate) fn blend(
        &mut self,
        executor: &mut dyn Executor,
        head: &Head<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<(usize, Vec<f32>), EngineError> {
        let marks = head.request.blended().expect("a head has passages");
        let mut kvs = Vec::with_capacity(marks.passages.len());
        let mut found: Vec<&Range<usize>> = Vec::new();
        for passage in &marks.passages {
            let (kv, is_found) = self.passage(executor, head, &head.tokens[passage.clone()], storage)?;
            kvs.push(kv);
            found.extend(is_found.then_some(passage));
        }
        let passage = |(range, kv): (&Range<usize>, _)| BlendPassage { start_idx: range.start, kv };
        let passages: Vec<BlendPassage<'_>> =
            marks.passages.iter().zip(kvs.iter().map(|kv| &**kv)).map(passage).collect();
        let ratio = marks.ratio.and_then(|ratio| BlendRatio::new(ratio).ok());
        let selection = Selection {
            layer: marks.layer as usize,
            num_first_tokens: NUM_FIRST_TOKENS,
            ratio: ratio.expect("a request's ratio was validated"),
            order: SelectionOrder::Deviation,
        };
        let Head { tokens, blocks, wants_token: wants_logits, .. } = *head;
        let prompt = BlendedPrompt { tokens, blocks, passages: &passages, selection, wants_logits };
        let Blended { computed, logits } = blend(executor, &prompt, storage, on_layer)?;
        let end = marks.end_idx();
        let num_below = |idx: usize| computed.partition_point(|&position| position < idx);
        let kept = |range: &&Range<usize>| range.len() - (num_below(range.end) - num_below(range.start));
        let num_reused = found.iter().map(kept).sum();
        count(&self.counters.blended, 1);
        count(&self.counters.tokens, end);
        count(&self.counters.tokens_computed, num_below(end));
        count(&self.counters.tokens_reused, num_reused);
        Ok((num_reused, logits.to_vec()))
    }

    /// What the store has kept and evicted since it was last asked.
    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        self.store.take_events()
    }

    /// Keeps the passages of a request no longer. Its logits were not finite, and which passage is wrong is not known.
    pub(crate) fn forget(&mut self, request: &Request) {
        for passage in request.blended().into_iter().flat_map(|marks| &marks.passages) {
            let key = self.key(request, &request.prompt[passage.clone()]);
            self.store.remove(key);
        }
        self.count_bytes();
    }

    fn key(&self, request: &Request, tokens: &[u32]) -> PassageKey {
        PassageKey::new(&self.model_revision, &request.cache_salt, tokens)
    }

    fn count_bytes(&self) {
        self.counters.store_bytes.store(self.store.num_bytes() as u64, Ordering::Relaxed);
    }

    /// The KV of one passage of a head, and whether the store had it.
    fn passage(
        &mut self,
        executor: &mut dyn Executor,
        head: &Head<'_>,
        tokens: &[u32],
        storage: &BlockStorage,
    ) -> Result<(Arc<PassageKv>, bool), EngineError> {
        let key = self.key(head.request, tokens);
        if let Some(kv) = self.store.get(key) {
            count(&self.counters.passages_found, 1);
            return Ok((kv, true));
        }
        // Computed in the blocks of the head, which it fills afterwards.
        let kv = Arc::new(compute_passage(executor, tokens, head.blocks, storage)?);
        count(&self.counters.passages_computed, 1);
        self.store.insert(key, kv.clone());
        self.count_bytes();
        Ok((kv, false))
    }
}

impl BlendCounters {
    pub(crate) fn read(&self) -> BlendCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        BlendCounts {
            blended: read(&self.blended),
            passages_found: read(&self.passages_found),
            passages_computed: read(&self.passages_computed),
            tokens: read(&self.tokens),
            tokens_computed: read(&self.tokens_computed),
            tokens_reused: read(&self.tokens_reused),
            store_bytes: read(&self.store_bytes),
        }
    }
}

fn count(counter: &AtomicU64, num: usize) {
    counter.fetch_add(num as u64, Ordering::Relaxed);
}
