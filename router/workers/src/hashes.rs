//! The block hashes of a sequence. A prompt is hashed once for each kind of blocks, whatever its choices, attempts and end;
//! output is hashed as it is known to be needed.
//!
//! The head and the passages of a prompt that is blended are hashed beside its blocks: engines have other roots for them, so
//! none of these hashes tells another.

use std::{
    ops::Range,
    slice,
    sync::{Arc, Mutex, PoisonError},
};

use baton_kv_cache::{BlockHash, HashRoot, KvFormat};
use baton_request::Request;
use tokio::sync::OnceCell;

/// More tokens are hashed off the async threads: these take about 50 us.
const BLOCKING_TOKENS: usize = 4096;

/// What decides the hashes of a sequence's blocks at a worker. While weights are updated, workers have two revisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockKind {
    block_size: usize,
    revision: String,
}

/// The hashes of a sequence's full blocks, for each kind of blocks. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct SequenceHashes {
    chains: Vec<(BlockKind, Chain)>,
    /// Of the passages, with their tokens, once a worker is known.
    passages: Arc<[(BlockHash, usize)]>,
}

/// The hashes of a prompt, which its choices share: each kind is hashed when it is first needed.
#[derive(Debug, Default)]
pub struct PromptHashes(Mutex<Vec<(BlockKind, OfKind)>>);

/// Set once: choices that need it meanwhile wait.
type OfKind = Arc<OnceCell<SequenceHashes>>;

#[derive(Clone, Debug)]
struct Chain {
    root: HashRoot,
    hashes: Arc<Vec<BlockHash>>,
}

impl BlockKind {
    /// The kind of blocks of this format.
    pub fn of(format: &KvFormat) -> BlockKind {
        BlockKind { block_size: format.block_size, revision: format.model_revision.clone() }
    }

    fn is_of(&self, format: &KvFormat) -> bool {
        self.block_size == format.block_size && self.revision == format.model_revision
    }
}

impl PromptHashes {
    /// Hashes what `known` lacks of a choice's tokens, for these kinds of blocks. `prompt` is its request without output.
    pub async fn extend(
        &self,
        known: Option<SequenceHashes>,
        kinds: &[BlockKind],
        prompt: &Request,
        choice: &Request,
    ) -> SequenceHashes {
        let mut hashes = known.unwrap_or_default();
        for kind in kinds.iter().map(slice::from_ref) {
            if hashes.lacks(kind) {
                let of_kind = self.of_kind(&kind[0]);
                let hash = || SequenceHashes::default().extended(kind, prompt);
                hashes.add(of_kind.get_or_init(hash).await);
            }
        }
        hashes.extended(kinds, choice).await
    }

    /// Locked for a look-up.
    fn of_kind(&self, kind: &BlockKind) -> OfKind {
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = kinds.iter().find(|(of, _)| of == kind) {
            return known.clone();
        }
        let new = OfKind::default();
        kinds.push((kind.clone(), new.clone()));
        new
    }
}

impl SequenceHashes {
    /// [`extend`](Self::extend), off the async threads when it is much.
    async fn extended(mut self, kinds: &[BlockKind], request: &Request) -> SequenceHashes {
        if self.num_unhashed(kinds, request) <= BLOCKING_TOKENS {
            self.extend(kinds, request);
            return self;
        }
        let (kinds, request) = (kinds.to_vec(), request.clone());
        let hashing = tokio::task::spawn_blocking(move || {
            self.extend(&kinds, &request);
            self
        });
        // Nothing in it panics. Without hashes nothing is found in caches.
        hashing.await.unwrap_or_default()
    }

    fn num_unhashed(&self, kinds: &[BlockKind], request: &Request) -> usize {
        let num_hashed =
            |kind: &BlockKind| self.chain(kind).map_or(0, |chain| chain.hashes.len() * kind.block_size);
        kinds.iter().map(|kind| request.num_known_tokens().saturating_sub(num_hashed(kind))).sum()
    }

    /// Hashes what is not hashed yet: blocks of a new kind, and those that output has filled.
    fn extend(&mut self, kinds: &[BlockKind], request: &Request) {
        if let (Some(marks), true) = (request.blended(), self.passages.is_empty()) {
            let mut revisions: Vec<_> = kinds.iter().map(|kind| &kind.revision).collect();
            revisions.sort_unstable();
            revisions.dedup();
            let hash = |(revision, range): (&String, &Range<usize>)| {
                let tokens = &request.prompt[range.clone()];
                (BlockHash::of_passage(revision, &request.cache_salt, tokens), tokens.len())
            };
            let of_revision = |revision| marks.passages.iter().map(move |range| (revision, range));
            self.passages = revisions.into_iter().flat_map(of_revision).map(hash).collect();
        }
        for kind in kinds {
            if self.chain(kind).is_none() {
                let chain = Chain { root: root(&kind.revision, request), hashes: Arc::default() };
                self.chains.push((kind.clone(), chain));
            }
        }
        for (kind, chain) in self.chains.iter_mut().filter(|(kind, _)| kinds.contains(kind)) {
            chain.extend(kind.block_size, request);
        }
    }

    /// Takes over the hashes of another kind.
    fn add(&mut self, of_kind: &SequenceHashes) {
        self.chains.extend_from_slice(&of_kind.chains);
        // Kinds of one revision have the same passages.
        if of_kind.passages.first().is_some_and(|passage| !self.passages.contains(passage)) {
            self.passages = [&self.passages[..], &of_kind.passages[..]].concat().into();
        }
    }

    /// Hashes the blocks that output has filled, of the kinds that are there.
    pub fn advance(&mut self, request: &Request) {
        for (kind, chain) in &mut self.chains {
            chain.extend(kind.block_size, request);
        }
    }

    /// [`advance`](Self::advance) whenever much output has come, so that little is left when a request ends or migrates. To be
    /// called after each token.
    pub fn keep_up(&mut self, request: &Request) {
        if request.output.len().is_multiple_of(BLOCKING_TOKENS) {
            self.advance(request);
        }
    }

    fn chain(&self, kind: &BlockKind) -> Option<&Chain> {
        self.chains.iter().find(|(of, _)| of == kind).map(|(_, chain)| chain)
    }

    /// Whether [`extend`](Self::extend) would hash a prompt.
    fn lacks(&self, kinds: &[BlockKind]) -> bool {
        kinds.iter().any(|kind| self.chain(kind).is_none())
    }

    /// Of blocks of this format.
    pub fn of(&self, format: &KvFormat) -> &[BlockHash] {
        self.chains.iter().find(|(kind, _)| kind.is_of(format)).map_or(&[], |(_, chain)| &chain.hashes)
    }

    /// Of the passages that are blended, with their tokens.
    pub fn passages(&self) -> &[(BlockHash, usize)] {
        &self.passages
    }

    /// Of every kind, with the size of its blocks.
    pub fn all(&self) -> impl Iterator<Item = (usize, &[BlockHash])> {
        self.chains.iter().map(|(kind, chain)| (kind.block_size, &chain.hashes[..]))
    }
}

impl Chain {
    fn extend(&mut self, block_size: usize, request: &Request) {
        let known = self.hashes.len();
        let num_blocks = request.num_known_tokens() / block_size.max(1);
        if num_blocks <= known {
            return;
        }
        let mut parent = self.hashes.last().copied().unwrap_or(self.root.hash());
        // Other choices keep theirs.
        let hashes = Arc::make_mut(&mut self.hashes);
        let (prompt, output) = (&request.prompt[..], &request.output[..]);
        let mut across = Vec::new();
        #[cfg(test)]
        tests::NUM_HASHED.set(tests::NUM_HASHED.get() + num_blocks - known);
        for start in (known..num_blocks).map(|idx| idx * block_size) {
            let end = start + block_size;
            let block = if end <= prompt.len() {
                &prompt[start..end]
            } else {
                across.clear();
                across.extend_from_slice(&prompt[start.min(prompt.len())..]);
                let from = start.saturating_sub(prompt.len());
                across.extend_from_slice(&output[from..end - prompt.len()]);
                &across[..]
            };
            parent = parent.child(block);
            hashes.push(parent);
        }
    }
}

/// As engines have it.
fn root(revision: &str, request: &Request) -> HashRoot {
    match request.blended() {
        Some(marks) => {
            let head = &request.prompt[..marks.end_idx()];
            HashRoot::blended(revision, &request.cache_salt, head, &marks.settings())
        }
        None => HashRoot::new(revision, "", &request.cache_salt),
    }
}

/// The kinds of blocks of these formats, each once.
pub(super) fn block_kinds<'a>(formats: impl Iterator<Item = &'a KvFormat>) -> Vec<BlockKind> {
    let mut kinds: Vec<BlockKind> = Vec::new();
    for format in formats {
        if !kinds.iter().any(|kind| kind.is_of(format)) {
            kinds.push(BlockKind::of(format));
        }
    }
    kinds
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, mem};

    use baton_kv_cache::{KvDtype, KvLayout};

    use super::*;

    thread_local! {
        /// Blocks that this thread has hashed.
        pub(super) static NUM_HASHED: Cell<usize> = const { Cell::new(0) };
    }

    fn kind(block_size: usize, revision: &str) -> BlockKind {
        BlockKind { block_size, revision: revision.to_owned() }
    }

    fn format(block_size: usize, revision: &str) -> KvFormat {
        let layout =
            KvLayout { block_size, num_layers: 1, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };
        KvFormat::new(revision.to_owned(), &layout, String::new())
    }

    #[tokio::test]
    async fn a_prompt_is_hashed_once_for_each_kind_whatever_its_choices_retries_and_end() {
        let prompt = Request { prompt: (0..40).collect(), ..Request::default() };
        let shared = PromptHashes::default();
        NUM_HASHED.take();
        let mut choices = vec![(prompt.clone(), None); 4];
        for (choice, hashes) in &mut choices {
            *hashes = Some(shared.extend(None, &[kind(4, "r")], &prompt, choice).await);
        }
        assert_eq!(NUM_HASHED.take(), 10, "planned for the first time");

        // Weights are updated; then all are planned again, with output.
        let kinds = [kind(4, "s"), kind(4, "r")];
        for (token, (choice, hashes)) in choices.iter_mut().enumerate() {
            choice.output = vec![token as u32; 8];
            *hashes = Some(shared.extend(mem::take(hashes), &kinds, &prompt, choice).await);
        }
        assert_eq!(NUM_HASHED.take(), 10 + 4 * 2 * 2, "the prompt in the new kind, each output");

        for (token, (choice, hashes)) in choices.iter_mut().enumerate() {
            choice.output.extend([token as u32; 4]);
            let hashes = hashes.as_mut().unwrap();
            hashes.advance(choice);
            let whole = [&choice.prompt[..], &choice.output[..]].concat();
            for revision in ["r", "s"] {
                let expected: Vec<_> = HashRoot::new(revision, "", "").block_hashes(&whole, 4).collect();
                assert_eq!(hashes.of(&format(4, revision)), expected, "{token} {revision}");
            }
        }
        assert_eq!(NUM_HASHED.take(), 4 * 2, "ended");
    }

    #[tokio::test]
    async fn choices_that_need_a_long_prompt_at_once_share_its_hashes() {
        let prompt = Request { prompt: (0..=BLOCKING_TOKENS as u32).collect(), ..Request::default() };
        let (shared, kinds) = (PromptHashes::default(), [kind(16, "r"), kind(32, "s")]);
        NUM_HASHED.take();
        let extend = || shared.extend(None, &kinds, &prompt, &prompt);
        let (first, second) = tokio::join!(extend(), extend());
        for format in [format(16, "r"), format(32, "s")] {
            let (first, second) = (first.of(&format), second.of(&format));
            assert_eq!(first.len(), BLOCKING_TOKENS / format.block_size);
            assert!(std::ptr::eq(first, second));
        }
        assert_eq!(NUM_HASHED.take(), 0, "on other threads");
    }

    #[test]
    fn a_long_output_is_hashed_as_it_comes() {
        let mut request = Request { prompt: (0..16).collect(), ..Request::default() };
        let mut hashes = SequenceHashes::default();
        hashes.extend(&[kind(16, "r")], &request);
        NUM_HASHED.take();
        let mut num_hashed = Vec::new();
        for token in 0..3 * BLOCKING_TOKENS as u32 - 1 {
            request.output.push(token);
            hashes.keep_up(&request);
            num_hashed.extend(Some(NUM_HASHED.take()).filter(|num| *num > 0));
        }
        assert_eq!(num_hashed, [BLOCKING_TOKENS / 16; 2]);
        hashes.advance(&request);
        assert!(NUM_HASHED.take() < BLOCKING_TOKENS / 16);
    }

    #[test]
    fn hashes_that_grow_with_the_output_are_those_of_the_whole_sequence() {
        let kinds = [kind(4, "r"), kind(7, "r"), kind(4, "s")];
        let mut request =
            Request { prompt: (0..10).collect(), cache_salt: "salt".into(), ..Request::default() };
        let mut hashes = SequenceHashes::default();
        assert!(hashes.lacks(&kinds));
        hashes.extend(&kinds, &request);
        let shared = hashes.clone();
        for token in 10..40 {
            request.output.push(token);
            hashes.extend(&kinds, &request);
            let whole: Vec<u32> = (0..=token).collect();
            for (size, revision) in [(4, "r"), (7, "r"), (4, "s")] {
                let expected: Vec<_> =
                    HashRoot::new(revision, "", "salt").block_hashes(&whole, size).collect();
                assert_eq!(hashes.of(&format(size, revision)), expected, "{token} {size} {revision}");
            }
        }
        let num_shared = |size| shared.of(&format(size, "r")).len();
        assert_eq!((num_shared(4), num_shared(7), num_shared(5)), (2, 1, 0));
        assert!(!hashes.lacks(&kinds) && hashes.lacks(&[kind(5, "r")]) && hashes.lacks(&[kind(7, "s")]));
    }
}
