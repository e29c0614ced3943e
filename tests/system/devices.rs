//! Workers on a GPU, which is pretended (`model/src/cuda/emulator/pretended/`): from their flags to the driver and back.

use std::{path::Path, process::Command};

use serde_json::json;

use crate::{harness::Up, prompts::tasks};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/src/cuda/emulator/pretended/build.sh");

/// KV goes by the driver's handles of memory from pool to pool, or by way of the host.
#[tokio::test]
async fn workers_on_a_gpu_recall_facts_through_a_handoff() {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let dir = dir.path();
    let built = Command::new("sh").arg(SCRIPT).arg(dir).output().expect("there is a shell");
    let why = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{why}: `cargo xtask setup` installs g++");
    let shape = "--device cuda:0 --gpu-memory-utilization 0.2 --token-budget 256 --max-running 4";
    let flags = format!("{shape} --kv-dtype bf16 --weight-cache {}", dir.join("cache").display());
    for transport in ["shm", "tcp"] {
        let libraries = [("LD_LIBRARY_PATH", dir), ("BATON_NVRTC", dir)];
        let environment = [&libraries[..], &[("BATON_TRANSPORTS", Path::new(transport))]].concat();
        let up = Up::start_in(&environment, &flags).await;
        for task in tasks("recall-512").iter().take(3) {
            let body = json!({
                "model": "baton-tiny", "messages": task.messages, "temperature": 0, "max_tokens": 16,
                "prefill_mode": "remote",
            });
            let answer = up.http.post("/v1/chat/completions", &body).await.expect("it is served").json();
            let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default();
            assert!(text.contains(&task.answer), "over {transport}, expected {}: {answer}", task.answer);
        }
    }
}
