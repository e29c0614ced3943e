//! How long recalls take. Pure.

use std::time::Duration;

/// What of earlier recalls still counts after one more.
const KEPT: f64 = 0.8;

/// The time of a block that is recalled, over the newest recalls. Long ones count more, so the latency of short ones does not
/// distort it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecallPace {
    num_blocks: f64,
    seconds: f64,
}

impl RecallPace {
    /// A recall of so many blocks took so long.
    pub(crate) fn observe(&mut self, num_blocks: usize, took: Duration) {
        if num_blocks > 0 {
            self.num_blocks = KEPT * self.num_blocks + num_blocks as f64;
            self.seconds = KEPT * self.seconds + took.as_secs_f64();
        }
    }

    /// Seconds for a block. `None`: none was recalled.
    pub(crate) fn block_seconds(&self) -> Option<f64> {
        (self.num_blocks > 0.0).then(|| self.seconds / self.num_blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_recalls_count_by_their_length() {
        let mut pace = RecallPace::default();
        pace.observe(0, Duration::from_secs(1));
        assert_eq!(pace.block_seconds(), None);
        pace.observe(100, Duration::from_millis(200));
        assert!((pace.block_seconds().unwrap() - 0.002).abs() < 1e-12);
        // One block with its latency changes little.
        pace.observe(1, Duration::from_millis(20));
        assert!((pace.block_seconds().unwrap() - 0.18 / 81.0).abs() < 1e-12);
        // A slower tier is the measure after a few recalls.
        (0..20).for_each(|_| pace.observe(100, Duration::from_secs(1)));
        assert!((pace.block_seconds().unwrap() - 0.01).abs() < 2e-4);
    }
}
