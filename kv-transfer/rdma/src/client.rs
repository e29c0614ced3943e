//! The prefill worker's end of one pool. One thread posts writes and waits for them, and one thread
//! listens to the control connection.
//!
//! `Close` is sent when the last write under a grant has ended. A write that fails, or does not end in time, ends
//! the whole connection. First its agent is dropped, so that no device reads or writes for this side any more. Then
//! the frames in flight fail, or they are written once more on a new connection, which opens their grants again.
//! A connection that has no write and no open grant for a while ends, too. The next job opens another.

use std::{
    io,
    path::Path,
    sync::{Arc, Mutex, OnceLock},
    task::Poll,
};

use baton_handoff::{RouteError, TransportKind, TransportOffer};
use baton_kv_cache::{BlockStorage, KvLayout};
use baton_transfer::{
    RemotePool, SenderContext, SendingTransport,
    checksum::SumOf,
    sender::{Frame, Job, JobThread, Jobs, Open, Pace, RouteState},
};
use tracing::debug;

use super::{
    connection::{Broken, Connection},
    link::{GONE, Shared},
    nixl::{self, Nixl},
};

/// Writes through NIXL.
pub struct RdmaSending {
    nixl: Nixl,
}

impl RdmaSending {
    /// `nixl` is NIXL's C library or its folder. `None`: the system's loader finds it.
    ///
    /// # Errors
    /// When NIXL is missing, or cannot use the memory of `storage`.
    pub fn start(storage: &Arc<BlockStorage>, nixl: Option<&Path>) -> io::Result<RdmaSending> {
        Ok(RdmaSending { nixl: nixl::start(nixl, storage).map_err(io::Error::other)? })
    }
}

impl SendingTransport for RdmaSending {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn pool(
        &self,
        context: &Arc<SenderContext>,
        offer: &TransportOffer,
        layout: &KvLayout,
    ) -> Arc<dyn RemotePool> {
        let TransportOffer::Rdma { address, pool } = offer else { unreachable!("an offer of rdma") };
        let shared = Arc::new(Shared {
            context: Arc::clone(context),
            nixl: self.nixl.clone(),
            address: address.clone(),
            pool: *pool,
            layout: *layout,
            jobs: Jobs::default(),
            link: Mutex::default(),
            sum_of: OnceLock::new(),
        });
        Arc::new(RdmaPool { shared, thread: JobThread::default() })
    }
}

/// One pool of another process, written through NIXL.
struct RdmaPool {
    shared: Arc<Shared>,
    thread: JobThread,
}

impl RemotePool for RdmaPool {
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

impl Drop for RdmaPool {
    fn drop(&mut self) {
        self.thread.end(&self.shared.jobs);
    }
}

fn run(shared: &Arc<Shared>) {
    let mut connection: Option<Connection> = None;
    let mut pace = Pace::default();
    loop {
        let job = match &connection {
            None => Poll::Ready(shared.jobs.next()),
            Some(connection) if !connection.has_room() => Poll::Pending,
            Some(connection) if connection.num_flights() > 0 => shared.jobs.poll(),
            Some(_) => shared.jobs.next_within(shared.context.config.idle_timeout),
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
                            // The peer refused this grant. It may accept other grants.
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
            Poll::Pending if connection.as_ref().is_some_and(Connection::is_idle) => {
                debug!(address = %shared.address, "rdma connection closed: no handoff uses it");
                end(&mut connection, &Broken::Lost("idle".to_owned()));
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
