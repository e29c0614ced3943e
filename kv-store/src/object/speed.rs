//! How fast an object store sends records, as it was measured, and when it is measured again. Pure: bytes and times in.

use std::time::{Duration, Instant};

use baton_cost::LinkLine;

/// Weight of the newest read.
const NEWEST: f64 = 0.3;

/// Between measurements that fail: the first pause, and the longest.
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(300);

/// A read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) num_bytes: u64,
    pub(super) seconds: f64,
}

/// Pauses between measurements that fail. Each is twice as long as the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pauses {
    /// The newest one and its end; `None`: the store was measured, or not yet.
    pause: Option<(Duration, Instant)>,
}

impl Pauses {
    /// Whether the store may be measured now.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.pause.is_none_or(|(_, end)| now >= end)
    }

    /// A measurement has ended.
    pub(super) fn observe(&mut self, is_measured: bool, now: Instant) {
        let next = self.pause.map_or(MIN_PAUSE, |(pause, _)| (pause * 2).min(MAX_PAUSE));
        self.pause = (!is_measured).then(|| (next, now + next));
    }
}

/// The line through a read of one record, and one of many.
pub(super) fn through(one: Timing, many: Timing) -> Option<LinkLine> {
    let (num_bytes, seconds) = ((many.num_bytes - one.num_bytes) as f64, many.seconds - one.seconds);
    let bytes_per_second = match num_bytes > 0.0 && seconds > 0.0 {
        true => num_bytes / seconds,
        false => many.num_bytes as f64 / many.seconds,
    };
    let latency_seconds = (one.seconds - one.num_bytes as f64 / bytes_per_second).max(0.0);
    LinkLine { latency_seconds, bytes_per_second }.checked()
}

/// The line after one more read.
pub(super) fn after(line: LinkLine, read: Timing) -> LinkLine {
    let ratio = read.seconds / line.seconds(read.num_bytes as f64);
    let factor = ratio.clamp(1.0 / LinkLine::OUTLIER, LinkLine::OUTLIER).powf(NEWEST);
    let LinkLine { latency_seconds, bytes_per_second } = line;
    LinkLine { latency_seconds: latency_seconds * factor, bytes_per_second: bytes_per_second / factor }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: LinkLine, num_bytes: u64) -> Timing {
        Timing { num_bytes, seconds: line.seconds(num_bytes as f64) }
    }

    #[test]
    fn two_reads_tell_latency_and_rate() {
        for (latency_seconds, bytes_per_second) in [(0.001, 1e9), (0.03, 1e8), (0.0, 1e6)] {
            let truth = LinkLine { latency_seconds, bytes_per_second };
            let found = through(read(truth, 1 << 16), read(truth, 8 << 20)).expect("a line");
            let ratio = found.seconds(1e8) / truth.seconds(1e8);
            assert!((0.999..1.001).contains(&ratio), "{truth:?} {found:?}");
            assert!((found.latency_seconds - latency_seconds).abs() < 1e-6, "{truth:?} {found:?}");
        }
        let one = Timing { num_bytes: 1000, seconds: 0.1 };
        let alone = through(one, one).expect("a line");
        assert_eq!((alone.latency_seconds, alone.bytes_per_second), (0.0, 10_000.0));
        let slow_one = Timing { num_bytes: 1000, seconds: 2.0 };
        let slow = through(slow_one, Timing { num_bytes: 8000, seconds: 1.0 }).expect("a line");
        assert_eq!((slow.latency_seconds, slow.bytes_per_second), (1.875, 8000.0));
        assert_eq!(through(one, Timing { num_bytes: 2000, seconds: f64::NAN }), None);
    }

    #[test]
    fn a_store_that_cannot_be_measured_is_tried_more_and_more_seldom() {
        let (mut pauses, mut now) = (Pauses::default(), Instant::now());
        assert!(pauses.is_over(now));
        for seconds in [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300] {
            pauses.observe(false, now);
            let end = now + Duration::from_secs(seconds);
            assert!(!pauses.is_over(end - Duration::from_millis(1)) && pauses.is_over(end), "{seconds}");
            now = end;
        }
        pauses.observe(true, now);
        assert!(pauses.is_over(now));
        pauses.observe(false, now);
        assert!(pauses.is_over(now + MIN_PAUSE));
    }

    #[test]
    fn a_line_follows_the_store() {
        let (old, new) = (
            LinkLine { latency_seconds: 0.01, bytes_per_second: 1e8 },
            LinkLine { latency_seconds: 0.02, bytes_per_second: 5e7 },
        );
        let line = (0..12).fold(old, |line, _| after(line, read(new, 10 << 20)));
        assert!((0.97..1.03).contains(&(line.seconds(1e8) / new.seconds(1e8))), "{line:?}");
        let once = after(old, Timing { num_bytes: 1000, seconds: 1e6 });
        assert!(once.latency_seconds < 0.02, "one outlier is not believed: {once:?}");
    }
}
