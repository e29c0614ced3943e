//! What of a sequence is read in less time than it is computed: before that, and meanwhile. Pure.

use std::time::Duration;

use baton_cost::{LinkLine, WORTH_WAITING};

/// What is worth reading.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Worth {
    /// Blocks at the front of the sequence.
    pub num_blocks: usize,
    /// How long reading them is expected to take, where that was measured.
    pub expected: Duration,
    /// How long computing them takes.
    pub compute: Duration,
    /// With those after them, all blocks at the front that tiers hold.
    pub num_held: usize,
}

/// Whether the blocks that are not read are computed in the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMode {
    /// No: whatever takes less time than computing is read. Estimates are not exact, so it must be a tenth less.
    Alone,
    /// They can be: what takes more than [`WORTH_WAITING`] of the time to compute it is read from its end meanwhile.
    BesideComputing,
}

/// Blocks that follow each other, in one place.
#[derive(Clone, Copy, Debug)]
pub struct TierRun {
    /// Its length.
    pub num_blocks: usize,
    /// What reading takes; `None`: not known.
    pub speed: Option<LinkLine>,
}

impl ReadMode {
    fn margin(self) -> f64 {
        match self {
            ReadMode::Alone => 0.9,
            ReadMode::BesideComputing => WORTH_WAITING,
        }
    }
}

impl TierRun {
    fn seconds(&self, num_blocks: usize, block_bytes: usize) -> Option<f64> {
        Some(self.speed?.seconds((num_blocks * block_bytes) as f64))
    }
}

/// The front of a sequence that saves the most time when it is read before anything is computed, up to the end of a run. What
/// follows a run of unknown speed is not read.
pub fn worth(runs: &[TierRun], block_bytes: usize, compute_block: Duration, mode: ReadMode) -> Worth {
    let num_held = runs.iter().map(|run| run.num_blocks).sum();
    let (mut best, mut most) = (Worth { num_held, ..Worth::default() }, 0.0);
    let (mut num_blocks, mut seconds) = (0, 0.0);
    for run in runs {
        let Some(run_seconds) = run.seconds(run.num_blocks, block_bytes) else { break };
        num_blocks += run.num_blocks;
        seconds += run_seconds;
        let saved = mode.margin() * num_blocks as f64 * compute_block.as_secs_f64() - seconds;
        if saved > most {
            most = saved;
            let expected = Duration::try_from_secs_f64(seconds).unwrap_or_default();
            best = Worth { num_blocks, expected, compute: compute_block * num_blocks as u32, num_held };
        }
    }
    best
}

/// Blocks at the end of a sequence that are read, from the last one on, in the time in which those before them are computed; see
/// [`baton_cost::meeting`]. `compute` says how long its first so many blocks take.
pub fn meeting(runs: &[TierRun], block_bytes: usize, compute: impl Fn(usize) -> Duration) -> usize {
    let read_seconds = |num_blocks: usize| {
        let (mut left, mut seconds) = (num_blocks, 0.0);
        for run in runs.iter().rev() {
            let num = run.num_blocks.min(left);
            if num > 0 {
                seconds += run.seconds(num, block_bytes).unwrap_or(f64::INFINITY);
            }
            left -= num;
        }
        seconds
    };
    let num_blocks = runs.iter().map(|run| run.num_blocks).sum();
    baton_cost::meeting(num_blocks, read_seconds, |num| compute(num).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(runs: &[(usize, Option<(f64, f64)>)]) -> Vec<TierRun> {
        let line = |(latency_seconds, mb_per_second): (f64, f64)| LinkLine {
            latency_seconds,
            bytes_per_second: mb_per_second * 1e6,
        };
        runs.iter().map(|&(num_blocks, speed)| TierRun { num_blocks, speed: speed.map(line) }).collect()
    }

    const BLOCK_BYTES: usize = 1_000_000;
    const MEMORY: Option<(f64, f64)> = Some((0.0, f64::INFINITY));
    const FAST: Option<(f64, f64)> = Some((0.05, 100.0));

    #[test]
    fn what_is_read_saves_time() {
        let of = |list: &[(usize, Option<(f64, f64)>)], mode| {
            let worth = worth(&runs(list), BLOCK_BYTES, Duration::from_millis(100), mode);
            assert_eq!(worth.compute, Duration::from_millis(100) * worth.num_blocks as u32);
            (worth.num_blocks, worth.expected.as_millis())
        };
        for (runs, expected) in [
            (vec![], (0, 0)),
            (vec![(10, MEMORY)], (10, 0)),
            (vec![(10, FAST)], (10, 150)),
            // 9.99 MB/s would be as fast as computing.
            (vec![(10, Some((0.0, 10.2)))], (0, 0)),
            (vec![(10, Some((0.0, 11.2)))], (10, 892)),
            // The latency of one block is too long, that of ten is not.
            (vec![(1, Some((0.2, 1e3)))], (0, 0)),
            (vec![(10, Some((0.2, 1e3)))], (10, 210)),
            (vec![(10, None)], (0, 0)),
            (vec![(10, MEMORY), (10, None), (10, MEMORY)], (10, 0)),
            (vec![(10, MEMORY), (10, Some((0.0, 5.0)))], (10, 0)),
            // What is slow is read for what follows it.
            (vec![(2, Some((0.0, 5.0))), (10, MEMORY)], (12, 400)),
        ] {
            assert_eq!(of(&runs, ReadMode::Alone), expected, "{runs:?}");
        }
        // Beside computing only what is much faster is waited for.
        let slow = vec![(10, Some((0.0, 32.0)))];
        assert_eq!((of(&slow, ReadMode::Alone), of(&slow, ReadMode::BesideComputing)), ((10, 312), (0, 0)));
        assert_eq!(of(&[(10, MEMORY), (10, Some((0.0, 11.0)))], ReadMode::BesideComputing), (10, 0));
        assert_eq!(of(&[(10, FAST)], ReadMode::BesideComputing), (10, 150));
    }

    #[test]
    fn reading_and_computing_meet() {
        let of = |list: &[(usize, Option<(f64, f64)>)]| {
            meeting(&runs(list), BLOCK_BYTES, |num| Duration::from_millis(100) * num as u32)
        };
        assert_eq!(of(&[(100, Some((0.0, 10.0)))]), 47);
        assert_eq!(of(&[(100, MEMORY)]), 100);
        assert_eq!(of(&[]), 0);
        // The latency counts once.
        assert_eq!(of(&[(100, Some((2.0, 10.0)))]), 36);
        // From the end: memory first, and nothing before what is not known.
        assert_eq!(of(&[(50, Some((0.0, 10.0))), (50, MEMORY)]), 73);
        assert_eq!(of(&[(50, MEMORY), (50, Some((0.0, 10.0)))]), 47);
        assert_eq!(of(&[(60, None), (40, MEMORY)]), 40);
        assert_eq!(of(&[(40, MEMORY), (60, None)]), 0);
    }
}
