//! How long recalls take, by the tier that is read. Pure.

use std::time::Duration;

use baton_cost::LinkLine;

/// What of earlier recalls still counts after one more.
const KEPT: f64 = 0.8;
/// A recall counts as at most [`LinkLine::OUTLIER`] times as long as expected, and as these seconds at least: a tier that hung once
/// is as fast as before.
const LEAST_OUTLIER: f64 = 0.01;
/// By how much the fastest time grows with every recall.
const FORGOTTEN: f64 = 1.02;

/// The time of a block, over the newest recalls. Long ones count more, so the latency of short ones does not distort it.
#[derive(Clone, Copy, Debug, Default)]
struct BlockPace {
    num_blocks: f64,
    seconds: f64,
    /// The least time of a block lately.
    fastest: f64,
    /// When the newest recall was observed.
    at: Duration,
}

/// What a recall takes: its reads, each at the pace of its tier, and all that comes after them until the blocks are in the pool.
#[derive(Clone, Debug)]
pub struct RecallPace {
    reads: Vec<BlockPace>,
    rest: BlockPace,
    now: Duration,
}

impl BlockPace {
    /// So many blocks took so long.
    fn observe(&mut self, num_blocks: usize, took: Duration, now: Duration) {
        if num_blocks == 0 {
            return;
        }
        let num_blocks = num_blocks as f64;
        let most =
            self.seconds(now).map_or(f64::INFINITY, |expected| LinkLine::OUTLIER * expected * num_blocks);
        let took = took.as_secs_f64().min(most.max(LEAST_OUTLIER));
        if self.num_blocks == 0.0 {
            self.fastest = f64::INFINITY;
        }
        self.num_blocks = KEPT * self.num_blocks + num_blocks;
        self.seconds = KEPT * self.seconds + took;
        self.fastest = (FORGOTTEN * self.fastest).min(self.seconds / self.num_blocks);
        self.at = now;
    }

    /// Seconds for a block. `None`: none was observed. With every minute without one it is taken to be twice as fast, down to the least
    /// time: what keeps recalls from a tier would otherwise never be measured again.
    fn seconds(&self, now: Duration) -> Option<f64> {
        let seconds = self.seconds / self.num_blocks;
        let aged = seconds / (now.saturating_sub(self.at).as_secs_f64() / 60.0).exp2();
        (self.num_blocks > 0.0).then(|| aged.max(self.fastest.min(seconds)))
    }
}

impl RecallPace {
    /// Of so many tiers.
    pub fn new(num_tiers: usize) -> RecallPace {
        RecallPace {
            reads: vec![BlockPace::default(); num_tiers],
            rest: BlockPace::default(),
            now: Duration::ZERO,
        }
    }

    /// The time since any fixed moment.
    pub fn set_time(&mut self, now: Duration) {
        self.now = now;
    }

    /// So many blocks of a tier were read in this time.
    pub fn observe_read(&mut self, tier: usize, num_blocks: usize, took: Duration) {
        self.reads[tier].observe(num_blocks, took, self.now);
    }

    /// From the end of their reads until they were in the pool, so many blocks took so long.
    pub fn observe_rest(&mut self, num_blocks: usize, took: Duration) {
        self.rest.observe(num_blocks, took, self.now);
    }

    /// Seconds for a block of a tier, all in all. `None`: none was read from it.
    pub fn seconds(&self, tier: usize) -> Option<f64> {
        Some(self.reads[tier].seconds(self.now)? + self.rest_seconds())
    }

    /// Seconds for a block after its read.
    pub fn rest_seconds(&self) -> f64 {
        self.rest.seconds(self.now).unwrap_or(0.0)
    }

    /// The same as a link for blocks of so many bytes. It takes no time while nothing was read.
    pub fn speed(&self, tier: usize, block_bytes: f64) -> LinkLine {
        let seconds = self.seconds(tier).unwrap_or(0.0);
        LinkLine { latency_seconds: 0.0, bytes_per_second: block_bytes / seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_recalls_count_by_their_length() {
        let (mut pace, now) = (BlockPace::default(), Duration::ZERO);
        pace.observe(0, Duration::from_secs(1), now);
        assert_eq!(pace.seconds(now), None);
        pace.observe(100, Duration::from_millis(200), now);
        assert!((pace.seconds(now).unwrap() - 0.002).abs() < 1e-12);
        // One block with its latency changes little.
        pace.observe(1, Duration::from_millis(20), now);
        assert!((pace.seconds(now).unwrap() - 0.17 / 81.0).abs() < 1e-12);
        // A slower tier is the measure after a few recalls.
        (0..20).for_each(|_| pace.observe(100, Duration::from_secs(1), now));
        assert!((pace.seconds(now).unwrap() - 0.01).abs() < 2e-4);
    }

    #[test]
    fn what_took_no_time_may_take_some() {
        let mut pace = RecallPace::new(1);
        pace.observe_read(0, 10, Duration::ZERO);
        (0..40).for_each(|_| pace.observe_read(0, 10, Duration::from_millis(100)));
        assert!((pace.seconds(0).unwrap() - 0.01).abs() < 2e-4);
    }

    #[test]
    fn a_tier_that_hung_is_measured_again_after_some_minutes() {
        let mut pace = RecallPace::new(1);
        (0..50).for_each(|_| pace.observe_read(0, 64, Duration::from_millis(64)));
        (0..4).for_each(|_| pace.observe_read(0, 64, Duration::from_secs(60)));
        let hung = pace.seconds(0).unwrap();
        assert!((0.002..0.02).contains(&hung), "{hung}, not a second");
        let after = |pace: &mut RecallPace, minutes| {
            pace.set_time(Duration::from_mins(minutes));
            pace.seconds(0).unwrap()
        };
        assert!((after(&mut pace, 1) - hung / 2.0).abs() < 1e-12);
        // It was never faster than that.
        let fastest = after(&mut pace, 60);
        assert!((0.0009..0.0012).contains(&fastest), "{fastest}");
        // One that is slow for good is so again soon, and then stays so.
        (0..200).for_each(|_| pace.observe_read(0, 64, Duration::from_millis(640)));
        assert!(after(&mut pace, 120) > 0.009);
    }

    #[test]
    fn each_tier_has_its_own_time_and_all_the_same_rest() {
        let mut pace = RecallPace::new(2);
        assert_eq!(pace.seconds(0), None);
        pace.observe_read(0, 100, Duration::from_millis(1));
        pace.observe_read(1, 10, Duration::from_millis(100));
        pace.observe_rest(110, Duration::from_millis(11));
        assert!((pace.seconds(0).unwrap() - 1.1e-4).abs() < 1e-12);
        assert!((pace.seconds(1).unwrap() - 0.0101).abs() < 1e-12);
    }
}
