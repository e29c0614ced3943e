//! Which migrations for balance a decode worker grants. The time is an argument.
//!
//! ```text
//! routers see reports that are late, and not what other routers have just moved:
//!
//! worker A   full  ---2 requests leave--->  empty  <--- refused for HOLD
//! worker B   empty ---2 requests arrive-->  full    ---> refused for HOLD
//! ```
//!
//! Routers only propose. The worker at which a request arrives decides, after it has asked the worker that the request leaves. So
//! within [`BalanceGrants::HOLD`] no worker both gives and takes, whatever routers believe.

use std::time::{Duration, Instant};

/// The newest migrations for balance at one decode worker.
#[derive(Clone, Copy, Debug, Default)]
pub struct BalanceGrants {
    arrived: Option<Instant>,
    left: Option<Instant>,
}

/// The grant that one request arrives. It is kept if the request does, and otherwise [withdrawn](BalanceGrants::withdraw).
#[derive(Debug)]
pub struct BalanceArrival {
    at: Instant,
    /// The arrival before it.
    before: Option<Instant>,
}

/// Why a migration for balance is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BalanceRefused {
    /// It would undo an earlier one.
    #[error("balance moved a request the other way {0:?} ago")]
    Undoes(Duration),
    /// No load report shows the effect of the last one yet.
    #[error("balance moved a request the same way {0:?} ago, and load reports do not show it yet")]
    TooSoon(Duration),
}

impl BalanceGrants {
    /// How long nothing migrates the other way.
    pub const HOLD: Duration = Duration::from_secs(10);
    /// Until a load report of either worker shows a migration: reports come every second at least.
    pub const SETTLE: Duration = Duration::from_secs(1);

    /// A request would arrive.
    ///
    /// # Errors
    /// When it must not.
    pub fn arrive(&mut self, now: Instant) -> Result<BalanceArrival, BalanceRefused> {
        let before = self.arrived;
        grant(&mut self.arrived, self.left, now)?;
        Ok(BalanceArrival { at: now, before })
    }

    /// The request does not arrive: it counts no longer. A newer arrival stays.
    pub fn withdraw(&mut self, arrival: BalanceArrival) {
        let BalanceArrival { at, before } = arrival;
        if self.arrived == Some(at) {
            self.arrived = before;
        }
    }

    /// A request would leave.
    ///
    /// # Errors
    /// When it must not.
    pub fn leave(&mut self, now: Instant) -> Result<(), BalanceRefused> {
        grant(&mut self.left, self.arrived, now)
    }
}

fn grant(
    same_way: &mut Option<Instant>,
    other_way: Option<Instant>,
    now: Instant,
) -> Result<(), BalanceRefused> {
    let since = |last: Option<Instant>| last.map(|last| now.saturating_duration_since(last));
    if let Some(ago) = since(other_way).filter(|&ago| ago < BalanceGrants::HOLD) {
        return Err(BalanceRefused::Undoes(ago));
    }
    if let Some(ago) = since(*same_way).filter(|&ago| ago < BalanceGrants::SETTLE) {
        return Err(BalanceRefused::TooSoon(ago));
    }
    *same_way = Some(now);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_gave_takes_nothing_for_a_while_and_one_that_took_gives_nothing() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let ago = Duration::from_millis;
        // When, which way, and what comes of it.
        let cases = [
            (0, true, Ok(())),
            (500, true, Err(BalanceRefused::TooSoon(ago(500)))),
            (1000, true, Ok(())),
            (10_999, false, Err(BalanceRefused::Undoes(ago(9999)))),
            (11_000, false, Ok(())),
            (11_100, false, Err(BalanceRefused::TooSoon(ago(100)))),
            (11_100, true, Err(BalanceRefused::Undoes(ago(100)))),
            // A clock that jumps back grants nothing.
            (0, true, Err(BalanceRefused::Undoes(ago(0)))),
            (21_000, true, Ok(())),
        ];
        let mut grants = BalanceGrants::default();
        for (ms, arrives, expected) in cases {
            let granted = if arrives { grants.arrive(at(ms)).map(drop) } else { grants.leave(at(ms)) };
            assert_eq!(granted, expected, "{ms} ms, arrives: {arrives}");
        }
    }

    #[test]
    fn a_withdrawn_arrival_leaves_what_was_before_it_and_what_came_after_it() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut grants = BalanceGrants::default();
        let withdrawn = grants.arrive(at(0)).expect("the first");
        grants.withdraw(withdrawn);
        assert_eq!(grants.leave(at(1)), Ok(()), "nothing has arrived");

        let mut grants = BalanceGrants::default();
        grants.arrive(at(0)).expect("the first");
        let withdrawn = grants.arrive(at(2000)).expect("the first is settled");
        grants.withdraw(withdrawn);
        let ago = Duration::from_millis(2100);
        assert_eq!(grants.leave(at(2100)), Err(BalanceRefused::Undoes(ago)), "the first has arrived");

        let withdrawn = grants.arrive(at(3000)).expect("the first is settled");
        grants.arrive(at(4000)).expect("the second is settled");
        grants.withdraw(withdrawn);
        let ago = Duration::from_millis(9999);
        assert_eq!(grants.leave(at(13_999)), Err(BalanceRefused::Undoes(ago)), "the third has arrived");
    }
}
