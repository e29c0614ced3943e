//! What every transport must do. Each test here runs once per transport, over real sockets or real
//! mappings, in one process; `nccl` with memory in a device's place.

use std::sync::Arc;

use baton_handoff::{
    KvFault, Piece, PieceWrite, PushError, RouteError, Source, TransportKind, TransportOffer,
};
use baton_kv_cache::{BlockId, BlockStorage, KvLayout};

use crate::{
    Receiver, ReceiverConfig, Sender, SenderConfig, checksum,
    testing::{
        Fabric, Guards, LAYOUT, blocks, bytes, bytes_of, change, eventually, fill, pattern, sender_config,
        soon, storage, writes,
    },
};

/// One module per transport, one test per function. Sockets have another one, inside of TLS;
/// and sockets and `nccl` have one with pools that lie on a device, sockets and `rdma` one with pools on two, as far as they
/// can tell.
macro_rules! conformance {
    ($($name:ident),* $(,)?) => {
        mod rdma {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                if crate::testing::has_rdma() {
                    super::$name(baton_handoff::TransportKind::Rdma).await;
                }
            })*
        }
        mod nccl {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(baton_handoff::TransportKind::Nccl).await })*
        }
        mod tcp {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(baton_handoff::TransportKind::Tcp).await })*
        }
        mod tcp_tls {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let _tls = crate::testing::Setup::Tls.enter();
                super::$name(baton_handoff::TransportKind::Tcp).await
            })*
        }
        mod tcp_devices {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let _devices = crate::testing::Setup::Devices.enter();
                super::$name(baton_handoff::TransportKind::Tcp).await
            })*
        }
        mod tcp_divided {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let _devices = crate::testing::Setup::Divided.enter();
                super::$name(baton_handoff::TransportKind::Tcp).await
            })*
        }
        mod rdma_divided {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let _devices = crate::testing::Setup::Divided.enter();
                super::$name(baton_handoff::TransportKind::Rdma).await
            })*
        }
        mod nccl_devices {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let _devices = crate::testing::Setup::Devices.enter();
                super::$name(baton_handoff::TransportKind::Nccl).await
            })*
        }
        mod shm {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(baton_handoff::TransportKind::Shm).await })*
        }
    };
}
pub(crate) use conformance;

conformance!(
    pushed_pieces_arrive_verify_and_are_counted,
    a_flipped_bit_is_found,
    a_late_write_lands_nowhere,
    an_unknown_generation_writes_nothing,
    a_restarted_pool_is_told_from_the_old_one,
    a_pool_of_another_layout_is_refused,
    pieces_outside_of_the_pools_are_refused,
    a_closed_route_gives_its_guard_back,
    a_dropped_grant_is_revoked,
    a_lost_peer_gives_everything_back,
    a_thousand_grants_with_random_cancels_return_every_block,
);

async fn pushed_pieces_arrive_verify_and_are_counted(kind: TransportKind) {
    let fabric = Fabric::new(&[kind]);
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

async fn a_flipped_bit_is_found(kind: TransportKind) {
    let fabric = Fabric::new(&[kind]);
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

async fn a_late_write_lands_nowhere(kind: TransportKind) {
    let fabric = Fabric::new(&[kind]);
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

async fn an_unknown_generation_writes_nothing(kind: TransportKind) {
    let fabric = Fabric::new(&[kind]);
    let dst = blocks([7]);
    let granted = fabric.receiver.grant(dst.clone(), ());
    let right = granted.access_key();
    let guess = baton_handoff::AccessKey { secret: baton_handoff::Secret([1; 16]), ..right };
    let other =
        baton_handoff::AccessKey { generation: baton_handoff::Generation(right.generation.0 ^ 1), ..right };
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

async fn a_restarted_pool_is_told_from_the_old_one(kind: TransportKind) {
    let mut fabric = Fabric::new(&[kind]);
    let granted = fabric.receiver.grant(blocks([1]), ());
    // Somebody else answers where the old pool was.
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
    let Fabric { config, .. } = &fabric;
    fabric.receiver = Receiver::start(storage(), ReceiverConfig::clone(config)).unwrap();
    assert!(soon(route.push(writes(&blocks([1])))).await.is_err());

    let granted = fabric.receiver.grant(blocks([2]), ());
    let route = fabric.route(&granted).await.unwrap();
    soon(route.push(writes(&blocks([2])))).await.unwrap();
}

async fn a_pool_of_another_layout_is_refused(kind: TransportKind) {
    let fabric = Fabric::new(&[kind]);
    let granted = fabric.receiver.grant(blocks([1]), ());
    for layout in [
        KvLayout { num_layers: 4, ..LAYOUT },
        KvLayout { head_dim: 16, ..LAYOUT },
        KvLayout { block_size: 8, ..LAYOUT },
    ] {
        let storage = Arc::new(BlockStorage::new(layout, 4).unwrap());
        let sender = Sender::start(storage, sender_config(&[kind])).unwrap();
        let guards = Guards::default();
        let routed = sender.route(granted.access_key(), granted.offers(), guards.guard());
        let error = soon(routed).await.err().unwrap();
        // Over a network, nobody is told what is wrong.
        assert!(matches!(error, RouteError::Unreachable(_) | RouteError::OtherIncarnation(_)), "{error}");
        assert_eq!(guards.num_out(), 0);
    }
}

async fn pieces_outside_of_the_pools_are_refused(kind: TransportKind) {
    let fabric = Fabric::new(&[kind]);
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

async fn a_closed_route_gives_its_guard_back(kind: TransportKind) {
    let fabric = Fabric::new(&[kind]);
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

    // A route that nobody closes gives it back, too.
    let routed = fabric.sender.route(granted.access_key(), granted.offers(), guards.guard());
    let route = soon(routed).await.unwrap();
    let push = route.push(writes(&dst));
    drop((route, push));
    eventually("the guard is back", || guards.num_out() == 0).await;
}

async fn a_dropped_grant_is_revoked(kind: TransportKind) {
    let fabric = Fabric::new(&[kind]);
    let guards = Guards::default();
    drop(fabric.receiver.grant(blocks([3]), guards.guard()));
    assert_eq!(guards.num_out(), 0, "nobody has opened it");

    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let route = fabric.route(&granted).await.unwrap();
    drop(granted);
    eventually("the guard is back", || guards.num_out() == 0).await;
    assert!(soon(route.push(writes(&blocks([3])))).await.is_err());
    assert_eq!(fabric.receiver.load(), Default::default());
}

async fn a_lost_peer_gives_everything_back(kind: TransportKind) {
    let fabric = Fabric::new(&[kind]);
    let Fabric { receiver, sender, source, dir, .. } = fabric;
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

async fn a_thousand_grants_with_random_cancels_return_every_block(kind: TransportKind) {
    const NUM_TASKS: u64 = 4;
    let fabric = Arc::new(Fabric::new(&[kind]));
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
async fn handoff(fabric: &Fabric, guards: &[Guards; 2], own: &[BlockId], random: &mut Random) {
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

#[tokio::test]
async fn the_best_reachable_transport_is_taken_and_a_fallback_counted() {
    let both = [TransportKind::Tcp, TransportKind::Shm];
    let fabric = Fabric::new(&both);
    let counts = |kind| fabric.sender.counters().of(kind).read();
    let granted = fabric.receiver.grant(blocks([1]), ());
    assert_eq!(fabric.route(&granted).await.unwrap().transport(), TransportKind::Shm);
    assert_eq!(counts(TransportKind::Shm).fallbacks, 0);

    // On this host, but not to be reached: that is a fallback. On another one: that is as it must be.
    let TransportOffer::Shm { host_id, .. } = fabric.offer(TransportKind::Shm) else { unreachable!() };
    let socket_path = fabric.dir.path().join("none.sock");
    for (host_id, num_fallbacks) in [(host_id, 1), ("another boot/another host".into(), 0)] {
        let before = counts(TransportKind::Tcp);
        let nowhere = TransportOffer::Shm { host_id, socket_path: socket_path.clone(), pool: 5 };
        let offers = [nowhere.clone(), fabric.offer(TransportKind::Tcp)];
        let route = soon(fabric.sender.route(granted.access_key(), &offers, ())).await.unwrap();
        assert_eq!(route.transport(), TransportKind::Tcp);
        let after = counts(TransportKind::Tcp);
        assert_eq!(after.routes - before.routes, 1);
        assert_eq!(after.fallbacks - before.fallbacks, num_fallbacks);
        let error =
            soon(fabric.sender.route(granted.access_key(), &[nowhere], ())).await.err().unwrap().to_string();
        assert_eq!(
            error.matches("no way to the peer's blocks").count(),
            usize::from(num_fallbacks > 0),
            "{error}"
        );
    }

    let config = SenderConfig { transports: vec![TransportKind::Tcp], ..SenderConfig::default() };
    let sender = Sender::start(Arc::clone(&fabric.source), config).unwrap();
    let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
    assert_eq!(route.transport(), TransportKind::Tcp);
    let shm = [fabric.offer(TransportKind::Shm)];
    let error = soon(sender.route(granted.access_key(), &shm, ())).await.err().unwrap();
    assert_eq!(error.to_string(), "no common transport: the peer offers shm, this worker allows tcp");
}

#[tokio::test]
async fn checksums_are_those_of_the_source() {
    let fabric = Fabric::new(&[TransportKind::Tcp]);
    let granted = fabric.receiver.grant(blocks([6]), ());
    let route = fabric.route(&granted).await.unwrap();
    let pushed = soon(route.push(writes(&blocks([6])))).await.unwrap();
    for piece in pushed.pieces {
        let expected = vec![pattern(6, piece.layer_idx as usize); LAYOUT.layer_bytes()];
        assert_eq!(piece.checksum, checksum(&expected, granted.generation()));
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
