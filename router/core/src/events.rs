//! The choices of a running request, merged into one stream of [`Event`]s.

use std::{pin::Pin, sync::Arc};

use baton_request::FinishReason;
use baton_telemetry::{TracePoint, trace_context};
use futures_util::{Stream, StreamExt, stream::SelectAll};
use tokio::sync::OwnedSemaphorePermit;
use tracing::Span;

use super::{
    ActiveRequest, Core, CoreError, Echo, EndedRequest, Event, Extras, Finish, PreparedRequest, Timing,
    Usage, choice::Choice, durable::DurableSession,
};

impl Core {
    /// Admits the request and begins it. Dropping the events cancels it.
    pub fn generate(self: &Arc<Self>, request: PreparedRequest) -> Result<Events, CoreError> {
        let permit = self.room_for(&request)?;
        let active = self.enter(&request, None)?;
        Ok(self.begin(request, None, active, permit))
    }

    /// Begins a request that has entered, perhaps with a journal: then dropping the events parks it.
    pub(crate) fn begin(
        self: &Arc<Self>,
        request: PreparedRequest,
        session: Option<DurableSession>,
        active: ActiveRequest,
        permit: OwnedSemaphorePermit,
    ) -> Events {
        // What is not journalled does not need it.
        drop(request.arrival.durable.as_ref().and_then(|call| call.take_body()));
        Events::new(self.clone(), request, session, active, permit)
    }

    /// Room for a request, if there is some now.
    pub(crate) fn room_for(&self, request: &PreparedRequest) -> Result<OwnedSemaphorePermit, CoreError> {
        let num_choices = request.prompts.len() as u32 * request.n;
        if num_choices as usize > self.config.max_requests {
            let message = format!(
                "{num_choices} choices were requested, this server runs at most {}",
                self.config.max_requests
            );
            return Err(CoreError::invalid("n", message));
        }
        self.admission.clone().try_acquire_many_owned(num_choices).map_err(|_| {
            let message =
                format!("this server runs {} choices already, try again later", self.config.max_requests);
            CoreError::full(message)
        })
    }

    /// Enters a request among those that run. It takes the place of a stream that it resumes.
    pub(crate) fn enter(
        &self,
        request: &PreparedRequest,
        resumed: Option<&DurableSession>,
    ) -> Result<ActiveRequest, CoreError> {
        let caller = &request.arrival.caller;
        let active = self.active.enter(caller.tenant(), &request.id, &self.closing, resumed.is_some())?;
        let num_tokens = request.num_prompt_tokens();
        match resumed {
            // Last, so that a refused request costs its key no tokens.
            None => caller.take_prompt_tokens(num_tokens)?,
            // It is not refused: later requests wait.
            Some(session) if session.costs_prompt() => caller.charge_tokens(num_tokens as usize),
            Some(_) => {}
        }
        Ok(active)
    }
}

/// What OpenTelemetry calls the operation.
fn operation(endpoint: &str) -> &'static str {
    match endpoint {
        "/v1/completions" | "/baton.v1.Inference/Generate" => "text_completion",
        _ => "chat",
    }
}

/// The events of all choices, as they come.
enum Choices {
    /// Needs no queue of those that are ready, with its allocation for each event. Empty once it has ended.
    One(Option<ChoiceStream>),
    Many(SelectAll<ChoiceStream>),
}

impl Choices {
    fn of(mut choices: Vec<ChoiceStream>) -> Choices {
        if choices.len() == 1 {
            return Choices::One(choices.pop());
        }
        Choices::Many(choices.into_iter().collect())
    }

    async fn next(&mut self) -> Option<Result<Event, CoreError>> {
        match self {
            Choices::One(choice) => {
                let event = choice.as_mut()?.next().await;
                if event.is_none() {
                    *choice = None;
                }
                event
            }
            Choices::Many(choices) => choices.next().await,
        }
    }

    fn clear(&mut self) {
        match self {
            Choices::One(choice) => *choice = None,
            Choices::Many(choices) => choices.clear(),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Choices::One(choice) => choice.is_none(),
            Choices::Many(choices) => choices.is_empty(),
        }
    }
}

type ChoiceStream = Pin<Box<dyn Stream<Item = Result<Event, CoreError>> + Send>>;

/// The events of all choices of a request. Dropping it cancels the request everywhere.
pub struct Events {
    choices: Choices,
    /// Summed over prompts and choices that have finished.
    usage: Usage,
    /// Of those.
    timing: Vec<Timing>,
    n: u32,
    core: Arc<Core>,
    endpoint: &'static str,
    request: Arc<PreparedRequest>,
    is_durable: bool,
    had_ended: bool,
    /// The next tokens that were delivered before, to this client or another connection of it.
    num_replayed: usize,
    /// Its key has paid for its prompts.
    is_charged: bool,
    /// No event of any choice has come that was not delivered before.
    is_empty: bool,
    outcome: &'static str,
    /// The client's request, also after its handler has returned.
    span: Span,
    /// The same, if its trace is sampled.
    trace: Option<TracePoint>,
    active: ActiveRequest,
    _permit: OwnedSemaphorePermit,
}

impl Events {
    pub(crate) fn new(
        core: Arc<Core>,
        request: PreparedRequest,
        mut session: Option<DurableSession>,
        active: ActiveRequest,
        permit: OwnedSemaphorePermit,
    ) -> Events {
        let usage = Usage { prompt_tokens: request.num_prompt_tokens(), ..Usage::default() };
        let is_charged = session.as_ref().is_none_or(DurableSession::costs_prompt);
        // Those of other resumed requests were counted when they began.
        core.metrics.on_start(if is_charged { usage.prompt_tokens } else { 0 });
        let (n, endpoint) = (request.n, request.endpoint);
        let is_durable = session.is_some();
        let had_ended = session.as_ref().is_some_and(|session| session.ending.is_some());
        let num_replayed = session.as_ref().map_or(0, DurableSession::num_replayed);
        let trace = TracePoint::of(&Span::current());
        if let Some(trace) = &trace {
            trace.record("tokenise", request.arrival.at, request.tokenised, vec![]);
            trace.set("gen_ai.operation.name", operation(endpoint));
            trace.set("gen_ai.provider.name", "baton");
            if let Ok(model) = core.model() {
                trace.set("gen_ai.request.model", model.name.clone());
                trace.set("gen_ai.response.model", model.name.clone());
            }
            trace.set("gen_ai.response.id", active.id().to_owned());
        }
        let num_prompts = request.prompts.len() as u32;
        let request = Arc::new(request);
        let choices = (0..num_prompts * n).map(|index| {
            let choice = Box::new(Choice::new(core.clone(), request.clone(), index, session.take()));
            let aborted = Box::pin(active.abort_signal().clone().cancelled_owned());
            let events =
                futures_util::stream::unfold((choice, aborted), |(mut choice, mut aborted)| async move {
                    let event = choice.next(&mut aborted).await?;
                    Some((event, (choice, aborted)))
                });
            Box::pin(events) as ChoiceStream
        });
        let choices = Choices::of(choices.collect());
        // If it is dropped before its end.
        let outcome = if is_durable { "parked" } else { "cancelled" };
        Events {
            choices,
            usage,
            timing: Vec::new(),
            n,
            core,
            endpoint,
            request,
            is_durable,
            had_ended,
            num_replayed,
            is_charged,
            is_empty: true,
            outcome,
            span: Span::current(),
            trace,
            active,
            _permit: permit,
        }
    }

    /// The next event of any choice; nothing follows an error.
    pub async fn next(&mut self) -> Option<Result<Event, CoreError>> {
        let Some(mut event) = self.choices.next().await else {
            self.outcome = if self.is_unread() { "ok" } else { self.outcome };
            return None;
        };
        if let Ok(event) = &mut event {
            // Before it is charged and counted.
            if self.request.echo == Echo::Alone {
                event.leave_out_output();
            }
            let num_replayed = event.tokens.len().min(self.num_replayed);
            self.num_replayed -= num_replayed;
            self.is_empty &= num_replayed > 0;
            self.request.arrival.caller.charge_tokens(event.tokens.len() - num_replayed);
        }
        let mut is_replaced = false;
        let event = event.and_then(|event| match event.finish {
            Some(Finish { reason: FinishReason::Abort, .. })
                if self.is_durable && self.active.is_replaced() =>
            {
                is_replaced = true;
                Err(CoreError::Replaced)
            }
            _ => Ok(event),
        });
        match &event {
            Ok(Event { index, finish: Some(finish), .. }) => {
                // Choices of one prompt share its prefix: it is counted once.
                self.usage.add(finish.usage, index % self.n == 0);
                self.timing.push(finish.timing.clone());
                self.timing.sort_by_key(|timing| timing.index);
                if finish.reason == FinishReason::Abort {
                    self.outcome = "aborted";
                }
            }
            Ok(_) => {}
            // The client reads on elsewhere: nothing has failed.
            Err(_) if is_replaced => {
                self.outcome = "resumed";
                self.choices.clear();
            }
            Err(error) => {
                self.outcome = "error";
                if self.is_empty && self.is_charged {
                    self.request.refund();
                }
                if error.is_server_fault() {
                    trace_context::fail(&self.span, error.name(), &error.to_string());
                }
                self.choices.clear();
            }
        }
        Some(event)
    }

    /// The id by which the stream can be resumed, if it can be.
    pub fn durable_id(&self) -> Option<&str> {
        self.is_durable.then_some(&self.request.id)
    }

    /// Whether the stream had ended before this call resumed it: all of it is here.
    pub fn had_ended(&self) -> bool {
        self.had_ended
    }

    /// What the client of a resumed stream has already: see [`DurableCall::after`](crate::DurableCall::after).
    pub fn num_delivered(&self) -> u64 {
        self.request.arrival.num_delivered()
    }

    /// No event has decided yet what became of the request.
    fn is_unread(&self) -> bool {
        matches!(self.outcome, "cancelled" | "parked")
    }

    /// What the request asks for beside its answer. Complete once [`next`](Self::next) has returned `None`.
    pub fn extras(&self) -> Extras {
        Extras {
            plans: self.request.explain.then(|| self.request.plans().clone()),
            timing: self.request.timing.then(|| self.timing.clone()),
        }
    }

    /// Tokens of the whole request; complete once [`next`](Self::next) has returned `None`.
    pub fn usage(&self) -> Usage {
        self.usage
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let outcome = match self.outcome {
            // The edge has read the last event but not the end: the request is complete.
            "cancelled" | "parked" if self.choices.is_empty() => "ok",
            // Its choice ends it: the client does not know the id.
            "parked" if self.is_empty && !self.request.arrival.is_named() => "cancelled",
            outcome => outcome,
        };
        let took = self.request.arrival.at.elapsed();
        self.core.metrics.on_end(self.endpoint, outcome, took);
        let ended = EndedRequest {
            id: self.active.id().to_owned(),
            x_request_id: self.request.arrival.x_request_id.clone(),
            tenant: self.request.arrival.caller.tenant().to_owned(),
            key: self.request.arrival.caller.key_name().map(str::to_owned),
            trace_id: trace_context::trace_id(&self.span),
            model: self.core.model().map(|model| model.name.clone()).unwrap_or_default(),
            endpoint: self.endpoint,
            outcome,
            num_choices: self.request.prompts.len() as u32 * self.n,
            usage: self.usage,
            timing: self.timing.first().cloned().unwrap_or_default(),
            e2e: Some(took),
        };
        if let Some(trace) = &self.trace {
            trace.set("gen_ai.usage.input_tokens", i64::from(ended.usage.prompt_tokens));
            trace.set("gen_ai.usage.output_tokens", i64::from(ended.usage.completion_tokens));
            trace.set("gen_ai.usage.cache_read.input_tokens", i64::from(ended.usage.cached_tokens));
            trace.set("outcome", outcome);
            if let Some(ttft) = ended.timing.ttft {
                // Named as in vLLM's spans; in seconds.
                trace.set("gen_ai.latency.time_to_first_token", ttft.as_secs_f64());
            }
        }
        ended.log();
        // Fails without a watcher.
        let _ = self.core.ended.send(Arc::new(ended));
    }
}
