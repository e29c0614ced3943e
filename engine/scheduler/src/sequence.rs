//! A sequence as the scheduler sees it: its tokens, how many are computed, and its blocks. It does not know sampling,
//! streams or clients.

use std::{fmt, ops::Range};

use baton_kv_cache::{BlockHash, BlockId, HashRoot};
use baton_kv_events::Keep;
use baton_request::Retention;

/// Identifies a sequence of one engine. Ids are in the order in which sequences are served: a smaller one comes first, and
/// counts as older.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    /// [Priority](baton_request::Request::priority): lower ones first.
    pub priority: i32,
    /// Unique. Among equal priorities it grows in the order of arrival.
    pub number: u64,
}

impl SequenceId {
    /// The id of the sequence that arrived as `number`.
    pub const fn new(priority: i32, number: u64) -> SequenceId {
        SequenceId { priority, number }
    }
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.number)
    }
}

/// What a sequence does once it holds blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceRole {
    /// The prompt is computed here, then the sequence decodes here.
    Generate,
    /// The prompt is computed here for another engine. The sequence ends after its first token. Its blocks have a
    /// second owner, the hold, which may outlive it.
    Prefill,
    /// The prompt is computed elsewhere, into blocks that are set aside here. Then the sequence decodes here.
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
/// The step computes the KV of the draft, too. Draft tokens that equal the sampled tokens become
/// tokens whose KV is computed. The first token that differs ends the draft, and the KV that was
/// computed for the rest is overwritten. Hashes cover tokens only, never the draft.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Its id.
    pub id: SequenceId,
    /// Its role.
    pub role: SequenceRole,
    /// Prompt and output, followed by the draft; from `first_idx` on.
    tokens: Vec<u32>,
    /// Position of the first of `tokens`. Not 0 only where the text before it is unknown.
    first_idx: usize,
    num_drafts: usize,
    /// So many tokens at the front are computed by one step, as a whole; 0 if there is no such head.
    num_head_tokens: usize,
    /// Positions after which the next token is still to be scored.
    unscored: Range<usize>,
    block_size: usize,
    /// The largest number of tokens whose KV it can need.
    max_kv_tokens: usize,
    /// Start of the chain of hashes; `None` when the sequence shares no blocks.
    root: Option<HashRoot>,
    /// The hash of each full block of `tokens`, computed or not; empty without a root.
    hashes: Vec<BlockHash>,
    pub(crate) num_computed: usize,
    pub(crate) blocks: Vec<BlockId>,
    /// Tokens found in the prefix cache when it was first admitted; `None` before.
    pub(crate) num_cached_tokens: Option<usize>,
    /// Tokens in the prefix cache when it was queued: about as many need no computing. Says nothing once it is admitted.
    pub(crate) num_cached_in_queue: usize,
    /// Whether blocks after its computed tokens may be cached: it has taken them over.
    pub(crate) has_adopted: bool,
    /// Whether it was preempted once. Its client then waits in the middle of an answer.
    pub(crate) was_preempted: bool,
    retention: Retention,
}

impl Sequence {
    /// A sequence without computed tokens. `max_num_tokens` is its greatest length, prompt and output together.
    pub fn new(
        id: SequenceId,
        role: SequenceRole,
        tokens: Vec<u32>,
        max_num_tokens: usize,
        block_size: usize,
        root: Option<HashRoot>,
    ) -> Sequence {
        let hashes = root.iter().flat_map(|root| root.block_hashes(&tokens, block_size)).collect();
        Sequence::of_parts(id, role, 0, tokens, max_num_tokens, block_size, root, hashes)
    }

    /// The same of `num_tokens` tokens whose text is unknown, as in a simulator: only the hashes of their full blocks are
    /// known. Each of the rest is `token`. Such a sequence is scheduled, but neither drafted for nor executed.
    #[allow(clippy::too_many_arguments)] // the parts of a sequence
    pub fn without_text(
        id: SequenceId,
        role: SequenceRole,
        num_tokens: usize,
        token: u32,
        max_num_tokens: usize,
        block_size: usize,
        root: Option<HashRoot>,
        hashes: Vec<BlockHash>,
    ) -> Sequence {
        debug_assert!(hashes.len() == root.map_or(0, |_| num_tokens / block_size));
        let num_rest = num_tokens % block_size;
        let first_idx = num_tokens - num_rest;
        let tokens = vec![token; num_rest];
        Sequence::of_parts(id, role, first_idx, tokens, max_num_tokens, block_size, root, hashes)
    }

    #[allow(clippy::too_many_arguments)] // as above
    fn of_parts(
        id: SequenceId,
        role: SequenceRole,
        first_idx: usize,
        tokens: Vec<u32>,
        max_num_tokens: usize,
        block_size: usize,
        root: Option<HashRoot>,
        hashes: Vec<BlockHash>,
    ) -> Sequence {
        let num_tokens = first_idx + tokens.len();
        debug_assert!(num_tokens > 0 && num_tokens < max_num_tokens);
        // The last token of a sequence is never fed back, so its KV is never computed.
        let max_kv_tokens = if role == SequenceRole::Prefill { num_tokens } else { max_num_tokens - 1 };
        Sequence {
            id,
            role,
            tokens,
            first_idx,
            num_drafts: 0,
            num_head_tokens: 0,
            unscored: 0..0,
            block_size,
            max_kv_tokens,
            root,
            hashes,
            num_computed: 0,
            blocks: Vec::new(),
            num_cached_tokens: None,
            num_cached_in_queue: 0,
            has_adopted: false,
            was_preempted: false,
            retention: Retention::default(),
        }
    }

    /// The same with a head of `num_tokens` tokens: one step computes all of it, however many they are. The prefix cache
    /// supplies the whole head or nothing.
    #[must_use]
    pub fn with_head(mut self, num_tokens: usize) -> Sequence {
        debug_assert!(num_tokens < self.num_tokens());
        self.num_head_tokens = num_tokens;
        self
    }

    /// The same, and all tokens but the first are scored. It must begin with no cached token.
    #[must_use]
    pub fn with_scores(mut self) -> Sequence {
        debug_assert!(self.root.is_none(), "nothing is scored after a cached token");
        self.unscored = 0..self.num_tokens() - 1;
        self
    }

    /// The same, and its blocks are to be kept so.
    #[must_use]
    pub fn with_retention(mut self, retention: Retention) -> Sequence {
        self.retention = retention;
        self
    }

    /// Its blocks, and how they are to be kept.
    pub(crate) fn keeps(&self) -> impl Iterator<Item = (BlockId, Keep)> {
        self.blocks.iter().copied().zip(keeps(&self.retention, self.block_size))
    }

    /// Which of its next tokens are scored: once each, also after a preemption.
    pub(crate) fn scored_ahead(&self) -> ScoredAhead {
        let first_idx = self.unscored.start.max(self.num_computed);
        ScoredAhead {
            num_before: first_idx - self.num_computed,
            num_scored: self.unscored.end.saturating_sub(first_idx),
        }
    }

    /// Tokens of its head that a step computes now: all of them, or none.
    pub fn num_head_left(&self) -> usize {
        debug_assert!(self.num_computed == 0 || self.num_computed >= self.num_head_tokens);
        if self.num_computed == 0 { self.num_head_tokens } else { 0 }
    }

    /// Whether it can begin with `num_tokens` tokens whose KV is in shared blocks. What a sequence computes must not be in
    /// such a block.
    pub(crate) fn can_begin_after(&self, num_tokens: usize) -> bool {
        self.role == SequenceRole::Decode || num_tokens >= self.num_head_tokens
    }

    /// Prompt and output so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - self.num_drafts]
    }

    /// Prompt and output so far, and the draft.
    pub fn tokens_and_draft(&self) -> &[u32] {
        &self.tokens
    }

    /// The drafted tokens.
    pub fn draft(&self) -> &[u32] {
        &self.tokens[self.tokens.len() - self.num_drafts..]
    }

    /// The largest length of a draft. The last token of a sequence is never fed back.
    pub fn max_num_drafts(&self) -> usize {
        self.max_kv_tokens.saturating_sub(self.num_tokens())
    }

    /// Its block table.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens whose KV is in the blocks.
    pub fn num_computed_tokens(&self) -> usize {
        self.num_computed
    }

    /// Tokens whose KV is still to be computed. One, when it decodes.
    pub fn num_left(&self) -> usize {
        self.num_tokens() - self.num_computed
    }

    /// Of those, the tokens that this engine computes before the sequence decodes.
    pub fn num_prompt_tokens_left(&self) -> usize {
        if self.role == SequenceRole::Decode { 0 } else { self.num_left() }
    }

    fn num_tokens(&self) -> usize {
        self.first_idx + self.tokens.len() - self.num_drafts
    }

    /// Tokens found in the prefix cache when it was first admitted.
    pub fn num_cached_tokens(&self) -> usize {
        self.num_cached_tokens.unwrap_or(0)
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Hashes of the full blocks of its tokens; empty when it shares no blocks.
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Hashes of the full blocks that the cache may supply. Where this engine computes the prompt, the last token is
    /// left out: its logits are needed.
    pub fn sharable_hashes(&self) -> &[BlockHash] {
        let num_sharable = match self.role {
            SequenceRole::Decode => self.num_tokens(),
            SequenceRole::Generate | SequenceRole::Prefill => self.num_tokens() - 1,
        };
        &self.hashes[..self.hashes.len().min(num_sharable / self.block_size)]
    }

    /// Blocks that its tokens need.
    pub(crate) fn num_blocks_needed(&self) -> usize {
        self.num_tokens().div_ceil(self.block_size)
    }

    /// Blocks that must be available to admit it: those of its tokens, and one if it may grow.
    pub fn num_blocks_to_admit(&self) -> usize {
        let num_blocks = self.num_blocks_needed();
        num_blocks + usize::from(self.can_grow_beyond(num_blocks))
    }

    /// Blocks at its greatest length.
    pub fn max_num_blocks(&self) -> usize {
        self.max_kv_tokens.div_ceil(self.block_size)
    }

    /// Whether it may still need a block beyond `num_blocks`.
    pub(crate) fn can_grow_beyond(&self, num_blocks: usize) -> bool {
        self.max_num_blocks() > num_blocks
    }

    /// Whether its blocks may be taken away and recomputed. A transfer may be reading a prefill's blocks; and a
    /// prefill never needs another block and ends by itself.
    pub(crate) fn is_preemptible(&self) -> bool {
        self.role != SequenceRole::Prefill
    }

    pub(crate) fn push_draft(&mut self, token: u32) {
        self.tokens.push(token);
        self.num_drafts += 1;
    }

    /// Cuts the draft to its first `num_drafts` tokens.
    pub(crate) fn truncate_draft(&mut self, num_drafts: usize) {
        self.tokens.truncate(self.tokens().len() + num_drafts);
        self.num_drafts = self.num_drafts.min(num_drafts);
    }

    /// Appends a sampled token. True when the draft had it.
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
            self.hashes.push(parent.child(&self.tokens()[self.tokens().len() - self.block_size..]));
        }
        is_accepted
    }

    /// Counts `num_tokens` more tokens as computed. Returns the blocks that this filled, with their hashes, and the hash of the
    /// block before them.
    pub(crate) fn advance(
        &mut self,
        num_tokens: usize,
    ) -> (Option<BlockHash>, impl Iterator<Item = (BlockId, BlockHash)>) {
        let first = self.num_computed / self.block_size;
        self.num_computed += num_tokens;
        debug_assert!(self.num_computed <= self.num_tokens());
        self.unscored.start = self.unscored.start.max(self.num_computed);
        // Most steps fill no block: then neither hashes nor blocks are read, which are not in a processor's cache.
        let last = (self.num_computed / self.block_size).min(self.hashes.len());
        let filled = first.min(last)..last;
        let before = if filled.is_empty() { None } else { first.checked_sub(1).map(|idx| self.hashes[idx]) };
        let blocks = if filled.is_empty() { &[] } else { &self.blocks[filled.clone()] };
        (before, blocks.iter().copied().zip(self.hashes[filled].iter().copied()))
    }
}

/// The next tokens of a sequence that are scored. After each of them, the next token of the prompt is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoredAhead {
    /// Tokens before the first of them: they were scored before a preemption.
    pub(crate) num_before: usize,
    /// So many in a row.
    pub(crate) num_scored: usize,
}

impl ScoredAhead {
    /// So many of the next `num_tokens` tokens are scored.
    pub(crate) fn num_in(self, num_tokens: usize) -> usize {
        num_tokens.saturating_sub(self.num_before).min(self.num_scored)
    }

    /// The most tokens of which no more than `max_scored` are scored. No limit if these are all that are scored.
    pub(crate) fn max_tokens(self, max_scored: usize) -> usize {
        if max_scored < self.num_scored { self.num_before + max_scored } else { usize::MAX }
    }
}

/// How the blocks of a request are to be kept.
pub fn keeps(retention: &Retention, block_size: usize) -> impl Iterator<Item = Keep> {
    let rest = if retention.rest_is_low { Keep::Low } else { Keep::Normal };
    (1..).map(move |num_blocks| retention.ttl(num_blocks * block_size).map_or(rest, Keep::High))
}
