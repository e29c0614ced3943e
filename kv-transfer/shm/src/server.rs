//! The decode worker's unix socket. It shares the pool's memory, and keeps track of the writers of each grant.

use std::{
    fs,
    io::{self, Write},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{DirBuilderExt, MetadataExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use baton_handoff::{Generation, TransportKind, TransportOffer};
use baton_kv_cache::DeviceMemory;
use baton_transfer::{
    Listening, ReceiverConfig, ReceivingTransport,
    receiver::{Acceptor, EndedBy, Grants, OneSidedWriter, PeerAdmission, Service, WriterId},
    word::{self, Word},
};
use tracing::{info, warn};

use super::{
    host,
    wire::{self, HANDLE_BYTES, Message},
};

/// Socket names: "kv-<pool>.sock".
const PREFIX: &str = "kv-";
const SUFFIX: &str = ".sock";

/// Bytes of a socket's path that the kernel takes.
const MAX_PATH_BYTES: usize = 107;

/// How long an ending server waits for its peers to close their grants.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long to wait for the end of a process between two checks whether the wait is still needed.
pub(super) const PROCESS_PAUSE: Duration = Duration::from_millis(20);

/// Shares the pool's memory with other processes of this host.
#[derive(Clone, Debug)]
pub struct ShmReceiving {
    /// A private folder for the socket, made if absent. Its path must be short: a socket's path has at most 107 bytes.
    pub dir: PathBuf,
}

impl ReceivingTransport for ShmReceiving {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn listen(self: Box<Self>, grants: &Arc<Grants>, config: &ReceiverConfig) -> io::Result<Listening> {
        let server = ShmServer::start(Arc::clone(grants), &self.dir, config)?;
        Ok(Listening { offer: server.offer(), guard: Box::new(server) })
    }
}

/// Listens until it is dropped. The drop removes the socket file.
struct ShmServer {
    sharing: Arc<Sharing>,
    acceptor: Acceptor<Sharing>,
    path: PathBuf,
}

/// What all connections share.
struct Sharing {
    grants: Arc<Grants>,
    io_timeout: Duration,
    /// The handle of each rank's memory, if the pool is on devices.
    handles: Vec<[u8; HANDLE_BYTES]>,
}

impl ShmServer {
    fn start(grants: Arc<Grants>, dir: &Path, config: &ReceiverConfig) -> io::Result<ShmServer> {
        let storage = grants.storage();
        let devices = (0..storage.num_ranks()).filter_map(|rank| storage.region(rank).device());
        let handle = |memory: &dyn DeviceMemory| {
            memory.handle().ok_or_else(|| {
                let device = memory.device();
                let message = format!("device {device} does not share its memory with other processes");
                io::Error::new(io::ErrorKind::Unsupported, message)
            })
        };
        let handles = devices.map(handle).collect::<io::Result<_>>()?;
        prepare(dir)?;
        let path = dir.join(format!("{PREFIX}{:016x}{SUFFIX}", grants.pool()));
        let num_bytes = path.as_os_str().len();
        if num_bytes > MAX_PATH_BYTES {
            let message = format!(
                "the path of the shared-memory socket is too long: {} has {num_bytes} bytes, {MAX_PATH_BYTES} \
                 are allowed",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot listen on {}: {error}", path.display()))
        };
        // The socket gets its final name only once it listens. Before that it would look like the socket of a dead
        // process, and another worker that starts at the same time would remove it.
        let unnamed = path.with_extension("new");
        let listener = UnixListener::bind(&unnamed).map_err(named)?;
        // The folder is private already, so no process of another user has connected before this.
        fs::set_permissions(&unnamed, fs::Permissions::from_mode(0o600)).map_err(named)?;
        fs::rename(&unnamed, &path).map_err(named)?;
        let sharing = Arc::new(Sharing { grants, io_timeout: config.io_timeout, handles });
        let acceptor = Acceptor::start(Arc::clone(&sharing), listener, config)?;
        Ok(ShmServer { sharing, acceptor, path })
    }

    fn offer(&self) -> TransportOffer {
        TransportOffer::Shm {
            host_id: host::host_id(),
            socket_path: self.path.clone(),
            pool: self.sharing.grants.pool(),
        }
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        // The file may be gone already. If not, the next start removes it.
        let _ = fs::remove_file(&self.path);
        let connections = self.acceptor.stop();
        // A peer that sees the end stops writing and closes. Other peers are given up: the blocks of
        // their open grants stay allocated.
        for (writer, _) in &connections {
            // Fails when the peer has closed it first.
            let _ = writer.socket.shutdown(Shutdown::Write);
        }
        let start = Instant::now();
        while start.elapsed() < PATIENCE && connections.iter().any(|(_, thread)| !thread.is_finished()) {
            thread::sleep(Duration::from_millis(1));
        }
        for (writer, thread) in connections {
            writer.is_given_up.store(!thread.is_finished(), Ordering::SeqCst);
            let _ = writer.socket.shutdown(Shutdown::Both);
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Service for Sharing {
    type Listener = UnixListener;
    type Connection = Writer;

    const THREADS: (&str, &str) = ("kv-shm-accept", "kv-shm-peer");

    fn connection(&self, socket: UnixStream) -> Writer {
        let (id, is_given_up) = (self.grants.new_writer(), AtomicBool::new(false));
        Writer { socket, id, process: OnceLock::new(), is_given_up }
    }

    fn hang_up(writer: &Writer) {
        // Fails when the peer has closed it first.
        let _ = writer.socket.shutdown(Shutdown::Both);
    }

    fn serve(&self, writer: &Arc<Writer>, admission: &PeerAdmission) {
        serve(self, writer, admission);
    }
}

/// Makes the folder private and removes the sockets of dead processes.
fn prepare(dir: &Path) -> io::Result<()> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", dir.display()));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(named)?;
    let metadata = fs::metadata(dir).map_err(named)?;
    if !host::may_share(host::own_uid(), metadata.uid()) {
        let message = format!("{} belongs to another user", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    if metadata.permissions().mode() & 0o077 != 0 {
        let message = format!(
            "{} is open to other users (mode {:o}); the shared-memory socket needs a folder of mode 700",
            dir.display(),
            metadata.permissions().mode() & 0o777
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    for entry in fs::read_dir(dir).map_err(named)? {
        let path = entry.map_err(named)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_ours = name.starts_with(PREFIX) && name.ends_with(SUFFIX);
        if is_ours
            && let Err(error) = UnixStream::connect(&path)
            && error.kind() == io::ErrorKind::ConnectionRefused
        {
            info!(path = %path.display(), "removing the socket of a process that is gone");
            // Another process may remove it at the same time.
            let _ = fs::remove_file(&path);
        }
    }
    Ok(())
}

/// One peer's connection.
struct Writer {
    socket: UnixStream,
    id: WriterId,
    /// The peer's process, whose end proves that its device has stopped. Present if the pool is on a device.
    process: OnceLock<OwnedFd>,
    /// The server has ended without proof that the peer stopped writing.
    is_given_up: AtomicBool,
}

impl OneSidedWriter for Writer {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn ask_to_close(&self, generation: Generation) {
        if let Err(error) = wire::send(&self.socket, Message::Word(Word::Revoke(generation)), None) {
            // The handoff's stream, or the end of the peer's socket, ends the quarantine.
            warn!(%generation, %error, "shared-memory peer not told of a revoked grant: its blocks stay in quarantine");
        }
    }

    fn ended_by(&self) -> EndedBy {
        EndedBy::Word
    }
}

fn serve(sharing: &Sharing, writer: &Arc<Writer>, admission: &PeerAdmission) {
    let counters = sharing.grants.counters().of(TransportKind::Shm);
    let mut result = greet(sharing, writer, admission);
    if let Ok(true) = result {
        counters.routed(false);
        info!("shared-memory peer connected");
        result = converse(sharing, writer).map(|()| true);
    }
    if !admission.is_admitted() && !admission.is_stopping() {
        counters.rejected();
    }
    if let Err(error) = result {
        if !admission.is_stopping() {
            if admission.is_admitted() {
                counters.failed();
            }
            warn!(%error, "shared-memory connection ended: the peer broke the protocol");
        }
        if admission.is_admitted() {
            // The peer has mapped the memory: only the end of its side of the socket proves that it stopped writing.
            let _ = writer.socket.shutdown(Shutdown::Write);
            let _ = writer.socket.set_read_timeout(None);
            while drain(&writer.socket).is_ok_and(|num_bytes| num_bytes > 0) {}
        }
    }
    if let Some(process) = writer.process.get() {
        // Grants that it closed are fenced. For open grants, its device may write until the process has ended.
        let is_given_up = || writer.is_given_up.load(Ordering::SeqCst);
        while sharing.grants.has_open(writer.id) && !is_given_up() {
            if host::has_ended(process, PROCESS_PAUSE) {
                break;
            }
        }
    }
    if !writer.is_given_up.load(Ordering::SeqCst) {
        sharing.grants.writer_gone(writer.id);
    }
    // The acceptor keeps the descriptor until its next sweep. The peer must see the end now.
    let _ = writer.socket.shutdown(Shutdown::Both);
}

/// Greets the peer. Returns whether it was given the memory.
fn greet(sharing: &Sharing, writer: &Writer, admission: &PeerAdmission) -> io::Result<bool> {
    let socket = &writer.socket;
    socket.set_read_timeout(Some(sharing.io_timeout))?;
    let peer_uid = host::peer_uid(socket)?;
    if !host::may_share(host::own_uid(), peer_uid) {
        warn!(peer_uid, "kv connection rejected: a process of another user asked for shared memory");
        wire::send(socket, Message::Word(Word::Refused), None)?;
        return Ok(false);
    }
    let storage = sharing.grants.storage();
    let layout = storage.layout();
    let size = storage.num_blocks() as u64;
    let (answer, descriptor) = match wire::receive(socket)? {
        None => return Ok(false),
        Some((Message::Hello { pool, layer_bytes, num_layers }, _)) => {
            if pool != sharing.grants.pool() {
                (Message::Word(Word::OtherPool), None)
            } else if (layer_bytes, num_layers) != (layout.layer_bytes() as u64, layout.num_layers as u32)
                || !admission.admit()
            {
                (Message::Word(Word::Refused), None)
            } else if !sharing.handles.is_empty() {
                return greet_with(&sharing.handles, size, writer);
            } else {
                (Message::Welcome { num_blocks: size }, Some(storage.fd()))
            }
        }
        Some((message, _)) => return Err(unexpected(message)),
    };
    let is_welcome = descriptor.is_some();
    wire::send(socket, answer, descriptor)?;
    // There is no deadline after the handshake.
    socket.set_read_timeout(None)?;
    Ok(is_welcome)
}

/// As [`greet`], for a pool on devices.
fn greet_with(handles: &[[u8; HANDLE_BYTES]], num_blocks: u64, writer: &Writer) -> io::Result<bool> {
    let socket = &writer.socket;
    match host::peer_process(socket) {
        Ok(process) => drop(writer.process.set(process)),
        Err(error) => {
            warn!(%error, "kv connection rejected: the end of the peer's process cannot be watched");
            wire::send(socket, Message::Word(Word::Refused), None)?;
            return Ok(false);
        }
    }
    let num_ranks = handles.len() as u32;
    wire::send(socket, Message::WelcomeToDevices { num_blocks, num_ranks }, None)?;
    (&*socket).write_all(handles.as_flattened())?;
    socket.set_read_timeout(None)?;
    Ok(true)
}

fn converse(sharing: &Sharing, writer: &Arc<Writer>) -> io::Result<()> {
    while let Some((message, _)) = receive_until_end(&writer.socket)? {
        let Message::Word(word) = message else { return Err(unexpected(message)) };
        let answer = word::hear(&sharing.grants, writer, writer.id, word);
        if let Some(answer) = answer.map_err(|word| unexpected(Message::Word(word)))? {
            wire::send(&writer.socket, Message::Word(answer), None)?;
        }
    }
    Ok(())
}

/// Whether the error is the end of the stream. A reset is one, too: the peer closed without reading everything.
fn receive_until_end(socket: &UnixStream) -> io::Result<Option<(Message, Option<std::os::fd::OwnedFd>)>> {
    match wire::receive(socket) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
        received => received,
    }
}

fn drain(mut socket: &UnixStream) -> io::Result<usize> {
    loop {
        match io::Read::read(&mut socket, &mut [0; 1024]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn unexpected(message: Message) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("unexpected {message:?}"))
}
