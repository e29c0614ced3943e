//! Pools on devices: what can be shown with memory that says that it is a device's, and, where there is a GPU, between
//! two processes on it.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use baton_handoff::{AccessKey, PushError, RouteError, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage};
use baton_transfer::{
    Granted, Receiver, ReceiverConfig,
    cuda::{blocks_on_device, blocks_on_devices},
    word::Word,
};
use baton_transfer_conformance::{
    Guards, LAYOUT, NUM_BLOCKS, TestTransport, TransferPair, access_key_from_text, access_key_to_text,
    blocks, eventually,
    fake_devices::{self, Fault, counted_devices, failing_device, fake_device, paused_device},
    fill, has_device, holds, is_pending, pattern, private_dir, receiver, sender, some_access_key, soon,
    storage, writes,
};

use crate::tests::SHM;
use crate::{
    ShmSending, host,
    wire::{self, HANDLE_BYTES, Message},
};

/// Opens the memory of fake devices.
const TO_FAKE_DEVICES: &[TestTransport] = &[TestTransport {
    sending: |_| Ok(Box::new(ShmSending::default().opening_by(fake_devices::opened))),
    ..SHM[0]
}];

/// Fills a block of a pool on a device.
fn store(pool: &BlockStorage, block: BlockId) {
    for layer_idx in 0..LAYOUT.num_layers {
        let bytes = vec![pattern(block.0, layer_idx); LAYOUT.layer_bytes()];
        // SAFETY: only this test uses the pool so far.
        unsafe { pool.device().unwrap().write(pool.layer_offset(block, layer_idx), &bytes) }.unwrap();
    }
}

#[tokio::test]
async fn blocks_of_a_device_are_copied_into_mapped_memory() {
    for source in [fake_device(LAYOUT, NUM_BLOCKS), devices()] {
        let fabric = TransferPair::new(SHM);
        store(&source, BlockId(3));
        let sender = sender(&Arc::new(source), SHM).unwrap();
        let granted = fabric.receiver.grant(blocks([3]), ());
        let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
        let pushed = soon(route.push(writes(&blocks([3])))).await.unwrap();
        for layer_idx in 0..LAYOUT.num_layers {
            assert!(holds(&fabric.target, BlockId(3), layer_idx, pattern(3, layer_idx)));
        }
        soon(granted.verify(pushed.pieces)).await.unwrap();
    }
}

/// Each with one of the two heads.
fn devices() -> BlockStorage {
    counted_devices(LAYOUT, NUM_BLOCKS, &[1, 2]).0
}

/// A receiver with a pool on a device, and where it listens.
fn on_device(pool: BlockStorage) -> (Receiver, Arc<BlockStorage>, tempfile::TempDir) {
    let (pool, dir) = (Arc::new(pool), private_dir());
    (receiver(&pool, SHM, dir.path(), &ReceiverConfig::default()).unwrap(), pool, dir)
}

fn place(receiver: &Receiver) -> (PathBuf, u64) {
    match &receiver.offers()[0] {
        TransportOffer::Shm { socket_path, pool, .. } => (socket_path.clone(), *pool),
        other => panic!("{other:?}"),
    }
}

/// A sender by hand that has opened a grant of a pool on one device.
fn opened(socket_path: &PathBuf, pool: u64, access_key: AccessKey) -> UnixStream {
    let (socket, handles) = welcomed(socket_path, pool);
    assert_eq!(handles.len(), 1);
    wire::send(&socket, Message::Word(Word::Open(access_key)), None).unwrap();
    assert_eq!(
        wire::receive(&socket).unwrap().unwrap().0,
        Message::Word(Word::Opened(access_key.generation))
    );
    socket
}

/// One that has been told the handles.
fn welcomed(socket_path: &PathBuf, pool: u64) -> (UnixStream, Vec<[u8; HANDLE_BYTES]>) {
    let socket = UnixStream::connect(socket_path).unwrap();
    let (layer_bytes, num_layers) = (LAYOUT.layer_bytes() as u64, LAYOUT.num_layers as u32);
    wire::send(&socket, Message::Hello { pool, layer_bytes, num_layers }, None).unwrap();
    let (welcome, descriptor) = wire::receive(&socket).unwrap().unwrap();
    let Message::WelcomeToDevices { num_blocks, num_ranks } = welcome else { panic!("{welcome:?}") };
    assert!(num_blocks == NUM_BLOCKS as u64 && descriptor.is_none());
    let mut handles = vec![[0; HANDLE_BYTES]; num_ranks as usize];
    (&socket).read_exact(handles.as_flattened_mut()).unwrap();
    (socket, handles)
}

#[tokio::test]
async fn every_rank_gives_a_handle() {
    for (storage, expected) in [(fake_device(LAYOUT, NUM_BLOCKS), vec![5]), (devices(), vec![1, 2])] {
        let (receiver, _pool, _dir) = on_device(storage);
        let (socket_path, pool) = place(&receiver);
        let (_, handles) = welcomed(&socket_path, pool);
        // The rest of a fake handle is an address.
        let marks: Vec<_> = handles.iter().map(|handle| handle[..HANDLE_BYTES - 8].to_vec()).collect();
        assert_eq!(marks, expected.iter().map(|&device| vec![device; HANDLE_BYTES - 8]).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn fake_devices_copy_to_each_other() {
    let (receiver, pool, _dir) = on_device(fake_device(LAYOUT, NUM_BLOCKS));
    let source = fake_device(LAYOUT, NUM_BLOCKS);
    store(&source, BlockId(3));
    let sender = sender(&Arc::new(source), TO_FAKE_DEVICES).unwrap();
    let granted = receiver.grant(blocks([3]), ());
    let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
    let pushed = soon(route.push(writes(&blocks([3])))).await.unwrap();
    for layer_idx in 0..LAYOUT.num_layers {
        assert!(holds(&pool, BlockId(3), layer_idx, pattern(3, layer_idx)));
    }
    soon(granted.verify(pushed.pieces)).await.unwrap();
}

#[tokio::test]
async fn blocks_of_both_sides_are_freed_once_a_device_that_failed_has_stopped() {
    let host = || BlockStorage::new(LAYOUT, NUM_BLOCKS).unwrap();
    let device = || fake_device(LAYOUT, NUM_BLOCKS);
    for (target, fault, has_stopped) in [
        (device(), Fault::Copies, true),
        (device(), Fault::Hangs, false),
        (host(), Fault::Copies, true),
        // A thread writes into mapped memory, and no device.
        (host(), Fault::Hangs, true),
    ] {
        let (receiver, _pool, _dir) = on_device(target);
        let (sent, received) = (Guards::default(), Guards::default());
        let source = Arc::new(failing_device(LAYOUT, NUM_BLOCKS, fault));
        let sender = sender(&source, TO_FAKE_DEVICES).unwrap();
        let granted = receiver.grant(blocks([3]), received.guard());
        let routed = sender.route(granted.access_key(), granted.offers(), sent.guard());
        let route = soon(routed).await.unwrap();
        let error = soon(route.push(writes(&blocks([3])))).await.unwrap_err();
        assert!(matches!(error, PushError::Lost(_)), "{error}");
        let (mut closed, mut fenced) = (Box::pin(route.close()), granted.revoke());
        if has_stopped {
            soon(closed).await;
            assert!(soon(fenced).await.is_some());
        } else {
            assert!(is_pending(&mut closed).await && is_pending(&mut fenced).await);
        }
        let num_kept = usize::from(!has_stopped);
        assert_eq!((sent.num_out(), received.num_out()), (num_kept, num_kept), "{fault:?}");
    }
}

/// A peer by hand with a pool on a device. It opens every grant, and returns what it hears.
fn listen(socket_path: &Path, pool: &BlockStorage) -> (mpsc::Receiver<Word>, JoinHandle<()>) {
    let listener = UnixListener::bind(socket_path).unwrap();
    let handle = pool.device().unwrap().handle().unwrap();
    let (hear, heard) = mpsc::channel();
    let peer = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        wire::receive(&socket).unwrap().unwrap();
        let welcome = Message::WelcomeToDevices { num_blocks: NUM_BLOCKS as u64, num_ranks: 1 };
        wire::send(&socket, welcome, None).unwrap();
        socket.write_all(&handle).unwrap();
        while let Ok(Some((Message::Word(word), _))) = wire::receive(&socket) {
            if let Word::Open(access_key) = word {
                let opened = Message::Word(Word::Opened(access_key.generation));
                wire::send(&socket, opened, None).unwrap();
            }
            hear.send(word).unwrap();
        }
    });
    (heard, peer)
}

#[tokio::test]
async fn a_route_that_is_dropped_while_a_device_copies_does_not_wait_and_is_closed_after_the_copy() {
    let patience = Duration::from_secs(30);
    for fault in [None, Some(Fault::Hangs)] {
        let (dir, target) = (private_dir(), fake_device(LAYOUT, NUM_BLOCKS));
        let socket_path = dir.path().join("s");
        let (heard, peer) = listen(&socket_path, &target);
        let (source, copies) = paused_device(LAYOUT, NUM_BLOCKS, fault);
        store(&source, BlockId(3));
        let sender = sender(&Arc::new(source), TO_FAKE_DEVICES).unwrap();
        let offer = |socket_path, pool| TransportOffer::Shm { host_id: host::host_id(), socket_path, pool };
        let access_key = some_access_key(1);
        let route = soon(sender.route(access_key, &[offer(socket_path, 7)], ())).await.unwrap();
        assert_eq!(heard.recv_timeout(patience), Ok(Word::Open(access_key)));
        let pushed = route.push(writes(&blocks([3])));
        copies.begun.recv_timeout(patience).unwrap();

        let dropping = thread::spawn(move || route.close());
        eventually("the route is dropped", || dropping.is_finished()).await;
        let mut closed = Box::pin(dropping.join().unwrap());
        // Nor does a new route wait, which looks whether the pool is still connected.
        let other = offer(dir.path().join("none"), 8);
        assert!(soon(sender.route(some_access_key(2), &[other], ())).await.is_err());
        assert!(is_pending(&mut closed).await && heard.try_recv().is_err(), "the device copies");

        copies.go_on.send(()).unwrap();
        if fault.is_none() {
            assert_eq!(soon(pushed).await.unwrap().pieces.len(), LAYOUT.num_layers);
            soon(closed).await;
            assert_eq!(heard.recv_timeout(patience), Ok(Word::Close(access_key.generation)));
        } else {
            assert!(matches!(soon(pushed).await, Err(PushError::Lost(_))));
            // The device may still write, so the grant is not closed.
            assert_eq!(heard.recv_timeout(patience), Err(mpsc::RecvTimeoutError::Disconnected));
            assert!(is_pending(&mut closed).await);
        }
        drop(sender);
        peer.join().unwrap();
    }
}

#[tokio::test]
async fn the_end_of_a_socket_does_not_end_what_a_device_writes() {
    let guards = Guards::default();
    for closes in [true, false] {
        let (receiver, _pool, _dir) = on_device(fake_device(LAYOUT, NUM_BLOCKS));
        let (socket_path, pool) = place(&receiver);
        let granted = receiver.grant(blocks([3]), guards.guard());
        let generation = granted.generation();
        let peer = opened(&socket_path, pool, granted.access_key());
        let mut fenced = granted.revoke();
        assert_eq!(wire::receive(&peer).unwrap().unwrap().0, Message::Word(Word::Revoke(generation)));
        if closes {
            wire::send(&peer, Message::Word(Word::Close(generation)), None).unwrap();
            drop(peer);
            assert!(soon(fenced).await.is_some());
            assert_eq!(guards.num_out(), 0);
        } else {
            drop(peer);
            // This process, which the socket was of, lives on.
            tokio::time::sleep(3 * crate::server::PROCESS_PAUSE).await;
            assert!(is_pending(&mut fenced).await);
            assert_eq!(receiver.load().num_quarantined_blocks, 1);
            tokio::task::spawn_blocking(move || drop(receiver)).await.unwrap();
            assert!(soon(fenced).await.is_none(), "torn down");
            assert_eq!(guards.num_out(), 1, "the blocks stay in quarantine");
        }
    }
}

#[tokio::test]
async fn the_end_of_a_process_ends_what_its_device_writes() {
    let (receiver, _pool, _dir) = on_device(fake_device(LAYOUT, NUM_BLOCKS));
    let granted = receiver.grant(blocks([3]), ());
    let process = Process::start("writer_process", &receiver, &granted).await;
    let mut fenced = granted.revoke();
    assert!(is_pending(&mut fenced).await);
    drop(process);
    assert!(soon(fenced).await.is_some());
}

#[tokio::test]
async fn a_pool_on_a_device_that_cannot_be_opened_is_an_error_with_a_reason() {
    let dir = private_dir();
    let socket_path = dir.path().join("s");
    let listener = UnixListener::bind(&socket_path).unwrap();
    let peer = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        wire::receive(&socket).unwrap().unwrap();
        wire::send(&socket, Message::WelcomeToDevices { num_blocks: 4, num_ranks: 1 }, None).unwrap();
        socket.write_all(&[0xA5; 64]).unwrap();
        assert!(wire::receive(&socket).unwrap().is_none(), "it leaves");
    });
    let sender = sender(&storage(), SHM).unwrap();
    let offers = [TransportOffer::Shm { host_id: host::host_id(), socket_path, pool: 7 }];
    let error = soon(sender.route(some_access_key(1), &offers, ())).await.err().unwrap();
    assert!(matches!(error, RouteError::Unreachable(_)), "{error}");
    if baton_transfer::cuda::num_devices().is_err() {
        assert!(
            error.to_string().contains("no CUDA driver") || error.to_string().contains("no device"),
            "{error}"
        );
    }
    peer.join().unwrap();
}

/// On one GPU; so far not run.
#[tokio::test]
async fn two_processes_on_one_device_hand_blocks_over() {
    if !has_device() {
        return;
    }
    for num_ranks in [1, 2] {
        let (receiver, pool, _dir) = on_device(ranks_on_a_gpu(num_ranks));
        for test in ["device_prefill_process", "ranks_prefill_process", "host_prefill_process"] {
            let granted = receiver.grant(blocks([3]), ());
            let process = Process::start(test, &receiver, &granted).await;
            for layer_idx in 0..LAYOUT.num_layers {
                assert!(holds(&pool, BlockId(3), layer_idx, pattern(3, layer_idx)), "{test}/{layer_idx}");
                fill(&pool, BlockId(3), layer_idx, 0);
            }
            let mut fenced = granted.revoke();
            drop(process);
            assert!(soon(&mut fenced).await.is_some());
        }
    }
}

/// Blocks of so many ranks on the first GPU.
fn ranks_on_a_gpu(num_ranks: usize) -> BlockStorage {
    match num_ranks {
        1 => blocks_on_device(0, LAYOUT, NUM_BLOCKS, None).unwrap(),
        _ => blocks_on_devices(&vec![0; num_ranks], LAYOUT, NUM_BLOCKS, Vec::new()).unwrap(),
    }
}

/// Not a test of its own: a writer by hand in a process of its own.
#[test]
#[ignore = "run by other tests, as a process of its own"]
fn writer_process() {
    let Some((socket_path, pool, access_key)) = Process::orders() else { return };
    let _socket = opened(&socket_path, pool, access_key);
    println!("\nready");
    // Until killed.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Not a test of its own: a prefill worker's process with blocks on the device.
#[tokio::test]
#[ignore = "run by other tests, as a process of its own"]
async fn device_prefill_process() {
    if let Some(orders) = Process::orders() {
        let source = ranks_on_a_gpu(1);
        store(&source, BlockId(3));
        prefill(source, orders).await;
    }
}

/// Not a test of its own: the same, with blocks of two ranks.
#[tokio::test]
#[ignore = "run by other tests, as a process of its own"]
async fn ranks_prefill_process() {
    if let Some(orders) = Process::orders() {
        let source = ranks_on_a_gpu(2);
        store(&source, BlockId(3));
        prefill(source, orders).await;
    }
}

/// Not a test of its own: the same, with blocks in host memory.
#[tokio::test]
#[ignore = "run by other tests, as a process of its own"]
async fn host_prefill_process() {
    if let Some(orders) = Process::orders() {
        let TransferPair { source, .. } = TransferPair::new(SHM);
        prefill(Arc::try_unwrap(source).unwrap_or_else(|_| panic!("this is the only owner")), orders).await;
    }
}

async fn prefill(source: BlockStorage, (socket_path, pool, access_key): (PathBuf, u64, AccessKey)) {
    let sender = sender(&Arc::new(source), SHM).unwrap();
    let offers = [TransportOffer::Shm { host_id: host::host_id(), socket_path, pool }];
    let route = sender.route(access_key, &offers, ()).await.unwrap();
    assert_eq!(route.push(writes(&blocks([3]))).await.unwrap().pieces.len(), LAYOUT.num_layers);
    println!("\nready");
    // Until killed.
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Process(Child);

impl Process {
    /// Runs a test of this file as a process, until it is ready.
    async fn start<K>(test: &str, receiver: &Receiver, granted: &Granted<K>) -> Process {
        let (socket_path, pool) = place(receiver);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([&format!("tests::devices::{test}"), "--exact", "--ignored", "--nocapture"])
            .env("BATON_TEST_SHM_DEVICE_SOCKET", socket_path)
            .env("BATON_TEST_SHM_POOL", format!("{pool:x}"))
            .env("BATON_TEST_SHM_KEY", access_key_to_text(granted.access_key()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let is_ready =
            tokio::task::spawn_blocking(move || lines.map_while(Result::ok).any(|line| line == "ready"));
        let process = Process(child);
        assert!(soon(is_ready).await.unwrap());
        process
    }

    /// What the process is to do.
    fn orders() -> Option<(PathBuf, u64, AccessKey)> {
        let socket_path = std::env::var_os("BATON_TEST_SHM_DEVICE_SOCKET")?;
        let number = |name| u64::from_str_radix(&std::env::var(name).unwrap(), 16).unwrap();
        let access_key = access_key_from_text(&std::env::var("BATON_TEST_SHM_KEY").unwrap());
        Some((socket_path.into(), number("BATON_TEST_SHM_POOL"), access_key))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
