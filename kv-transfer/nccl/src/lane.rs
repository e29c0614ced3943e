//! The order of groups on one communicator, and their deadline. Plain data: it knows neither sockets nor devices.
//!
//! ```text
//! announced --- go ---> granted --- post ---> posted --- done here, landed there ---> out
//!     |
//!     +--- no ---> out
//! ```
//!
//! NCCL matches the sends of one side with the receives of its peer by order alone. A group that is posted in another
//! order than the peer's never ends. So there is one order: that of announcements on the control connection. The
//! receiver answers them in that order, and both sides post the groups that were answered with "go" in that order. An
//! answer out of order is an error, before any group is posted.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use thiserror::Error;

/// Most groups that are announced and have not landed.
pub(super) const MAX_GROUPS: usize = 16;

/// The groups of one side that have not landed yet.
pub(super) struct Lane<T> {
    entries: VecDeque<Entry<T>>,
    next_sequence: u64,
    /// How many groups were posted so far.
    num_posted: u64,
    /// When the oldest group last made progress.
    since: Instant,
}

struct Entry<T> {
    sequence: u64,
    state: State,
    is_landed: bool,
    item: T,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Announced,
    Granted,
    /// Posted as the communicator's n-th group.
    Posted(u64),
}

/// The peer answered a group that was not announced, or answered in another order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("an answer to {0}, which is not what comes next")]
pub(super) struct OutOfOrder(u64);

impl<T> Lane<T> {
    pub(super) fn new(now: Instant) -> Lane<T> {
        Lane { entries: VecDeque::new(), next_sequence: 0, num_posted: 0, since: now }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The items of all groups, oldest first.
    pub(super) fn items(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|entry| &entry.item)
    }

    /// Sender: the number under which the item is announced.
    pub(super) fn announce(&mut self, item: T, now: Instant) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.push(Entry { sequence, state: State::Announced, is_landed: false, item }, now);
        sequence
    }

    /// Receiver: an announced group that is answered with "go". It has landed when it is done.
    pub(super) fn accept(&mut self, sequence: u64, item: T, now: Instant) {
        self.push(Entry { sequence, state: State::Granted, is_landed: true, item }, now);
    }

    fn push(&mut self, entry: Entry<T>, now: Instant) {
        if self.entries.is_empty() {
            self.since = now;
        }
        self.entries.push_back(entry);
    }

    /// The peer has answered "go".
    pub(super) fn go(&mut self, sequence: u64, now: Instant) -> Result<(), OutOfOrder> {
        let idx = self.unanswered(sequence)?;
        self.entries[idx].state = State::Granted;
        self.since = now;
        Ok(())
    }

    /// The peer has answered "no".
    pub(super) fn no(&mut self, sequence: u64, now: Instant) -> Result<T, OutOfOrder> {
        let idx = self.unanswered(sequence)?;
        self.since = now;
        Ok(self.entries.remove(idx).expect("found").item)
    }

    /// The peer has received the group.
    pub(super) fn landed(&mut self, sequence: u64, now: Instant) -> Result<(), OutOfOrder> {
        let entry = self.entries.iter_mut().find(|entry| !entry.is_landed);
        match entry {
            Some(entry) if entry.sequence == sequence && entry.state != State::Announced => {
                entry.is_landed = true;
                self.since = now;
                Ok(())
            }
            _ => Err(OutOfOrder(sequence)),
        }
    }

    fn unanswered(&self, sequence: u64) -> Result<usize, OutOfOrder> {
        let idx = self.entries.iter().position(|entry| entry.state == State::Announced);
        idx.filter(|&idx| self.entries[idx].sequence == sequence).ok_or(OutOfOrder(sequence))
    }

    /// The group to post now, if there is one. The caller posts it and then calls [`posted`](Self::posted).
    pub(super) fn next_to_post(&self) -> Option<&T> {
        self.entries.iter().find(|entry| entry.state == State::Granted).map(|entry| &entry.item)
    }

    /// The group of [`next_to_post`](Self::next_to_post) was posted.
    pub(super) fn posted(&mut self) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.state == State::Granted) {
            entry.state = State::Posted(self.num_posted);
            self.num_posted += 1;
        }
    }

    /// The oldest group with its number, if it is done on both sides. Call it until it returns `None`. `num_done`
    /// groups of the communicator are done.
    pub(super) fn next_out(&mut self, num_done: u64, now: Instant) -> Option<(u64, T)> {
        let first = self.entries.front()?;
        match first.state {
            State::Posted(nth) if nth < num_done && first.is_landed => {
                self.since = now;
                self.entries.pop_front().map(|entry| (entry.sequence, entry.item))
            }
            _ => None,
        }
    }

    /// Whether there is a group and the oldest one made no progress for so long.
    pub(super) fn is_late(&self, now: Instant, patience: Duration) -> bool {
        !self.entries.is_empty() && now.saturating_duration_since(self.since) >= patience
    }

    /// All groups that are left when the communicator has ended, oldest first, and whether the peer had answered each.
    pub(super) fn into_items(self) -> impl Iterator<Item = (T, bool)> {
        self.entries.into_iter().map(|entry| (entry.item, entry.state != State::Announced))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays a script on a sender's lane and says what comes of it. `go 1`, `no 1`, `landed 1`; `announce`; `post`;
    /// `done 2` (so many groups); `late 5` (asks, as many seconds after the start).
    fn play(script: &str) -> String {
        let start = Instant::now();
        let mut now = start;
        let mut lane = Lane::new(start);
        let mut told = Vec::new();
        for line in script.split(';').map(str::trim) {
            now += Duration::from_secs(1);
            let (word, number) = line.split_once(' ').unwrap_or((line, "0"));
            let number: u64 = number.parse().unwrap();
            let mut answer = |result: Result<String, OutOfOrder>| match result {
                Ok(text) if text.is_empty() => {}
                Ok(text) => told.push(text),
                Err(OutOfOrder(sequence)) => told.push(format!("broken {sequence}")),
            };
            match word {
                "announce" => {
                    let name = lane.next_sequence;
                    lane.announce(name, now);
                }
                "go" => answer(lane.go(number, now).map(|()| String::new())),
                "no" => answer(lane.no(number, now).map(|item| format!("refused {item}"))),
                "landed" => answer(lane.landed(number, now).map(|()| String::new())),
                "post" => {
                    let next =
                        lane.next_to_post().map_or("nothing to post".into(), |item| format!("post {item}"));
                    answer(Ok(next));
                    lane.posted();
                }
                "done" => {
                    while let Some((_, item)) = lane.next_out(number, now) {
                        answer(Ok(format!("out {item}")));
                    }
                }
                "late" => {
                    let is_late = lane.is_late(start + Duration::from_secs(number), Duration::from_secs(10));
                    answer(Ok(is_late.to_string()));
                }
                other => panic!("{other}"),
            }
        }
        told.join(", ")
    }

    #[test]
    fn groups_are_posted_in_the_order_of_announcements() {
        let check = |script: &str, expected: &str| assert_eq!(play(script), expected, "{script}");
        check("announce; post", "nothing to post");
        check("announce; announce; go 0; go 1; post; post; post", "post 0, post 1, nothing to post");
        check("announce; announce; go 0; post; go 1; post", "post 0, post 1");
        // A refused group leaves no gap.
        check("announce; announce; announce; go 0; no 1; go 2; post; post", "refused 1, post 0, post 2");
    }

    #[test]
    fn a_group_is_out_when_both_sides_are_done_with_it() {
        let check = |script: &str, expected: &str| assert_eq!(play(script), expected, "{script}");
        let two = "announce; announce; go 0; go 1; post; post";
        check(&format!("{two}; done 1"), "post 0, post 1");
        check(&format!("{two}; landed 0; done 0"), "post 0, post 1");
        check(&format!("{two}; landed 0; done 2; landed 1; done 2"), "post 0, post 1, out 0, out 1");
        check(&format!("{two}; landed 0; landed 1; done 1"), "post 0, post 1, out 0");
    }

    #[test]
    fn answers_out_of_order_are_found() {
        let check = |script: &str, expected: &str| assert_eq!(play(script), expected, "{script}");
        check("go 0", "broken 0");
        check("announce; go 1", "broken 1");
        check("announce; announce; go 1", "broken 1");
        check("announce; go 0; go 0", "broken 0");
        check("announce; go 0; no 0", "broken 0");
        check("announce; landed 0", "broken 0");
        check("announce; announce; go 0; go 1; landed 1", "broken 1");
        check("announce; go 0; landed 0; landed 0", "broken 0");
    }

    #[test]
    fn whatever_moves_sets_the_clock_back() {
        let check = |script: &str, expected: &str| assert_eq!(play(script), expected, "{script}");
        check("late 100", "false");
        // Announced after one second.
        check("announce; late 10; late 11", "false, true");
        check("announce; go 0; late 11; late 12", "false, true");
        // A second announcement is no progress of the first.
        check("announce; announce; late 11", "true");
        check(
            "announce; announce; go 0; post; landed 0; done 1; late 15; late 16",
            "post 0, out 0, false, true",
        );
    }
}
