//! A listening socket: one thread accepts, and each connection gets one of its own.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tracing::warn;

/// A socket that peers connect to.
pub(crate) trait Listen: AsRawFd + Send + Sync + 'static {
    /// One peer's connection.
    type Stream;

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
pub(crate) trait Service: Send + Sync + 'static {
    type Listener: Listen;
    /// What a connection's thread shares with whoever ends it.
    type Connection: Send + Sync + 'static;

    /// Names of the threads that accept and that serve.
    const THREADS: (&str, &str);

    fn connection(&self, stream: <Self::Listener as Listen>::Stream) -> Self::Connection;

    /// Until the connection ends.
    fn serve(&self, connection: &Arc<Self::Connection>);
}

/// Accepts until stopped.
pub(crate) struct Acceptor<S: Service> {
    shared: Arc<Shared<S>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared<S: Service> {
    service: Arc<S>,
    listener: S::Listener,
    max_connections: usize,
    is_stopping: AtomicBool,
    connections: Mutex<Connections<S>>,
}

/// With the thread that serves each.
type Connections<S> = Vec<(Arc<<S as Service>::Connection>, JoinHandle<()>)>;

impl<S: Service> Acceptor<S> {
    pub(crate) fn start(
        service: Arc<S>,
        listener: S::Listener,
        max_connections: usize,
    ) -> io::Result<Acceptor<S>> {
        let shared = Arc::new(Shared {
            service,
            listener,
            max_connections,
            is_stopping: AtomicBool::new(false),
            connections: Mutex::default(),
        });
        let thread = thread::Builder::new().name(S::THREADS.0.into()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.accept()
        })?;
        Ok(Acceptor { shared, thread: Some(thread) })
    }

    /// Accepts no more; the caller ends the connections there are.
    pub(crate) fn stop(&mut self) -> Connections<S> {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        // SAFETY: a plain system call on a descriptor that `shared` owns; wakes the thread.
        unsafe { libc::shutdown(self.shared.listener.as_raw_fd(), libc::SHUT_RDWR) };
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
        std::mem::take(&mut *self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<S: Service> Shared<S> {
    fn accept(&self) {
        loop {
            let accepted = self.listener.accept_one();
            if self.is_stopping.load(Ordering::SeqCst) {
                return;
            }
            let stream = match accepted {
                Ok(stream) => stream,
                Err(error) => {
                    warn!(thread = S::THREADS.0, %error, "cannot accept a kv peer");
                    // Out of descriptors, mostly: others must close first.
                    thread::sleep(Duration::from_millis(50));
                    continue;
                }
            };
            let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
            connections.retain(|(_, thread)| !thread.is_finished());
            if connections.len() >= self.max_connections {
                warn!(thread = S::THREADS.0, max_connections = self.max_connections, "too many kv peers");
                continue;
            }
            let connection = Arc::new(self.service.connection(stream));
            let thread = thread::Builder::new().name(S::THREADS.1.into()).spawn({
                let (service, connection) = (Arc::clone(&self.service), Arc::clone(&connection));
                move || service.serve(&connection)
            });
            match thread {
                Ok(thread) => connections.push((connection, thread)),
                Err(error) => warn!(thread = S::THREADS.1, %error, "cannot start a thread for a kv peer"),
            }
        }
    }
}
