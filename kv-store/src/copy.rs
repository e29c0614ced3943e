//! Copies between records and blocks of a pool. A pool's device copies [blocks that it reaches](HostBlock) itself, many at once, and
//! computes their checksums in the pool; a pool in host memory likewise. Others were verified by a processor when they were read.

use std::{io, sync::Arc};

use baton_kv_cache::{BlockId, BlockStorage, HostBlock};

use crate::record::{BodyShape, Record, RecordName};

/// A record of a block of the pool: in `room`, where there is some for the pool's device.
pub(crate) fn from_pool(
    storage: &BlockStorage,
    block: BlockId,
    name: RecordName,
    room: Option<HostBlock>,
) -> io::Result<Record> {
    let (shape, pieces) = (BodyShape::new(storage.layout()), pieces(storage, [block]));
    let Some(room) = room else {
        return Record::new(name, shape, |body| {
            // SAFETY: the guard of the sequence keeps the block, and a cached block is not written (invariant 5).
            unsafe { storage.load_all(&pieces, body) }
        });
    };
    // SAFETY: as above.
    let (copied, sums) =
        unsafe { (storage.copy_out(block, room)?, storage.head_checksums_there(&pieces, 0)?) };
    Ok(Record::reached(name, shape, copied, sums))
}

/// Writes records into blocks of the pool. Returns how many at the front are there and whole.
pub(crate) fn to_pool(
    storage: &BlockStorage,
    records: &[Arc<Record>],
    blocks: &[BlockId],
) -> io::Result<usize> {
    let mut num_whole = 0;
    for run in records.chunk_by(|one, next| one.as_reached().is_some() == next.as_reached().is_some()) {
        let blocks = &blocks[num_whole..][..run.len()];
        let reached: Vec<(&HostBlock, BlockId)> =
            run.iter().filter_map(|record| record.as_reached()).zip(blocks.iter().copied()).collect();
        if reached.is_empty() {
            for (record, &block) in run.iter().zip(blocks) {
                // SAFETY: the caller of `KvStore::write_to_pool` owns the block alone.
                unsafe { storage.store_all(&pieces(storage, [block]), record.body()) }?;
            }
            num_whole += run.len();
            continue;
        }
        let (shape, pieces) = (BodyShape::new(storage.layout()), pieces(storage, blocks.iter().copied()));
        // SAFETY: as above.
        let sums = unsafe {
            storage.copy_in(&reached)?;
            match storage.device() {
                Some(_) => storage.head_checksums_there(&pieces, 0)?,
                None => Some(
                    pieces
                        .iter()
                        .flat_map(|&(block, layer)| shape.sums(storage.layer(block, layer)))
                        .collect(),
                ),
            }
        };
        let num_parts = shape.num_parts();
        let is_whole = |(idx, record): &(usize, &Arc<Record>)| match &sums {
            Some(sums) => record.matches(&sums[idx * num_parts..][..num_parts]),
            None => record.is_whole(),
        };
        let whole = run.iter().enumerate().take_while(is_whole).count();
        num_whole += whole;
        if whole < run.len() {
            break;
        }
    }
    Ok(num_whole)
}

/// All layers of blocks, in the order of a body.
fn pieces(storage: &BlockStorage, blocks: impl IntoIterator<Item = BlockId>) -> Vec<(BlockId, usize)> {
    let layers = |block| (0..storage.layout().num_layers).map(move |layer_idx| (block, layer_idx));
    blocks.into_iter().flat_map(layers).collect()
}
