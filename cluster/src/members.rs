//! The set of known workers, and the rule by which a worker is admitted.
//!
//! Plain data and plain code: each kind of discovery feeds a [`Roster`], readers see [`Members`].

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use crate::{Role, WorkerId, WorkerRecord};

/// The known workers. A new full set is published whenever a worker joins, changes or leaves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    workers: BTreeMap<WorkerId, Arc<WorkerRecord>>,
}

/// Follows the membership: `borrow()` is the newest set, `changed()` waits for the next.
pub type Membership = watch::Receiver<Arc<Members>>;

impl Members {
    /// Every worker, ordered by id.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<WorkerRecord>> {
        self.workers.values()
    }

    /// The workers of one role, ordered by id.
    pub fn with_role(&self, role: Role) -> impl Iterator<Item = &Arc<WorkerRecord>> {
        self.iter().filter(move |record| record.role == role)
    }

    /// The worker of this name.
    pub fn get(&self, id: &WorkerId) -> Option<&Arc<WorkerRecord>> {
        self.workers.get(id)
    }

    /// The number of workers.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// Whether no worker is known.
    pub fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }
}

impl FromIterator<WorkerRecord> for Members {
    fn from_iter<I: IntoIterator<Item = WorkerRecord>>(records: I) -> Members {
        let workers = records.into_iter().map(|record| (record.id.clone(), Arc::new(record))).collect();
        Members { workers }
    }
}

/// Why a worker is not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Its KV format differs from that of the registered workers.
    #[error(
        "worker {id} cannot exchange KV with {other} of model {model:?}: {difference}; \
         start it with the same model files and KV settings"
    )]
    KvFormat {
        /// The refused worker.
        id: WorkerId,
        /// The worker that registered first.
        other: WorkerId,
        /// Name of the model of both.
        model: String,
        /// The first thing that differs.
        difference: String,
    },
    /// Another live worker has the name.
    #[error("the worker id {id:?} is taken by a running worker at {address}; give this one another --id")]
    Taken {
        /// The name.
        id: String,
        /// The address of the worker that has the name.
        address: String,
    },
}

/// The records of all announced workers in order of arrival, and which of them are members.
///
/// Among workers with the same model name the first one decides the KV format. A worker that cannot exchange KV with
/// it is refused until the last worker of that format has left. Block sizes and element types may differ.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    candidates: BTreeMap<WorkerId, Candidate>,
    num_arrivals: u64,
}

#[derive(Debug)]
struct Candidate {
    arrival: u64,
    record: Arc<WorkerRecord>,
}

impl Roster {
    /// Enters or replaces a record.
    pub(crate) fn insert(&mut self, record: WorkerRecord) {
        let arrival = match self.candidates.get(&record.id) {
            // A worker that returns with the same format keeps its position.
            Some(old)
                if old.record.model == record.model
                    && old.record.kv_format.difference(&record.kv_format).is_none() =>
            {
                old.arrival
            }
            _ => {
                self.num_arrivals += 1;
                self.num_arrivals
            }
        };
        self.candidates.insert(record.id.clone(), Candidate { arrival, record: Arc::new(record) });
    }

    /// Removes a worker. Returns whether it was known.
    pub(crate) fn remove(&mut self, id: &WorkerId) -> bool {
        self.candidates.remove(id).is_some()
    }

    pub(crate) fn get(&self, id: &WorkerId) -> Option<&Arc<WorkerRecord>> {
        self.candidates.get(id).map(|candidate| &candidate.record)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = &WorkerId> {
        self.candidates.keys()
    }

    /// The members, and why the other workers are refused.
    pub(crate) fn admit(&self) -> (Members, Vec<Refusal>) {
        let mut by_arrival: Vec<_> = self.candidates.values().collect();
        by_arrival.sort_by_key(|candidate| candidate.arrival);
        let mut first_of_model: BTreeMap<&str, &WorkerRecord> = BTreeMap::new();
        let mut members = Members::default();
        let mut refusals = Vec::new();
        for Candidate { record, .. } in by_arrival {
            let first = *first_of_model.entry(&record.model).or_insert(record);
            match first.kv_format.difference(&record.kv_format) {
                None => {
                    members.workers.insert(record.id.clone(), record.clone());
                }
                Some(difference) => refusals.push(Refusal::KvFormat {
                    id: record.id.clone(),
                    other: first.id.clone(),
                    model: record.model.clone(),
                    difference,
                }),
            }
        }
        (members, refusals)
    }

    /// Why `record` is refused, if it is.
    pub(crate) fn refusal(&self, record: &WorkerRecord) -> Option<Refusal> {
        let first = self
            .candidates
            .values()
            .filter(|other| other.record.id != record.id && other.record.model == record.model)
            .min_by_key(|other| other.arrival)?;
        let difference = first.record.kv_format.difference(&record.kv_format)?;
        Some(Refusal::KvFormat {
            id: record.id.clone(),
            other: first.record.id.clone(),
            model: record.model.clone(),
            difference,
        })
    }
}

/// Publishes a roster's members whenever they differ from the published ones, and logs which workers
/// joined, changed, left or were refused.
#[derive(Debug)]
pub(crate) struct Publisher {
    members: watch::Sender<Arc<Members>>,
    refusals: Vec<Refusal>,
}

impl Publisher {
    pub(crate) fn new() -> Publisher {
        Publisher { members: watch::Sender::new(Arc::default()), refusals: Vec::new() }
    }

    pub(crate) fn subscribe(&self) -> Membership {
        self.members.subscribe()
    }

    pub(crate) fn publish(&mut self, roster: &Roster) {
        let (members, refusals) = roster.admit();
        for refusal in refusals.iter().filter(|refusal| !self.refusals.contains(refusal)) {
            tracing::warn!("{refusal}");
        }
        self.refusals = refusals;
        self.members.send_if_modified(|published| {
            if **published == members {
                return false;
            }
            log_changes(published, &members);
            *published = Arc::new(members);
            true
        });
    }
}

fn log_changes(before: &Members, after: &Members) {
    for record in after.iter() {
        let WorkerRecord { id, role, address, incarnation, .. } = &**record;
        match before.get(id) {
            None => tracing::info!(worker = %id, %role, %address, incarnation, "worker joined"),
            Some(old) if old.incarnation != *incarnation => {
                tracing::info!(worker = %id, %role, %address, incarnation, "worker restarted");
            }
            Some(old) if old != record => tracing::info!(worker = %id, %role, %address, "worker changed"),
            Some(_) => {}
        }
    }
    for record in before.iter().filter(|record| after.get(&record.id).is_none()) {
        tracing::info!(worker = %record.id, role = %record.role, address = %record.address, "worker left");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{other_blocks, other_format, record};

    fn ids(members: &Members) -> Vec<&str> {
        members.iter().map(|record| record.id.as_str()).collect()
    }

    #[test]
    fn the_first_of_a_model_decides_the_format_until_it_is_gone() {
        let mut roster = Roster::default();
        roster.insert(record("b", Role::Decode));
        roster.insert(other_format(record("a", Role::Prefill)));
        let (members, refusals) = roster.admit();
        assert_eq!(ids(&members), ["b"]);
        let sentence = refusals[0].to_string();
        assert!(sentence.contains("worker a cannot exchange KV with b"), "{sentence}");
        assert!(sentence.contains("rope"), "{sentence}");

        assert!(roster.remove(&"b".into()));
        let (members, refusals) = roster.admit();
        assert_eq!(ids(&members), ["a"]);
        assert_eq!(refusals, []);
    }

    #[test]
    fn blocks_may_differ() {
        let mut roster = Roster::default();
        roster.insert(record("b", Role::Decode));
        roster.insert(other_blocks(record("a", Role::Prefill)));
        assert_eq!(roster.refusal(&other_blocks(record("c", Role::Decode))), None);
        let (members, refusals) = roster.admit();
        assert_eq!((ids(&members), refusals), (vec!["a", "b"], vec![]));
        // A worker keeps its position when it returns with others.
        roster.insert(other_blocks(record("b", Role::Decode)));
        roster.insert(other_format(record("c", Role::Decode)));
        assert_eq!(ids(&roster.admit().0), ["a", "b"]);
    }

    #[test]
    fn a_worker_that_returns_with_another_format_does_not_evict_the_others() {
        let mut roster = Roster::default();
        roster.insert(record("a", Role::Prefill));
        roster.insert(record("b", Role::Decode));
        roster.insert(other_format(record("a", Role::Prefill)));
        assert_eq!(ids(&roster.admit().0), ["b"]);
    }

    #[test]
    fn models_do_not_judge_each_other() {
        let mut roster = Roster::default();
        roster.insert(record("a", Role::Prefill));
        roster.insert(WorkerRecord { model: "other".into(), ..other_format(record("b", Role::Decode)) });
        assert_eq!(ids(&roster.admit().0), ["a", "b"]);
    }

    #[test]
    fn readers_are_woken_only_by_a_change() {
        let mut publisher = Publisher::new();
        let mut roster = Roster::default();
        let mut membership = publisher.subscribe();
        roster.insert(record("a", Role::Prefill));
        publisher.publish(&roster);
        assert!(membership.has_changed().unwrap());
        assert_eq!(membership.borrow_and_update().len(), 1);
        roster.insert(record("a", Role::Prefill));
        publisher.publish(&roster);
        assert!(!membership.has_changed().unwrap());
    }
}
