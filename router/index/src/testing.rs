//! Streams of events against a plain model: a set of blocks for each worker. For tests and fuzzing.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use baton_kv_events::{
    BatchKind, BlockHolder, BlockKey, CacheEvent, CacheLevel, CacheReader, EventBatch, EventLog, MAX_TIERS,
};

use crate::{CacheFeed, FeedError, KvIndex, SourceState, feed};

/// Blocks of the tree of all prompts.
const NUM_BLOCKS: u64 = 120;
const NUM_WORKERS: usize = 5;
/// Blocks of a worker's pool.
const POOL: usize = 90;

/// One worker, what its events say, and what a router has got of that.
struct Worker {
    tree: Tree,
    log: EventLog,
    /// What it held before each event.
    history: Vec<BTreeSet<u64>>,
    feed: CacheFeed,
    /// Batches that were sent, whether they came or not.
    sent: Vec<EventBatch>,
    owner: u32,
    /// The next event that the router needed when it last knew.
    known: usize,
}

/// The tree of all prompts.
#[derive(Clone, Copy, Debug)]
enum Tree {
    /// Each block but the first three follows another one, and two follow each.
    Bushy,
    /// Thirty blocks follow each other before a branch.
    Long,
}

impl Tree {
    fn parent(self, block: u64) -> Option<u64> {
        match self {
            Tree::Bushy => block.checked_sub(3).map(|above| above / 2),
            Tree::Long if block > 0 && block.is_multiple_of(30) => Some(block / 2 + 3),
            Tree::Long => block.checked_sub(1),
        }
    }

    /// The prompt that ends with a block.
    fn prompt(self, mut block: u64) -> Vec<u64> {
        let mut blocks = vec![block];
        while let Some(before) = self.parent(block) {
            blocks.push(before);
            block = before;
        }
        blocks.reverse();
        blocks
    }
}

fn key(block: u64) -> BlockKey {
    BlockKey(block * 0x1_0000_0001)
}

/// Plays a script, two bytes a step after the first one, and compares what each worker is said to hold of each prompt with the
/// model.
///
/// # Panics
/// When they differ, or something is left over.
pub fn check(script: &[u8]) {
    let Some((tree, script)) = script.split_first() else { return };
    let tree = if tree & 1 == 0 { Tree::Bushy } else { Tree::Long };
    let index = Arc::new(KvIndex::new(2 * NUM_WORKERS + 6));
    let mut num_workers = 0;
    let mut start = || {
        num_workers += 1;
        Worker {
            tree,
            log: EventLog::new(64),
            history: vec![BTreeSet::new()],
            feed: CacheFeed::new(index.clone(), num_workers, POOL),
            sent: Vec::new(),
            owner: num_workers,
            known: 0,
        }
    };
    let mut workers: Vec<Worker> = (0..NUM_WORKERS).map(|_| start()).collect();
    for step in script.chunks_exact(2) {
        let worker = &mut workers[usize::from(step[0] >> 4) % NUM_WORKERS];
        let block = u64::from(step[1]) % NUM_BLOCKS;
        match step[0] & 15 {
            0..=2 => worker.store(block, 4),
            3 => worker.store(block, 60),
            4 => worker.store(block, 1),
            5 => worker.remove(&[block]),
            6 => {
                let mut end = tree.prompt(block);
                end.reverse();
                end.truncate(usize::from(step[1]) / 4 + 1);
                worker.remove(&end);
            }
            7 => worker.remove(&[block, 0, block, block.saturating_sub(1), NUM_BLOCKS + block]),
            8 => worker.lose(),
            9 => worker.repeat(usize::from(step[1])),
            10 => worker.ask_again(),
            11 => worker.dump(),
            12 => worker.send_nonsense(),
            13 => index.sweep(usize::from(step[1])),
            14 if step[1] < 40 => *worker = start(),
            _ => worker.deliver(),
        }
        worker.check();
        let num_held = workers.iter().map(Worker::num_held).sum::<usize>();
        check_lookups(tree, &index, &workers);
        if index.is_swept() {
            let num_memberships = index.size().num_memberships;
            assert!(num_memberships <= num_held as u64, "{num_memberships} of {num_held}");
        }
    }
    for worker in &mut workers {
        worker.deliver();
        worker.ask_again();
        worker.ask_again();
        assert_eq!(worker.feed.state(), SourceState::Exact);
        assert_eq!(worker.feed.resume_from(), Some(worker.log.next()));
        worker.check();
    }
    check_lookups(tree, &index, &workers);
    drop(workers);
    assert!(
        (0..NUM_BLOCKS).all(|block| index.lookup(&tree.prompt(block), key).is_empty()),
        "they are gone at once"
    );
    index.sweep(usize::MAX);
    let size = index.size();
    assert_eq!((size.num_blocks, size.num_memberships), (0, 0));
}

/// Plays events as no worker sends them: blocks that follow any other, far too many, in any order. They are contained.
///
/// # Panics
/// When they are not.
pub fn check_nonsense(script: &[u8]) {
    let index = Arc::new(KvIndex::new(6));
    let mut feed = CacheFeed::new(index.clone(), 1, 30);
    for (number, step) in script.chunks_exact(4).enumerate() {
        let block = |byte: u8| BlockKey(u64::from(byte % 50));
        // All levels that there can be, and one that there cannot.
        let part = CacheLevel(1 + step[3] % 3);
        let event = match step[0] % 6 {
            4 => CacheEvent::stored(Some(block(step[1])), vec![block(step[2])]).at(part),
            5 => CacheEvent::removed(vec![block(step[1]), block(step[3])]).at(part),
            0 => CacheEvent::removed(vec![block(step[1]), block(step[2])]),
            1 => CacheEvent::stored(None, vec![block(step[1]), block(step[2]), block(step[3])]),
            _ => CacheEvent::stored(Some(block(step[1])), vec![block(step[2]), block(step[3])]),
        };
        let events = vec![event];
        let kind = if step[0] > 250 { BatchKind::DumpEnd } else { BatchKind::Events };
        let first =
            if step[0] > 240 { u64::from(step[3]) } else { feed.resume_from().unwrap_or(number as u64) };
        // Anything but a panic is an answer.
        let _ = feed.take(&EventBatch { first, events, kind });
        // Each level may be dumped beside what it was before.
        assert!(feed.num_blocks() <= 30 && index.size().num_memberships <= 180);
        for holder in index.lookup(&[step[1], step[2], step[3]], block) {
            let (owner, level) = feed::owner_and_level(holder.owner);
            assert!(owner == 1 && usize::from(level.0) <= MAX_TIERS);
            assert!(holder.num_blocks <= 3);
        }
    }
    drop(feed);
    index.sweep(usize::MAX);
    assert_eq!(index.size().num_memberships, 0);
}

/// What is believed of each block, one by one.
struct PlainBeliefs {
    pool: usize,
    num_reports: u64,
    num_added: u64,
    blocks: BTreeMap<u64, PlainBelief>,
}

struct PlainBelief {
    time: u64,
    prompt: u64,
    place: Reverse<usize>,
    num_sent: u32,
}

impl PlainBeliefs {
    fn add(&mut self, prompt: &[u64], num_reports: u64, is_sent: bool) {
        self.num_added += 1;
        let time = self.num_reports + num_reports;
        let chain = &prompt[..prompt.len().min(self.pool)];
        for (place, &block) in chain.iter().enumerate() {
            let new = PlainBelief { time, prompt: 0, place: Reverse(place), num_sent: 0 };
            let belief = self.blocks.entry(block).or_insert(new);
            belief.num_sent = if is_sent { belief.num_sent + 1 } else { belief.num_sent.saturating_sub(1) };
            if time > belief.time || belief.num_sent == 0 {
                belief.time = time;
            }
            belief.prompt = self.num_added;
        }
        while self.blocks.len() > self.pool {
            let others = self.blocks.iter().filter(|(block, _)| !chain.contains(block));
            let first = others.min_by_key(|(_, belief)| (belief.time, belief.prompt, belief.place));
            let block = *first.expect("a chain fits into the pool").0;
            self.blocks.remove(&block);
        }
    }

    fn on_report(&mut self) {
        self.num_reports += 1;
        let now = self.num_reports;
        self.blocks.retain(|_, belief| belief.time >= now);
    }

    fn num_held(&self, prompt: &[u64]) -> usize {
        prompt.iter().take_while(|block| self.blocks.contains_key(*block)).count()
    }
}

/// Plays prompts that are sent to a worker and finish there, and its reports in between. A prompt is believed to be cached at once, as
/// far as the pool has room, nothing is for longer than it may be, and all of it is as the model says.
///
/// # Panics
/// When that is not so.
pub fn check_beliefs(script: &[u8]) {
    let Some((first, script)) = script.split_first() else { return };
    let tree = if first & 1 == 0 { Tree::Bushy } else { Tree::Long };
    let index = Arc::new(KvIndex::new(4));
    // Less than some prompts have.
    let pool = 1 + usize::from(first >> 1) % 50;
    let mut feed = CacheFeed::new(index.clone(), 1, pool);
    let nothing = EventBatch { first: 0, events: Vec::new(), kind: BatchKind::DumpEnd };
    feed.take(&nothing).expect("it is whole");
    let blocks = BTreeMap::new();
    let mut plain = PlainBeliefs { pool, num_reports: 0, num_added: 0, blocks };
    for step in script.chunks_exact(2) {
        let prompt = tree.prompt(u64::from(step[1]) % NUM_BLOCKS);
        let blocks = prompt.iter().copied().map(key);
        match step[0] % 4 {
            0 => {
                feed.on_report();
                plain.on_report();
                continue;
            }
            1 => {
                feed.finished(blocks).expect("there is room for it");
                plain.add(&prompt, 2, false);
            }
            _ => {
                feed.expect(blocks).expect("there is room for it");
                plain.add(&prompt, 64, true);
            }
        }
        let found = |prompt: &[u64]| -> Vec<usize> {
            index.lookup(prompt, key).iter().map(|holder| holder.num_blocks).collect()
        };
        assert_eq!(found(&prompt), [prompt.len().min(pool)], "of {prompt:?}");
        for block in (u64::from(step[1]) % 17..NUM_BLOCKS).step_by(17) {
            let prompt = tree.prompt(block);
            let held = Some(plain.num_held(&prompt)).filter(|&num| num > 0);
            assert_eq!(found(&prompt), held.into_iter().collect::<Vec<_>>(), "of {prompt:?}");
        }
        assert_eq!(feed.num_blocks(), plain.blocks.len());
    }
    // It is believed for 64 reports at most.
    (0..65).for_each(|_| feed.on_report());
    assert_eq!((feed.num_blocks(), index.size().num_memberships), (0, 0));
}

fn check_lookups(tree: Tree, index: &KvIndex, workers: &[Worker]) {
    for block in (NUM_BLOCKS / 2..NUM_BLOCKS).step_by(7) {
        let prompt = tree.prompt(block);
        let mut found = index.lookup(&prompt, key);
        found.sort();
        let num_held = |worker: &Worker| {
            let held = worker.known();
            prompt.iter().take_while(|block| held.contains(block)).count()
        };
        let expected: Vec<_> = workers
            .iter()
            .map(|worker| (worker.owner, num_held(worker)))
            .filter(|&(_, num)| num > 0)
            .collect();
        let mut found: Vec<_> = found.into_iter().map(|holder| (holder.owner, holder.num_blocks)).collect();
        found.sort_unstable();
        let mut expected = expected;
        expected.sort_unstable();
        assert_eq!(found, expected, "of {prompt:?}");
    }
}

impl Worker {
    fn held(&self) -> &BTreeSet<u64> {
        self.history.last().expect("there is always one")
    }

    /// What it held when the newest event happened that the router has.
    fn known(&self) -> &BTreeSet<u64> {
        &self.history[self.known]
    }

    fn num_held(&self) -> usize {
        self.feed.num_blocks()
    }

    fn happens(&mut self, event: CacheEvent, held: BTreeSet<u64>) {
        let next = self.log.next();
        self.log.append(BlockHolder::Pool, vec![event]);
        // What changes nothing is left out.
        if self.log.next() > next {
            self.history.push(held);
        }
    }

    /// The end of a prompt.
    fn store(&mut self, block: u64, num: usize) {
        let prompt = self.tree.prompt(block);
        let (before, end) = prompt.split_at(prompt.len().saturating_sub(num));
        let known = self.held().clone();
        if known.union(&end.iter().copied().collect()).count() > POOL {
            return;
        }
        // Each run of new blocks is an event of its own.
        let (mut held, mut parent) = (known.clone(), before.last().copied());
        for run in end.chunk_by(|a, b| known.contains(a) == known.contains(b)) {
            held.extend(run);
            let blocks = run.iter().map(|&block| key(block)).collect();
            self.happens(CacheEvent::stored(parent.map(key), blocks), held.clone());
            parent = run.last().copied();
        }
    }

    /// Some may not be there.
    fn remove(&mut self, blocks: &[u64]) {
        let mut held = self.held().clone();
        held.retain(|block| !blocks.contains(block));
        self.happens(CacheEvent::removed(blocks.iter().map(|&block| key(block)).collect()), held);
    }

    /// What the stream of load reports would bring now.
    fn next_batch(&mut self) -> Option<EventBatch> {
        let from = self.sent.last().map(EventBatch::next);
        let batch = CacheReader::new(Some(from.unwrap_or(0))).next(|read| read(&self.log))?;
        self.sent.push(batch.clone());
        Some(batch)
    }

    fn take(&mut self, batch: &EventBatch) {
        let result = self.feed.take(batch);
        assert!(
            matches!(result, Ok(()) | Err(FeedError::Gap { .. } | FeedError::NoBeginning { .. })),
            "{result:?}"
        );
        // While a dump is awaited the source keeps what it had.
        self.known = self.feed.resume_from().map_or(self.known, |next| next as usize);
    }

    fn deliver(&mut self) {
        if let Some(batch) = self.next_batch() {
            self.take(&batch);
        }
    }

    fn lose(&mut self) {
        self.next_batch();
    }

    /// A batch comes a second time, or late.
    fn repeat(&mut self, idx: usize) {
        if self.sent.is_empty() {
            return;
        }
        let batch = self.sent[idx % self.sent.len()].clone();
        // A dump is never late: nothing is sent before it has come.
        if batch.kind == BatchKind::Events {
            self.take(&batch);
        }
    }

    fn ask_again(&mut self) {
        let mut reader = CacheReader::new(self.feed.resume_from());
        while let Some(batch) = reader.next(|read| read(&self.log)) {
            self.take(&batch);
            self.sent.push(batch);
        }
    }

    fn dump(&mut self) {
        let mut reader = CacheReader::new(None);
        let batch = reader.next(|read| read(&self.log)).expect("a dump");
        self.take(&batch);
        self.sent.push(batch);
    }

    /// Numbers that no event has yet.
    fn send_nonsense(&mut self) {
        for first in [u64::MAX, self.log.next() + 1] {
            let blocks = vec![key(0)];
            let batch =
                EventBatch { first, events: vec![CacheEvent::removed(blocks)], kind: BatchKind::Events };
            assert!(self.feed.take(&batch).is_err());
        }
    }

    fn check(&self) {
        let next = self.feed.resume_from();
        assert!(next.is_none_or(|next| next <= self.log.next()), "it knows what has not happened");
        if self.feed.state() == SourceState::Exact {
            let next = next.expect("an exact source knows how far it is");
            assert_eq!(self.feed.num_blocks(), self.history[next as usize].len());
        }
    }
}
