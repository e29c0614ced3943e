//! A sequence as the scheduler sees it: tokens, how many of them are computed, and blocks. It does
//! not know sampling, streams or who asked.

use std::fmt;

use baton_kv_cache::{BlockHash, BlockId, HashRoot};

/// Names a sequence of one engine. Ids grow with the order of arrival: a smaller one is older.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// What becomes of a sequence once it holds blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceRole {
    /// Its prompt is computed here, then it decodes here.
    Generate,
    /// Its prompt is computed here for another engine; it ends after its first token. Its blocks have
    /// a second owner, the hold, which may outlive it.
    Prefill,
    /// Its prompt is computed elsewhere, into blocks that are set aside here; then it decodes here.
    Decode,
}

/// One sequence.
///
/// ```text
/// tokens    |<---------- num_tokens ----------->|<- draft ->|   proposed for this step only
/// computed  |<-- num_computed -->|<- num_left ->|               KV in the blocks; to be computed
/// blocks    |  b4  |  b7  |  b9  |  b2  |  b5  ...              enough for all tokens once admitted,
///                                                               one more each time decoding fills the last
/// ```
///
/// The step computes the draft's KV, too. As tokens are drawn, those of the draft that they equal become
/// tokens whose KV is computed; with the first that differs the rest of the draft is gone, and what was
/// computed for it is overwritten. Hashes are of tokens alone.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Its name.
    pub id: SequenceId,
    /// Its role.
    pub role: SequenceRole,
    /// Followed by the draft.
    tokens: Vec<u32>,
    num_drafts: usize,
    block_size: usize,
    /// Most tokens whose KV it can ever need.
    max_kv_tokens: usize,
    /// Where the chain of hashes begins; `None` when the sequence shares no blocks.
    root: Option<HashRoot>,
    /// Of each full block of `tokens`, computed or not; empty without a root.
    hashes: Vec<BlockHash>,
    pub(crate) num_computed: usize,
    pub(crate) blocks: Vec<BlockId>,
    /// Tokens found in the prefix cache when it was first admitted; `None` before.
    pub(crate) num_cached_tokens: Option<usize>,
    /// Its blocks were taken away once: what it has left to compute, somebody waits for in the midst of an answer.
    pub(crate) was_preempted: bool,
}

impl Sequence {
    /// A sequence that has computed nothing. `max_num_tokens` is its length at its longest.
    pub fn new(
        id: SequenceId,
        role: SequenceRole,
        tokens: Vec<u32>,
        max_num_tokens: usize,
        block_size: usize,
        root: Option<HashRoot>,
    ) -> Sequence {
        debug_assert!(!tokens.is_empty() && tokens.len() < max_num_tokens);
        // The last token of a sequence is never fed back, so its KV is never computed.
        let max_kv_tokens = if role == SequenceRole::Prefill { tokens.len() } else { max_num_tokens - 1 };
        let hashes = root.iter().flat_map(|root| root.block_hashes(&tokens, block_size)).collect();
        Sequence {
            id,
            role,
            tokens,
            num_drafts: 0,
            block_size,
            max_kv_tokens,
            root,
            hashes,
            num_computed: 0,
            blocks: Vec::new(),
            num_cached_tokens: None,
            was_preempted: false,
        }
    }

    /// Prompt and output so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.num_tokens()]
    }

    /// Prompt and output so far, and the draft.
    pub fn tokens_and_draft(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that are drafted to follow.
    pub fn draft(&self) -> &[u32] {
        &self.tokens[self.num_tokens()..]
    }

    /// Most tokens that a draft can have. The last token of a sequence is never fed back.
    pub fn max_num_drafts(&self) -> usize {
        self.max_kv_tokens.saturating_sub(self.num_tokens())
    }

    /// Its block table.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens whose KV lies in the blocks.
    pub fn num_computed_tokens(&self) -> usize {
        self.num_computed
    }

    /// Tokens whose KV is still to be computed. One, when it decodes.
    pub fn num_left(&self) -> usize {
        self.num_tokens() - self.num_computed
    }

    fn num_tokens(&self) -> usize {
        self.tokens.len() - self.num_drafts
    }

    /// Tokens found in the prefix cache when it was first admitted.
    pub fn num_cached_tokens(&self) -> usize {
        self.num_cached_tokens.unwrap_or(0)
    }

    /// Tokens in a block.
    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Hashes of the full blocks of its tokens; none when it shares no blocks.
    pub(crate) fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Hashes of the full blocks that the cache may supply. When the engine itself must compute
    /// logits, the last token is left to compute.
    pub(crate) fn sharable_hashes(&self) -> &[BlockHash] {
        let num_sharable = match self.role {
            SequenceRole::Decode => self.num_tokens(),
            SequenceRole::Generate | SequenceRole::Prefill => self.num_tokens() - 1,
        };
        &self.hashes[..self.hashes.len().min(num_sharable / self.block_size)]
    }

    /// Blocks that all its tokens need.
    pub(crate) fn num_blocks_needed(&self) -> usize {
        self.num_tokens().div_ceil(self.block_size)
    }

    /// Blocks at its longest.
    pub fn max_num_blocks(&self) -> usize {
        self.max_kv_tokens.div_ceil(self.block_size)
    }

    /// Whether it may still ask for a block beyond `num_blocks`.
    pub(crate) fn can_grow_beyond(&self, num_blocks: usize) -> bool {
        self.max_num_blocks() > num_blocks
    }

    /// Whether its blocks may be taken away and recomputed. A prefill's are perhaps being read by a
    /// transfer; it has all it will ever need and ends by itself.
    pub(crate) fn is_preemptible(&self) -> bool {
        self.role != SequenceRole::Prefill
    }

    pub(crate) fn push_draft(&mut self, token: u32) {
        self.tokens.push(token);
        self.num_drafts += 1;
    }

    /// Keeps the first `num_drafts` of the draft.
    pub(crate) fn truncate_draft(&mut self, num_drafts: usize) {
        self.tokens.truncate(self.num_tokens() + num_drafts);
        self.num_drafts = self.num_drafts.min(num_drafts);
    }

    /// Appends a token that was drawn; whether the draft had it.
    pub(crate) fn push(&mut self, token: u32) -> bool {
        let is_accepted = self.draft().first() == Some(&token);
        if is_accepted {
            self.num_drafts -= 1;
        } else {
            self.truncate_draft(0);
            self.tokens.push(token);
        }
        if let Some(root) = self.root
            && self.num_tokens().is_multiple_of(self.block_size)
        {
            let parent = self.hashes.last().copied().unwrap_or(root.hash());
            self.hashes.push(parent.child(&self.tokens()[self.num_tokens() - self.block_size..]));
        }
        is_accepted
    }

    /// Counts `num_tokens` more tokens as computed; returns the blocks that this filled, with their hashes.
    pub(crate) fn advance(&mut self, num_tokens: usize) -> impl Iterator<Item = (BlockId, BlockHash)> {
        let first = self.num_computed / self.block_size;
        self.num_computed += num_tokens;
        debug_assert!(self.num_computed <= self.num_tokens());
        let filled = self.num_computed / self.block_size;
        let hashes = self.hashes.iter().take(filled).skip(first);
        self.blocks[first.min(self.blocks.len())..].iter().copied().zip(hashes.copied())
    }
}
