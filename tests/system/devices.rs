//! Workers on fake GPUs (`model/cuda-emulator/fake/`): from their flags to the driver and back.

use std::{path::Path, process::Command};

use serde_json::json;
use tempfile::TempDir;

use crate::{harness::Up, prompts::tasks};

/// Fakes of CUDA's libraries, and compiled kernels.
struct FakeLibraries(TempDir);

impl FakeLibraries {
    fn build() -> FakeLibraries {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/cuda-emulator/fake/build.sh");
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let built = Command::new("sh").arg(script).arg(dir.path()).output().expect("there is a shell");
        let why = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "{why}: `cargo xtask setup` installs g++");
        FakeLibraries(dir)
    }

    /// Asks the tiny model questions, on two workers with `num_devices` devices each.
    async fn check(&self, num_devices: usize, transport: &str) {
        let dir = self.0.path();
        let (nccl, num) = (dir.join("libnccl.so.2"), num_devices.to_string());
        let environment = [
            ("LD_LIBRARY_PATH", dir),
            ("BATON_NVRTC", dir),
            ("BATON_NCCL", &nccl),
            ("BATON_TRANSPORTS", Path::new(transport)),
            ("FAKE_DEVICES", Path::new(&num)),
            // Opening and closing a pool for the host takes time in proportion to its size.
            ("FAKE_MEMORY_BYTES", Path::new("536870912")),
        ];
        let flags = format!(
            "--device cuda:0 --tensor-parallel {num_devices} --gpu-memory-utilization 0.2 --token-budget 256 \
             --max-running 4 --kv-dtype bf16 --weight-cache {}",
            dir.join("cache").display()
        );
        let up = Up::start_in(&environment, &flags).await;
        for task in tasks("recall-512").iter().take(3) {
            let body = json!({
                "model": "baton-tiny", "messages": task.messages, "temperature": 0, "max_tokens": 16,
                "prefill_mode": "remote",
            });
            let answer = up.http.post("/v1/chat/completions", &body).await.expect("it is served").json();
            let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default();
            assert!(text.contains(&task.answer), "expected {}: {answer}", task.answer);
        }
    }
}

/// KV moves between the pools through the driver's memory handles, or through the host.
#[tokio::test]
async fn workers_on_a_gpu_recall_facts_through_a_handoff() {
    let fakes = FakeLibraries::build();
    for transport in ["shm", "tcp"] {
        fakes.check(1, transport).await;
    }
}

/// NCCL reduces between the devices of a worker. KV moves from rank to rank.
#[tokio::test]
async fn workers_on_two_gpus_each_recall_facts_through_a_handoff() {
    FakeLibraries::build().check(2, "shm").await;
}
