//! Running requests that arrive from another decode worker, or leave for one, for balance. Both workers must grant it. The rule is
//! [`BalanceGrants`]; here are its clock and the call to the worker that the request leaves.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use baton_cluster::{BalanceArrival, BalanceGrants};
use baton_proto::{
    failure_to_status,
    worker::{LetGoRequest, PrefillPeer},
};
use baton_request::{Failure, FailureKind};
use baton_worker::Worker;
use tokio::time::timeout;
use tonic::Status;

/// How long the worker that the request leaves may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What one decode worker has granted.
#[derive(Clone, Debug, Default)]
pub struct BalanceGate {
    grants: Arc<Mutex<BalanceGrants>>,
}

/// A grant for a request that has not arrived yet. Dropped, it is withdrawn: the call was refused, or its router has gone.
struct Arriving<'a> {
    gate: &'a BalanceGate,
    /// `None` after the arrival.
    grant: Option<BalanceArrival>,
}

impl BalanceGate {
    /// Grants that a request arrives at `worker` from `source`, if both agree.
    ///
    /// # Errors
    /// The status with which the call is refused: the request stays where it runs.
    pub async fn arrive(&self, worker: &Worker, source: Option<&PrefillPeer>) -> Result<(), Status> {
        let source = source.ok_or_else(|| Status::invalid_argument("for_balance needs prefix_source"))?;
        // Before the call: two requests that cross each other find each other's arrival, and both stay.
        let granted = self.lock().arrive(Instant::now());
        let granted = granted.map_err(|why| refused(format!("worker {}: {why}", worker.id())))?;
        let mut arriving = Arriving { gate: self, grant: Some(granted) };
        let link = worker.peers().link(&source.address);
        let link =
            link.map_err(|error| Status::invalid_argument(format!("prefix_source.address: {error}")))?;
        let mut client = link.decode_client();
        let request = LetGoRequest { incarnation: source.incarnation };
        match timeout(TIMEOUT, client.let_go(request)).await {
            Ok(Ok(_)) => {
                arriving.grant = None;
                Ok(())
            }
            Ok(Err(status)) => Err(refused(format!("worker {}: {}", source.worker_id, status.message()))),
            Err(_) => Err(refused(format!("worker {} did not answer for {TIMEOUT:?}", source.worker_id))),
        }
    }

    /// Grants that a request leaves `worker`.
    ///
    /// # Errors
    /// The status with which the call is refused: the request stays here.
    pub fn let_go(&self, worker: &Worker, request: &LetGoRequest) -> Result<(), Status> {
        if request.incarnation != worker.incarnation() {
            return Err(refused("it has restarted".into()));
        }
        self.lock().leave(Instant::now()).map_err(|why| refused(why.to_string()))
    }

    fn lock(&self) -> MutexGuard<'_, BalanceGrants> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        if let Some(grant) = self.grant.take() {
            self.gate.lock().withdraw(grant);
        }
    }
}

fn refused(message: String) -> Status {
    failure_to_status(&Failure::new(FailureKind::MigrationRefused, message))
}
