//! Tells when to report progress of an engine to a peer that waits.

use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

/// Checks at intervals whether a count has grown.
#[derive(Debug)]
pub struct Pulse {
    interval: Interval,
    last: u64,
}

impl Pulse {
    /// Checks several times within `deadline`, after which the peer would fail the handoff. `count` is the current value.
    pub fn new(deadline: Duration, count: u64) -> Pulse {
        let period = (deadline / 4).clamp(Duration::from_millis(1), Duration::from_secs(5));
        let mut interval = interval_at(Instant::now() + period, period);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Pulse { interval, last: count }
    }

    /// Completes at the next check, whatever the count is. The future may be dropped and called again.
    pub async fn tick(&mut self) {
        self.interval.tick().await;
    }

    /// Completes when a check finds another `count` than the previous check. The future may be dropped and called again.
    pub async fn beat(&mut self, count: impl Fn() -> u64) {
        loop {
            self.tick().await;
            let now = count();
            if std::mem::replace(&mut self.last, now) != now {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[tokio::test]
    async fn beats_only_while_the_count_grows() {
        let several_checks = Duration::from_millis(100);
        let count = AtomicU64::new(7);
        let read = || count.load(Ordering::Relaxed);
        let mut pulse = Pulse::new(Duration::from_millis(40), read());
        assert!(
            tokio::time::timeout(several_checks, pulse.beat(read)).await.is_err(),
            "the count has not grown"
        );
        count.store(8, Ordering::Relaxed);
        pulse.beat(read).await;
        assert!(
            tokio::time::timeout(several_checks, pulse.beat(read)).await.is_err(),
            "the count has not grown again"
        );
    }
}
