//! The second process: it holds the memory that is written, and executes one command per line.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use anyhow::{Context, bail, ensure};
use baton_handoff::{AccessKey, Generation, Piece, Secret, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage};
use baton_tls::{Tls, TlsConfig};
use baton_transfer::{Granted, Receiver, ReceiverConfig, ReceivingTransport};
use baton_transport_rdma::RdmaReceiving;
use baton_transport_shm::ShmReceiving;
use baton_transport_tcp::TcpReceiving;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::round;

/// What the first process asks for.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// Memory for so many blocks of one piece, in place of what there was.
    Pool(PoolConfig),
    /// The right to write into blocks.
    Grant { blocks: Vec<u32>, is_secure: bool },
    /// Whether the blocks of the grant hold pieces with these checksums: (position in the grant, checksum).
    Verify { pieces: Vec<(u32, u64)> },
    /// The grant is over.
    Release,
}

/// The memory to allocate, and the transports to it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PoolConfig {
    pub(super) piece_bytes: usize,
    pub(super) num_blocks: usize,
    pub(super) socket_buffer_bytes: Option<usize>,
    /// Also over rdma, with NIXL from this path or from the system.
    pub(super) rdma: Option<Option<PathBuf>>,
    /// Certificate, key, authority.
    pub(super) tls: Option<[PathBuf; 3]>,
}

/// What it gets.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Pool { offers: Vec<TransportOffer>, secure_offer: Option<TransportOffer>, plain_port: u16 },
    Granted { generation: u64, secret: [u8; Secret::NUM_BYTES] },
    Done,
    Failed { why: String },
}

/// How a pool of the other process can be reached.
pub(super) struct Pool {
    /// By transports, best first.
    pub(super) offers: Vec<TransportOffer>,
    /// By tcp inside of TLS.
    pub(super) secure_offer: Option<TransportOffer>,
    /// By plain TCP, see [`read_plain`].
    pub(super) plain_port: u16,
}

/// The other process; it ends when this is dropped.
pub(super) struct Peer {
    process: Child,
    pipes: Handle,
}

/// Asks the other process.
#[derive(Clone)]
pub(super) struct Handle(Arc<Mutex<Option<Pipes>>>);

type Pipes = (ChildStdin, BufReader<ChildStdout>);

impl Peer {
    pub(super) fn start() -> anyhow::Result<Peer> {
        let program = std::env::current_exe().context("this program's file")?;
        let mut process = Command::new(program)
            .args(["bench", "transfer-peer"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the second process")?;
        let stdin = process.stdin.take().expect("piped above");
        let stdout = BufReader::new(process.stdout.take().expect("piped above"));
        Ok(Peer { process, pipes: Handle(Arc::new(Mutex::new(Some((stdin, stdout))))) })
    }

    pub(super) fn pool(&mut self, config: PoolConfig) -> anyhow::Result<Pool> {
        match self.pipes.ask(&Ask::Pool(config))? {
            Answer::Pool { offers, secure_offer, plain_port } => {
                Ok(Pool { offers, secure_offer, plain_port })
            }
            answer => bail!("unexpected {answer:?}"),
        }
    }

    pub(super) fn handle(&self) -> Handle {
        self.pipes.clone()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.pipes.0.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = self.process.wait();
    }
}

impl Handle {
    pub(super) fn grant(&self, blocks: Vec<u32>, is_secure: bool) -> anyhow::Result<AccessKey> {
        match self.ask(&Ask::Grant { blocks, is_secure })? {
            Answer::Granted { generation, secret } => {
                Ok(AccessKey { generation: Generation(generation), secret: Secret(secret) })
            }
            answer => bail!("unexpected {answer:?}"),
        }
    }

    /// Compares what was pushed with what arrived.
    pub(super) fn verify(&self, pieces: &[Piece]) -> anyhow::Result<()> {
        let pieces = pieces.iter().map(|piece| (piece.block_idx, piece.checksum)).collect();
        self.ask(&Ask::Verify { pieces }).map(drop)
    }

    pub(super) fn release(&self) -> anyhow::Result<()> {
        self.ask(&Ask::Release).map(drop)
    }

    fn ask(&self, ask: &Ask) -> anyhow::Result<Answer> {
        let mut pipes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (stdin, stdout) = pipes.as_mut().context("the second process has been ended")?;
        write_line(stdin, ask).context("the second process is gone")?;
        match read_line(stdout)?.context("the second process is gone")? {
            Answer::Failed { why } => bail!("the second process: {why}"),
            answer => Ok(answer),
        }
    }
}

/// The other process, until its input ends.
pub(crate) fn serve() -> anyhow::Result<()> {
    let mut side = None;
    let mut stdin = io::stdin().lock();
    while let Some(ask) = read_line(&mut stdin)? {
        let answer =
            answer(&mut side, ask).unwrap_or_else(|error| Answer::Failed { why: format!("{error:#}") });
        write_line(&mut io::stdout().lock(), &answer)?;
    }
    Ok(())
}

/// One pool, as the other process holds it.
struct Side {
    granted: Option<Granted<()>>,
    receiver: Receiver,
    /// Of the same memory, inside of TLS.
    secure: Option<Receiver>,
    /// Holds the socket of `shm`.
    _dir: tempfile::TempDir,
}

fn answer(side: &mut Option<Side>, ask: Ask) -> anyhow::Result<Answer> {
    if let Ask::Pool(PoolConfig { piece_bytes, num_blocks, socket_buffer_bytes, rdma, tls }) = ask {
        drop(side.take());
        let storage = Arc::new(round::storage(round::layout(piece_bytes), num_blocks, 3)?);
        let dir = tempfile::Builder::new().prefix("baton-bench").tempdir()?;
        let any_port = ([127, 0, 0, 1], 0).into();
        let config = ReceiverConfig::default();
        let tcp = TcpReceiving { socket_buffer_bytes, ..TcpReceiving::new(any_port) };
        let secure = match tls {
            Some([cert, key, ca]) => {
                let tls = Some(Tls::load(TlsConfig { cert, key, ca, name: None })?);
                let tcp = TcpReceiving { tls, ..tcp.clone() };
                Some(Receiver::start(Arc::clone(&storage), &config, vec![Box::new(tcp)])?)
            }
            None => None,
        };
        let secure_offer = secure.as_ref().and_then(|receiver| receiver.offers().first().cloned());
        let mut transports: Vec<Box<dyn ReceivingTransport>> =
            vec![Box::new(ShmReceiving { dir: dir.path().join("shm") }), Box::new(tcp)];
        if let Some(nixl) = rdma {
            transports.push(Box::new(RdmaReceiving::start(&storage, nixl.as_deref(), any_port)?));
        }
        let receiver = Receiver::start(Arc::clone(&storage), &config, transports)?;
        let offers = receiver.offers().to_vec();
        *side = Some(Side { granted: None, receiver, secure, _dir: dir });
        return Ok(Answer::Pool { offers, secure_offer, plain_port: serve_plain(storage)? });
    }
    let side = side.as_mut().context("there is no pool yet")?;
    match ask {
        Ask::Pool(_) => unreachable!("answered above"),
        Ask::Grant { blocks, is_secure } => {
            let blocks: Vec<_> = blocks.into_iter().map(BlockId).collect();
            let receiver = if is_secure { side.secure.as_ref() } else { Some(&side.receiver) };
            let receiver = receiver.context("there are no certificates")?;
            let granted = side.granted.insert(receiver.grant(blocks, ()));
            let AccessKey { generation, secret } = granted.access_key();
            Ok(Answer::Granted { generation: generation.0, secret: secret.0 })
        }
        Ask::Verify { pieces } => {
            let granted = side.granted.as_ref().context("nothing is granted")?;
            let piece = |(block_idx, checksum)| Piece { block_idx, layer_idx: 0, checksum };
            block_on(granted.verify(pieces.into_iter().map(piece).collect()))??;
            Ok(Answer::Done)
        }
        Ask::Release => {
            let granted = side.granted.take().context("nothing is granted")?;
            ensure!(block_on(granted.commit())?.is_some(), "the receiver was torn down");
            Ok(Answer::Done)
        }
    }
}

/// Bytes before a plain transfer: offset into the memory and length, both u64, little-endian.
pub(super) const PLAIN_HEADER_BYTES: usize = 16;

/// Reads plain TCP into the memory: what sockets do without a protocol.
fn serve_plain(storage: Arc<BlockStorage>) -> anyhow::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("a port for the plain stream")?;
    let port = listener.local_addr()?.port();
    // Ends with the process: another pool has another listener, and no client connects to this one any more.
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let storage = Arc::clone(&storage);
            thread::spawn(move || read_plain(&stream, &storage));
        }
    });
    Ok(port)
}

/// Header, bytes, and one byte back when they are there; until the stream ends.
fn read_plain(mut stream: &TcpStream, storage: &BlockStorage) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let base = storage.layer_ptr(BlockId(0), 0).as_ptr();
    let num_bytes = storage.num_blocks() * storage.layout().block_bytes();
    loop {
        let mut header = [0; PLAIN_HEADER_BYTES];
        stream.read_exact(&mut header)?;
        let [offset, len] =
            [0, 8].map(|at| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes")) as usize);
        if offset.checked_add(len).is_none_or(|end| end > num_bytes) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: the range was just checked; the first process starts no other write meanwhile.
        stream.read_exact(unsafe { std::slice::from_raw_parts_mut(base.add(offset), len) })?;
        stream.write_all(&[1])?;
    }
}

pub(super) fn block_on<F: Future>(future: F) -> anyhow::Result<F::Output> {
    Ok(tokio::runtime::Builder::new_current_thread().build()?.block_on(future))
}

fn write_line(to: &mut impl Write, value: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    to.write_all(&line)?;
    Ok(to.flush()?)
}

fn read_line<T: DeserializeOwned>(from: &mut impl BufRead) -> anyhow::Result<Option<T>> {
    let mut line = String::new();
    let num_bytes = from.read_line(&mut line)?;
    (num_bytes > 0).then(|| serde_json::from_str(&line).context("a line between the processes")).transpose()
}
