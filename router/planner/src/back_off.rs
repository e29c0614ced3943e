//! How long no request is sent to a worker that broke off or could not be reached.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(250);
const LIMIT: Duration = Duration::from_secs(5);

/// The failures of one worker in a row. Each pause is twice as long as the one before.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackOff {
    num_failures: u32,
    until: Option<Instant>,
}

impl BackOff {
    /// The worker failed a request. The pause that begins now; `None` while one lasts: one crash breaks many streams, and is
    /// one failure.
    pub fn fail(&mut self, now: Instant) -> Option<Duration> {
        if self.lasts(now) {
            return None;
        }
        let pause = FIRST.saturating_mul(1 << self.num_failures.min(8)).min(LIMIT);
        self.num_failures += 1;
        self.until = Some(now + pause);
        Some(pause)
    }

    /// The worker answered a request.
    pub fn succeed(&mut self) {
        *self = BackOff::default();
    }

    /// The worker was away and is back: what failed before says nothing any more.
    pub fn come_back(&mut self) {
        self.until = None;
    }

    /// Whether no request is sent to the worker now.
    pub fn lasts(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_end_with_an_answer() {
        let (mut back_off, mut now) = (BackOff::default(), Instant::now());
        for expected in [250, 500, 1000, 2000, 4000, 5000, 5000] {
            let pause = back_off.fail(now).expect("no pause lasts");
            assert_eq!(pause, Duration::from_millis(expected));
            assert_eq!(back_off.fail(now), None, "the same crash");
            assert!(back_off.lasts(now));
            now += pause;
            assert!(!back_off.lasts(now));
        }
        back_off.succeed();
        assert_eq!(back_off.fail(now), Some(FIRST));
        back_off.come_back();
        assert!(!back_off.lasts(now));
    }
}
