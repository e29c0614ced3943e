//! The order in which the offers of a peer are tried: what was measured of them, and which of them failed. It reads no
//! clock.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use baton_handoff::TransportOffer;

/// How much faster a transport must be than the one before it in the order of kinds to be preferred. Measurements on a
/// busy machine differ by as much, and earlier kinds take less time of the processors.
const MARGIN: f64 = 1.5;

/// How long a rate counts. What slowed a transport down may have ended since.
const MAX_AGE: Duration = Duration::from_secs(600);

/// Most offers of which something is kept. When there are more, most of their pools have gone.
const MAX_OFFERS: usize = 4096;

/// Longest pause of an offer that failed.
const MAX_PAUSE: Duration = Duration::from_secs(300);

/// What is known about offers.
#[derive(Default)]
pub(super) struct Ranking {
    /// Bytes per second of each offer that was measured, and when.
    rates: HashMap<TransportOffer, (f64, Instant)>,
    failed: HashMap<TransportOffer, Failed>,
}

/// An offer that has carried nothing since it failed.
struct Failed {
    /// How long it is tried last.
    pause: Duration,
    until: Instant,
    /// The pause was over, so one route tries the offer first. Others do so only if nothing is known after another pause.
    is_on_trial: bool,
}

impl Ranking {
    /// Sorts best first: by kind, or by rate if all candidates were measured lately. Offers that pause come last.
    /// Returns the offer that would be first without pauses.
    pub(super) fn sort<'a>(
        &mut self,
        candidates: &mut [&'a TransportOffer],
        now: Instant,
    ) -> Option<&'a TransportOffer> {
        candidates.sort_by_key(|offer| offer.kind());
        self.sort_by_rate(candidates, now);
        let best = candidates.first().copied();
        candidates.sort_by_key(|offer| self.failed.get(*offer).is_some_and(|failed| now < failed.until));
        let first = candidates.first().and_then(|first| self.failed.get_mut(*first));
        if let Some(failed) = first.filter(|failed| now >= failed.until) {
            (failed.until, failed.is_on_trial) = (now + failed.pause, true);
        }
        best
    }

    /// Sorts by rate if all candidates were measured lately.
    fn sort_by_rate(&self, candidates: &mut [&TransportOffer], now: Instant) {
        let rate = |offer: &&TransportOffer| {
            let (rate, at) = self.rates.get(*offer)?;
            (now.duration_since(*at) < MAX_AGE).then_some(*rate)
        };
        let known: Option<Vec<f64>> = candidates.iter().map(rate).collect();
        let Some(known) = known else { return };
        let worth = known.iter().zip(0..).map(|(rate, rank)| rate / MARGIN.powi(rank));
        let worth: HashMap<_, _> = candidates.iter().copied().zip(worth).collect();
        candidates.sort_by(|a, b| worth[b].total_cmp(&worth[a]));
    }

    /// Notes the rate of an offer. `None`: it could not be measured.
    pub(super) fn measured(&mut self, offer: &TransportOffer, bytes_per_second: Option<f64>, now: Instant) {
        let Some(rate) = bytes_per_second else {
            self.rates.remove(offer);
            return;
        };
        make_room(&mut self.rates);
        self.rates.insert(offer.clone(), (rate, now));
    }

    /// Notes that an offer failed. Returns its pause, which is `first_pause` or twice the one before. `None`: it pauses
    /// already. Many frames fail at once.
    pub(super) fn failed(
        &mut self,
        offer: &TransportOffer,
        first_pause: Duration,
        now: Instant,
    ) -> Option<Duration> {
        let pause = match self.failed.get(offer) {
            Some(failed) if now < failed.until && !failed.is_on_trial => return None,
            Some(failed) => (failed.pause * 2).min(MAX_PAUSE),
            None => first_pause,
        };
        make_room(&mut self.failed);
        self.failed.insert(offer.clone(), Failed { pause, until: now + pause, is_on_trial: false });
        Some(pause)
    }

    /// Notes that an offer has carried a frame: it does not pause any more.
    pub(super) fn carried(&mut self, offer: &TransportOffer) {
        // This is asked for each frame, and an empty map need not hash the offer.
        if !self.failed.is_empty() {
            self.failed.remove(offer);
        }
    }
}

fn make_room<T>(of_offers: &mut HashMap<TransportOffer, T>) {
    if of_offers.len() >= MAX_OFFERS {
        of_offers.clear();
    }
}

#[cfg(test)]
mod tests {
    use baton_handoff::TransportKind::{self, Shm, Tcp};

    use super::*;

    fn offers() -> [TransportOffer; 2] {
        [
            TransportOffer::Shm { host_id: "here".into(), socket_path: "s".into(), pool: 1 },
            TransportOffer::Tcp { address: "here:1".into(), pool: 1 },
        ]
    }

    /// The kinds of these offers, in the order in which they are tried.
    fn order<const N: usize>(
        ranking: &mut Ranking,
        mut candidates: [&TransportOffer; N],
        now: Instant,
    ) -> [TransportKind; N] {
        ranking.sort(&mut candidates, now);
        candidates.map(TransportOffer::kind)
    }

    #[test]
    fn the_fastest_way_is_taken_once_all_are_known() {
        let (mut ranking, now) = (Ranking::default(), Instant::now());
        let [shm, tcp] = &offers();
        let best = |ranking: &mut Ranking| order(ranking, [tcp, shm], now)[0];
        ranking.measured(tcp, Some(9e9), now);
        assert_eq!(best(&mut ranking), Shm, "one is unknown");
        ranking.measured(shm, Some(8e9), now);
        assert_eq!(best(&mut ranking), Shm, "hardly slower");
        ranking.measured(shm, Some(1e9), now);
        assert_eq!(best(&mut ranking), Tcp);
        assert_eq!(order(&mut ranking, [shm], now), [Shm], "the only one");
    }

    #[test]
    fn a_rate_counts_until_it_is_old_or_cannot_be_measured_again() {
        let (mut ranking, start) = (Ranking::default(), Instant::now());
        let [shm, tcp] = &offers();
        let best = |ranking: &mut Ranking, at| order(ranking, [tcp, shm], start + at)[0];
        let later = MAX_AGE / 2;
        ranking.measured(shm, Some(1e9), start);
        ranking.measured(tcp, Some(9e9), start + later);
        assert_eq!(best(&mut ranking, later), Tcp);
        assert_eq!(best(&mut ranking, MAX_AGE), Shm, "its rate is old");
        ranking.measured(shm, Some(1e9), start + MAX_AGE);
        assert_eq!(best(&mut ranking, MAX_AGE), Tcp);
        ranking.measured(tcp, None, start + MAX_AGE);
        assert_eq!(best(&mut ranking, MAX_AGE), Shm);
    }

    #[test]
    fn an_offer_that_failed_comes_last_for_a_pause_that_doubles() {
        const SECOND: Duration = Duration::from_secs(1);
        let (mut ranking, start) = (Ranking::default(), Instant::now());
        let [shm, tcp] = &offers();
        let order = |ranking: &mut Ranking, at| order(ranking, [tcp, shm], start + at);
        assert_eq!(ranking.failed(shm, SECOND, start), Some(SECOND));
        assert_eq!(ranking.failed(shm, SECOND, start), None, "it pauses already");
        assert_eq!(order(&mut ranking, SECOND / 2), [Tcp, Shm]);
        assert_eq!(order(&mut ranking, SECOND), [Shm, Tcp], "the pause is over");
        assert_eq!(order(&mut ranking, SECOND), [Tcp, Shm], "one route tries it");
        assert_eq!(ranking.failed(shm, SECOND, start + SECOND), Some(2 * SECOND));
        assert_eq!(order(&mut ranking, 2 * SECOND), [Tcp, Shm]);
        assert_eq!(order(&mut ranking, 3 * SECOND), [Shm, Tcp]);
        assert_eq!(order(&mut ranking, 5 * SECOND), [Shm, Tcp], "nothing is known of the trial");

        ranking.carried(shm);
        assert_eq!([(); 2].map(|()| order(&mut ranking, 5 * SECOND)), [[Shm, Tcp]; 2]);
        let pauses = (0..).map_while(|n: u32| {
            let pause = ranking.failed(shm, SECOND, start + n * 2 * MAX_PAUSE);
            pause.filter(|&pause| pause < MAX_PAUSE)
        });
        assert_eq!(pauses.take(20).count(), 9, "1 s to 256 s");
        let end = 40 * MAX_PAUSE;
        let both = [tcp, shm].map(|offer| ranking.failed(offer, MAX_PAUSE, start + end));
        assert_eq!(both, [Some(MAX_PAUSE); 2]);
        assert_eq!(order(&mut ranking, end), [Shm, Tcp], "both pause");
    }
}
