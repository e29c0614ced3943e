//! The prefill worker's mapping of one pool. One thread copies, and one thread listens.
//!
//! The copying thread holds the connection's lock while it copies a frame, and copies only under
//! open grants. So a thread that takes the lock and closes a grant knows that nothing is written
//! under the grant any more, and may send `Close`. A route that is dropped does not wait for the lock ([`LinkSlot`]). The
//! thread that pushes a small frame copies it itself when the copying thread is idle: waking the copying thread takes
//! longer than the copy.

use std::{
    io::{self, Read},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, OnceLock},
    thread::{self, JoinHandle},
};

use baton_handoff::{PushError, RouteError, TransportKind, TransportOffer};
use baton_kv_cache::{BlockStorage, KvLayout};
use baton_transfer::{
    SendingTransport,
    checksum::SumOf,
    sender::{
        Frame, Job, JobThread, Jobs, Open, OpenGrants, RemotePool, RouteState, SenderContext, Staging,
        max_pieces,
    },
    word::Word,
};
use tracing::{error, info, warn};

use super::{
    host::host_id,
    link::{Link, LinkGuard, LinkSlot},
    target::{self, OpenHandle, Target},
    wire::{self, HANDLE_BYTES, Message},
};

/// Pieces of a frame that a device copies by one launch: a layer of 64 Ki tokens in blocks of 16. The time of a launch, and of the
/// wait for it, hardly depends on their number.
const DEVICE_FRAME_PIECES: usize = 4096;

/// Writes into the memory of other processes of this host.
#[derive(Clone, Debug)]
pub struct ShmSending {
    host_id: String,
    copy_at_once_bytes: usize,
    open_handle: OpenHandle,
}

impl ShmSending {
    /// The pushing thread copies frames of up to so many bytes itself, if the pool's thread is idle.
    pub fn new(copy_at_once_bytes: usize) -> ShmSending {
        ShmSending { host_id: host_id(), copy_at_once_bytes, open_handle: target::open_handle }
    }

    /// Opens memory of devices in another way.
    #[cfg(test)]
    pub(super) fn opening_by(self, open_handle: OpenHandle) -> ShmSending {
        ShmSending { open_handle, ..self }
    }
}

impl Default for ShmSending {
    /// As many bytes as a core copies in the time that waking another core takes.
    fn default() -> ShmSending {
        ShmSending::new(256 << 10)
    }
}

impl SendingTransport for ShmSending {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    /// The memory of another host cannot be mapped.
    fn may_reach(&self, offer: &TransportOffer) -> bool {
        matches!(offer, TransportOffer::Shm { host_id, .. } if *host_id == self.host_id)
    }

    fn pool(
        &self,
        context: &Arc<SenderContext>,
        offer: &TransportOffer,
        layout: &KvLayout,
    ) -> Arc<dyn RemotePool> {
        let TransportOffer::Shm { socket_path, pool, .. } = offer else { unreachable!("an offer of shm") };
        let shared = Arc::new(Shared {
            context: Arc::clone(context),
            copy_at_once_bytes: self.copy_at_once_bytes,
            open_handle: self.open_handle,
            path: socket_path.clone(),
            pool: *pool,
            layout: *layout,
            jobs: Jobs::default(),
            link: LinkSlot::default(),
            sum_of: OnceLock::new(),
            is_copied_at_once: OnceLock::new(),
        });
        Arc::new(ShmPool { shared, copier: JobThread::default() })
    }
}

/// One pool of another process, written through a mapping.
struct ShmPool {
    shared: Arc<Shared>,
    copier: JobThread,
}

struct Shared {
    context: Arc<SenderContext>,
    copy_at_once_bytes: usize,
    open_handle: OpenHandle,
    path: PathBuf,
    pool: u64,
    /// The layout of its blocks.
    layout: KvLayout,
    jobs: Jobs,
    link: LinkSlot,
    /// What checksums cover, from the peer's first welcome. It is the same on all connections to the pool.
    sum_of: OnceLock<SumOf>,
    /// Whether a device copies a whole frame by one launch, from the first welcome too.
    is_copied_at_once: OnceLock<bool>,
}

impl RemotePool for ShmPool {
    fn open(&self, open: Open) {
        let shared = Arc::clone(&self.shared);
        self.copier.open("kv-shm-copy", &self.shared.jobs, open, move || run(&shared));
    }

    fn push(&self, frame: Frame) {
        let route = frame.route();
        let num_bytes = frame.pieces.len() * route.piece_bytes();
        let is_small = num_bytes <= self.shared.copy_at_once_bytes && route.host_room_bytes() == 0;
        if is_small && self.shared.jobs.is_idle() {
            // Other threads hold the lock only for moments.
            let slot = self.shared.link.lock();
            // A copy by devices takes long, so only the thread may wait for it.
            if slot.as_ref().is_none_or(|link| !link.memory.is_on_devices()) {
                return self.shared.copy(frame, slot, &mut Staging::default());
            }
        }
        self.shared.jobs.push(frame);
    }

    fn frame_pieces(&self, route: &RouteState) -> usize {
        // The connection's lock would have this thread wait for the copy of a frame.
        match self.shared.is_copied_at_once.get() {
            Some(true) => DEVICE_FRAME_PIECES,
            _ => max_pieces(route.frame_bytes(), route.wire_bytes()),
        }
    }

    fn retire(&self, route: &Arc<RouteState>) {
        self.shared.jobs.retire(route);
        // A copy by devices takes long, and routes are dropped by threads that must not wait for it.
        self.shared.link.retire(route.generation());
    }

    fn is_cold(&self) -> bool {
        // The caller does not wait for a copy either. The thread that has the lock uses the connection.
        self.shared.link.try_lock().is_some_and(|link| link.is_none())
    }

    fn sum_of(&self) -> SumOf {
        *self.shared.sum_of.get().expect("connected")
    }
}

impl Drop for ShmPool {
    fn drop(&mut self) {
        self.copier.end(&self.shared.jobs);
        self.shared.unlink(None);
    }
}

impl Shared {
    /// Ends the connection: `only` this one, or the current one. Returns whether it did.
    fn unlink(&self, only: Option<&Arc<UnixStream>>) -> bool {
        let link = {
            let mut slot = self.link.lock();
            if slot.as_ref().is_none_or(|link| only.is_some_and(|only| !Arc::ptr_eq(only, &link.socket))) {
                return false;
            }
            slot.take()
        };
        let Some(link) = link else { return false };
        let listener = self.end(link, true);
        if only.is_none()
            && let Some(listener) = listener
        {
            // A panic there has been reported by the panic hook.
            let _ = listener.join();
        }
        true
    }

    /// Ends a connection that no thread finds any more. Returns its listener. The memory is unmapped first. Then the socket is
    /// closed, which tells the peer that nothing is written any more. If a device has failed (not `is_sound`), only the
    /// end of this process may tell that.
    fn end(&self, link: Link, is_sound: bool) -> Option<JoinHandle<()>> {
        let Link { socket, memory, grants, listener } = link;
        let is_on_devices = memory.is_on_devices();
        drop(memory);
        if is_on_devices && is_sound {
            // The end of the socket does not prove that a device has stopped.
            for generation in grants.open() {
                let _ = wire::send(&socket, Message::Word(Word::Close(generation)), None);
            }
        }
        let _ = socket.shutdown(Shutdown::Both);
        grants.lost(&self.jobs, "the peer is gone");
        listener
    }

    fn connect(self: &Arc<Self>) -> Result<(), RouteError> {
        let unreachable =
            |error: io::Error| RouteError::Unreachable(format!("{}: {error}", self.path.display()));
        let timeout = Some(self.context.config.connect_timeout);
        let socket = UnixStream::connect(&self.path).map_err(unreachable)?;
        socket.set_read_timeout(timeout).map_err(unreachable)?;
        let layout = self.layout;
        let hello = Message::Hello {
            pool: self.pool,
            layer_bytes: layout.layer_bytes() as u64,
            num_layers: layout.num_layers as u32,
        };
        wire::send(&socket, hello, None).map_err(unreachable)?;
        let memory = match wire::receive(&socket).map_err(unreachable)? {
            Some((Message::Welcome { num_blocks }, Some(descriptor))) => {
                let num_blocks = usize::try_from(num_blocks).unwrap_or(usize::MAX);
                Target::mapped(BlockStorage::from_fd(descriptor, layout, num_blocks).map_err(unreachable)?)
            }
            Some((Message::WelcomeToDevices { num_blocks, num_ranks }, None)) => {
                let mut handles = vec![[0; HANDLE_BYTES]; num_ranks as usize];
                (&socket).read_exact(handles.as_flattened_mut()).map_err(unreachable)?;
                let num_blocks = usize::try_from(num_blocks).unwrap_or(usize::MAX);
                let own = &self.context.storage;
                Target::opened(own, self.open_handle, &handles, layout, num_blocks).map_err(unreachable)?
            }
            Some((Message::Word(Word::OtherPool), _)) => {
                return Err(RouteError::OtherIncarnation(self.path.display().to_string()));
            }
            Some((Message::Word(Word::Refused), _)) => {
                return Err(RouteError::Unreachable(format!("{} refuses to share", self.path.display())));
            }
            _ => return Err(RouteError::Unreachable(format!("{} is no kv socket", self.path.display()))),
        };
        socket.set_read_timeout(None).map_err(unreachable)?;
        self.sum_of.get_or_init(|| SumOf::new(&layout, memory.num_ranks()));
        self.is_copied_at_once.get_or_init(|| memory.is_copied_at_once());
        let socket = Arc::new(socket);
        // Set before the thread starts, because the thread looks for the link.
        let mut slot = self.link.lock();
        let listener = thread::Builder::new().name("kv-shm-listen".into()).spawn({
            let (shared, socket) = (Arc::clone(self), Arc::clone(&socket));
            move || listen(&shared, &socket)
        });
        let listener = listener.map_err(unreachable)?;
        *slot = Some(Link { socket, memory, grants: OpenGrants::default(), listener: Some(listener) });
        info!(path = %self.path.display(), "mapped a peer's kv memory");
        Ok(())
    }

    fn open(self: &Arc<Self>, open: Open) {
        let is_connected = self.link.lock().is_some();
        if !is_connected && let Err(error) = self.connect() {
            open.fail(error);
            return;
        }
        let mut slot = self.link.lock();
        let Some(link) = slot.as_mut() else {
            open.fail(RouteError::Unreachable("the peer is gone".into()));
            return;
        };
        let word = link.grants.wait(Job::Open(open));
        link.say(word);
    }

    fn copy(&self, frame: Frame, mut slot: LinkGuard<'_>, staging: &mut Staging) {
        let route = Arc::clone(frame.route());
        let Some(link) = slot.as_mut() else {
            frame.fail(PushError::Lost("the peer is gone".into()));
            return;
        };
        let Some(active) = route.enter() else {
            frame.fail(PushError::Closed);
            return;
        };
        if !link.grants.is_open(route.generation()) {
            frame.fail(PushError::Revoked);
            return;
        }
        if let Some(piece) = frame.pieces.iter().find(|piece| piece.dst.idx() >= link.memory.num_blocks()) {
            let message = format!("the peer has no block {}", piece.dst);
            frame.fail(PushError::Refused(message));
            return;
        }
        // SAFETY: the sources are final, and the route's guard keeps them. The destinations are granted to this route,
        // its grant stays open while the lock is held, and they are as large as the route's pieces.
        let written = unsafe { link.memory.write(&route, &frame.pieces, staging) };
        match written {
            Ok(pieces) => {
                drop((slot, active));
                frame.done(pieces);
            }
            // The lock is held meanwhile: `Close` is not sent before the device has stopped.
            Err(error) if link.memory.is_settled(route.storage()) => {
                self.context.counters.of(TransportKind::Shm).failed();
                warn!(path = %self.path.display(), %error, "kv not copied: the device failed, and has stopped");
                // The route must be idle before the push is answered: the caller may close the route and wait right after.
                drop((slot, active));
                frame.fail(PushError::Lost(error.to_string()));
            }
            Err(error) => {
                // No thread finds the connection once the lock is free, so none sends `Close`.
                let link = slot.take();
                drop(slot);
                self.context.counters.of(TransportKind::Shm).failed();
                error!(path = %self.path.display(), %error, "device failed while it copied kv and may still do so: the blocks of both sides are kept until this process ends");
                if let Some(link) = link {
                    self.end(link, false);
                }
                // Invariant 3: the route never becomes idle, so its blocks are never freed.
                std::mem::forget(active);
                frame.fail(PushError::Lost(error.to_string()));
            }
        }
    }
}

fn run(shared: &Arc<Shared>) {
    let mut staging = Staging::default();
    while let Some(job) = shared.jobs.next() {
        match job {
            Job::Open(open) => shared.open(open),
            Job::Frame(frame) => shared.copy(frame, shared.link.lock(), &mut staging),
        }
    }
}

fn listen(shared: &Shared, socket: &Arc<UnixStream>) {
    let error = loop {
        match wire::receive(socket) {
            Ok(Some((message, _))) => {
                let mut slot = shared.link.lock();
                let Some(link) = slot.as_mut().filter(|link| Arc::ptr_eq(&link.socket, socket)) else {
                    return;
                };
                let Message::Word(word) = message else { break format!("unexpected {message:?}") };
                match link.grants.hear(word, &shared.jobs) {
                    Ok(answer) => link.say(answer),
                    Err(other) => break format!("unexpected {other:?}"),
                }
            }
            Ok(None) => break "closed by the peer".to_owned(),
            Err(error) => break error.to_string(),
        }
    };
    if shared.unlink(Some(socket)) {
        shared.context.counters.of(TransportKind::Shm).failed();
        warn!(path = %shared.path.display(), %error, "shared-memory connection lost: its frames are written again");
    }
}
