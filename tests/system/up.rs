//! `baton up`, the first command that a newcomer runs.

use std::{path::Path, time::Duration};

use serde_json::{Value, json};

use crate::{
    harness::{BATON, Up, eventually, num_workers, signal_pid},
    prompts::filler,
};

#[tokio::test]
async fn a_killed_worker_is_started_again_and_serves() {
    let up = Up::start("--prefill 1 --decode 2").await;
    let before = up.pid_of("decode-1").expect("it runs");
    signal_pid(before, libc::SIGKILL);
    eventually("a new decode-1 that is registered", Duration::from_secs(60), async || {
        let new = up.pid_of("decode-1").is_some_and(|pid| pid != before);
        let health = up.http.get("/health").await.ok()?.json();
        (new && num_workers(&health, "decode") == 2).then_some(())
    })
    .await;
}

/// An exit is no failure to start: a worker that has served comes back, however often it is told to end.
#[tokio::test]
async fn a_worker_that_is_told_to_end_again_and_again_comes_back() {
    let up = Up::start("--prefill 0").await;
    for _ in 0..4 {
        let before = up.pid_of("decode-0").expect("it runs");
        signal_pid(before, libc::SIGTERM);
        eventually("a new decode-0", Duration::from_secs(60), async || {
            up.pid_of("decode-0").filter(|pid| *pid != before)
        })
        .await;
    }
    eventually("an answer", Duration::from_secs(60), async || {
        let body = json!({"model": "baton-tiny", "prompt": "Hello", "max_tokens": 2});
        up.http.post("/v1/completions", &body).await.ok().filter(|answer| answer.status.as_u16() == 200)
    })
    .await;
}

#[tokio::test]
async fn everything_ends_with_the_supervisor() {
    let mut up = Up::start("").await;
    let parts = ["router", "prefill-0", "decode-0"].map(|name| up.pid_of(name).expect("it runs"));
    let body = json!({"model": "baton-tiny", "prompt": "Hello", "max_tokens": 2});
    up.http.post("/v1/completions", &body).await.expect("the router answers");
    up.supervisor.signal(libc::SIGTERM);
    assert!(up.supervisor.wait().success());
    let log = up.supervisor.log();
    assert!(log.contains("INFO request ended request="), "one line, without its span: {log}");
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "nothing is wrong: {log}");
    for pid in parts {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid} is left");
    }
}

#[tokio::test]
async fn a_model_on_one_processor_has_no_prefill_worker_and_a_line_says_why() {
    let cpu = baton_model::CpuList::allowed().expect("the system says").first(1).expect("there is one");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny");
    let up = Up::start(&format!("{model} --pin-threads {cpu}")).await;
    assert!(up.pid_of("decode-0").is_some());
    assert_eq!(up.pid_of("prefill-0"), None);
    let log = up.supervisor.log();
    assert!(log.contains("no prefill worker: it would share 1 processor"), "{log}");
}

#[tokio::test]
async fn with_json_every_line_is_an_object_that_names_its_process() {
    let misspelt = [("BATON_LOG_FROMAT", Path::new("json"))];
    let mut up = Up::start_in(&misspelt, "--kv-memory 64M --prefill 1 --log-format json").await;
    let before = up.pid_of("decode-0").expect("it runs");
    signal_pid(before, libc::SIGKILL);
    eventually("a new decode-0", Duration::from_secs(60), async || {
        up.pid_of("decode-0").filter(|pid| *pid != before)
    })
    .await;
    let body = json!({"model": "baton-tiny", "prompt": "Hello", "max_tokens": 2});
    up.http.post("/v1/completions", &body).await.expect("the router answers");
    up.supervisor.signal(libc::SIGTERM);
    assert!(up.supervisor.wait().success());
    let events = json_lines(&up.supervisor.log());
    for process in ["baton", "router", "prefill-0", "decode-0"] {
        assert!(events.iter().any(|event| event["process"] == process), "nothing of {process}");
    }
    for message in ["Baton is ready", "starting it again", "stopping", "BATON_LOG_FROMAT"] {
        let is_told = |event: &Value| event["message"].as_str().is_some_and(|text| text.contains(message));
        assert!(events.iter().any(is_told), "no event tells: {message}");
    }
}

#[test]
fn with_json_a_failure_to_start_is_an_object() {
    for command in ["up --port 0", "router --listen 127.0.0.1:0 --model", "decode-worker --model"] {
        let output = std::process::Command::new(BATON)
            .args(command.split(' '))
            .args(["/no/such/model", "--log-format", "json"])
            .output()
            .expect("the program runs");
        assert!(!output.status.success());
        let events = json_lines(std::str::from_utf8(&[output.stdout, output.stderr].concat()).expect("text"));
        let last = events.last().expect("an error");
        assert!(
            last["level"] == "ERROR"
                && last["message"].as_str().is_some_and(|text| text.contains("/no/such/model")),
            "{last}"
        );
    }
}

/// The lines of a log as JSON; each is an object with a time, a level and a message.
fn json_lines(log: &str) -> Vec<Value> {
    let event = |line| {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let has = |field: &str| event[field].is_string();
        assert!(has("timestamp") && has("level") && has("message"), "{line}");
        event
    };
    log.lines().map(event).collect()
}

#[tokio::test]
async fn speculation_changes_counters_and_no_token() {
    let up = Up::start("--prefill 1 --speculate draft").await;
    let complete = async |mode: &str, seed: usize| {
        let body = json!({
            "model": "baton-tiny", "prompt": filler(seed, 40), "max_tokens": 40, "temperature": 0.5, "seed": seed,
            "ignore_eos": true, "prefill_mode": "remote", "cache_salt": mode, "speculation_mode": mode,
        });
        up.http.post("/v1/completions", &body).await.expect("it is served").json()
    };
    let mut is_drafted = false;
    for seed in 0..4 {
        let (with, without) = (complete("auto", seed).await, complete("off", seed).await);
        assert_eq!(with["choices"][0]["text"], without["choices"][0]["text"]);
        assert_eq!(with["usage"]["completion_tokens"], 40);
        // How often drafting pays depends on the machine.
        is_drafted |= with["usage"].get("completion_tokens_details").is_some();
        assert!(without["usage"].get("completion_tokens_details").is_none(), "{without}");
    }
    assert!(is_drafted);
}

#[tokio::test]
async fn ranks_answer_like_one_worker() {
    let mut texts = Vec::new();
    for flags in ["", "--tensor-parallel 2", "--tensor-parallel 4 --speculate draft"] {
        let up = Up::start(&format!("--prefill 1 --activations f32 {flags}")).await;
        let complete = async |mode: &str| {
            let body = json!({
                "model": "baton-tiny", "prompt": filler(3, 60), "max_tokens": 24, "temperature": 0, "ignore_eos": true,
                "prefill_mode": mode, "cache_salt": mode,
            });
            let answer = up.http.post("/v1/completions", &body).await.expect("it is served").json();
            answer["choices"][0]["text"].as_str().expect("a text").to_owned()
        };
        texts.extend([complete("remote").await, complete("local").await]);
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");

    let output = std::process::Command::new(BATON)
        .args(["decode-worker", "--tensor-parallel", "3"])
        .output()
        .expect("the program runs");
    let error = String::from_utf8_lossy(&output.stderr);
    let expected = "3 ranks cannot divide 4 attention heads, expected a tensor parallel degree of 1, 2 or 4";
    assert!(!output.status.success() && error.contains(expected), "{error}");
}

#[tokio::test]
async fn pinned_workers_have_processors_of_their_own_and_draft_models_no_threads() {
    let allowed = allowed_cpus("/proc/self/status");
    let flags = "--prefill 0 --pin-threads auto --speculate draft";
    let up = Up::start(flags).await;
    let pid = up.pid_of("decode-0").expect("it runs");
    // The engine's thread is one of the computing threads.
    let mut cpus = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs") {
        let task = task.expect("it runs").path();
        let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        if name.starts_with("engine") || name.starts_with("baton-cpu-") {
            cpus.push(allowed_cpus(task.join("status")));
        }
    }
    cpus.sort();
    let expected = baton_model::CpuList::allowed().expect("the system says");
    let expected = expected.divide(expected.num_cpus()).expect("one each");
    let mut expected: Vec<_> = expected.iter().map(ToString::to_string).collect();
    expected.sort();
    assert_eq!(cpus, expected, "of {allowed}");
    drop(up);

    let output = std::process::Command::new(BATON)
        .args(["up", "--port", "0", "--pin-threads", "0,8191"])
        .output()
        .expect("the program runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("this machine has no CPU 8191"), "{error}");
}

/// The processors on which a thread may run, by `/proc`.
fn allowed_cpus(status: impl AsRef<Path>) -> String {
    let status = std::fs::read_to_string(status).expect("the thread runs");
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.expect("the kernel says").trim().to_owned()
}

#[test]
fn a_model_that_cannot_be_loaded_is_one_clear_sentence() {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let config = r#"{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}"#;
    std::fs::write(dir.path().join("config.json"), config).expect("the file can be written");
    let output = std::process::Command::new(BATON)
        .args(["decode-worker", "--model"])
        .arg(dir.path())
        .output()
        .expect("the program runs");
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("MambaForCausalLM") && error.contains("config.json"), "{error}");
}

#[test]
fn a_gpu_that_is_missing_is_one_clear_sentence() {
    // A machine with GPUs has no hundredth one.
    let output = std::process::Command::new(BATON)
        .args(["decode-worker", "--device", "cuda:99"])
        .output()
        .expect("the program runs");
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("--device cpu computes on processors"), "{error}");
    assert!(["libcuda.so.1 not found", "no device"].iter().any(|why| error.contains(why)), "{error}");
    assert!(!error.contains("panicked"), "{error}");
}

#[test]
fn a_misspelt_variable_is_named_where_settings_are_printed() {
    let output = std::process::Command::new(BATON)
        .args(["up", "--print-config"])
        .env("BATON_PORTT", "9")
        .output()
        .expect("the program runs");
    let (printed, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(printed.contains("port = 8080"), "{printed}");
    assert!(error.contains("BATON_PORTT is no setting; did you mean BATON_PORT?"), "{error}");
}

#[test]
fn help_names_every_command() {
    let output = std::process::Command::new(BATON).arg("--help").output().expect("the program runs");
    let help = String::from_utf8_lossy(&output.stdout);
    for command in [
        "up",
        "router",
        "prefill-worker",
        "decode-worker",
        "chat",
        "bench",
        "doctor",
        "inspect",
        "completions",
    ] {
        assert!(help.contains(command), "{command} is missing in {help}");
    }
}
