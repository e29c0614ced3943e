//! The prefill worker's end of one pool: a thread that posts writes and waits for them, and one that
//! listens to the control connection.
//!
//! A grant is closed when the last write under it has ended, and only then is `Close` said. A write that
//! fails, or does not end in time, takes the whole connection down: the agent first, so that no device
//! reads from or writes for this side any more, then the frames that were under way are answered, or written once
//! more on a new connection, for which their grants are opened again.

use std::{
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    task::Poll,
};

use baton_handoff::RouteError;
use baton_kv_cache::KvLayout;
use tracing::warn;

use super::{
    connection::{Broken, Connection},
    nixl::Nixl,
    wire::Message,
};
use crate::{
    checksum::SumOf,
    sender::{Frame, Job, JobThread, Jobs, Open, OpenGrants, Pace, Peer, RouteState, SenderContext},
    tcp::socket,
    word::Word,
};

/// Why a connection has ended that did so by itself.
pub(super) const GONE: &str = "the peer is gone";

/// One pool of another process, written through NIXL.
pub(crate) struct RdmaPeer {
    shared: Arc<Shared>,
    thread: JobThread,
}

pub(super) struct Shared {
    pub(super) context: Arc<SenderContext>,
    pub(super) nixl: Nixl,
    pub(super) address: String,
    pub(super) pool: u64,
    /// Of its blocks.
    pub(super) layout: KvLayout,
    pub(super) jobs: Jobs,
    /// Of the present connection.
    link: Mutex<Option<Link>>,
    /// As the peer has said in its first welcome: it is the same pool in all.
    pub(super) sum_of: OnceLock<SumOf>,
}

/// The control connection, and the grants that are open through it.
pub(super) struct Link {
    pub(super) socket: Arc<TcpStream>,
    pub(super) grants: OpenGrants,
}

impl RdmaPeer {
    pub(crate) fn new(
        context: Arc<SenderContext>,
        nixl: Nixl,
        address: String,
        pool: u64,
        layout: KvLayout,
    ) -> RdmaPeer {
        let (jobs, link, sum_of) = (Jobs::default(), Mutex::default(), OnceLock::new());
        let shared = Shared { context, nixl, address, pool, layout, jobs, link, sum_of };
        RdmaPeer { shared: Arc::new(shared), thread: JobThread::default() }
    }
}

impl Peer for RdmaPeer {
    fn open(&self, open: Open) {
        let shared = Arc::clone(&self.shared);
        self.thread.open("kv-rdma-write", &self.shared.jobs, open, move || run(&shared));
    }

    fn push(&self, frame: Frame) {
        self.shared.jobs.push(frame);
    }

    fn retire(&self, route: &Arc<RouteState>) {
        self.shared.jobs.retire(route);
        if let Some(link) = self.shared.link().as_mut() {
            let word = link.grants.close(route.generation());
            link.say(word);
        }
    }

    fn is_cold(&self) -> bool {
        self.shared.link().is_none()
    }

    fn sum_of(&self) -> SumOf {
        *self.shared.sum_of.get().expect("connected")
    }
}

impl Drop for RdmaPeer {
    fn drop(&mut self) {
        self.thread.end(&self.shared.jobs);
    }
}

impl Link {
    pub(super) fn say(&self, word: Option<Word>) {
        if let Some(word) = word
            && let Err(error) = socket::send_at_once(&self.socket, &Message::Word(word).encode())
        {
            // The peer learns it by the end of the connection. The listener sees that, too.
            warn!(?word, %error, "cannot speak to an rdma peer: disconnecting");
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    pub(super) fn link(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the link of this socket away, and says whether there was one.
    pub(super) fn unlink(&self, socket: &Arc<TcpStream>) -> bool {
        let link = {
            let mut slot = self.link();
            if slot.as_ref().is_none_or(|link| !Arc::ptr_eq(socket, &link.socket)) {
                return false;
            }
            slot.take()
        };
        let _ = socket.shutdown(Shutdown::Both);
        if let Some(link) = link {
            link.grants.lost(&self.jobs, GONE);
        }
        true
    }
}

fn run(shared: &Arc<Shared>) {
    let mut connection: Option<Connection> = None;
    let mut pace = Pace::default();
    loop {
        let job = match &connection {
            Some(connection) if !connection.has_room() => Poll::Pending,
            Some(connection) if connection.num_flights() > 0 => shared.jobs.poll(),
            _ => Poll::Ready(shared.jobs.next()),
        };
        match job {
            Poll::Ready(None) => break,
            Poll::Ready(Some(job)) => {
                if connection.as_ref().is_none_or(|connection| !connection.is_linked()) {
                    end(&mut connection, &Broken::Lost(GONE.to_owned()));
                    match Connection::open(shared, job.access_key()) {
                        Ok(new) => connection = Some(new),
                        Err(error) => {
                            job.fail(&error);
                            // Other grants may be better.
                            if !matches!(error, RouteError::OtherIncarnation(_)) {
                                shared.jobs.fail_all(&error);
                            }
                            continue;
                        }
                    }
                }
                match job {
                    Job::Open(open) => shared.say_open(open),
                    Job::Frame(frame) => connection.as_mut().expect("opened above").post(frame),
                }
            }
            Poll::Pending => {}
        }
        let Some(some) = &mut connection else { continue };
        match some.land() {
            Err(broken) => end(&mut connection, &broken),
            Ok(0) => pace.wait(),
            Ok(_) => pace.moved(),
        }
    }
    end(&mut connection, &Broken::Silent("the sender is shut down".into()));
}

fn end(connection: &mut Option<Connection>, broken: &Broken) {
    if let Some(connection) = connection.take() {
        connection.end(broken);
    }
}

impl Shared {
    fn say_open(&self, open: Open) {
        let mut slot = self.link();
        match slot.as_mut() {
            Some(link) => {
                let word = link.grants.wait(Job::Open(open));
                link.say(word);
            }
            None => self.jobs.open_again(open, GONE),
        }
    }
}
