//! What every transport must do, over real sockets or real mappings, in one process.

use std::sync::Arc;

use baton_handoff::{
    AccessKey, Generation, KvFault, Piece, PieceWrite, PushError, RouteError, Secret, Source, TransportOffer,
};
use baton_kv_cache::{BlockId, BlockStorage, KvLayout};

use crate::{
    Guards, LAYOUT, TestTransport, TransferPair, blocks, bytes, bytes_of, change, eventually, fill, sender,
    soon, storage, writes,
};

/// What is pushed is in the granted blocks when the push ends, has the right checksums, and is counted on both sides.
pub async fn pushed_pieces_arrive_verify_and_are_counted(transport: TestTransport) {
    let kind = transport.kind;
    let fabric = TransferPair::new(&[transport]);
    let guards = Guards::default();
    let dst = blocks([9, 2, 33, 60]);
    let granted = fabric.receiver.grant(dst.clone(), guards.guard());
    let route = fabric.route(&granted).await.unwrap();
    assert_eq!(route.transport(), kind);

    let all = writes(&dst);
    for layer in all.chunks(dst.len()) {
        let pushed = soon(route.push(layer.to_vec())).await.unwrap();
        assert_eq!((pushed.transport, pushed.bytes), (kind, bytes_of(&pushed)));
        let mut arrived: Vec<_> = pushed.pieces.iter().map(|p| (p.layer_idx, p.block_idx)).collect();
        arrived.sort_unstable();
        assert_eq!(arrived, layer.iter().map(|w| (w.layer_idx, w.block_idx)).collect::<Vec<_>>());
        assert!(fabric.holds(layer), "placed when the push says so");
        soon(granted.verify(pushed.pieces)).await.unwrap();
    }
    assert!(soon(route.push(vec![])).await.unwrap().pieces.is_empty());
    let untouched = BlockId(3);
    assert!(bytes(&fabric.target, untouched, 0).iter().all(|&byte| byte == 0));

    let num_bytes = (all.len() * LAYOUT.layer_bytes()) as u64;
    for counters in [fabric.sender.counters(), fabric.receiver.counters()] {
        let counts = counters.of(kind).read();
        assert_eq!((counts.bytes, counts.pieces), (num_bytes, all.len() as u64));
        assert!(counts.routes >= 1);
    }
    assert!(soon(granted.commit()).await.is_some());
    assert_eq!(guards.num_out(), 0);
    assert_eq!(fabric.receiver.load(), Default::default());
}

/// Verification finds one wrong bit, and pieces that were never granted.
pub async fn a_flipped_bit_is_found(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let dst = blocks([4, 5]);
    let granted = fabric.receiver.grant(dst.clone(), ());
    let route = fabric.route(&granted).await.unwrap();
    let pushed = soon(route.push(writes(&dst))).await.unwrap();
    soon(granted.verify(pushed.pieces.clone())).await.unwrap();

    let unknown = Piece { block_idx: 2, layer_idx: 0, checksum: 0 };
    let fault = soon(granted.verify(vec![unknown])).await.unwrap_err();
    assert_eq!(fault, KvFault::UnknownPiece { block_idx: 2, layer_idx: 0 });

    change(&fabric.target, BlockId(5), 2, |piece| piece[77] ^= 4);
    let fault = soon(granted.verify(pushed.pieces)).await.unwrap_err();
    assert_eq!(fault, KvFault::Checksum { block_idx: 1, layer_idx: 2 });
}

/// Blocks of a revoked grant are not written.
pub async fn a_late_write_lands_nowhere(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let guards = Guards::default();
    let dst = blocks([7]);
    let granted = fabric.receiver.grant(dst.clone(), guards.guard());
    let route = fabric.route(&granted).await.unwrap();
    let mut now = writes(&dst);
    let late = now.split_off(1);
    soon(route.push(now)).await.unwrap();

    let keep = soon(granted.revoke()).await.expect("fenced");
    assert_eq!(guards.num_out(), 1, "given back, not dropped");
    drop(keep);
    for layer_idx in 0..LAYOUT.num_layers {
        fill(&fabric.target, BlockId(7), layer_idx, 0xEE);
    }
    let error = soon(route.push(late)).await.unwrap_err();
    assert_eq!(error, PushError::Revoked);
    for layer_idx in 0..LAYOUT.num_layers {
        assert!(bytes(&fabric.target, BlockId(7), layer_idx).iter().all(|&byte| byte == 0xEE));
    }
}

/// A guessed access key opens nothing.
pub async fn an_unknown_generation_writes_nothing(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let dst = blocks([7]);
    let granted = fabric.receiver.grant(dst.clone(), ());
    let right = granted.access_key();
    let guess = AccessKey { secret: Secret([1; 16]), ..right };
    let other = AccessKey { generation: Generation(right.generation.0 ^ 1), ..right };
    for guess in [guess, other] {
        // Sockets find out with the first frame, shared memory when the grant is opened.
        if let Ok(route) = soon(fabric.sender.route(guess, granted.offers(), ())).await {
            let error = soon(route.push(writes(&dst))).await.unwrap_err();
            assert_eq!(error, PushError::Revoked);
        }
    }
    for layer_idx in 0..LAYOUT.num_layers {
        assert!(bytes(&fabric.target, BlockId(7), layer_idx).iter().all(|&byte| byte == 0));
    }
}

/// A pool of another incarnation is not written to.
pub async fn a_restarted_pool_is_told_from_the_old_one(transport: TestTransport) {
    let kind = transport.kind;
    let mut fabric = TransferPair::new(&[transport]);
    let granted = fabric.receiver.grant(blocks([1]), ());
    // Another pool answers at the old pool's address.
    let offer = match fabric.offer(kind) {
        TransportOffer::Tcp { address, pool } => TransportOffer::Tcp { address, pool: pool ^ 1 },
        TransportOffer::Shm { host_id, socket_path, pool } => {
            TransportOffer::Shm { host_id, socket_path, pool: pool ^ 1 }
        }
        TransportOffer::Rdma { address, pool } => TransportOffer::Rdma { address, pool: pool ^ 1 },
        TransportOffer::Nccl { address, pool } => TransportOffer::Nccl { address, pool: pool ^ 1 },
    };
    let error = soon(fabric.sender.route(granted.access_key(), &[offer], ())).await.err().unwrap();
    assert!(matches!(error, RouteError::OtherIncarnation(_)), "{error}");
    drop(granted);

    // A real restart: what was connected is of no use, what is offered now works.
    let granted = fabric.receiver.grant(blocks([1]), ());
    let route = fabric.route(&granted).await.unwrap();
    drop(granted);
    fabric.receiver = fabric.restarted(&storage(), &fabric.config);
    assert!(soon(route.push(writes(&blocks([1])))).await.is_err());

    let granted = fabric.receiver.grant(blocks([2]), ());
    let route = fabric.route(&granted).await.unwrap();
    soon(route.push(writes(&blocks([2])))).await.unwrap();
}

/// Pools of other models have no route.
pub async fn a_pool_of_another_layout_is_refused(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let granted = fabric.receiver.grant(blocks([1]), ());
    for layout in [
        KvLayout { num_layers: 4, ..LAYOUT },
        KvLayout { head_dim: 16, ..LAYOUT },
        KvLayout { block_size: 8, ..LAYOUT },
    ] {
        let storage = Arc::new(BlockStorage::new(layout, 4).unwrap());
        let sender = sender(&storage, &[transport]).unwrap();
        let guards = Guards::default();
        let routed = sender.route(granted.access_key(), granted.offers(), guards.guard());
        let error = soon(routed).await.err().unwrap();
        // Over a network, no peer is told the reason.
        assert!(matches!(error, RouteError::Unreachable(_) | RouteError::OtherIncarnation(_)), "{error}");
        assert_eq!(guards.num_out(), 0);
    }
}

/// Pieces that neither side has are refused, and the route goes on.
pub async fn pieces_outside_of_the_pools_are_refused(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let dst = blocks([1]);
    let granted = fabric.receiver.grant(dst, ());
    let route = fabric.route(&granted).await.unwrap();
    let sound = PieceWrite { layer_idx: 0, block_idx: 0, src: BlockId(1).into(), dst: BlockId(1) };
    for piece in [
        PieceWrite { src: BlockId(64).into(), ..sound.clone() },
        PieceWrite { layer_idx: 3, ..sound.clone() },
        // Sources of this side's size are whole blocks, and others are not there to be converted.
        PieceWrite { src: Source::Tokens { tokens: 0..4, blocks: [BlockId(1)].into() }, ..sound.clone() },
        PieceWrite { src: Source::Tokens { tokens: 0..0, blocks: [].into() }, ..sound.clone() },
        // Sockets refuse the position in the grant, shared memory the block.
        PieceWrite { block_idx: 1, dst: BlockId(64), ..sound.clone() },
        PieceWrite { block_idx: u32::MAX, dst: BlockId(u32::MAX), ..sound.clone() },
    ] {
        let error = soon(route.push(vec![piece])).await.unwrap_err();
        assert!(matches!(error, PushError::Refused(_)), "{error}");
    }
    // The route goes on.
    soon(route.push(vec![sound])).await.unwrap();
}

/// Nothing reads the source blocks when a route is closed.
pub async fn a_closed_route_gives_its_guard_back(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let guards = Guards::default();
    let dst = blocks(0..32);
    let granted = fabric.receiver.grant(dst.clone(), ());
    let routed = fabric.sender.route(granted.access_key(), granted.offers(), guards.guard());
    let route = soon(routed).await.unwrap();
    let pushes: Vec<_> = writes(&dst).chunks(4).map(|pieces| route.push(pieces.to_vec())).collect();
    assert_eq!(guards.num_out(), 1);
    soon(route.close()).await;
    assert_eq!(guards.num_out(), 0);
    // Nothing reads from the source any more; each push has ended one way or the other.
    for push in pushes {
        match soon(push).await {
            Ok(_) | Err(PushError::Closed) => {}
            Err(error) => panic!("{error}"),
        }
    }

    // A route that is dropped without `close` gives the guard back, too.
    let routed = fabric.sender.route(granted.access_key(), granted.offers(), guards.guard());
    let route = soon(routed).await.unwrap();
    let push = route.push(writes(&dst));
    drop((route, push));
    eventually("the guard is back", || guards.num_out() == 0).await;
}

/// A grant that is dropped gives its blocks back.
pub async fn a_dropped_grant_is_revoked(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let guards = Guards::default();
    drop(fabric.receiver.grant(blocks([3]), guards.guard()));
    assert_eq!(guards.num_out(), 0, "no writer has opened it");

    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let route = fabric.route(&granted).await.unwrap();
    drop(granted);
    eventually("the guard is back", || guards.num_out() == 0).await;
    assert!(soon(route.push(writes(&blocks([3])))).await.is_err());
    assert_eq!(fabric.receiver.load(), Default::default());
}

/// A sender that goes holds no block of the receiver.
pub async fn a_lost_peer_gives_everything_back(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let TransferPair { receiver, sender, source, dir, .. } = fabric;
    let guards = Guards::default();
    let granted = receiver.grant(blocks([3]), guards.guard());
    let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
    soon(route.push(writes(&blocks([3])))).await.unwrap();
    // The prefill worker goes, with everything it has.
    drop((route, sender, source));
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!(guards.num_out(), 0);
    drop((receiver, dir));
}

/// Every guard comes back, whenever handoffs are cancelled.
pub async fn a_thousand_grants_with_random_cancels_return_every_block(transport: TestTransport) {
    const NUM_TASKS: u64 = 4;
    let fabric = Arc::new(TransferPair::new(&[transport]));
    let guards = [Guards::default(), Guards::default()];
    for block_idx in 0..64 {
        for layer_idx in 0..LAYOUT.num_layers {
            fill(&fabric.target, BlockId(block_idx), layer_idx, 0xEE);
        }
    }
    let tasks: Vec<_> = (0..NUM_TASKS)
        .map(|task_idx| {
            let (fabric, guards) = (Arc::clone(&fabric), guards.clone());
            tokio::spawn(async move {
                let mut random = Random(task_idx + 1);
                // Each task owns a quarter of the target's blocks, so that it can look at them.
                let own = blocks((task_idx as u32 * 16)..(task_idx as u32 * 16 + 16));
                for _ in 0..1000 / NUM_TASKS {
                    handoff(&fabric, &guards, &own, &mut random).await;
                }
            })
        })
        .collect();
    for task in tasks {
        soon(task).await.unwrap();
    }
    let num_out = || guards.iter().map(Guards::num_out).sum::<usize>();
    eventually("every guard is back", || num_out() == 0).await;
    assert_eq!(fabric.receiver.load(), Default::default());
}

/// One handoff that ends somewhere. Free blocks are filled with 0xEE, and must be when it begins.
async fn handoff(fabric: &TransferPair, guards: &[Guards; 2], own: &[BlockId], random: &mut Random) {
    for &block in own {
        for layer_idx in 0..LAYOUT.num_layers {
            assert!(bytes(&fabric.target, block, layer_idx).iter().all(|&byte| byte == 0xEE));
        }
    }
    let num_blocks = 1 + random.below(8) as usize;
    let first = random.below(8) as usize;
    let dst = own[first..first + num_blocks].to_vec();
    let granted = fabric.receiver.grant(dst.clone(), guards[0].guard());
    let routed = fabric.sender.route(granted.access_key(), fabric.receiver.offers(), guards[1].guard());
    let fate = random.below(6);
    if fate == 0 {
        // Revoked while the route is being opened.
        let (_, keep) = soon(async { tokio::join!(routed, granted.revoke()) }).await;
        assert!(keep.is_some());
    } else {
        let route = soon(routed).await.unwrap();
        let pushes: Vec<_> =
            writes(&dst).chunks(1 + num_blocks / 2).map(|pieces| route.push(pieces.to_vec())).collect();
        match fate {
            1 => assert!(soon(granted.revoke()).await.is_some()),
            2 => {
                drop(route);
                assert!(soon(granted.revoke()).await.is_some());
            }
            3 => {
                let (keep, ()) = soon(async { tokio::join!(granted.revoke(), route.close()) }).await;
                assert!(keep.is_some());
            }
            _ => {
                for push in pushes {
                    let pushed = soon(push).await.unwrap();
                    soon(granted.verify(pushed.pieces)).await.unwrap();
                }
                assert!(fabric.holds(&writes(&dst)));
                assert!(soon(granted.commit()).await.is_some());
            }
        }
    }
    // The blocks are free: whatever is still under way must not touch them.
    for &block in &dst {
        for layer_idx in 0..LAYOUT.num_layers {
            fill(&fabric.target, block, layer_idx, 0xEE);
        }
    }
}

/// Seeded, so that a failure comes again (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % end
    }
}
