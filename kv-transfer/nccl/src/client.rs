//! The prefill worker's end of one pool, and the thread that keeps its connection. It connects for the first job, and
//! again when the connection has ended.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use baton_handoff::{AccessKey, RouteError, TransportKind, TransportOffer};
use baton_kv_cache::{BlockStorage, KvLayout};
use baton_transfer::{
    RemotePool, SenderContext, SendingTransport,
    checksum::SumOf,
    sender::{Frame, JobThread, Jobs, Open, Pace, RouteState},
};

use super::{
    connection::Connection,
    cuda,
    fabric::Fabric,
    pool::{NcclSender, Shared},
};

/// How often an idle thread checks whether its peer is still connected.
const IDLE: Duration = Duration::from_millis(250);

/// Writes through NCCL.
pub struct NcclSending {
    sender: Arc<NcclSender>,
}

impl NcclSending {
    /// `library` is NCCL's library or its folder. `None`: the system's loader finds it.
    ///
    /// # Errors
    /// When NCCL or a device is missing, or `storage` is on several devices.
    pub fn start(storage: &Arc<BlockStorage>, library: Option<&Path>) -> io::Result<NcclSending> {
        cuda::refuse_divided(storage)?;
        NcclSending::over(cuda::start(library, storage)?, storage)
    }

    /// Uses another fabric than NCCL.
    ///
    /// # Errors
    /// When the fabric cannot read `storage`.
    pub fn over(fabric: Arc<dyn Fabric>, storage: &Arc<BlockStorage>) -> io::Result<NcclSending> {
        Ok(NcclSending { sender: Arc::new(NcclSender::new(fabric, storage).map_err(io::Error::other)?) })
    }
}

impl SendingTransport for NcclSending {
    fn kind(&self) -> TransportKind {
        TransportKind::Nccl
    }

    fn pool(
        &self,
        context: &Arc<SenderContext>,
        offer: &TransportOffer,
        layout: &KvLayout,
    ) -> Arc<dyn RemotePool> {
        let TransportOffer::Nccl { address, pool } = offer else { unreachable!("an offer of nccl") };
        let shared = Arc::new(Shared {
            context: Arc::clone(context),
            nccl: Arc::clone(&self.sender),
            address: address.clone(),
            pool: *pool,
            layout: *layout,
            jobs: Jobs::default(),
            is_connected: AtomicBool::new(false),
        });
        Arc::new(NcclPool { shared, thread: JobThread::default() })
    }
}

/// One pool of another process, written through NCCL.
struct NcclPool {
    shared: Arc<Shared>,
    thread: JobThread,
}

impl RemotePool for NcclPool {
    fn open(&self, open: Open) {
        let shared = Arc::clone(&self.shared);
        self.thread.open("kv-nccl-send", &self.shared.jobs, open, move || run(&shared));
    }

    fn push(&self, frame: Frame) {
        self.shared.jobs.push(frame);
    }

    /// Announced groups are still sent, because the peer has posted their receives.
    fn retire(&self, route: &Arc<RouteState>) {
        self.shared.jobs.retire(route);
    }

    fn is_cold(&self) -> bool {
        !self.shared.is_connected.load(Ordering::SeqCst)
    }

    /// NCCL pools are never on several devices.
    fn sum_of(&self) -> SumOf {
        SumOf::Pieces
    }
}

impl Drop for NcclPool {
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
                    // A peer that refused this grant may accept other grants. After other errors all jobs fail, because
                    // each would wait for the same timeout.
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

/// The current connection, or a new one, which shows the access key.
fn connected<'a>(
    shared: &Arc<Shared>,
    connection: &'a mut Option<Connection>,
    access_key: AccessKey,
) -> Result<&'a mut Connection, RouteError> {
    // End a connection that is lost, or that must give up its communicator.
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
