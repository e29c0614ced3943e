//! Peers that misbehave over rdma; [`processes`] has those that need separate processes. All tests use a software fabric (UCX
//! over sockets). `tests/rdma` shows how a network device handles a revoked key.

mod processes;

use std::{
    io::Write,
    net::{Shutdown, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use baton_handoff::{AccessKey, PushError, RouteError, Secret, TransportKind, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage, DeviceCopy};
use baton_transfer::{ReceiverLoad, socket, word::Word};
use baton_transfer_conformance::{
    Guards, LAYOUT, NEVER, NUM_BLOCKS, PATIENCE, TransferPair, blocks, bytes, eventually, fill, holds,
    is_pending, pattern, sender, sender_with, some_access_key, soon, storage, writes,
};

use crate::tests::RDMA;
use crate::{
    RdmaReceiving, RdmaSending,
    nixl::{Agent, Memory, Nixl, RemoteAgent},
    tests::{has_rdma, nixl},
    wire::{MESSAGE_BYTES, Message, RankMemory},
};

fn fabric(io_timeout: Duration) -> TransferPair {
    TransferPair::with(RDMA, |config| config.io_timeout = io_timeout)
}

fn hello(pool: u64, access_key: AccessKey) -> Message {
    Message::Hello {
        pool,
        num_layers: LAYOUT.num_layers as u32,
        layer_bytes: LAYOUT.layer_bytes() as u64,
        block_bytes: LAYOUT.block_bytes() as u64,
        access_key,
    }
}

/// A sender that a test controls: it can write at any time.
struct ManualSender {
    control: TcpStream,
    agent: Arc<Agent>,
    remote: RemoteAgent,
    pool: RankMemory,
    source: Arc<BlockStorage>,
}

impl ManualSender {
    fn connect(fabric: &TransferPair, access_key: AccessKey) -> ManualSender {
        let (address, pool) = fabric.address(TransportKind::Rdma);
        let control = TcpStream::connect(address).unwrap();
        say(&control, hello(pool, access_key));
        let welcome = Message::Welcome { num_blocks: NUM_BLOCKS as u64, num_ranks: 1 };
        assert_eq!(hear(&control), Some(welcome));
        let Some(Message::RankMemory(pool)) = hear(&control) else { panic!("no memory") };
        let mut metadata = vec![0; pool.metadata_bytes as usize];
        socket::receive_exact(&control, &mut metadata, NEVER).unwrap();
        let loaded = Nixl::load(Some(&nixl())).unwrap();
        let agent = Agent::new(&loaded, "by hand", Arc::clone(&fabric.source), 0).unwrap();
        let remote = agent.connect(&metadata).unwrap();
        ManualSender { control, agent: Arc::new(agent), remote, pool, source: Arc::clone(&fabric.source) }
    }

    fn open(&self, access_key: AccessKey) {
        say(&self.control, Message::Word(Word::Open(access_key)));
        assert_eq!(hear(&self.control), Some(Message::Word(Word::Opened(access_key.generation))));
    }

    /// Writes a piece, with or without a grant. Returns whether the write succeeded.
    fn write(&self, block: BlockId, layer_idx: usize) -> bool {
        let target = self.pool.base + LAYOUT.piece_offset(block, layer_idx) as u64;
        let source = self.source.region(0).piece(block, layer_idx);
        let copies = [DeviceCopy { source, target, len: LAYOUT.layer_bytes() }];
        // SAFETY: these tests do not write the source. The target is what they test.
        let written = unsafe { self.agent.write(&self.remote, self.pool.memory, &copies) };
        let Ok(transfer) = written else { return false };
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            match transfer.is_done() {
                Ok(true) => return true,
                Ok(false) => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => return false,
            }
        }
        false
    }
}

fn say(mut control: &TcpStream, message: Message) {
    control.write_all(&message.encode()).unwrap();
}

/// The next message; `None` when the peer has closed the connection.
fn hear(control: &TcpStream) -> Option<Message> {
    let mut bytes = [0; MESSAGE_BYTES];
    socket::receive_exact(control, &mut bytes, Duration::from_secs(30)).ok()?;
    Some(Message::decode(&bytes).expect("well-formed"))
}

#[tokio::test]
async fn a_late_writer_that_never_closes_is_fenced_and_writes_nothing() {
    if !has_rdma() {
        return;
    }
    let fabric = fabric(PATIENCE);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let generation = granted.generation();
    let late = ManualSender::connect(&fabric, granted.access_key());
    late.open(granted.access_key());
    assert!(late.write(BlockId(3), 0));
    assert!(holds(&fabric.target, BlockId(3), 0, pattern(3, 0)));
    // The peer is asked to close the grant, and does nothing.
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));

    // Another request uses the block now.
    for layer_idx in 0..LAYOUT.num_layers {
        fill(&fabric.target, BlockId(3), layer_idx, 0xEE);
    }
    assert!(!late.write(BlockId(3), 2), "the key is revoked");
    for layer_idx in 0..LAYOUT.num_layers {
        assert!(holds(&fabric.target, BlockId(3), layer_idx, 0xEE));
    }
    assert_eq!(hear(&late.control), Some(Message::Word(Word::Revoke(generation))));
    assert_eq!(hear(&late.control), None, "the connection is closed");
    assert_eq!(fabric.receiver.counters().of(TransportKind::Rdma).read().failures, 1);
}

#[tokio::test]
async fn fencing_one_peer_does_not_disturb_another() {
    if !has_rdma() {
        return;
    }
    let fabric = fabric(PATIENCE);
    let granted = fabric.receiver.grant(blocks([1]), ());
    let route = fabric.route(&granted).await.unwrap();
    let other = fabric.receiver.grant(blocks([3]), ());
    let late = ManualSender::connect(&fabric, granted.access_key());
    late.open(other.access_key());
    assert!(soon(other.revoke()).await.is_some());
    soon(route.push(writes(&blocks([1])))).await.unwrap();
    assert!(fabric.holds(&writes(&blocks([1]))));
}

#[tokio::test]
async fn a_revoked_grant_is_quarantined_until_its_writer_has_stopped() {
    if !has_rdma() {
        return;
    }
    /// How the writer stops.
    enum End {
        Close,
        Leave,
        Garbage,
    }
    for end in [End::Close, End::Leave, End::Garbage] {
        let fabric = fabric(NEVER);
        let guards = Guards::default();
        let granted = fabric.receiver.grant(blocks([3, 4]), guards.guard());
        let generation = granted.generation();
        let peer = ManualSender::connect(&fabric, granted.access_key());
        peer.open(granted.access_key());
        let mut fenced = granted.revoke();
        assert_eq!(hear(&peer.control), Some(Message::Word(Word::Revoke(generation))));
        assert!(is_pending(&mut fenced).await);
        let quarantined =
            ReceiverLoad { num_grants: 0, num_quarantined_grants: 1, num_quarantined_blocks: 2 };
        assert_eq!(fabric.receiver.load(), quarantined);
        // The key is valid for the whole pool: only the peer's own code keeps it from writing.
        assert!(peer.write(BlockId(3), 1));
        assert!(is_pending(&mut fenced).await);
        // The handoff has stopped. A write that it aborted may be under way.
        fabric.receiver.writer_stopped(generation);
        assert!(is_pending(&mut fenced).await);
        match end {
            End::Close => say(&peer.control, Message::Word(Word::Close(generation))),
            End::Leave => drop(peer),
            // Unlike shared memory, rdma can revoke the key, so the receiver does not wait for the peer's process to end.
            End::Garbage => (&peer.control).write_all(&[0xFF; MESSAGE_BYTES]).unwrap(),
        }
        assert!(soon(fenced).await.is_some());
        assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));
    }
}

#[tokio::test]
async fn a_committed_grant_waits_for_the_connection_that_was_lost_before() {
    if !has_rdma() {
        return;
    }
    let fabric = fabric(NEVER);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let [lost, second] = [(); 2].map(|()| ManualSender::connect(&fabric, granted.access_key()));
    lost.open(granted.access_key());
    second.open(granted.access_key());
    assert!(second.write(BlockId(3), 0));
    let generation = granted.generation();
    let mut fenced = granted.commit();
    assert_eq!(hear(&second.control), Some(Message::Word(Word::Revoke(generation))));
    say(&second.control, Message::Word(Word::Close(generation)));
    assert!(is_pending(&mut fenced).await, "a write of the first may be under way");
    drop(lost);
    assert!(soon(fenced).await.is_some());
    assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));

    let alone = fabric.receiver.grant(blocks([4]), guards.guard());
    second.open(alone.access_key());
    assert!(soon(alone.commit()).await.is_some(), "all its writes have completed");
}

#[tokio::test]
async fn a_receiver_that_ends_revokes_every_key() {
    if !has_rdma() {
        return;
    }
    let fabric = fabric(NEVER);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let late = ManualSender::connect(&fabric, granted.access_key());
    late.open(granted.access_key());
    let fenced = granted.revoke();
    let TransferPair { receiver, target, .. } = fabric;
    drop(receiver);
    assert!(soon(fenced).await.is_some());
    assert_eq!(guards.num_out(), 0);
    assert!(!late.write(BlockId(3), 2));
    assert!(bytes(&target, BlockId(3), 2).iter().all(|&byte| byte == 0));
}

#[tokio::test]
async fn unauthenticated_peers_get_no_key() {
    if !has_rdma() {
        return;
    }
    let fabric = TransferPair::with(RDMA, |config| config.handshake_timeout = PATIENCE);
    let (address, pool) = fabric.address(TransportKind::Rdma);
    let granted = fabric.receiver.grant(blocks([3]), ());
    let access_key = granted.access_key();
    let stolen = AccessKey { secret: Secret([1; 16]), ..access_key };
    for (message, answer) in [
        (hello(pool ^ 1, access_key), Some(Message::Word(Word::Refused))),
        (hello(pool, stolen), Some(Message::Word(Word::Refused))),
        (
            Message::Hello { pool, num_layers: 1, layer_bytes: 1, block_bytes: 1, access_key },
            Some(Message::Word(Word::Refused)),
        ),
        (Message::Word(Word::Open(some_access_key(1))), None),
    ] {
        let control = TcpStream::connect(&address).unwrap();
        say(&control, message);
        assert_eq!(hear(&control), answer);
        assert_eq!(hear(&control), None, "the connection is closed");
    }
    // A peer that sends nothing gets no key either.
    let silent = TcpStream::connect(&address).unwrap();
    assert_eq!(hear(&silent), None);
}

#[tokio::test]
async fn malformed_answers_are_errors_with_a_reason() {
    if !has_rdma() {
        return;
    }
    let sound = RankMemory { memory: Memory::Dram, base: 1 << 20, metadata_bytes: 64 };
    let answer = |num_blocks, num_ranks, memory| {
        let messages = [Message::Welcome { num_blocks, num_ranks }, Message::RankMemory(memory)];
        let mut bytes = messages.map(Message::encode).concat();
        bytes.extend([0xA5; 64]);
        bytes
    };
    let answers = [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n\r\n".to_vec(),
        answer(64, 1, RankMemory { base: u64::MAX - 4096, ..sound }),
        answer(0, 1, sound),
        answer(64, 1, RankMemory { metadata_bytes: u32::MAX, ..sound }),
        // Announces more bytes than follow.
        answer(64, 1, RankMemory { metadata_bytes: 65, ..sound }),
        answer(64, 2, sound),
        // Two heads cannot be divided among so many ranks.
        answer(64, 0, sound),
        answer(64, 3, sound),
        answer(64, u32::MAX - 1, sound),
        answer(64, 1, sound),
        Vec::new(),
    ];
    for answer in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let offers = [TransportOffer::Rdma { address: listener.local_addr().unwrap().to_string(), pool: 7 }];
        let peer = std::thread::spawn(move || {
            let (mut control, _) = listener.accept().unwrap();
            assert!(matches!(hear(&control), Some(Message::Hello { pool: 7, .. })));
            control.write_all(&answer).unwrap();
        });
        let sender = sender(&storage(), RDMA).unwrap();
        let guards = Guards::default();
        let routed = sender.route(some_access_key(1), &offers, guards.guard());
        let error = soon(routed).await.err().unwrap();
        assert!(matches!(error, RouteError::Unreachable(_)), "{error}");
        assert_eq!(guards.num_out(), 0);
        peer.join().unwrap();
    }
}

#[test]
fn an_absent_library_is_an_error_with_a_reason() {
    let nixl = Some(Path::new("/nowhere/libnixl_capi.so"));
    let errors = [
        RdmaSending::start(&storage(), nixl).err().unwrap(),
        RdmaReceiving::start(&storage(), nixl, ([127, 0, 0, 1], 0).into()).err().unwrap(),
    ];
    for error in errors.map(|error| error.to_string()) {
        assert!(error.contains("no rdma without NIXL") && error.contains("BATON_NIXL"), "{error}");
        assert!(error.contains("/nowhere/libnixl_capi.so"), "{error}");
    }
}

#[tokio::test]
async fn the_loss_of_a_decode_worker_is_noticed_by_its_socket() {
    if !has_rdma() {
        return;
    }
    let TransferPair { receiver, sender, source, dir, .. } = fabric(NEVER);
    let granted = receiver.grant(blocks([3]), ());
    let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
    drop((granted, receiver));
    let failures = || sender.counters().of(TransportKind::Rdma).read().failures;
    eventually("the loss is noticed", || failures() == 1).await;
    assert!(matches!(soon(route.push(writes(&blocks([3])))).await, Err(PushError::Lost(_))));
    drop((source, dir));
}

/// A proxy for a control port that can cut connections.
struct Proxy {
    offer: TransportOffer,
    /// Both ends of each connection so far.
    sockets: Arc<Mutex<Vec<TcpStream>>>,
    /// Cuts a connection when the writer sends `Open`.
    cuts_at_open: Arc<AtomicBool>,
}

impl Proxy {
    fn start(fabric: &TransferPair) -> Proxy {
        let (target, pool) = fabric.address(TransportKind::Rdma);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let proxy = Proxy {
            offer: TransportOffer::Rdma { address, pool },
            sockets: Arc::default(),
            cuts_at_open: Arc::default(),
        };
        let (sockets, cuts_at_open) = (Arc::clone(&proxy.sockets), Arc::clone(&proxy.cuts_at_open));
        // The threads end with their connections, or with the process.
        std::thread::spawn(move || {
            for writer in listener.incoming() {
                let (writer, server) = (writer.unwrap(), TcpStream::connect(&target).unwrap());
                let ends = || [writer.try_clone().unwrap(), server.try_clone().unwrap()];
                sockets.lock().unwrap().extend(ends());
                let [mut to_writer, mut from_server] = ends();
                std::thread::spawn(move || std::io::copy(&mut from_server, &mut to_writer));
                let cuts_at_open = Arc::clone(&cuts_at_open);
                std::thread::spawn(move || {
                    while let Some(message) = hear(&writer) {
                        let is_open = matches!(message, Message::Word(Word::Open(_)));
                        if is_open && cuts_at_open.load(Ordering::SeqCst) {
                            break;
                        }
                        say(&server, message);
                    }
                    cut(&writer);
                    cut(&server);
                });
            }
        });
        proxy
    }

    fn num_connections(&self) -> usize {
        self.sockets.lock().unwrap().len() / 2
    }

    fn cut_all(&self) {
        self.sockets.lock().unwrap().iter().for_each(cut);
    }
}

fn cut(socket: &TcpStream) {
    // It may be closed already.
    let _ = socket.shutdown(Shutdown::Both);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_of_a_lost_connection_are_written_again_over_a_new_one() {
    if !has_rdma() {
        return;
    }
    let fabric = fabric(NEVER);
    let proxy = Proxy::start(&fabric);
    let guards = Guards::default();
    let all = blocks(0..NUM_BLOCKS as u32);
    let granted = fabric.receiver.grant(all.clone(), guards.guard());
    let sender = sender_with(&fabric.source, RDMA, |config| config.frame_bytes = 4 * LAYOUT.layer_bytes());
    let sender = sender.unwrap();
    let offers = [proxy.offer.clone()];
    let route = soon(sender.route(granted.access_key(), &offers, ())).await.unwrap();
    for round in 0..4 {
        for &block in &all {
            for layer_idx in 0..LAYOUT.num_layers {
                fill(&fabric.target, block, layer_idx, 0);
            }
        }
        // The connections are cut before, during and after the transfer.
        let pushed = route.push(writes(&all));
        std::thread::sleep(Duration::from_micros(100 * round));
        proxy.cut_all();
        let pushed = soon(pushed).await.unwrap();
        assert_eq!(pushed.pieces.len(), all.len() * LAYOUT.num_layers, "each piece is reported once");
        assert!(fabric.holds(&writes(&all)), "round {round}");
    }
    soon(route.push(writes(&all))).await.unwrap();
    assert!(proxy.num_connections() > 2, "{} connections", proxy.num_connections());

    // The grant is revoked while no connection is open. The sender must ask again, although the grant was open before.
    proxy.cut_all();
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!(soon(route.push(writes(&all))).await.unwrap_err(), PushError::Revoked);
    assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));
}

#[tokio::test]
async fn a_frame_that_is_lost_twice_fails() {
    if !has_rdma() {
        return;
    }
    let fabric = fabric(NEVER);
    let proxy = Proxy::start(&fabric);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let offers = [proxy.offer.clone()];
    let route = soon(fabric.sender.route(granted.access_key(), &offers, ())).await.unwrap();
    proxy.cuts_at_open.store(true, Ordering::SeqCst);
    proxy.cut_all();
    let failures = || fabric.sender.counters().of(TransportKind::Rdma).read().failures;
    eventually("the loss is noticed", || failures() == 1).await;
    let error = soon(route.push(writes(&blocks([3])))).await.unwrap_err();
    assert!(matches!(error, PushError::Lost(_)), "{error}");
    assert_eq!(proxy.num_connections(), 3, "the first one, and one for each try");
    soon(route.close()).await;
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));
}

#[tokio::test]
async fn a_connection_that_no_handoff_uses_ends_and_the_next_push_opens_another() {
    if !has_rdma() {
        return;
    }
    let mut fabric = TransferPair::with(RDMA, |config| config.max_connections = 1);
    let idle_timeout = Duration::from_millis(20);
    let short = || sender_with(&fabric.source, RDMA, |config| config.idle_timeout = idle_timeout).unwrap();
    let (first, mut other) = (short(), short());
    fabric.sender = first;
    // The receiver admits a sender only when it has dropped the agents of the one before.
    for _ in 0..3 {
        let granted = fabric.receiver.grant(blocks([3]), ());
        let route = fabric.route_in_the_end(&granted).await;
        let pushed = soon(route.push(writes(&blocks([3])))).await.unwrap();
        soon(granted.verify(pushed.pieces)).await.unwrap();
        soon(route.close()).await;
        assert_eq!(fabric.sender.counters().of(TransportKind::Rdma).read().failures, 0);
        std::mem::swap(&mut fabric.sender, &mut other);
    }
}
