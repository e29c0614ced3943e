//! `baton up`, the first thing a newcomer runs.

use std::time::Duration;

use crate::harness::{BATON, Up, eventually, num_workers, signal_pid};

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
