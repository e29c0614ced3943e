//! Requests at a steady rate, whose answers are compared with those of an undisturbed cluster.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Sender},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::http::Request;

pub(super) const REQUESTS_PER_SECOND: u32 = 50;
const TIMEOUT: Duration = Duration::from_secs(60);
const NUM_PROMPTS: usize = 40;
/// Of most answers, and of every tenth, which is then still running when its worker is told to leave.
const NUM_TOKENS: [usize; 2] = [8, 400];

/// A prompt and what the model continues it with, greedily.
struct Question {
    body: String,
    answer: String,
}

/// Requests that are being sent.
pub(super) struct Load {
    ends: Arc<AtomicBool>,
    sender: JoinHandle<()>,
    outcomes: mpsc::Receiver<Outcome>,
    started: Instant,
}

struct Outcome {
    took: Duration,
    is_same: Result<bool>,
}

/// What became of all requests.
pub(super) struct Report {
    pub(super) num_requests: usize,
    pub(super) per_second: f64,
    pub(super) slowest: Duration,
    pub(super) num_different: usize,
    pub(super) failures: Vec<String>,
}

impl Load {
    /// Asks every question once, then all of them again and again at the rate.
    pub(super) fn start(router: SocketAddr, key: &str) -> Result<Load> {
        let questions = (0..NUM_PROMPTS).map(|idx| {
            let body = question(idx);
            let answer = ask(router, key, &body).with_context(|| format!("undisturbed request {idx}"))?;
            Ok(Question { body, answer })
        });
        let questions: Arc<[Question]> = questions.collect::<Result<_>>()?;
        let ends = Arc::new(AtomicBool::new(false));
        // Requests are few, and each says one thing.
        let (report, outcomes) = mpsc::channel();
        let until = Arc::clone(&ends);
        let started = Instant::now();
        let key: Arc<str> = key.into();
        let sender = std::thread::spawn(move || send(router, &key, &questions, &until, &report));
        Ok(Load { ends, sender, outcomes, started })
    }

    /// Sends no more, and waits for the last answer.
    pub(super) fn finish(self) -> Result<Report> {
        self.ends.store(true, Ordering::Relaxed);
        let sent_for = self.started.elapsed();
        if self.sender.join().is_err() {
            bail!("the thread that sends requests panicked");
        }
        let mut report = Report {
            num_requests: 0,
            per_second: 0.0,
            slowest: Duration::ZERO,
            num_different: 0,
            failures: Vec::new(),
        };
        // Each request's thread has an end of the channel; the last one closes it.
        for Outcome { took, is_same } in self.outcomes {
            report.num_requests += 1;
            report.slowest = report.slowest.max(took);
            match is_same {
                Ok(is_same) => report.num_different += usize::from(!is_same),
                Err(error) => report.failures.push(format!("{error:#}")),
            }
        }
        report.per_second = report.num_requests as f64 / sent_for.as_secs_f64();
        Ok(report)
    }
}

fn send(
    router: SocketAddr,
    key: &Arc<str>,
    questions: &Arc<[Question]>,
    until: &AtomicBool,
    report: &Sender<Outcome>,
) {
    let started = Instant::now();
    for idx in 0_u32.. {
        std::thread::sleep(
            (Duration::from_secs(1) * idx / REQUESTS_PER_SECOND).saturating_sub(started.elapsed()),
        );
        if until.load(Ordering::Relaxed) {
            return;
        }
        let (key, questions, report) = (Arc::clone(key), Arc::clone(questions), report.clone());
        // Not waited for by handles: each ends with its outcome, and `finish` waits for all outcomes.
        std::thread::spawn(move || {
            let question = &questions[idx as usize % questions.len()];
            let started = Instant::now();
            let is_same = ask(router, &key, &question.body).map(|answer| answer == question.answer);
            // Nothing waits for it if the load was dropped.
            let _ = report.send(Outcome { took: started.elapsed(), is_same });
        });
    }
}

/// Short and longer prompts; a prefill worker must compute every fourth, and the router plans the others.
fn question(idx: usize) -> String {
    let boxes = idx..idx + 2 + idx % 4 * 2;
    let facts: Vec<String> =
        boxes.map(|name| format!("Box {name} holds {} stones.", name * 7 % 50)).collect();
    let mut body = json!({
        "model": "baton-tiny",
        "prompt": format!("{} Box {} holds", facts.join(" "), idx + 1),
        "max_tokens": NUM_TOKENS[usize::from(idx.is_multiple_of(10))],
        "ignore_eos": true,
        "temperature": 0,
        "stream": true,
    });
    if idx % 4 == 3 {
        body["prefill_mode"] = json!("remote");
    }
    body.to_string()
}

/// The text of a whole stream.
fn ask(router: SocketAddr, key: &str, body: &str) -> Result<String> {
    let (method, path, content_type) = ("POST", "/v1/completions", "application/json");
    let answer =
        Request { method, path, key: Some(key), content_type, body, timeout: TIMEOUT }.send(router)?;
    ensure!(answer.status == 200, "status {}: {}", answer.status, answer.body);
    text_of(&answer.body)
}

fn text_of(stream: &str) -> Result<String> {
    let mut text = String::new();
    for data in stream.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            return Ok(text);
        }
        let event: Value = serde_json::from_str(data).with_context(|| format!("read event {data}"))?;
        ensure!(event["error"].is_null(), "an error within the stream: {data}");
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
    }
    bail!("the stream ended early, after {text:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_counts_only_if_it_is_whole() {
        let event = |text: &str| format!("data: {}\n\n", json!({"choices": [{"text": text}]}));
        let half = format!(": comment\n\n{}{}", event("a"), event(" b"));
        assert_eq!(text_of(&format!("{half}data: [DONE]\n\n")).unwrap(), "a b");
        assert!(text_of(&half).is_err());
        assert!(text_of("data: {\"error\": {\"message\": \"no worker\"}}\n\ndata: [DONE]\n\n").is_err());
    }
}
