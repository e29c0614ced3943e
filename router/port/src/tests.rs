//! HTTP/2 by the frame, so that a client does not wait as libraries make it.

use std::{
    collections::HashSet,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
};

use axum::{
    http::StatusCode,
    routing::{get, post},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use super::*;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// The head of `POST /`; its body follows.
fn head(stream: u32) -> Vec<u8> {
    const END_HEADERS: u8 = 4;
    // Entries of HPACK's static table, the third one with a value.
    frame(HEADERS, END_HEADERS, stream, &[0x83, 0x86, 0x84, 0x01, 1, b'x'])
}

struct Client {
    socket: TcpStream,
    seen: Seen,
}

/// What the port sent.
#[derive(Default)]
struct Seen {
    answered: HashSet<u32>,
    num_pings: usize,
}

/// A port that waits long for its clients.
fn patient() -> PortConfig {
    let long = Duration::from_secs(60);
    PortConfig {
        tls: None,
        header_timeout: long,
        unread_timeout: long,
        keep_alive: long,
        max_connections: 1024,
        spare_time: Duration::from_secs(5),
        connections: Gauge::default(),
        full: Counter::default(),
    }
}

/// A port that serves `routes` for as long as the test runs.
async fn served(routes: Router, config: PortConfig) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        serve(listener, routes, &config, &CancellationToken::new(), &CancellationToken::new()).await;
    });
    address
}

impl Client {
    async fn of(routes: Router) -> Client {
        let mut socket = TcpStream::connect(served(routes, patient()).await).await.unwrap();
        socket.write_all(PREFACE).await.unwrap();
        socket.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
        Client { socket, seen: Seen::default() }
    }

    /// Sends these frames. Returns when the port has taken them in.
    async fn send(&mut self, mut frames: Vec<u8>) {
        frames.extend(frame(PING, 0, 0, &[0; 8]));
        let (mut reader, mut writer) = self.socket.split();
        // The port reads nothing while its own frames are not read.
        let (sent, ()) = tokio::join!(writer.write_all(&frames), async {
            let before = self.seen.num_pings;
            while self.seen.num_pings == before {
                self.seen.next(&mut reader).await;
            }
        });
        sent.unwrap();
    }

    async fn until_answered(&mut self, count: u32) {
        while self.seen.answered.len() < count as usize {
            self.seen.next(&mut self.socket).await;
        }
    }
}

impl Seen {
    /// Reads a frame.
    async fn next(&mut self, socket: &mut (impl AsyncRead + Unpin)) {
        let read = async {
            let mut head = [0; 9];
            socket.read_exact(&mut head).await.unwrap();
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            socket.read_exact(&mut payload).await.unwrap();
            (head[3], u32::from_be_bytes(head[5..].try_into().unwrap()), payload)
        };
        match timeout(Duration::from_secs(30), read).await.expect("the port answers") {
            (HEADERS, stream, _) => assert!(self.answered.insert(stream), "one answer each"),
            (PING, ..) => self.num_pings += 1,
            (GOAWAY, _, why) => panic!("the connection ends: {}", String::from_utf8_lossy(&why)),
            _ => {}
        }
    }
}

/// The numbers of `count` streams from the `first` one on.
fn streams(first: u32, count: u32) -> impl Iterator<Item = u32> {
    (first..first + count).map(|idx| 2 * idx + 1)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_stream_may_have_a_small_message_that_is_not_read() {
    static NUM_WAITING: AtomicUsize = AtomicUsize::new(0);
    let go_on = CancellationToken::new();
    let waits = go_on.clone();
    let wait = post(move || async move {
        NUM_WAITING.fetch_add(1, Ordering::Relaxed);
        waits.cancelled().await;
        StatusCode::NO_CONTENT
    });
    let mut client = Client::of(Router::new().route("/", wait)).await;
    let frames = streams(0, MAX_STREAMS).flat_map(|stream| [head(stream), frame(DATA, 0, stream, b"small")]);
    client.send(frames.flatten().collect()).await;
    assert!(client.seen.answered.is_empty());
    go_on.cancel();
    client.until_answered(MAX_STREAMS).await;
    assert_eq!(NUM_WAITING.load(Ordering::Relaxed), MAX_STREAMS as usize);
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_calls_that_are_answered_do_not_end_the_connection() {
    const CALLS: u32 = 1500;
    let refuse = post(|| async { StatusCode::UNAUTHORIZED });
    let mut client = Client::of(Router::new().route("/", refuse)).await;
    for round in 0..2 {
        let streams = || streams(round * CALLS, CALLS);
        client.send(streams().flat_map(head).collect()).await;
        client.until_answered((round + 1) * CALLS).await;
        client.send(streams().flat_map(|stream| frame(DATA, 0, stream, b"late")).collect()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_beyond_the_most_gets_a_probe_answered_or_is_refused_until_another_one_closes() {
    const CALL: &[u8] = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n";
    const PROBE: &[u8] = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let config = PortConfig { max_connections: 1, ..patient() };
    let (connections, full) = (config.connections.clone(), config.full.clone());
    let routes = Router::new()
        .route("/", post(|| async { StatusCode::NO_CONTENT }))
        .route("/livez", get(|| async { "lives" }));
    let address = served(routes, config).await;
    let patience = Duration::from_secs(30);
    // What a connection sends to a call first, and all that it sends until it is closed.
    let status = async |socket: &mut TcpStream| {
        socket.write_all(CALL).await.unwrap();
        let mut status = [0; 12];
        timeout(patience, socket.read_exact(&mut status)).await.expect("the port answers").unwrap();
        String::from_utf8_lossy(&status).into_owned()
    };
    let all = async |call: &[u8]| {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(call).await.unwrap();
        let mut all = String::new();
        timeout(patience, socket.read_to_string(&mut all)).await.expect("the port closes it").unwrap();
        all
    };
    let becomes = async |what: &str, holds: &dyn Fn() -> bool| {
        let waits = async {
            while !holds() {
                tokio::task::yield_now().await;
            }
        };
        timeout(patience, waits).await.expect(what);
    };
    let mut first = TcpStream::connect(address).await.unwrap();
    assert_eq!(status(&mut first).await, "HTTP/1.1 204");
    assert_eq!(full.get(), 0);

    for _ in 0..40 {
        let (probe, call) = (all(PROBE).await, all(CALL).await);
        assert!(probe.starts_with("HTTP/1.1 200") && probe.ends_with("lives"), "{probe}");
        assert!(call.starts_with("HTTP/1.1 503") && call.contains("connection: close"), "{call}");
    }
    // A client of HTTP/2 is answered, and told to go.
    let mut second = TcpStream::connect(address).await.unwrap();
    let call = [PREFACE.to_vec(), frame(SETTINGS, 0, 0, &[]), head(1)].concat();
    second.write_all(&call).await.unwrap();
    let mut kinds = HashSet::new();
    while !(kinds.contains(&HEADERS) && kinds.contains(&GOAWAY)) {
        let read = async {
            let mut head = [0; 9];
            second.read_exact(&mut head).await.unwrap();
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            second.read_exact(&mut payload).await.unwrap();
            kinds.insert(head[3]);
        };
        timeout(patience, read).await.expect("the port answers");
    }
    // One that sends nothing does not keep its place.
    let mut silent = TcpStream::connect(address).await.unwrap();
    let ended = timeout(patience, silent.read(&mut [0; 64])).await.expect("the port closes it");
    assert!(ended.is_err() || ended.is_ok_and(|num_bytes| num_bytes == 0));
    drop(second);
    becomes("they are gone", &|| connections.get() == 1).await;

    // The first one is still served.
    let mut both = vec![0; 12];
    first.write_all(CALL).await.unwrap();
    while !both.ends_with(b"HTTP/1.1 204") {
        both.push(timeout(patience, first.read_u8()).await.expect("the port answers").unwrap());
    }
    assert_eq!(full.get(), 82, "the probes and calls, and two more");
    drop(first);
    becomes("its place is free", &|| connections.get() == 0).await;
    let mut next = TcpStream::connect(address).await.unwrap();
    assert_eq!(status(&mut next).await, "HTTP/1.1 204");
}
