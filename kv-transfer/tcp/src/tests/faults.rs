//! Peers that misbehave on a data connection, on either side.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use baton_handoff::{AccessKey, Generation, PushError, Secret, TransportKind, TransportOffer};
use baton_kv_cache::{BlockId, WireFormat};
use baton_transfer::{ReceiverConfig, Sender, SenderConfig};
use baton_transfer_conformance::{
    Guards, LAYOUT, TransferPair, blocks, bytes, eventually, fill, some_access_key, soon, storage, writes,
};

use crate::wire::{self, Ack, AckStatus, FrameHeader, Hello, Welcome};
use crate::{TcpSending, tests::TCP};

const LAYER: usize = 512;

/// A sender with so many connections to a pool.
fn sender_over(streams_per_peer: usize, config: SenderConfig) -> Sender {
    let transport = TcpSending { streams_per_peer, ..TcpSending::default() };
    Sender::start(storage(), config, vec![Box::new(transport)]).unwrap()
}

/// A sender by hand.
struct Peer(TcpStream);

impl Peer {
    fn connect(fabric: &TransferPair, access_key: AccessKey) -> Peer {
        let mut peer = Peer::ask(fabric, access_key);
        assert_eq!(peer.welcome(), Welcome::Accepted);
        peer
    }

    /// Says hello.
    fn ask(fabric: &TransferPair, access_key: AccessKey) -> Peer {
        assert_eq!(LAYOUT.layer_bytes(), LAYER);
        let TransportOffer::Tcp { address, pool } = fabric.offer(TransportKind::Tcp) else { unreachable!() };
        let mut peer = Peer(TcpStream::connect(address).unwrap());
        peer.0.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let hello = Hello {
            version: wire::VERSION,
            pool,
            layer_bytes: LAYER as u64,
            num_layers: LAYOUT.num_layers as u32,
            access_key,
        };
        peer.0.write_all(&hello.encode()).unwrap();
        peer
    }

    fn welcome(&mut self) -> Welcome {
        let mut welcome = [0; wire::WELCOME_BYTES];
        self.0.read_exact(&mut welcome).unwrap();
        Welcome::decode(&welcome).unwrap()
    }

    fn head(&mut self, access_key: AccessKey, pieces: &[(u32, u32)]) {
        let header = FrameHeader {
            num_pieces: pieces.len() as u16,
            format: WireFormat::AsIs,
            access_key,
            sequence: 0,
            payload_bytes: (pieces.len() * LAYER) as u64,
        };
        self.0.write_all(&header.encode()).unwrap();
        for &(layer_idx, block_idx) in pieces {
            self.0.write_all(&wire::encode_piece(layer_idx, block_idx)).unwrap();
        }
    }

    fn payload(&mut self, byte: u8, num_bytes: usize) {
        self.0.write_all(&vec![byte; num_bytes]).unwrap();
    }

    fn ack(&mut self) -> AckStatus {
        let mut ack = [0; wire::ACK_BYTES];
        self.0.read_exact(&mut ack).unwrap();
        Ack::decode(&ack).unwrap().status
    }

    fn is_hung_up(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0) | Err(_))
    }
}

fn is_filled(fabric: &TransferPair, block: u32, layer_idx: usize, byte: u8) -> bool {
    bytes(&fabric.target, BlockId(block), layer_idx).iter().all(|&found| found == byte)
}

#[tokio::test]
async fn a_sender_killed_in_the_middle_of_a_frame_leaves_its_place_to_the_next() {
    let fabric = TransferPair::new(TCP);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let mut peer = Peer::connect(&fabric, granted.access_key());
    peer.head(granted.access_key(), &[(0, 0), (1, 0), (2, 0)]);
    peer.payload(0x11, LAYER + 100);
    eventually("the first piece is there", || is_filled(&fabric, 5, 0, 0x11)).await;
    drop(peer);
    let failures = || fabric.receiver.counters().of(TransportKind::Tcp).read().failures;
    eventually("the connection is given up", || failures() == 1).await;
    assert_eq!(fabric.receiver.counters().of(TransportKind::Tcp).read().bytes, 0);

    let route = fabric.route(&granted).await.unwrap();
    let pushed = soon(route.push(writes(&blocks([5])))).await.unwrap();
    soon(granted.verify(pushed.pieces)).await.unwrap();
}

#[tokio::test]
async fn a_revocation_does_not_wait_for_a_stalled_writer_and_nothing_of_it_lands() {
    let fabric = TransferPair::new(TCP);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([5]), guards.guard());
    let access_key = granted.access_key();
    let mut peer = Peer::connect(&fabric, granted.access_key());
    peer.head(access_key, &[(0, 0), (1, 0)]);
    peer.payload(0x11, LAYER);
    eventually("half a frame is there", || is_filled(&fabric, 5, 0, 0x11)).await;

    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!(guards.num_out(), 0);
    fill(&fabric.target, BlockId(5), 0, 0xEE);
    fill(&fabric.target, BlockId(5), 1, 0xEE);
    peer.payload(0x22, LAYER);
    assert_eq!(peer.ack(), AckStatus::Revoked);
    assert!(is_filled(&fabric, 5, 0, 0xEE) && is_filled(&fabric, 5, 1, 0xEE));
    assert_eq!(fabric.receiver.counters().of(TransportKind::Tcp).read().late_bytes, 2 * LAYER as u64);

    // The connection serves on.
    let granted = fabric.receiver.grant(blocks([6]), ());
    peer.head(granted.access_key(), &[(1, 0)]);
    peer.payload(0x33, LAYER);
    assert_eq!(peer.ack(), AckStatus::Placed);
    assert!(is_filled(&fabric, 6, 1, 0x33));
}

#[tokio::test]
async fn frames_for_other_grants_are_counted_and_those_for_other_places_only_dropped() {
    let fabric = TransferPair::new(TCP);
    let granted = fabric.receiver.grant(blocks([5, 6]), ());
    let access_key = granted.access_key();
    let mut peer = Peer::connect(&fabric, granted.access_key());
    let mut send = |access_key, pieces: &[(u32, u32)], byte| {
        peer.head(access_key, pieces);
        peer.payload(byte, pieces.len() * LAYER);
        peer.ack()
    };
    let guess = |generation| AccessKey { generation: Generation(generation), ..access_key };
    let stolen = AccessKey { secret: Secret([0; 16]), ..access_key };
    for guess in [guess(0), guess(1), guess(!access_key.generation.0), stolen] {
        assert_eq!(send(guess, &[(0, 0)], 1), AckStatus::Revoked);
    }
    for piece in [(0, 2), (3, 0), (u32::MAX, 0), (0, u32::MAX)] {
        assert_eq!(send(access_key, &[(0, 1), piece], 1), AckStatus::Refused);
    }
    assert_eq!(send(access_key, &[(0, 1), (0, 1)], 1), AckStatus::Refused, "twice in one frame");
    // What was refused in part is free as a whole, and is written once.
    assert_eq!(send(access_key, &[(0, 1)], 7), AckStatus::Placed);
    assert_eq!(send(access_key, &[(0, 1)], 8), AckStatus::PlacedBefore);
    assert_eq!(send(access_key, &[(0, 0), (0, 1)], 8), AckStatus::Refused);
    assert!(is_filled(&fabric, 6, 0, 7) && is_filled(&fabric, 5, 0, 0));
    drop(granted);
    assert_eq!(send(access_key, &[(1, 1)], 9), AckStatus::Revoked);
    assert!(is_filled(&fabric, 6, 1, 0));
    let counts = fabric.receiver.counters().of(TransportKind::Tcp).read();
    assert_eq!(counts.bytes, LAYER as u64);
    assert_eq!(counts.late_bytes, 5 * LAYER as u64, "of frames that were answered with Revoked");
}

#[tokio::test]
async fn two_connections_cannot_write_one_piece() {
    let fabric = TransferPair::new(TCP);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let (mut first, mut second) =
        (Peer::connect(&fabric, granted.access_key()), Peer::connect(&fabric, granted.access_key()));
    first.head(granted.access_key(), &[(0, 0), (1, 0)]);
    first.payload(0x11, LAYER);
    eventually("half a frame is there", || is_filled(&fabric, 5, 0, 0x11)).await;
    second.head(granted.access_key(), &[(1, 0)]);
    second.payload(0x22, LAYER);
    assert_eq!(second.ack(), AckStatus::Refused);
    first.payload(0x11, LAYER);
    assert_eq!(first.ack(), AckStatus::Placed);
    assert!(is_filled(&fabric, 5, 1, 0x11));
}

#[tokio::test]
async fn a_peer_that_does_not_speak_the_protocol_is_disconnected_without_an_answer() {
    let fabric = TransferPair::new(TCP);
    let TransportOffer::Tcp { address, .. } = fabric.offer(TransportKind::Tcp) else { unreachable!() };
    let mut unauthenticated = Peer(TcpStream::connect(address).unwrap());
    unauthenticated.0.write_all(&[b'x'; wire::HELLO_BYTES]).unwrap();
    assert!(unauthenticated.is_hung_up());

    let granted = fabric.receiver.grant(blocks([5]), ());
    let mut peer = Peer::connect(&fabric, granted.access_key());
    peer.0.write_all(&[0xFF; wire::FRAME_BYTES]).unwrap();
    assert!(peer.is_hung_up());
}

#[tokio::test]
async fn a_peer_that_stops_in_the_middle_of_a_frame_is_disconnected() {
    let mut fabric = TransferPair::new(TCP);
    let config = ReceiverConfig { io_timeout: Duration::from_millis(50), ..fabric.config.clone() };
    fabric.receiver = fabric.restarted(&fabric.target, &config);
    let granted = fabric.receiver.grant(blocks([5]), ());
    // In the header, in the list of pieces, in the payload.
    for num_bytes in [10, wire::FRAME_BYTES + 4, wire::FRAME_BYTES + 8 + 100] {
        let mut peer = Peer::connect(&fabric, granted.access_key());
        let header = FrameHeader {
            format: WireFormat::AsIs,
            num_pieces: 1,
            access_key: granted.access_key(),
            sequence: 0,
            payload_bytes: LAYER as u64,
        };
        let mut frame = header.encode().to_vec();
        frame.extend(wire::encode_piece(0, 0));
        frame.extend([0x11; LAYER]);
        peer.0.write_all(&frame[..num_bytes]).unwrap();
        assert!(peer.is_hung_up());
    }
}

#[tokio::test]
async fn more_connections_than_allowed_are_closed() {
    let mut fabric = TransferPair::new(TCP);
    let config = ReceiverConfig { max_connections: 1, ..fabric.config.clone() };
    fabric.receiver = fabric.restarted(&fabric.target, &config);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let first = Peer::connect(&fabric, granted.access_key());
    let mut second = Peer::ask(&fabric, granted.access_key());
    assert_eq!(second.welcome(), Welcome::Refused);
    assert!(second.is_hung_up());
    drop(first);
    eventually("there is room again", || {
        Peer::ask(&fabric, granted.access_key()).welcome() == Welcome::Accepted
    })
    .await;
}

#[tokio::test]
async fn a_lane_that_a_full_receiver_refuses_leaves_its_jobs_to_the_lane_that_is_connected() {
    let mut fabric = TransferPair::new(TCP);
    let config = ReceiverConfig { max_connections: 1, ..fabric.config.clone() };
    fabric.receiver = fabric.restarted(&fabric.target, &config);
    let rejections = || fabric.receiver.counters().of(TransportKind::Tcp).read().rejections;
    // Either lane may take a grant to open or a frame.
    for _ in 0..1000 {
        fabric.works().await;
        if rejections() > 0 {
            break;
        }
    }
    assert!(rejections() > 0, "the second lane has taken none");
    fabric.works().await;

    // What the connected lane then carries, it also learns to be revoked.
    let granted = fabric.receiver.grant(blocks([5]), ());
    let route = fabric.route(&granted).await.unwrap();
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!(soon(route.push(writes(&blocks([5])))).await.unwrap_err(), PushError::Revoked);
}

/// A receiver by hand: says welcome to every connection, then treats each frame, and its connection, as told.
struct ReceiverByHand {
    address: std::net::SocketAddr,
    thread: std::thread::JoinHandle<()>,
}

impl ReceiverByHand {
    fn new(fates: Vec<Fate>) -> ReceiverByHand {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let fates = Arc::new(Mutex::new(fates.into_iter()));
        let thread = std::thread::spawn(move || {
            let mut connections = Vec::new();
            loop {
                let (mut socket, _) = listener.accept().unwrap();
                // A silent connection means that the test is over.
                if socket.read_exact(&mut [0; wire::HELLO_BYTES]).is_err() {
                    break;
                }
                socket.write_all(&Welcome::Accepted.encode()).unwrap();
                let fates = Arc::clone(&fates);
                connections.push(std::thread::spawn(move || receive_by_hand(socket, &fates)));
            }
            connections.into_iter().for_each(|connection| connection.join().unwrap());
        });
        ReceiverByHand { address, thread }
    }

    fn offer(&self) -> TransportOffer {
        TransportOffer::Tcp { address: self.address.to_string(), pool: 1 }
    }

    /// After the sender has left.
    fn end(self) {
        drop(TcpStream::connect(self.address).unwrap());
        self.thread.join().unwrap();
    }
}

fn receive_by_hand(mut socket: TcpStream, fates: &Mutex<std::vec::IntoIter<Fate>>) {
    let mut frame = vec![0; wire::FRAME_BYTES + wire::PIECE_BYTES + LAYER];
    if socket.read_exact(&mut frame).is_err() {
        // The sender has left before it sent anything.
        return;
    }
    match fates.lock().unwrap().next().expect("as many fates as frames") {
        Fate::Close => return,
        Fate::Silence => {}
        Fate::Ack(status) => socket.write_all(&Ack { status, sequence: 0 }.encode()).unwrap(),
    }
    // Until the sender leaves.
    let _ = socket.read(&mut [0]);
}

#[derive(Clone, Copy)]
enum Fate {
    Close,
    Silence,
    Ack(AckStatus),
}

#[tokio::test]
async fn a_frame_lost_with_its_connection_is_sent_once_more_for_each_lane() {
    use AckStatus::{Placed, PlacedBefore, Revoked};
    use Fate::{Ack, Close, Silence};
    for (streams_per_peer, fates, expected) in [
        (1, vec![Close, Ack(Placed)], Ok(())),
        // The first arrived, its ack did not.
        (1, vec![Close, Ack(PlacedBefore)], Ok(())),
        (1, vec![Close, Ack(Revoked)], Err("the grant is revoked")),
        (1, vec![Close, Close], Err("connection lost")),
        // What broke the connection of one lane may have broken those of all.
        (2, vec![Close, Close, Ack(Placed)], Ok(())),
        (2, vec![Close, Close, Close], Err("connection lost")),
        (1, vec![Silence, Ack(Placed)], Ok(())),
        (1, vec![Silence, Silence], Err("connection lost")),
        // This sender has not sent it before, so another writer did.
        (1, vec![Ack(PlacedBefore)], Err("refused")),
    ] {
        let receiver = ReceiverByHand::new(fates);
        let config = SenderConfig { io_timeout: Duration::from_millis(200), ..SenderConfig::default() };
        let guards = Guards::default();
        let sender = sender_over(streams_per_peer, config);
        let route =
            soon(sender.route(some_access_key(9), &[receiver.offer()], guards.guard())).await.unwrap();
        let mut pieces = writes(&blocks([1]));
        pieces.truncate(1);
        match (soon(route.push(pieces)).await, expected) {
            (Ok(_), Ok(())) => {}
            (Err(error), Err(expected)) => assert!(error.to_string().starts_with(expected), "{error}"),
            (got, expected) => panic!("{got:?} instead of {expected:?}"),
        }
        soon(route.close()).await;
        assert_eq!(guards.num_out(), 0);
        drop(sender);
        receiver.end();
    }
}

/// Acks every frame of one piece, until the sender leaves.
fn ack_all(mut socket: TcpStream) {
    let mut frame = vec![0; wire::FRAME_BYTES + wire::PIECE_BYTES + LAYER];
    while socket.read_exact(&mut frame).is_ok() {
        let header = FrameHeader::decode(frame[..wire::FRAME_BYTES].try_into().unwrap(), |_| LAYER).unwrap();
        let ack = Ack { status: AckStatus::Placed, sequence: header.sequence };
        socket.write_all(&ack.encode()).unwrap();
    }
}

#[tokio::test]
async fn a_lane_that_cannot_connect_leaves_its_frames_to_the_lane_that_is_connected() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let num_closed = Arc::new(AtomicUsize::new(0));
    let receiver = std::thread::spawn({
        let num_closed = Arc::clone(&num_closed);
        move || {
            let mut acks = None;
            loop {
                let (mut socket, _) = listener.accept().unwrap();
                // A silent connection means that the test is over.
                if socket.read_exact(&mut [0; wire::HELLO_BYTES]).is_err() {
                    break;
                }
                if acks.is_some() {
                    num_closed.fetch_add(1, Ordering::SeqCst);
                    continue;
                }
                socket.write_all(&Welcome::Accepted.encode()).unwrap();
                acks = Some(std::thread::spawn(move || ack_all(socket)));
            }
            acks.expect("the first lane connects").join().unwrap();
        }
    });
    let sender = sender_over(2, SenderConfig::default());
    let offer = TransportOffer::Tcp { address: address.to_string(), pool: 1 };
    let route = soon(sender.route(some_access_key(9), &[offer], ())).await.unwrap();
    let mut pieces = writes(&blocks([1]));
    pieces.truncate(1);
    // Either lane may take a frame.
    for _ in 0..1000 {
        soon(route.push(pieces.clone())).await.unwrap();
        if num_closed.load(Ordering::SeqCst) > 0 {
            break;
        }
    }
    assert!(num_closed.load(Ordering::SeqCst) > 0, "the second lane has taken none");
    soon(route.push(pieces)).await.unwrap();
    soon(route.close()).await;
    drop(sender);
    drop(TcpStream::connect(address).unwrap());
    receiver.join().unwrap();
}

#[tokio::test]
async fn a_connection_that_carries_nothing_ends_and_the_next_push_opens_another() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let num_ended = Arc::new(AtomicUsize::new(0));
    let receiver = std::thread::spawn({
        let num_ended = Arc::clone(&num_ended);
        move || loop {
            let (mut socket, _) = listener.accept().unwrap();
            // A silent connection means that the test is over.
            if socket.read_exact(&mut [0; wire::HELLO_BYTES]).is_err() {
                break;
            }
            socket.write_all(&Welcome::Accepted.encode()).unwrap();
            ack_all(socket);
            num_ended.fetch_add(1, Ordering::SeqCst);
        }
    });
    let idle_timeout = Duration::from_millis(20);
    let sender = sender_over(1, SenderConfig { idle_timeout, ..SenderConfig::default() });
    let offer = TransportOffer::Tcp { address: address.to_string(), pool: 1 };
    let route = soon(sender.route(some_access_key(9), &[offer], ())).await.unwrap();
    let mut pieces = writes(&blocks([1]));
    pieces.truncate(1);
    for _ in 0..3 {
        let before = num_ended.load(Ordering::SeqCst);
        soon(route.push(pieces.clone())).await.unwrap();
        eventually("the connection ends", || num_ended.load(Ordering::SeqCst) > before).await;
    }
    assert_eq!(sender.counters().of(TransportKind::Tcp).read().failures, 0);
    drop((route, sender));
    drop(TcpStream::connect(address).unwrap());
    receiver.join().unwrap();
}

#[tokio::test]
async fn a_peer_that_is_not_there_is_an_error_at_once() {
    let (address, listener) = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        (listener.local_addr().unwrap().to_string(), listener)
    };
    drop(listener);
    let sender = sender_over(2, SenderConfig::default());
    for address in [address, "no.such.host.invalid:1".into(), "not an address".into()] {
        let offer = TransportOffer::Tcp { address, pool: 1 };
        assert!(soon(sender.route(some_access_key(9), &[offer], ())).await.is_err());
    }
}

#[tokio::test]
async fn closing_a_route_ends_a_push_that_the_peer_does_not_take() {
    let receiver = ReceiverByHand::new(vec![Fate::Silence]);
    let sender = sender_over(1, SenderConfig::default());
    let route = soon(sender.route(some_access_key(9), &[receiver.offer()], ())).await.unwrap();
    let mut pieces = writes(&blocks([1]));
    pieces.truncate(1);
    let push = route.push(pieces);
    // The sender goes while the frame is not answered.
    drop((route, sender));
    assert!(matches!(soon(push).await, Err(PushError::Lost(_) | PushError::Closed)));
    receiver.end();
}
