//! Peers that misbehave with shared memory; some of them are processes of their own.

use std::{
    fs,
    io::{self, BufRead, BufReader, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use baton_handoff::{AccessKey, TransportKind, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage, KvShard, WireFormat};
use baton_transfer::{Receiver, ReceiverConfig, ReceiverLoad, word::Word};
use baton_transfer_conformance::{
    Guards, LAYOUT, NUM_BLOCKS, TransferPair, access_key_from_text, access_key_to_text, blocks, bytes,
    eventually, fill, is_pending, pattern, private_dir, sender, soon, storage, writes,
};

use crate::{
    ShmReceiving, host,
    tests::SHM,
    wire::{self, Message},
};

/// A sender by hand.
fn connect(fabric: &TransferPair) -> UnixStream {
    connect_and_map(fabric).0
}

/// The same, with the memory that it may write.
fn connect_and_map(fabric: &TransferPair) -> (UnixStream, BlockStorage) {
    let TransportOffer::Shm { socket_path, pool, .. } = fabric.offer(TransportKind::Shm) else {
        unreachable!()
    };
    let socket = UnixStream::connect(socket_path).unwrap();
    let hello = Message::Hello {
        pool,
        layer_bytes: LAYOUT.layer_bytes() as u64,
        num_layers: LAYOUT.num_layers as u32,
    };
    wire::send(&socket, hello, None).unwrap();
    let (welcome, descriptor) = wire::receive(&socket).unwrap().unwrap();
    assert_eq!(welcome, Message::Welcome { num_blocks: NUM_BLOCKS as u64 });
    let memory = BlockStorage::from_fd(descriptor.unwrap(), LAYOUT, NUM_BLOCKS).unwrap();
    (socket, memory)
}

fn open(socket: &UnixStream, access_key: AccessKey) {
    wire::send(socket, Message::Word(Word::Open(access_key)), None).unwrap();
    assert_eq!(wire::receive(socket).unwrap().unwrap().0, Message::Word(Word::Opened(access_key.generation)));
}

#[tokio::test]
async fn a_revoked_grant_is_quarantined_until_its_writer_lets_go() {
    /// Ways to let go.
    enum End {
        Close,
        Leave,
        Stopped,
        Garbage,
    }
    for end in [End::Close, End::Leave, End::Stopped, End::Garbage] {
        let fabric = TransferPair::new(SHM);
        let guards = Guards::default();
        let granted = fabric.receiver.grant(blocks([3, 4]), guards.guard());
        let generation = granted.generation();
        let peer = connect(&fabric);
        open(&peer, granted.access_key());
        let mut fenced = granted.revoke();
        assert_eq!(wire::receive(&peer).unwrap().unwrap().0, Message::Word(Word::Revoke(generation)));
        assert!(is_pending(&mut fenced).await);
        let quarantined =
            ReceiverLoad { num_grants: 0, num_quarantined_grants: 1, num_quarantined_blocks: 2 };
        assert_eq!(fabric.receiver.load(), quarantined);

        match end {
            End::Close => wire::send(&peer, Message::Word(Word::Close(generation)), None).unwrap(),
            End::Leave => drop(peer),
            End::Stopped => fabric.receiver.writer_stopped(generation),
            End::Garbage => {
                (&peer).write_all(&[0xFF; wire::MESSAGE_BYTES]).unwrap();
                assert!(wire::receive(&peer).unwrap().is_none(), "hung up on");
                // But it still has the memory, so that nothing is fenced before it has gone.
                assert!(is_pending(&mut fenced).await);
                drop(peer);
            }
        }
        assert!(soon(fenced).await.is_some());
        assert_eq!(guards.num_out(), 0);
        assert_eq!(fabric.receiver.load(), ReceiverLoad::default());
    }
}

/// Blocks that come back with their guard, as a worker's pool has them.
#[derive(Clone)]
struct Pool(Arc<Mutex<Vec<BlockId>>>);

struct Taken(Pool, Vec<BlockId>);

impl Pool {
    fn take(&self, num_blocks: usize) -> Option<Taken> {
        let mut free = self.0.lock().unwrap();
        let rest = free.len().checked_sub(num_blocks)?;
        Some(Taken(self.clone(), free.split_off(rest)))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.0.lock().unwrap().append(&mut self.1);
    }
}

#[tokio::test]
async fn a_writer_that_writes_after_its_grant_was_closed_hits_memory_of_no_request() {
    let fabric = TransferPair::new(SHM);
    let pool = Pool(Arc::new(Mutex::new(blocks(0..4))));
    let first = pool.take(2).unwrap();
    let its_blocks = first.1.clone();
    let granted = fabric.receiver.grant(its_blocks.clone(), first);
    let generation = granted.generation();
    let (peer, memory) = connect_and_map(&fabric);
    open(&peer, granted.access_key());
    drop(granted.revoke());
    assert_eq!(wire::receive(&peer).unwrap().unwrap().0, Message::Word(Word::Revoke(generation)));

    // The next sequence has the other blocks, and a third gets none.
    let second = pool.take(2).unwrap();
    let others_blocks = second.1.clone();
    let granted = fabric.receiver.grant(others_blocks.clone(), second);
    let route = fabric.route(&granted).await.unwrap();
    let pushed = soon(route.push(writes(&others_blocks))).await.unwrap();
    assert!(pool.take(1).is_none());

    // It was told, and writes nevertheless, wherever it was allowed to.
    for &block in &its_blocks {
        for layer_idx in 0..LAYOUT.num_layers {
            fill(&memory, block, layer_idx, 0xEE);
        }
    }
    for &block in &its_blocks {
        assert_eq!(bytes(&fabric.target, block, 0), vec![0xEE; LAYOUT.layer_bytes()], "it is late, not lost");
    }
    soon(granted.verify(pushed.pieces)).await.unwrap();
    assert!(fabric.holds(&writes(&others_blocks)));
    assert!(pool.take(1).is_none(), "no request gets them in quarantine");

    // Without its mapping it writes nowhere; that its socket ends says so.
    drop(memory);
    drop(peer);
    eventually("its blocks come back", || pool.take(2).is_some()).await;
    assert_eq!(pool.take(2).unwrap().1.len(), its_blocks.len());
    assert!(soon(granted.commit()).await.is_some());
    assert!(fabric.holds(&writes(&others_blocks)));
}

#[tokio::test]
async fn a_grant_that_no_writer_opened_is_fenced_at_once_and_cannot_be_opened_later() {
    let fabric = TransferPair::new(SHM);
    let peer = connect(&fabric);
    let granted = fabric.receiver.grant(blocks([3]), ());
    let (generation, access_key) = (granted.generation(), granted.access_key());
    assert!(!is_pending(&mut granted.revoke()).await);
    wire::send(&peer, Message::Word(Word::Open(access_key)), None).unwrap();
    assert_eq!(wire::receive(&peer).unwrap().unwrap().0, Message::Word(Word::Unknown(generation)));
}

#[tokio::test]
async fn a_receiver_that_ends_gives_no_block_away_that_a_peer_may_write() {
    let fabric = TransferPair::new(SHM);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let peer = connect(&fabric);
    open(&peer, granted.access_key());
    let fenced = granted.revoke();
    // The peer neither answers nor leaves.
    drop(fabric);
    assert!(soon(fenced).await.is_none());
    assert_eq!(guards.num_out(), 1, "kept for ever, not given to another request");
}

/// A receiver whose sockets are in this folder.
fn listen_in(dir: PathBuf) -> io::Result<Receiver> {
    Receiver::start(storage(), &ReceiverConfig::default(), vec![Box::new(ShmReceiving { dir })])
}

#[test]
fn the_socket_is_private_and_stale_ones_are_removed() {
    let dir = private_dir();
    let path = dir.path().join("d");
    let start = || listen_in(path.clone());
    let socket_of = |receiver: &Receiver| match &receiver.offers()[0] {
        TransportOffer::Shm { socket_path, .. } => socket_path.clone(),
        other => panic!("{other:?}"),
    };
    let first = start().unwrap();
    let socket = socket_of(&first);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&socket)), (0o700, 0o600));

    // Sockets of a process that died, of one that lives, and of another program.
    let stale = path.join("kv-0000000000000000.sock");
    drop(UnixListener::bind(&stale).unwrap());
    let other = path.join("other.sock");
    drop(UnixListener::bind(&other).unwrap());
    let second = start().unwrap();
    assert!(!stale.exists() && socket.exists() && other.exists());
    drop(first);
    assert!(!socket.exists() && socket_of(&second).exists());
    drop(second);

    fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
    let error = start().err().unwrap().to_string();
    assert!(error.contains("open to other users (mode 750)"), "{error}");
}

#[test]
fn workers_that_start_together_leave_each_others_sockets_alone() {
    let dir = private_dir();
    let path = dir.path().join("d");
    for _ in 0..50 {
        let start = || {
            let receiver = listen_in(path.clone()).expect("it listens");
            let [TransportOffer::Shm { socket_path, .. }] = receiver.offers() else { panic!("one offer") };
            (UnixStream::connect(socket_path).is_ok(), receiver)
        };
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
            for started in started {
                let (is_there, _receiver) = started.join().expect("no panic");
                assert!(is_there, "its socket was removed");
            }
        });
    }
}

#[test]
fn a_path_that_no_socket_can_have_is_refused_with_a_reason() {
    let dir = private_dir();
    let error = listen_in(dir.path().join("x".repeat(100))).err().unwrap();
    assert!(error.to_string().contains("too long"), "{error}");
}

/// Not a test of its own: the prefill worker's process of the tests below.
#[tokio::test]
#[ignore = "run by other tests, as a process of its own"]
async fn prefill_process() {
    let Ok(path) = std::env::var("BATON_TEST_SHM_SOCKET") else { return };
    let number = |name| u64::from_str_radix(&std::env::var(name).unwrap(), 16).unwrap();
    let offer = TransportOffer::Shm {
        host_id: host::host_id(),
        socket_path: PathBuf::from(path),
        pool: number("BATON_TEST_SHM_POOL"),
    };
    let access_key = access_key_from_text(&std::env::var("BATON_TEST_SHM_KEY").unwrap());
    let source = storage();
    for layer_idx in 0..LAYOUT.num_layers {
        fill(&source, BlockId(3), layer_idx, pattern(3, layer_idx));
    }
    let sender = sender(&source, SHM).unwrap();
    let route = sender.route(access_key, &[offer], ()).await.unwrap();
    let pushed = route.push(writes(&blocks([3]))).await.unwrap();
    println!("\npushed {} pieces", pushed.pieces.len());
    // Until killed, or told to go.
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Process(Child);

impl Process {
    async fn start(fabric: &TransferPair, access_key: AccessKey) -> Process {
        let TransportOffer::Shm { socket_path, pool, .. } = fabric.offer(TransportKind::Shm) else {
            unreachable!()
        };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["tests::faults::prefill_process", "--exact", "--ignored", "--nocapture"])
            .env("BATON_TEST_SHM_SOCKET", socket_path)
            .env("BATON_TEST_SHM_POOL", format!("{pool:x}"))
            .env("BATON_TEST_SHM_KEY", access_key_to_text(access_key))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let has_pushed = tokio::task::spawn_blocking(move || {
            lines.map_while(Result::ok).any(|line| line == "pushed 3 pieces")
        });
        assert!(soon(has_pushed).await.unwrap());
        Process(child)
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.0.id() as libc::pid_t, signal) }, 0);
    }

    /// Signals are asynchronous: a stop is complete when the kernel reports it.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: as above; `status` outlives the call.
        let pid = unsafe { libc::waitpid(self.0.id() as libc::pid_t, &mut status, libc::WUNTRACED) };
        assert!(pid > 0 && libc::WIFSTOPPED(status));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_frozen_process_holds_its_blocks_until_it_goes_on_or_dies() {
    for signal in [libc::SIGCONT, libc::SIGKILL] {
        let fabric = TransferPair::new(SHM);
        let guards = Guards::default();
        let granted = fabric.receiver.grant(blocks([3]), guards.guard());
        let process = Process::start(&fabric, granted.access_key()).await;
        for layer_idx in 0..LAYOUT.num_layers {
            let found = bytes(&fabric.target, BlockId(3), layer_idx);
            assert!(found.iter().all(|&byte| byte == pattern(3, layer_idx)));
        }
        process.stop();
        let mut fenced = granted.revoke();
        assert!(is_pending(&mut fenced).await);
        assert_eq!(fabric.receiver.load().num_quarantined_blocks, 1);
        process.signal(signal);
        assert!(soon(fenced).await.is_some());
        assert_eq!(guards.num_out(), 0);
        assert_eq!(fabric.receiver.load(), ReceiverLoad::default());
    }
}

#[tokio::test]
async fn a_killed_process_lets_go_of_grants_that_are_not_revoked_yet() {
    let fabric = TransferPair::new(SHM);
    let granted = fabric.receiver.grant(blocks([3]), ());
    let process = Process::start(&fabric, granted.access_key()).await;
    drop(process);
    assert!(soon(granted.revoke()).await.is_some());
}

#[tokio::test]
async fn a_decode_worker_that_goes_is_noticed_by_its_socket() {
    let TransferPair { receiver, sender, source, dir, .. } = TransferPair::new(SHM);
    let granted = receiver.grant(blocks([3]), ());
    let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
    drop((granted, receiver));
    let failures = || sender.counters().of(TransportKind::Shm).read().failures;
    eventually("the loss is noticed", || failures() == 1).await;
    assert!(soon(route.push(writes(&blocks([3])))).await.is_err());
    drop((Arc::clone(&source), dir));
}

#[tokio::test]
async fn in_shared_memory_nothing_is_quantised() {
    let fabric = TransferPair::new(SHM);
    let dst = blocks([1, 2]);
    let granted = fabric.receiver.grant_as(dst.clone(), None, ());
    let peer = KvShard::new(&LAYOUT, 1, 0).unwrap();
    let offers = granted.offers().to_vec();
    let routed = fabric.sender.route_to(&peer, WireFormat::Int4, granted.access_key(), &offers, ());
    let pushed = soon(soon(routed).await.unwrap().push(writes(&dst))).await.unwrap();
    assert_eq!(pushed.bytes, (6 * LAYOUT.layer_bytes()) as u64);
    assert!(fabric.holds(&writes(&dst)));
}
