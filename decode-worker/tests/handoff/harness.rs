//! Workers that a test can start, kill and query.

use std::{path::PathBuf, sync::Arc, time::Duration};

use baton_cluster::{DiscoveryConfig, Role};
use baton_engine::{Drafter, IdleError, SamplingParams};
use baton_engine_testing::FakeModel;
use baton_grammar::{GrammarCompiler, GrammarError, GrammarLimits, Vocabulary};
use baton_handoff::TransportKind;
use baton_kv_cache::KvDtype;
use baton_model::Activations;
use baton_proto::worker::{
    self as proto, GenerateEvent, decode_client::DecodeClient, failed::Kind, generate_event::Event,
};
use baton_worker::{KvMemory, Model, Phase, Worker, WorkerConfig};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    sync::oneshot,
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming, transport::Channel};

use crate::gate::StepHook;

/// A bound for waits that should take milliseconds. A test that reaches it has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) const BLOCK_SIZE: usize = 4;
pub(crate) const CONTEXT_LENGTH: usize = 256;

/// One worker on a runtime of its own, so that it can be killed.
pub(crate) struct TestWorker {
    pub(crate) worker: Arc<Worker>,
    runtime: Option<Runtime>,
    shutdown: CancellationToken,
    ended: Option<JoinHandle<anyhow::Result<()>>>,
    _dir: tempfile::TempDir,
}

/// The configuration and the model of a worker.
pub(crate) struct Builder {
    config: WorkerConfig,
    model: FakeModel,
    hook: Option<StepHook>,
    drafter: Option<Drafter>,
    grammars: Option<Arc<GrammarCompiler>>,
    /// The fake model, or the one in the configured directory.
    is_fake: bool,
    rope: String,
    dir: tempfile::TempDir,
}

/// A prefill worker.
pub(crate) fn prefill() -> Builder {
    Builder::new(Role::Prefill, "p0")
}

/// A decode worker.
pub(crate) fn decode() -> Builder {
    Builder::new(Role::Decode, "d0")
}

/// Where `cargo xtask setup` puts NIXL, unless the environment names another one.
fn nixl() -> PathBuf {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/nixl/.nixl_cu12.mesonpy.libs");
    std::env::var_os("BATON_NIXL").map_or_else(|| own.into(), PathBuf::from)
}

/// The transports that can be tested on this machine. Reports the others as skipped.
pub(crate) fn transports() -> impl Iterator<Item = TransportKind> {
    let is_here = nixl().exists();
    if !is_here {
        skipped("rdma", &format!("no NIXL in {}; see `cargo xtask setup`", nixl().display()));
    }
    TransportKind::ALL.into_iter().filter(move |&kind| match kind {
        TransportKind::Rdma => is_here,
        // Needs a device for each worker. Its conformance suite uses fake devices.
        TransportKind::Nccl => false,
        TransportKind::Shm | TransportKind::Tcp => true,
    })
}

/// Reports that `what` is not tested here, and why, on stderr, which the test framework does not capture.
pub(crate) fn skipped(what: &str, why: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let line = format!("SKIPPED {what} in {test}: {why}\n");
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
}

impl Builder {
    fn new(role: Role, id: &str) -> Builder {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let discovery = DiscoveryConfig::Static { workers: Vec::new() };
        let mut config = WorkerConfig::new(role, id.into(), "fake".into(), discovery);
        config.kv = KvMemory::Blocks(128);
        config.max_running = 16;
        // Prompts come in several chunks.
        config.token_budget = 24;
        config.shm_dir = Some(dir.path().join("shm"));
        // So long that a slow machine does not reach it.
        config.fetch_deadline = Some(PATIENCE);
        Builder {
            config,
            model: FakeModel::new(BLOCK_SIZE),
            hook: None,
            drafter: None,
            grammars: None,
            is_fake: true,
            rope: "none".into(),
            dir,
        }
    }

    /// Another id, for a second worker of the same role.
    pub(crate) fn named(self, id: &str) -> Builder {
        self.with(|config| config.id = id.into())
    }

    pub(crate) fn with(mut self, change: impl FnOnce(&mut WorkerConfig)) -> Builder {
        change(&mut self.config);
        self
    }

    pub(crate) fn transport(self, kind: TransportKind) -> Builder {
        self.with(|config| {
            config.transports = vec![kind];
            config.nixl = Some(nixl());
        })
    }

    pub(crate) fn block_size(mut self, block_size: usize) -> Builder {
        self.model = FakeModel::new(block_size);
        self.with(|config| config.block_size = block_size)
    }

    pub(crate) fn rope(mut self, rope: &str) -> Builder {
        self.rope = rope.into();
        self
    }

    /// The model in a directory, computed in f32.
    pub(crate) fn model(mut self, dir: PathBuf) -> Builder {
        self.is_fake = false;
        self.with(|config| {
            config.model = dir;
            config.kv_dtype = Some(KvDtype::F32);
            config.activations = Activations::F32;
            config.threads = Some(1);
        })
    }

    pub(crate) fn kv_dtype(self, dtype: KvDtype) -> Builder {
        self.with(|config| config.kv_dtype = Some(dtype))
    }

    pub(crate) fn hook(mut self, hook: StepHook) -> Builder {
        self.hook = Some(hook);
        self
    }

    pub(crate) fn drafter(mut self, drafter: Drafter) -> Builder {
        self.drafter = Some(drafter);
        self
    }

    /// Takes requests with a grammar; `load` loads its vocabulary for the first one.
    pub(crate) fn grammars(
        mut self,
        load: impl Fn() -> Result<Vocabulary, GrammarError> + Send + Sync + 'static,
    ) -> Builder {
        self.grammars = Some(Arc::new(GrammarCompiler::new(load, GrammarLimits::default())));
        self
    }

    pub(crate) async fn start(self) -> TestWorker {
        let Builder { config, model, hook, drafter, grammars, is_fake, rope, dir } = self;
        let executor = match hook {
            Some(hook) => model.executor_with_hook(hook),
            None => model.executor(),
        };
        let model = Model {
            executor,
            block_device: None,
            simulated_blocks: None,
            drafter,
            name: "fake".into(),
            revision: "r1".into(),
            rope,
            context_length: CONTEXT_LENGTH,
            step_prior: None,
            grammars,
            compute: None,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime can be built");
        let shutdown = CancellationToken::new();
        let (give, worker) = oneshot::channel();
        let stop = shutdown.clone();
        let ended = runtime.spawn(async move {
            let is_prefill = config.role == Role::Prefill;
            let role = |worker: &Arc<Worker>| {
                let role = match is_prefill {
                    true => baton_prefill_worker::role(worker),
                    false => baton_decode_worker::role(worker),
                };
                let _ = give.send(worker.clone());
                role
            };
            if is_fake {
                let listener = TcpListener::bind(config.listen).await?;
                baton_worker::serve(config, model, listener, stop, role).await
            } else {
                baton_worker::run(config, stop, role).await
            }
        });
        let Ok(worker) = timeout(PATIENCE, worker).await.expect("in time") else {
            panic!("the worker does not start: {:?}", ended.await);
        };
        let mut phase = worker.lifecycle().watch();
        let serving = phase.wait_for(|phase| *phase == Phase::Serving);
        timeout(PATIENCE, serving).await.expect("in time").expect("the worker serves");
        TestWorker { worker, runtime: Some(runtime), shutdown, ended: Some(ended), _dir: dir }
    }
}

impl TestWorker {
    pub(crate) fn address(&self) -> String {
        self.worker.record().address.clone()
    }

    pub(crate) fn peer(&self) -> proto::PrefillPeer {
        proto::PrefillPeer {
            worker_id: self.worker.id().0.clone(),
            incarnation: self.worker.incarnation(),
            address: self.address(),
        }
    }

    pub(crate) async fn client(&self) -> DecodeClient<Channel> {
        DecodeClient::connect(self.address()).await.expect("the worker listens")
    }

    /// Bytes that its data plane has moved.
    pub(crate) fn moved(&self, kind: TransportKind) -> u64 {
        let load = self.worker.load(0);
        let bytes = load.handoff_bytes.iter().find(|bytes| bytes.transport == kind.name());
        bytes.expect("every transport is reported").bytes
    }

    /// The text of `/metrics`.
    pub(crate) async fn metrics(&self) -> String {
        metrics_at(&self.address()).await
    }

    /// Whether `/metrics` has this line.
    pub(crate) async fn has_metric(&self, line: &str) -> bool {
        self.metrics().await.lines().any(|found| found == line)
    }

    /// Waits for a line of `/metrics`. The prefill side may count a handoff after the router has its
    /// answer.
    pub(crate) async fn await_metric(&self, line: &str) {
        let found = async {
            while !self.has_metric(line).await {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        assert!(timeout(PATIENCE, found).await.is_ok(), "no {line}");
    }

    /// Waits until the engine is idle, then checks that every block is free.
    pub(crate) async fn assert_all_free(&self) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let report = loop {
            match self.worker.engine().check_idle_integrity().await {
                Ok(report) => break report,
                Err(busy @ IdleError::Busy { .. }) => {
                    let name = self.worker.id();
                    assert!(tokio::time::Instant::now() < deadline, "{name}: {busy}");
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                Err(error) => panic!("{}: {error}", self.worker.id()),
            }
        };
        assert_eq!(report.num_free + report.num_cached, report.num_total, "{}: {report:?}", self.worker.id());
    }

    /// Ends the worker like a kill: every task stops where it is.
    pub(crate) fn kill(&mut self) {
        self.runtime.take().expect("killed once").shutdown_background();
    }

    /// Begins the drain and returns what `serve` returned.
    pub(crate) async fn stop(mut self) {
        self.shutdown.cancel();
        self.ended().await;
    }

    /// Waits for `serve` to return.
    pub(crate) async fn ended(&mut self) {
        self.outcome().await.expect("the worker ends well");
    }

    /// What `serve` returns.
    pub(crate) async fn outcome(&mut self) -> anyhow::Result<()> {
        let ended = self.ended.take().expect("it ends once");
        let result = timeout(PATIENCE, ended).await.expect("the worker ends in time");
        result.expect("the worker does not panic")
    }
}

impl Drop for TestWorker {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The text of `/metrics` at a worker's address.
pub(crate) async fn metrics_at(address: &str) -> String {
    let host = address.trim_start_matches("http://");
    let mut stream = TcpStream::connect(host).await.expect("the worker listens");
    let request = format!("GET /metrics HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("it answers");
    answer
}

/// A prompt of `num_tokens` tokens, different for each `seed`.
pub(crate) fn prompt(seed: u32, num_tokens: usize) -> Vec<u32> {
    (0..num_tokens as u32).map(|idx| (idx * 7 + seed * 13 + idx * idx * seed) % 64).collect()
}

/// A request for `max_tokens` greedy tokens.
pub(crate) fn request(
    prompt: &[u32],
    max_tokens: u32,
    prefill: Option<proto::PrefillPeer>,
) -> proto::GenerateRequest {
    let sampling = SamplingParams { max_tokens, ..SamplingParams::default() };
    proto::GenerateRequest {
        request_id: "r".into(),
        prompt_token_ids: prompt.to_vec(),
        sampling: Some((&sampling).into()),
        prefill,
        ..proto::GenerateRequest::default()
    }
}

/// The outcome of one request.
#[derive(Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) end: End,
}

#[derive(Debug, PartialEq)]
pub(crate) enum End {
    Finished { cached_tokens: u32 },
    Failed(Kind, String),
}

impl Answer {
    pub(crate) fn failed(&self) -> (Kind, &str) {
        match &self.end {
            End::Failed(kind, message) => (*kind, message),
            End::Finished { .. } => panic!("finished: {self:?}"),
        }
    }

    pub(crate) fn finished(self) -> Vec<u32> {
        assert!(matches!(self.end, End::Finished { .. }), "{self:?}");
        self.tokens
    }
}

/// Reads one request's stream to its end.
pub(crate) async fn generate(
    client: &DecodeClient<Channel>,
    request: proto::GenerateRequest,
) -> Result<Answer, Status> {
    let mut client = client.clone();
    let mut events = timeout(PATIENCE, client.generate(request)).await.expect("an answer")?.into_inner();
    read(&mut events).await
}

/// Reads the rest of a stream: exactly one end, and nothing after it.
pub(crate) async fn read(events: &mut Streaming<GenerateEvent>) -> Result<Answer, Status> {
    let (mut tokens, mut cached_tokens) = (Vec::new(), 0);
    loop {
        let event = next(events).await?.expect("a stream has a terminal event");
        let end = match event {
            Event::Token(token) => {
                assert!(token.cached_tokens.is_none() || tokens.is_empty(), "said with the first token");
                cached_tokens += token.cached_tokens.unwrap_or(0);
                tokens.push(token.id);
                continue;
            }
            Event::Leaving(_) | Event::Progress(_) | Event::Scored(_) => continue,
            Event::Finished(_) => End::Finished { cached_tokens },
            Event::Failed(failed) => End::Failed(failed.kind(), failed.message),
        };
        assert_eq!(next(events).await?, None, "nothing follows the terminal event");
        return Ok(Answer { tokens, end });
    }
}

pub(crate) async fn next(events: &mut Streaming<GenerateEvent>) -> Result<Option<Event>, Status> {
    let event = timeout(PATIENCE, events.message()).await.expect("the stream goes on")?;
    Ok(event.map(|event| event.event.expect("an event says something")))
}

/// The tokens of the model, the same on every worker.
pub(crate) fn expected(prompt: &[u32], num_tokens: usize) -> Vec<u32> {
    FakeModel::new(BLOCK_SIZE).greedy(prompt, num_tokens)
}
