//! KV that moves between workers: of prompts that are computed for a decode worker, and of cached prefixes.
//!
//! A transfer is not simulated message by message. Pieces leave as layers are computed, over one outgoing link of each worker,
//! one transfer after the other:
//!
//! ```text
//! begins = later of: blocks granted, computing began, link free
//! ends   = later of: begins + bytes / rate, computed + last layer / rate; and the latency
//! ```

use baton_planner::WorkerKey;
use baton_scheduler::{Admission, SequenceRole};

use super::{
    Event, Simulation,
    live::{Fetch, Granted, Held, with_output},
};
use crate::{report::RequestEnd, time::SimTime, worker::RequestIdx, worker::Worker};

impl Simulation<'_> {
    /// A sequence or a reservation holds blocks now.
    pub(super) fn on_admitted(&mut self, idx: usize, admission: Admission) {
        let now = self.now();
        let Admission { id, num_cached_blocks, is_first, .. } = admission;
        let request = Worker::request_of(id);
        let Some(live) = self.live[request as usize].as_mut() else { return };
        let Some(attempt) = live.attempt.as_mut() else { return };
        let (is_remote, computes) = (attempt.prefill.is_some(), attempt.computes());
        let is_reservation = is_remote
            && !attempt.is_decoding
            && attempt.decode_sequence.is_some_and(|held| held.worker == idx && held.id == id);
        if is_reservation {
            attempt.granted = Some(Granted { at: now, num_cached_blocks });
            return self.transfer(request);
        }
        if is_remote && attempt.prefill == Some(idx) {
            attempt.prefill_began = now;
            let number = attempt.number;
            self.queue.push(now + self.spec.call, Event::Reserve { request, attempt: number });
        }
        if idx == computes && is_first && !attempt.is_arriving {
            let num_cached = (num_cached_blocks * self.block_size) as u32;
            let outcome = &mut self.outcomes[request as usize];
            outcome.num_cached_tokens = num_cached.min(outcome.num_prompt_tokens);
        }
    }

    /// Sets blocks aside at the decode worker.
    pub(super) fn reserve(&mut self, request: RequestIdx, number: u32) {
        let idx = request as usize;
        let root = self.roots[self.arrivals[idx].copy as usize];
        let Some(live) = self.live[idx].as_mut() else { return };
        let Some(attempt) = live.attempt.as_mut().filter(|attempt| attempt.number == number) else { return };
        let hashes = with_output(&live.hashes, request, attempt.num_tokens, self.block_size);
        // The first token may have come from the prefill worker meanwhile.
        let max_tokens = attempt.num_tokens + self.num_left[idx] as usize + 1;
        let decode = attempt.decode;
        let worker = &mut self.workers[decode];
        debug_assert!(worker.is_alive, "a request is lost with its decode worker");
        let most = worker.spec.num_blocks * self.block_size;
        let max_tokens = max_tokens.min(most + 1);
        let id = worker.add(request, SequenceRole::Decode, attempt.num_tokens, max_tokens, &hashes, root);
        worker.covered.push((live.router, attempt.decode_ticket));
        attempt.decode_sequence = Some(Held { worker: decode, life: worker.life, id });
        self.kick(decode);
    }

    /// A prefill worker has the first token of a request.
    pub(super) fn prefilled(&mut self, request: RequestIdx) {
        let now = self.now();
        let idx = request as usize;
        let Some(live) = self.live[idx].as_mut() else { return };
        let Some(attempt) = live.attempt.as_mut() else { return };
        attempt.computed = Some(now);
        self.num_left[idx] -= 1;
        // To the decode worker, and to the router.
        self.first_token(request, now + self.spec.call + self.spec.call);
        if self.num_left[idx] == 0 {
            return self.end(request, RequestEnd::Finished);
        }
        self.transfer(request);
    }

    /// Says when the KV has come, once blocks are granted and the prompt is computed.
    fn transfer(&mut self, request: RequestIdx) {
        let Some(live) = self.live[request as usize].as_mut() else { return };
        let Some(attempt) = live.attempt.as_mut() else { return };
        let (Some(granted), Some(computed), Some(prefill)) =
            (attempt.granted, attempt.computed, attempt.prefill)
        else {
            return;
        };
        let worker = &mut self.workers[prefill];
        let num_cached = granted.num_cached_blocks * self.block_size;
        let num_tokens = attempt.num_tokens.saturating_sub(num_cached);
        let num_bytes = num_tokens as f64 * worker.spec.kv_bytes_per_token;
        let rate = self.spec.link.bytes_per_second;
        let begins = granted.at.max(attempt.prefill_began).max(worker.link_free_at);
        let sent = begins + SimTime::from_seconds(num_bytes / rate);
        let last_layer = num_bytes / rate / worker.spec.kv_format.num_layers.max(1) as f64;
        let ends = sent.max(computed + SimTime::from_seconds(last_layer))
            + SimTime::from_seconds(self.spec.link.latency_seconds);
        worker.link_free_at = sent;
        worker.links.observe(num_bytes as u64, self.spec.link.seconds(num_bytes));
        let attempt = attempt.number;
        self.queue.push(ends, Event::Transferred { request, attempt });
    }

    /// The decode worker has the prompt's KV: it decodes, and the prefill worker gives its blocks up.
    pub(super) fn transferred(&mut self, request: RequestIdx, number: u32) {
        let Some(attempt) = self.attempt(request, number) else { return };
        let (decode, prefill) = (attempt.decode_sequence, attempt.prefill_sequence.take());
        attempt.is_decoding = true;
        let decode = decode.expect("blocks were granted");
        self.workers[decode.worker].scheduler.start_decode(decode.id, request);
        if let Some(prefill) = prefill.filter(|held| self.holds(held)) {
            self.workers[prefill.worker].scheduler.release(prefill.id);
            self.workers[prefill.worker].present.remove(&request);
            self.kick(prefill.worker);
        }
        self.kick(decode.worker);
    }

    /// Begins to fetch what `source` has of the prompt, or as workers do, its end beside computing where the link is slow. True when the
    /// prompt waits for it.
    pub(super) fn fetch(&mut self, request: RequestIdx, source: &WorkerKey) -> bool {
        let now = self.now();
        let router = self.live[request as usize].as_ref().map(|live| live.router);
        let Some(from) = router.and_then(|router| self.living(router, source)) else { return false };
        let Some(live) = self.live[request as usize].as_mut() else { return false };
        let Some(attempt) = live.attempt.as_mut().filter(|attempt| attempt.computes() != from) else {
            return false;
        };
        let to = attempt.computes();
        let hashes = live.hashes.get(..attempt.num_sharable(self.block_size)).unwrap_or(&live.hashes);
        let from_id = self.workers[from].next_id(request);
        let num_blocks = self.workers[from].scheduler.hold_cached(from_id, hashes).len();
        let to_id = self.workers[to].next_id(request);
        let num_own = self.workers[to].scheduler.num_cached(&hashes[..num_blocks]);
        let meeting = self.workers[from].links.line().and_then(|link| {
            let block_bytes = self.block_size as f64 * self.workers[to].spec.kv_bytes_per_token;
            let bring = |num: usize| link.seconds(num as f64 * block_bytes);
            self.workers[to].meeting(num_own, num_blocks - num_own, bring)
        });
        let first = meeting.map_or(0, |num_brought| num_blocks - num_brought);
        let wanted = &hashes[first..num_blocks];
        let reserved = self.workers[to].scheduler.reserve_prefix(to_id, wanted, wanted.len());
        let num_fetched = reserved.as_ref().map_or(0, |found| num_blocks - first - found.num_cached_blocks);
        if num_fetched == 0 {
            self.workers[from].scheduler.release(from_id);
            self.workers[to].scheduler.release(to_id);
            return false;
        }
        let to_life = self.workers[to].life;
        let expected = meeting.map(|_| {
            let id = self.workers[to].next_id(request);
            self.workers[to].scheduler.expect(id, first, hashes[first]);
            Held { worker: to, life: to_life, id }
        });
        let num_bytes = (num_fetched * self.block_size) as f64 * self.workers[to].spec.kv_bytes_per_token;
        let begins = now.max(self.workers[from].link_free_at);
        let ends = begins + SimTime::from_seconds(self.spec.link.seconds(num_bytes));
        self.workers[from].link_free_at = ends;
        self.workers[from].links.observe(num_bytes as u64, self.spec.link.seconds(num_bytes));
        attempt.fetch = Some(Fetch {
            from: Some(Held { worker: from, life: self.workers[from].life, id: from_id }),
            to: Held { worker: to, life: to_life, id: to_id },
            first,
            num_blocks,
            num_coming: num_fetched,
            expected,
        });
        self.workers[from].present.insert(request);
        let attempt = attempt.number;
        self.queue.push(ends, Event::Fetched { request, attempt });
        expected.is_none()
    }

    pub(super) fn fetched(&mut self, request: RequestIdx, number: u32) {
        if self.attempt(request, number).is_some_and(|attempt| attempt.fetch.is_some()) {
            self.fetch_ended(request, true);
        }
    }

    /// A fetch is over: the blocks have come, or their source is gone. The rest of the prompt is computed.
    pub(super) fn fetch_ended(&mut self, request: RequestIdx, has_come: bool) {
        let Some(live) = self.live[request as usize].as_mut() else { return };
        let Some(attempt) = live.attempt.as_mut() else { return };
        let Some(fetch) = attempt.fetch.take() else { return };
        let Fetch { from, to, first, num_blocks, num_coming, expected } = fetch;
        let is_decode = from.is_some_and(|from| attempt.decode == from.worker);
        let is_counted = has_come && !attempt.is_arriving;
        if has_come {
            let after = first.checked_sub(1).map(|before| live.hashes[before]);
            let scheduler = &mut self.workers[to.worker].scheduler;
            scheduler.cache_prefix(to.id, 0, after, &live.hashes[first..num_blocks]);
        }
        if is_counted {
            let outcome = &mut self.outcomes[request as usize];
            let num_tokens = match from {
                Some(_) => &mut outcome.num_fetched_tokens,
                None => &mut outcome.num_recalled_tokens,
            };
            *num_tokens += (num_coming * self.block_size) as u32;
        }
        for held in [from, Some(to), expected].into_iter().flatten() {
            if self.holds(&held) {
                self.workers[held.worker].scheduler.release(held.id);
            }
        }
        match expected {
            None => self.begin(request),
            Some(_) => self.kick(to.worker),
        }
        if let Some(from) = from {
            if !is_decode {
                self.workers[from.worker].present.remove(&request);
            }
            self.kick(from.worker);
        }
    }
}
