//! Peers that misbehave over nccl. The tests play the peer, and memory of the host replaces that of a device.

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use baton_handoff::{AccessKey, KvFault, PushError, RouteError, Secret, TransportKind, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage};
use baton_transfer::{Receiver, ReceiverConfig, ReceiverLoad, socket};
use baton_transfer_conformance::{
    Guards, LAYOUT, NEVER, NUM_BLOCKS, PATIENCE, TransferPair, blocks, bytes, eventually,
    fake_devices::{counted_devices, fake_device},
    fill, holds, is_pending, pattern, receiver, sender, sender_with, some_access_key, soon, storage, writes,
};

use crate::tests::NCCL;
use crate::{
    NcclReceiving, NcclSending,
    communicators::MAX_COMMUNICATORS,
    fabric::{Fabric as _, NcclCommunicator, NcclRank, Place, TransferDirection, UniqueId},
    lane::MAX_GROUPS,
    tests::fake_fabric::MemoryFabric,
    wire::{self, MESSAGE_BYTES, Message, Refusal},
};

pub(super) fn fabric(io_timeout: Duration) -> TransferPair {
    TransferPair::with(NCCL, |config| config.io_timeout = io_timeout)
}

pub(super) fn hello(pool: u64, access_key: AccessKey) -> Message {
    Message::Hello {
        pool,
        num_layers: LAYOUT.num_layers as u32,
        layer_bytes: LAYOUT.layer_bytes() as u64,
        block_bytes: LAYOUT.block_bytes() as u64,
        access_key,
    }
}

pub(super) fn say(mut control: &TcpStream, message: Message) {
    control.write_all(&message.encode()).unwrap();
}

/// The next message; `None` when the peer has closed the connection.
pub(super) fn hear(control: &TcpStream) -> Option<Message> {
    let mut bytes = [0; MESSAGE_BYTES];
    socket::receive_exact(control, &mut bytes, Duration::from_secs(30)).ok()?;
    Some(Message::decode(&bytes).expect("well-formed"))
}

/// A joined sender that a test controls: it may send anything at any time.
pub(super) struct ManualSender {
    control: TcpStream,
    communicator: Box<dyn NcclCommunicator>,
    source: Arc<BlockStorage>,
}

impl ManualSender {
    pub(super) fn connect(fabric: &TransferPair, access_key: AccessKey) -> ManualSender {
        let (address, pool) = fabric.address(TransportKind::Nccl);
        let control = TcpStream::connect(address).unwrap();
        say(&control, hello(pool, access_key));
        assert_eq!(hear(&control), Some(Message::Welcome));
        let mut id = UniqueId([0; UniqueId::BYTES]);
        socket::receive_exact(&control, &mut id.0, NEVER).unwrap();
        let communicator = MemoryFabric::default().join(&id, NcclRank::Sender).unwrap();
        ManualSender { control, communicator, source: Arc::clone(&fabric.source) }
    }

    pub(super) fn announce(
        &self,
        sequence: u64,
        access_key: AccessKey,
        pieces: &[(u32, u32)],
    ) -> Option<Message> {
        let bytes = wire::announcement(sequence, access_key, pieces.iter().copied());
        (&self.control).write_all(&bytes).unwrap();
        hear(&self.control)
    }

    /// Sends layers of one source block.
    fn send(&mut self, block: BlockId, layers: impl IntoIterator<Item = usize>) {
        let places = layers.into_iter().map(|layer_idx| Place {
            address: self.source.layer_ptr(block, layer_idx).as_ptr() as u64,
            len: LAYOUT.layer_bytes(),
        });
        let places: Vec<_> = places.collect();
        while !self.communicator.is_ready().unwrap() {}
        // SAFETY: these tests do not write the source.
        unsafe { self.communicator.post(TransferDirection::Send, &places) }.unwrap();
    }
}

const ALL_LAYERS: [(u32, u32); 3] = [(0, 0), (1, 0), (2, 0)];

#[tokio::test]
async fn a_peer_that_announces_and_never_sends_is_fenced_at_its_deadline() {
    let fabric = fabric(PATIENCE);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let mut late = ManualSender::connect(&fabric, granted.access_key());
    assert_eq!(late.announce(0, granted.access_key(), &ALL_LAYERS), Some(Message::Go { sequence: 0 }));
    // One piece of three: the group has begun and does not end.
    late.send(BlockId(3), [0]);
    eventually("the first piece lands", || holds(&fabric.target, BlockId(3), 0, pattern(3, 0))).await;
    let start = Instant::now();
    assert!(soon(granted.revoke()).await.is_some());
    assert!(start.elapsed() >= PATIENCE / 2, "it ended before the deadline");
    assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));

    // Another request uses the block now.
    for layer_idx in 0..LAYOUT.num_layers {
        fill(&fabric.target, BlockId(3), layer_idx, 0xEE);
    }
    late.send(BlockId(3), [1, 2]);
    assert_eq!(hear(&late.control), None, "the connection is closed");
    for layer_idx in 0..LAYOUT.num_layers {
        assert!(holds(&fabric.target, BlockId(3), layer_idx, 0xEE));
    }
    assert_eq!(fabric.receiver.counters().of(TransportKind::Nccl).read().failures, 1);
}

#[tokio::test]
async fn blocks_return_when_a_peer_dies_in_the_middle_of_a_group() {
    let fabric = fabric(NEVER);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let mut peer = ManualSender::connect(&fabric, granted.access_key());
    assert_eq!(peer.announce(0, granted.access_key(), &ALL_LAYERS), Some(Message::Go { sequence: 0 }));
    peer.send(BlockId(3), [0, 1]);
    drop(peer);
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));
}

#[tokio::test]
async fn a_revoked_grant_is_quarantined_until_its_groups_are_done_even_after_stopped() {
    let fabric = fabric(NEVER);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3, 4]), guards.guard());
    let access_key = granted.access_key();
    let mut peer = ManualSender::connect(&fabric, access_key);
    assert_eq!(peer.announce(0, access_key, &ALL_LAYERS), Some(Message::Go { sequence: 0 }));
    assert_eq!(peer.announce(1, access_key, &[(0, 1)]), Some(Message::Go { sequence: 1 }));
    let mut fenced = granted.revoke();
    let quarantined = ReceiverLoad { num_grants: 0, num_quarantined_grants: 1, num_quarantined_blocks: 2 };
    assert!(is_pending(&mut fenced).await);
    assert_eq!(fabric.receiver.load(), quarantined);
    // The peer has sent `Stopped` on the handoff's stream, but receives are still posted here.
    fabric.receiver.writer_stopped(access_key.generation);
    assert!(is_pending(&mut fenced).await);
    // A new group is refused.
    let refused = Message::No { sequence: 2, why: Refusal::Revoked };
    assert_eq!(peer.announce(2, access_key, &[(1, 1)]), Some(refused));
    peer.send(BlockId(3), 0..3);
    assert_eq!(hear(&peer.control), Some(Message::Landed { sequence: 0 }));
    assert!(is_pending(&mut fenced).await, "the second group is not done");
    peer.send(BlockId(4), [0]);
    assert_eq!(hear(&peer.control), Some(Message::Landed { sequence: 1 }));
    assert!(soon(fenced).await.is_some());
    assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));
}

#[tokio::test]
async fn announcements_are_checked_against_the_grant() {
    let fabric = fabric(PATIENCE);
    let granted = fabric.receiver.grant(blocks([3, 4]), ());
    let revoked = fabric.receiver.grant(blocks([5]), ());
    let (access_key, stale) = (granted.access_key(), revoked.access_key());
    assert!(soon(revoked.revoke()).await.is_some());
    let mut peer = ManualSender::connect(&fabric, granted.access_key());
    let no = |sequence, why| Some(Message::No { sequence, why });
    assert_eq!(peer.announce(0, stale, &[(0, 0)]), no(0, Refusal::Revoked));
    assert_eq!(peer.announce(1, some_access_key(1), &[(0, 0)]), no(1, Refusal::Revoked));
    let stolen = AccessKey { secret: Secret::default(), ..access_key };
    assert_eq!(peer.announce(1, stolen, &[(0, 0)]), no(1, Refusal::Revoked));
    for (sequence, pieces) in
        (2..).zip([[(0, 0), (3, 0)], [(0, 2), (0, 1)], [(0, 0), (0, 0)], [(u32::MAX, u32::MAX); 2]])
    {
        assert_eq!(peer.announce(sequence, access_key, &pieces), no(sequence, Refusal::Pieces), "{pieces:?}");
    }
    // Refused announcements do not affect a valid one.
    assert_eq!(peer.announce(6, access_key, &[(1, 1)]), Some(Message::Go { sequence: 6 }));
    assert_eq!(peer.announce(7, access_key, &[(1, 1)]), no(7, Refusal::Pieces), "announced before");
    peer.send(BlockId(4), [1]);
    assert_eq!(hear(&peer.control), Some(Message::Landed { sequence: 6 }));
    assert!(holds(&fabric.target, BlockId(4), 1, pattern(4, 1)));
    assert_eq!(peer.announce(8, access_key, &[(1, 1)]), no(8, Refusal::Pieces), "written before");
}

#[tokio::test]
async fn pieces_of_a_lost_connection_can_be_announced_again() {
    let fabric = fabric(NEVER);
    let granted = fabric.receiver.grant(blocks([3]), ());
    let access_key = granted.access_key();
    let lost = ManualSender::connect(&fabric, access_key);
    assert_eq!(lost.announce(0, access_key, &ALL_LAYERS), Some(Message::Go { sequence: 0 }));
    let mut again = ManualSender::connect(&fabric, access_key);
    let bytes = wire::announcement(0, access_key, ALL_LAYERS.into_iter());
    (&again.control).write_all(&bytes).unwrap();
    // A refusal would come at once, as in `announcements_are_checked_against_the_grant`.
    assert!(!socket::is_readable_within(&again.control, Duration::from_millis(50)).unwrap());
    drop(lost);
    assert_eq!(hear(&again.control), Some(Message::Go { sequence: 0 }));
    again.send(BlockId(3), 0..3);
    assert_eq!(hear(&again.control), Some(Message::Landed { sequence: 0 }));
    assert!(holds(&fabric.target, BlockId(3), 2, pattern(3, 2)));
}

#[tokio::test]
async fn a_peer_that_announces_too_much_or_nonsense_is_disconnected() {
    enum Fault {
        TooMany,
        Garbage,
        NotAnAnnouncement,
    }
    for fault in [Fault::TooMany, Fault::Garbage, Fault::NotAnAnnouncement] {
        let fabric = fabric(NEVER);
        let guards = Guards::default();
        let granted = fabric.receiver.grant(blocks(0..32), guards.guard());
        let peer = ManualSender::connect(&fabric, granted.access_key());
        let announced = peer.announce(0, granted.access_key(), &[(0, 0)]);
        assert_eq!(announced, Some(Message::Go { sequence: 0 }));
        match fault {
            Fault::TooMany => {
                for sequence in 1..MAX_GROUPS as u32 {
                    let announced = peer.announce(sequence.into(), granted.access_key(), &[(0, sequence)]);
                    assert_eq!(announced, Some(Message::Go { sequence: sequence.into() }));
                }
                assert_eq!(peer.announce(MAX_GROUPS as u64, granted.access_key(), &[(2, 31)]), None);
            }
            Fault::Garbage => (&peer.control).write_all(&[0xFF; MESSAGE_BYTES]).unwrap(),
            Fault::NotAnAnnouncement => say(&peer.control, Message::Go { sequence: 0 }),
        }
        assert!(soon(granted.revoke()).await.is_some());
        assert_eq!(guards.num_out(), 0);
        assert_eq!(hear(&peer.control), None);
    }
}

#[tokio::test]
async fn blocks_of_a_communicator_that_does_not_end_are_never_released() {
    let stuck = Arc::new(MemoryFabric::default());
    stuck.is_stuck.store(true, Ordering::SeqCst);
    let mut fabric = TransferPair::new(NCCL);
    let transport = NcclReceiving::over(stuck, ([127, 0, 0, 1], 0).into());
    let target = Arc::clone(&fabric.target);
    fabric.receiver = Receiver::start(target, &ReceiverConfig::default(), vec![Box::new(transport)]).unwrap();
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let peer = ManualSender::connect(&fabric, granted.access_key());
    assert_eq!(peer.announce(0, granted.access_key(), &ALL_LAYERS), Some(Message::Go { sequence: 0 }));
    let mut fenced = granted.revoke();
    drop(peer);
    let counters = fabric.receiver.counters().of(TransportKind::Nccl);
    eventually("the lost connection is noticed", || counters.read().failures == 1).await;
    assert!(is_pending(&mut fenced).await);
    assert_eq!(fabric.receiver.load().num_quarantined_blocks, 1);
    drop(fabric);
    assert_eq!(soon(fenced).await.map(drop), None, "the receiver is gone");
    assert_eq!(guards.num_out(), 1, "the blocks stay in quarantine");
}

#[tokio::test]
async fn an_idle_peer_is_evicted_for_another_and_joins_again_without_an_error() {
    let fabric = fabric(NEVER);
    let granted = fabric.receiver.grant(blocks([1, 2]), ());
    let route = fabric.route(&granted).await.unwrap();
    let [first, second] = [0..3, 3..6].map(|range| writes(&blocks([1, 2]))[range].to_vec());
    soon(route.push(first)).await.unwrap();
    // The oldest peer is busy.
    let busy = ManualSender::connect(&fabric, granted.access_key());
    let other = fabric.receiver.grant(blocks([3]), ());
    assert_eq!(busy.announce(0, other.access_key(), &[(0, 0)]), Some(Message::Go { sequence: 0 }));
    let peers: Vec<_> =
        (2..MAX_COMMUNICATORS).map(|_| ManualSender::connect(&fabric, granted.access_key())).collect();
    let counts = || fabric.receiver.counters().of(TransportKind::Nccl).read();
    eventually("all have joined", || counts().routes == MAX_COMMUNICATORS as u64).await;

    let one_more = ManualSender::connect(&fabric, granted.access_key());
    soon(route.push(second)).await.unwrap();
    assert!(fabric.holds(&writes(&blocks([1, 2]))));
    eventually("the sender has joined once more", || counts().routes == MAX_COMMUNICATORS as u64 + 2).await;
    assert_eq!(counts().failures, 0);
    assert_eq!(fabric.sender.counters().of(TransportKind::Nccl).read().failures, 0);
    assert_eq!(hear(&peers[0].control), None, "the peer that was idle longest was evicted");
    drop((busy, one_more));
}

/// A decode worker that a test controls: it welcomes one sender, and then runs `act`.
fn decode_worker(
    act: impl FnOnce(TcpStream, Box<dyn NcclCommunicator>) + Send + 'static,
) -> (TransportOffer, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let offer = TransportOffer::Nccl { address: listener.local_addr().unwrap().to_string(), pool: 7 };
    let thread = std::thread::spawn(move || {
        let (mut control, _) = listener.accept().unwrap();
        assert_eq!(hear(&control), Some(hello(7, some_access_key(1))));
        let fabric = MemoryFabric::default();
        let id = fabric.unique_id().unwrap();
        let communicator = fabric.join(&id, NcclRank::Receiver).unwrap();
        control.write_all(&[Message::Welcome.encode().as_slice(), &id.0].concat()).unwrap();
        act(control, communicator);
    });
    (offer, thread)
}

fn hear_announcement(control: &TcpStream) -> u64 {
    let Some(Message::Announce { sequence, num_pieces, .. }) = hear(control) else {
        panic!("no announcement")
    };
    socket::receive_exact(control, &mut vec![0; wire::pieces_bytes(num_pieces)], NEVER).unwrap();
    sequence
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_to_a_decode_worker_that_stops_answering_fails_at_the_deadline() {
    /// Where the decode worker stops.
    #[derive(Debug)]
    enum Stop {
        BeforeGo,
        AfterGo,
        BeforeLanded,
    }
    for stop in [Stop::BeforeGo, Stop::AfterGo, Stop::BeforeLanded] {
        let what = format!("{stop:?}");
        let target = storage();
        let (offer, peer) = decode_worker(move |control, mut communicator| {
            let sequence = hear_announcement(&control);
            if !matches!(stop, Stop::BeforeGo) {
                say(&control, Message::Go { sequence });
            }
            if matches!(stop, Stop::BeforeLanded) {
                let place = Place { address: target.address(), len: LAYOUT.layer_bytes() };
                while !communicator.is_ready().unwrap() {}
                // SAFETY: only this test uses the target.
                unsafe { communicator.post(TransferDirection::Receive, &[place]) }.unwrap();
            }
            assert_eq!(hear(&control), None, "the sender has closed the connection");
        });
        let sender = sender_with(&storage(), NCCL, |config| config.io_timeout = PATIENCE).unwrap();
        let guards = Guards::default();
        let offers = [offer];
        let routed = sender.route(some_access_key(1), &offers, guards.guard());
        let route = soon(routed).await.unwrap();
        let error = soon(route.push(writes(&blocks([3]))[..1].to_vec())).await.unwrap_err();
        assert!(matches!(error, PushError::Lost(_)), "{what}: {error}");
        soon(route.close()).await;
        assert_eq!(guards.num_out(), 0, "no device reads the source any more");
        assert_eq!(sender.counters().of(TransportKind::Nccl).read().failures, 1);
        peer.join().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_out_of_order_end_the_connection_before_anything_is_posted() {
    for answer in [
        Message::Go { sequence: 1 },
        Message::No { sequence: 9, why: Refusal::Revoked },
        Message::Landed { sequence: 0 },
        Message::Welcome,
    ] {
        let (offer, peer) = decode_worker(move |control, mut communicator| {
            hear_announcement(&control);
            say(&control, answer);
            assert_eq!(hear(&control), None);
            assert_eq!(communicator.num_done(), Ok(0));
        });
        let sender = sender(&storage(), NCCL).unwrap();
        let offers = [offer];
        let route = soon(sender.route(some_access_key(1), &offers, ())).await.unwrap();
        let error = soon(route.push(writes(&blocks([3]))[..1].to_vec())).await.unwrap_err();
        assert!(matches!(error, PushError::Lost(_)), "{answer:?}: {error}");
        soon(route.close()).await;
        peer.join().unwrap();
    }
}

#[tokio::test]
async fn a_decode_worker_that_answers_nonsense_or_does_not_join_is_an_error_with_a_reason() {
    let welcome = Message::Welcome.encode();
    let answers = [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n\r\n".to_vec(),
        Message::Busy.encode().to_vec(),
        welcome.to_vec(),
        // The id of no communicator.
        [welcome.as_slice(), &[0xA5; UniqueId::BYTES]].concat(),
        Vec::new(),
    ];
    for answer in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let offers = [TransportOffer::Nccl { address: listener.local_addr().unwrap().to_string(), pool: 7 }];
        let peer = std::thread::spawn(move || {
            let (mut control, _) = listener.accept().unwrap();
            assert_eq!(hear(&control), Some(hello(7, some_access_key(1))));
            control.write_all(&answer).unwrap();
        });
        let sender = sender(&storage(), NCCL).unwrap();
        let guards = Guards::default();
        let error = soon(sender.route(some_access_key(1), &offers, guards.guard())).await.err().unwrap();
        assert!(matches!(error, RouteError::Unreachable(_)), "{error}");
        assert_eq!(guards.num_out(), 0);
        peer.join().unwrap();
    }
}

#[tokio::test]
async fn the_next_push_to_a_decode_worker_that_is_gone_fails() {
    let TransferPair { receiver, sender, source, dir, .. } = fabric(NEVER);
    let granted = receiver.grant(blocks([3]), ());
    let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
    drop((granted, receiver));
    assert!(matches!(soon(route.push(writes(&blocks([3])))).await, Err(PushError::Lost(_))));
    drop((source, dir));
}

#[tokio::test]
async fn blocks_on_devices_are_transferred_and_verified() {
    let pool = || Arc::new(fake_device(LAYOUT, NUM_BLOCKS));
    let (source, target) = (pool(), pool());
    for write in writes(&blocks([3, 4])) {
        let offset = source.layer_offset(write.dst, write.layer_idx as usize);
        let bytes = vec![pattern(write.dst.0, write.layer_idx as usize); LAYOUT.layer_bytes()];
        // SAFETY: only this test accesses the pool so far.
        unsafe { source.device().unwrap().write(offset, &bytes) }.unwrap();
    }
    let receiver = receiver(&target, NCCL, Path::new(""), &ReceiverConfig::default()).unwrap();
    let sender = sender(&source, NCCL).unwrap();
    let granted = receiver.grant(blocks([3, 4]), ());
    let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
    let mut pushed = soon(route.push(writes(&blocks([3, 4])))).await.unwrap();
    for write in writes(&blocks([3, 4])) {
        let layer_idx = write.layer_idx as usize;
        let bytes = bytes(&target, write.dst, layer_idx);
        assert!(bytes.iter().all(|&byte| byte == pattern(write.dst.0, layer_idx)));
    }
    soon(granted.verify(pushed.pieces.clone())).await.unwrap();
    // SAFETY: the push is over.
    unsafe { target.device().unwrap().write(target.layer_offset(BlockId(4), 1) + 7, &[0]) }.unwrap();
    pushed.pieces.retain(|piece| (piece.block_idx, piece.layer_idx) == (1, 1));
    let fault = soon(granted.verify(pushed.pieces)).await.unwrap_err();
    assert_eq!(fault, KvFault::Checksum { block_idx: 1, layer_idx: 1 });
}

#[test]
fn an_absent_library_is_an_error_with_a_reason() {
    let nccl = Some(Path::new("/nowhere/libnccl.so.2"));
    let errors = [
        NcclSending::start(&storage(), nccl).err().unwrap(),
        NcclReceiving::start(&storage(), nccl, ([127, 0, 0, 1], 0).into()).err().unwrap(),
    ];
    for error in errors.map(|error| error.to_string()) {
        assert!(error.contains("no nccl without NCCL's library"), "{error}");
        assert!(error.contains("/nowhere/libnccl.so.2") && error.contains("BATON_NCCL"), "{error}");
    }
}

#[test]
fn an_absent_device_is_an_error_with_a_reason() {
    let Some(library) = crate::tests::nccl_library() else { return };
    if baton_transfer::cuda::num_devices().is_ok() {
        return;
    }
    let error = NcclSending::start(&storage(), Some(&library)).err().unwrap().to_string();
    assert!(error.contains("no nccl without a CUDA device: no "), "{error}");
}

#[test]
fn blocks_on_several_devices_are_refused() {
    let pool = Arc::new(counted_devices(LAYOUT, NUM_BLOCKS, &[0, 1]).0);
    let refused = [
        NcclReceiving::start(&pool, None, ([127, 0, 0, 1], 0).into()).err(),
        NcclSending::start(&pool, None).err(),
    ];
    for error in refused.map(|error| error.unwrap().to_string()) {
        assert!(error.contains("several devices") && error.contains("nccl"), "{error}");
    }
}
