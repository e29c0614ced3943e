//! How long the KV of a request is kept once it has ended.

use std::time::Duration;

use crate::invalid::{InvalidRequest, Problem};

/// How prefix caches and tiers keep the KV of a request, beside that of others. It changes no token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Prefixes that stay longer than the rest.
    pub kept: Vec<KeptPrefix>,
    /// All else goes first, the output too: no request will need it again.
    pub rest_is_low: bool,
}

/// A prefix that stays for some time after each use that asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptPrefix {
    /// Tokens at the front. Blocks that are not full of them are not kept.
    pub num_tokens: usize,
    /// How long after its last use.
    pub ttl: Duration,
}

impl Retention {
    /// The longest time.
    pub const MAX_TTL: Duration = Duration::from_hours(24);

    /// Whether a prefix may be kept for this time.
    pub fn allows(ttl: Duration) -> bool {
        !ttl.is_zero() && ttl <= Self::MAX_TTL
    }

    /// Checks the times.
    ///
    /// # Errors
    /// When one is too long, or nothing.
    pub fn validate(&self) -> Result<(), InvalidRequest> {
        match self.kept.iter().find(|kept| !Self::allows(kept.ttl)) {
            None => Ok(()),
            Some(kept) => {
                let expected = "above 0 seconds and at most 86400 (24 hours)";
                let problem = Problem::OutOfRange { value: kept.ttl.as_secs_f64(), expected };
                Err(InvalidRequest::new("cache_control.ttl", problem))
            }
        }
    }

    /// How long the KV of the tokens before `end_idx` is kept; `None`: no longer than that of others.
    pub fn ttl(&self, end_idx: usize) -> Option<Duration> {
        self.kept.iter().filter(|kept| kept.num_tokens >= end_idx).map(|kept| kept.ttl).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_kept_as_long_as_the_longest_prefix_that_has_it() {
        let kept = |num_tokens, secs| KeptPrefix { num_tokens, ttl: Duration::from_secs(secs) };
        let retention = Retention { kept: vec![kept(10, 60), kept(4, 3600), kept(2, 1)], rest_is_low: false };
        let secs = [1, 4, 5, 10, 11].map(|end_idx| retention.ttl(end_idx).map_or(0, |ttl| ttl.as_secs()));
        assert_eq!(secs, [3600, 3600, 60, 60, 0]);
    }

    #[test]
    fn times_beyond_a_day_and_none_are_refused() {
        let of = |ttl| Retention { kept: vec![KeptPrefix { num_tokens: 1, ttl }], rest_is_low: true };
        for ttl in [Duration::ZERO, Retention::MAX_TTL + Duration::from_nanos(1)] {
            let error = of(ttl).validate().unwrap_err().to_string();
            assert!(error.starts_with("cache_control.ttl: ") && error.contains("is not above 0"), "{error}");
        }
        assert_eq!(of(Retention::MAX_TTL).validate(), Ok(()));
    }
}
