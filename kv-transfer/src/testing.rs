//! What the tests of the data plane stand on: two pools in one process, and guards that count.

use std::{
    cell::Cell,
    future::{Future, poll_fn},
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    path::PathBuf,
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

use crate::{
    Granted, Receiver, ReceiverConfig, Route, Sender, SenderConfig,
    nccl::{TestFabric, memory::MemoryFabric},
    pretended::{counted_devices, pretended_device},
    rdma::{Nixl, nixl},
};

pub(crate) const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 3, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::F32 };
pub(crate) const NUM_BLOCKS: usize = 64;

/// Long for a healthy peer of the tests of faults, short to wait for.
pub(crate) const PATIENCE: Duration = Duration::from_millis(1500);

/// Long for everything.
pub(crate) const NEVER: Duration = Duration::from_secs(600);

/// A prefill worker's and a decode worker's data plane.
pub(crate) struct Fabric {
    pub(crate) receiver: Receiver,
    pub(crate) sender: Sender,
    pub(crate) source: Arc<BlockStorage>,
    pub(crate) target: Arc<BlockStorage>,
    pub(crate) config: ReceiverConfig,
    // Removed at the end.
    pub(crate) dir: tempfile::TempDir,
}

impl Fabric {
    pub(crate) fn new(transports: &[TransportKind]) -> Fabric {
        Fabric::with(transports, |_| {})
    }

    /// Over tcp, inside of TLS: the receiver is "a", the sender "b".
    pub(crate) fn secure(change: impl FnOnce(&mut ReceiverConfig)) -> Fabric {
        let _tls = Setup::Tls.enter();
        Fabric::with(&[TransportKind::Tcp], change)
    }

    pub(crate) fn with(transports: &[TransportKind], change: impl FnOnce(&mut ReceiverConfig)) -> Fabric {
        let fabric = Fabric::start(transports, LAYOUT, LAYOUT, change);
        for block_idx in 0..NUM_BLOCKS as u32 {
            for layer_idx in 0..LAYOUT.num_layers {
                fill(&fabric.source, BlockId(block_idx), layer_idx, pattern(block_idx, layer_idx));
            }
        }
        fabric
    }

    /// From blocks of one layout to blocks of another.
    pub(crate) fn between(transports: &[TransportKind], from: KvLayout, to: KvLayout) -> Fabric {
        Fabric::start(transports, from, to, |_| {})
    }

    fn start(
        transports: &[TransportKind],
        from: KvLayout,
        to: KvLayout,
        change: impl FnOnce(&mut ReceiverConfig),
    ) -> Fabric {
        let dir = private_dir();
        let mut config = ReceiverConfig {
            rdma_listen: transports.contains(&TransportKind::Rdma).then(|| ([127, 0, 0, 1], 0).into()),
            nixl: Some(nixl()),
            nccl_listen: transports.contains(&TransportKind::Nccl).then(|| ([127, 0, 0, 1], 0).into()),
            fabric: Some(TestFabric(Arc::new(MemoryFabric::default()))),
            tcp_listen: transports.contains(&TransportKind::Tcp).then(|| ([127, 0, 0, 1], 0).into()),
            shm_dir: transports.contains(&TransportKind::Shm).then(|| dir.path().join("d")),
            tls: Setup::Tls.is_on().then(|| tls("a")),
            ..ReceiverConfig::default()
        };
        change(&mut config);
        let [source, target] = [from, to].map(pool);
        let receiver = Receiver::start(Arc::clone(&target), config.clone()).unwrap();
        let sender = Sender::start(Arc::clone(&source), sender_config(transports)).unwrap();
        Fabric { receiver, sender, source, target, config, dir }
    }

    /// The offer of one transport.
    pub(crate) fn offer(&self, kind: TransportKind) -> TransportOffer {
        self.receiver.offers().iter().find(|offer| offer.kind() == kind).cloned().expect("offered")
    }

    /// Where it listens for peers of this kind, and its pool.
    pub(crate) fn address(&self, kind: TransportKind) -> (String, u64) {
        match self.offer(kind) {
            TransportOffer::Tcp { address, pool }
            | TransportOffer::Rdma { address, pool }
            | TransportOffer::Nccl { address, pool } => (address, pool),
            offer @ TransportOffer::Shm { .. } => panic!("{offer:?} has no address"),
        }
    }

    /// What comes back for these bytes until the peer hangs up.
    pub(crate) fn ask(&self, kind: TransportKind, bytes: &[u8]) -> Vec<u8> {
        let mut socket = TcpStream::connect(self.address(kind).0).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // It may hang up early.
        let _ = socket.write_all(bytes);
        let _ = socket.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        match socket.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
        answer
    }

    /// A handoff of one block goes well.
    pub(crate) async fn works(&self) {
        let granted = self.receiver.grant(blocks([7]), ());
        let route = self.route(&granted).await.unwrap();
        let pushed = soon(route.push(writes(&blocks([7])))).await.unwrap();
        soon(granted.verify(pushed.pieces)).await.unwrap();
    }

    pub(crate) async fn route<K>(&self, granted: &Granted<K>) -> Result<Route, RouteError> {
        soon(self.sender.route(granted.access_key(), granted.offers(), ())).await
    }

    /// A route, however often one must ask: whoever is new may be turned away for a while.
    pub(crate) async fn route_in_the_end<K>(&self, granted: &Granted<K>) -> Route {
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
    pub(crate) fn holds(&self, writes: &[PieceWrite]) -> bool {
        writes.iter().all(|write| {
            let layer_idx = write.layer_idx as usize;
            bytes(&self.source, write.src.blocks()[0], layer_idx) == bytes(&self.target, write.dst, layer_idx)
        })
    }
}

pub(crate) fn sender_config(transports: &[TransportKind]) -> SenderConfig {
    // A busy machine may take long to register memory.
    let connect_timeout = Duration::from_secs(25);
    SenderConfig {
        transports: transports.to_vec(),
        nixl: Some(nixl()),
        fabric: Some(TestFabric(Arc::new(MemoryFabric::default()))),
        connect_timeout,
        // Some pushes of the tests are of less, others of more.
        copy_at_once_bytes: 4 * LAYOUT.layer_bytes(),
        tls: Setup::Tls.is_on().then(|| tls("b")),
        ..SenderConfig::default()
    }
}

/// Where `cargo xtask setup` puts NIXL, unless the environment names another one; that of the tests for devices of theirs.
pub(crate) fn nixl() -> PathBuf {
    if Setup::Devices.is_on() || Setup::Divided.is_on() {
        return nixl::pretended::PLACE.into();
    }
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/nixl/.nixl_cu12.mesonpy.libs");
    std::env::var_os("BATON_NIXL").map_or_else(|| own.into(), PathBuf::from)
}

/// NCCL's library, where it can be tested; says so where the test harness does not hide it, if it cannot.
pub(crate) fn nccl_library() -> Option<PathBuf> {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/nccl/nvidia/nccl/lib/libnccl.so.2");
    let place = std::env::var_os("BATON_NCCL").map_or_else(|| own.into(), PathBuf::from);
    if place.exists() {
        return Some(place);
    }
    skip(&format!("no NCCL in {}; `cargo xtask setup --nccl` does", place.display()));
    None
}

/// Whether there is a CUDA device; says so if not.
pub(crate) fn has_device() -> bool {
    let found = crate::cuda::num_devices();
    if let Err(error) = &found {
        skip(&error.to_string());
    }
    found.is_ok()
}

/// Says that a test cannot do what it is for, where the test harness does not hide it.
fn skip(why: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let _ = io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes());
}

/// Whether rdma can be tested; says so where the test harness does not hide it, if it cannot.
pub(crate) fn has_rdma() -> bool {
    let loaded = Nixl::load(Some(&nixl()));
    if let Err(error) = &loaded {
        skip(&format!("{error}; `cargo xtask setup` does"));
    }
    loaded.is_ok()
}

/// A folder that only this user may look into.
pub(crate) fn private_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("baton-kv").tempdir().unwrap()
}

pub(crate) fn storage() -> Arc<BlockStorage> {
    pool(LAYOUT)
}

fn pool(layout: KvLayout) -> Arc<BlockStorage> {
    Arc::new(match SETUP.get() {
        Setup::Plain | Setup::Tls => BlockStorage::new(layout, NUM_BLOCKS).unwrap(),
        Setup::Devices => pretended_device(layout, NUM_BLOCKS),
        Setup::Divided => counted_devices(layout, NUM_BLOCKS, &[6, 7]).0,
    })
}

pub(crate) fn pattern(block_idx: u32, layer_idx: usize) -> u8 {
    (block_idx as usize * LAYOUT.num_layers + layer_idx) as u8 | 1
}

pub(crate) fn fill(storage: &BlockStorage, block: BlockId, layer_idx: usize, byte: u8) {
    change(storage, block, layer_idx, |piece| piece.fill(byte));
}

/// Changes a piece, wherever it lies.
pub(crate) fn change<R>(
    storage: &BlockStorage,
    block: BlockId,
    layer_idx: usize,
    change: impl FnOnce(&mut [u8]) -> R,
) -> R {
    let mut piece = bytes(storage, block, layer_idx);
    let result = change(&mut piece);
    // SAFETY: tests touch only blocks that nobody else does, or look at what a late writer would do.
    unsafe { storage.store(block, layer_idx, &piece) }.unwrap();
    result
}

pub(crate) fn bytes(storage: &BlockStorage, block: BlockId, layer_idx: usize) -> Vec<u8> {
    let mut piece = vec![0; storage.layout().layer_bytes()];
    // SAFETY: as above.
    unsafe { storage.load_all(&[(block, layer_idx)], &mut piece) }.unwrap();
    piece
}

/// Whether a piece is nothing but this byte.
pub(crate) fn holds(storage: &BlockStorage, block: BlockId, layer_idx: usize, byte: u8) -> bool {
    bytes(storage, block, layer_idx).iter().all(|&found| found == byte)
}

/// All pieces of `dst`, from source blocks of the same numbers, layer by layer.
pub(crate) fn writes(dst: &[BlockId]) -> Vec<PieceWrite> {
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

pub(crate) fn blocks(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId).collect()
}

/// The bytes that a push should have moved.
pub(crate) fn bytes_of(pushed: &Pushed) -> u64 {
    (pushed.pieces.len() * LAYOUT.layer_bytes()) as u64
}

/// Fails the test instead of hanging.
pub(crate) async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(30), future).await.expect("within 30 s")
}

pub(crate) async fn is_pending<F: Future + Unpin>(future: &mut F) -> bool {
    let mut future = pin!(future);
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

/// Waits for what another thread will bring about.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(30), "never: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Counts guards that are out.
#[derive(Clone, Default)]
pub(crate) struct Guards(Arc<AtomicUsize>);

/// One of them.
pub(crate) struct Guard(Arc<AtomicUsize>);

impl Guards {
    pub(crate) fn guard(&self) -> Guard {
        self.0.fetch_add(1, Ordering::SeqCst);
        Guard(Arc::clone(&self.0))
    }

    pub(crate) fn num_out(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An access key of no grant.
pub(crate) fn some_access_key(generation: u64) -> AccessKey {
    AccessKey { generation: Generation(generation), secret: Secret::default() }
}

/// For another process's environment.
pub(crate) fn access_key_to_text(access_key: AccessKey) -> String {
    format!("{:x}:{:x}", access_key.generation.0, u128::from_le_bytes(access_key.secret.0))
}

pub(crate) fn access_key_from_text(text: &str) -> AccessKey {
    let (generation, secret) = text.split_once(':').unwrap();
    let secret = Secret(u128::from_str_radix(secret, 16).unwrap().to_le_bytes());
    AccessKey { generation: Generation(u64::from_str_radix(generation, 16).unwrap()), secret }
}

/// Certificates of the tests: "a" and "b" of one authority, "foreign" of another, which believes in that of "a".
pub(crate) fn tls(name: &str) -> Tls {
    let path =
        |name: String| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tls/testdata")).join(name);
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
pub(crate) enum Setup {
    Plain,
    /// It speaks TLS.
    Tls,
    /// Its pools are on a device, as far as anybody can tell.
    Devices,
    /// They are on two each.
    Divided,
}

impl Setup {
    fn is_on(self) -> bool {
        SETUP.get() == self
    }

    /// For this thread, as long as what it returns lives.
    pub(crate) fn enter(self) -> Entered {
        SETUP.set(self);
        Entered(())
    }
}

pub(crate) struct Entered(());

impl Drop for Entered {
    fn drop(&mut self) {
        SETUP.set(Setup::Plain);
    }
}
