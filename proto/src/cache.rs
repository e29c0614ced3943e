//! Batches of cache events, as messages and back.

use baton_kv_events::{BatchKind, BlockKey, CacheEvent, CacheLevel, EventBatch};

use crate::v1;

impl From<EventBatch> for v1::CacheEvents {
    fn from(batch: EventBatch) -> v1::CacheEvents {
        let kind = match batch.kind {
            BatchKind::Events => v1::CacheBatch::Events,
            BatchKind::DumpPart => v1::CacheBatch::DumpPart,
            BatchKind::DumpEnd => v1::CacheBatch::DumpEnd,
        };
        let events = batch.events.into_iter().map(v1::CacheEvent::from).collect();
        v1::CacheEvents { first: batch.first, events, kind: kind.into() }
    }
}

impl From<CacheEvent> for v1::CacheEvent {
    fn from(event: CacheEvent) -> v1::CacheEvent {
        let keys = |blocks: Vec<BlockKey>| blocks.into_iter().map(|block| block.0).collect();
        let message = v1::CacheEvent { level: event.level().0.into(), ..v1::CacheEvent::default() };
        match event {
            CacheEvent::Stored { parent, blocks, .. } => {
                v1::CacheEvent { parent: parent.map(|parent| parent.0), stored: keys(blocks), ..message }
            }
            CacheEvent::Removed { blocks, .. } => v1::CacheEvent { removed: keys(blocks), ..message },
        }
    }
}

impl From<v1::CacheEvents> for EventBatch {
    /// A kind that is not known is taken for events: the number of a later batch then shows a gap.
    fn from(message: v1::CacheEvents) -> EventBatch {
        let kind = match message.kind() {
            v1::CacheBatch::Events => BatchKind::Events,
            v1::CacheBatch::DumpPart => BatchKind::DumpPart,
            v1::CacheBatch::DumpEnd => BatchKind::DumpEnd,
        };
        let events = message.events.into_iter().map(CacheEvent::from).collect();
        EventBatch { first: message.first, events, kind }
    }
}

impl From<v1::CacheEvent> for CacheEvent {
    /// What has both stored and removed blocks is malformed; its removed ones are taken.
    fn from(message: v1::CacheEvent) -> CacheEvent {
        let keys = |blocks: Vec<u64>| blocks.into_iter().map(BlockKey).collect();
        // A level beyond the last is none.
        let level = CacheLevel(u8::try_from(message.level).unwrap_or(u8::MAX));
        match message.removed.is_empty() {
            true => CacheEvent::stored(message.parent.map(BlockKey), keys(message.stored)).at(level),
            false => CacheEvent::removed(keys(message.removed)).at(level),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_come_back_as_they_were() {
        let keys = |keys: &[u64]| keys.iter().map(|&key| BlockKey(key)).collect::<Vec<_>>();
        for kind in [BatchKind::Events, BatchKind::DumpPart, BatchKind::DumpEnd] {
            let batch = EventBatch {
                first: 7,
                events: vec![
                    CacheEvent::stored(None, keys(&[1, u64::MAX])),
                    CacheEvent::stored(Some(BlockKey(0)), keys(&[3])),
                    CacheEvent::removed(keys(&[1, 3])),
                    CacheEvent::stored(None, Vec::new()).at(CacheLevel::POOL),
                    CacheEvent::stored(Some(BlockKey(1)), keys(&[3, 4])).at(CacheLevel::POOL),
                    CacheEvent::removed(keys(&[4])).at(CacheLevel::above(1)),
                ],
                kind,
            };
            assert_eq!(EventBatch::from(v1::CacheEvents::from(batch.clone())), batch);
        }
        let beyond = v1::CacheEvent { level: 300, ..v1::CacheEvent::default() };
        assert_eq!(CacheEvent::from(beyond).level().tier(), None);
        let strange = v1::CacheEvents { kind: 77, ..v1::CacheEvents::default() };
        assert_eq!(EventBatch::from(strange).kind, BatchKind::Events);
    }
}
