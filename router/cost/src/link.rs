//! The time of a transfer.

use std::time::Duration;

use crate::is_plausible;

/// Seconds of a transfer, linear in its bytes: the alpha-beta model (Hockney 1994).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkLine {
    /// Seconds of a transfer of no bytes.
    pub latency_seconds: f64,
    /// Bytes per second after that.
    pub bytes_per_second: f64,
}

/// Follows measured transfers of one link.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkCalibration {
    line: Option<LinkLine>,
}

/// Weight of the newest transfer.
const NEWEST: f64 = 0.2;
/// Of the first transfer: the latency's part.
const FIRST_LATENCY: f64 = 0.1;

impl LinkLine {
    /// Of a link that was not measured: 10 Gbit/s, after a call, a grant, a first write and a commit.
    pub const UNMEASURED: LinkLine = LinkLine { latency_seconds: 0.005, bytes_per_second: 1e9 };

    /// A transfer counts as at most so many times as long as expected, and at least this part.
    pub const OUTLIER: f64 = 4.0;

    /// Seconds of a transfer.
    pub fn seconds(&self, num_bytes: f64) -> f64 {
        self.latency_seconds + num_bytes / self.bytes_per_second
    }

    /// What to expect so long after the newest transfer: a link that was slower than one that was not measured is taken to be twice as
    /// fast with every minute, up to that. What keeps requests from using a link would otherwise never be measured again.
    #[must_use]
    pub fn after(self, idle: Duration) -> LinkLine {
        let factor = (idle.as_secs_f64() / 60.0).exp2();
        let LinkLine { latency_seconds, bytes_per_second } = LinkLine::UNMEASURED;
        LinkLine {
            latency_seconds: self.latency_seconds.min((self.latency_seconds / factor).max(latency_seconds)),
            bytes_per_second: self
                .bytes_per_second
                .max((self.bytes_per_second * factor).min(bytes_per_second)),
        }
    }

    /// The line, if it can be true.
    pub fn checked(self) -> Option<LinkLine> {
        let is_latency = (0.0..=60.0).contains(&self.latency_seconds);
        (is_latency && (1.0..=1e15).contains(&self.bytes_per_second)).then_some(self)
    }
}

impl LinkCalibration {
    /// A transfer of so many bytes took so long. What cannot be true is ignored.
    pub fn observe(&mut self, num_bytes: u64, seconds: f64) {
        if num_bytes == 0 || !is_plausible(seconds) {
            return;
        }
        let num_bytes = num_bytes as f64;
        let line = self.line.get_or_insert(LinkLine {
            latency_seconds: FIRST_LATENCY * seconds,
            bytes_per_second: num_bytes / seconds / (1.0 - FIRST_LATENCY),
        });
        let expected = line.seconds(num_bytes);
        let ratio = (seconds / expected).clamp(1.0 / LinkLine::OUTLIER, LinkLine::OUTLIER);
        // Each part changes by its share of the time: small transfers teach the latency, large ones the rate.
        let latency = line.latency_seconds / expected;
        let power = NEWEST / (latency * latency + (1.0 - latency) * (1.0 - latency));
        line.latency_seconds = (line.latency_seconds * ratio.powf(power * latency)).clamp(1e-9, 60.0);
        line.bytes_per_second =
            (line.bytes_per_second / ratio.powf(power * (1.0 - latency))).clamp(1.0, 1e15);
    }

    /// A transfer of so many bytes was given up after so long: it is known to take longer. That teaches what transfers were not
    /// expected to take so long, also before the first one.
    pub fn note_late(&mut self, num_bytes: u64, seconds: f64) {
        if self.line.unwrap_or(LinkLine::UNMEASURED).seconds(num_bytes as f64) < seconds {
            self.observe(num_bytes, seconds);
        }
    }

    /// What the link takes; `None` before the first transfer.
    pub fn line(&self) -> Option<LinkLine> {
        self.line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_learned_from_transfers_of_different_sizes() {
        for (latency_seconds, bytes_per_second) in [(0.001, 1e9), (0.000_02, 40e9), (0.03, 1e8)] {
            let truth = LinkLine { latency_seconds, bytes_per_second };
            let mut learned = LinkCalibration::default();
            for idx in 0..300 {
                let num_bytes = [4096, 1 << 20, 64 << 20][idx % 3];
                learned.observe(num_bytes, truth.seconds(num_bytes as f64));
            }
            let learned = learned.line().expect("it has seen transfers");
            for num_bytes in [4096.0, 1e7, 1e9] {
                let ratio = learned.seconds(num_bytes) / truth.seconds(num_bytes);
                assert!((0.9..1.1).contains(&ratio), "{truth:?} {learned:?} {num_bytes}: {ratio}");
            }
        }
    }

    #[test]
    fn a_slow_link_is_tried_again_after_some_minutes() {
        let slow = LinkLine { latency_seconds: 0.02, bytes_per_second: 1e7 };
        let after = |minutes: u64| slow.after(Duration::from_secs(60 * minutes));
        assert_eq!(after(0), slow);
        assert_eq!(after(1), LinkLine { latency_seconds: 0.01, bytes_per_second: 2e7 });
        assert_eq!(after(10_000), LinkLine::UNMEASURED);
        let fast = LinkLine { latency_seconds: 1e-5, bytes_per_second: 2e10 };
        assert_eq!(fast.after(Duration::from_secs(3600)), fast);
    }

    #[test]
    fn what_was_given_up_is_known_to_take_longer_and_nothing_else() {
        let mut learned = LinkCalibration::default();
        // As long as a link that was not measured: its first transfer may still be quick.
        learned.note_late(1 << 20, 0.001);
        assert_eq!(learned.line(), None);
        learned.note_late(1 << 20, 1.0);
        let seconds = |learned: &LinkCalibration| learned.line().expect("known").seconds((1 << 20) as f64);
        assert!((seconds(&learned) - 1.0).abs() < 1e-9);
        learned.note_late(1 << 20, 0.5);
        assert!((seconds(&learned) - 1.0).abs() < 1e-9, "that is no news");
        (0..30).for_each(|_| learned.note_late(1 << 20, 4.0));
        assert!(seconds(&learned) > 3.5);
    }

    #[test]
    fn what_cannot_be_true_teaches_nothing() {
        let mut learned = LinkCalibration::default();
        for seconds in [f64::NAN, 0.0, -1.0, f64::INFINITY, 1e9] {
            learned.observe(1000, seconds);
        }
        learned.observe(0, 1.0);
        assert_eq!(learned.line(), None);
        learned.observe(u64::MAX, 1e-9);
        assert!(learned.line().and_then(LinkLine::checked).is_some());
        assert_eq!(LinkLine { latency_seconds: f64::NAN, bytes_per_second: 1.0 }.checked(), None);
        assert_eq!(LinkLine { latency_seconds: 0.0, bytes_per_second: 0.0 }.checked(), None);
    }
}
