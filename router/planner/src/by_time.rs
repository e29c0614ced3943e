//! The policy that predicts: of all ways to serve a request, the one that adds the least time to all requests together, or any of
//! those that are about as good. Missed SLOs count as time.
//!
//! ```text
//! ttft   = max(recall + fetch, queue + front) + compute - front [+ calls of a handoff]
//! front  = the beginning of a prefix that is slow to fetch: it is computed while the end comes
//! step   = seconds of a step of a batch / tokens that it yields for each sequence, by the drafts accepted there recently
//! decode = expected tokens x step of the decode worker's batch with the request, chunks of its queue and exposed transfer in
//!          between
//! harm   = sequences there x (chunks of the prompt in their steps + expected tokens left x growth of their step), in the time
//!          that sharing makes of it,
//!          + sequences of workers on the same processors x what computing adds to the time that these share with it
//! missed = time allowed to the request x (1/2 if it misses an SLO + 1/10 x running sequences x part of their slack that it takes)
//! slack  = expected tokens x (SLO between tokens - step of the batch)
//! ```
//!
//! A request that misses its SLOs everywhere is not served where that costs others theirs: its own miss is the same in all plans,
//! and what it takes from the slack of others decides. Time still counts, so it is not put off for ever.
//!
//! A thousand workers are not paired with each other: the time until the first token depends on the worker that computes the
//! prompt, and the rest on the one that decodes. So the best few of either are paired.

use std::sync::Arc;

use baton_cluster_record::{Role, WorkerRecord};
use baton_cost::{MIN_BROUGHT, PassageWork, PromptWork, StepWork, share_brought};
use baton_random::hash;

use crate::{
    ClusterView, Estimate, NoPlan, Plan, PlanOption, PlanRequest, Policy, Prefill, PrefillMode, PrefixAware,
    Slo, Usability, WorkerKey, WorkerView,
    outlook::{Outlook, outlooks},
    policy::{decode_candidates, excluded, fits, places},
};

/// The calls of a handoff before its first token: to the prefill worker, and back.
const HANDOFF_SECONDS: f64 = 0.002;
/// Tokens that a request generates when nothing is known about it.
const EXPECTED_TOKENS: f64 = 128.0;
/// So many workers of each kind are looked at in detail.
const NUM_BEST: usize = 4;
/// A missed SLO counts as this part of the time that is allowed to the request: such that a plan which meets it is taken also if it
/// makes others wait, but not at any price to them.
const MISSED: f64 = 0.5;
/// The whole slack of a running sequence counts as this part of the time that is allowed to the request. Less than a miss, because
/// most sequences end with slack left.
const SLACK: f64 = 0.1;
/// A sequence has at least this part of its SLO as slack: what is predicted to be lost is not worth nothing.
const LEAST_SLACK: f64 = 0.1;
/// Plans are about as good if their time differs by this part of the best one's time to the first token.
const NEAR: f64 = 0.05;
/// A block that is copied from another worker counts as this part of its computing: about that part of the blocks that leave a
/// full cache for it is asked for again.
const COPY: f64 = 0.3;
/// A worker of another router counts as so many full steps worse. Then routers whose reports are old rarely send to the same
/// worker, and still help each other's workers when one has much more to do.
const OTHERS: f64 = 16.0;

/// Plans by predicted times. Where workers do not say what their steps take, another policy plans.
#[derive(Clone, Debug, Default)]
pub struct PlanByTime {
    otherwise: PrefixAware,
}

/// A plan under consideration, by places in the view.
#[derive(Clone, Copy, Debug)]
struct Way {
    decode: usize,
    /// `None`: the decode worker.
    prefill: Option<usize>,
    source: Option<usize>,
    /// Tokens that are computed.
    prompt: PromptWork,
    estimate: Estimate,
}

/// What comes before a prompt, or beside its beginning.
#[derive(Clone, Copy, Debug, Default)]
struct Start {
    estimate: Estimate,
    /// What is computed while a prefix is fetched.
    front: PromptWork,
}

/// One request, and all workers as they look to it.
struct Search<'a> {
    request: &'a PlanRequest,
    view: &'a ClusterView,
    workers: Vec<Option<Outlook<'a>>>,
    /// What the request should meet, as far as that can be true.
    slo: Slo,
    /// Of workers that understand each other's blocks: the usable holder of the longest cached prefix.
    holders: Vec<usize>,
    num_expected: f64,
    /// Tokens from which a prefix is fetched while nothing is measured.
    fetch_from: usize,
}

impl PlanByTime {
    /// With the policy for workers that do not say what their steps take.
    pub fn new(otherwise: PrefixAware) -> PlanByTime {
        PlanByTime { otherwise }
    }
}

impl Policy for PlanByTime {
    fn plan(&self, request: &PlanRequest, view: &ClusterView) -> Result<Plan, NoPlan> {
        let decode = decode_candidates(request, view)?;
        let search = Search::new(request, view, self.otherwise.fetch_prefix_from());
        let is_usable = |worker: &WorkerView| worker.usability == Usability::Ready;
        let is_silent =
            |(worker, outlook): (&WorkerView, &Option<Outlook<'_>>)| is_usable(worker) && outlook.is_none();
        if view.workers.iter().zip(&search.workers).any(is_silent) {
            return self.otherwise.plan(request, view);
        }
        search.plan(&places(decode, view))
    }
}

impl<'a> Search<'a> {
    fn new(request: &'a PlanRequest, view: &'a ClusterView, fetch_from: usize) -> Search<'a> {
        let workers = outlooks(request, view);
        let may_give = |&idx: &usize| {
            let worker = &view.workers[idx];
            matches!(worker.usability, Usability::Ready | Usability::Draining)
                && !excluded(&worker.record, request)
        };
        let cached = |idx: usize| workers[idx].as_ref().map_or(0, |worker: &Outlook<'_>| worker.num_cached);
        let rank = |idx: usize| (cached(idx), std::cmp::Reverse(view.workers[idx].num_assigned));
        let mut holders: Vec<usize> = Vec::new();
        for idx in (0..view.workers.len()).filter(|&idx| cached(idx) > 0).filter(may_give) {
            match holders.iter_mut().find(|best| view.workers[**best].is_like(&view.workers[idx])) {
                Some(best) if rank(idx) >= rank(*best) => *best = idx,
                Some(_) => {}
                None => holders.push(idx),
            }
        }
        let num_expected = match request.num_expected_tokens {
            0 => EXPECTED_TOKENS,
            num => num as f64,
        };
        let num_left = request.max_tokens.saturating_sub(request.num_tokens).max(1) as f64;
        let num_expected = if request.max_tokens > 0 { num_expected.min(num_left) } else { num_expected };
        let possible = |seconds: Option<f64>| seconds.filter(|seconds| seconds.is_finite() && *seconds > 0.0);
        let slo = Slo { ttft: possible(request.slo.ttft), tpot: possible(request.slo.tpot) };
        Search { request, view, workers, slo, holders, num_expected, fetch_from }
    }

    fn plan(&self, decode: &[usize]) -> Result<Plan, NoPlan> {
        let mut ways = Vec::new();
        if self.request.prefill != PrefillMode::Remote {
            let least = |worker: &Outlook<'_>| worker.queue_seconds + self.least_decode(worker);
            ways.extend(self.best(decode.iter().copied(), least, |idx| self.local(idx)));
        }
        if self.request.prefill != PrefillMode::Local {
            self.add_remote(decode, &mut ways);
        }
        if ways.is_empty() {
            // Only remote plans were allowed: decode workers are there.
            return Err(NoPlan::NoPrefillWorker);
        }
        ways.sort_by(|a, b| a.estimate.order(&b.estimate));
        let chosen = self.draw(&ways);
        let mut plan = Plan::new(
            self.request,
            &self.view.workers[chosen.decode],
            self.prefill(&chosen),
            self.record(chosen.source),
            &chosen.prompt,
        );
        plan.estimate = Some(chosen.estimate);
        if self.request.explain {
            plan.options = ways.iter().map(|way| self.option(way)).collect();
        }
        Ok(plan)
    }

    /// The prompt is computed by the decode worker, with and without a fetched prefix.
    fn local(&self, idx: usize) -> impl Iterator<Item = Way> {
        self.sources(idx).filter_map(move |source| {
            let worker = self.workers[idx].as_ref()?;
            let (prompt, start) = self.prompt(worker, source)?;
            let mut estimate = self.first_token(worker, &start, &prompt);
            estimate.harm += self.later_harm(worker);
            self.decode(worker, &prompt, 0.0, &mut estimate);
            estimate.harm += worker.harm_to_sharers(estimate.compute, self.num_left(), &self.workers);
            Some(Way { decode: idx, prefill: None, source, prompt, estimate })
        })
    }

    /// Who holds the longest prefix whose blocks a worker understands.
    fn holder(&self, worker: &WorkerView) -> Option<usize> {
        self.holders.iter().copied().find(|&idx| self.view.workers[idx].is_like(worker))
    }

    /// What computing the prompt there costs others later. Blocks that another worker holds become a copy, and take the place of
    /// blocks that no other worker holds: those are computed again when they are asked for. And the router that the worker
    /// belongs to has sent what this one does not know yet.
    fn later_harm(&self, worker: &Outlook<'_>) -> f64 {
        let holder = self.holder(worker.view).and_then(|idx| self.workers[idx].as_ref());
        let num_held = holder.map_or(0, |holder| holder.num_cached);
        let copy = worker.line.own_seconds(&PromptWork::new(num_held, worker.num_cached));
        let is_others = worker.view.load.is_home_of_another;
        COPY * copy + if is_others { OTHERS * worker.chunk_seconds() } else { 0.0 }
    }

    /// Pairs of the best prefill and the best decode workers.
    fn add_remote(&self, decode: &[usize], ways: &mut Vec<Way>) {
        let num_tokens = self.request.num_tokens;
        let decode = self.best_decode(decode);
        let mut prefill: Vec<(usize, Vec<Way>)> = Vec::new();
        for &decode_idx in &decode {
            let is_like = |other: usize| self.view.workers[decode_idx].is_like(&self.view.workers[other]);
            // Decode workers that understand each other's blocks have the same prefill workers.
            let known = prefill.iter().position(|(other, _)| is_like(*other));
            let best = known.unwrap_or_else(|| {
                let peers = (0..self.view.workers.len()).filter(|&idx| {
                    let worker = &self.view.workers[idx];
                    worker.record.role == Role::Prefill
                        && worker.usability == Usability::Ready
                        && is_like(idx)
                        && fits(&worker.record, num_tokens + 1)
                        && !excluded(&worker.record, self.request)
                });
                let ways = self.best(peers, |worker| worker.queue_seconds, |idx| self.remote(idx));
                prefill.push((decode_idx, ways));
                prefill.len() - 1
            });
            for half in &prefill[best].1 {
                ways.extend(self.pair(half, decode_idx));
            }
        }
    }

    /// The part of a plan that depends on its prefill worker, with and without a fetched prefix.
    fn remote(&self, idx: usize) -> impl Iterator<Item = Way> {
        self.sources(idx).filter_map(move |source| {
            let worker = self.workers[idx].as_ref()?;
            let (prompt, start) = self.prompt(worker, source)?;
            let mut estimate = self.first_token(worker, &start, &prompt);
            estimate.ttft += HANDOFF_SECONDS;
            estimate.harm = worker.harm_to_sharers(estimate.compute, self.num_left(), &self.workers);
            estimate.harm += self.later_harm(worker);
            estimate.has_room = true;
            Some(Way { decode: idx, prefill: Some(idx), source, prompt, estimate })
        })
    }

    /// Adds the decode worker's part.
    fn pair(&self, half: &Way, decode: usize) -> Option<Way> {
        let giver = self.workers[half.prefill?].as_ref()?;
        let worker = self.workers[decode].as_ref()?;
        let num_tokens = self.request.num_tokens.saturating_sub(worker.num_cached);
        let link = giver.link_to(worker.view);
        let transfer = num_tokens as f64 * worker.token_bytes() / link.bytes_per_second;
        // Layers travel while later ones are computed. The last one follows the computation.
        let num_layers = worker.view.record.kv_format.num_layers.max(1) as f64;
        let exposed = link.latency_seconds + (transfer - half.estimate.compute).max(transfer / num_layers);
        let mut estimate = half.estimate;
        let nothing = PromptWork::default();
        self.decode(worker, &nothing, exposed, &mut estimate);
        Some(Way { decode, estimate, ..*half })
    }

    /// The decode workers that serve the tokens after the first best.
    fn best_decode(&self, decode: &[usize]) -> Vec<usize> {
        let half = |idx: usize| {
            let worker = self.workers[idx].as_ref()?;
            let mut estimate = Estimate::default();
            self.decode(worker, &PromptWork::default(), 0.0, &mut estimate);
            Some(Way { decode: idx, prefill: None, source: None, prompt: PromptWork::default(), estimate })
        };
        let best = self.best(decode.iter().copied(), |worker| self.least_decode(worker), half);
        best.iter().map(|way| way.decode).collect()
    }

    /// No prefix source, and the one that is worth a look. While nothing is measured, a long prefix is fetched: the worker is
    /// assumed to be slow.
    fn sources(&self, idx: usize) -> impl Iterator<Item = Option<usize>> + use<> {
        let num_cached = |idx: usize| self.workers[idx].as_ref().map_or(0, |worker| worker.num_cached);
        let gives = |&holder: &usize| holder != idx && num_cached(holder) > num_cached(idx);
        let source = self.holder(&self.view.workers[idx]).filter(gives);
        let outlook = |idx: usize| self.workers[idx].as_ref();
        let is_fetched = match (source, outlook(idx), source.and_then(outlook)) {
            (Some(holder), Some(worker), Some(giver))
                if num_cached(holder) - num_cached(idx) >= self.fetch_from =>
            {
                worker.is_unknown_beside(giver)
            }
            _ => false,
        };
        let without = (!is_fetched).then_some(None);
        without.into_iter().chain(source.map(Some))
    }

    /// What is left to compute, and what it takes to bring in the rest. `None`: the worker will not fetch from a source that is so slow.
    fn prompt(&self, worker: &Outlook<'_>, source: Option<usize>) -> Option<(PromptWork, Start)> {
        // The last token is computed in any case.
        let most = self.request.num_tokens.saturating_sub(1);
        // What a source gives is not recalled from an object store, too.
        let own = if source.is_some() { worker.num_cached } else { worker.with_store }.min(most);
        let recall = worker.own_recall_seconds(own);
        let own = own.max(self.request.num_arriving.min(most));
        let mut start = Start { estimate: Estimate { recall, ..Estimate::default() }, ..Start::default() };
        let giver = source.and_then(|idx| self.workers[idx].as_ref());
        // More may arrive with the request than the source has.
        let cached = giver.map_or(own, |giver| giver.num_cached.min(most).max(own));
        let mut prompt = PromptWork::new(self.request.num_tokens, cached);
        if let Some(giver) = giver {
            let bring = |num_tokens: usize| {
                let num_bytes = num_tokens as f64 * worker.token_bytes();
                let recall = giver.recall_seconds(cached - num_tokens, cached);
                (recall, giver.link_to(worker.view).seconds(num_bytes))
            };
            let (recall, fetch) = bring(cached - own);
            let compute = worker.prompt_seconds(&PromptWork::new(cached, own));
            let is_whole = self.request.blend.is_some() || !giver.has_measured_link_to(worker.view);
            let share = if is_whole { 1.0 } else { share_brought(recall + fetch, compute) };
            let num_brought = (share * (cached - own) as f64) as usize;
            if share < 1.0 && num_brought < MIN_BROUGHT {
                return None;
            }
            start.front = PromptWork::new(cached - num_brought, own);
            prompt.num_tokens += start.front.num_tokens;
            prompt.num_pairs += start.front.num_pairs;
            let (recall, fetch) = bring(num_brought);
            start.estimate.recall += recall;
            start.estimate.fetch = fetch;
        }
        // A head that is cached is not computed at all.
        let blend = self.request.blend.as_ref().filter(|blend| cached < blend.end_idx);
        let Some(blend) = blend.filter(|_| worker.view.load.blends) else { return Some((prompt, start)) };
        let key = WorkerKey::of(&worker.view.record);
        start.estimate.num_kept =
            blend.kept.iter().find(|(other, _)| **other == key).map_or(0, |&(_, num)| num);
        let passages = PassageWork {
            num_tokens: blend.num_tokens as f64,
            num_kept: start.estimate.num_kept as f64,
            layer: blend.layer,
            ratio: f64::from(blend.ratio),
        };
        Some((prompt.blended(&passages, worker.view.record.kv_format.num_layers), start))
    }

    /// Until the first token, computed by `worker` after what `start` says.
    fn first_token(&self, worker: &Outlook<'_>, start: &Start, prompt: &PromptWork) -> Estimate {
        let queue = worker.queue_seconds;
        let front = worker.prompt_seconds(&start.front);
        let start = start.estimate;
        let alone = worker.prompt_seconds(prompt);
        let compute = alone + worker.slowdown(queue + alone, &self.workers);
        // The queue shrinks while the prefix comes.
        let ttft = (start.recall + start.fetch).max(queue + front) + compute - front;
        Estimate { queue, compute, ttft, ..start }
    }

    /// Adds what follows the first token: decoding by `worker`, and what that and computing `prompt` there do to its running
    /// sequences.
    fn decode(&self, worker: &Outlook<'_>, prompt: &PromptWork, exposed: f64, estimate: &mut Estimate) {
        let num_running = worker.batch.num_tokens;
        let (before, after) = self.token_seconds(worker);
        // What a running sequence waits longer for its tokens.
        let num_left = self.num_left();
        let stall = worker.delay_by(prompt, num_left) + num_left * (after - before);
        let stall = stall + worker.slowdown(stall, &self.workers);
        let steps = self.num_expected * after;
        let shared = worker.slowdown(steps, &self.workers);
        estimate.exposed = exposed;
        let queue = worker.delay_by(&worker.queue, self.num_expected);
        estimate.decode = steps + shared + queue + exposed;
        estimate.tpot = estimate.decode / self.num_expected;
        estimate.harm += num_running * stall;
        estimate.has_room = worker.has_room(self.request.num_tokens);
        // Of a worker that decodes nothing it says nothing.
        let pace = worker.view.load.pace.filter(|pace| pace.num_decoding > 0);
        let recent = pace.map_or(0.0, |pace| pace.recent_itl);
        let is_missed = |seconds: f64, slo: Option<f64>| slo.is_some_and(|slo| seconds > slo);
        let (misses_ttft, misses_tpot) =
            (is_missed(estimate.ttft, self.slo.ttft), is_missed(estimate.tpot.max(recent), self.slo.tpot));
        estimate.num_broken = u32::from(misses_ttft) + u32::from(misses_tpot);
        let taken = self.slo.tpot.map_or(0.0, |slo| {
            let slack = self.num_expected * (slo - before).max(LEAST_SLACK * slo);
            num_running * (stall / slack).min(1.0)
        });
        let own = if estimate.num_broken > 0 { MISSED } else { 0.0 };
        let each = self.slo.tpot.unwrap_or_else(|| worker.token_seconds(&StepWork::decode(1.0, 0.0)));
        let allowed = self.slo.ttft.unwrap_or(0.0) + self.num_expected * each;
        let has_slo = self.slo != Slo::default();
        estimate.missed = if has_slo { allowed * (own + SLACK * taken) } else { 0.0 };
    }

    /// Seconds for a token of each sequence of a worker's batch, without the request and with it.
    fn token_seconds(&self, worker: &Outlook<'_>) -> (f64, f64) {
        let batch = &worker.batch;
        let with_request = batch.plus(StepWork::decode(1.0, self.request.num_tokens as f64));
        (worker.token_seconds(batch), worker.token_seconds(&with_request))
    }

    /// What [`decode`](Self::decode) adds to the total at least.
    fn least_decode(&self, worker: &Outlook<'_>) -> f64 {
        let (before, after) = self.token_seconds(worker);
        self.num_expected * after + worker.batch.num_tokens * self.num_left() * (after - before)
    }

    /// Tokens that a running sequence still generates: it is in the middle of its output.
    fn num_left(&self) -> f64 {
        self.num_expected / 2.0
    }

    /// The best few of the ways at these workers, in their order. Of equals, which ones depends on the seed. No way has a total
    /// below what `least` says of its worker: most workers are passed over by that.
    fn best<W: IntoIterator<Item = Way>>(
        &self,
        workers: impl Iterator<Item = usize>,
        least: impl Fn(&Outlook<'_>) -> f64,
        ways: impl Fn(usize) -> W,
    ) -> Vec<Way> {
        let chance = |way: &Way| hash(self.request.seed ^ way.decode as u64);
        let order = |a: &Way, b: &Way| a.estimate.order(&b.estimate).then_with(|| chance(a).cmp(&chance(b)));
        let mut best: Vec<Way> = Vec::with_capacity(NUM_BEST + 1);
        // Nothing above it is among the best.
        let mut most = f64::INFINITY;
        for idx in workers {
            if self.workers[idx].as_ref().is_none_or(|worker| least(worker) > most) {
                continue;
            }
            for way in ways(idx) {
                if best.len() < NUM_BEST || best.last().is_some_and(|last| order(&way, last).is_lt()) {
                    let place = best.partition_point(|better| order(better, &way).is_le());
                    best.insert(place, way);
                    best.truncate(NUM_BEST);
                }
            }
            if let Some(last) = best.get(NUM_BEST - 1).filter(|last| last.estimate.has_room) {
                // Sums in another order differ by roundings.
                most = last.estimate.total() * (1.0 + 1e-9);
            }
        }
        best
    }

    /// One of those that are about as good as the first, in the same way: routers that see the same do not all choose the same
    /// worker.
    fn draw(&self, ways: &[Way]) -> Way {
        let best = &ways[0];
        let window = NEAR * best.estimate.ttft;
        let is_near = |way: &&Way| {
            let (a, b) = (&way.estimate, &best.estimate);
            way.prefill.is_some() == best.prefill.is_some()
                && way.source == best.source
                && way.prompt == best.prompt
                && (a.has_room, a.num_broken) == (b.has_room, b.num_broken)
                && a.total() <= b.total() + window
        };
        let near: Vec<&Way> = ways.iter().filter(is_near).collect();
        let place = hash(self.request.seed) % near.len().max(1) as u64;
        **near.get(place as usize).unwrap_or(&best)
    }

    fn prefill(&self, way: &Way) -> Prefill {
        self.record(way.prefill).map_or(Prefill::Local, Prefill::Remote)
    }

    fn record(&self, idx: Option<usize>) -> Option<Arc<WorkerRecord>> {
        idx.map(|idx| self.view.workers[idx].record.clone())
    }

    fn option(&self, way: &Way) -> PlanOption {
        PlanOption {
            decode: self.view.workers[way.decode].record.clone(),
            prefill: self.prefill(way),
            prefix_source: self.record(way.source),
            estimate: way.estimate,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;
    use crate::tests::view;

    #[test]
    fn workers_are_passed_over_only_if_all_their_ways_are_worse_than_the_best() {
        for seed in 0..50 {
            let number = |idx: u64, below: u64| hash(seed * 1000 + idx) % below;
            let mut text = String::new();
            for idx in 0..40 {
                let (decoding, queued) = (number(idx, 30), number(100 + idx, 20_000));
                let (rate, free) = (1000 * (1 + number(200 + idx, 3)), number(300 + idx, 200));
                let step_yield = 1 + number(400 + idx, 4);
                writeln!(
                    text,
                    "d{idx} decode rate={rate} yield={step_yield} decoding={decoding} queued={queued} free={free} itl-target=0.05"
                )
                .expect("it is a string");
            }
            let view = view(&text);
            let slo = Slo { ttft: Some(2.0), tpot: Some(0.05) };
            let slo = if seed % 2 == 0 { slo } else { Slo::default() };
            let request =
                PlanRequest { num_tokens: 700, max_tokens: 1000, slo, seed, ..PlanRequest::default() };
            let search = Search::new(&request, &view, 64);
            let all = || 0..view.workers.len();
            let show = |ways: Vec<Way>| format!("{ways:?}");
            let least = |worker: &Outlook<'_>| worker.queue_seconds + search.least_decode(worker);
            let quick = search.best(all(), least, |idx| search.local(idx));
            let whole = search.best(all(), |_| 0.0, |idx| search.local(idx));
            assert_eq!(show(quick), show(whole), "local, seed {seed}");
            let least = |worker: &Outlook<'_>| worker.queue_seconds;
            let quick = search.best(all(), least, |idx| search.remote(idx));
            let whole = search.best(all(), |_| 0.0, |idx| search.remote(idx));
            assert_eq!(show(quick), show(whole), "remote, seed {seed}");
        }
    }
}
