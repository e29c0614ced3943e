//! What a block pool says of its prefix cache is what its prefix cache holds.

use std::collections::HashSet;

use baton_kv_cache::{BlockHash, BlockId, HashRoot};
use baton_kv_events::{BlockKey, CacheEvent};
use baton_scheduler::BlockPool;

#[test]
fn events_tell_what_the_prefix_cache_holds() {
    let mut pool = BlockPool::new(12);
    pool.record_events();
    let mut known: HashSet<BlockKey> = HashSet::new();
    let (mut num_stored, mut num_removed) = (0, 0);
    let mut random = 3_u64;
    let mut running: Vec<Vec<BlockId>> = Vec::new();
    for _ in 0..2000 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        // Prompts of up to five blocks that share beginnings.
        let prompt: Vec<u32> =
            (0..1 + (random >> 40) % 5).map(|idx| ((random >> (8 * idx)) % 3) as u32).collect();
        let hashes: Vec<BlockHash> = HashRoot::new("m", "", "").block_hashes(&prompt, 1).collect();
        let mut table = pool.find_prefix(&hashes);
        pool.acquire(&table);
        let first = table.len();
        while table.len() < hashes.len()
            && let Some(block) = pool.allocate()
        {
            table.push(block);
        }
        let filled = table.iter().copied().zip(hashes.iter().copied()).skip(first);
        pool.cache_all(first.checked_sub(1).map(|idx| hashes[idx]), filled.collect::<Vec<_>>());
        running.push(table);
        if running.len() > 2 || random >> 63 == 0 {
            let table = running.remove((random >> 33) as usize % running.len());
            pool.release(&table);
        }
        for event in pool.take_events() {
            match event {
                CacheEvent::Stored { parent, blocks, .. } => {
                    assert!(parent.is_none_or(|parent| parent != blocks[0]));
                    num_stored += blocks.len();
                    assert!(blocks.iter().all(|&block| known.insert(block)), "stored twice");
                }
                CacheEvent::Removed { blocks, .. } => {
                    num_removed += blocks.len();
                    assert!(blocks.iter().all(|block| known.remove(block)), "removed what was not there");
                }
            }
        }
        for hash in hashes {
            let is_cached = !pool.find_prefix(&[hash]).is_empty();
            assert_eq!(known.contains(&BlockKey(hash.short())), is_cached);
        }
    }
    assert!(num_stored > 500 && num_removed > 500, "{num_stored} {num_removed}");
    assert!(pool.take_events().is_empty());
}
