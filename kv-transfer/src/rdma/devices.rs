//! Pools on devices: what is handed to NIXL for them, and, where there is a GPU, that it works.

use std::sync::Arc;

use baton_kv_cache::{BlockId, BlockStorage};

use super::nixl::{Memory, pretended};
use crate::{
    KvFault, Receiver, ReceiverConfig, Sender, SenderConfig, TransportKind,
    cuda::{blocks_on_device, num_devices},
    pretended::pretended_device,
    testing::{
        Guards, LAYOUT, NUM_BLOCKS, blocks, fill, has_device, has_rdma, holds, nixl, pattern, sender_config,
        soon, storage, writes,
    },
};

const RDMA: &[TransportKind] = &[TransportKind::Rdma];

fn receiver_config() -> ReceiverConfig {
    ReceiverConfig {
        rdma_listen: Some(([127, 0, 0, 1], 0).into()),
        nixl: Some(nixl()),
        ..ReceiverConfig::default()
    }
}

/// Pushes two blocks from pool to pool, verifies them, and finds a byte that was changed afterwards.
async fn hand_over(source: &Arc<BlockStorage>, target: &Arc<BlockStorage>, place: &str) {
    let dst = blocks([3, 40]);
    let all = writes(&dst);
    for write in &all {
        fill(source, write.dst, write.layer_idx as usize, pattern(write.dst.0, write.layer_idx as usize));
    }
    let config = ReceiverConfig { nixl: Some(place.into()), ..receiver_config() };
    let receiver = Receiver::start(Arc::clone(target), config).unwrap();
    let config = SenderConfig { nixl: Some(place.into()), ..sender_config(RDMA) };
    let sender = Sender::start(Arc::clone(source), config).unwrap();
    let guards = Guards::default();
    let granted = receiver.grant(dst.clone(), guards.guard());
    let route = soon(sender.route(granted.pass(), granted.offers(), guards.guard())).await.unwrap();
    let mut pushed = soon(route.push(all.clone())).await.unwrap();
    assert_eq!(pushed.pieces.len(), all.len());
    for write in &all {
        let layer_idx = write.layer_idx as usize;
        assert!(holds(target, write.dst, layer_idx, pattern(write.dst.0, layer_idx)), "{write:?}");
        assert!(holds(target, BlockId(write.dst.0 + 1), layer_idx, 0), "beside {write:?}");
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
async fn pieces_are_described_by_the_memory_that_each_side_has() {
    let host = || storage();
    let device = || Arc::new(pretended_device(LAYOUT, NUM_BLOCKS));
    for [source, target] in [[device(), device()], [device(), host()], [host(), device()], [host(), host()]] {
        hand_over(&source, &target, pretended::PLACE).await;
        let place = target.address()..target.address() + target.size_bytes() as u64;
        let written = pretended::written_to(place);
        assert_eq!(written.len(), 2 * LAYOUT.num_layers);
        let (from, to) = (Memory::of(&source).code(), Memory::of(&target).code());
        for (read, wrote) in written {
            assert_eq!(
                ((read.kind, read.device), (wrote.kind, wrote.device)),
                ((from.0, from.1.into()), (to.0, to.1.into()))
            );
            assert_eq!((read.len, wrote.len), (LAYOUT.layer_bytes(), LAYOUT.layer_bytes()));
            assert_eq!(read.address as u64 - source.address(), wrote.address as u64 - target.address());
        }
    }
    // As NIXL numbers them: DRAM_SEG 0, VRAM_SEG 1.
    assert_eq!((Memory::of(&host()).code(), Memory::of(&device()).code()), ((0, 0), (1, 5)));
}

/// The real NIXL: UCX looks what the memory is, and finds that no GPU has it.
#[test]
fn memory_that_is_no_gpus_is_refused_at_the_start_in_words() {
    if !has_rdma() {
        return;
    }
    let pool = || Arc::new(pretended_device(LAYOUT, NUM_BLOCKS));
    let errors = [
        Sender::start(pool(), sender_config(RDMA)).err().unwrap(),
        Receiver::start(pool(), receiver_config()).err().unwrap(),
    ];
    for error in errors.map(|error| error.to_string()) {
        assert!(error.starts_with("rdma cannot use the memory of device 5: NIXL: register_mem"), "{error}");
        let why = match num_devices() {
            Ok(_) => "UCX needs its modules for CUDA".to_owned(),
            Err(missing) => missing.to_string(),
        };
        assert!(error.contains(&why), "{error}");
    }
    // Nothing of it is in the way of others.
    drop(Sender::start(storage(), sender_config(RDMA)).unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_go_between_a_gpu_and_the_host_in_every_direction() {
    if !has_rdma() || !has_device() {
        return;
    }
    let host = || storage();
    let gpu = || Arc::new(blocks_on_device(0, LAYOUT, NUM_BLOCKS, None).unwrap());
    for [source, target] in [[gpu(), gpu()], [gpu(), host()], [host(), gpu()]] {
        hand_over(&source, &target, nixl().to_str().unwrap()).await;
    }
}
