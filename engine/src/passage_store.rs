//! The KV of passages of text, kept for the prompts that contain them. It does not know prompts, blocks or how KV is
//! computed.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use baton_kv_cache::BlockHash;
use baton_kv_events::{BlockKey, CacheEvent, PendingEvents};
use baton_model_spec::PassageKv;

/// The content of a passage: a hash of its model, its tenant's salt and its tokens. Hashes of passages and of blocks have
/// roots of their own, so a passage is never taken for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PassageKey(BlockHash);

/// Passages by content, at most so many bytes of them. The least recently used one is evicted first. A passage has counted
/// owners: the store, and each prompt that is being blended. So an evicted passage stays in memory until that is over.
#[derive(Debug)]
pub(crate) struct PassageStore {
    max_bytes: usize,
    num_bytes: usize,
    entries: HashMap<PassageKey, Entry>,
    /// Every passage, by the time of its last use.
    by_use: BTreeMap<u64, PassageKey>,
    /// Counts uses.
    clock: u64,
    /// What was kept and evicted since it was last asked: for readers, a passage is a sequence of one block.
    events: PendingEvents,
}

#[derive(Debug)]
struct Entry {
    kv: Arc<PassageKv>,
    used_at: u64,
}

impl PassageKey {
    pub(crate) fn new(model: &str, salt: &str, tokens: &[u32]) -> PassageKey {
        PassageKey(BlockHash::of_passage(model, salt, tokens))
    }

    fn block_key(self) -> BlockKey {
        BlockKey(self.0.short())
    }
}

impl PassageStore {
    pub(crate) fn new(max_bytes: usize) -> PassageStore {
        PassageStore {
            max_bytes,
            num_bytes: 0,
            entries: HashMap::new(),
            by_use: BTreeMap::new(),
            clock: 0,
            events: PendingEvents::default(),
        }
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        self.events.take()
    }

    /// The passage, if it is kept. This uses it.
    pub(crate) fn get(&mut self, key: PassageKey) -> Option<Arc<PassageKv>> {
        let entry = self.entries.get_mut(&key)?;
        self.clock += 1;
        self.by_use.remove(&entry.used_at);
        entry.used_at = self.clock;
        self.by_use.insert(self.clock, key);
        Some(entry.kv.clone())
    }

    /// Keeps a passage that is not kept yet, and evicts others until there is room. One that is larger than the store is
    /// not kept.
    pub(crate) fn insert(&mut self, key: PassageKey, kv: Arc<PassageKv>) {
        if kv.size_bytes() > self.max_bytes {
            return;
        }
        debug_assert!(!self.entries.contains_key(&key), "kept already");
        self.num_bytes += kv.size_bytes();
        while self.num_bytes > self.max_bytes {
            let (_, oldest) = self.by_use.pop_first().expect("what is kept has bytes");
            let entry = self.entries.remove(&oldest).expect("kept under its key");
            self.num_bytes -= entry.kv.size_bytes();
            self.events.removed(oldest.block_key());
        }
        self.events.stored(None, key.block_key());
        self.clock += 1;
        self.by_use.insert(self.clock, key);
        self.entries.insert(key, Entry { kv, used_at: self.clock });
    }

    /// Keeps a passage no longer, if it is kept.
    pub(crate) fn remove(&mut self, key: PassageKey) {
        let Some(entry) = self.entries.remove(&key) else { return };
        self.by_use.remove(&entry.used_at);
        self.num_bytes -= entry.kv.size_bytes();
        self.events.removed(key.block_key());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(idx: u32) -> PassageKey {
        PassageKey::new("model", "", &[idx])
    }

    /// A passage of 16 bytes per token.
    fn passage(num_tokens: usize) -> Arc<PassageKv> {
        Arc::new(PassageKv::new(num_tokens, 16 * num_tokens, ()))
    }

    #[test]
    fn the_least_recently_used_passages_make_room() {
        let mut store = PassageStore::new(10 * 16);
        for idx in 0..3 {
            store.insert(key(idx), passage(3));
        }
        assert!(store.get(key(0)).is_some(), "used last now");
        let in_use = store.get(key(1)).expect("kept");
        store.get(key(0));
        store.get(key(2));
        store.insert(key(3), passage(2));
        let kept = |store: &mut PassageStore| {
            (0..5).filter(|&idx| store.get(key(idx)).is_some()).collect::<Vec<_>>()
        };
        assert_eq!(kept(&mut store), [0, 2, 3], "9 + 2 tokens are one too many");
        assert_eq!(
            (store.num_bytes, Arc::strong_count(&in_use)),
            (8 * 16, 1),
            "a user keeps what is evicted"
        );
        store.insert(key(4), passage(11));
        assert_eq!(kept(&mut store), [0, 2, 3], "larger than the store: nothing is evicted for it");
        store.insert(key(4), passage(10));
        assert_eq!((kept(&mut store), store.num_bytes), (vec![4], 10 * 16));
        let told: Vec<(bool, usize)> = store
            .take_events()
            .iter()
            .map(|event| (matches!(event, CacheEvent::Stored { .. }), event.blocks().len()))
            .collect();
        let stored = (true, 1);
        assert_eq!(told, [stored, stored, stored, (false, 1), stored, (false, 3), stored]);
        assert_eq!(store.by_use.len(), 1);
    }

    #[test]
    fn a_passage_that_is_removed_gives_its_room_back() {
        let mut store = PassageStore::new(10 * 16);
        store.insert(key(0), passage(4));
        store.insert(key(1), passage(6));
        store.take_events();
        for removed in [0, 0, 2] {
            store.remove(key(removed));
        }
        assert!(store.get(key(0)).is_none());
        assert_eq!((store.num_bytes, store.by_use.len()), (6 * 16, 1));
        assert_eq!(store.take_events(), [CacheEvent::removed(vec![key(0).block_key()])]);
        store.insert(key(0), passage(4));
        assert!(store.get(key(1)).is_some(), "there was room");
    }

    #[test]
    fn models_salts_and_tokens_keep_passages_apart() {
        let keys =
            [("a", "", &[1][..]), ("", "a", &[1]), ("a", "a", &[1]), ("a", "", &[1, 2]), ("a", "", &[2])];
        let keys = keys.map(|(model, salt, tokens)| PassageKey::new(model, salt, tokens));
        let distinct: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
        assert_ne!(
            keys[0].0,
            baton_kv_cache::HashRoot::new("a", "", "").hash().child(&[1]),
            "a block of the same tokens"
        );
    }
}
