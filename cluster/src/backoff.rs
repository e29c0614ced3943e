//! The wait before the next attempt.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

/// Doubles from 100 ms to a limit. Each wait is shortened at random by up to a half, so that workers that
/// lost the same server do not all return at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    limit: Duration,
}

const FIRST: Duration = Duration::from_millis(100);

impl Backoff {
    pub(crate) fn new(limit: Duration) -> Backoff {
        Backoff { next: FIRST, limit }
    }

    /// After a successful attempt: the next wait is short again.
    pub(crate) fn reset(&mut self) {
        self.next = FIRST;
    }

    /// The wait after one more failure.
    pub(crate) fn next(&mut self) -> Duration {
        let full = self.next.min(self.limit);
        self.next = (full * 2).min(self.limit);
        // A fresh hasher's keys are random enough to spread retries.
        let random = RandomState::new().hash_one(0_u8) as u32;
        full - full.mul_f64(0.5 * f64::from(random) / f64::from(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_limit_and_are_never_zero() {
        let mut backoff = Backoff::new(Duration::from_secs(1));
        for full_ms in [100, 200, 400, 800, 1000, 1000] {
            let full = Duration::from_millis(full_ms);
            let wait = backoff.next();
            assert!(wait <= full && wait >= full / 2, "{wait:?} of {full:?}");
        }
        backoff.reset();
        assert!(backoff.next() <= FIRST);
    }
}
