//! Measures one request on a worker: its histograms, and its spans if its trace is sampled.

use std::time::{Duration, Instant};

use baton_request::{FailureKind, FinishReason};
use baton_telemetry::{KeyValue, TracePoint};

use crate::{
    EndedRequests, VllmMetrics,
    ended::{CANCELLED, OK},
};

/// How long a prompt took on the worker that computed it, as the decode worker sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptPace {
    /// Until its first step.
    pub queue: Duration,
    /// From then to the first token.
    pub prefill: Duration,
}

impl PromptPace {
    /// Of a request that came at `started`. Without `computing` nothing tells the two apart.
    pub fn new(started: Instant, computing: Option<Instant>, first_token: Instant) -> PromptPace {
        let computing = computing.unwrap_or(started);
        PromptPace {
            queue: computing.saturating_duration_since(started),
            prefill: first_token.saturating_duration_since(computing),
        }
    }
}

/// Measures one request. Dropped before it [finished](Self::finished) or [failed](Self::failed), it was cancelled.
#[derive(Debug)]
pub struct RequestClock {
    metrics: VllmMetrics,
    /// `None` after its end was counted.
    ended: Option<EndedRequests>,
    num_prompt_tokens: usize,
    accepted: Instant,
    /// When it went to this worker's engine: at once, unless KV was brought in first or its prompt is computed elsewhere.
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    newest_token: Option<Instant>,
    num_output_tokens: u64,
    /// The request's span on this worker; `None` when its trace is not sampled: then no span costs anything.
    trace: Option<TracePoint>,
    /// Ends of the chunks of its prompt, and the blocks that were complete then. Kept for the trace.
    chunks: Vec<(Instant, usize)>,
}

impl RequestClock {
    /// A request is accepted now. `trace` is its span on this worker, if that is sampled.
    pub fn start(
        metrics: VllmMetrics,
        ended: EndedRequests,
        num_prompt_tokens: usize,
        trace: Option<TracePoint>,
    ) -> RequestClock {
        metrics.prompt_tokens.inc_by(num_prompt_tokens as u64);
        let accepted = Instant::now();
        RequestClock {
            metrics,
            ended: Some(ended),
            num_prompt_tokens,
            accepted,
            submitted: accepted,
            admitted: None,
            first_token: None,
            newest_token: None,
            num_output_tokens: 0,
            trace,
            chunks: Vec::new(),
        }
    }

    /// It went to the engine `at` that time, later than it was accepted.
    pub fn submitted(&mut self, at: Instant) {
        self.submitted = at;
    }

    /// This worker's engine has computed its prompt since `at`, or holds blocks for one that is computed elsewhere.
    pub fn admitted(&mut self, at: Instant) {
        self.metrics.queue.observe((at - self.submitted).as_secs_f64());
        self.admitted = Some(at);
        // After a remote prefill this comes behind the first token: the handoff has a span for the wait.
        if let (Some(trace), None) = (&self.trace, self.first_token) {
            trace.record("queue", self.submitted, at, vec![]);
        }
    }

    /// A chunk of the prompt was computed in all layers `at` that time; `num_blocks` of the prompt are complete.
    pub fn chunk(&mut self, at: Instant, num_blocks: usize) {
        if self.trace.is_some() {
            self.chunks.push((at, num_blocks));
        }
    }

    /// A token is sent, which was sampled at `sampled`. Says how long the prompt took with the first one, if this worker's engine
    /// computed it.
    pub fn token(&mut self, sampled: Instant) -> Option<PromptPace> {
        self.metrics.output_tokens.inc();
        self.num_output_tokens += 1;
        let now = Instant::now();
        match self.newest_token.replace(now) {
            Some(before) => {
                self.metrics.itl.observe((now - before).as_secs_f64());
                None
            }
            None => {
                self.first_token = Some(now);
                self.metrics.ttft.observe((now - self.accepted).as_secs_f64());
                let admitted = self.admitted?;
                let pace = PromptPace::new(self.accepted, Some(admitted), sampled);
                self.metrics.prefill.observe(pace.prefill.as_secs_f64());
                self.trace_prefill(admitted, sampled);
                Some(pace)
            }
        }
    }

    /// It ended well.
    pub fn finished(&mut self, reason: FinishReason) {
        let now = Instant::now();
        let e2e = (now - self.accepted).as_secs_f64();
        self.metrics.e2e.observe(e2e);
        let inference = now - self.admitted.unwrap_or(self.accepted);
        self.metrics.inference.observe(inference.as_secs_f64());
        self.metrics.prompt_lengths.observe(self.num_prompt_tokens as f64);
        self.metrics.output_lengths.observe(self.num_output_tokens as f64);
        if let (Some(first), Some(last)) = (self.first_token, self.newest_token) {
            self.metrics.decode.observe((now - first).as_secs_f64());
            if self.num_output_tokens > 1 {
                let between = (last - first).as_secs_f64() / (self.num_output_tokens - 1) as f64;
                self.metrics.tpot.observe(between);
            }
        }
        self.metrics.on_finish(reason);
        self.count_end(OK);
        if let Some(trace) = &self.trace {
            trace.set_list("gen_ai.response.finish_reasons", &[reason.name()]);
        }
    }

    /// It failed.
    pub fn failed(&mut self, kind: FailureKind) {
        self.count_end(kind.name());
    }

    /// Counts the end, once.
    fn count_end(&mut self, outcome: &'static str) {
        if let Some(ended) = self.ended.take() {
            ended.count(outcome);
        }
    }

    fn trace_prefill(&mut self, admitted: Instant, first_token: Instant) {
        let Some(trace) = &self.trace else { return };
        let tokens = KeyValue::new("gen_ai.usage.input_tokens", self.num_prompt_tokens as i64);
        let prefill = trace.record("prefill", admitted, first_token, vec![tokens]);
        let mut start = admitted;
        for (end, num_blocks) in std::mem::take(&mut self.chunks) {
            prefill.record("prefill chunk", start, end, vec![KeyValue::new("blocks", num_blocks as i64)]);
            start = end;
        }
    }
}

impl Drop for RequestClock {
    fn drop(&mut self) {
        self.count_end(CANCELLED);
        let Some(trace) = &self.trace else { return };
        if let (Some(first), Some(last)) = (self.first_token, self.newest_token)
            && self.num_output_tokens > 1
        {
            let tokens = KeyValue::new("gen_ai.usage.output_tokens", self.num_output_tokens as i64);
            trace.record("decode", first, last, vec![tokens]);
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text, registry::Registry};

    use super::*;

    fn exposition(registry: &Registry) -> String {
        let mut exposition = String::new();
        text::encode(&mut exposition, registry).expect("a String takes everything");
        exposition
    }

    /// The counts that are not 0 after a request that ends so.
    fn counts(end: impl FnOnce(&mut RequestClock)) -> Vec<String> {
        let mut registry = Registry::default();
        let ended = EndedRequests::register(&mut registry);
        end(&mut RequestClock::start(VllmMetrics::new(256), ended, 8, None));
        let exposition = exposition(&registry);
        let lines = exposition.lines().filter(|line| !line.starts_with('#') && !line.ends_with(" 0"));
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn a_request_is_in_the_queue_from_when_its_prompt_goes_to_the_engine() {
        let mut registry = Registry::default();
        let (metrics, ended) = (VllmMetrics::new(256), EndedRequests::register(&mut registry));
        registry.register("queue", "Of the request", metrics.queue.clone());
        let mut clock = RequestClock::start(metrics, ended, 8, None);
        let submitted = Instant::now() + Duration::from_secs(60);
        clock.submitted(submitted);
        clock.admitted(submitted + Duration::from_millis(250));
        let exposition = exposition(&registry);
        assert!(exposition.contains("\nqueue_sum 0.25\n"), "{exposition}");
    }

    #[test]
    fn every_request_ends_once() {
        let line =
            |outcome: &str| vec![format!("baton_worker_requests_ended_total{{outcome=\"{outcome}\"}} 1")];
        assert_eq!(counts(|_| ()), line("cancelled"));
        assert_eq!(counts(|clock| clock.finished(FinishReason::Stop)), line("ok"));
        assert_eq!(counts(|clock| clock.failed(FailureKind::Full)), line("full"));
    }
}
