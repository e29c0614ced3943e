//! The hit rate of a trace: its blocks through the engine's real pool and the router's real index, nothing else. One pool of a
//! given size serves all requests, one after the other.

use std::{collections::HashMap, sync::Arc};

use baton_kv_cache::{BlockHash, HashRoot};
use baton_kv_index::{BatchKind, BlockKey, CacheFeed, EventBatch, KvIndex};
use baton_scheduler::BlockPool;

use crate::trace::Trace;

/// Parts of a trace's blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct HitRate {
    /// That the pool had cached.
    pub pool: f64,
    /// That the index of a router said to be cached, by the pool's events.
    pub index: f64,
    /// The part of the trace's prompt tokens that is in the blocks which the pool had cached.
    pub tokens: f64,
    /// By request: prompt tokens that the pool had cached.
    pub num_cached: Vec<usize>,
}

/// Blocks of a trace, its hit rates with a pool of so many tokens; `None`: as many as the trace needs. The trace must know
/// prefixes.
pub fn hit_rate(trace: &Trace, num_tokens: Option<usize>) -> HitRate {
    let root = HashRoot::new("hit rate", "", "").hash();
    let mut hashes: HashMap<u32, BlockHash> = HashMap::new();
    let num_all: usize = trace.requests.iter().map(|request| trace.hash_ids(request).len()).sum();
    let longest = trace.requests.iter().map(|request| trace.hash_ids(request).len()).max().unwrap_or(0);
    let num_blocks = num_tokens.map_or(num_all, |num| num / trace.block_tokens.max(1)).max(longest).max(1);
    let mut pool = BlockPool::new(num_blocks);
    pool.record_events();
    let index = Arc::new(KvIndex::new(1));
    let mut feed = CacheFeed::new(index.clone(), 0, num_blocks);
    let mut first = 0;
    let (mut num_in_pool, mut num_in_index, mut num_prompt_tokens) = (0, 0, 0);
    let mut num_cached = Vec::with_capacity(trace.requests.len());
    for request in &trace.requests {
        let of = |&id: &u32| *hashes.entry(id).or_insert_with(|| root.child(&[id]));
        let chain: Vec<BlockHash> = trace.hash_ids(request).iter().map(of).collect();
        let held = index.lookup(&chain, |hash| BlockKey(hash.short()));
        num_in_index += held.first().map_or(0, |holder| holder.num_blocks);
        let mut table = pool.find_prefix(&chain);
        num_in_pool += table.len();
        let num_prompt = request.num_prompt_tokens as usize;
        num_prompt_tokens += num_prompt;
        // The last block is partial.
        num_cached.push((table.len() * trace.block_tokens).min(num_prompt));
        pool.acquire(&table);
        for hash in &chain[table.len()..] {
            let block =
                pool.allocate().expect("the pool holds the longest prompt, and nothing else is in use");
            pool.cache(block, *hash, table.len().checked_sub(1).map(|before| chain[before]));
            table.push(block);
        }
        let events = pool.take_events();
        let batch = EventBatch { first, events, kind: BatchKind::Events };
        first = batch.next();
        feed.take(&batch).expect("the index has room for a pool of this size");
        pool.release(&table);
    }
    let part = |num: usize, all: usize| num as f64 / all.max(1) as f64;
    HitRate {
        pool: part(num_in_pool, num_all),
        index: part(num_in_index, num_all),
        tokens: part(num_cached.iter().sum(), num_prompt_tokens),
        num_cached,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(prompts: &[&[u32]]) -> Trace {
        let line = |(idx, ids): (usize, &&[u32])| {
            format!(
                "{{\"timestamp\": {idx}, \"input_length\": {}, \"output_length\": 1, \"hash_ids\": {ids:?}}}\n",
                512 * ids.len()
            )
        };
        Trace::parse("t", &prompts.iter().enumerate().map(line).collect::<String>()).expect("a trace")
    }

    #[test]
    fn a_pool_that_is_too_small_forgets_what_was_used_least_recently() {
        let trace = trace(&[&[1, 2, 3], &[1, 2, 4], &[5, 6, 7], &[1, 2, 3]]);
        // 2 of the second prompt, 3 of the last.
        let all = |blocks: [usize; 4]| {
            let part = blocks.iter().sum::<usize>() as f64 / 12.0;
            HitRate {
                pool: part,
                index: part,
                tokens: part,
                num_cached: blocks.map(|num| num * 512).to_vec(),
            }
        };
        assert_eq!(hit_rate(&trace, None), all([0, 2, 0, 3]));
        // Six blocks: the third prompt takes the place of 3, then what is left.
        assert_eq!(hit_rate(&trace, Some(6 * 512)), all([0, 2, 0, 2]));
        assert_eq!(hit_rate(&trace, Some(0)).pool, 2.0 / 12.0, "one prompt fits at least");
    }
}
