//! `baton up`, the first thing a newcomer runs.

use std::time::Duration;

use serde_json::json;

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

#[tokio::test]
async fn everything_ends_with_the_supervisor() {
    let mut up = Up::start("").await;
    let parts = ["router", "prefill-0", "decode-0"].map(|name| up.pid_of(name).expect("it runs"));
    up.supervisor.signal(libc::SIGTERM);
    assert!(up.supervisor.wait().success());
    for pid in parts {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "{pid} is left");
    }
}

#[tokio::test]
async fn speculation_changes_what_is_counted_and_not_what_is_said() {
    let up = Up::start("--speculate draft").await;
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
        // How often it pays to draft depends on the machine.
        is_drafted |= with["usage"].get("completion_tokens_details").is_some();
        assert!(without["usage"].get("completion_tokens_details").is_none(), "{without}");
    }
    assert!(is_drafted);
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
fn help_names_every_command() {
    let output = std::process::Command::new(BATON).arg("--help").output().expect("the program runs");
    let help = String::from_utf8_lossy(&output.stdout);
    for command in
        ["up", "router", "prefill-worker", "decode-worker", "chat", "bench", "inspect", "completions"]
    {
        assert!(help.contains(command), "{command} is missing in {help}");
    }
}
