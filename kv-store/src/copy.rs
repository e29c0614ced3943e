//! Copies between records and blocks of a pool.

use std::io;

use baton_kv_cache::{BlockId, BlockStorage};

use crate::record::{Record, RecordName};

/// A record of a block of the pool.
pub(crate) fn from_pool(storage: &BlockStorage, block: BlockId, name: RecordName) -> io::Result<Record> {
    Record::new(name, storage.layout().block_bytes(), |body| {
        // SAFETY: the guard of the sequence keeps the block, and a cached block is not written (invariant 5).
        unsafe { storage.load_all(&pieces(storage, block), body) }
    })
}

/// Writes a record into a block of the pool.
pub(crate) fn to_pool(storage: &BlockStorage, block: BlockId, record: &Record) -> io::Result<()> {
    // SAFETY: the caller of `KvStore::write_to_pool` owns the block alone.
    unsafe { storage.store_all(&pieces(storage, block), record.body()) }
}

fn pieces(storage: &BlockStorage, block: BlockId) -> Vec<(BlockId, usize)> {
    (0..storage.layout().num_layers).map(|layer_idx| (block, layer_idx)).collect()
}
