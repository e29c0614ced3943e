//! The worker's side: a key under a lease that is kept alive. Both are created again whenever one is lost.

use std::time::Duration;

use etcd_client::{Client, PutOptions};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::transport::Uri;

use super::{BACKOFF_LIMIT, Connector, Lost, in_time};
use crate::{
    DiscoveryError, EtcdConfig, RegistrationState, WorkerRecord, backoff::Backoff, dial::is_loopback_host,
    members::IdTaken, registration_state::StateReport,
};

/// Registers one worker.
pub(crate) struct Registrar {
    connector: Connector,
    endpoints: Vec<String>,
    prefix: String,
    ttl: Duration,
    record: WorkerRecord,
    report: StateReport,
    /// Since when another process has the worker's id.
    taken_since: Option<Instant>,
}

/// How long after its end etcd may notice that a lease has ended, and this worker that etcd has.
const LEASE_GRACE: Duration = Duration::from_secs(3);

/// Why a session ended without being lost.
enum End {
    Withdrawn,
    Refused(IdTaken),
}

impl Registrar {
    pub(crate) fn new(
        config: &EtcdConfig,
        record: WorkerRecord,
        report: StateReport,
    ) -> Result<Registrar, DiscoveryError> {
        Ok(Registrar {
            connector: Connector::new(config)?,
            endpoints: config.endpoints.clone(),
            prefix: config.workers_prefix(),
            ttl: config.lease_ttl,
            record,
            report,
            taken_since: None,
        })
    }

    pub(crate) async fn run(mut self, withdraw: CancellationToken) {
        let mut backoff = Backoff::new(BACKOFF_LIMIT);
        let address = &self.record.address;
        if is_out_of_reach(address, &self.endpoints) {
            tracing::warn!(
                address,
                etcd = self.endpoints.join(","),
                "this worker registers an address of this host alone: routers and workers on other hosts cannot reach it; \
                 give their URL of it with --advertise (BATON_ADVERTISE), and listen there with --listen (BATON_LISTEN)"
            );
        }
        loop {
            match self.session(&withdraw, &mut backoff).await {
                Ok(End::Withdrawn) => return,
                Ok(End::Refused(refusal)) => {
                    let state = self.refused(&refusal, Instant::now());
                    self.report.set(state);
                }
                Err(lost) => {
                    // Without etcd no lease ends.
                    self.taken_since = None;
                    self.report.searching(lost);
                }
            }
            tokio::select! {
                () = withdraw.cancelled() => return,
                () = sleep(backoff.next()) => {}
            }
        }
    }

    async fn session(&mut self, withdraw: &CancellationToken, backoff: &mut Backoff) -> Result<End, Lost> {
        let entered = tokio::select! {
            () = withdraw.cancelled() => return Ok(End::Withdrawn),
            entered = self.enter() => entered?,
        };
        let (mut client, lease) = match entered {
            Ok(entered) => entered,
            Err(refusal) => return Ok(End::Refused(refusal)),
        };
        backoff.reset();
        self.taken_since = None;
        self.report.set(RegistrationState::Registered);
        tokio::select! {
            () = withdraw.cancelled() => {
                // Watchers learn of the departure at once; without this, the lease would expire later.
                let _ = in_time(client.put(self.key(), "", Some(PutOptions::new().with_lease(lease)))).await;
                let _ = in_time(client.lease_revoke(lease)).await;
                Ok(End::Withdrawn)
            }
            lost = self.keep_alive(client.clone(), lease) => Err(lost),
        }
    }

    /// A taken id may be that of an earlier process of this worker, which has ended without leaving: then its lease ends soon.
    fn refused(&mut self, taken: &IdTaken, now: Instant) -> RegistrationState {
        let since = *self.taken_since.get_or_insert(now);
        if now - since > self.ttl + LEASE_GRACE {
            return RegistrationState::Refused(taken.to_string());
        }
        let IdTaken { id, address } = taken;
        RegistrationState::Held(format!(
            "the lease of an earlier process at {address} still holds the worker id {id:?} and ends within {} s; if it does \
             not, a running worker has the id: give this one another --id (BATON_ID)",
            self.ttl.as_secs()
        ))
    }

    /// Writes the key, unless another worker has it.
    async fn enter(&mut self) -> Result<Result<(Client, i64), IdTaken>, Lost> {
        let mut client = self.connector.connect().await?;
        let held = in_time(client.get(self.key(), None)).await?;
        let holder = held.kvs().first().and_then(|kv| WorkerRecord::from_json(kv.value()).ok());
        if let Some(holder) = holder
            && holder.incarnation != self.record.incarnation
            && holder.address != self.record.address
        {
            return Ok(Err(IdTaken { id: holder.id.0, address: holder.address }));
        }
        let lease = in_time(client.lease_grant(self.ttl.as_secs() as i64, None)).await?.id();
        let options = PutOptions::new().with_lease(lease);
        in_time(client.put(self.key(), self.record.to_json(), Some(options))).await?;
        Ok(Ok((client, lease)))
    }

    /// Renews the lease three times within its life. Returns when lease or key are lost.
    async fn keep_alive(&self, mut client: Client, lease: i64) -> Lost {
        let lost = async {
            let (mut keeper, mut answers) = in_time(client.lease_keep_alive(lease)).await?;
            let mut next = Instant::now();
            loop {
                next += self.ttl / 3;
                sleep_until(next).await;
                in_time(keeper.keep_alive()).await?;
                let answer = in_time(answers.message()).await?.ok_or(Lost::Closed)?;
                if answer.ttl() <= 0 {
                    return Err(Lost::Expired);
                }
                // A lease can outlive its key, which an operator may have deleted.
                let held = in_time(client.get(self.key(), None)).await?;
                if held.kvs().first().is_none_or(|kv| kv.value() != self.record.to_json()) {
                    return Err(Lost::KeyGone);
                }
                next = next.max(Instant::now() - self.ttl / 3);
            }
        };
        let result: Result<std::convert::Infallible, Lost> = lost.await;
        match result {
            Err(lost) => lost,
        }
    }

    fn key(&self) -> String {
        format!("{}{}", self.prefix, self.record.id)
    }
}

/// Whether a worker's address is one of its host alone, while etcd is elsewhere and others may be, too.
fn is_out_of_reach(address: &str, endpoints: &[String]) -> bool {
    is_loopback(address) && !endpoints.iter().any(|endpoint| is_loopback(endpoint))
}

fn is_loopback(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else { return false };
    uri.host().is_some_and(is_loopback_host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_address_in_an_etcd_elsewhere_is_out_of_reach() {
        for (address, endpoints, expected) in [
            ("http://127.0.0.1:4000", "http://etcd-0:2379,http://etcd-1:2379", true),
            ("http://127.0.1.1:4000", "http://10.0.0.1:2379", true),
            ("https://[::1]:4000", "https://10.0.0.1:2379", true),
            ("http://localhost:4000", "http://10.0.0.1:2379", true),
            ("http://127.0.0.1:4000", "http://127.0.0.1:2379", false),
            ("http://127.0.0.1:4000", "http://localhost:2379", false),
            ("http://10.0.0.2:4000", "http://10.0.0.1:2379", false),
            ("http://decode-0:4000", "http://etcd:2379", false),
        ] {
            let endpoints: Vec<_> = endpoints.split(',').map(str::to_owned).collect();
            assert_eq!(is_out_of_reach(address, &endpoints), expected, "{address} {endpoints:?}");
        }
    }
}
