//! The conformance suite of KV transports: tests that every transport runs, and their harness of two pools in one
//! process and guards that are counted. It knows no transport.
//!
//! A transport says how both of its halves are made ([`TestTransport`]), and runs the suite with [`conformance!`].

pub mod device_work;
pub mod fake_devices;
mod macros;
pub mod measure;
pub mod sides;
pub mod transfer;

use std::{
    cell::Cell,
    future::{Future, poll_fn},
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    path::{Path, PathBuf},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use baton_handoff::{
    AccessKey, Generation, PieceWrite, Pushed, RouteError, Secret, TransportKind, TransportOffer,
};
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_tls::{Tls, TlsConfig};
use baton_transfer::{
    Granted, Receiver, ReceiverConfig, ReceivingTransport, Route, Sender, SenderConfig, SendingTransport,
    word::Word,
};

use fake_devices::{counted_devices, fake_device};

/// The default layout of both pools.
pub const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 3, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::F32 };
/// Blocks of each pool.
pub const NUM_BLOCKS: usize = 64;

/// Timeout of the fault tests: long for a healthy peer, short to wait for.
pub const PATIENCE: Duration = Duration::from_millis(1500);

/// Timeout of a whole test: long for every operation.
pub const NEVER: Duration = Duration::from_secs(600);

/// Starts the decode side of a transport for blocks of this storage.
pub type StartReceiving = fn(&Arc<BlockStorage>, &Path) -> io::Result<Box<dyn ReceivingTransport>>;

/// How a test makes both halves of a transport.
#[derive(Clone, Copy)]
pub struct TestTransport {
    /// The kind of the transport.
    pub kind: TransportKind,
    /// The prefill side, for blocks of this storage.
    pub sending: fn(&Arc<BlockStorage>) -> io::Result<Box<dyn SendingTransport>>,
    /// The decode side, for blocks of this storage. Sockets may be put into the folder.
    pub receiving: StartReceiving,
}

/// A prefill worker's and a decode worker's data plane.
pub struct TransferPair {
    /// The decode side.
    pub receiver: Receiver,
    /// The prefill side.
    pub sender: Sender,
    /// Blocks of the prefill side, filled with [`pattern`].
    pub source: Arc<BlockStorage>,
    /// Blocks of the decode side.
    pub target: Arc<BlockStorage>,
    /// Of the receiver.
    pub config: ReceiverConfig,
    /// Of both sides.
    pub transports: Vec<TestTransport>,
    /// For sockets. Removed at the end.
    pub dir: tempfile::TempDir,
}

impl TransferPair {
    /// Between pools of one layout.
    pub fn new(transports: &[TestTransport]) -> TransferPair {
        TransferPair::with(transports, |_| {})
    }

    /// The same, with another configuration of the receiver.
    pub fn with(transports: &[TestTransport], change: impl FnOnce(&mut ReceiverConfig)) -> TransferPair {
        let pair = TransferPair::start(transports, LAYOUT, LAYOUT, change);
        for block_idx in 0..NUM_BLOCKS as u32 {
            for layer_idx in 0..LAYOUT.num_layers {
                fill(&pair.source, BlockId(block_idx), layer_idx, pattern(block_idx, layer_idx));
            }
        }
        pair
    }

    /// From blocks of one layout to blocks of another.
    pub fn between(transports: &[TestTransport], from: KvLayout, to: KvLayout) -> TransferPair {
        TransferPair::start(transports, from, to, |_| {})
    }

    fn start(
        transports: &[TestTransport],
        from: KvLayout,
        to: KvLayout,
        change: impl FnOnce(&mut ReceiverConfig),
    ) -> TransferPair {
        let dir = private_dir();
        let mut config = ReceiverConfig::default();
        change(&mut config);
        let [source, target] = [from, to].map(pool);
        let receiver = receiver(&target, transports, dir.path(), &config).unwrap();
        let sender = sender(&source, transports).unwrap();
        TransferPair { receiver, sender, source, target, config, transports: transports.to_vec(), dir }
    }

    /// A restarted receiver of the same pool.
    pub fn restarted(&self, target: &Arc<BlockStorage>, config: &ReceiverConfig) -> Receiver {
        receiver(target, &self.transports, self.dir.path(), config).unwrap()
    }

    /// The offer of one transport.
    pub fn offer(&self, kind: TransportKind) -> TransportOffer {
        self.receiver.offers().iter().find(|offer| offer.kind() == kind).cloned().expect("offered")
    }

    /// Where it listens for peers of this kind, and its pool.
    pub fn address(&self, kind: TransportKind) -> (String, u64) {
        match self.offer(kind) {
            TransportOffer::Tcp { address, pool }
            | TransportOffer::Rdma { address, pool }
            | TransportOffer::Nccl { address, pool } => (address, pool),
            offer @ TransportOffer::Shm { .. } => panic!("{offer:?} has no address"),
        }
    }

    /// Sends these bytes and returns the answer up to the end of the stream.
    pub fn ask(&self, kind: TransportKind, bytes: &[u8]) -> Vec<u8> {
        let mut socket = TcpStream::connect(self.address(kind).0).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // The peer may close the connection early.
        let _ = socket.write_all(bytes);
        let _ = socket.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        match socket.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
        answer
    }

    /// Checks that a handoff of one block succeeds.
    pub async fn works(&self) {
        let granted = self.receiver.grant(blocks([7]), ());
        let route = self.route(&granted).await.unwrap();
        let pushed = soon(route.push(writes(&blocks([7])))).await.unwrap();
        soon(granted.verify(pushed.pieces)).await.unwrap();
    }

    /// A route to the blocks of a grant.
    pub async fn route<K>(&self, granted: &Granted<K>) -> Result<Route, RouteError> {
        soon(self.sender.route(granted.access_key(), granted.offers(), ())).await
    }

    /// A route. Retries while it fails: a receiver may reject new peers for a while.
    pub async fn route_in_the_end<K>(&self, granted: &Granted<K>) -> Route {
        let routed = async {
            loop {
                match self.route(granted).await {
                    Ok(route) => return route,
                    Err(error) => println!("once more: {error}"),
                }
            }
        };
        soon(routed).await
    }

    /// Whether the target's blocks hold what the source's blocks hold.
    pub fn holds(&self, writes: &[PieceWrite]) -> bool {
        writes.iter().all(|write| {
            let layer_idx = write.layer_idx as usize;
            bytes(&self.source, write.src.blocks()[0], layer_idx) == bytes(&self.target, write.dst, layer_idx)
        })
    }
}

/// A sender with timeouts for a busy machine.
///
/// # Errors
/// As [`Sender::start`], and of the transports.
pub fn sender(source: &Arc<BlockStorage>, transports: &[TestTransport]) -> io::Result<Sender> {
    sender_with(source, transports, |_| {})
}

/// The same, with another configuration.
///
/// # Errors
/// As [`sender`].
pub fn sender_with(
    source: &Arc<BlockStorage>,
    transports: &[TestTransport],
    change: impl FnOnce(&mut SenderConfig),
) -> io::Result<Sender> {
    // A busy machine may take long to register memory.
    let mut config = SenderConfig { connect_timeout: Duration::from_secs(25), ..SenderConfig::default() };
    change(&mut config);
    let transports = transports.iter().map(|transport| (transport.sending)(source));
    Sender::start(Arc::clone(source), config, transports.collect::<io::Result<_>>()?)
}

/// A receiver whose sockets are in a folder of `dir`.
///
/// # Errors
/// As [`Receiver::start`], and of the transports.
pub fn receiver(
    target: &Arc<BlockStorage>,
    transports: &[TestTransport],
    dir: &Path,
    config: &ReceiverConfig,
) -> io::Result<Receiver> {
    let transports = transports.iter().map(|transport| (transport.receiving)(target, &dir.join("d")));
    Receiver::start(Arc::clone(target), config, transports.collect::<io::Result<_>>()?)
}

/// Whether there is a CUDA device. Prints a note if not.
pub fn has_device() -> bool {
    let found = baton_transfer::cuda::num_devices();
    if let Err(error) = &found {
        skip(&error.to_string());
    }
    found.is_ok()
}

/// Prints that a test was skipped, so that the test harness does not hide it.
pub fn skip(why: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let _ = io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes());
}

/// A folder that only this user may look into.
pub fn private_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("baton-kv").tempdir().unwrap()
}

/// A pool of this layout, in the memory of the current setup.
pub fn storage() -> Arc<BlockStorage> {
    pool(LAYOUT)
}

fn pool(layout: KvLayout) -> Arc<BlockStorage> {
    Arc::new(match SETUP.get() {
        Setup::Plain => BlockStorage::new(layout, NUM_BLOCKS).unwrap(),
        Setup::Devices => fake_device(layout, NUM_BLOCKS),
        Setup::Divided => counted_devices(layout, NUM_BLOCKS, &[6, 7]).0,
    })
}

/// What fills a piece of the source.
pub fn pattern(block_idx: u32, layer_idx: usize) -> u8 {
    (block_idx as usize * LAYOUT.num_layers + layer_idx) as u8 | 1
}

/// Fills a piece with one byte.
pub fn fill(storage: &BlockStorage, block: BlockId, layer_idx: usize, byte: u8) {
    change(storage, block, layer_idx, |piece| piece.fill(byte));
}

/// Changes a piece, in host memory or on a device.
pub fn change<R>(
    storage: &BlockStorage,
    block: BlockId,
    layer_idx: usize,
    change: impl FnOnce(&mut [u8]) -> R,
) -> R {
    let mut piece = bytes(storage, block, layer_idx);
    let result = change(&mut piece);
    // SAFETY: tests touch only blocks that no other code uses, or look at what a late writer would do.
    unsafe { storage.store(block, layer_idx, &piece) }.unwrap();
    result
}

/// The bytes of a piece.
pub fn bytes(storage: &BlockStorage, block: BlockId, layer_idx: usize) -> Vec<u8> {
    let mut piece = vec![0; storage.layout().layer_bytes()];
    // SAFETY: as above.
    unsafe { storage.load_all(&[(block, layer_idx)], &mut piece) }.unwrap();
    piece
}

/// Whether all bytes of a piece have this value.
pub fn holds(storage: &BlockStorage, block: BlockId, layer_idx: usize, byte: u8) -> bool {
    bytes(storage, block, layer_idx).iter().all(|&found| found == byte)
}

/// All pieces of `dst`, from source blocks of the same numbers, layer by layer.
pub fn writes(dst: &[BlockId]) -> Vec<PieceWrite> {
    let piece = |layer_idx: usize, block_idx: usize| PieceWrite {
        layer_idx: layer_idx as u32,
        block_idx: block_idx as u32,
        src: dst[block_idx].into(),
        dst: dst[block_idx],
    };
    (0..LAYOUT.num_layers)
        .flat_map(|layer_idx| (0..dst.len()).map(move |block_idx| piece(layer_idx, block_idx)))
        .collect()
}

/// Blocks of these numbers.
pub fn blocks(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId).collect()
}

/// The bytes that a push should have moved.
pub fn bytes_of(pushed: &Pushed) -> u64 {
    (pushed.pieces.len() * LAYOUT.layer_bytes()) as u64
}

/// Fails the test instead of hanging.
pub async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(30), future).await.expect("within 30 s")
}

/// Whether a future is still pending.
pub async fn is_pending<F: Future + Unpin>(future: &mut F) -> bool {
    let mut future = pin!(future);
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

/// Waits until a condition holds that another thread brings about.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(30), "never: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Counts the guards that exist.
#[derive(Clone, Default)]
pub struct Guards(Arc<AtomicUsize>);

/// One guard.
pub struct Guard(Arc<AtomicUsize>);

impl Guards {
    /// A new guard.
    pub fn guard(&self) -> Guard {
        self.0.fetch_add(1, Ordering::SeqCst);
        Guard(Arc::clone(&self.0))
    }

    /// How many guards exist.
    pub fn num_out(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An access key of no grant.
pub fn some_access_key(generation: u64) -> AccessKey {
    AccessKey { generation: Generation(generation), secret: Secret::default() }
}

/// Opens a route to what a peer offers, and pushes the first layer of block 3 over it.
pub async fn push_a_piece(sender: &Sender, offer: TransportOffer) -> Route {
    let route = soon(sender.route(some_access_key(1), &[offer], ())).await.unwrap();
    let pushed = soon(route.push(writes(&[BlockId(3)])[..1].to_vec())).await.unwrap();
    assert_eq!(pushed.pieces.len(), 1);
    route
}

/// For another process's environment.
pub fn access_key_to_text(access_key: AccessKey) -> String {
    format!("{:x}:{:x}", access_key.generation.0, u128::from_le_bytes(access_key.secret.0))
}

/// The inverse of [`access_key_to_text`].
pub fn access_key_from_text(text: &str) -> AccessKey {
    let (generation, secret) = text.split_once(':').unwrap();
    let secret = Secret(u128::from_str_radix(secret, 16).unwrap().to_le_bytes());
    AccessKey { generation: Generation(u64::from_str_radix(generation, 16).unwrap()), secret }
}

/// Certificates of the tests: "a" and "b" are of one authority. "foreign" is of another authority, and trusts the
/// authority of "a".
pub fn tls(name: &str) -> Tls {
    let path =
        |name: String| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tls/testdata")).join(name);
    let dir = private_dir();
    let ca = dir.path().join("ca.pem");
    let read = |name: &str| std::fs::read_to_string(path(name.into())).unwrap();
    std::fs::write(
        &ca,
        if name == "foreign" { read("ca.pem") + &read("other-ca.pem") } else { read("ca.pem") },
    )
    .unwrap();
    let (cert, key) = (path(format!("{name}.pem")), path(format!("{name}.key")));
    Tls::load(TlsConfig { cert, key, ca, name: None }).unwrap()
}

thread_local! {
    static SETUP: Cell<Setup> = const { Cell::new(Setup::Plain) };
}

/// What a thread's test sets up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// Pools in memory of the host.
    Plain,
    /// The pools are on a device, or on a fake one.
    Devices,
    /// The pools are on two devices each.
    Divided,
}

impl Setup {
    /// Whether the test of this thread has this setup.
    pub fn is_on(self) -> bool {
        SETUP.get() == self
    }

    /// Sets it up for this thread, as long as the result lives.
    pub fn enter(self) -> Entered {
        SETUP.set(self);
        Entered(())
    }
}

/// Ends a setup when it is dropped.
pub struct Entered(());

impl Drop for Entered {
    fn drop(&mut self) {
        SETUP.set(Setup::Plain);
    }
}

/// Every message of a one-sided transport about a grant.
pub fn all_words(generation: Generation) -> [Word; 7] {
    [
        Word::OtherPool,
        Word::Refused,
        Word::Open(AccessKey { generation, secret: Secret([7; 16]) }),
        Word::Opened(generation),
        Word::Unknown(generation),
        Word::Close(generation),
        Word::Revoke(generation),
    ]
}
