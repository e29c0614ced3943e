//! The block hashes of a sequence. A prompt is hashed once, whatever its choices, attempts and end; output is hashed as it is
//! known to be needed.

use std::{ops::Range, sync::Arc};

use baton_kv_cache::{BlockHash, HashRoot, KvFormat};
use baton_request::Request;

/// Prompts with more tokens are hashed off the async threads: 4096 take about 50 us.
pub const BLOCKING_TOKENS: usize = 4096;

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

impl SequenceHashes {
    /// Hashes what is not hashed yet: blocks of a new kind, and those that output has filled.
    pub fn extend(&mut self, kinds: &[BlockKind], request: &Request) {
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

    fn chain(&self, kind: &BlockKind) -> Option<&Chain> {
        self.chains.iter().find(|(of, _)| of == kind).map(|(_, chain)| chain)
    }

    /// Whether [`extend`](Self::extend) would hash a prompt.
    pub fn lacks(&self, kinds: &[BlockKind]) -> bool {
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
    use baton_kv_cache::{KvDtype, KvLayout};

    use super::*;

    #[test]
    fn hashes_that_grow_with_the_output_are_those_of_the_whole_sequence() {
        let kind = |block_size, revision: &str| BlockKind { block_size, revision: revision.to_owned() };
        let format = |block_size, revision: &str| {
            let layout =
                KvLayout { block_size, num_layers: 1, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };
            KvFormat::new(revision.to_owned(), &layout, String::new())
        };
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
