//! The block hashes of a sequence. A prompt is hashed once, whatever its choices, attempts and end; output is hashed as it is
//! known to be needed.

use std::{collections::BTreeMap, sync::Arc};

use baton_kv_cache::{BlockHash, HashRoot};
use baton_planner::ClusterView;
use baton_request::Request;

/// Prompts with more tokens are hashed off the async threads: 4096 take about 50 us.
pub(super) const BLOCKING_TOKENS: usize = 4096;

/// The sizes of blocks among the workers, each with the revision of their model.
pub(crate) type BlockSizes = BTreeMap<usize, String>;

/// The hashes of a sequence's full blocks, for each size of blocks. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct SequenceHashes {
    chains: BTreeMap<usize, Chain>,
    /// Of the passages, with their tokens, once a worker is known.
    passages: Arc<[(BlockHash, usize)]>,
}

#[derive(Clone, Debug)]
struct Chain {
    root: HashRoot,
    hashes: Arc<Vec<BlockHash>>,
}

impl SequenceHashes {
    /// Hashes what is not hashed yet: blocks of a new size, and those that output has filled.
    pub(crate) fn extend(&mut self, sizes: &BlockSizes, request: &Request) {
        if let (Some(marks), Some(revision), true) =
            (request.blended(), sizes.values().next(), self.passages.is_empty())
        {
            let passages = marks.passages.iter().map(|range| &request.prompt[range.clone()]);
            let hash = |tokens: &[u32]| BlockHash::of_passage(revision, &request.cache_salt, tokens);
            self.passages = passages.map(|tokens| (hash(tokens), tokens.len())).collect();
        }
        for (&block_size, revision) in sizes {
            let chain = self
                .chains
                .entry(block_size)
                .or_insert_with(|| Chain { root: root(revision, request), hashes: Arc::default() });
            chain.extend(block_size, request);
        }
    }

    /// Whether [`extend`](Self::extend) would hash a prompt.
    pub(crate) fn lacks(&self, sizes: &BlockSizes) -> bool {
        sizes.keys().any(|size| !self.chains.contains_key(size))
    }

    /// Of blocks of this size.
    pub(crate) fn of(&self, block_size: usize) -> &[BlockHash] {
        self.chains.get(&block_size).map_or(&[], |chain| &chain.hashes)
    }

    /// Of the passages that are blended, with their tokens.
    pub(crate) fn passages(&self) -> &[(BlockHash, usize)] {
        &self.passages
    }

    /// Of every size.
    pub(crate) fn all(&self) -> impl Iterator<Item = (usize, &[BlockHash])> + Clone {
        self.chains.iter().map(|(&size, chain)| (size, &chain.hashes[..]))
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

/// The sizes of blocks in the view.
pub(crate) fn block_sizes(view: &ClusterView) -> BlockSizes {
    let mut sizes = BlockSizes::new();
    for worker in &view.workers {
        let format = &worker.record.kv_format;
        sizes.entry(format.block_size).or_insert_with(|| format.model_revision.clone());
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_that_grow_with_the_output_are_those_of_the_whole_sequence() {
        let sizes = BlockSizes::from([(4, "r".to_owned()), (7, "r".to_owned())]);
        let mut request =
            Request { prompt: (0..10).collect(), cache_salt: "salt".into(), ..Request::default() };
        let mut hashes = SequenceHashes::default();
        assert!(hashes.lacks(&sizes));
        hashes.extend(&sizes, &request);
        let shared = hashes.clone();
        for token in 10..40 {
            request.output.push(token);
            hashes.extend(&sizes, &request);
            let whole: Vec<u32> = (0..=token).collect();
            for size in [4, 7] {
                let expected: Vec<_> = HashRoot::new("r", "", "salt").block_hashes(&whole, size).collect();
                assert_eq!(hashes.of(size), expected, "{token} {size}");
            }
        }
        assert_eq!((shared.of(4).len(), shared.of(7).len(), shared.of(5).len()), (2, 1, 0));
        assert!(!hashes.lacks(&sizes) && hashes.lacks(&BlockSizes::from([(5, "r".to_owned())])));
    }
}
