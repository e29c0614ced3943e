//! How the requests of a worker end.

use baton_request::FailureKind;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

pub(crate) const OK: &str = "ok";
pub(crate) const CANCELLED: &str = "cancelled";

/// Counts ended requests by outcome: "ok", "cancelled", or the name of the failure's kind.
#[derive(Clone, Debug)]
pub struct EndedRequests(Family<Outcome, Counter>);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

impl EndedRequests {
    /// Registers the counts. Series exist from the start: a rate over a series that appears later misses its first count.
    pub fn register(registry: &mut Registry) -> EndedRequests {
        let counts = Family::<Outcome, Counter>::default();
        for outcome in [OK, CANCELLED].into_iter().chain(FailureKind::ALL.map(FailureKind::name)) {
            drop(counts.get_or_create(&Outcome { outcome }));
        }
        let help = "Requests that ended, by how: ok, cancelled, or the kind of the failure";
        registry.register("baton_worker_requests_ended", help, counts.clone());
        EndedRequests(counts)
    }

    pub(crate) fn count(&self, outcome: &'static str) {
        self.0.get_or_create(&Outcome { outcome }).inc();
    }
}
