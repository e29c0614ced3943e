//! An unauthenticated peer at an nccl port learns nothing and holds or exhausts no resource, in particular no communicator.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use baton_handoff::{AccessKey, Generation, RouteError, Secret, TransportKind};
use baton_transfer::{Receiver, ReceiverConfig, socket};
use baton_transfer_conformance::{NEVER, PATIENCE, TransferPair, blocks, eventually, soon};

use crate::{
    communicators::MAX_COMMUNICATORS,
    fabric::UniqueId,
    tests::{
        NCCL,
        faults::{ManualSender, hear, hello, say},
    },
    wire::{MESSAGE_BYTES, Message},
};

fn num_joined(fabric: &TransferPair) -> u64 {
    fabric.receiver.counters().of(TransportKind::Nccl).read().routes
}

#[tokio::test]
async fn every_refusal_has_the_same_answer() {
    let fabric = TransferPair::new(NCCL);
    let (_, pool) = fabric.address(TransportKind::Nccl);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let stale = fabric.receiver.grant(blocks([6]), ()).access_key();
    let right = granted.access_key();
    let secret = |secret| AccessKey { secret: Secret(secret), ..right };
    let mut almost = right.secret.0;
    almost[15] ^= 1;
    for wrong in [
        hello(pool ^ 1, right),
        Message::Hello { pool, num_layers: 1, layer_bytes: 1, block_bytes: 1, access_key: right },
        hello(pool, secret([0; 16])),
        hello(pool, secret(almost)),
        hello(pool, AccessKey { generation: Generation(right.generation.0 ^ 1), ..right }),
        hello(pool, AccessKey { secret: stale.secret, ..right }),
        hello(pool, stale),
    ] {
        assert_eq!(fabric.ask(TransportKind::Nccl, &wrong.encode()), Message::Refused.encode(), "{wrong:?}");
    }
    let garbage: Vec<u8> = (0..4096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let early = Message::Announce { sequence: 0, access_key: right, num_pieces: 1 }.encode();
    for bytes in [&garbage[..], b"GET / HTTP/1.1\r\n\r\n", &early, b""] {
        assert_eq!(fabric.ask(TransportKind::Nccl, bytes), b"", "it does not learn that this is a kv port");
    }
    assert_eq!(num_joined(&fabric), 0);
    fabric.works().await;
}

#[tokio::test]
async fn a_wrong_access_key_fails_its_own_route_alone() {
    let fabric = TransferPair::new(NCCL);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let guessed = AccessKey { secret: Secret::default(), ..granted.access_key() };
    let error = soon(fabric.sender.route(guessed, granted.offers(), ())).await.err().unwrap();
    assert!(matches!(error, RouteError::OtherIncarnation(_)), "{error}");
    fabric.works().await;
}

#[tokio::test]
async fn an_unauthenticated_peer_does_not_evict_an_idle_peer() {
    let fabric = TransferPair::new(NCCL);
    let (_, pool) = fabric.address(TransportKind::Nccl);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let peers: Vec<_> =
        (0..MAX_COMMUNICATORS).map(|_| ManualSender::connect(&fabric, granted.access_key())).collect();
    eventually("all have joined", || num_joined(&fabric) == MAX_COMMUNICATORS as u64).await;
    let unauthenticated = hello(pool, AccessKey { secret: Secret::default(), ..granted.access_key() });
    for _ in 0..2 * MAX_COMMUNICATORS {
        assert_eq!(fabric.ask(TransportKind::Nccl, &unauthenticated.encode()), Message::Refused.encode());
    }
    for (sequence, peer) in peers.iter().enumerate() {
        // The piece was never granted. The answer shows that the peer is still connected.
        let announced = peer.announce(0, granted.access_key(), &[(0, 9)]);
        assert!(matches!(announced, Some(Message::No { .. })), "{sequence}: {announced:?}");
    }
}

#[tokio::test]
async fn a_silent_or_slow_peer_is_not_waited_for() {
    let fabric = TransferPair::with(NCCL, |config| {
        config.handshake_timeout = Duration::from_millis(300);
        // For a peer that is welcomed and does not join.
        config.io_timeout = PATIENCE;
    });
    let (address, pool) = fabric.address(TransportKind::Nccl);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let access_key = granted.access_key();
    let silent = TcpStream::connect(&address).unwrap();
    assert_eq!(hear(&silent), None);
    let slow = tokio::task::spawn_blocking({
        let address = address.clone();
        move || {
            let start = Instant::now();
            let mut socket = TcpStream::connect(address).unwrap();
            for byte in hello(pool, access_key).encode().chunks(1) {
                if socket.write_all(byte).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            // The receiver has closed the connection in the middle of the message.
            socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            assert!(matches!(socket.read(&mut [0; MESSAGE_BYTES]), Ok(0) | Err(_)));
            start.elapsed()
        }
    });
    let took = soon(async { slow.await.unwrap() }).await;
    assert!(took < Duration::from_secs(20), "{took:?}");
    assert_eq!(num_joined(&fabric), 0);

    let absent = TcpStream::connect(&address).unwrap();
    say(&absent, hello(pool, access_key));
    assert_eq!(hear(&absent), Some(Message::Welcome));
    socket::receive_exact(&absent, &mut [0; UniqueId::BYTES], NEVER).unwrap();
    assert_eq!(hear(&absent), None);
    fabric.works().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_open_connections_do_not_block_authenticated_peers() {
    // Handshakes never time out here: only the limit on their number closes connections.
    let fabric = TransferPair::with(NCCL, |config| config.handshake_timeout = NEVER);
    let (address, _) = fabric.address(TransportKind::Nccl);
    let max_unauthenticated = ReceiverConfig::default().max_unauthenticated;
    let mut silent = Vec::new();
    for n in 0..4 * max_unauthenticated {
        let mut socket = TcpStream::connect(&address).unwrap();
        if n % 2 == 0 {
            // The receiver may have closed it already.
            let _ = socket.write_all(b"B");
        }
        silent.push(socket);
    }
    // New connections are refused as well until the closed ones are gone.
    let granted = fabric.receiver.grant(blocks([5]), ());
    drop(fabric.route_in_the_end(&granted).await);
    fabric.works().await;
    // The oldest connections were closed.
    assert_eq!(hear(&silent[0]), None);

    let receiver: Receiver = fabric.receiver;
    soon(tokio::task::spawn_blocking(move || drop(receiver))).await.unwrap();
    drop(silent);
}
