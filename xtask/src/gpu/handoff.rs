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
    steps::{Group, last_line},
};
use crate::check::Outcome;

/// The share of the device's free memory for each of two pools: the processes do not know each other.
const MEMORY_SHARE: &str = "0.3";

/// Prompts of some 600 tokens, from the tiny model's evaluation.
const NUM_PROMPTS: usize = 8;
const NUM_TOKENS: usize = 24;

/// For workers to start: kernels may have to be compiled.
const START_LIMIT: Duration = Duration::from_secs(60);
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Checks that answers equal those on processors, over both transports between two pools of one device: the driver's
/// memory handles (shm), and through the host (tcp).
pub(super) fn tokens(bench: &Bench) -> Result<Outcome> {
    let file = bench.root.join("models/tiny/eval/recall-512.jsonl");
    let text = std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let prompts: Vec<Value> =
        text.lines().take(NUM_PROMPTS).map(serde_json::from_str).collect::<Result<_, _>>()?;
    let expected = answers(bench, "cpu", "shm", &prompts)?;
    let mut findings = Vec::new();
    for transport in ["shm", "tcp"] {
        let found = answers(bench, &bench.device, transport, &prompts)
            .with_context(|| format!("over {transport}"))?;
        for (nth, (found, expected)) in found.iter().zip(&expected).enumerate() {
            if found != expected {
                findings
                    .push(format!("over {transport}, prompt {nth}: {found:?}, on processors {expected:?}"));
            }
        }
    }
    Ok(Outcome::of(findings, format!("{NUM_PROMPTS} answers as on processors, over shm and tcp")))
}

fn answers(bench: &Bench, device: &str, transport: &str, prompts: &[Value]) -> Result<Vec<String>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut command = bench.command(&bench.programs.baton);
    command.arg("up").args(["--port", &port.to_string(), "--device", device, "--kv-dtype", "bf16"]);
    command.args(["--gpu-memory-utilization", MEMORY_SHARE]).env("BATON_TRANSPORTS", transport);
    let log = bench.logs.join(format!("up-{}-{transport}.log", device.replace(':', "-")));
    let mut workers = Group::start(&mut command, &log)?;
    let start = Instant::now();
    while !call(port, "GET /readyz", "").is_ok_and(|(status, _)| status == 200) {
        let said = || last_line(&std::fs::read_to_string(&log).unwrap_or_default());
        if let Some(status) = workers.0.try_wait()? {
            bail!("baton up: {status}: {}", said());
        }
        ensure!(start.elapsed() < START_LIMIT && Instant::now() < bench.end, "baton up: {}", said());
        std::thread::sleep(Duration::from_millis(100));
    }
    let ask = |prompt: &Value| {
        let body = json!({
            "model": "baton-tiny", "messages": prompt["messages"], "max_tokens": NUM_TOKENS, "temperature": 0,
            "prefill_mode": "remote",
        });
        let (status, answer) = call(port, "POST /v1/chat/completions", &body.to_string())?;
        ensure!(status == 200, "{status}: {answer}");
        let answer: Value = serde_json::from_str(&answer)?;
        let text = answer["choices"][0]["message"]["content"].as_str().context("no answer")?;
        Ok(text.to_owned())
    };
    let answers = prompts.iter().map(ask).collect();
    workers.signal("TERM");
    let asked = Instant::now();
    while workers.0.try_wait()?.is_none() && asked.elapsed() < Duration::from_secs(15) {
        std::thread::sleep(Duration::from_millis(50));
    }
    answers
}

/// One exchange of HTTP: the status, and the body.
fn call(port: u16, request: &str, body: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
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
pub(super) fn exposed(bench: &Bench) -> Result<Outcome> {
    let mut command: Command = bench.command(&bench.programs.baton);
    command.args(["bench", "overlap", "--quiet", "--device", &bench.device, "--transports", "shm"]);
    command.args(["--kv-dtype", "bf16", "--lengths", "256,512,1024", "--rounds", "5"]);
    command.args(["--gpu-memory-utilization", MEMORY_SHARE]);
    let ended = bench.finish("exposed", 90, &mut command)?;
    if ended.code != Some(0) {
        return Ok(Outcome::Failed(vec![last_line(&ended.output)]));
    }
    let rows = ended.output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    // tokens, KV MiB, local, remote, added, allowed, exposed, ...
    let exposed = rows.filter(|row| row.len() > 9 && row[0].parse::<u32>().is_ok());
    let exposed: Vec<String> = exposed.map(|row| format!("{} ms of {} tokens", row[6], row[0])).collect();
    ensure!(!exposed.is_empty(), "no rows in the table of baton bench overlap");
    Ok(Outcome::Passed(format!("exposed {}", exposed.join(", "))))
}
