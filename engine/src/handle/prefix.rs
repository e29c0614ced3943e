//! Prefixes that travel: what the cache has of one is held while another engine is given it, and what another engine
//! gives is cached here.

use baton_kv_cache::{BlockHash, BlockId, HashRoot};
use tokio::sync::oneshot;

use super::{EngineHandle, SubmitError};
use baton_request::Request;

use crate::{
    command::{Command, Owner},
    sequence::SequenceId,
};

/// Cached blocks of a prefix. They stay as they are until this is dropped.
#[derive(Debug)]
pub struct CachedPrefix {
    _owner: Owner,
    blocks: Vec<BlockId>,
}

impl CachedPrefix {
    /// The full blocks at the front of the sequence that were cached; perhaps none.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// Blocks set aside for a prefix that another engine has. Dropping it returns them.
#[derive(Debug)]
pub struct PrefixReservation {
    owner: Owner,
    blocks: Vec<BlockId>,
    num_cached_blocks: usize,
    hashes: Vec<BlockHash>,
}

impl PrefixReservation {
    /// The blocks of the prefix, in its order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Blocks at the front that are cached already. They are shared: never write them.
    pub fn num_cached_blocks(&self) -> usize {
        self.num_cached_blocks
    }
}

impl EngineHandle {
    /// Takes hold of what is cached of a request's known tokens. It waits for nothing but the engine's current step,
    /// and computes nothing.
    ///
    /// # Errors
    /// When the request is invalid, or the engine ends.
    pub async fn hold_cached(&self, request: &Request) -> Result<CachedPrefix, SubmitError> {
        request.validate(self.vocab_size(), self.context_length())?;
        let hashes = self.prefix_hashes(request, request.num_known_tokens());
        let (owner, blocks) = self.ask(|id, reply| Command::HoldCached { id, hashes, reply }).await?;
        Ok(CachedPrefix { _owner: owner, blocks })
    }

    /// Sets blocks aside for the first `num_tokens` known tokens of a request, in full blocks. `None` when they are not
    /// to be had at once without harm to those that run or wait here.
    ///
    /// # Errors
    /// As [`hold_cached`](Self::hold_cached).
    pub async fn reserve_prefix(
        &self,
        request: &Request,
        num_tokens: usize,
    ) -> Result<Option<PrefixReservation>, SubmitError> {
        let hashes = self.prefix_hashes(request, num_tokens);
        let asked = hashes.clone();
        let (owner, found) =
            self.ask(|id, reply| Command::ReservePrefix { id, hashes: asked, reply }).await?;
        Ok(found.map(|found| PrefixReservation {
            owner,
            blocks: found.blocks,
            num_cached_blocks: found.num_cached_blocks,
            hashes,
        }))
    }

    /// The KV of the whole prefix is in the reservation's blocks now: whoever comes finds them in the prefix cache.
    pub fn cache_prefix(&self, reservation: PrefixReservation) {
        let PrefixReservation { owner, hashes, .. } = reservation;
        // Fails when the engine has ended, and with it its cache. Dropping the owner releases the blocks after that.
        let _ = self.send(Command::CachePrefix { id: owner.id, hashes });
    }

    /// Tokens at the front of a request that the prefix cache may supply: full blocks, the last token being left to
    /// compute.
    pub fn num_sharable_tokens(&self, request: &Request) -> usize {
        let block_size = self.shared.storage.layout().block_size;
        match self.shared.config.prefix_cache {
            true => request.num_known_tokens().saturating_sub(1) / block_size * block_size,
            false => 0,
        }
    }

    fn prefix_hashes(&self, request: &Request, num_tokens: usize) -> Vec<BlockHash> {
        let config = &self.shared.config;
        if !config.prefix_cache {
            return Vec::new();
        }
        let mut tokens = [&request.prompt[..], &request.output].concat();
        tokens.truncate(num_tokens);
        let root = HashRoot::new(&config.model_revision, "", &request.cache_salt);
        root.block_hashes(&tokens, self.shared.storage.layout().block_size).collect()
    }

    /// A question about blocks, and the duty to release what is answered.
    async fn ask<T>(
        &self,
        command: impl FnOnce(SequenceId, oneshot::Sender<T>) -> Command,
    ) -> Result<(Owner, T), SubmitError> {
        let id = self.next_id();
        let (reply, answer) = oneshot::channel();
        self.send(command(id, reply))?;
        // From here on, also when nobody waits for the answer any more.
        let owner = Owner::new(id, self.shared.commands.clone(), Command::Release);
        let answer = answer.await.map_err(|_| SubmitError::ShuttingDown)?;
        Ok((owner, answer))
    }
}
