//! A fake worker without an engine. It sends the events of a script.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Condvar, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use baton_cluster::{Capacity, Role, WorkerRecord};
use baton_kv_cache::{KvDtype, KvFormat, KvLayout};
use baton_proto::{
    failure_to_status, v1,
    worker::{
        self as proto, DrainRequest, DrainResponse, Failed, GenerateEvent, GenerateRequest, InfoRequest,
        WatchLoadRequest, decode_server, failed::Kind, generate_event::Event, worker_server,
    },
};
use baton_request::{Failure, FailureKind};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{mpsc, watch},
};
use tokio_stream::{Stream, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status};

use crate::model::{CONTEXT, END, MODEL, ids};

/// Prompt tokens that the fake reports as cached.
const NUM_CACHED: u32 = 3;

/// A step of a script.
#[derive(Clone, Debug)]
pub enum Step {
    Token(u32),
    Logprobs(u32, f32, Vec<(u32, f32)>),
    /// Log-probabilities of the prompt's tokens from this position on, of rank 2 with one more likely token.
    Scored(u32, Vec<(u32, f32)>),
    /// A token after a draft: the numbers of drafted and of accepted tokens.
    Verified(u32, u32, u32),
    /// A token with seconds of queue, prefill and exposed transfer.
    Timed(u32, [Option<f64>; 3]),
    Finish(v1::FinishReason),
    Fail(Kind),
    /// Refuses the call. Only as the first step.
    Refuse(FailureKind),
    /// Reports that the worker drains.
    Leaving,
    /// The stream ends with a status, as when the process dies.
    Break,
    /// The stream ends without a last event.
    End,
    /// Reports progress after this time.
    Progress(Duration),
    /// Sends nothing until it is released.
    Hang,
    /// Sends nothing more.
    Silence,
    /// Freezes the whole process, like `kill -STOP`, until the worker is dropped.
    Freeze,
}

type Script = dyn Fn(&GenerateRequest) -> Vec<Step> + Send + Sync;

/// One fake worker process.
pub struct FakeWorker {
    pub record: WorkerRecord,
    pub address: SocketAddr,
    shared: Arc<Shared>,
    /// Request ids of the streams that the router drops before their end.
    dropped: tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>,
    /// Ids of requests when they arrive.
    arrived: tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>,
    load: watch::Sender<v1::Load>,
    /// A runtime of its own, so that ending it breaks every connection, like `kill -9`.
    process: Option<Runtime>,
}

struct Shared {
    record: WorkerRecord,
    script: Mutex<Arc<Script>>,
    requests: Mutex<Vec<GenerateRequest>>,
    watches: watch::Sender<Vec<WatchLoadRequest>>,
    segments: watch::Sender<Option<proto::SegmentChanges>>,
    dropped: mpsc::UnboundedSender<String>,
    arrived: mpsc::UnboundedSender<String>,
    load: watch::Receiver<v1::Load>,
    /// It reports no load.
    is_silent: watch::Sender<bool>,
    num_live: Arc<watch::Sender<usize>>,
    frozen: Arc<(Mutex<bool>, Condvar)>,
    gate: Arc<Mutex<Gate>>,
}

/// The step of hanging streams after their release.
#[derive(Default)]
struct Gate {
    step: Option<Step>,
    waiting: Vec<Waker>,
}

/// Scores the prompt if it is asked to, continues `answer` after the tokens of earlier attempts, then finishes.
pub fn say(answer: &str) -> impl Fn(&GenerateRequest) -> Vec<Step> + Send + Sync + 'static {
    let answer = answer.to_owned();
    move |request| {
        let max = request.sampling.as_ref().map_or(0, |sampling| sampling.max_tokens as usize);
        let mut all: Vec<_> = ids(&answer).into_iter().map(Step::Token).collect();
        all.push(Step::Token(END));
        let long = all.len() > max;
        all.truncate(max);
        let mut steps = all.split_off(request.output_token_ids.len().min(all.len()));
        let wants_scores = request.sampling.as_ref().is_some_and(|it| it.prompt_logprobs.is_some());
        if wants_scores && request.output_token_ids.is_empty() && request.prompt_token_ids.len() > 1 {
            let scored = request.prompt_token_ids[1..].iter().map(|&id| (id, -0.5));
            steps.insert(0, Step::Scored(1, scored.collect()));
        }
        let reason = if long { v1::FinishReason::Length } else { v1::FinishReason::Stop };
        steps.push(Step::Finish(reason));
        steps
    }
}

impl FakeWorker {
    pub async fn start(id: &str, role: Role, incarnation: u64) -> FakeWorker {
        FakeWorker::start_at(id, role, incarnation, SocketAddr::from(([127, 0, 0, 1], 0))).await
    }

    pub async fn start_at(id: &str, role: Role, incarnation: u64, address: SocketAddr) -> FakeWorker {
        let listener = std::net::TcpListener::bind(address).expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("a bound socket has an address");
        let layout =
            KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };
        let record = WorkerRecord {
            id: id.into(),
            incarnation,
            role,
            address: format!("http://{address}"),
            model: MODEL.into(),
            kv_format: KvFormat::new("r1".into(), &layout, "theta=1".into()),
            capacity: Capacity { num_blocks: 64, block_size: 16, max_running: 8, context_length: CONTEXT },
            compute: None,
        };
        let (dropped_sender, dropped) = mpsc::unbounded_channel();
        let (arrived_sender, arrived) = mpsc::unbounded_channel();
        let (load, load_receiver) = watch::channel(v1::Load {
            num_free_blocks: 64,
            num_total_blocks: 64,
            handoff_bytes: vec![v1::TransportBytes { transport: "shm".into(), bytes: 4096 }],
            ..v1::Load::default()
        });
        let shared = Arc::new(Shared {
            record: record.clone(),
            script: Mutex::new(Arc::new(say("Hello"))),
            requests: Mutex::default(),
            watches: watch::Sender::default(),
            segments: watch::Sender::default(),
            dropped: dropped_sender,
            arrived: arrived_sender,
            load: load_receiver,
            is_silent: watch::Sender::new(false),
            num_live: Arc::new(watch::Sender::new(0)),
            frozen: Arc::new((Mutex::new(true), Condvar::new())),
            gate: Arc::default(),
        });
        let service = Service(shared.clone());
        let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let process = process.expect("a thread can be started");
        process.spawn(async move {
            let listener = TcpListener::from_std(listener).expect("a socket");
            let server = tonic::transport::Server::builder()
                .add_service(worker_server::WorkerServer::new(service.clone()))
                .add_service(decode_server::DecodeServer::new(service))
                .serve_with_incoming(TcpListenerStream::new(listener));
            server.await.expect("it serves until its runtime ends");
        });
        FakeWorker {
            record,
            address,
            shared,
            dropped: tokio::sync::Mutex::new(dropped),
            arrived: tokio::sync::Mutex::new(arrived),
            load,
            process: Some(process),
        }
    }

    /// Ends the worker like `kill -9`. Another one can take its address.
    pub fn kill(mut self) -> SocketAddr {
        // Waits for the end, so that the port is free.
        let process = self.process.take().expect("it lives");
        tokio::task::block_in_place(|| process.shutdown_timeout(crate::harness::SOON));
        self.address
    }

    /// Replaces the script.
    pub fn script(
        &self,
        script: impl Fn(&GenerateRequest) -> Vec<Step> + Send + Sync + 'static,
    ) -> &FakeWorker {
        *self.shared.script.lock().unwrap() = Arc::new(script);
        self
    }

    pub fn requests(&self) -> Vec<GenerateRequest> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Waits for the stream of reports of this number, and what its reader asked for.
    pub async fn watched(&self, idx: usize) -> WatchLoadRequest {
        let mut watches = self.shared.watches.subscribe();
        let found = tokio::time::timeout(crate::harness::SOON, watches.wait_for(|all| all.len() > idx)).await;
        found.expect("in time").expect("the worker lives")[idx]
    }

    pub async fn next_dropped(&self) -> String {
        self.dropped.lock().await.recv().await.expect("the worker lives")
    }

    pub async fn next_arrived(&self) -> String {
        self.arrived.lock().await.recv().await.expect("the worker lives")
    }

    /// Lets hanging streams continue with this step.
    pub fn release(&self, step: Step) {
        let mut gate = self.shared.gate.lock().unwrap();
        gate.step = Some(step);
        gate.waiting.drain(..).for_each(Waker::wake);
    }

    /// Waits until every stream has ended.
    pub async fn until_idle(&self) {
        let mut num_live = self.shared.num_live.subscribe();
        let idle = tokio::time::timeout(crate::harness::SOON, num_live.wait_for(|num| *num == 0)).await;
        assert!(idle.is_ok(), "streams stay behind");
    }

    /// Reports this load.
    pub fn set_free_blocks(&self, num: u32) {
        self.load.send_modify(|load| load.num_free_blocks = num);
    }

    /// Tells what its object store has, by the numbers of segments.
    pub fn set_segments(&self, added: Vec<(u32, Vec<u64>)>, removed: Vec<u32>) {
        let added = added.into_iter().map(|(number, blocks)| proto::Segment { number, blocks }).collect();
        let changes = proto::SegmentChanges { added, removed, is_current: true };
        self.shared.segments.send_replace(Some(changes));
    }

    /// Changes its load report.
    pub fn set_load(&self, change: impl FnOnce(&mut v1::Load)) {
        self.load.send_modify(change);
    }

    /// Reports no load until it reports again, and answers everything else.
    pub fn fall_silent(&self) {
        self.shared.is_silent.send_replace(true);
    }

    /// Ends its silence.
    pub fn report_again(&self) {
        self.shared.is_silent.send_replace(false);
    }

    pub fn set_draining(&self) {
        self.load.send_modify(|load| load.draining = true);
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        *self.shared.frozen.0.lock().unwrap() = false;
        self.shared.frozen.1.notify_all();
        if let Some(process) = self.process.take() {
            process.shutdown_background();
        }
    }
}

#[derive(Clone)]
struct Service(Arc<Shared>);

type Reports = Pin<Box<dyn Stream<Item = Result<v1::Load, Status>> + Send>>;

#[tonic::async_trait]
impl worker_server::Worker for Service {
    async fn info(&self, _: Request<InfoRequest>) -> Result<Response<proto::WorkerRecord>, Status> {
        Ok(Response::new(proto::WorkerRecord::from(&self.0.record)))
    }

    type WatchLoadStream = Reports;

    async fn watch_load(&self, request: Request<WatchLoadRequest>) -> Result<Response<Reports>, Status> {
        self.0.watches.send_modify(|watches| watches.push(request.into_inner()));
        let mut load = self.0.load.clone();
        load.mark_changed();
        let state = (load, self.0.is_silent.subscribe());
        let reports = futures_util::stream::unfold(state, |(mut load, mut is_silent)| async move {
            let second = Duration::from_secs(1);
            let _ = tokio::time::timeout(second, load.changed()).await;
            let _ = is_silent.wait_for(|is_silent| !*is_silent).await;
            let report = load.borrow_and_update().clone();
            Some((Ok(report), (load, is_silent)))
        });
        Ok(Response::new(Box::pin(reports)))
    }

    type WatchSegmentsStream = Pin<Box<dyn Stream<Item = Result<proto::SegmentChanges, Status>> + Send>>;

    async fn watch_segments(
        &self,
        _: Request<proto::WatchSegmentsRequest>,
    ) -> Result<Response<Self::WatchSegmentsStream>, Status> {
        let mut segments = self.0.segments.subscribe();
        if segments.borrow().is_none() {
            return Err(Status::failed_precondition("it has no object store"));
        }
        segments.mark_changed();
        let changes = futures_util::stream::unfold(segments, |mut segments| async move {
            segments.changed().await.ok()?;
            let changes = segments.borrow_and_update().clone();
            Some((Ok(changes?), segments))
        });
        Ok(Response::new(Box::pin(changes)))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        Ok(Response::new(DrainResponse {}))
    }
}

#[tonic::async_trait]
impl decode_server::Decode for Service {
    type GenerateStream = Play;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Play>, Status> {
        let request = request.into_inner();
        let script = self.0.script.lock().unwrap().clone();
        let steps = script(&request);
        self.0.requests.lock().unwrap().push(request.clone());
        let _ = self.0.arrived.send(request.request_id.clone());
        if let Some(Step::Refuse(kind)) = steps.first() {
            return Err(failure_to_status(&Failure::new(*kind, "scripted refusal")));
        }
        self.0.num_live.send_modify(|num| *num += 1);
        Ok(Response::new(Play {
            num_live: self.0.num_live.clone(),
            frozen: self.0.frozen.clone(),
            gate: self.0.gate.clone(),
            id: request.request_id,
            steps: steps.into(),
            pause: None,
            cached: Some(NUM_CACHED),
            over: false,
            dropped: self.0.dropped.clone(),
        }))
    }

    type LendStream = tokio_stream::Empty<Result<proto::Loan, Status>>;

    async fn lend(&self, _: Request<proto::LendRequest>) -> Result<Response<Self::LendStream>, Status> {
        Err(Status::unimplemented("it has no blocks"))
    }

    async fn let_go(
        &self,
        _: Request<proto::LetGoRequest>,
    ) -> Result<Response<proto::LetGoResponse>, Status> {
        Err(Status::unimplemented("no worker asks it"))
    }
}

/// A running script.
pub struct Play {
    id: String,
    steps: VecDeque<Step>,
    /// Until the next step.
    pause: Option<Pin<Box<tokio::time::Sleep>>>,
    /// For the first token.
    cached: Option<u32>,
    over: bool,
    dropped: mpsc::UnboundedSender<String>,
    num_live: Arc<watch::Sender<usize>>,
    frozen: Arc<(Mutex<bool>, Condvar)>,
    gate: Arc<Mutex<Gate>>,
}

impl Stream for Play {
    type Item = Result<GenerateEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        let event = match self.steps.pop_front() {
            Some(Step::Token(id)) => Event::Token(proto::Token {
                id,
                cached_tokens: self.cached.take(),
                ..proto::Token::default()
            }),
            Some(Step::Logprobs(id, logprob, top)) => {
                let top = top.into_iter().map(|(token_id, logprob)| v1::TopLogprob { token_id, logprob });
                let logprobs = v1::TokenLogprobs { token_id: id, logprob, top: top.collect(), rank: 0 };
                Event::Token(proto::Token {
                    id,
                    logprobs: Some(logprobs),
                    cached_tokens: self.cached.take(),
                    ..proto::Token::default()
                })
            }
            Some(Step::Scored(first_idx, tokens)) => {
                let token = |(token_id, logprob)| {
                    let top = vec![v1::TopLogprob { token_id: token_id + 1, logprob: logprob / 2.0 }];
                    v1::TokenLogprobs { token_id, logprob, top, rank: 2 }
                };
                Event::Scored(proto::Scored { first_idx, tokens: tokens.into_iter().map(token).collect() })
            }
            Some(Step::Verified(id, drafted_tokens, accepted_tokens)) => Event::Token(proto::Token {
                id,
                cached_tokens: self.cached.take(),
                drafted_tokens,
                accepted_tokens,
                ..proto::Token::default()
            }),
            Some(Step::Timed(id, [queue_seconds, prefill_seconds, exposed_seconds])) => {
                Event::Token(proto::Token {
                    id,
                    queue_seconds,
                    prefill_seconds,
                    exposed_seconds,
                    ..proto::Token::default()
                })
            }
            Some(Step::Finish(reason)) => {
                self.over = true;
                Event::Finished(proto::Finished { reason: reason.into() })
            }
            Some(Step::Fail(kind)) => {
                self.over = true;
                Event::Failed(Failed { kind: kind.into(), message: format!("scripted {kind:?}") })
            }
            Some(Step::Refuse(_)) => unreachable!("only the first step refuses"),
            Some(Step::Leaving) => Event::Leaving(proto::Leaving {}),
            Some(Step::Break) => {
                self.over = true;
                return Poll::Ready(Some(Err(Status::unavailable("scripted break"))));
            }
            Some(Step::End) | None => {
                self.over = true;
                return Poll::Ready(None);
            }
            Some(Step::Freeze) => {
                let mut frozen = self.frozen.0.lock().unwrap();
                while *frozen {
                    frozen = self.frozen.1.wait(frozen).unwrap();
                }
                return Poll::Pending;
            }
            Some(Step::Progress(after)) => {
                let pause = self.pause.get_or_insert_with(|| Box::pin(tokio::time::sleep(after)));
                if pause.as_mut().poll(cx).is_pending() {
                    self.steps.push_front(Step::Progress(after));
                    return Poll::Pending;
                }
                self.pause = None;
                Event::Progress(proto::Progress {})
            }
            // Ends when the router drops the stream.
            Some(Step::Silence) => {
                self.steps.push_front(Step::Silence);
                return Poll::Pending;
            }
            // Ends with `release`.
            Some(Step::Hang) => {
                let gate = self.gate.clone();
                let mut gate = gate.lock().unwrap();
                match gate.step.clone() {
                    Some(step) => self.steps.push_front(step),
                    None => {
                        gate.waiting.push(cx.waker().clone());
                        self.steps.push_front(Step::Hang);
                        return Poll::Pending;
                    }
                }
                drop(gate);
                return self.poll_next(cx);
            }
        };
        Poll::Ready(Some(Ok(GenerateEvent { event: Some(event) })))
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        self.num_live.send_modify(|num| *num -= 1);
        if !self.over {
            let _ = self.dropped.send(self.id.clone());
        }
    }
}
