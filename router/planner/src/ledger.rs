//! What a router has sent to one worker and no load report of it counts yet. It counts in full until a report echoes its
//! number, and no longer than the request lives: nothing counts twice, and nothing lingers.
//!
//! ```text
//!          send            report echoes its number
//! request ------> open ------------------------------> the worker's reports count it
//!                  |  computed: its prompt is no work any more
//!                  +--- settle: it ended, failed or was cancelled
//! ```

use std::collections::BTreeMap;

/// Reports of a worker without echo after which it counts a request: the first may have been made before it came.
const SILENT_REPORTS: u32 = 2;

/// What requests bring to a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentWork {
    /// Requests.
    pub num_requests: u64,
    /// Prompt tokens to compute.
    pub num_tokens: u64,
    /// Pairs of those and the tokens that each sees.
    pub num_pairs: u64,
    /// Tokens of the sequences, which decoding reads.
    pub num_context_tokens: u64,
    /// Blocks that they take.
    pub num_blocks: u64,
}

/// What was sent to one worker.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    next: u64,
    /// Uncovered requests by number.
    open: BTreeMap<u64, Open>,
    /// Of all of them.
    total: SentWork,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    work: SentWork,
    num_reports: u32,
}

impl SentWork {
    fn add(&mut self, other: &SentWork) {
        self.each(other, u64::saturating_add);
    }

    fn remove(&mut self, other: &SentWork) {
        self.each(other, u64::saturating_sub);
    }

    fn each(&mut self, other: &SentWork, apply: fn(u64, u64) -> u64) {
        self.num_requests = apply(self.num_requests, other.num_requests);
        self.num_tokens = apply(self.num_tokens, other.num_tokens);
        self.num_pairs = apply(self.num_pairs, other.num_pairs);
        self.num_context_tokens = apply(self.num_context_tokens, other.num_context_tokens);
        self.num_blocks = apply(self.num_blocks, other.num_blocks);
    }
}

impl Ledger {
    /// A ledger whose first request has this number.
    pub fn starting_at(number: u64) -> Ledger {
        Ledger { next: number, ..Ledger::default() }
    }

    /// The number of the next request.
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// A request is sent. Returns its number, for the worker's echo.
    pub fn send(&mut self, work: SentWork) -> u64 {
        let number = self.next;
        self.next += 1;
        self.total.add(&work);
        self.open.insert(number, Open { work, num_reports: 0 });
        number
    }

    /// Numbers below need no echo any more.
    pub fn settled_below(&self) -> u64 {
        self.open.first_key_value().map_or(self.next, |(&number, _)| number)
    }

    /// Its first token has come: its prompt is computed. Its blocks and its sequence stay until a report counts them.
    pub fn computed(&mut self, number: u64) {
        if let Some(open) = self.open.get_mut(&number) {
            let prompt = SentWork {
                num_tokens: open.work.num_tokens,
                num_pairs: open.work.num_pairs,
                ..SentWork::default()
            };
            open.work.remove(&prompt);
            self.total.remove(&prompt);
        }
    }

    /// It ended, failed, was cancelled, or is covered.
    pub fn settle(&mut self, number: u64) {
        if let Some(open) = self.open.remove(&number) {
            self.total.remove(&open.work);
        }
    }

    /// A report has come that covers all numbers below `below`, and `numbers`.
    pub fn cover(&mut self, below: u64, numbers: &[u64]) {
        while let Some(number) = self.open.first_key_value().map(|(&number, _)| number).filter(|&n| n < below)
        {
            self.settle(number);
        }
        numbers.iter().for_each(|&number| self.settle(number));
    }

    /// A report without echo has come, from an older worker.
    pub fn cover_silently(&mut self) {
        self.open.values_mut().for_each(|open| open.num_reports += 1);
        let is_old = |(_, open): &(&u64, &Open)| open.num_reports >= SILENT_REPORTS;
        let old: Vec<u64> = self.open.iter().filter(is_old).map(|(&number, _)| number).collect();
        old.into_iter().for_each(|number| self.settle(number));
    }

    /// What no report counts yet.
    pub fn sent(&self) -> SentWork {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(num_tokens: u64) -> SentWork {
        SentWork {
            num_requests: 1,
            num_tokens,
            num_pairs: num_tokens * num_tokens,
            num_context_tokens: num_tokens,
            num_blocks: num_tokens.div_ceil(16),
        }
    }

    /// Plays lines like `send 100`, `cover 2 4,5`, `computed 1`, `settle 0`, `silent`, and compares requests, tokens and
    /// blocks after each with what follows the arrow.
    fn play(script: &str) {
        let mut ledger = Ledger::default();
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (action, expected) = line.split_once("->").expect("<action> -> <state>");
            let words: Vec<&str> = action.split_whitespace().collect();
            let num = |idx: usize| words[idx].parse().expect("a number");
            match words[0] {
                "send" => drop(ledger.send(work(num(1)))),
                "computed" => ledger.computed(num(1)),
                "settle" => ledger.settle(num(1)),
                "cover" => {
                    let numbers: Vec<u64> = words.get(2).map_or_else(Vec::new, |numbers| {
                        numbers.split(',').map(|number| number.parse().expect("a number")).collect()
                    });
                    ledger.cover(num(1), &numbers);
                }
                "silent" => ledger.cover_silently(),
                other => panic!("{other}"),
            }
            let SentWork { num_requests, num_tokens, num_blocks, .. } = ledger.sent();
            let state = format!("{num_requests} {num_tokens} {num_blocks} <{}", ledger.settled_below());
            assert_eq!(state, expected.trim(), "after {action}");
        }
    }

    #[test]
    fn what_was_sent_counts_until_a_report_or_its_end() {
        play(
            "send 100000 -> 1 100000 6250 <0
             send 500 -> 2 100500 6282 <0
             send 16 -> 3 100516 6283 <0
             cover 0 1 -> 2 100016 6251 <0
             cover 0 1 -> 2 100016 6251 <0
             settle 1 -> 2 100016 6251 <0
             computed 0 -> 2 16 6251 <0
             computed 0 -> 2 16 6251 <0
             settle 0 -> 1 16 1 <2
             cover 3 -> 0 0 0 <3
             send 7 -> 1 7 1 <3
             cover 99 77,3 -> 0 0 0 <4",
        );
    }

    #[test]
    fn an_older_worker_counts_a_request_with_its_second_report() {
        play(
            "send 100 -> 1 100 7 <0
             silent -> 1 100 7 <0
             send 10 -> 2 110 8 <0
             silent -> 1 10 1 <1
             silent -> 0 0 0 <2",
        );
    }

    #[test]
    fn absurd_numbers_are_contained() {
        let mut ledger = Ledger::default();
        let all = SentWork { num_tokens: u64::MAX, num_blocks: u64::MAX, ..work(1) };
        let numbers: Vec<u64> = (0..3).map(|_| ledger.send(all)).collect();
        assert_eq!(ledger.sent().num_tokens, u64::MAX);
        ledger.cover(u64::MAX, &[u64::MAX, 5]);
        numbers.into_iter().for_each(|number| ledger.settle(number));
        assert_eq!(ledger.sent(), SentWork::default());
    }
}
