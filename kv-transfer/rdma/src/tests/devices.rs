//! Pools on devices: which memory is registered with NIXL and written, and, on a machine with a GPU, real transfers.

use std::{io, path::Path, sync::Arc, time::Duration};

use baton_handoff::{KvFault, PushError};
use baton_kv_cache::{BlockId, BlockStorage};
use baton_transfer::{
    Receiver, ReceiverConfig, Sender, SenderConfig,
    cuda::{blocks_on_device, blocks_on_devices, num_devices},
};
use baton_transfer_conformance::{
    Guards, LAYOUT, NUM_BLOCKS, blocks,
    fake_devices::{HOST, counted_devices, fake_device},
    fill, has_device, holds, pattern, sender, soon, storage, writes,
};

use crate::tests::RDMA;
use crate::{
    RdmaReceiving, RdmaSending,
    nixl::Memory,
    tests::{fake_nixl, has_rdma, nixl},
};

/// A receiver that uses the NIXL library at `place`.
fn receiver_over(target: Arc<BlockStorage>, place: &Path) -> io::Result<Receiver> {
    let transport = RdmaReceiving::start(&target, Some(place), ([127, 0, 0, 1], 0).into())?;
    Receiver::start(target, &ReceiverConfig::default(), vec![Box::new(transport)])
}

/// A sender that uses the NIXL library at `place`.
fn sender_over(source: Arc<BlockStorage>, place: &Path) -> io::Result<Sender> {
    let config = SenderConfig { connect_timeout: Duration::from_secs(25), ..SenderConfig::default() };
    let transport = RdmaSending::start(&source, Some(place))?;
    Sender::start(source, config, vec![Box::new(transport)])
}

/// Pushes two blocks from pool to pool and verifies them. Then changes a byte, which verification must find.
async fn hand_over(source: &Arc<BlockStorage>, target: &Arc<BlockStorage>, place: &str) {
    let dst = blocks([3, 40]);
    let all = writes(&dst);
    for write in &all {
        fill(source, write.dst, write.layer_idx as usize, pattern(write.dst.0, write.layer_idx as usize));
    }
    let receiver = receiver_over(Arc::clone(target), Path::new(place)).unwrap();
    let sender = sender_over(Arc::clone(source), Path::new(place)).unwrap();
    let guards = Guards::default();
    let granted = receiver.grant(dst.clone(), guards.guard());
    let route = soon(sender.route(granted.access_key(), granted.offers(), guards.guard())).await.unwrap();
    let mut pushed = soon(route.push(all.clone())).await.unwrap();
    assert_eq!(pushed.pieces.len(), all.len());
    for write in &all {
        let layer_idx = write.layer_idx as usize;
        assert!(holds(target, write.dst, layer_idx, pattern(write.dst.0, layer_idx)), "{write:?}");
        assert!(
            holds(target, BlockId(write.dst.0 + 1), layer_idx, 0),
            "the block after {write:?} is unchanged"
        );
    }
    soon(granted.verify(pushed.pieces.clone())).await.unwrap();
    fill(target, BlockId(40), 1, 0);
    pushed.pieces.retain(|piece| (piece.block_idx, piece.layer_idx) == (1, 1));
    let fault = soon(granted.verify(pushed.pieces)).await.unwrap_err();
    assert_eq!(fault, KvFault::Checksum { block_idx: 1, layer_idx: 1 });
    soon(route.close()).await;
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!(guards.num_out(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_are_described_to_nixl_by_the_memory_of_each_rank() {
    let host = || storage();
    let device = || Arc::new(fake_device(LAYOUT, NUM_BLOCKS));
    // `devices`: each has one of the two heads. `replicas`: each head is on two devices.
    let devices = || Arc::new(counted_devices(LAYOUT, NUM_BLOCKS, &[1, 2]).0);
    let replicas = || Arc::new(counted_devices(LAYOUT, NUM_BLOCKS, &[3, 4, 5, 6]).0);
    let pools: [&dyn Fn() -> Arc<BlockStorage>; 4] = [&host, &device, &devices, &replicas];
    for (source, target) in pools.iter().flat_map(|source| pools.map(|target| (source(), target()))) {
        let memories: Vec<Memory> =
            (0..source.num_ranks()).map(|rank| Memory::of(&source.region(rank))).collect();
        let regions: Vec<_> = (0..target.num_ranks()).map(|rank| target.region(rank)).collect();
        let places =
            regions.iter().map(|region| region.address()..region.address() + region.size_bytes() as u64);
        let places: Vec<_> = places.collect();
        places.iter().for_each(|place| drop(fake_nixl::take_written(place)));
        hand_over(&source, &target, fake_nixl::PLACE).await;
        for (region, place) in regions.iter().zip(&places) {
            let (kind, device) = Memory::of(region).code();
            let mut num_bytes = 0;
            for (read, wrote) in fake_nixl::take_written(place) {
                assert_eq!((wrote.kind, wrote.device), (kind, device.into()));
                // The source is memory that a rank has registered.
                assert!(memories.iter().any(|memory| (read.kind, read.device as u32) == memory.code()));
                assert_eq!(read.len, wrote.len);
                num_bytes += wrote.len;
            }
            assert_eq!(num_bytes, 2 * LAYOUT.num_layers * region.layout().layer_bytes(), "all heads, once");
        }
    }
    // NIXL's numbers: DRAM_SEG 0, VRAM_SEG 1.
    let code = |pool: Arc<BlockStorage>| Memory::of(&pool.region(0)).code();
    assert_eq!((code(host()), code(device())), ((0, 0), (1, 5)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_that_one_rank_refuses_is_not_written() {
    let pool = |devices: &[u32]| Arc::new(counted_devices(LAYOUT, NUM_BLOCKS, devices).0);
    let place = Path::new(fake_nixl::PLACE);
    let receiver = receiver_over(pool(&[1, fake_nixl::REFUSING]), place).unwrap();
    let sender = sender_over(pool(&[1, 2]), place).unwrap();
    let guards = Guards::default();
    let granted = receiver.grant(blocks([3]), guards.guard());
    let route = soon(sender.route(granted.access_key(), granted.offers(), guards.guard())).await.unwrap();
    // The sender tries once more. The same rank refuses again.
    let error = soon(route.push(writes(&blocks([3])))).await.unwrap_err();
    assert!(matches!(error, PushError::Lost(_)), "{error}");
    soon(route.close()).await;
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!(guards.num_out(), 0);
}

/// With the real NIXL, an agent for each rank, and memory of the host.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_rank_writes_to_the_ranks_with_the_same_heads() {
    if !has_rdma() {
        return;
    }
    let ranks = |num_ranks| Arc::new(counted_devices(LAYOUT, NUM_BLOCKS, &vec![HOST; num_ranks]).0);
    for (num_sources, num_targets) in [(2, 2), (1, 2), (2, 1), (4, 2)] {
        hand_over(&ranks(num_sources), &ranks(num_targets), nixl().to_str().unwrap()).await;
    }
}

/// With the real NIXL: UCX looks up the memory, and finds that it belongs to no GPU.
#[test]
fn memory_of_no_gpu_is_refused_at_the_start_with_a_reason() {
    if !has_rdma() {
        return;
    }
    let pool = || Arc::new(fake_device(LAYOUT, NUM_BLOCKS));
    let errors = [sender(&pool(), RDMA).err().unwrap(), receiver_over(pool(), &nixl()).err().unwrap()];
    for error in errors.map(|error| error.to_string()) {
        assert!(error.starts_with("rdma cannot use the memory of device 5: NIXL: register_mem"), "{error}");
        let why = match num_devices() {
            Ok(_) => "UCX needs its modules for CUDA".to_owned(),
            Err(missing) => missing.to_string(),
        };
        assert!(error.contains(&why), "{error}");
    }
    // The failures do not affect other pools.
    drop(sender(&storage(), RDMA).unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_go_between_a_gpu_and_the_host_in_every_direction() {
    if !has_rdma() || !has_device() {
        return;
    }
    let host = || storage();
    let gpu = || Arc::new(blocks_on_device(0, LAYOUT, NUM_BLOCKS, None).unwrap());
    let ranks = || Arc::new(blocks_on_devices(&[0, 0], LAYOUT, NUM_BLOCKS, Vec::new()).unwrap());
    for [source, target] in [
        [gpu(), gpu()],
        [gpu(), host()],
        [host(), gpu()],
        [ranks(), ranks()],
        [gpu(), ranks()],
        [ranks(), gpu()],
    ] {
        hand_over(&source, &target, nixl().to_str().unwrap()).await;
    }
}
