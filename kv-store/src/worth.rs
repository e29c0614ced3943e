//! What of a sequence is read in less time than it is computed. Pure.

use std::time::Duration;

use baton_cost::LinkLine;

/// A read must take less than this part of the time to compute: estimates are not exact.
const MARGIN: f64 = 0.9;

/// What is worth reading.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Worth {
    /// Blocks at the front of the sequence.
    pub num_blocks: usize,
    /// How long reading them is expected to take, where that was measured.
    pub expected: Duration,
    /// How long computing them takes.
    pub compute: Duration,
}

/// Blocks that follow each other, in one place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) num_blocks: usize,
    /// `None`: not known.
    pub(crate) speed: Option<LinkLine>,
}

/// The front of a sequence that saves the most time when it is read, up to the end of a run. What follows a run of unknown speed
/// is not read.
pub(crate) fn worth(runs: &[Run], block_bytes: usize, compute_block: Duration) -> Worth {
    let (mut best, mut most) = (Worth::default(), 0.0);
    let (mut num_blocks, mut seconds) = (0, 0.0);
    for run in runs {
        let Some(speed) = run.speed else { break };
        num_blocks += run.num_blocks;
        seconds += speed.seconds((run.num_blocks * block_bytes) as f64);
        let saved = MARGIN * num_blocks as f64 * compute_block.as_secs_f64() - seconds;
        if saved > most {
            most = saved;
            let expected = Duration::try_from_secs_f64(seconds).unwrap_or_default();
            best = Worth { num_blocks, expected, compute: compute_block * num_blocks as u32 };
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_saves_time() {
        // A block of 1 MB takes 100 ms to compute.
        let of = |runs: &[(usize, Option<(f64, f64)>)]| {
            let runs: Vec<_> = runs
                .iter()
                .map(|&(num_blocks, speed)| {
                    let line = |(latency_seconds, mb_per_second): (f64, f64)| LinkLine {
                        latency_seconds,
                        bytes_per_second: mb_per_second * 1e6,
                    };
                    Run { num_blocks, speed: speed.map(line) }
                })
                .collect();
            let worth = worth(&runs, 1_000_000, Duration::from_millis(100));
            assert_eq!(worth.compute, Duration::from_millis(100) * worth.num_blocks as u32);
            (worth.num_blocks, worth.expected.as_millis())
        };
        let memory = Some((0.0, f64::INFINITY));
        let fast = Some((0.05, 100.0));
        for (runs, expected) in [
            (vec![], (0, 0)),
            (vec![(10, memory)], (10, 0)),
            (vec![(10, fast)], (10, 150)),
            // 9.99 MB/s would be as fast as computing.
            (vec![(10, Some((0.0, 10.2)))], (0, 0)),
            (vec![(10, Some((0.0, 11.2)))], (10, 892)),
            // The latency of one block is too long, that of ten is not.
            (vec![(1, Some((0.2, 1e3)))], (0, 0)),
            (vec![(10, Some((0.2, 1e3)))], (10, 210)),
            (vec![(10, None)], (0, 0)),
            (vec![(10, memory), (10, None), (10, memory)], (10, 0)),
            (vec![(10, memory), (10, Some((0.0, 5.0)))], (10, 0)),
            // What is slow is read for what follows it.
            (vec![(2, Some((0.0, 5.0))), (10, memory)], (12, 400)),
        ] {
            assert_eq!(of(&runs), expected, "{runs:?}");
        }
    }
}
