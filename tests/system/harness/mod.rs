//! A fluent cluster of real processes on loopback.
//!
//! ```text
//! let cluster = Cluster::new().prefill(2).decode(1).start().await;
//! let reply = cluster.chat("…").await;
//! cluster.kill("prefill-0");
//! ```

mod etcd;
mod http;
mod process;

use std::{collections::BTreeMap, path::Path, time::Duration};

use baton_proto::v1::{LoadsRequest, WorkerLoad, inference_client::InferenceClient};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::ports::free_port;

pub(crate) use etcd::{Etcd, eventually};
pub(crate) use http::{Events, Http};
pub(crate) use process::{Process, children_of, signal_pid};

/// The program under test.
pub(crate) const BATON: &str = env!("CARGO_BIN_EXE_baton-under-test");

/// Two clusters at a time, as most wait for deadlines and for processes: more would disturb tests of faults on two cores.
static TURN: Semaphore = Semaphore::const_new(2);

/// How long a whole cluster may take to be ready on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(240);

/// What to start.
pub(crate) struct ClusterBuilder {
    num_prefill: usize,
    num_decode: usize,
    with_etcd: bool,
    has_tls: bool,
    key: Option<String>,
    router_flags: Vec<String>,
    worker_flags: Vec<String>,
    prefill_flags: Vec<String>,
    decode_flags: Vec<String>,
    flags_of: BTreeMap<String, Vec<String>>,
}

impl ClusterBuilder {
    pub(crate) fn prefill(mut self, num: usize) -> Self {
        self.num_prefill = num;
        self
    }

    pub(crate) fn decode(mut self, num: usize) -> Self {
        self.num_decode = num;
        self
    }

    /// Discovery through a real etcd instead of the router.
    pub(crate) fn with_etcd(mut self) -> Self {
        self.with_etcd = true;
        self
    }

    pub(crate) fn router_flags(mut self, flags: &str) -> Self {
        self.router_flags.extend(flags.split_whitespace().map(str::to_owned));
        self
    }

    pub(crate) fn worker_flags(mut self, flags: &str) -> Self {
        self.worker_flags.extend(flags.split_whitespace().map(str::to_owned));
        self
    }

    pub(crate) fn prefill_flags(mut self, flags: &str) -> Self {
        self.prefill_flags.extend(flags.split_whitespace().map(str::to_owned));
        self
    }

    pub(crate) fn decode_flags(mut self, flags: &str) -> Self {
        self.decode_flags.extend(flags.split_whitespace().map(str::to_owned));
        self
    }

    /// Flags of one worker, such as "decode-0".
    pub(crate) fn flags_of(mut self, name: &str, flags: &str) -> Self {
        self.flags_of.insert(name.to_owned(), flags.split_whitespace().map(str::to_owned).collect());
        self
    }

    /// The API key that calls to the router show.
    pub(crate) fn key(mut self, key: &str) -> Self {
        self.key = Some(key.to_owned());
        self
    }

    /// Every process has a certificate of one authority: the prefill workers share one, all others share another.
    pub(crate) fn with_tls(mut self) -> Self {
        self.has_tls = true;
        self.router_flags(&tls_flags("a", "ca.pem"))
            .prefill_flags(&tls_flags("b", "ca.pem"))
            .decode_flags(&tls_flags("a", "ca.pem"))
    }

    /// Starts everything and waits until all workers are known to the router.
    pub(crate) async fn start(self) -> Cluster {
        let turn = TURN.acquire().await.expect("it is never closed");
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let port = free_port();
        let etcd = self.with_etcd.then(|| Etcd::start(dir.path()));
        let base = format!("http://127.0.0.1:{port}");
        let discovery: Vec<String> = match &etcd {
            Some(etcd) => {
                ["--discovery", "etcd", "--etcd-endpoints", &etcd.endpoint].map(str::to_owned).into()
            }
            None => Vec::new(),
        };

        let registry = if self.has_tls { base.replacen("http", "https", 1) } else { base.clone() };
        let mut commands = BTreeMap::new();
        let mut router = vec!["router".to_owned(), "--listen".to_owned(), format!("127.0.0.1:{port}")];
        router.extend(discovery.iter().chain(&self.router_flags).cloned());
        commands.insert("router".to_owned(), router);
        let roles = [
            ("prefill", self.num_prefill, &self.prefill_flags),
            ("decode", self.num_decode, &self.decode_flags),
        ];
        for (role, num, flags) in roles {
            for idx in 0..num {
                let name = format!("{role}-{idx}");
                let mut args = vec![format!("{role}-worker"), "--id".to_owned(), name.clone()];
                args.extend([
                    "--router".to_owned(),
                    registry.clone(),
                    "--kv-memory".to_owned(),
                    "64M".to_owned(),
                ]);
                let own = self.flags_of.get(&name).into_iter().flatten();
                args.extend(discovery.iter().chain(&self.worker_flags).chain(flags).chain(own).cloned());
                commands.insert(name, args);
            }
        }
        let mut cluster = Cluster {
            http: self.key.iter().fold(Http::new(base.clone()), |http, key| http.with_key(key)),
            base,
            key: self.key,
            etcd,
            processes: BTreeMap::new(),
            commands,
            dir,
            _turn: turn,
        };
        for name in cluster.commands.keys().cloned().collect::<Vec<_>>() {
            cluster.start_again(&name);
        }
        cluster.wait_for_workers(self.num_prefill, self.num_decode).await;
        cluster
    }
}

/// Flags for the certificate of this name, with this trusted authority.
pub(crate) fn tls_flags(name: &str, ca: &str) -> String {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tls/testdata");
    format!("--tls-cert {dir}/{name}.pem --tls-key {dir}/{name}.key --tls-ca {dir}/{ca}")
}

/// A running cluster; everything ends when it is dropped.
pub(crate) struct Cluster {
    pub(crate) http: Http,
    pub(crate) base: String,
    key: Option<String>,
    pub(crate) etcd: Option<Etcd>,
    processes: BTreeMap<String, Process>,
    commands: BTreeMap<String, Vec<String>>,
    dir: tempfile::TempDir,
    _turn: SemaphorePermit<'static>,
}

impl Cluster {
    #[allow(clippy::new_ret_no_self)] // reads as a sentence: Cluster::new().prefill(2).start()
    pub(crate) fn new() -> ClusterBuilder {
        ClusterBuilder {
            num_prefill: 1,
            num_decode: 1,
            with_etcd: false,
            has_tls: false,
            key: None,
            router_flags: Vec::new(),
            worker_flags: Vec::new(),
            prefill_flags: Vec::new(),
            decode_flags: Vec::new(),
            flags_of: BTreeMap::new(),
        }
    }

    /// Another process beside those of the cluster.
    pub(crate) fn start_beside(&self, name: &str, args: &[String]) -> Process {
        Process::start(name, BATON, args, self.dir.path())
    }

    /// The log of a process.
    pub(crate) fn log(&self, name: &str) -> String {
        self.processes[name].log()
    }

    pub(crate) fn kill(&mut self, name: &str) {
        let mut process = self.processes.remove(name).unwrap_or_else(|| panic!("no process {name}"));
        process.kill();
    }

    /// Waits until a process that was told to end has ended with success.
    pub(crate) async fn wait_for_end(&mut self, name: &str) {
        let mut process = self.processes.remove(name).unwrap_or_else(|| panic!("no process {name}"));
        let status = eventually(&format!("the end of {name}"), Duration::from_secs(120), async || {
            process.exit_status()
        })
        .await;
        assert!(status.success(), "{name} ended with {status}");
    }

    pub(crate) fn signal(&self, name: &str, signal: libc::c_int) {
        self.processes[name].signal(signal);
    }

    pub(crate) fn pid(&self, name: &str) -> i32 {
        self.processes[name].pid()
    }

    pub(crate) fn start_again(&mut self, name: &str) {
        let args = &self.commands[name];
        let process = Process::start(name, BATON, args, self.dir.path());
        assert!(self.processes.insert(name.to_owned(), process).is_none(), "{name} runs already");
    }

    pub(crate) async fn wait_for_workers(&self, num_prefill: usize, num_decode: usize) {
        wait_for_workers(&self.http, num_prefill, num_decode).await;
    }

    /// A completion of `prompt`, read whole.
    pub(crate) async fn complete(&self, body: &Value) -> Value {
        let answer = self.http.post("/v1/completions", body).await.expect("the router answers");
        assert!(answer.status.is_success(), "{}: {}", answer.status, answer.text);
        answer.json()
    }

    /// The greedy answer to a one-turn chat.
    pub(crate) async fn chat(&self, content: &str) -> String {
        let body = json!({
            "model": "baton-tiny", "temperature": 0, "max_tokens": 64,
            "messages": [{"role": "user", "content": content}],
        });
        let answer = self.http.post("/v1/chat/completions", &body).await.expect("the router answers");
        assert!(answer.status.is_success(), "{}: {}", answer.status, answer.text);
        answer.json()["choices"][0]["message"]["content"].as_str().expect("an answer has content").to_owned()
    }

    /// What the router knows of its workers.
    pub(crate) async fn loads(&self) -> Vec<WorkerLoad> {
        let mut client = InferenceClient::connect(self.base.clone()).await.expect("the router listens");
        let mut request = tonic::Request::new(LoadsRequest {});
        if let Some(key) = &self.key {
            let authorization = format!("Bearer {key}").parse().expect("a key is text");
            request.metadata_mut().insert("authorization", authorization);
        }
        client.loads(request).await.expect("the router answers").into_inner().workers
    }

    /// Sums a counter or gauge of one process over the labels that contain every one of `labels`.
    pub(crate) async fn metric(&self, address: &str, name: &str, labels: &[&str]) -> f64 {
        let text = Http::new(address.to_owned()).get("/metrics").await.expect("metrics are served").text;
        sum_metric(&text, name, labels)
    }

    /// Waits until every worker is idle, then checks that every block is free.
    pub(crate) async fn assert_all_blocks_free(&self) {
        let loads = eventually("idle workers with every block free", Duration::from_secs(60), async || {
            let loads = self.loads().await;
            let idle = loads.iter().all(|worker| {
                worker.load.as_ref().is_some_and(|load| {
                    load.num_running == 0
                        && load.num_waiting == 0
                        && load.num_free_blocks == load.num_total_blocks
                })
            });
            idle.then_some(loads)
        })
        .await;
        assert!(!loads.is_empty(), "no worker reported");
    }
}

/// Waits until a router has so many workers.
pub(crate) async fn wait_for_workers(router: &Http, num_prefill: usize, num_decode: usize) {
    eventually(&format!("{num_prefill} prefill and {num_decode} decode workers"), START_LIMIT, async || {
        let answer = router.get("/health").await.ok()?;
        let health = answer.json();
        // Workers may be registered before the router has loaded its tokenizer.
        let ready = answer.status.is_success();
        let num = |role| num_workers(&health, role);
        (ready && num("prefill") == num_prefill && num("decode") == num_decode).then_some(())
    })
    .await;
}

/// Workers of a role that answer, in the body of `/health`.
pub(crate) fn num_workers(health: &Value, role: &str) -> usize {
    let workers = health["workers"].as_array().expect("/health lists the workers");
    workers.iter().filter(|worker| worker["role"] == role && worker["answers"] == true).count()
}

/// Sums the samples of `name` in a text exposition whose labels contain every one of `labels`.
pub(crate) fn sum_metric(text: &str, name: &str, labels: &[&str]) -> f64 {
    text.lines()
        .filter(|line| {
            let rest = line.strip_prefix(name).unwrap_or("#");
            rest.starts_with(['{', ' ']) && labels.iter().all(|label| rest.contains(label))
        })
        .map(|line| {
            line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok()).expect("a sample has a value")
        })
        .sum()
}

/// `baton up` as a user starts it: the supervisor restarts what dies.
pub(crate) struct Up {
    pub(crate) http: Http,
    pub(crate) base: String,
    pub(crate) supervisor: Process,
    _dir: tempfile::TempDir,
    _turn: SemaphorePermit<'static>,
}

impl Up {
    /// Starts it and waits until it reports that it is ready.
    pub(crate) async fn start(flags: &str) -> Up {
        Up::start_in(&[], &format!("--kv-memory 64M {flags}")).await
    }

    /// The same with more environment variables and the default memory for KV.
    pub(crate) async fn start_in(environment: &[(&str, &Path)], flags: &str) -> Up {
        Up::start_program(Path::new(BATON), environment, flags).await
    }

    /// The same with the program at another place.
    pub(crate) async fn start_program(program: &Path, environment: &[(&str, &Path)], flags: &str) -> Up {
        let turn = TURN.acquire().await.expect("it is never closed");
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let port = free_port();
        let mut args = vec!["up".to_owned(), "--port".to_owned(), port.to_string()];
        args.extend(flags.split_whitespace().map(str::to_owned));
        let program = program.to_str().expect("a path in UTF-8");
        let mut supervisor = Process::start_in(environment, "up", program, &args, dir.path());
        eventually("baton up is ready", START_LIMIT, async || {
            let log = supervisor.log();
            assert!(supervisor.exit_status().is_none(), "baton up ended: {log}");
            log.contains("Baton is ready").then_some(())
        })
        .await;
        let base = format!("http://127.0.0.1:{port}");
        Up { http: Http::new(base.clone()), base, supervisor, _dir: dir, _turn: turn }
    }

    /// The process id of a part, such as "decode-0"; `None` while it is down.
    pub(crate) fn pid_of(&self, name: &str) -> Option<i32> {
        children_of(self.supervisor.pid()).into_iter().find(|(child, _)| child == name).map(|(_, pid)| pid)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // The parts end with their supervisor, but a killed supervisor cannot tell them.
        if self.supervisor.exit_status().is_none() {
            self.supervisor.signal(libc::SIGTERM);
            self.supervisor.wait();
        }
    }
}
