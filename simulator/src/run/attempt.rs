//! From a plan to an end: what the router does for a request, and what it does when an attempt fails.

use std::time::Instant;

use baton_planner::{AttemptStage, GiveUp, NoPlan, Plan, PlanRequest, Prefill, PrefillMode, Slo, WorkerKey};
use baton_request::{Failure, FailureKind};
use baton_scheduler::SequenceRole;

use super::{
    Awaited, Event, Simulation,
    live::{Attempt, Held, with_output},
};
use crate::{report::RequestEnd, time::SimTime, trace::Arrival, worker::RequestIdx};

/// Clients allow answers of so many tokens: the planner must not learn from it how long they will be.
const ALLOWED_OUTPUT: usize = 4096;

impl Simulation<'_> {
    /// Plans a request, and sends it.
    pub(super) fn plan(&mut self, request: RequestIdx) {
        let now = self.instant();
        let excluded = self.live[request as usize].as_ref().map(|live| live.retry.excluded().to_vec());
        let excluded = excluded.expect("a request is planned before it ends");
        let plan = match self.plan_without(request, excluded, PrefillMode::Auto, 0) {
            Ok(plan) => plan,
            Err(no_plan) => return self.wait(request, &no_plan, now),
        };
        let live = self.live[request as usize].as_ref().expect("as above");
        let outcome = &mut self.outcomes[request as usize];
        outcome.num_attempts += 1;
        outcome.is_remote = matches!(plan.prefill, Prefill::Remote(_));
        if live.num_attempts == 0 {
            outcome.predicted_ttft = plan.estimate.map_or(f32::NAN, |estimate| estimate.ttft as f32);
        }
        self.send(request, plan, false);
    }

    /// What the request's router plans, but for these workers.
    pub(super) fn plan_without(
        &mut self,
        request: RequestIdx,
        excluded: Vec<WorkerKey>,
        prefill: PrefillMode,
        num_arriving: usize,
    ) -> Result<Plan, NoPlan> {
        let instant = self.instant();
        let idx = request as usize;
        let outcome = &self.outcomes[idx];
        let (num_prompt, num_output) =
            (outcome.num_prompt_tokens as usize, outcome.num_output_tokens as usize);
        let num_tokens = self.num_known_tokens(request);
        let longest =
            self.workers.iter().map(|worker| worker.record.capacity.context_length).max().unwrap_or(0);
        let allowed = (num_prompt + ALLOWED_OUTPUT).min(longest);
        let slo = Slo { ttft: Some(f64::from(outcome.slo_ttft)), tpot: Some(f64::from(outcome.slo_tpot)) };
        let live = self.live[idx].as_ref().expect("a request is planned before it ends");
        let asked = PlanRequest {
            num_tokens,
            num_arriving,
            max_tokens: allowed.max(num_prompt + num_output),
            excluded,
            prefill,
            slo,
            ..PlanRequest::default()
        };
        self.routers[live.router as usize].plan(asked, &live.hashes, self.block_size, instant)
    }

    /// Sends a request as planned. An earlier attempt has nothing at any worker.
    pub(super) fn send(&mut self, request: RequestIdx, plan: Plan, is_arriving: bool) {
        let (now, idx) = (self.now(), request as usize);
        let num_tokens = self.num_known_tokens(request);
        let live = self.live[idx].as_mut().expect("it was planned");
        let router = &mut self.routers[live.router as usize];
        let decode = router.place(&plan.decode.id);
        let decode_ticket = router.send(decode, plan.decode_work);
        let prefill = match &plan.prefill {
            Prefill::Local => None,
            Prefill::Remote(worker) => Some(router.place(&worker.id)),
        };
        let prefill_ticket = prefill.map(|idx| router.send(idx, plan.prefill_work));
        live.num_attempts += 1;
        let number = live.num_attempts;
        self.awaited[idx] = Awaited::First;
        live.attempt = Some(Attempt {
            plan,
            number,
            is_arriving,
            num_tokens,
            decode,
            prefill,
            decode_ticket,
            prefill_ticket,
            decode_sequence: None,
            prefill_sequence: None,
            recall: None,
            source: None,
            fetch: None,
            prefill_began: SimTime(0),
            granted: None,
            computed: None,
            is_decoding: false,
        });
        // To the decode worker, which calls the prefill worker.
        let calls = if prefill.is_some() { self.spec.call + self.spec.call } else { self.spec.call };
        self.queue.push(now + calls, Event::Submit { request, attempt: number });
    }

    /// Of its prompt, and of what was delivered.
    pub(super) fn num_known_tokens(&self, request: RequestIdx) -> usize {
        let outcome = &self.outcomes[request as usize];
        (outcome.num_prompt_tokens + outcome.num_output_tokens - self.num_left[request as usize]) as usize
    }

    /// There is no plan now.
    fn wait(&mut self, request: RequestIdx, no_plan: &NoPlan, now: Instant) {
        let live = self.live[request as usize].as_mut().expect("as in `plan`");
        let router = &mut self.routers[live.router as usize];
        let last_usable = no_plan.lacks().and_then(|role| router.last_usable(role, now));
        let known_until = last_usable.map(|at| at + self.spec.recovery_timeout);
        let has_output = self.first_token_at[request as usize] > 0;
        match live.retry.on_no_plan(no_plan, known_until, has_output, now) {
            Ok(until) => {
                let pause = until.saturating_duration_since(self.epoch).as_nanos() as u64;
                let at = SimTime(pause).max(self.queue.now() + SimTime(1));
                self.queue.push(at, Event::Replan { request });
            }
            Err(give_up) => self.give_up(request, &give_up),
        }
    }

    pub(super) fn replan(&mut self, request: RequestIdx) {
        let now = self.instant();
        if let Some(live) = &mut self.live[request as usize] {
            live.retry.look_again(now);
            self.plan(request);
        }
    }

    /// The attempt of this number, if it is still the request's.
    pub(super) fn attempt(&mut self, request: RequestIdx, number: u32) -> Option<&mut Attempt> {
        let attempt = self.live[request as usize].as_mut()?.attempt.as_mut()?;
        (attempt.number == number).then_some(attempt)
    }

    /// An attempt arrives at its workers.
    pub(super) fn submit(&mut self, request: RequestIdx, number: u32) {
        let Some(attempt) = self.attempt(request, number) else { return };
        let (decode, prefill) = (attempt.decode, attempt.prefill);
        let decode_life = attempt.plan.decode.incarnation;
        let prefill_life = match &attempt.plan.prefill {
            Prefill::Local => 0,
            Prefill::Remote(worker) => worker.incarnation,
        };
        let source = attempt.plan.prefix_source.as_ref().map(|worker| WorkerKey::of(worker));
        let serves = |idx: usize, life: u64| {
            self.workers[idx].is_alive && self.workers[idx].record.incarnation == life
        };
        let is_full =
            |idx: usize| self.workers[idx].scheduler.num_waiting() >= self.workers[idx].spec.max_waiting;
        if !serves(decode, decode_life) {
            return self.fail_at(request, FailureKind::Lost, AttemptStage::NoWorker);
        }
        if prefill.is_some_and(|idx| !serves(idx, prefill_life)) {
            return self.fail_at(request, FailureKind::PrefillLost, AttemptStage::Worker);
        }
        if is_full(prefill.unwrap_or(decode)) {
            return self.fail_at(request, FailureKind::Full, AttemptStage::NoWorker);
        }
        // From now on it fails with either worker, also while it waits at the other one.
        for idx in prefill.into_iter().chain([decode]) {
            self.workers[idx].present.insert(request);
        }
        let attempt = self.attempt(request, number).expect("as above");
        attempt.source = source;
        let computes = attempt.computes();
        if !self.recall(request, computes, false) {
            self.fetch_prefix(request);
        }
    }

    /// Queues the prompt where it is computed.
    pub(super) fn compute(&mut self, request: RequestIdx) {
        let idx = request as usize;
        let live = self.live[idx].as_mut().expect("it was submitted");
        let attempt = live.attempt.as_mut().expect("as above");
        let hashes = with_output(&live.hashes, request, attempt.num_tokens, self.block_size);
        let root = self.roots[self.arrivals[idx].copy as usize];
        let worker_idx = attempt.computes();
        let worker = &mut self.workers[worker_idx];
        let (role, ticket) = match attempt.prefill_ticket {
            Some(ticket) => (SequenceRole::Prefill, ticket),
            None => (SequenceRole::Generate, attempt.decode_ticket),
        };
        let max_tokens = attempt.num_tokens + self.num_left[idx] as usize;
        let id = worker.add(request, role, attempt.num_tokens, max_tokens, &hashes, root);
        worker.covered.push((live.router, ticket));
        let held = Some(Held { worker: worker_idx, life: worker.life, id });
        match role {
            SequenceRole::Prefill => attempt.prefill_sequence = held,
            _ => (attempt.decode_sequence, attempt.is_decoding) = (held, true),
        }
        self.kick(worker_idx);
    }

    /// The first token of a request, or of its newest attempt, reaches the client.
    pub(super) fn first_token(&mut self, request: RequestIdx, at: SimTime) {
        let idx = request as usize;
        self.awaited[idx] = Awaited::Decoded;
        if self.first_token_at[idx] == 0 {
            self.first_token_at[idx] = at.0.max(1);
            let outcome = &mut self.outcomes[idx];
            outcome.ttft = (at - outcome.arrived).seconds() as f32;
        }
        let live = self.live[idx].as_mut().expect("it has a token");
        let Some(attempt) = &mut live.attempt else { return };
        let router = &mut self.routers[live.router as usize];
        router.computed(attempt.decode, attempt.decode_ticket);
        if let (Some(prefill), Some(ticket)) = (attempt.prefill, attempt.prefill_ticket.take()) {
            router.settle(prefill, ticket);
            router.report_success(prefill);
        }
    }

    /// The decode worker has generated a token of the newest attempt, so it has the prompt's KV. The first token of a remote
    /// prefill does not say so.
    pub(super) fn decoded(&mut self, request: RequestIdx) {
        let idx = request as usize;
        self.awaited[idx] = Awaited::Nothing;
        let live = self.live[idx].as_mut().expect("it has a token");
        live.retry.on_progress();
        let Some(attempt) = &live.attempt else { return };
        self.routers[live.router as usize].report_success(attempt.decode);
    }

    /// The attempt fails while a worker has it.
    pub(super) fn fail(&mut self, request: RequestIdx, kind: FailureKind) {
        self.fail_at(request, kind, AttemptStage::Worker);
    }

    fn fail_at(&mut self, request: RequestIdx, kind: FailureKind, stage: AttemptStage) {
        let now = self.instant();
        let Some(attempt) = self.take_attempt(request) else { return };
        let live = self.live[request as usize].as_mut().expect("it has an attempt");
        match live.retry.on_failure(Failure::new(kind, kind.name()), &attempt.plan, stage, now) {
            Ok(blame) => {
                if let Some(spare) = &blame.spare {
                    self.routers[live.router as usize].report_failure(spare, now);
                }
                self.plan(request);
            }
            Err(give_up) => self.give_up(request, &give_up),
        }
    }

    fn give_up(&mut self, request: RequestIdx, give_up: &GiveUp) {
        let end = match give_up {
            GiveUp::NoPlan(NoPlan::DecodeTooSmall { .. }) | GiveUp::Invalid(_) => RequestEnd::TooLong,
            _ => RequestEnd::Failed,
        };
        self.end(request, end);
    }

    /// The request has ended.
    pub(super) fn end(&mut self, request: RequestIdx, end: RequestEnd) {
        let at = self.now() + self.spec.call;
        let idx = request as usize;
        let attempt = self.take_attempt(request);
        let Some(live) = self.live[idx].take() else { return };
        let outcome = &mut self.outcomes[idx];
        outcome.end = end;
        if end == RequestEnd::Finished {
            let num_tokens = outcome.num_prompt_tokens + outcome.num_output_tokens;
            let hashes = with_output(&live.hashes, request, num_tokens as usize, self.block_size);
            let decode = attempt.expect("a request finishes where it runs").decode;
            self.routers[live.router as usize].note_finished(decode, &hashes, outcome.num_output_tokens);
            let gaps = outcome.num_output_tokens.saturating_sub(1);
            let decoding = SimTime(at.0.saturating_sub(self.first_token_at[idx]));
            outcome.tpot = if gaps == 0 { 0.0 } else { (decoding.seconds() / f64::from(gaps)) as f32 };
        }
        self.num_ended += 1;
        if self.arrivals.get(self.next_arrival).is_some_and(|next| next.at == Arrival::AFTER_ANOTHER) {
            self.queue.push(at, Event::Arrive);
        }
    }

    /// Takes back what the attempt has anywhere.
    pub(super) fn take_attempt(&mut self, request: RequestIdx) -> Option<Attempt> {
        let live = self.live[request as usize].as_mut()?;
        let attempt = live.attempt.take()?;
        let router = &mut self.routers[live.router as usize];
        router.settle(attempt.decode, attempt.decode_ticket);
        if let (Some(prefill), Some(ticket)) = (attempt.prefill, attempt.prefill_ticket) {
            router.settle(prefill, ticket);
        }
        let mut touched = Vec::with_capacity(2);
        if let Some(held) = attempt.prefill_sequence.filter(|held| self.holds(held)) {
            // The sequence, if it still computes, and its hold.
            self.workers[held.worker].cancel(held.id);
            self.workers[held.worker].scheduler.release(held.id);
            touched.push(held.worker);
        }
        if let Some(held) = attempt.decode_sequence.filter(|held| self.holds(held)) {
            match attempt.is_decoding {
                true => self.workers[held.worker].cancel(held.id),
                false => self.workers[held.worker].scheduler.release(held.id),
            }
            touched.push(held.worker);
        }
        if let Some(fetch) = attempt.fetch {
            for held in [fetch.from, Some(fetch.to), fetch.expected].into_iter().flatten() {
                if self.holds(&held) {
                    self.workers[held.worker].scheduler.release(held.id);
                    touched.push(held.worker);
                }
            }
        }
        for &worker in [attempt.decode].iter().chain(&attempt.prefill).chain(&touched) {
            self.workers[worker].present.remove(&request);
        }
        self.to_kick.extend(touched);
        Some(attempt)
    }

    pub(super) fn holds(&self, held: &Held) -> bool {
        self.workers[held.worker].is_alive && self.workers[held.worker].life == held.life
    }
}
