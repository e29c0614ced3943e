//! Tiers: what requests leave is saved, and what a pool lacks of a prompt is recalled, as workers do it. A prompt waits for what is read much
//! sooner than computed. What is slower is read from its end while its beginning is computed.

use std::sync::Arc;

use baton_cost::MIN_BROUGHT;
use baton_planner::WorkerKey;
use baton_tier_policy::ReadMode;

use super::{
    Event, Simulation,
    live::{Fetch, Held, Recalling, with_output},
};
use crate::{time::SimTime, worker::RequestIdx};

impl Simulation<'_> {
    /// Begins to read what the tiers of a worker have of the front of a prompt: the one that computes it, or the source of a prefix.
    /// True when the prompt waits for that.
    pub(super) fn recall(&mut self, request: RequestIdx, idx: usize, is_source: bool) -> bool {
        let now = self.now();
        let Some(live) = self.live[request as usize].as_mut() else { return false };
        let Some(attempt) = live.attempt.as_mut() else { return false };
        let hashes = live.hashes.get(..attempt.num_sharable(self.block_size)).unwrap_or(&live.hashes);
        let worker = &mut self.workers[idx];
        let first = worker.scheduler.num_cached(hashes);
        let runs = worker.tiers.as_ref().map(|tiers| tiers.runs(&hashes[first..])).unwrap_or_default();
        let num_held: usize = runs.iter().map(|run| run.num_blocks).sum();
        if num_held == 0 {
            return false;
        }
        let compute_block = worker.compute_time(first, num_held) / num_held as u32;
        let mode = if is_source { ReadMode::Alone } else { ReadMode::BesideComputing };
        let block_bytes = worker.block_bytes() as usize;
        let worth = baton_tier_policy::worth(&runs, block_bytes, compute_block, mode);
        if worth.num_blocks == 0 {
            return false;
        }
        let num_blocks = first + worth.num_blocks;
        let life = worker.life;
        let tiers = worker.tiers.as_mut().expect("they hold blocks");
        let ends = tiers.read(&hashes[first..num_blocks], now);
        let limit = now + SimTime::from_seconds(worth.compute.as_secs_f64());
        // What is late is in vain.
        let num_blocks = if ends > limit { first } else { num_blocks };
        attempt.recall = Some(Recalling { worker: idx, life, first, num_blocks, is_source });
        let attempt = attempt.number;
        self.queue.push(ends.min(limit), Event::Recalled { request, attempt });
        true
    }

    /// The front was read, or it is too late: it goes into the pool, if there is room.
    pub(super) fn recalled(&mut self, request: RequestIdx, number: u32) {
        let Some(attempt) = self.attempt(request, number) else { return };
        let is_arriving = attempt.is_arriving;
        let Some(recall) = attempt.recall.take() else { return };
        let Recalling { worker: idx, life, first, num_blocks, is_source } = recall;
        let worker = &mut self.workers[idx];
        if worker.is_alive && worker.life == life && first < num_blocks {
            let hashes =
                &self.live[request as usize].as_ref().expect("it has an attempt").hashes[..num_blocks];
            let id = worker.next_id(request);
            let found = worker.scheduler.reserve_prefix(id, hashes, first + 1);
            if let Some(found) = found.filter(|found| found.num_cached_blocks >= first) {
                let num_blocks = found.blocks.len();
                worker.scheduler.cache_prefix(id, 0, None, &hashes[..num_blocks]);
                if !is_source && !is_arriving {
                    let num_tokens = ((num_blocks - first) * self.block_size) as u32;
                    self.outcomes[request as usize].num_recalled_tokens += num_tokens;
                }
            }
            worker.scheduler.release(id);
            self.kick(idx);
        }
        match is_source {
            true => self.fetch_or_begin(request),
            false => self.fetch_prefix(request),
        }
    }

    /// Fetches what the plan's source has more, which that may have to recall first.
    pub(super) fn fetch_prefix(&mut self, request: RequestIdx) {
        let Some(live) = &self.live[request as usize] else { return };
        let source = live.attempt.as_ref().and_then(|attempt| attempt.source.as_ref());
        let from = source.and_then(|source| self.living(live.router, source));
        if from.is_none_or(|from| !self.recall(request, from, true)) {
            self.fetch_or_begin(request);
        }
    }

    fn fetch_or_begin(&mut self, request: RequestIdx) {
        let attempt = self.live[request as usize].as_mut().and_then(|live| live.attempt.as_mut());
        let source = attempt.and_then(|attempt| attempt.source.take());
        if source.is_none_or(|source| !self.fetch(request, &source)) {
            self.begin(request);
        }
    }

    /// The place of a worker, if it is the one that was planned with.
    pub(super) fn living(&self, router: u32, key: &WorkerKey) -> Option<usize> {
        let idx = self.routers[router as usize].place(&key.id);
        let worker = &self.workers[idx];
        (worker.is_alive && worker.record.incarnation == key.incarnation).then_some(idx)
    }

    /// Computes a prompt, and reads its end meanwhile, if tiers have it and nothing else comes.
    pub(super) fn begin(&mut self, request: RequestIdx) {
        self.read_beside(request);
        self.compute(request);
    }

    fn read_beside(&mut self, request: RequestIdx) {
        let now = self.now();
        let Some(live) = self.live[request as usize].as_mut() else { return };
        let Some(attempt) = live.attempt.as_mut().filter(|attempt| attempt.fetch.is_none()) else { return };
        let hashes = live.hashes.get(..attempt.num_sharable(self.block_size)).unwrap_or(&live.hashes);
        let idx = attempt.computes();
        let worker = &mut self.workers[idx];
        let num_ready = worker.scheduler.num_cached(hashes);
        let runs = worker.tiers.as_ref().map(|tiers| tiers.runs(&hashes[num_ready..])).unwrap_or_default();
        let num_blocks = num_ready + runs.iter().map(|run| run.num_blocks).sum::<usize>();
        let compute = |num| worker.compute_time(num_ready, num);
        let num_brought = baton_tier_policy::meeting(&runs, worker.block_bytes() as usize, compute);
        if num_brought * self.block_size < MIN_BROUGHT {
            return;
        }
        let first = num_blocks - num_brought;
        let wanted = &hashes[first..num_blocks];
        let (to, expected) = (worker.next_id(request), worker.next_id(request));
        let Some(found) = worker.scheduler.reserve_prefix(to, wanted, wanted.len()) else { return };
        let num_coming = wanted.len() - found.num_cached_blocks;
        worker.scheduler.expect(expected, first, wanted[0]);
        let ends = worker.tiers.as_mut().expect("they hold blocks").read(wanted, now);
        let held = |id| Held { worker: idx, life: worker.life, id };
        let (to, expected) = (held(to), Some(held(expected)));
        attempt.fetch = Some(Fetch { from: None, to, first, num_blocks, num_coming, expected });
        let attempt = attempt.number;
        self.queue.push(ends, Event::Fetched { request, attempt });
    }

    /// Saves what a worker has of a request.
    pub(super) fn save(&mut self, request: RequestIdx, idx: usize) {
        let num_tokens = self.num_known_tokens(request);
        let Some(live) = self.live[request as usize].as_ref().filter(|live| !live.hashes.is_empty()) else {
            return;
        };
        // The KV of the last token is never computed.
        let hashes = with_output(&live.hashes, request, num_tokens.saturating_sub(1), self.block_size);
        let hashes: Arc<[_]> = hashes.into();
        let Some(tiers) = &mut self.workers[idx].tiers else { return };
        for tier in tiers.save(&hashes) {
            self.write_next(idx, tier);
        }
    }

    pub(super) fn saved(&mut self, idx: usize, tier: usize) {
        self.workers[idx].tiers.as_mut().expect("it has this one").written(tier);
        self.write_next(idx, tier);
        // Routers are told.
        self.kick(idx);
    }

    fn write_next(&mut self, idx: usize, tier: usize) {
        let now = self.now();
        let worker = &mut self.workers[idx];
        let Some(tiers) = &mut worker.tiers else { return };
        let scheduler = &worker.scheduler;
        if let Some(ends) = tiers.write_next(tier, now, |hashes| scheduler.num_cached(hashes)) {
            let (worker, life, tier) = (idx as u32, worker.life, tier as u32);
            self.queue.push(ends, Event::Saved { worker, life, tier });
        }
    }
}
