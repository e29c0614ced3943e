//! How much a key may use: two buckets that refill by the minute, and a count of calls.

use std::time::{Duration, Instant};

const MINUTE: f64 = 60.0;

/// What a key may use; `None` is without a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaLimits {
    /// Calls a minute.
    pub requests: Option<u32>,
    /// Tokens a minute, of prompts and outputs.
    pub tokens: Option<u32>,
    /// Calls that are answered at a time.
    pub streams: Option<u32>,
}

/// What is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quota {
    /// Calls a minute.
    Requests,
    /// Tokens a minute.
    Tokens,
    /// Calls at a time.
    Streams,
}

/// A call beyond a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this key may use {limit} {}, and has; try again in {} s", .quota.unit(), .retry_after.as_secs_f64().ceil())]
pub struct QuotaExceeded {
    /// Which quota.
    pub quota: Quota,
    /// How much it is.
    pub limit: u32,
    /// When there is room for this call, if no other comes first; of streams a guess.
    pub retry_after: Duration,
}

impl Quota {
    fn unit(self) -> &'static str {
        match self {
            Quota::Requests => "requests a minute",
            Quota::Tokens => "tokens a minute",
            Quota::Streams => "streams at a time",
        }
    }
}

/// What is left of a quota by the minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// The quota.
    pub limit: u32,
    /// What can be used now.
    pub remaining: u32,
    /// Until all of it can be used.
    pub reset: Duration,
}

/// A bucket that holds at most a minute's quota and refills steadily.
///
/// A minute thus sees at most twice the quota, after a pause, and a long time sees the quota.
#[derive(Debug, Default)]
pub(crate) struct Bucket {
    /// What it held when it was last looked at. Below zero after more was used than there was. `None`: full.
    level: Option<(f64, Instant)>,
}

impl Bucket {
    fn level(&self, per_minute: u32, now: Instant) -> f64 {
        let full = f64::from(per_minute);
        self.level.map_or(full, |(level, at)| {
            let refilled = now.saturating_duration_since(at).as_secs_f64() * full / MINUTE;
            (level + refilled).min(full)
        })
    }

    /// Takes `num`. What is more than a whole bucket needs a full one, and leaves it below zero.
    ///
    /// # Errors
    /// When there is less: how long it takes to refill.
    pub(crate) fn take(&mut self, num: u32, per_minute: u32, now: Instant) -> Result<(), Duration> {
        let level = self.level(per_minute, now);
        let lacks = f64::from(num.min(per_minute)) - level;
        if lacks > 0.0 {
            return Err(Duration::from_secs_f64(lacks * MINUTE / f64::from(per_minute.max(1))));
        }
        self.level = Some((level - f64::from(num), now));
        Ok(())
    }

    /// Takes `num`, which has been used already.
    pub(crate) fn charge(&mut self, num: u32, per_minute: u32, now: Instant) {
        self.level = Some((self.level(per_minute, now) - f64::from(num), now));
    }

    /// Gives back `num` that was taken and not used.
    pub(crate) fn refund(&mut self, num: u32, per_minute: u32, now: Instant) {
        let level = self.level(per_minute, now) + f64::from(num);
        self.level = Some((level.min(f64::from(per_minute)), now));
    }

    pub(crate) fn allowance(&self, per_minute: u32, now: Instant) -> Allowance {
        let level = self.level(per_minute, now);
        let lacks = f64::from(per_minute) - level;
        Allowance {
            limit: per_minute,
            remaining: level.max(0.0) as u32,
            reset: Duration::from_secs_f64(lacks.max(0.0) * MINUTE / f64::from(per_minute.max(1))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps `seconds take|charge|refund num` on a bucket of 60 a minute; an expectation follows each take.
    fn check(script: &[(f64, &str, u32, Option<f64>)]) {
        let (mut bucket, start) = (Bucket::default(), Instant::now());
        for &(seconds, step, num, wait) in script {
            let now = start + Duration::from_secs_f64(seconds);
            match step {
                "charge" => {
                    bucket.charge(num, 60, now);
                    continue;
                }
                "refund" => {
                    bucket.refund(num, 60, now);
                    continue;
                }
                _ => {}
            }
            let got = bucket.take(num, 60, now).err().map(|wait| wait.as_secs_f64());
            let is_right = match (got, wait) {
                (None, None) => true,
                (Some(got), Some(wait)) => (got - wait).abs() < 1e-6,
                _ => false,
            };
            assert!(is_right, "{seconds} s: {step} {num} waits {got:?}, not {wait:?}");
        }
    }

    #[test]
    fn a_bucket_refills_steadily_and_holds_a_minute() {
        check(&[
            (0.0, "take", 60, None),
            (0.0, "take", 1, Some(1.0)),
            (0.5, "take", 1, Some(0.5)),
            (1.0, "take", 1, None),
            (1.0, "take", 10, Some(10.0)),
            (500.0, "take", 60, None),
            (500.0, "take", 1, Some(1.0)),
        ]);
    }

    #[test]
    fn what_was_overused_is_paid_back() {
        check(&[
            // A prompt that is longer than the quota.
            (0.0, "take", 120, None),
            (60.0, "take", 1, Some(1.0)),
            (120.0, "take", 50, None),
            // Output, after the request was admitted.
            (120.0, "charge", 30, None),
            (120.0, "take", 10, Some(30.0)),
            (150.0, "take", 10, None),
        ]);
    }

    #[test]
    fn what_was_not_used_comes_back_at_once() {
        check(&[
            (0.0, "take", 50, None),
            (0.0, "refund", 50, None),
            (0.0, "take", 60, None),
            // It has refilled meanwhile, and holds no more than a minute's.
            (40.0, "refund", 60, None),
            (40.0, "take", 60, None),
            (40.0, "take", 1, Some(1.0)),
        ]);
    }

    #[test]
    fn an_allowance_says_when_all_is_back() {
        let (mut bucket, now) = (Bucket::default(), Instant::now());
        let full = Allowance { limit: 60, remaining: 60, reset: Duration::ZERO };
        assert_eq!(bucket.allowance(60, now), full);
        bucket.charge(90, 60, now);
        let none = Allowance { limit: 60, remaining: 0, reset: Duration::from_secs(90) };
        assert_eq!(bucket.allowance(60, now), none);
        assert_eq!(bucket.allowance(60, now + Duration::from_secs(90)), full);
    }
}
