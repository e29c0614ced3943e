//! Lends blocks to a prefill worker that measures the transports to them: a few blocks, for a short time, and only while this
//! worker is not busy.

use std::{sync::Arc, time::Duration};

use baton_engine::HeldBlocks;
use baton_proto::{kv_format_from_proto, kv_format_to_proto, worker as proto};
use baton_tls::Identity;
use baton_transfer::Granted;
use baton_worker::Worker;
use baton_worker_messages::grant_to_proto;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::{Instant, timeout_at},
};
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::Status;

/// How long a worker lends.
pub const LEASE: Duration = Duration::from_secs(10);

/// For each offer: one grant to open a route, and others to measure latency and rate. One further grant of the loan shows
/// which offer a sender chooses.
const GRANTS_PER_OFFER: usize = 15;

/// Lends one loan at a time.
#[derive(Clone)]
pub struct Lender {
    worker: Arc<Worker>,
    only_one: Arc<Semaphore>,
    lease: Duration,
}

/// Lent blocks, until the lease is over or this is dropped. Then the grants are revoked, and the blocks return once no writer
/// can reach them.
pub struct Loan {
    message: Option<proto::Loan>,
    /// Closed when the loan has ended.
    ended: oneshot::Receiver<()>,
}

/// What a loan takes.
struct Lent {
    _granted: Vec<Granted<Arc<HeldBlocks>>>,
    _permit: OwnedSemaphorePermit,
    /// The worker does not exit before the loan has ended.
    _busy: TaskTrackerToken,
}

impl Lender {
    /// Lends blocks of `worker`. After the time `lease` the grants of a loan are revoked.
    pub fn new(worker: Arc<Worker>, lease: Duration) -> Lender {
        Lender { worker, only_one: Arc::new(Semaphore::new(1)), lease }
    }

    /// Reserves blocks and grants them. With TLS, only this borrower may write into them.
    ///
    /// # Errors
    /// `UNAVAILABLE` when the worker is busy, `FAILED_PRECONDITION` when this worker cannot use the borrower's KV.
    pub async fn lend(
        &self,
        request: proto::LendRequest,
        borrower: Option<Identity>,
    ) -> Result<Loan, Status> {
        let theirs = request.kv_format.ok_or_else(|| Status::invalid_argument("kv_format is missing"))?;
        let theirs =
            kv_format_from_proto(theirs).map_err(|error| Status::invalid_argument(error.to_string()))?;
        if let Some(difference) = self.worker.kv_format().difference(&theirs) {
            return Err(Status::failed_precondition(format!("the workers' KV formats differ: {difference}")));
        }
        let permit = Arc::clone(&self.only_one).try_acquire_owned();
        let permit = permit.map_err(|_| Status::unavailable("another measurement is running"))?;
        let reservation = self.worker.reserve_scratch(request.max_blocks as usize).await?;
        let blocks = reservation.blocks().to_vec();
        let (slot, held) = reservation.split();
        // A measurement decodes nothing.
        drop(slot);
        let held = Arc::new(held);
        let receiver = &self.worker.data_plane().receiver;
        let num_grants = GRANTS_PER_OFFER * receiver.offers().len() + 1;
        let granted: Vec<_> =
            (0..num_grants).map(|_| receiver.grant(blocks.clone(), Arc::clone(&held))).collect();
        if let Some(borrower) = borrower {
            granted.iter().for_each(|granted| granted.bind(borrower));
        }
        let grants = granted.iter().map(|granted| baton_handoff::Grant {
            generation: granted.generation(),
            secret: granted.access_key().secret,
            num_cached_blocks: 0,
            block_ids: blocks.clone(),
            offers: granted.offers().to_vec(),
        });
        let message = proto::Loan {
            grants: grants.map(grant_to_proto).collect(),
            kv_format: Some(kv_format_to_proto(self.worker.kv_format())),
        };
        let lent = Lent { _granted: granted, _permit: permit, _busy: self.worker.lifecycle().token() };
        let (mut end, ended) = oneshot::channel();
        // Invariant 6: the runtime's timer ends the loan, whatever the borrower and the engine do. The stream of a borrower
        // that reads nothing is not polled.
        let until = Instant::now() + self.lease;
        tokio::spawn(async move {
            let _ = timeout_at(until, end.closed()).await;
            drop(lent);
            drop(end);
        });
        Ok(Loan { message: Some(message), ended })
    }
}

impl Loan {
    /// The next message of the stream: the grants, and then the end of the stream when the lease is over.
    pub async fn next(mut self) -> Option<(Result<proto::Loan, Status>, Loan)> {
        if let Some(message) = self.message.take() {
            return Some((Ok(message), self));
        }
        let _ = self.ended.await;
        None
    }
}
