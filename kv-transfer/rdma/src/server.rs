//! The decode worker's control port. It gives each peer an agent for each rank's memory, keeps track of the writers of
//! each grant, and fences a peer that does not close a revoked grant.

use std::{
    collections::HashMap,
    io::{self, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use baton_handoff::{Generation, TransportKind, TransportOffer};
use baton_kv_cache::BlockStorage;
use baton_transfer::{
    Listening, ReceiverConfig, ReceivingTransport,
    receiver::{Acceptor, EndedBy, Grants, OneSidedWriter, PeerAdmission, Service, WriterId, listen},
    socket,
    word::{self, Word},
};
use tracing::{debug, info, warn};

use super::{
    nixl::{self, Agent, Nixl, NixlError},
    wire::{MESSAGE_BYTES, Message, RankMemory},
};

/// Lets network devices of peers write into the pool.
pub struct RdmaReceiving {
    nixl: Nixl,
    listen: SocketAddr,
}

impl RdmaReceiving {
    /// Peers connect to `listen`; port 0 takes a free port. `nixl` is NIXL's C library or its folder. `None`: the
    /// system's loader finds it.
    ///
    /// # Errors
    /// When NIXL is missing, or cannot use the memory of `storage`.
    pub fn start(
        storage: &Arc<BlockStorage>,
        nixl: Option<&Path>,
        listen: SocketAddr,
    ) -> io::Result<RdmaReceiving> {
        Ok(RdmaReceiving { nixl: nixl::start(nixl, storage).map_err(io::Error::other)?, listen })
    }
}

impl ReceivingTransport for RdmaReceiving {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    /// The guard's drop drops every agent, so no peer writes after it.
    fn listen(self: Box<Self>, grants: &Arc<Grants>, config: &ReceiverConfig) -> io::Result<Listening> {
        let (listener, address) = listen(TransportKind::Rdma, self.listen, config)?;
        let offer = TransportOffer::Rdma { address, pool: grants.pool() };
        let sharing = Arc::new(Sharing {
            grants: Arc::clone(grants),
            nixl: self.nixl,
            io_timeout: config.io_timeout,
            handshake_timeout: config.handshake_timeout,
            next_agent: AtomicU64::new(0),
        });
        Ok(Listening { offer, guard: Box::new(Acceptor::start(sharing, listener, config)?) })
    }
}

/// What all connections share.
struct Sharing {
    grants: Arc<Grants>,
    nixl: Nixl,
    io_timeout: Duration,
    handshake_timeout: Duration,
    next_agent: AtomicU64,
}

impl Service for Sharing {
    type Listener = TcpListener;
    type Connection = Writer;

    const THREADS: (&str, &str) = ("kv-rdma-accept", "kv-rdma-peer");

    fn hang_up(writer: &Writer) {
        // Fails when the peer has closed it first.
        let _ = writer.socket.shutdown(Shutdown::Both);
    }

    fn connection(&self, (socket, address): (TcpStream, SocketAddr)) -> Writer {
        Writer { socket, address, id: self.grants.new_writer(), revoked: Mutex::default() }
    }

    fn serve(&self, writer: &Arc<Writer>, admission: &PeerAdmission) {
        let counters = self.grants.counters().of(TransportKind::Rdma);
        let result = self.greet(writer, admission).and_then(|agents| match agents {
            Some(agents) => {
                counters.routed(false);
                info!(peer = %writer.address, "rdma peer connected");
                let result = self.converse(writer);
                // The fence: after this, no byte of this peer is written into the pool.
                drop(agents);
                result
            }
            None => Ok(()),
        });
        self.grants.writer_gone(writer.id);
        match result {
            Ok(()) => debug!(peer = %writer.address, "rdma peer left"),
            Err(_) if admission.is_stopping() => {}
            Err(error) if admission.is_admitted() => {
                counters.failed();
                warn!(peer = %writer.address, %error, "rdma connection ended: the peer can no longer write");
            }
            Err(error) => admission.reject(&writer.address, &error),
        }
        if !admission.is_admitted() && !admission.is_stopping() {
            counters.rejected();
        }
        // The acceptor keeps the descriptor until its next sweep. The peer must see the end now.
        let _ = writer.socket.shutdown(Shutdown::Both);
    }
}

/// One peer's connection.
struct Writer {
    socket: TcpStream,
    address: SocketAddr,
    id: WriterId,
    /// Grants that the peer was asked to close, and when.
    revoked: Mutex<HashMap<Generation, Instant>>,
}

impl Writer {
    fn revoked(&self) -> MutexGuard<'_, HashMap<Generation, Instant>> {
        self.revoked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, word: Word) -> io::Result<()> {
        socket::send_at_once(&self.socket, &Message::Word(word).encode())
    }
}

impl OneSidedWriter for Writer {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn ask_to_close(&self, generation: Generation) {
        self.revoked().insert(generation, Instant::now());
        if let Err(error) = self.send(Word::Revoke(generation)) {
            // The peer is fenced when it does not close the grant in time, or when its socket ends.
            warn!(%generation, %error, "rdma peer not told of a revoked grant: its blocks stay in quarantine");
        }
    }

    fn ended_by(&self) -> EndedBy {
        EndedBy::Completion
    }
}

impl Sharing {
    /// Reads and checks the peer's hello. Returns the agents that the peer was given, if it is admitted.
    fn greet(&self, writer: &Writer, admission: &PeerAdmission) -> io::Result<Option<Vec<Agent>>> {
        socket::configure(&writer.socket, self.io_timeout)?;
        let mut bytes = [0; MESSAGE_BYTES];
        socket::receive_until(&writer.socket, &mut bytes, Instant::now() + self.handshake_timeout)?;
        let storage = self.grants.storage();
        let layout = storage.layout();
        let shape = (layout.num_layers as u32, layout.layer_bytes() as u64, layout.block_bytes() as u64);
        match decode(&bytes)? {
            Message::Hello { pool, num_layers, layer_bytes, block_bytes, access_key } => {
                let is_sound = pool == self.grants.pool() && (num_layers, layer_bytes, block_bytes) == shape;
                if is_sound && self.grants.admit(&access_key, None).is_some() && admission.admit() {
                    return self.welcome(writer).map(Some);
                }
                // The same answer for every reason, so that an unauthenticated peer learns nothing.
                writer.send(Word::Refused)?;
            }
            message => return Err(unexpected(message)),
        }
        Ok(None)
    }

    fn welcome(&self, writer: &Writer) -> io::Result<Vec<Agent>> {
        let storage = self.grants.storage();
        let num_ranks = storage.num_ranks();
        let welcome =
            Message::Welcome { num_blocks: storage.num_blocks() as u64, num_ranks: num_ranks as u32 };
        let mut bytes = welcome.encode().to_vec();
        let agent_of = |rank| {
            let n = self.next_agent.fetch_add(1, Ordering::Relaxed);
            // The name is new, so that no peer takes this agent for an older one.
            let name = format!("decode-{:016x}-{n}", self.grants.pool());
            let agent = Agent::new(&self.nixl, &name, Arc::clone(storage), rank)?;
            let metadata = agent.metadata()?;
            let memory = RankMemory {
                memory: agent.memory(),
                base: storage.region(rank).address(),
                metadata_bytes: metadata.len() as u32,
            };
            bytes.extend(Message::RankMemory(memory).encode());
            bytes.extend(metadata);
            Ok(agent)
        };
        match (0..num_ranks).map(agent_of).collect() {
            Ok(agents) => {
                (&writer.socket).write_all(&bytes)?;
                Ok(agents)
            }
            Err::<_, NixlError>(error) => {
                writer.send(Word::Refused)?;
                Err(io::Error::other(error))
            }
        }
    }

    /// Serves the peer until it leaves or must be fenced.
    fn converse(&self, writer: &Arc<Writer>) -> io::Result<()> {
        let mut bytes = [0; MESSAGE_BYTES];
        loop {
            while !socket::wait_readable(&writer.socket, Some(self.io_timeout / 4))? {
                self.check_patience(writer)?;
            }
            self.check_patience(writer)?;
            if writer.socket.peek(&mut bytes[..1])? == 0 {
                return Ok(());
            }
            socket::receive_exact(&writer.socket, &mut bytes, self.io_timeout)?;
            let word = match decode(&bytes)? {
                Message::Word(word) => word,
                message => return Err(unexpected(message)),
            };
            if let Word::Close(generation) = word {
                writer.revoked().remove(&generation);
            }
            let answer = word::hear(&self.grants, writer, writer.id, word);
            if let Some(answer) = answer.map_err(|word| unexpected(Message::Word(word)))? {
                writer.send(answer)?;
            }
        }
    }

    /// A peer that was asked to close a grant and does not in time loses its agents. Its earlier writes are not
    /// trusted and its later writes cannot reach the pool, so that the blocks can be used again.
    fn check_patience(&self, writer: &Writer) -> io::Result<()> {
        let mut revoked = writer.revoked();
        // A grant that was committed is not in the table any more.
        revoked.retain(|&generation, _| self.grants.is_open(generation, writer.id));
        match revoked.iter().find(|(_, since)| since.elapsed() >= self.io_timeout) {
            Some((generation, _)) => Err(socket::timed_out(&format!("letting go of {generation}"))),
            None => Ok(()),
        }
    }
}

fn decode(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Message> {
    Message::decode(bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed message"))
}

fn unexpected(message: Message) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("unexpected {message:?}"))
}
