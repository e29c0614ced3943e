//! How long recalls take, by the tier that is read. Pure.

use std::time::Duration;

use baton_cost::LinkLine;

/// What of earlier recalls still counts after one more.
const KEPT: f64 = 0.8;

/// The time of a block, over the newest recalls. Long ones count more, so the latency of short ones does not distort it.
#[derive(Clone, Copy, Debug, Default)]
struct BlockPace {
    num_blocks: f64,
    seconds: f64,
}

/// What a recall takes: its reads, each at the pace of its tier, and all that comes after them until the blocks are in the pool.
#[derive(Clone, Debug)]
pub struct RecallPace {
    reads: Vec<BlockPace>,
    rest: BlockPace,
}

impl BlockPace {
    /// So many blocks took so long.
    fn observe(&mut self, num_blocks: usize, took: Duration) {
        if num_blocks > 0 {
            self.num_blocks = KEPT * self.num_blocks + num_blocks as f64;
            self.seconds = KEPT * self.seconds + took.as_secs_f64();
        }
    }

    /// Seconds for a block. `None`: none was observed.
    fn seconds(&self) -> Option<f64> {
        (self.num_blocks > 0.0).then(|| self.seconds / self.num_blocks)
    }
}

impl RecallPace {
    /// Of so many tiers.
    pub fn new(num_tiers: usize) -> RecallPace {
        RecallPace { reads: vec![BlockPace::default(); num_tiers], rest: BlockPace::default() }
    }

    /// So many blocks of a tier were read in this time.
    pub fn observe_read(&mut self, tier: usize, num_blocks: usize, took: Duration) {
        self.reads[tier].observe(num_blocks, took);
    }

    /// From the end of their reads until they were in the pool, so many blocks took so long.
    pub fn observe_rest(&mut self, num_blocks: usize, took: Duration) {
        self.rest.observe(num_blocks, took);
    }

    /// Seconds for a block of a tier, all in all. `None`: none was read from it.
    pub fn seconds(&self, tier: usize) -> Option<f64> {
        Some(self.reads[tier].seconds()? + self.rest_seconds())
    }

    /// Seconds for a block after its read.
    pub fn rest_seconds(&self) -> f64 {
        self.rest.seconds().unwrap_or(0.0)
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
        let mut pace = BlockPace::default();
        pace.observe(0, Duration::from_secs(1));
        assert_eq!(pace.seconds(), None);
        pace.observe(100, Duration::from_millis(200));
        assert!((pace.seconds().unwrap() - 0.002).abs() < 1e-12);
        // One block with its latency changes little.
        pace.observe(1, Duration::from_millis(20));
        assert!((pace.seconds().unwrap() - 0.18 / 81.0).abs() < 1e-12);
        // A slower tier is the measure after a few recalls.
        (0..20).for_each(|_| pace.observe(100, Duration::from_secs(1)));
        assert!((pace.seconds().unwrap() - 0.01).abs() < 2e-4);
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
