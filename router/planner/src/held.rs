//! What each worker of a view holds of the front of a request. It does not know what that is worth.

use std::{borrow::Cow, cmp::Ordering};

use baton_cluster_record::WorkerRecord;
use baton_kv_events::MAX_TIERS;

use crate::{ClusterView, HeldPrefix, PlanRequest, WorkerKey};

/// What a worker holds of the front of the request, in tokens. As [`HeldPrefix`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    /// At most those of the request.
    pub(crate) num_tokens: usize,
    pub(crate) above: [usize; MAX_TIERS],
    pub(crate) with_store: usize,
}

/// What all workers of the view hold, in its order.
pub(crate) fn held(request: &PlanRequest, view: &ClusterView) -> impl Iterator<Item = Held> {
    let mut cached = Cow::Borrowed(&request.cached);
    if !cached.is_sorted_by(|a, b| a.worker <= b.worker) {
        cached.to_mut().sort();
    }
    let compare = |key: &WorkerKey, record: &WorkerRecord| {
        key.id.cmp(&record.id).then(key.incarnation.cmp(&record.incarnation))
    };
    // Workers and keys usually have the same order: then each key is passed once.
    let mut next = 0;
    view.workers.iter().map(move |worker| {
        let record = &worker.record;
        let order = |place: usize| cached.get(place).map(|cached| compare(&cached.worker, record));
        let mut found = order(next);
        let is_passed = || next.checked_sub(1).is_some_and(|last| order(last) != Some(Ordering::Less));
        if found == Some(Ordering::Less) || (found != Some(Ordering::Equal) && is_passed()) {
            next = cached.partition_point(|cached| compare(&cached.worker, record).is_lt());
            found = order(next);
        }
        if found != Some(Ordering::Equal) {
            return Held::default();
        }
        next += 1;
        let &HeldPrefix { num_tokens, above, with_store, .. } = &cached[next - 1];
        let num_tokens = num_tokens.min(request.num_tokens);
        // Of a head all or nothing is used, and it is not known how it was blended when it was stored.
        let with_store = if request.blend.is_some() { num_tokens } else { with_store };
        Held {
            num_tokens,
            above: above.map(|num| num.min(num_tokens)),
            with_store: with_store.clamp(num_tokens, request.num_tokens),
        }
    })
}
