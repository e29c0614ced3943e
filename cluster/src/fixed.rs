//! Discovery by a fixed list of addresses: each is asked who it is, again and again.
//!
//! An address that does not answer changes nothing: its worker stays known as it was. One that answers
//! with a new incarnation replaces it.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use baton_proto::worker::{InfoRequest, worker_client::WorkerClient};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use crate::{
    DiscoveryError, Membership, WorkerId, WorkerRecord,
    backoff::Backoff,
    members::{Publisher, Roster},
};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// How soon a restarted worker is noticed.
const ASK_AGAIN: Duration = Duration::from_secs(1);

type Shared = Arc<Mutex<(Roster, Publisher)>>;

pub(crate) fn watch(
    workers: &[String],
    stop: CancellationToken,
) -> Result<(Membership, JoinHandle<()>), DiscoveryError> {
    if workers.is_empty() {
        let message = "static discovery needs at least one worker, http://host:port";
        return Err(DiscoveryError::Config(message.into()));
    }
    let publisher = Publisher::new();
    let members = publisher.subscribe();
    let shared: Shared = Arc::new(Mutex::new((Roster::default(), publisher)));
    let mut pollers = JoinSet::new();
    for address in workers {
        let endpoint = Endpoint::from_shared(address.clone())
            .map_err(|error| DiscoveryError::Config(format!("worker is {address:?}: {error}")))?
            .connect_timeout(ANSWER_TIMEOUT)
            .timeout(ANSWER_TIMEOUT);
        pollers.spawn(poll(endpoint.connect_lazy(), address.clone(), shared.clone()));
    }
    let task = tokio::spawn(async move {
        stop.cancelled().await;
        pollers.shutdown().await;
    });
    Ok((members, task))
}

/// Asks one address for ever.
async fn poll(channel: Channel, address: String, shared: Shared) {
    let mut backoff = Backoff::new(ASK_AGAIN);
    let mut current: Option<WorkerId> = None;
    let mut complained = false;
    loop {
        let wait = match ask(&channel).await {
            Ok(record) => {
                complained = false;
                backoff.reset();
                let (roster, publisher) = &mut *shared.lock().unwrap_or_else(PoisonError::into_inner);
                // Another worker lives at the address now.
                if let Some(previous) = current.replace(record.id.clone()).filter(|id| *id != record.id) {
                    roster.remove(&previous);
                }
                roster.insert(record);
                publisher.publish(roster);
                ASK_AGAIN
            }
            Err(problem) => {
                if !std::mem::replace(&mut complained, true) {
                    tracing::warn!(%address, "worker does not say who it is: {problem}");
                }
                backoff.next()
            }
        };
        sleep(wait).await;
    }
}

async fn ask(channel: &Channel) -> Result<WorkerRecord, String> {
    let mut client = WorkerClient::new(channel.clone());
    let answer = timeout(ANSWER_TIMEOUT, client.info(InfoRequest {}))
        .await
        .map_err(|_| "no answer".to_owned())?
        .map_err(|status| status.message().to_owned())?;
    WorkerRecord::try_from(answer.into_inner()).map_err(|error| error.to_string())
}
