//! Tests that need one GPU and NCCL. Without them, each prints SKIPPED and the reason. None has run on a GPU so far.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_kv_cache::{BlockId, BlockStorage};
use baton_transfer::cuda::blocks_on_device;
use baton_transfer_conformance::{LAYOUT, NUM_BLOCKS, fill, has_device, holds, pattern, storage};

use crate::{
    cuda::{CudaCommunicator, CudaFabric},
    fabric::{Fabric as _, NcclCommunicator as _, TransferDirection},
    tests::nccl_library,
};

/// Much longer than a device takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn library() -> Option<PathBuf> {
    nccl_library().filter(|_| has_device())
}

fn pool() -> Arc<BlockStorage> {
    Arc::new(blocks_on_device(0, LAYOUT, NUM_BLOCKS, None).unwrap())
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A communicator of one rank, which sends to itself.
fn alone(fabric: &CudaFabric) -> CudaCommunicator {
    let mut communicator = fabric.join_as(&fabric.unique_id().unwrap(), 1, 0, 0).unwrap();
    wait_until("joined", || communicator.is_ready().unwrap());
    communicator
}

#[test]
fn blocks_on_a_device_are_zeroed_and_hold_what_is_written() {
    if !has_device() {
        return;
    }
    let pool = pool();
    assert!(holds(&pool, BlockId(63), 2, 0));
    fill(&pool, BlockId(63), 2, 9);
    assert!(holds(&pool, BlockId(63), 2, 9) && holds(&pool, BlockId(63), 1, 0));
}

#[test]
fn one_rank_sends_pieces_to_itself_from_pool_to_pool() {
    let Some(library) = library() else { return };
    // In the memory of the device, and in registered memory of the host.
    for pools in [[pool(), pool()], [storage(), storage()], [storage(), pool()]] {
        let [source, target] = &pools;
        let fabric = CudaFabric::start(Some(&library), target).unwrap();
        let [from, to] = [source, target].map(|pool| fabric.reach(pool).unwrap());
        let mut communicator = alone(&fabric);
        let pieces: Vec<_> =
            (0..8).flat_map(|idx| (0..LAYOUT.num_layers).map(move |layer| (idx, layer))).collect();
        for &(idx, layer) in &pieces {
            fill(source, BlockId(idx), layer, pattern(idx, layer));
        }
        for (nth, group) in (1..).zip(pieces.chunks(6)) {
            let operations = group.iter().flat_map(|&(idx, layer)| {
                let len = LAYOUT.layer_bytes();
                let source = from.place(source.layer_offset(BlockId(idx), layer), len);
                let target = to.place(target.layer_offset(BlockId(63 - idx), layer), len);
                [(TransferDirection::Send, source), (TransferDirection::Receive, target)]
            });
            wait_until("ready", || communicator.is_ready().unwrap());
            // SAFETY: no other code accesses the pools until the group is done.
            unsafe { communicator.post_all(operations) }.unwrap();
            wait_until("done", || communicator.num_done().unwrap() == nth);
        }
        for (idx, layer) in pieces {
            assert!(holds(target, BlockId(63 - idx), layer, pattern(idx, layer)), "{idx}/{layer}");
        }
        communicator.abort().unwrap();
    }
}

#[test]
fn a_rank_whose_peer_never_joins_can_be_aborted() {
    let Some(library) = library() else { return };
    let pool = pool();
    let fabric = CudaFabric::start(Some(&library), &pool).unwrap();
    let mut communicator = fabric.join_as(&fabric.unique_id().unwrap(), 2, 0, 1).unwrap();
    assert!(!communicator.is_ready().unwrap(), "joining returns before it is complete");
    let start = Instant::now();
    communicator.abort().unwrap();
    assert!(start.elapsed() < PATIENCE);
    // Another communicator still works.
    alone(&fabric).abort().unwrap();
}
