//! Prefill and decode workers as two processes on one GPU, and the handoff between them.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{
    bench::Bench,
    checks::{Checks, too_small},
    group::{Group, last_line},
    outcomes::{self, Tally},
};
use crate::check::Outcome;

/// The share of the device's free memory for each of two pools: the processes do not know each other.
const MEMORY_SHARE: &str = "0.3";

/// Prompts of some 600 tokens, from the tiny model's evaluation.
const NUM_PROMPTS: usize = 4;
const NUM_TOKENS: usize = 16;

/// The transports between two pools of one device: the driver's memory handles (shm), and through the host (tcp).
const TRANSPORTS: [&str; 2] = ["shm", "tcp"];

/// For an answer about readiness.
const LOOK_LIMIT: Duration = Duration::from_secs(1);
const END_LIMIT: Duration = Duration::from_secs(5);

pub(super) fn run(bench: &Bench, checks: &mut Checks<'_>) {
    let mut expected = None;
    for transport in TRANSPORTS {
        checks.add(format!("answers, {transport}"), || tokens(bench, transport, &mut expected));
    }
    for transport in TRANSPORTS {
        checks.add(format!("exposed, {transport}"), || exposed(bench, transport));
    }
}

/// Checks that answers equal those on processors, which are `expected` once they are known.
fn tokens(bench: &Bench, transport: &str, expected: &mut Option<Vec<String>>) -> Result<Tally> {
    let file = bench.repository.join("models/tiny/eval/recall-512.jsonl");
    let text = std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let prompts: Vec<Value> =
        text.lines().take(NUM_PROMPTS).map(serde_json::from_str).collect::<Result<_, _>>()?;
    // If it hangs, most of the stage's time is left for the others.
    let end = Instant::now() + bench.left() / 3;
    if expected.is_none() {
        *expected = Some(answers(bench, "cpu", transport, &prompts, end).context("on processors")?);
    }
    let found = answers(bench, &bench.device, transport, &prompts, end)?;
    let both = found.iter().zip(expected.iter().flatten()).enumerate();
    let differ = both.filter(|(_, (found, expected))| found != expected);
    let findings = differ
        .map(|(nth, (found, expected))| format!("prompt {nth}: {found:?}, on processors {expected:?}"))
        .collect();
    Ok(Tally::of(Outcome::of(findings, format!("{NUM_PROMPTS} answers as on processors"))))
}

/// What two workers on a device answer before `end`.
fn answers(
    bench: &Bench,
    device: &str,
    transport: &str,
    prompts: &[Value],
    end: Instant,
) -> Result<Vec<String>> {
    let left = || end.saturating_duration_since(Instant::now());
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut command = bench.command(&bench.programs.baton);
    command.args(["up", "--prefill", "1", "--port", &port.to_string()]);
    command.args(["--device", device, "--kv-dtype", "bf16"]);
    command.args(["--gpu-memory-utilization", MEMORY_SHARE]).env("BATON_TRANSPORTS", transport);
    // Small steps: each size runs once at the start. Prompts take several.
    command.args(["--token-budget", "256", "--max-running", "4"]);
    let log = bench.log(&format!("up-{device}-{transport}"));
    let mut workers = Group::start(&mut command, &log)?;
    while !call(port, "GET /health", "", LOOK_LIMIT).is_ok_and(|(_, health)| has_both_roles(&health)) {
        let said = || last_line(&std::fs::read_to_string(&log).unwrap_or_default());
        if let Some(status) = workers.wait(Duration::ZERO)? {
            bail!("baton up: {status}: {}", said());
        }
        ensure!(!left().is_zero(), "baton up is not ready in time: {}", said());
        std::thread::sleep(Duration::from_millis(100));
    }
    let ask = |prompt: &Value| {
        let body = json!({
            "model": "baton-tiny", "messages": prompt["messages"], "max_tokens": NUM_TOKENS, "temperature": 0,
            "prefill_mode": "remote",
        });
        ensure!(!left().is_zero(), "no time left to ask");
        let (status, answer) = call(port, "POST /v1/chat/completions", &body.to_string(), left())?;
        ensure!(status == 200, "{status}: {answer}");
        let answer: Value = serde_json::from_str(&answer)?;
        let text = answer["choices"][0]["message"]["content"].as_str().context("no answer")?;
        Ok(text.to_owned())
    };
    let answers = prompts.iter().map(ask).collect();
    workers.terminate();
    workers.wait(END_LIMIT)?;
    answers
}

/// Whether a worker of each role answers. The router is ready before: a decode worker alone can serve, but not a request that
/// asks for remote prefill.
fn has_both_roles(health: &str) -> bool {
    let health: Value = serde_json::from_str(health).unwrap_or_default();
    let workers = health["workers"].as_array().map_or(&[][..], Vec::as_slice);
    ["prefill", "decode"]
        .iter()
        .all(|role| workers.iter().any(|worker| worker["role"] == *role && worker["answers"] == true))
}

/// One exchange of HTTP: the status, and the body.
fn call(port: u16, request: &str, body: &str, limit: Duration) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
    let num_bytes = body.len();
    write!(
        stream,
        "{request} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {num_bytes}\r\nconnection: close\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer without a body")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.context("an answer without a status")?, body.to_owned()))
}

/// Measures how long the second token waits for the KV of a remote prefill.
fn exposed(bench: &Bench, transport: &str) -> Result<Tally> {
    if let Some(skipped) = too_small(bench) {
        return Ok(skipped);
    }
    let report = bench.results.join("logs").join(format!("exposed-{transport}.json"));
    let mut command: Command = bench.command(&bench.programs.baton);
    command.args(["bench", "overlap", "--quiet", "--device", &bench.device, "--transports", transport]);
    command.args(["--kv-dtype", "bf16", "--lengths", "256,512,1024", "--rounds", "5"]);
    command.args(["--gpu-memory-utilization", MEMORY_SHARE, "--json"]).arg(&report);
    let ended = bench.finish_one_of_several(&format!("exposed-{transport}"), &mut command, 1)?;
    ensure!(!ended.is_late, "not done in {:.0} s", ended.took.as_secs_f32());
    ensure!(ended.code == Some(0), "{}", ended.why());
    let text = std::fs::read_to_string(&report).context("read what baton bench overlap has measured")?;
    let figures =
        outcomes::exposed(&text, transport).context("no rows in the report of baton bench overlap")?;
    let missed: Vec<String> =
        figures.iter().filter(|figure| figure["is_missed"] == true).map(outcomes::in_words).collect();
    let all: Vec<String> = figures.iter().map(outcomes::in_words).collect();
    let (num_failed, num_passed) = (missed.len(), figures.len() - missed.len());
    let outcome = Outcome::of(missed, all.join("; "));
    Ok(Tally { outcome, num_passed, num_failed, num_skipped: 0, figures })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_waited_for_until_both_roles_answer() {
        let health = |prefill: bool| {
            let worker = |role, answers| json!({"id": role, "role": role, "answers": answers});
            json!({"status": "ok", "workers": [worker("decode", true), worker("prefill", prefill)]})
                .to_string()
        };
        assert!(has_both_roles(&health(true)));
        assert!(!has_both_roles(&health(false)));
        assert!(!has_both_roles(r#"{"status": "ok", "workers": [{"role": "decode", "answers": true}]}"#));
        assert!(!has_both_roles("not yet"));
    }
}
