//! One choice of a request, from plan to last token. It plans, sends, and after a failure plans again with the delivered
//! tokens, so that the client sees every token exactly once.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use baton_planner::{AttemptStage, NoPlan, Plan, Prefill, PrefillMode, Retry, WorkerKey};
use baton_proto::worker::{self as proto, GenerateRequest, generate_event};
use baton_request::{Failure, FailureKind, FinishReason, Request};
use baton_router_workers::SequenceHashes;
use baton_telemetry::{KeyValue, TracePoint};
use baton_tokenizer::Detokenizer;
use tracing::{Instrument, Span};

use super::{
    Core, CoreError, Echo, Event, Finish, MigrationMode, TokenOut,
    attempt::Attempt,
    durable::{DurableSession, Replayed},
    explain::ExplainedPlan,
    migration::{Cause, MigrationState, MigrationStep, PAUSE, TURN},
    migrator::Candidate,
    output::Output,
    planner::{Migrating, PlanWish},
    request::PreparedRequest,
    timing::Stopwatch,
};

/// What a choice waits for.
enum Came {
    /// An event of its worker.
    Event(Result<generate_event::Event, Failure>),
    /// A step of its migration to another worker.
    Migration(MigrationStep),
    /// The migrator tells the request to migrate to this worker.
    Told(WorkerKey),
}

/// The state of one choice.
pub(crate) struct Choice {
    core: Arc<Core>,
    prepared: Arc<PreparedRequest>,
    index: u32,
    /// What a worker is asked for; its output is what was delivered.
    request: Request,
    output: Output,
    /// Position of the next token of the prompt whose log-probability is to be delivered.
    next_scored: usize,
    /// Of the request's known tokens, as far as they were planned with. `None` before the first plan.
    hashes: Option<SequenceHashes>,
    retry: Retry,
    num_attempts: u32,
    attempt: Option<Attempt>,
    migration: MigrationState,
    /// The attempt's worker has said that it is about to leave.
    is_leaving: bool,
    /// While the request decodes, if it can be told to migrate.
    candidate: Option<Candidate>,
    last_token: Option<Instant>,
    stopwatch: Stopwatch,
    /// With a journal.
    durable: Option<DurableSession>,
    /// The client's request, also after its handler has returned.
    span: Span,
    done: bool,
}

impl Choice {
    pub(crate) fn new(
        core: Arc<Core>,
        prepared: Arc<PreparedRequest>,
        index: u32,
        durable: Option<DurableSession>,
    ) -> Choice {
        let mut request = prepared.prompts[(index / prepared.n) as usize].clone();
        request.id = format!("{}-{index}", prepared.arrival.caller.qualified(&prepared.id));
        if prepared.arrival.resumed_request().is_some() {
            // Workers may still know an attempt of the router that died.
            request.id = format!("{}-{:x}", request.id, uuid::Uuid::new_v4().as_fields().0);
        }
        request.sampling.seed = request.sampling.seed.wrapping_add(u64::from(index % prepared.n));
        if !index.is_multiple_of(prepared.n) {
            request.sampling.prompt_logprobs = None;
        }
        Choice {
            output: Output::new(request.prompt.len(), prepared.stop.clone(), request.sampling.min_tokens),
            retry: Retry::new(core.config.max_attempts, core.config.recovery_timeout),
            core,
            stopwatch: Stopwatch::new(index, &prepared),
            prepared,
            index,
            request,
            next_scored: 1,
            hashes: None,
            num_attempts: 0,
            attempt: None,
            migration: MigrationState::Idle,
            is_leaving: false,
            candidate: None,
            last_token: None,
            durable,
            span: Span::current(),
            done: false,
        }
    }

    /// The next event; `None` after the last one, and after an error. `aborted` completes when the request is to end; it is the
    /// same for all events, as to wait anew for each costs locks.
    pub(crate) async fn next(
        &mut self,
        aborted: &mut (impl Future<Output = ()> + Unpin),
    ) -> Option<Result<Event, CoreError>> {
        if self.done {
            return None;
        }
        let event = tokio::select! {
            biased;
            () = aborted => match self.core.closing.is_cancelled() {
                true => Err(CoreError::unavailable("the router is shutting down")),
                false => Ok(self.finished(FinishReason::Abort)),
            },
            event = self.advance() => event,
        };
        match (&event, &self.durable) {
            (Ok(Event { finish: Some(finish), .. }), Some(session)) => {
                session.end(finish.reason, self.request.output.len());
            }
            // None may resume what has no event, and it would be in the way of the same request.
            (Err(_), Some(session))
                if self.has_no_event()
                    && !(self.core.closing.is_cancelled() && self.prepared.arrival.is_named()) =>
            {
                session.abort();
            }
            _ => {}
        }
        if !matches!(event, Ok(Event { finish: None, .. })) {
            // Without an end the session is parked.
            self.durable = None;
            // Dropping the attempt cancels it at the worker.
            // Invariant 2: no event follows a terminal one.
            self.done = true;
            self.attempt = None;
            self.migration = MigrationState::Idle;
            self.candidate = None;
        }
        Some(event)
    }

    async fn advance(&mut self) -> Result<Event, CoreError> {
        if let Some(event) = self.replay().await {
            return Ok(event);
        }
        loop {
            if self.attempt.is_none() && !self.migration.has_started() {
                self.migration = MigrationState::Idle;
                let span = self.span.clone();
                self.attempt = Some(self.connect().instrument(span).await?);
                self.is_leaving = false;
            }
            let came = tokio::select! {
                biased;
                // Tokens last: one may always be ready, and would starve the others.
                step = self.migration.next() => Came::Migration(step),
                to = told(&mut self.candidate) => Came::Told(to),
                event = next_event(&mut self.attempt) => Came::Event(event),
            };
            // The way of a token logs nothing, so it does without the span.
            let event = match came {
                Came::Event(Ok(generate_event::Event::Token(token))) => self.take(token)?,
                came => {
                    let span = self.span.clone();
                    span.in_scope(|| self.on(came))?
                }
            };
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }

    /// What an earlier router or connection has delivered, again.
    async fn replay(&mut self) -> Option<Event> {
        match self.durable.as_mut()?.replay().await? {
            Replayed::Token(token) => Some(self.deliver(token)),
            Replayed::All(ending) => {
                // The last token may be journalled, and not the end.
                let reason = ending.or_else(|| self.ended_already())?;
                Some(self.finished(reason))
            }
        }
    }

    /// What follows from anything but a token.
    fn on(&mut self, came: Came) -> Result<Option<Event>, CoreError> {
        match came {
            Came::Event(Ok(generate_event::Event::Token(token))) => return self.take(token),
            Came::Event(Ok(generate_event::Event::Finished(finished))) => {
                let reason = FinishReason::from(finished.reason());
                if reason == FinishReason::Abort {
                    // The router did not ask for it: the worker is shutting down.
                    self.on_failure(Failure::new(FailureKind::Draining, "it aborted"))?;
                    return Ok(None);
                }
                if let Some(attempt) = self.attempt.as_ref().filter(|attempt| attempt.num_tokens == 1) {
                    self.core.workers.report_success(&attempt.decode);
                }
                self.note_finished();
                return Ok(Some(self.finished(reason)));
            }
            Came::Event(Ok(generate_event::Event::Leaving(_))) => {
                self.is_leaving = true;
                self.leave(Cause::Drain, Duration::ZERO);
            }
            Came::Event(Ok(generate_event::Event::Scored(scored))) => return Ok(self.take_scored(scored)),
            // `Attempt::next` goes on waiting.
            Came::Event(Ok(generate_event::Event::Progress(_))) => {}
            // `Attempt::next` turns it into an error.
            Came::Event(Ok(generate_event::Event::Failed(failed))) => self.on_failure(failed.into())?,
            Came::Event(Err(failure)) => {
                // The last token may have been delivered, and only its `finished` lost.
                let ended = self.ended_already();
                let retried = self.on_failure(failure);
                match ended {
                    Some(reason) => return Ok(Some(self.finished(reason))),
                    None => retried?,
                }
            }
            Came::Told(to) => {
                self.candidate = None;
                self.leave(Cause::Balance(to), Duration::ZERO);
            }
            Came::Migration(MigrationStep::Ready(cause)) => self.migrate(cause),
            Came::Migration(MigrationStep::Started(cause, Ok(started))) => {
                let (attempt, token) = *started;
                if let Some(failure) = self.difference(attempt.next_idx, &token) {
                    attempt.fail(&failure);
                    let failed = Box::new((attempt.plan, failure));
                    return self.on(Came::Migration(MigrationStep::Started(cause, Err(failed))));
                }
                self.core.metrics.on_migration(cause.name(), "moved");
                tracing::debug!(
                    request = %self.prepared.id, index = self.index, cause = cause.name(),
                    to = %attempt.decode, delivered = self.request.output.len(), known = attempt.next_idx, "request migrated"
                );
                // This drops the old attempt.
                self.candidate = None;
                self.attempt = Some(attempt);
                self.is_leaving = false;
                return self.take(token);
            }
            Came::Migration(MigrationStep::Started(cause, Err(failed))) => {
                let (plan, failure) = *failed;
                self.core.metrics.on_migration(cause.name(), failure.kind.name());
                tracing::info!(
                    request = %self.prepared.id, index = self.index, cause = cause.name(),
                    to = %plan.decode.id, prefill_worker = plan.prefill.worker_id(), prefix_source = plan.prefix_source_id(),
                    reason = failure.kind.name(), error = failure.message, "request did not migrate"
                );
                self.stay(cause);
            }
        }
        Ok(None)
    }

    /// The next token, unless it was delivered before: then it must be the same.
    fn take(&mut self, token: proto::Token) -> Result<Option<Event>, CoreError> {
        let Some(attempt) = &mut self.attempt else { return Ok(None) };
        let idx = attempt.next_idx;
        attempt.next_idx += 1;
        // All scores come before the first token.
        let lacks_scores = attempt.is_scored && idx == 0 && self.next_scored < self.request.prompt.len();
        let failure = match lacks_scores {
            // It is older than the field, which it ignores.
            true => Some(Failure::new(FailureKind::Internal, "the worker does not score prompts")),
            false => self.difference(idx, &token),
        };
        if let Some(failure) = failure {
            self.on_failure(failure)?;
            return Ok(None);
        }
        // Invariant 1: the index says whether this token was delivered, by this attempt or an earlier one.
        Ok((idx >= self.request.output.len()).then(|| self.on_token(token)))
    }

    /// Why a token cannot follow the first `idx` ones: another one was delivered after them.
    fn difference(&self, idx: usize, token: &proto::Token) -> Option<Failure> {
        let known = self.request.output.get(idx).filter(|known| **known != token.id)?;
        let message = format!("token {idx} was {known} before, and is {} now", token.id);
        Some(Failure::new(FailureKind::Diverged, message))
    }

    /// The tokens of the prompt that an earlier attempt has not delivered.
    fn take_scored(&mut self, scored: proto::Scored) -> Option<Event> {
        let num_known = self.next_scored.saturating_sub(scored.first_idx as usize);
        let scored: Vec<_> = scored.tokens.into_iter().skip(num_known).collect();
        self.next_scored += scored.len();
        (!scored.is_empty()).then(|| Event { scored, ..Event::empty(self.index) })
    }

    /// Migrates, `pause` from now. A scored prompt stays: another worker would score it again, before its first token. Later it
    /// would compute the prompt again, as no cache has its KV: balance is not worth that.
    fn leave(&mut self, cause: Cause, pause: Duration) {
        let stays = match cause {
            Cause::Drain => self.request.is_scored(),
            Cause::Balance(_) => self.request.sampling.prompt_logprobs.is_some(),
        };
        let may_migrate = self.core.migrator.mode != MigrationMode::Off && !stays;
        if may_migrate && !self.migration.has_started() {
            self.migration.wait(cause, pause);
        }
    }

    /// Starts an attempt at another worker, if there is one. The old attempt goes on.
    fn migrate(&mut self, cause: Cause) {
        let Some(attempt) = &self.attempt else { return };
        let Ok(permit) = self.core.migrator.permits.clone().try_acquire_owned() else {
            return self.leave(cause, TURN);
        };
        let to = match &cause {
            Cause::Drain => None,
            Cause::Balance(to) => Some(to),
        };
        if let Some(hashes) = &mut self.hashes {
            // Its blocks fit no worker of another kind.
            hashes.advance(&self.request);
        }
        let with_kv = !attempt.is_scored;
        match self.plan(Some(Migrating { from: &attempt.plan.decode, to, with_kv })) {
            Ok(plan) => {
                self.on_plan(&plan);
                let for_balance = matches!(cause, Cause::Balance(_));
                let request = GenerateRequest { for_balance, ..self.message() };
                self.num_attempts += 1;
                let (workers, stall_timeout) = (self.core.workers.clone(), self.core.config.stall_timeout);
                self.migration.start(cause, permit, workers, plan, request, stall_timeout);
            }
            Err(_) => {
                self.core.metrics.on_migration(cause.name(), "nowhere");
                self.stay(cause);
            }
        }
    }

    /// Goes on at its worker. When that drains, which it says once, the request tries again after a pause.
    fn stay(&mut self, cause: Cause) {
        if (cause == Cause::Drain || self.is_leaving) && self.attempt.is_some() {
            self.leave(Cause::Drain, PAUSE);
        }
    }

    /// Whether the client has nothing of the answer.
    fn has_no_event(&self) -> bool {
        let is_resumed = self.prepared.arrival.resumed_request().is_some();
        !is_resumed && self.request.output.is_empty() && self.next_scored == 1
    }

    fn plan(&self, migrating: Option<Migrating<'_>>) -> Result<Plan, NoPlan> {
        let PreparedRequest { prefill, slo, explain, .. } = *self.prepared;
        let computes_locally = prefill == PrefillMode::Auto && self.retry.computes_locally();
        let prefill = if computes_locally { PrefillMode::Local } else { prefill };
        let wish = PlanWish { prefill, excluded: self.retry.excluded(), slo, explain, migrating };
        let nothing = SequenceHashes::default();
        let hashes = self.hashes.as_ref().unwrap_or(&nothing);
        // The worker that generates computes all of such a prompt.
        let (wish, hashes) = match self.request.is_scored() {
            true => (PlanWish { prefill: PrefillMode::Local, ..wish }, &nothing),
            false => (wish, hashes),
        };
        self.core.planner.plan(&self.core.workers, &self.request, hashes, wish)
    }

    /// Hashes what is not hashed yet. Choices of one prompt share its hashes.
    async fn hash(&mut self) {
        let idx = (self.index / self.prepared.n) as usize;
        let (shared, prompt) = (&self.prepared.hashes[idx], &self.prepared.prompts[idx]);
        let kinds = self.core.workers.block_kinds();
        self.hashes = Some(shared.extend(self.hashes.take(), &kinds, prompt, &self.request).await);
    }

    /// Counts the plan, and keeps it for a client that wants to know it.
    fn on_plan(&self, plan: &Plan) {
        self.core.metrics.on_plan(plan);
        if self.prepared.explain {
            self.prepared.plans().push(ExplainedPlan::new(self.index, self.num_attempts, plan));
        }
    }

    /// Plans until a worker takes the request.
    async fn connect(&mut self) -> Result<Attempt, CoreError> {
        // Of the first plan: since the tokens are known.
        let mut since = if self.num_attempts == 0 { self.prepared.tokenised } else { Instant::now() };
        let mut waiting = None;
        loop {
            // Before looking, so that no change is missed.
            let mut changes = self.core.workers.changes();
            self.hash().await;
            let plan = match self.plan(None) {
                Ok(plan) => plan,
                Err(no_plan) => {
                    let now = Instant::now();
                    // A request that never failed counts an outage from its beginning.
                    let known_until = no_plan
                        .lacks()
                        .and_then(|role| self.core.workers.last_usable(role))
                        .map(|at| at + self.core.config.recovery_timeout);
                    let has_output = !self.request.output.is_empty();
                    let until = self.retry.on_no_plan(&no_plan, known_until, has_output, now);
                    let until = until.map_err(CoreError::from).inspect_err(|error| {
                        if error.is_server_fault() {
                            self.trace_no_plan(&no_plan, since);
                        }
                    })?;
                    waiting.get_or_insert_with(|| self.core.metrics.waiting.enter(&no_plan, now));
                    // A worker came or time passed: look again.
                    let _ = tokio::time::timeout_at(until.into(), changes.changed()).await;
                    self.retry.look_again(Instant::now());
                    continue;
                }
            };
            waiting = None;
            self.on_plan(&plan);
            tracing::debug!(
                request = %self.prepared.id, index = self.index, attempt = self.num_attempts,
                decode = %plan.decode.id, prefill = plan.prefill.name(), prefill_worker = plan.prefill.worker_id(),
                prefix_source = plan.prefix_source_id(), delivered = self.request.output.len(), "planned"
            );
            self.trace_plan(&plan, since);
            let request = self.message();
            self.num_attempts += 1;
            match Attempt::start(&self.core.workers, plan, request, self.core.config.stall_timeout).await {
                Ok(attempt) => return Ok(attempt),
                Err((plan, failure)) => self.on_failed_plan(failure, &plan, AttemptStage::NoWorker)?,
            }
            since = Instant::now();
        }
    }

    /// Records how long the plan took, waiting for workers included.
    fn trace_plan(&self, plan: &Plan, since: Instant) {
        if let Some(request) = TracePoint::of(&self.span) {
            let attributes = vec![
                KeyValue::new("attempt", i64::from(self.num_attempts)),
                KeyValue::new("decode", plan.decode.id.0.clone()),
                KeyValue::new("plan", plan.prefill.name()),
            ];
            request.record("plan", since, Instant::now(), attributes);
        }
    }

    /// Records that no worker came in time.
    fn trace_no_plan(&self, no_plan: &NoPlan, since: Instant) {
        if let Some(request) = TracePoint::of(&self.span) {
            let attributes = vec![KeyValue::new("attempt", i64::from(self.num_attempts))];
            let message = no_plan.to_string();
            request.record_failed("plan", since, Instant::now(), attributes, "no_plan", &message);
        }
    }

    /// Of the next attempt, but for its plan.
    fn message(&self) -> GenerateRequest {
        GenerateRequest {
            attempt: self.num_attempts,
            kv_wire: self.prepared.kv_wire.into(),
            ..GenerateRequest::from(&self.request)
        }
    }

    fn on_failure(&mut self, failure: Failure) -> Result<(), CoreError> {
        self.candidate = None;
        match self.attempt.take() {
            Some(attempt) => {
                attempt.fail(&failure);
                self.on_failed_plan(failure, &attempt.plan, AttemptStage::Worker)
            }
            None => Ok(()),
        }
    }

    fn on_failed_plan(
        &mut self,
        mut failure: Failure,
        plan: &Plan,
        stage: AttemptStage,
    ) -> Result<(), CoreError> {
        // A worker that drains closes its connections in the end. That is no crash.
        let is_leaving = stage == AttemptStage::Worker && self.is_leaving;
        if failure.kind == FailureKind::Lost
            && (is_leaving || self.core.workers.is_leaving(&WorkerKey::of(&plan.decode)))
        {
            failure.kind = FailureKind::Draining;
        }
        self.core.metrics.on_failed_attempt(failure.kind.name());
        tracing::warn!(parent: &self.span,
            request = %self.prepared.id, index = self.index, attempt = self.num_attempts - 1,
            decode = %plan.decode.id, prefill = plan.prefill.name(), prefill_worker = plan.prefill.worker_id(),
            prefix_source = plan.prefix_source_id(), delivered = self.request.output.len(),
            reason = failure.kind.name(), error = failure.message, "attempt failed"
        );
        // Invariant 9: the only place of the system that tries a request again.
        let blame = self.retry.on_failure(failure, plan, stage, Instant::now());
        self.core.workers.count_failure(self.retry.at_fault());
        if let Some(worker) = &blame?.spare {
            self.core.workers.report_failure(worker);
        }
        Ok(())
    }

    fn on_token(&mut self, token: proto::Token) -> Event {
        let now = Instant::now();
        self.note_progress(now);
        self.stopwatch.on_token(&token, self.attempt.as_ref(), now);
        if let Some(session) = &self.durable {
            session.push(self.request.output.len(), &token);
        }
        self.deliver(token)
    }

    /// The event of a token, whose text depends on those before it alone.
    fn deliver(&mut self, token: proto::Token) -> Event {
        let model = self.core.model().expect("a request exists only after its prompt was tokenised");
        let prompt = &self.request.prompt;
        let shown = if self.prepared.reader.is_some() { model.marks.clone() } else { Arc::default() };
        let finish = self.request.finish_after(self.request.output.len() + 1, token.id, usize::MAX);
        // What ends an answer is no part of its text, as in vLLM.
        let has_text = finish != Some(FinishReason::Stop) || shown.contains(&token.id);
        let detokenizer = || Detokenizer::showing(&model.tokenizer, prompt, shown);
        let matched = self.output.push(&token, has_text, detokenizer);
        self.request.output.push(token.id);
        if let Some(hashes) = &mut self.hashes {
            hashes.keep_up(&self.request);
        }
        let finish = matched.stop.map(|stop| self.finish(FinishReason::Stop, Some(stop)));
        if finish.is_some() {
            self.note_finished();
        }
        let tokens = vec![TokenOut { id: token.id, logprobs: token.logprobs }];
        Event { text: matched.text, tokens, finish, ..Event::empty(self.index) }
    }

    /// The answer is whole. Its worker, which a replay has not, holds the conversation now.
    fn note_finished(&mut self) {
        if let Some(attempt) = &self.attempt {
            let core = &self.core;
            let hashes = if attempt.is_scored { None } else { Some(self.hashes.get_or_insert_default()) };
            core.planner.note_finished(&core.workers, &attempt.decode, &self.request, hashes);
        }
    }

    fn note_progress(&mut self, now: Instant) {
        match self.last_token.replace(now) {
            // The client gets none.
            _ if self.prepared.echo == Echo::Alone => {}
            None => self.core.metrics.on_first_token(now - self.prepared.arrival.at),
            Some(last) => self.core.metrics.on_next_token(now - last),
        }
        let Some(attempt) = &mut self.attempt else { return };
        attempt.num_tokens += 1;
        // The first token of a remote prefill is the prefill worker's, and comes before the KV does.
        let num_elsewhere = match &attempt.plan.prefill {
            Prefill::Remote(worker) => {
                if attempt.num_tokens == 1 {
                    self.core.workers.report_success(&WorkerKey::of(worker));
                }
                1
            }
            Prefill::Local => 0,
        };
        if attempt.num_tokens > num_elsewhere {
            self.retry.on_progress();
        }
        if attempt.num_tokens == num_elsewhere + 1 {
            self.core.workers.report_success(&attempt.decode);
        }
        if attempt.num_tokens == 1 {
            if let Some(estimate) = &attempt.plan.estimate {
                self.core.metrics.on_predicted(estimate.ttft, now - attempt.started);
            }
            if self.core.migrator.mode == MigrationMode::Balance {
                self.candidate = Some(self.core.migrator.enter(&attempt.decode));
            }
        }
    }

    fn finished(&mut self, reason: FinishReason) -> Event {
        let matched = self.output.finish();
        let finish = self.finish(reason, matched.stop);
        Event { text: matched.text, finish: Some(finish), ..Event::empty(self.index) }
    }

    fn finish(&self, reason: FinishReason, stop: Option<usize>) -> Finish {
        let stop = stop.map(|stop| self.prepared.stop[stop].clone());
        Finish { reason, stop, usage: self.output.usage(), timing: self.stopwatch.read() }
    }

    /// Why the delivered tokens end the sequence, by the worker's own rule, if they do.
    fn ended_already(&self) -> Option<FinishReason> {
        let &last = self.request.output.last()?;
        // No more tokens are asked for than there is context for.
        self.request.finish_after(self.request.output.len(), last, usize::MAX)
    }
}

impl Drop for Choice {
    fn drop(&mut self) {
        // The client has left before it knew by which id to resume the stream.
        if let Some(session) = &self.durable
            && self.has_no_event()
            && !self.prepared.arrival.is_named()
        {
            session.abort();
        }
    }
}

/// Pending forever without an attempt.
async fn next_event(attempt: &mut Option<Attempt>) -> Result<generate_event::Event, Failure> {
    match attempt {
        Some(attempt) => attempt.next().await,
        None => std::future::pending().await,
    }
}

/// Pending forever without a candidate.
async fn told(candidate: &mut Option<Candidate>) -> WorkerKey {
    match candidate {
        Some(candidate) => candidate.told().await,
        None => std::future::pending().await,
    }
}
