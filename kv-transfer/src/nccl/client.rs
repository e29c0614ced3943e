//! The prefill worker's end of one pool, and the thread that keeps its connection: made when something is to be sent,
//! made anew when it has ended.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use baton_handoff::{AccessKey, RouteError};
use baton_kv_cache::{BlockStorage, KvLayout};

use super::{
    communicators::{Communicators, MAX_COMMUNICATORS},
    connection::Connection,
    fabric::{Fabric, FabricError, Reached},
};
use crate::{
    checksum::SumOf,
    sender::{Frame, JobThread, Jobs, Open, Pace, Peer, RouteState, SenderContext},
};

/// How often an idle thread looks whether its peer is still there.
const IDLE: Duration = Duration::from_millis(250);

/// What every peer of a sender shares.
pub(crate) struct NcclSender {
    pub(super) fabric: Arc<dyn Fabric>,
    /// The source pool.
    pub(super) pool: Reached,
    pub(super) communicators: Arc<Communicators>,
}

impl NcclSender {
    /// # Errors
    /// When the fabric cannot read `storage`.
    pub(crate) fn new(
        fabric: Arc<dyn Fabric>,
        storage: &Arc<BlockStorage>,
    ) -> Result<NcclSender, FabricError> {
        let pool = fabric.reach(storage)?;
        Ok(NcclSender { fabric, pool, communicators: Communicators::new(MAX_COMMUNICATORS) })
    }
}

/// One pool of another process, written through NCCL.
pub(crate) struct NcclPeer {
    shared: Arc<Shared>,
    thread: JobThread,
}

pub(super) struct Shared {
    pub(super) context: Arc<SenderContext>,
    pub(super) nccl: Arc<NcclSender>,
    pub(super) address: String,
    pub(super) pool: u64,
    /// Of its blocks.
    pub(super) layout: KvLayout,
    pub(super) jobs: Jobs,
    pub(super) is_connected: AtomicBool,
}

impl NcclPeer {
    pub(crate) fn new(
        context: Arc<SenderContext>,
        nccl: Arc<NcclSender>,
        address: String,
        pool: u64,
        layout: KvLayout,
    ) -> NcclPeer {
        let (jobs, is_connected) = (Jobs::default(), AtomicBool::new(false));
        let shared = Shared { context, nccl, address, pool, layout, jobs, is_connected };
        NcclPeer { shared: Arc::new(shared), thread: JobThread::default() }
    }
}

impl Peer for NcclPeer {
    fn open(&self, open: Open) {
        let shared = Arc::clone(&self.shared);
        self.thread.open("kv-nccl-send", &self.shared.jobs, open, move || run(&shared));
    }

    fn push(&self, frame: Frame) {
        self.shared.jobs.push(frame);
    }

    /// What was announced is sent: the peer has begun to receive it.
    fn retire(&self, route: &Arc<RouteState>) {
        self.shared.jobs.retire(route);
    }

    fn is_cold(&self) -> bool {
        !self.shared.is_connected.load(Ordering::SeqCst)
    }

    /// It has no pools on several devices.
    fn sum_of(&self) -> SumOf {
        SumOf::Pieces
    }
}

impl Drop for NcclPeer {
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
            Some(connection) if connection.is_idle() => shared.jobs.next_within(IDLE),
            Some(connection) if connection.has_room() => shared.jobs.poll(),
            Some(_) => Poll::Pending,
        };
        match job {
            Poll::Ready(None) => break,
            Poll::Ready(Some(job)) => match connected(shared, &mut connection, job.access_key()) {
                Ok(connection) => connection.begin(job),
                Err(error) => {
                    job.fail(&error);
                    // Other grants may be better; else they would all wait for the same.
                    if !matches!(error, RouteError::OtherIncarnation(_)) {
                        shared.jobs.fail_all(&error);
                    }
                }
            },
            Poll::Pending => {}
        }
        let Some(some) = &mut connection else { continue };
        match some.advance() {
            Err(why) => end(&mut connection, &why.to_string()),
            Ok(true) => pace.moved(),
            Ok(false) if some.is_idle() => {}
            Ok(false) => pace.wait(),
        }
    }
    end(&mut connection, "the sender is shut down");
}

/// The present connection, or a new one, for which an access key is shown.
fn connected<'a>(
    shared: &Arc<Shared>,
    connection: &'a mut Option<Connection>,
    access_key: AccessKey,
) -> Result<&'a mut Connection, RouteError> {
    // What has ended unnoticed, or must make room for another peer's.
    if connection.as_ref().is_some_and(|connection| connection.is_idle() && !connection.begins()) {
        end(connection, "the peer is gone");
    }
    if connection.is_none() {
        *connection = Some(Connection::open(shared, access_key)?);
    }
    Ok(connection.as_mut().expect("there, or made just now"))
}

fn end(connection: &mut Option<Connection>, why: &str) {
    if let Some(connection) = connection.take() {
        connection.end(why);
    }
}
