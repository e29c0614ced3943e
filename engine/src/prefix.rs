//! Prefixes that move between engines. The cached blocks of a prefix are held while another engine reads them, and a
//! prefix from another engine is cached here. So do the blocks of preempted sequences come back.

use std::{ops::Range, sync::Arc};

use baton_kv_cache::{BlockHash, BlockId};
use baton_kv_events::Keep;
use baton_scheduler::{PrefixBlocks, SequenceId, keeps};
use tokio::{
    sync::{mpsc, oneshot},
    task::spawn_blocking,
};

use baton_request::Request;

use crate::{
    blending::hash_root,
    command::{Command, DropCommand, Resumption, Resumptions},
    handle::{EngineHandle, SubmitError},
};

/// More tokens are hashed off the async threads: these take about 50 us.
pub const BLOCKING_TOKENS: usize = 4096;

/// Held blocks of a cached prefix. They stay as they are until this is dropped.
#[derive(Debug)]
pub struct CachedPrefix {
    _owner: DropCommand,
    blocks: Vec<BlockId>,
}

impl CachedPrefix {
    /// The full blocks at the front of the sequence that were cached; perhaps none.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// Blocks set aside for a prefix of another engine. Dropping the reservation returns them.
#[derive(Debug)]
pub struct PrefixReservation {
    owner: DropCommand,
    blocks: Vec<BlockId>,
    num_cached_blocks: usize,
    /// The hash of the block before them.
    after: Option<BlockHash>,
    hashes: Vec<BlockHash>,
}

impl PrefixReservation {
    /// The blocks of the prefix, in its order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Blocks at the front that are already cached. They are shared and must never be written.
    pub fn num_cached_blocks(&self) -> usize {
        self.num_cached_blocks
    }
}

/// Blocks that are on their way, until this is dropped.
#[derive(Debug)]
pub struct Expectation {
    _owner: DropCommand,
}

impl EngineHandle {
    /// Holds the cached part of a sequence, by the hashes of its blocks in order. It waits only for the engine's current step, and
    /// computes nothing.
    ///
    /// # Errors
    /// When the engine ends.
    pub async fn hold_cached(&self, hashes: Arc<[BlockHash]>) -> Result<CachedPrefix, SubmitError> {
        let (owner, blocks) = self.ask(|id, reply| Command::HoldCached { id, hashes, reply }).await?;
        Ok(CachedPrefix { _owner: owner, blocks })
    }

    /// Sets blocks aside for the blocks of a sequence from `first` on, for as many as there is room for. `None` when `least` of them
    /// are not free at once, or when running or waiting sequences here need them. `hashes` are those of all its blocks up to the last
    /// one that is wanted. The engine is asked by the call, before the future is polled.
    ///
    /// # Errors
    /// When the engine ends.
    pub fn reserve_blocks(
        &self,
        hashes: &[BlockHash],
        first: usize,
        least: usize,
    ) -> impl Future<Output = Result<Option<PrefixReservation>, SubmitError>> + Send + use<> {
        let after = first.checked_sub(1).map(|before| hashes[before]);
        let mut hashes = hashes[first..].to_vec();
        let asked = hashes.clone();
        let answer = self.ask(move |id, reply| Command::ReservePrefix { id, hashes: asked, least, reply });
        async move {
            let (owner, found) = answer.await?;
            Ok(found.map(|found| {
                hashes.truncate(found.blocks.len());
                let PrefixBlocks { blocks, num_cached_blocks } = found;
                PrefixReservation { owner, blocks, num_cached_blocks, after, hashes }
            }))
        }
    }

    /// The blocks of a sequence from `first` on are on their way: a prompt is computed in chunks that end before them.
    pub fn expect(&self, hashes: &[BlockHash], first: usize) -> Expectation {
        let id = self.next_id(0);
        // Fails when the engine has ended. Then nothing is computed.
        let _ = self.send(Command::Expect { id, block_idx: first, hash: hashes[first] });
        Expectation { _owner: DropCommand::new(id, self.state.commands.clone(), Command::Release) }
    }

    /// Enters the prefix into the prefix cache. Its KV is in the reservation's blocks now. Prompts that are being computed adopt
    /// them.
    pub fn cache_prefix(&self, reservation: PrefixReservation) {
        self.cache_blocks(&reservation, 0..reservation.hashes.len());
    }

    /// The same for some blocks of a prefix, while others are on their way.
    pub fn cache_blocks(&self, reservation: &PrefixReservation, blocks: Range<usize>) {
        let PrefixReservation { owner, after, hashes, .. } = reservation;
        let first = blocks.start;
        let after = if first == 0 { *after } else { Some(hashes[first - 1]) };
        let hashes = hashes[blocks].to_vec();
        // Fails when the engine, and so its cache, has ended. Dropping the owner then releases the blocks.
        let _ = self.send(Command::CachePrefix { id: owner.id, first, after, hashes });
    }

    /// From now on, preempted sequences that lost full blocks are resumed by the reader: it loads what it has of them. Ends with
    /// the engine.
    pub fn resumptions(&self) -> mpsc::Receiver<Resumption> {
        let (sender, received) = mpsc::channel(self.state.config.max_running);
        let commands = self.state.commands.clone();
        // Fails when the engine has ended: then the receiver says so.
        let _ = self.send(Command::RecallPreempted(Resumptions { sender, commands }));
        received
    }

    /// From now on, the reader gets the hashes of the blocks of each request whose logits are not finite. The prefix cache has forgotten
    /// them before the request's reader learns that it failed. Ends with the engine.
    pub fn spoiled_blocks(&self) -> mpsc::UnboundedReceiver<Vec<BlockHash>> {
        let (sender, received) = mpsc::unbounded_channel();
        // Fails when the engine has ended: then the receiver says so.
        let _ = self.send(Command::TellSpoiled(sender));
        received
    }

    /// Tokens at the front of a request that the prefix cache may supply, in full blocks. The last token is left to
    /// compute.
    pub fn num_sharable_tokens(&self, request: &Request) -> usize {
        let block_size = self.state.storage.layout().block_size;
        match self.state.config.prefix_cache {
            true => request.num_known_tokens().saturating_sub(1) / block_size * block_size,
            false => 0,
        }
    }

    /// The start of the chain of a request's block hashes.
    pub fn hash_root(&self, request: &Request) -> BlockHash {
        hash_root(&self.state.config.model_revision, request).hash()
    }

    /// Hashes of the full blocks of a request's first `num_tokens` known tokens; none without a prefix cache.
    pub fn prefix_hashes(&self, request: &Request, num_tokens: usize) -> Vec<BlockHash> {
        self.extended_hashes(&[], request, num_tokens)
    }

    /// The same. `known` are those of its first blocks, which are not hashed again.
    pub fn extended_hashes(
        &self,
        known: &[BlockHash],
        request: &Request,
        num_tokens: usize,
    ) -> Vec<BlockHash> {
        if !self.state.config.prefix_cache {
            return Vec::new();
        }
        let block_size = self.state.storage.layout().block_size;
        let tokens = request.prompt.iter().chain(&request.output).copied().take(num_tokens);
        let tokens: Vec<u32> = tokens.skip(known.len() * block_size).collect();
        let mut parent = known.last().copied().unwrap_or_else(|| self.hash_root(request));
        let following = tokens.chunks_exact(block_size).map(|block| {
            parent = parent.child(block);
            parent
        });
        known.iter().copied().chain(following).collect()
    }

    /// [`prefix_hashes`](Self::prefix_hashes), off the async threads when it is much.
    pub async fn hash_prefix(&self, request: &Request, num_tokens: usize) -> Vec<BlockHash> {
        self.hash_then(request, num_tokens, |_, hashes| hashes).await
    }

    /// The same, and how many of the blocks at the front are in the pool.
    pub async fn find_prefix(&self, request: &Request, num_tokens: usize) -> (Vec<BlockHash>, usize) {
        let find = |engine: &EngineHandle, hashes: Vec<BlockHash>| {
            let num_pooled = engine.cache_log().num_in_pool(&hashes);
            (hashes, num_pooled)
        };
        self.hash_then(request, num_tokens, find).await
    }

    async fn hash_then<T: Default + Send + 'static>(
        &self,
        request: &Request,
        num_tokens: usize,
        then: impl FnOnce(&EngineHandle, Vec<BlockHash>) -> T + Send + 'static,
    ) -> T {
        if num_tokens <= BLOCKING_TOKENS {
            return then(self, self.prefix_hashes(request, num_tokens));
        }
        let (engine, request) = (self.clone(), request.clone());
        let hashing = spawn_blocking(move || then(&engine, engine.prefix_hashes(&request, num_tokens)));
        // Nothing in it panics. Without hashes nothing is found in caches.
        hashing.await.unwrap_or_default()
    }

    /// How the first `num_blocks` blocks of a request are to be kept.
    pub fn keeps(&self, request: &Request, num_blocks: usize) -> Vec<Keep> {
        keeps(&request.retention, self.state.storage.layout().block_size).take(num_blocks).collect()
    }

    /// Sends a command that replies with blocks. The returned owner releases them.
    fn ask<T, C>(&self, command: C) -> impl Future<Output = Result<(DropCommand, T), SubmitError>> + use<T, C>
    where
        C: FnOnce(SequenceId, oneshot::Sender<T>) -> Command,
    {
        let id = self.next_id(0);
        let (reply, answer) = oneshot::channel();
        let sent = self.send(command(id, reply));
        // Created before the reply, so that the blocks are released even when the future is dropped.
        let owner = DropCommand::new(id, self.state.commands.clone(), Command::Release);
        async move {
            sent?;
            let answer = answer.await.map_err(|_| SubmitError::ShuttingDown)?;
            Ok((owner, answer))
        }
    }
}
