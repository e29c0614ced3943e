//! The set of known workers. Each kind of discovery fills [`Members`] and publishes them to readers.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use crate::{WorkerId, WorkerRecord};

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

    /// Enters or replaces a record.
    pub(crate) fn insert(&mut self, record: WorkerRecord) {
        self.workers.insert(record.id.clone(), Arc::new(record));
    }

    pub(crate) fn remove(&mut self, id: &WorkerId) {
        self.workers.remove(id);
    }

    /// Says of each model whose workers have several kinds of KV what differs.
    fn mixtures(&self) -> Vec<String> {
        let mut first_of_model: BTreeMap<&str, &WorkerRecord> = BTreeMap::new();
        let mut mixtures: BTreeMap<&str, String> = BTreeMap::new();
        for record in self.iter() {
            let first = *first_of_model.entry(&record.model).or_insert(record);
            let Some(difference) = first.kv_format.difference(&record.kv_format) else { continue };
            mixtures.entry(&record.model).or_insert_with(|| {
                format!(
                    "workers {} and {} of model {:?} cannot exchange KV: {difference}. Both serve, as while weights are \
                     updated; if that is not meant, start them with the same model files and KV settings",
                    first.id, record.id, record.model
                )
            });
        }
        mixtures.into_values().collect()
    }
}

impl FromIterator<WorkerRecord> for Members {
    fn from_iter<I: IntoIterator<Item = WorkerRecord>>(records: I) -> Members {
        let workers = records.into_iter().map(|record| (record.id.clone(), Arc::new(record))).collect();
        Members { workers }
    }
}

/// Another live worker has the name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker id {id:?} is taken by a running worker at {address}; give this one another --id")]
pub(crate) struct IdTaken {
    /// The name.
    pub(crate) id: String,
    /// The address of the worker that has the name.
    pub(crate) address: String,
}

/// Publishes members whenever they differ from the published ones, and logs which workers joined, changed or left, and
/// which cannot exchange KV.
#[derive(Debug)]
pub(crate) struct Publisher {
    members: watch::Sender<Arc<Members>>,
    mixtures: Vec<String>,
}

impl Publisher {
    pub(crate) fn new() -> Publisher {
        Publisher { members: watch::Sender::new(Arc::default()), mixtures: Vec::new() }
    }

    pub(crate) fn subscribe(&self) -> Membership {
        self.members.subscribe()
    }

    pub(crate) fn publish(&mut self, members: &Members) {
        let mixtures = members.mixtures();
        for mixture in mixtures.iter().filter(|mixture| !self.mixtures.contains(mixture)) {
            tracing::warn!("{mixture}");
        }
        self.mixtures = mixtures;
        self.members.send_if_modified(|published| {
            if **published == *members {
                return false;
            }
            log_changes(published, members);
            *published = Arc::new(members.clone());
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
    use crate::{
        Role,
        testing::{other_blocks, other_format, record},
    };

    #[test]
    fn workers_of_one_model_that_cannot_exchange_kv_are_named() {
        let of = |records: Vec<WorkerRecord>| Members::from_iter(records).mixtures();
        let tiny = record("b", Role::Decode);
        let sentences = of(vec![tiny.clone(), other_format(record("c", Role::Prefill))]);
        assert!(
            sentences[0].contains("workers b and c of model \"tiny\" cannot exchange KV: rope"),
            "{sentences:?}"
        );
        assert_eq!(sentences.len(), 1);

        // Blocks may differ, and models do not judge each other.
        let other = WorkerRecord { model: "other".into(), ..other_format(record("a", Role::Decode)) };
        assert_eq!(of(vec![tiny, other_blocks(record("c", Role::Prefill)), other]), Vec::<String>::new());
    }

    #[test]
    fn readers_are_woken_only_by_a_change() {
        let mut publisher = Publisher::new();
        let mut members = Members::default();
        let mut membership = publisher.subscribe();
        members.insert(record("a", Role::Prefill));
        publisher.publish(&members);
        assert!(membership.has_changed().unwrap());
        assert_eq!(membership.borrow_and_update().len(), 1);
        members.insert(record("a", Role::Prefill));
        publisher.publish(&members);
        assert!(!membership.has_changed().unwrap());
    }
}
