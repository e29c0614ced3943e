//! Requests without a plan: they wait for a usable worker. How many there are, and a warning that is not repeated for each.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use baton_planner::NoPlan;
use prometheus_client::metrics::gauge::Gauge;

/// Between two warnings: an outage meets every request.
const PAUSE: Duration = Duration::from_secs(10);

/// The requests that wait. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaitingRequests {
    /// How many there are.
    pub(crate) num: Gauge,
    warned: Arc<Mutex<Option<Instant>>>,
}

/// A request waits for a worker as long as this lives.
#[derive(Debug)]
pub(crate) struct Waiting(Gauge);

impl WaitingRequests {
    /// A request has no plan `now`, for this reason.
    pub(crate) fn enter(&self, no_plan: &NoPlan, now: Instant) -> Waiting {
        if let Some(role) = no_plan.lacks()
            && self.is_warning_due(now)
        {
            tracing::warn!(
                role = role.name(), reason = %no_plan,
                "no worker can take a request: requests wait for one, and fail if none comes"
            );
        }
        self.num.inc();
        Waiting(self.num.clone())
    }

    fn is_warning_due(&self, now: Instant) -> bool {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = warned.is_none_or(|warned| now.saturating_duration_since(warned) >= PAUSE);
        if is_due {
            *warned = Some(now);
        }
        is_due
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_warned_of_once_in_a_while_and_counts_those_that_wait() {
        let (requests, start) = (WaitingRequests::default(), Instant::now());
        let waiting: Vec<_> = (0..3).map(|_| requests.enter(&NoPlan::NoDecodeWorker, start)).collect();
        assert_eq!(requests.num.get(), 3);
        drop(waiting);
        assert_eq!(requests.num.get(), 0);
        assert!(!requests.is_warning_due(start + PAUSE / 2));
        assert!(requests.is_warning_due(start + PAUSE));
    }
}
