//! Workers on fake GPUs (`model/cuda-emulator/fake/`): from their flags to the driver and back.

use std::{path::Path, process::Command};

use baton_model::shipped_kernels;
use serde_json::json;
use tempfile::TempDir;

use crate::{
    harness::{BATON, Up},
    prompts::tasks,
};

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
        let (nvrtc, cache) = (self.0.path(), self.0.path().join("cache"));
        self.check_program(Path::new(BATON), nvrtc, &cache, num_devices, transport).await;
    }

    /// The same with a program at this place, an NVRTC, and a cache.
    async fn check_program(
        &self,
        program: &Path,
        nvrtc: &Path,
        cache: &Path,
        num_devices: usize,
        transport: &str,
    ) {
        let dir = self.0.path();
        let (nccl, num) = (dir.join("libnccl.so.2"), num_devices.to_string());
        let environment = [
            ("LD_LIBRARY_PATH", dir),
            ("BATON_NVRTC", nvrtc),
            ("BATON_NCCL", &nccl),
            ("BATON_TRANSPORTS", Path::new(transport)),
            ("FAKE_DEVICES", Path::new(&num)),
            ("FAKE_CONNECTIONS", Path::new("16")),
            // Opening and closing a pool for the host takes time in proportion to its size.
            ("FAKE_MEMORY_BYTES", Path::new("536870912")),
        ];
        let flags = format!(
            "--prefill 1 --device cuda:0 --tensor-parallel {num_devices} --gpu-memory-utilization 0.2 \
             --token-budget 256 --max-running 4 --kv-dtype bf16 --weight-cache {}",
            cache.display()
        );
        let up = Up::start_program(program, &environment, &flags).await;
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

/// Copies what NVRTC compiled into a file of installed kernels. The last bytes of a file in the cache are its hash.
fn install(cache: &Path, installed: &Path) {
    let files = std::fs::read_dir(cache).expect("kernels were compiled").map(|entry| entry.expect("a file"));
    // The chosen algorithms of products are there as well.
    let cubins: Vec<(String, Vec<u8>)> = files
        .filter(|file| file.path().extension().is_some_and(|extension| extension == "cubin"))
        .map(|file| {
            let mut code = std::fs::read(file.path()).expect("it can be read");
            code.truncate(code.len() - 32);
            (file.file_name().into_string().expect("a name in ASCII"), code)
        })
        .collect();
    let named = cubins.iter().map(|(name, code)| (name.as_str(), code.as_slice()));
    shipped_kernels::write(installed, named).expect("it can be written");
}

/// KV moves between the pools through the driver's memory handles, or through the host. Then a first start, with the kernels
/// installed beside the program: it needs no NVRTC and compiles nothing.
#[tokio::test]
async fn workers_on_a_gpu_recall_facts_through_a_handoff() {
    let fakes = FakeLibraries::build();
    for transport in ["shm", "tcp"] {
        fakes.check(1, transport).await;
    }
    // In one file system with the program, which is too large to be copied.
    let dir =
        tempfile::tempdir_in(Path::new(BATON).parent().expect("in a folder")).expect("it can be written");
    let (program, cache) = (dir.path().join("baton"), dir.path().join("cache"));
    std::fs::hard_link(BATON, &program).expect("in one file system");
    install(&fakes.0.path().join("cache/kernels"), &program.with_file_name(shipped_kernels::FILE_NAME));
    fakes.check_program(&program, &dir.path().join("no NVRTC"), &cache, 1, "shm").await;
    // The chosen algorithms of products are kept there.
    let kept = std::fs::read_dir(cache.join("kernels")).map_or(Vec::new(), Iterator::collect);
    let is_code = |file: &std::io::Result<std::fs::DirEntry>| {
        file.as_ref().is_ok_and(|file| file.path().extension().is_some_and(|extension| extension == "cubin"))
    };
    assert!(!kept.iter().any(is_code), "something was compiled: {kept:?}");
}

/// NCCL reduces between the devices of a worker. KV moves from rank to rank.
#[tokio::test]
async fn workers_on_two_gpus_each_recall_facts_through_a_handoff() {
    FakeLibraries::build().check(2, "shm").await;
}
