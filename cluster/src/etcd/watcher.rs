//! The router's side: the list of keys, then every change after it.
//!
//! ```text
//! connect -> list at revision r -> watch from r + 1 -> ... -> broken: keep what is known, connect again
//!              ^                                          |
//!              +---------- compacted ---------------------+
//! ```
//! After a lost connection the list is read again instead of resuming at the last revision: an etcd that
//! restarted with an empty directory counts from 1, and a watch from a later revision would wait
//! for ever.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use etcd_client::{Client, EventType, GetOptions, WatchOptions, WatchResponse};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{BACKOFF_LIMIT, Connector, Lost, in_time};
use crate::{
    DiscoveryError, EtcdConfig, Membership, WorkerId, WorkerRecord,
    backoff::Backoff,
    members::{Members, Publisher},
};

/// Keeps the membership equal to what etcd holds.
pub(crate) struct Watcher {
    connector: Connector,
    prefix: String,
    ttl: Duration,
    known: Known,
    /// Whether etcd says what changes.
    is_connected: watch::Sender<bool>,
}

/// The published workers, and those of them whose key is no longer in etcd.
struct Known {
    members: Members,
    publisher: Publisher,
    /// Workers whose key is gone although they did not withdraw, and until when they may come back: an expired
    /// lease does not mean that the worker is dead.
    suspects: HashMap<WorkerId, Instant>,
}

impl Watcher {
    pub(crate) fn new(config: &EtcdConfig) -> Result<Watcher, DiscoveryError> {
        Ok(Watcher {
            connector: Connector::new(config)?,
            prefix: config.workers_prefix(),
            ttl: config.lease_ttl,
            known: Known {
                members: Members::default(),
                publisher: Publisher::new(),
                suspects: HashMap::new(),
            },
            is_connected: watch::Sender::new(false),
        })
    }

    pub(crate) fn is_connected(&self) -> watch::Receiver<bool> {
        self.is_connected.subscribe()
    }

    pub(crate) fn members(&self) -> Membership {
        self.known.publisher.subscribe()
    }

    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut backoff = Backoff::new(BACKOFF_LIMIT);
        let mut outage = Outage::default();
        loop {
            let lost = tokio::select! {
                () = stop.cancelled() => return,
                lost = self.session(&mut backoff, &mut outage) => lost,
            };
            // Invariant 10: `known` stays as it is, and so does the membership that routers read.
            self.is_connected.send_replace(false);
            outage.log(&lost);
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(backoff.next()) => {}
            }
        }
    }

    /// Follows etcd until the connection is lost.
    async fn session(&mut self, backoff: &mut Backoff, outage: &mut Outage) -> Lost {
        let followed: Result<std::convert::Infallible, Lost> = async {
            let mut client = self.connector.connect().await?;
            loop {
                let revision = self.list(&mut client).await?;
                backoff.reset();
                self.is_connected.send_replace(true);
                outage.end();
                self.follow(&mut client, revision + 1).await?;
            }
        }
        .await;
        match followed {
            Err(lost) => lost,
        }
    }

    /// Reads every key. Returns the revision of the list.
    async fn list(&mut self, client: &mut Client) -> Result<i64, Lost> {
        let listed = in_time(client.get(self.prefix.as_str(), Some(GetOptions::new().with_prefix()))).await?;
        let mut present: Vec<_> = listed.kvs().iter().collect();
        // The worker that registered first decides the KV format.
        present.sort_by_key(|kv| kv.create_revision());
        let mut seen = HashSet::new();
        for kv in present {
            seen.extend(self.known.put(&self.prefix, kv.key(), kv.value()));
        }
        let until = Instant::now() + 2 * self.ttl;
        // Invariant 10: a key that is missing after an outage gets time to return before its worker is dropped.
        self.known.suspects.clear();
        self.known.suspect(|id| !seen.contains(id), until);
        self.known.publish();
        Ok(listed.header().map_or(0, |header| header.revision()))
    }

    /// Applies changes from `revision` on; returns when etcd has compacted them away.
    pub(super) async fn follow(&mut self, client: &mut Client, revision: i64) -> Result<(), Lost> {
        let options = WatchOptions::new().with_prefix().with_start_revision(revision);
        let mut changes = in_time(client.watch(self.prefix.as_str(), Some(options))).await?;
        loop {
            let change = tokio::select! {
                change = changes.message() => change?.ok_or(Lost::Closed)?,
                () = wait_until(self.known.next_deadline()) => {
                    self.known.give_up_suspects(Instant::now());
                    continue;
                }
            };
            if change.compact_revision() > 0 {
                tracing::info!(revision, "etcd has compacted the changes; reading the list again");
                return Ok(());
            }
            if change.canceled() {
                return Err(Lost::WatchEnded(change.cancel_reason().to_owned()));
            }
            self.apply(&change);
        }
    }

    fn apply(&mut self, change: &WatchResponse) {
        for event in change.events() {
            let Some(kv) = event.kv() else { continue };
            match event.event_type() {
                EventType::Put => {
                    self.known.put(&self.prefix, kv.key(), kv.value());
                }
                EventType::Delete => {
                    let gone = worker_id(&self.prefix, kv.key());
                    self.known.suspect(|id| Some(id) == gone.as_ref(), Instant::now() + self.ttl);
                }
            }
        }
        self.known.publish();
    }
}

/// The present loss of discovery, as far as it is logged.
#[derive(Default)]
struct Outage {
    /// The problem that was logged last. `None`: discovery is not lost.
    problem: Option<String>,
}

impl Outage {
    /// Logs the loss, and each change of its problem: the first may hide what is wrong. Returns whether it has logged something.
    fn log(&mut self, lost: &Lost) -> bool {
        let problem = lost.to_string();
        match &self.problem {
            Some(logged) if *logged == problem => return false,
            Some(_) => tracing::warn!(problem, "discovery is still lost"),
            None => tracing::warn!(problem, "discovery lost; routing goes on with the last known workers"),
        }
        self.problem = Some(problem);
        true
    }

    fn end(&mut self) {
        if self.problem.take().is_some() {
            tracing::info!("discovery is back");
        }
    }
}

impl Known {
    /// Enters the record of a key. Returns the worker's id, unless it has withdrawn or the record is not readable.
    fn put(&mut self, prefix: &str, key: &[u8], value: &[u8]) -> Option<WorkerId> {
        let id = worker_id(prefix, key)?;
        if value.is_empty() {
            self.suspects.remove(&id);
            self.members.remove(&id);
            return None;
        }
        match WorkerRecord::from_json(value) {
            Ok(record) if record.id == id => {
                self.suspects.remove(&id);
                self.members.insert(record);
                Some(id)
            }
            Ok(record) => {
                tracing::warn!(key = %id, record = %record.id, "etcd key and worker record name different workers; ignored");
                None
            }
            Err(error) => {
                tracing::warn!(key = %id, %error, "etcd key holds no worker record; ignored");
                None
            }
        }
    }

    fn suspect(&mut self, gone: impl Fn(&WorkerId) -> bool, until: Instant) {
        for id in self.members.iter().map(|record| &record.id).filter(|id| gone(id)) {
            tracing::debug!(worker = %id, "worker key is gone from etcd; waiting for its return");
            self.suspects.entry(id.clone()).or_insert(until);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.suspects.values().min().copied()
    }

    fn give_up_suspects(&mut self, now: Instant) {
        let members = &mut self.members;
        self.suspects.retain(|id, until| {
            let keep = *until > now;
            if !keep {
                members.remove(id);
            }
            keep
        });
        self.publish();
    }

    fn publish(&mut self) {
        self.publisher.publish(&self.members);
    }
}

fn worker_id(prefix: &str, key: &[u8]) -> Option<WorkerId> {
    let id = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?;
    (!id.is_empty()).then(|| WorkerId(id.to_owned()))
}

async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_of_the_problem_of_an_outage_is_logged_once() {
        let mut outage = Outage::default();
        let closed = || Lost::WatchEnded("an expired certificate".into());
        for (lost, is_logged) in [
            (Lost::Silent, true),
            (Lost::Silent, false),
            (closed(), true),
            (closed(), false),
            (Lost::Silent, true),
        ] {
            assert_eq!(outage.log(&lost), is_logged, "{lost}");
        }
        outage.end();
        assert!(outage.log(&Lost::Silent));
    }
}
