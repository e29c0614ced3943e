//! A listening socket. One thread accepts connections, and each connection gets a thread of its own.
//! What connections say is not known here.

use std::{
    fmt::Display,
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tracing::warn;

use super::config::ReceiverConfig;

/// A socket that peers connect to.
pub trait Listen: AsRawFd + Send + Sync + 'static {
    /// One peer's connection.
    type Stream;

    /// Waits for a peer.
    fn accept_one(&self) -> io::Result<Self::Stream>;
}

impl Listen for TcpListener {
    type Stream = (TcpStream, SocketAddr);

    fn accept_one(&self) -> io::Result<(TcpStream, SocketAddr)> {
        self.accept()
    }
}

impl Listen for UnixListener {
    type Stream = UnixStream;

    fn accept_one(&self) -> io::Result<UnixStream> {
        self.accept().map(|(stream, _)| stream)
    }
}

/// How connections are served.
pub trait Service: Send + Sync + 'static {
    /// The socket.
    type Listener: Listen;
    /// What a connection's thread shares with the caller of [`hang_up`](Service::hang_up).
    type Connection: Send + Sync + 'static;

    /// Names of the threads that accept and that serve.
    const THREADS: (&str, &str);

    /// Makes a connection of an accepted stream.
    fn connection(&self, stream: <Self::Listener as Listen>::Stream) -> Self::Connection;

    /// Makes `serve` end soon.
    fn hang_up(connection: &Self::Connection);

    /// Serves the connection until it ends. The peer is unauthenticated until the service
    /// [admits](PeerAdmission::admit) it.
    fn serve(&self, connection: &Arc<Self::Connection>, admission: &PeerAdmission);
}

/// Whether a connection's peer is known to have a grant.
pub struct PeerAdmission {
    is_admitted: AtomicBool,
    gate: Arc<Gate>,
}

/// What all connections of one listener share.
struct Gate {
    /// The listener accepts no peers any more, and its connections are ending.
    is_stopping: AtomicBool,
    max_admitted: usize,
    num_admitted: AtomicUsize,
    handshake_timeout: Duration,
    rejections: Mutex<Rejections>,
}

/// Limits how many rejections are logged: unauthenticated peers must not fill the log.
#[derive(Default)]
struct Rejections {
    last: Option<Instant>,
    num_silent: u64,
}

/// The log has at most one rejection in this time.
const LOG_EVERY: Duration = Duration::from_secs(1);

impl PeerAdmission {
    /// Admits a peer that has shown an access key. `false`: the limit of admitted peers is reached.
    pub fn admit(&self) -> bool {
        let has_room = |num: usize| (num < self.gate.max_admitted).then_some(num + 1);
        if self.gate.num_admitted.fetch_update(Ordering::SeqCst, Ordering::SeqCst, has_room).is_err() {
            let max_connections = self.gate.max_admitted;
            self.gate.reject(None, &format!("{max_connections} peers are connected, which is the limit"));
            return false;
        }
        self.is_admitted.store(true, Ordering::SeqCst);
        true
    }

    /// Whether the peer has shown an access key.
    pub fn is_admitted(&self) -> bool {
        self.is_admitted.load(Ordering::SeqCst)
    }

    /// Whether the listener is stopping and ends its connections.
    pub fn is_stopping(&self) -> bool {
        self.gate.is_stopping.load(Ordering::SeqCst)
    }

    /// Logs why an unauthenticated peer was rejected, unless another rejection was logged just now.
    pub fn reject(&self, peer: &dyn Display, error: &io::Error) {
        match error.kind() {
            io::ErrorKind::TimedOut => {
                let seconds = self.gate.handshake_timeout.as_secs_f32();
                self.gate.reject(Some(peer), &format!("no valid access key within {seconds} s"));
            }
            _ => self.gate.reject(Some(peer), error),
        }
    }
}

impl Gate {
    fn reject(&self, peer: Option<&dyn Display>, why: &dyn Display) {
        let mut rejections = self.rejections.lock().unwrap_or_else(PoisonError::into_inner);
        if rejections.last.is_some_and(|last| last.elapsed() < LOG_EVERY) {
            rejections.num_silent += 1;
            return;
        }
        let num_others = std::mem::take(&mut rejections.num_silent);
        rejections.last = Some(Instant::now());
        drop(rejections);
        warn!(peer = peer.map(tracing::field::display), num_others, "kv connection rejected: {why}");
    }
}

impl Drop for PeerAdmission {
    fn drop(&mut self) {
        if self.is_admitted() {
            self.gate.num_admitted.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Accepts until it is dropped or [stopped](Self::stop). The drop hangs up on every peer and waits for its thread.
///
/// An unauthenticated peer costs one thread and one descriptor for a bounded time, and their number is bounded: a new
/// one replaces the oldest. A peer with a grant shows its access key within three round trips. So only a flood that
/// brings the maximum of new peers within that time keeps it out.
pub struct Acceptor<S: Service> {
    shared: Arc<Shared<S>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared<S: Service> {
    service: Arc<S>,
    listener: S::Listener,
    max_unauthenticated: usize,
    gate: Arc<Gate>,
    connections: Mutex<Vec<Served<S>>>,
}

/// A connection and its thread, oldest first.
struct Served<S: Service> {
    connection: Arc<S::Connection>,
    admission: Arc<PeerAdmission>,
    is_hung_up: bool,
    thread: JoinHandle<()>,
}

/// Connections, each with the thread that serves it.
type Connections<S> = Vec<(Arc<<S as Service>::Connection>, JoinHandle<()>)>;

impl<S: Service> Acceptor<S> {
    /// Accepts peers of `listener` and serves them.
    pub fn start(service: Arc<S>, listener: S::Listener, config: &ReceiverConfig) -> io::Result<Acceptor<S>> {
        let gate = Arc::new(Gate {
            is_stopping: AtomicBool::new(false),
            max_admitted: config.max_connections,
            num_admitted: AtomicUsize::new(0),
            handshake_timeout: config.handshake_timeout,
            rejections: Mutex::default(),
        });
        let shared = Arc::new(Shared {
            service,
            listener,
            max_unauthenticated: config.max_unauthenticated.max(1),
            gate,
            connections: Mutex::default(),
        });
        let thread = thread::Builder::new().name(S::THREADS.0.into()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.accept()
        })?;
        Ok(Acceptor { shared, thread: Some(thread) })
    }

    /// Stops accepting. The caller ends the connections that are returned.
    pub fn stop(&mut self) -> Connections<S> {
        self.shared.gate.is_stopping.store(true, Ordering::SeqCst);
        // SAFETY: a plain system call on a descriptor that `shared` owns; wakes the thread.
        unsafe { libc::shutdown(self.shared.listener.as_raw_fd(), libc::SHUT_RDWR) };
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
        let served = std::mem::take(&mut *self.shared.connections());
        served.into_iter().map(|served| (served.connection, served.thread)).collect()
    }
}

impl<S: Service> Drop for Acceptor<S> {
    fn drop(&mut self) {
        let connections = self.stop();
        connections.iter().for_each(|(connection, _)| S::hang_up(connection));
        for (_, thread) in connections {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl<S: Service> Shared<S> {
    fn connections(&self) -> MutexGuard<'_, Vec<Served<S>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(&self) {
        loop {
            let accepted = self.listener.accept_one();
            if self.gate.is_stopping.load(Ordering::SeqCst) {
                return;
            }
            match accepted {
                Ok(stream) => self.take(stream),
                Err(error) => {
                    self.gate.reject(None, &error);
                    // The usual cause is a lack of descriptors: other connections must close first.
                    sweep(&mut self.connections());
                    thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }

    fn take(&self, stream: <S::Listener as Listen>::Stream) {
        let mut connections = self.connections();
        sweep(&mut connections);
        let is_unauthenticated = |served: &Served<S>| !served.admission.is_admitted();
        if connections.iter().filter(|served| is_unauthenticated(served)).count()
            >= 2 * self.max_unauthenticated
        {
            // Connections that were hung up on have not ended yet.
            let max_unauthenticated = self.max_unauthenticated;
            let why = format!("{max_unauthenticated} other peers have not shown an access key yet");
            return self.gate.reject(None, &why);
        }
        let mut unauthenticated =
            connections.iter_mut().filter(|served| is_unauthenticated(served) && !served.is_hung_up);
        if let Some(oldest) = unauthenticated.next()
            && unauthenticated.count() + 1 >= self.max_unauthenticated
        {
            S::hang_up(&oldest.connection);
            oldest.is_hung_up = true;
        }
        let connection = Arc::new(self.service.connection(stream));
        let admission =
            Arc::new(PeerAdmission { is_admitted: AtomicBool::new(false), gate: Arc::clone(&self.gate) });
        let thread = thread::Builder::new().name(S::THREADS.1.into()).spawn({
            let (service, connection) = (Arc::clone(&self.service), Arc::clone(&connection));
            let admission = Arc::clone(&admission);
            move || service.serve(&connection, &admission)
        });
        match thread {
            Ok(thread) => connections.push(Served { connection, admission, is_hung_up: false, thread }),
            Err(error) => self.gate.reject(None, &format!("cannot start a thread for it: {error}")),
        }
    }
}

/// Drops the connections that have ended, and with them their descriptors.
fn sweep<S: Service>(connections: &mut Vec<Served<S>>) {
    connections.retain(|served| !served.thread.is_finished());
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::fd::RawFd};

    use super::*;

    /// Accepts one stream. Then there are no descriptors.
    struct OneStream {
        stream: Mutex<Option<UnixStream>>,
        socket: UnixStream,
    }

    impl AsRawFd for OneStream {
        fn as_raw_fd(&self) -> RawFd {
            self.socket.as_raw_fd()
        }
    }

    impl Listen for OneStream {
        type Stream = UnixStream;

        fn accept_one(&self) -> io::Result<UnixStream> {
            let stream = self.stream.lock().unwrap().take();
            stream.ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))
        }
    }

    /// Its connections end at once.
    struct EndsAtOnce;

    impl Service for EndsAtOnce {
        type Listener = OneStream;
        type Connection = UnixStream;

        const THREADS: (&str, &str) = ("test-accept", "test-serve");

        fn connection(&self, stream: UnixStream) -> UnixStream {
            stream
        }

        fn hang_up(_: &UnixStream) {}

        fn serve(&self, _: &Arc<UnixStream>, _: &PeerAdmission) {}
    }

    #[test]
    fn ended_connections_free_their_descriptors_when_there_are_none() {
        let (mut peer, accepted) = UnixStream::pair().unwrap();
        let (socket, _other) = UnixStream::pair().unwrap();
        let listener = OneStream { stream: Mutex::new(Some(accepted)), socket };
        let acceptor = Acceptor::start(Arc::new(EndsAtOnce), listener, &ReceiverConfig::default()).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        assert_eq!(peer.read(&mut [0]).unwrap(), 0, "its descriptor is closed");
        drop(acceptor);
    }
}
