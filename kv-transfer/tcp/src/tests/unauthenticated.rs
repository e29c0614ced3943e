//! What an unauthenticated peer at a data port can learn, hold and exhaust: nothing. And what a writer must show, with
//! TLS and without.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_handoff::{AccessKey, Generation, Secret, TransportKind};
use baton_kv_cache::WireFormat;
use baton_tls::{Tls, TlsConfig};
use baton_transfer::{Receiver, ReceiverConfig, Sender, SenderConfig};
use baton_transfer_conformance::{
    LAYOUT, NEVER, TransferPair, blocks, bytes, eventually, sender, soon, tls, writes,
};

use crate::{
    TcpSending,
    tests::{TCP, TLS},
};
use crate::{
    channel::Channel,
    wire::{self, Ack, AckStatus, FrameHeader, Hello, Welcome},
};

fn hello(pool: u64, access_key: AccessKey) -> Hello {
    Hello {
        version: wire::VERSION,
        pool,
        layer_bytes: LAYOUT.layer_bytes() as u64,
        num_layers: LAYOUT.num_layers as u32,
        access_key,
    }
}

#[tokio::test]
async fn every_refusal_has_the_same_answer() {
    let fabric = TransferPair::new(TCP);
    let (_, pool) = fabric.address(TransportKind::Tcp);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let stale = fabric.receiver.grant(blocks([6]), ()).access_key();
    let right = granted.access_key();
    let sound = hello(pool, right);
    let secret = |secret| AccessKey { secret: Secret(secret), ..right };
    let mut almost = right.secret.0;
    almost[15] ^= 1;
    let refused = Welcome::Refused.encode();
    for wrong in [
        Hello { version: 1, ..sound },
        Hello { pool: pool ^ 1, ..sound },
        Hello { layer_bytes: 1, ..sound },
        Hello { num_layers: 1, ..sound },
        hello(pool, secret([0; 16])),
        hello(pool, secret(almost)),
        hello(pool, AccessKey { generation: Generation(right.generation.0 ^ 1), ..right }),
        hello(pool, AccessKey { secret: stale.secret, ..right }),
        hello(pool, stale),
    ] {
        assert_eq!(fabric.ask(TransportKind::Tcp, &wrong.encode()), refused, "{wrong:?}");
    }
    assert_eq!(fabric.ask(TransportKind::Tcp, &sound.encode()), Welcome::Accepted.encode());
    let garbage: Vec<u8> = (0..4096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for bytes in
        [&garbage[..], b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b""]
    {
        assert_eq!(fabric.ask(TransportKind::Tcp, bytes), b"", "not even that it is a kv port");
    }
    fabric.works().await;
}

#[tokio::test]
async fn every_frame_needs_an_access_key() {
    let fabric = TransferPair::new(TCP);
    let (address, pool) = fabric.address(TransportKind::Tcp);
    let [own, other] = [5, 6].map(|block| fabric.receiver.grant(blocks([block]), ()));
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(&hello(pool, own.access_key()).encode()).unwrap();
    socket.read_exact(&mut [0; wire::WELCOME_BYTES]).unwrap();
    let mut write = |access_key| {
        let payload_bytes = LAYOUT.layer_bytes() as u64;
        let header =
            FrameHeader { num_pieces: 1, format: WireFormat::AsIs, access_key, sequence: 0, payload_bytes };
        socket.write_all(&header.encode()).unwrap();
        socket.write_all(&wire::encode_piece(0, 0)).unwrap();
        socket.write_all(&vec![0x11; payload_bytes as usize]).unwrap();
        let mut ack = [0; wire::ACK_BYTES];
        socket.read_exact(&mut ack).unwrap();
        Ack::decode(&ack).unwrap().status
    };
    let guessed = AccessKey { secret: own.access_key().secret, ..other.access_key() };
    assert_eq!(write(guessed), AckStatus::Revoked, "as if there were no such grant");
    assert!(bytes(&fabric.target, blocks([6])[0], 0).iter().all(|&byte| byte == 0));
    assert_eq!(write(other.access_key()), AckStatus::Placed);
    let stale = own.access_key();
    drop(own);
    assert_eq!(write(stale), AckStatus::Revoked);
}

/// Ten thousand, or as many as this process may have open.
fn many() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure outlives the calls.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
    (limit.rlim_max as usize / 2).min(10_000)
}

fn num_threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_half_open_connections_cost_little_and_keep_no_admitted_peer_out() {
    for is_secure in [false, true] {
        // Their deadline never passes: only their number ends them.
        let patient = |config: &mut ReceiverConfig| config.handshake_timeout = NEVER;
        let fabric = TransferPair::with(if is_secure { TLS } else { TCP }, patient);
        let (address, _) = fabric.address(TransportKind::Tcp);
        let max_unauthenticated = ReceiverConfig::default().max_unauthenticated;
        let mut silent = Vec::new();
        let mut num_most = 0;
        // With TLS each costs more of this process, too.
        for n in 0..if is_secure { many() / 10 } else { many() } {
            let mut socket = TcpStream::connect(&address).unwrap();
            if n % 2 == 0 {
                // The first byte of either protocol. It may be hung up on already.
                let _ = socket.write_all(if is_secure { b"\x16" } else { b"B" });
            }
            silent.push(socket);
            if n % 500 == 0 {
                num_most = num_most.max(num_threads());
            }
        }
        // Other tests of this process have threads, too, but not as many as there are connections.
        assert!(num_most < 2 * max_unauthenticated + 1000, "{num_most} threads");
        fabric.works().await;
        // The flood goes on while a peer with a grant connects.
        let flood = std::thread::spawn(move || {
            (0..200).map(|_| TcpStream::connect(&address).unwrap()).collect::<Vec<_>>()
        });
        let granted = fabric.receiver.grant(blocks([8]), ());
        drop(fabric.route_in_the_end(&granted).await);
        drop((flood.join().unwrap(), silent));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_sends_byte_by_byte_is_not_waited_for() {
    for is_secure in [false, true] {
        let hasty = |config: &mut ReceiverConfig| config.handshake_timeout = Duration::from_millis(300);
        let fabric = TransferPair::with(if is_secure { TLS } else { TCP }, hasty);
        let (address, pool) = fabric.address(TransportKind::Tcp);
        let granted = fabric.receiver.grant(blocks([5]), ());
        let slow = tokio::task::spawn_blocking(move || {
            let mut socket = TcpStream::connect(address).unwrap();
            let start = Instant::now();
            let mut bytes = hello(pool, granted.access_key()).encode().to_vec();
            if is_secure {
                // A record that promises much.
                bytes = [&b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc"[..], &[3; 1 << 14]].concat();
            }
            for byte in bytes.chunks(1) {
                if socket.write_all(byte).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            // Hung up on, in the middle.
            let _ = socket.set_read_timeout(Some(Duration::from_secs(30)));
            assert!(matches!(socket.read(&mut [0; 64]), Ok(_) | Err(_)));
            start.elapsed()
        });
        let took = soon(async { slow.await.unwrap() }).await;
        assert!(took < Duration::from_secs(20), "{took:?}");
        let counts = || fabric.receiver.counters().of(TransportKind::Tcp).read();
        eventually("it was sent away", || counts().rejections >= 1).await;
        assert_eq!(counts().failures, 0, "it was not in use");
    }
}

/// Connects with TLS as the given identity.
fn connect_as(fabric: &TransferPair, tls: &Tls) -> std::io::Result<Channel> {
    let socket = Arc::new(TcpStream::connect(fabric.address(TransportKind::Tcp).0)?);
    Channel::connect(tls, "127.0.0.1", socket, Instant::now() + Duration::from_secs(30))
}

fn greet(channel: &mut Channel, hello: Hello) -> std::io::Result<Option<Welcome>> {
    channel.writer.send(&hello.encode())?;
    let mut welcome = [0; wire::WELCOME_BYTES];
    channel.reader.receive_exact(&mut welcome, Duration::from_secs(30))?;
    Ok(Welcome::decode(&welcome))
}

#[tokio::test]
async fn the_right_access_key_with_another_identity_is_refused() {
    let fabric = TransferPair::new(TLS);
    let (_, pool) = fabric.address(TransportKind::Tcp);
    let (a, b) = (tls("a"), tls("b"));
    let granted = fabric.receiver.grant(blocks([5]), ());
    granted.bind(b.identity());
    // A second peer changes nothing.
    granted.bind(a.identity());
    let hello = hello(pool, granted.access_key());

    let mut thief = connect_as(&fabric, &a).unwrap();
    assert_eq!(thief.peer, Some(a.identity()), "the receiver of these tests");
    assert!(!granted.was_shown_by_another());
    assert_eq!(greet(&mut thief, hello).unwrap(), Some(Welcome::Refused));
    assert!(granted.was_shown_by_another());
    let mut writer = connect_as(&fabric, &b).unwrap();
    assert_eq!(greet(&mut writer, hello).unwrap(), Some(Welcome::Accepted));

    // Nor does a connection that was let in for another grant help.
    let own = fabric.receiver.grant(blocks([6]), ());
    own.bind(a.identity());
    let mut thief = connect_as(&fabric, &a).unwrap();
    assert_eq!(
        greet(&mut thief, Hello { access_key: own.access_key(), ..hello }).unwrap(),
        Some(Welcome::Accepted)
    );
    let payload_bytes = LAYOUT.layer_bytes() as u64;
    let (format, access_key) = (WireFormat::AsIs, granted.access_key());
    let header = FrameHeader { num_pieces: 1, format, access_key, sequence: 4, payload_bytes };
    thief.writer.send(&header.encode()).unwrap();
    thief.writer.send(&wire::encode_piece(0, 0)).unwrap();
    thief.writer.send(&vec![0x11; payload_bytes as usize]).unwrap();
    let mut ack = [0; wire::ACK_BYTES];
    thief.reader.receive_exact(&mut ack, Duration::from_secs(30)).unwrap();
    assert_eq!(Ack::decode(&ack), Some(Ack { status: AckStatus::Revoked, sequence: 4 }));
    assert!(bytes(&fabric.target, blocks([5])[0], 0).iter().all(|&byte| byte == 0));
}

#[tokio::test]
async fn foreign_certificates_and_plain_peers_are_refused_either_way() {
    let fabric = TransferPair::new(TLS);
    let (_, pool) = fabric.address(TransportKind::Tcp);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let hello = hello(pool, granted.access_key());
    // Plain to TLS: not a word of this protocol.
    let answer = fabric.ask(TransportKind::Tcp, &hello.encode());
    assert!(answer.is_empty() || answer[0] == 21, "at most an alert of TLS: {answer:?}");
    let plain = sender(&fabric.source, TCP).unwrap();
    let error =
        soon(plain.route(granted.access_key(), granted.offers(), ())).await.err().unwrap().to_string();
    assert!(error.contains("no route to the peer's blocks"), "{error}");

    // One that this side's authority has not signed, though it believes in ours.
    let foreign = tls("foreign");
    let refused = connect_as(&fabric, &foreign).and_then(|mut channel| greet(&mut channel, hello));
    assert!(refused.is_err());

    // TLS to plain.
    let fabric = TransferPair::new(TCP);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let secure = sender(&fabric.source, TLS).unwrap();
    let error =
        soon(secure.route(granted.access_key(), granted.offers(), ())).await.err().unwrap().to_string();
    assert!(error.contains("speaks no TLS"), "{error}");
}

#[tokio::test]
async fn a_receiver_ends_while_unauthenticated_peers_are_connected() {
    let patient = |config: &mut ReceiverConfig| config.handshake_timeout = NEVER;
    for fabric in [TransferPair::with(TCP, patient), TransferPair::with(TLS, patient)] {
        let (address, _) = fabric.address(TransportKind::Tcp);
        let silent: Vec<_> = (0..10).map(|_| TcpStream::connect(&address).unwrap()).collect();
        let receiver: Receiver = fabric.receiver;
        soon(tokio::task::spawn_blocking(move || drop(receiver))).await.unwrap();
        drop(silent);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_with_a_new_key_shows_it_for_the_next_grant() {
    let fabric = TransferPair::new(TLS);
    let dir = baton_transfer_conformance::private_dir();
    let become_one = |name: &str, age: u64| {
        for extension in ["pem", "key"] {
            let from = format!("{}/../../tls/testdata/{name}.{extension}", env!("CARGO_MANIFEST_DIR"));
            let to = dir.path().join(format!("own.{extension}"));
            std::fs::copy(from, &to).unwrap();
            // Two changes may lie within one tick of the file system's clock.
            let when = std::time::SystemTime::now() - Duration::from_secs(age);
            std::fs::File::options().append(true).open(to).unwrap().set_modified(when).unwrap();
        }
    };
    become_one("b", 100);
    let (cert, key) = (dir.path().join("own.pem"), dir.path().join("own.key"));
    let ca = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tls/testdata/ca.pem").into();
    let own = Tls::load(TlsConfig { cert, key, ca, name: None }).unwrap();
    let transport = TcpSending { tls: Some(own.clone()), ..TcpSending::default() };
    let sender =
        Sender::start(Arc::clone(&fabric.source), SenderConfig::default(), vec![Box::new(transport)])
            .unwrap();
    for name in ["b", "a"] {
        become_one(name, 50 - u64::from(name.as_bytes()[0] - b'a'));
        assert_eq!(own.identity(), tls(name).identity());
        let granted = fabric.receiver.grant(blocks([5]), ());
        granted.bind(tls(name).identity());
        let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
        let pushed = soon(route.push(writes(&blocks([5])))).await.unwrap();
        soon(granted.verify(pushed.pieces)).await.unwrap();
        assert!(!granted.was_shown_by_another());
    }
}
