//! The results of a load as numbers, as JSON and as a table.
//!
//! | measure | of one request |
//! |---|---|
//! | TTFT | from when it was due to its first token (OpenAI: its first piece of text) |
//! | ITL | each gap between one such arrival and the next |
//! | TPOT | (end - first arrival) / (output tokens - 1), as vLLM counts it; not of answers of one token |
//! | E2E | from when it was due to its end |
//!
//! The last token often holds no text and comes with the end. A server that does not count tokens counts pieces of text for
//! TPOT, up to the last piece. Due is when a request should have been sent: by the plan in an open loop, at once in a closed one.
//! Goodput counts the requests that kept every limit given for them, per second.

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::Serialize;

use super::{
    config::Config,
    drive::{Outcome, Outcomes},
    stats::Summary,
};

/// One target under load.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) target: String,
    pub(crate) load: String,
    pub(crate) config: Config,
    pub(crate) duration_s: f64,
    pub(crate) requests: Requests,
    pub(crate) tokens: Tokens,
    pub(crate) throughput: Throughput,
    pub(crate) ttft_ms: Option<Summary>,
    pub(crate) itl_ms: Option<Summary>,
    pub(crate) tpot_ms: Option<Summary>,
    pub(crate) e2e_ms: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) goodput: Option<Goodput>,
    /// How late requests were sent: the delay of the load generator itself.
    pub(crate) send_lag_ms: Option<Summary>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Requests {
    pub(crate) ok: usize,
    pub(crate) failed: usize,
    /// By kind.
    pub(crate) failures: BTreeMap<String, Failures>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Failures {
    pub(crate) count: usize,
    /// What the first of them said.
    pub(crate) example: String,
}

/// Of the requests that were answered.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tokens {
    pub(crate) input: u64,
    pub(crate) output: u64,
    /// Of the input, found in a prefix cache; `None` if the server does not say.
    pub(crate) cached: Option<u64>,
    /// False: the server does not count tokens, and pieces of text were counted instead.
    pub(crate) counted_by_server: bool,
    /// Drafted for the output and verified.
    pub(crate) drafted: u64,
    /// Of those.
    pub(crate) accepted: u64,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Throughput {
    pub(crate) requests_per_s: f64,
    pub(crate) input_tokens_per_s: f64,
    pub(crate) output_tokens_per_s: f64,
}

/// The limits of goodput.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Slo {
    pub(crate) ttft: Option<Duration>,
    pub(crate) tpot: Option<Duration>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Goodput {
    pub(crate) slo_ttft_ms: Option<f64>,
    pub(crate) slo_tpot_ms: Option<f64>,
    pub(crate) good_requests: usize,
    /// Of all requests, failed ones among them.
    pub(crate) fraction: f64,
    pub(crate) requests_per_s: f64,
}

/// The times of one answered request, in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Times {
    pub(crate) ttft: f64,
    pub(crate) gaps: Vec<f64>,
    pub(crate) tpot: Option<f64>,
    pub(crate) e2e: f64,
}

impl Times {
    /// `None`: the request failed.
    pub(crate) fn of(outcome: &Outcome) -> Option<Self> {
        let answer = outcome.result.as_ref().ok()?;
        let (first, last) = (*answer.arrivals.first()?, *answer.arrivals.last()?);
        let finished = answer.finished?;
        // The last token may come without text, so the tokens that a server counts end with the answer.
        let (num_tokens, end) = match answer.output_tokens {
            Some(num_tokens) => (num_tokens, finished),
            None => (answer.arrivals.len() as u64, last),
        };
        Some(Self {
            ttft: millis(first - outcome.due),
            gaps: answer.arrivals.windows(2).map(|pair| millis(pair[1] - pair[0])).collect(),
            tpot: (num_tokens > 1 && end > first).then(|| millis(end - first) / (num_tokens - 1) as f64),
            e2e: millis(finished - outcome.due),
        })
    }

    fn keeps(&self, slo: Slo) -> bool {
        let within = |value: f64, limit: Option<Duration>| limit.is_none_or(|limit| value <= millis(limit));
        within(self.ttft, slo.ttft) && within(self.tpot.unwrap_or(0.0), slo.tpot)
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl Report {
    /// Of the requests that went to `target_idx`.
    pub(crate) fn of(
        outcomes: &Outcomes,
        target_idx: usize,
        target: String,
        config: &Config,
        slo: Slo,
    ) -> Self {
        let mine: Vec<&Outcome> =
            outcomes.requests.iter().filter(|outcome| outcome.target_idx == target_idx).collect();
        let times: Vec<Times> = mine.iter().filter_map(|outcome| Times::of(outcome)).collect();
        let seconds = outcomes.elapsed.as_secs_f64();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let requests = Requests::of(&mine);
        let tokens = Tokens::of(&mine);
        let column = |value: &dyn Fn(&Times) -> Vec<f64>| Summary::of(times.iter().flat_map(value).collect());
        Self {
            target,
            load: config.to_string(),
            config: config.clone(),
            duration_s: seconds,
            throughput: Throughput {
                requests_per_s: per_second(requests.ok as f64),
                input_tokens_per_s: per_second(tokens.input as f64),
                output_tokens_per_s: per_second(tokens.output as f64),
            },
            ttft_ms: column(&|times| vec![times.ttft]),
            itl_ms: column(&|times| times.gaps.clone()),
            tpot_ms: column(&|times| times.tpot.into_iter().collect()),
            e2e_ms: column(&|times| vec![times.e2e]),
            goodput: (slo != Slo::default()).then(|| {
                let good_requests = times.iter().filter(|times| times.keeps(slo)).count();
                Goodput {
                    slo_ttft_ms: slo.ttft.map(millis),
                    slo_tpot_ms: slo.tpot.map(millis),
                    good_requests,
                    fraction: good_requests as f64 / mine.len().max(1) as f64,
                    requests_per_s: per_second(good_requests as f64),
                }
            }),
            send_lag_ms: Summary::of(mine.iter().map(|outcome| millis(outcome.sent - outcome.due)).collect()),
            requests,
            tokens,
        }
    }
}

impl Requests {
    fn of(outcomes: &[&Outcome]) -> Self {
        let mut failures = BTreeMap::<String, Failures>::new();
        for error in outcomes.iter().filter_map(|outcome| outcome.result.as_ref().err()) {
            let entry = failures.entry(error.kind());
            entry.or_insert_with(|| Failures { count: 0, example: error.to_string() }).count += 1;
        }
        let failed = failures.values().map(|failures| failures.count).sum();
        Self { ok: outcomes.len() - failed, failed, failures }
    }
}

impl Tokens {
    fn of(outcomes: &[&Outcome]) -> Self {
        let mut tokens =
            Self { input: 0, output: 0, cached: None, counted_by_server: true, drafted: 0, accepted: 0 };
        for answer in outcomes.iter().filter_map(|outcome| outcome.result.as_ref().ok()) {
            tokens.input += answer.input_tokens.unwrap_or(0);
            tokens.output += answer.output_tokens.unwrap_or(answer.arrivals.len() as u64);
            tokens.drafted += answer.drafted_tokens;
            tokens.accepted += answer.accepted_tokens;
            tokens.counted_by_server &= answer.output_tokens.is_some();
            if let Some(cached) = answer.cached_tokens {
                *tokens.cached.get_or_insert(0) += cached;
            }
        }
        tokens
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} | {}", self.target, self.load)?;
        let Requests { ok, failed, failures } = &self.requests;
        writeln!(f, "requests    {ok} ok, {failed} failed in {:.1} s", self.duration_s)?;
        for (kind, failures) in failures {
            writeln!(f, "            {} x {kind}: {}", failures.count, failures.example)?;
        }
        let Tokens { input, output, cached, counted_by_server, drafted, accepted } = &self.tokens;
        write!(f, "tokens      {input} in")?;
        if let Some(cached) = cached {
            write!(f, " ({:.0} % cached)", 100.0 * *cached as f64 / (*input).max(1) as f64)?;
        }
        let counted = if *counted_by_server { "" } else { " (the server does not count; pieces of text)" };
        writeln!(f, ", {output} out{counted}")?;
        if *drafted > 0 {
            let rate = 100.0 * *accepted as f64 / *drafted as f64;
            writeln!(f, "drafts      {accepted} of {drafted} tokens accepted ({rate:.0} %)")?;
        }
        let Throughput { requests_per_s, input_tokens_per_s, output_tokens_per_s } = self.throughput;
        writeln!(
            f,
            "throughput  {requests_per_s:.2} requests/s, {input_tokens_per_s:.0} tokens/s in, {output_tokens_per_s:.0} tokens/s out"
        )?;
        if let Some(goodput) = &self.goodput {
            let limit = |name, value: Option<f64>| value.map(|ms| format!("{name} <= {ms} ms"));
            let limits: Vec<String> =
                [limit("TTFT", goodput.slo_ttft_ms), limit("TPOT", goodput.slo_tpot_ms)]
                    .into_iter()
                    .flatten()
                    .collect();
            writeln!(
                f,
                "goodput     {:.2} requests/s, {:.1} % with {}",
                goodput.requests_per_s,
                100.0 * goodput.fraction,
                limits.join(" and ")
            )?;
        }
        if self.requests.ok > 0 {
            writeln!(
                f,
                "\n{:<8}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}",
                "ms", "mean", "p50", "p90", "p95", "p99", "max"
            )?;
        }
        for (name, summary) in
            [("TTFT", self.ttft_ms), ("ITL", self.itl_ms), ("TPOT", self.tpot_ms), ("E2E", self.e2e_ms)]
        {
            let Some(s) = summary else { continue };
            write!(f, "{name:<8}")?;
            for value in [s.mean, s.p50, s.p90, s.p95, s.p99, s.max] {
                write!(f, "{value:>11.3}")?;
            }
            writeln!(f)?;
        }
        if let Some(lag) = self.send_lag_ms.filter(|lag| lag.p99 > 1.0) {
            writeln!(
                f,
                "\nThe load generator itself was late by {:.1} ms (p99): this machine is too busy.",
                lag.p99
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use baton_command::openai::RequestError;

    use super::*;
    use crate::target::Answer;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Due at 0, sent at 1 ms, with text at these times.
    fn outcome(start: Instant, target_idx: usize, arrivals: &[u64], output_tokens: Option<u64>) -> Outcome {
        let answer = Answer {
            arrivals: arrivals.iter().map(|&at| start + ms(at)).collect(),
            finished: arrivals.last().map(|&at| start + ms(at)),
            input_tokens: Some(10),
            output_tokens,
            cached_tokens: Some(4),
            drafted_tokens: 6,
            accepted_tokens: 3,
        };
        Outcome { target_idx, turn: None, due: start, sent: start + ms(1), result: Ok(answer) }
    }

    fn failure(start: Instant, error: RequestError) -> Outcome {
        Outcome { target_idx: 0, turn: None, due: start, sent: start, result: Err(error) }
    }

    fn outcomes() -> Outcomes {
        let start = Instant::now();
        let full = RequestError::Status { code: 429, message: "full".into() };
        Outcomes {
            requests: vec![
                outcome(start, 0, &[100, 110, 130], Some(4)), // the second piece held two tokens
                outcome(start, 0, &[300], Some(1)),
                outcome(start, 0, &[50, 60], None),
                failure(start, full.clone()),
                failure(start, full),
                failure(start, RequestError::Timeout),
            ],
            elapsed: Duration::from_secs(2),
        }
    }

    #[test]
    fn measures_are_as_defined() {
        let slo = Slo { ttft: Some(ms(100)), tpot: Some(ms(10)) };
        let config = Config { seed: 7, ..Config::default() };
        let report = Report::of(&outcomes(), 0, "t".into(), &config, slo);
        assert_eq!((report.requests.ok, report.requests.failed), (3, 3));
        assert_eq!(report.requests.failures["http_429"].count, 2);
        assert_eq!(report.requests.failures["timeout"].count, 1);
        assert_eq!((report.tokens.input, report.tokens.output, report.tokens.cached), (30, 7, Some(12)));
        assert!(!report.tokens.counted_by_server);
        assert_eq!(report.throughput.requests_per_s, 1.5);
        assert_eq!(report.throughput.output_tokens_per_s, 3.5);
        let close = |summary: Option<Summary>, mean: f64, count: usize| {
            let summary = summary.unwrap();
            assert!((summary.mean - mean).abs() < 1e-6 && summary.count == count, "{summary:?}");
        };
        close(report.ttft_ms, 150.0, 3);
        close(report.itl_ms, 40.0 / 3.0, 3);
        close(report.tpot_ms, 10.0, 2);
        close(report.e2e_ms, (130.0 + 300.0 + 60.0) / 3.0, 3);
        let goodput = report.goodput.clone().unwrap();
        assert_eq!((goodput.good_requests, goodput.requests_per_s), (2, 1.0));
        assert!((goodput.fraction - 2.0 / 6.0).abs() < 1e-9, "failures are not good");
        let table = report.to_string();
        for text in [
            "2 x http_429: HTTP 429: full",
            "40 % cached",
            "9 of 18 tokens accepted (50 %)",
            "TTFT <= 100 ms and TPOT <= 10 ms",
            "p99",
        ] {
            assert!(table.contains(text), "{table}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["requests"]["failures"]["http_429"]["count"], 2);
        assert_eq!(json["ttft_ms"]["max"], 300.0);
        assert_eq!(json["config"]["seed"], 7);
    }

    #[test]
    fn tpot_has_the_time_of_a_last_token_without_text() {
        let start = Instant::now();
        let tpot = |arrivals: &[u64], finished: u64, output_tokens: Option<u64>| {
            let mut outcome = outcome(start, 0, arrivals, output_tokens);
            outcome.result.as_mut().unwrap().finished = Some(start + ms(finished));
            Times::of(&outcome).unwrap().tpot.map(f64::round)
        };
        assert_eq!(tpot(&[100, 110, 130], 140, Some(5)), Some(10.0));
        assert_eq!(tpot(&[100], 120, Some(2)), Some(20.0));
        assert_eq!(tpot(&[100, 110, 130], 140, None), Some(15.0), "three pieces, none with the end");
        assert_eq!(tpot(&[100], 100, Some(4)), None, "all in one piece");
        assert_eq!(tpot(&[100], 120, Some(1)), None);
    }

    #[test]
    fn nothing_done_is_a_report_too() {
        let outcomes = Outcomes { requests: Vec::new(), elapsed: Duration::ZERO };
        let report =
            Report::of(&outcomes, 0, "t".into(), &Config::default(), Slo { ttft: Some(ms(1)), tpot: None });
        assert!(report.to_string().contains("0 ok, 0 failed"), "{report}");
        assert!(report.ttft_ms.is_none());
    }
}
