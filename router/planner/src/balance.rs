//! When a running request migrates from a fuller decode worker to an emptier one. Reports and the time are arguments.
//!
//! ```text
//! fullness of two workers   |----------------|---------------------|
//! differs by                0               STOP                 START       start above, go on until below
//! ```
//!
//! One request migrates at a time. The next one waits until load reports show the effect, so that no worker is emptied
//! too far and has to take requests back.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use baton_cluster_record::Role;

use crate::{ClusterView, Usability, WorkerKey, WorkerView};

/// A difference in the part of blocks in use. A migration costs a transfer and a pause as long: less is not worth it.
const START: f64 = 0.3;
/// Half as much, so that balanced workers stay balanced.
const STOP: f64 = 0.15;
/// Reports come every second at least.
const INTERVAL: Duration = Duration::from_millis(1500);
/// A worker below this fullness loses nothing by being the fuller one: a step reads every weight for a small batch too.
const CROWDED: f64 = 0.5;

/// The decisions of the last seconds.
#[derive(Debug, Default)]
pub struct Balance {
    /// The worker that gives and the one that takes, until they are even.
    pair: Option<(WorkerKey, WorkerKey)>,
    last: Option<Instant>,
}

/// One request migrates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Where it runs.
    pub from: WorkerKey,
    /// Where it is to run.
    pub to: WorkerKey,
}

impl Balance {
    /// The next migration, if one is due. `num_running` counts this router's requests at each decode worker: requests of
    /// other routers cannot migrate.
    pub fn next(
        &mut self,
        view: &ClusterView,
        num_running: &BTreeMap<WorkerKey, usize>,
        now: Instant,
    ) -> Option<Migration> {
        if self.last.is_some_and(|last| now < last + INTERVAL) {
            return None;
        }
        let ready = |worker: &&WorkerView| {
            worker.record.role == Role::Decode
                && worker.usability == Usability::Ready
                && worker.load.num_total_blocks > 0
        };
        let gives = |worker: &WorkerView| {
            fullness(worker) >= CROWDED
                && num_running.get(&WorkerKey::of(&worker.record)).is_some_and(|&num| num > 1)
        };
        // Of workers that understand each other's blocks: the fullest that gives, and the emptiest.
        let mut groups: Vec<(Option<&WorkerView>, &WorkerView)> = Vec::new();
        for worker in view.workers.iter().filter(ready) {
            let giver = Some(worker).filter(|worker| gives(worker));
            match groups.iter_mut().find(|(_, emptiest)| emptiest.is_like(worker)) {
                Some((fullest, emptiest)) => {
                    *fullest = fullest.iter().copied().chain(giver).max_by(by_fullness);
                    if by_fullness(&worker, emptiest).is_lt() {
                        *emptiest = worker;
                    }
                }
                None => groups.push((giver, worker)),
            }
        }
        let pairs = groups.into_iter().filter_map(|(fullest, emptiest)| Some((fullest?, emptiest)));
        let difference = |(from, to): &(&WorkerView, &WorkerView)| fullness(from) - fullness(to);
        let (from, to) = pairs.max_by(|a, b| difference(a).total_cmp(&difference(b)))?;
        let pair = (WorkerKey::of(&from.record), WorkerKey::of(&to.record));
        let bound = if self.pair.as_ref() == Some(&pair) { STOP } else { START };
        self.pair = (difference(&(from, to)) > bound).then_some(pair);
        let (from, to) = self.pair.clone()?;
        self.last = Some(now);
        Some(Migration { from, to })
    }
}

fn by_fullness(a: &&WorkerView, b: &&WorkerView) -> std::cmp::Ordering {
    fullness(a).total_cmp(&fullness(b))
}

/// The part of its blocks that is taken. What waits counts as if it had its blocks: it may wait for the end of a step alone.
fn fullness(worker: &WorkerView) -> f64 {
    let load = &worker.load;
    let num_free = load.num_free_blocks.saturating_sub(load.num_queued_blocks);
    1.0 - num_free.min(load.num_total_blocks) as f64 / load.num_total_blocks as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::view;

    /// `running` as `d0=3 d1=1`.
    fn running(text: &str) -> BTreeMap<WorkerKey, usize> {
        let pairs = text.split_whitespace().map(|word| {
            let (id, num) = word.split_once('=').expect("<id>=<number>");
            (WorkerKey { id: id.into(), incarnation: 1 }, num.parse().expect("a number"))
        });
        pairs.collect()
    }

    fn show(next: Option<Migration>) -> String {
        next.map_or_else(|| "-".into(), |next| format!("{}>{}", next.from, next.to))
    }

    #[test]
    fn the_fullest_gives_to_the_emptiest_when_they_differ_much() {
        let cases = [
            ("even", "d0 decode free=40\n d1 decode free=60", "d0=4 d1=4", "-"),
            ("uneven", "d0 decode free=20\n d1 decode free=90", "d0=4 d1=4", "d0>d1"),
            ("uneven, and far from full", "d0 decode free=60\n d1 decode free=100", "d0=4", "-"),
            ("a single request stays", "d0 decode free=20\n d1 decode free=90", "d0=1", "-"),
            ("requests of other routers stay", "d0 decode free=20\n d1 decode free=90", "d1=4", "-"),
            ("no other worker", "d0 decode free=5", "d0=4", "-"),
            ("not to one that leaves", "d0 decode free=5\n d1 decode free=99 draining", "d0=4", "-"),
            ("not from one that leaves", "d0 decode free=5 draining\n d1 decode free=99", "d0=4", "-"),
            ("prefill workers are no place", "d0 decode free=5\n p0 prefill free=99", "d0=4", "-"),
            ("nor those of another model", "d0 decode free=5\n d1 decode free=99 other-format", "d0=4", "-"),
            (
                "one that has no other of its model stops none",
                "d0 decode free=5 other-format\n d1 decode free=20\n d2 decode free=90",
                "d0=4 d1=4",
                "d1>d2",
            ),
            (
                "the extremes of many",
                "d0 decode free=50\n d1 decode free=10\n d2 decode free=80\n d3 decode free=95",
                "d0=4 d1=4 d2=4 d3=4",
                "d1>d3",
            ),
            (
                "a queue is fullness",
                "d0 decode free=50 waiting=2 queued-blocks=50\n d1 decode free=80",
                "d0=9 d1=9",
                "d0>d1",
            ),
            (
                "as far as it needs blocks",
                "d0 decode free=60 waiting=2 queued-blocks=5\n d1 decode free=100",
                "d0=9 d1=9",
                "-",
            ),
            (
                "on the emptier one, too",
                "d0 decode free=20\n d1 decode free=90 waiting=1 queued-blocks=60",
                "d0=9 d1=9",
                "-",
            ),
        ];
        for (name, workers, num_running, expected) in cases {
            let next = Balance::default().next(&view(workers), &running(num_running), Instant::now());
            assert_eq!(show(next), expected, "{name}");
        }
    }

    #[test]
    fn what_has_begun_goes_on_until_they_are_nearly_even_and_then_stays() {
        let mut balance = Balance::default();
        let mut now = Instant::now();
        let mut says = |free0: usize, free1: usize, expected: &str| {
            now += INTERVAL;
            let view = view(&format!("d0 decode free={free0}\n d1 decode free={free1}"));
            let next = balance.next(&view, &running("d0=9 d1=9"), now);
            assert_eq!(show(next), expected, "{free0} {free1}");
        };
        says(30, 55, "-");
        says(20, 60, "d0>d1");
        says(25, 50, "d0>d1");
        says(30, 46, "d0>d1");
        says(35, 45, "-");
        says(30, 55, "-");
        // Not straight back.
        says(60, 35, "-");
        says(66, 35, "d1>d0");
    }

    #[test]
    fn a_clock_that_jumps_makes_no_burst() {
        let mut balance = Balance::default();
        let start = Instant::now() + Duration::from_secs(86_400);
        let view = view("d0 decode free=0\n d1 decode free=100");
        let mut num = |now: Instant| {
            let next = (0..100).filter(|_| balance.next(&view, &running("d0=9"), now).is_some());
            next.count()
        };
        assert_eq!(num(start), 1);
        assert_eq!(num(start - Duration::from_secs(3600)), 0, "back");
        assert_eq!(num(start + Duration::from_secs(3600)), 1, "ahead");
    }

    #[test]
    fn no_two_migrations_are_closer_than_the_reports_that_show_them() {
        let mut balance = Balance::default();
        let start = Instant::now();
        let view = view("d0 decode free=0\n d1 decode free=100");
        let mut num_migrations = 0;
        for ms in 0..10_000 {
            let next = balance.next(&view, &running("d0=9"), start + Duration::from_millis(ms));
            num_migrations += usize::from(next.is_some());
        }
        assert_eq!(num_migrations, 7);
    }
}
