//! The life of a worker: listen, load, start, register, serve, drain, end.

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use anyhow::Context;
use baton_cluster::{Capacity, Dialer, Registration, RegistrationState, Role, WorkerRecord, register_over};
use baton_engine::{BlendConfig, Drafter, EngineConfig, EngineHandle, EngineThread, Speculation};
use baton_kv_cache::KvFormat;
use baton_proto::worker::worker_server::WorkerServer;
use baton_telemetry::{Metrics, thread_waits};
use baton_worker_metrics::LoadGauges;
use baton_worker_tiers::{FetchLimits, Tiers};
use tokio::{net::TcpListener, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::{
    blending::state::Blending,
    config::WorkerConfig,
    data_plane::DataPlane,
    host_memory,
    lifecycle::Lifecycle,
    links::{Links, PeerLinks},
    load::{self, Model},
    metrics::WorkerMetrics,
    peers::Peers,
    server::Server,
    service::WorkerService,
    tickets::Tickets,
    watchers::Watchers,
    worker::Worker,
};

/// On a processor, a step with more tokens is bound by arithmetic: its kernels read the weights once for 14 rows.
const MAX_DRAFTED_STEP_TOKENS: usize = 32;

/// On a GPU, by data sheets and not measured: with weights in bf16, arithmetic takes longer than reading them from 150
/// (A100) to 300 tokens (H100) on, and from fewer tokens with smaller weights.
const MAX_DRAFTED_STEP_TOKENS_ON_GPU: usize = 128;

/// For work that was told to end.
const HALT_TIMEOUT: Duration = Duration::from_secs(5);

/// What makes a worker a prefill or a decode worker.
pub struct RoleService {
    /// Its services, beside those of every worker.
    pub routes: Routes,
    /// The full name of the service that `grpc.health.v1` reports.
    pub name: &'static str,
}

/// The engine of a worker broke after it had started: starting the worker again may help.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the engine broke")]
pub struct EngineBroke;

impl std::fmt::Debug for RoleService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RoleService").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Runs a worker until `shutdown` and a drain, or until its engine breaks.
///
/// # Errors
/// When it cannot start, or its engine broke.
pub async fn run<R>(config: WorkerConfig, shutdown: CancellationToken, role: R) -> anyhow::Result<()>
where
    R: FnOnce(&Arc<Worker>) -> RoleService,
{
    config.validate()?;
    let metrics = Metrics::of_process(config.role.name());
    let listener = TcpListener::bind(config.listen)
        .await
        .with_context(|| format!("cannot listen on {}", config.listen))?;
    let lifecycle = Lifecycle::new();
    let server = Server::start(listener, config.tls.clone(), lifecycle.clone(), metrics.clone()).await?;
    let loaded = tokio::select! {
        loaded = load::load(&config, LoadGauges::register(&metrics)) => loaded,
        () = shutdown.cancelled() => {
            server.close().await;
            return Ok(());
        }
    };
    operate(config, loaded?, server, lifecycle, metrics, shutdown, role).await
}

/// As [`run`], with a listener and a loaded model.
///
/// # Errors
/// As [`run`].
pub async fn serve<R>(
    config: WorkerConfig,
    model: Model,
    listener: TcpListener,
    shutdown: CancellationToken,
    role: R,
) -> anyhow::Result<()>
where
    R: FnOnce(&Arc<Worker>) -> RoleService,
{
    config.validate()?;
    let metrics = Metrics::of_process(config.role.name());
    let lifecycle = Lifecycle::new();
    let server = Server::start(listener, config.tls.clone(), lifecycle.clone(), metrics.clone()).await?;
    operate(config, model, server, lifecycle, metrics, shutdown, role).await
}

async fn operate<R>(
    config: WorkerConfig,
    model: Model,
    server: Server,
    lifecycle: Lifecycle,
    metrics: Metrics,
    shutdown: CancellationToken,
    role: R,
) -> anyhow::Result<()>
where
    R: FnOnce(&Arc<Worker>) -> RoleService,
{
    let mut record = describe(&config, &model, &server)?;
    let model_context_length = model.context_length;
    let (engine, thread) = start_engine(&config, model, &record)?;
    record.capacity.context_length = engine.context_length();
    if engine.context_length() < model_context_length {
        tracing::warn!(
            context_length = engine.context_length(),
            model_context_length,
            "the KV pool holds fewer tokens than the model's context, and longer requests are refused: --kv-memory, or on a \
             GPU --gpu-memory-utilization, makes it larger"
        );
    }
    let fetch_limits = FetchLimits {
        engine: engine.clone(),
        fetch_deadline: config.fetch_deadline,
        handoff_deadline: config.handoff_deadline,
    };
    let tiers = Tiers::open(config.tiers(), &record.kv_format, fetch_limits.clone(), lifecycle.tasks())?
        .map(Arc::new);
    let data_plane = DataPlane::start(&config, &record, &engine)?;
    let worker_metrics = WorkerMetrics::register(
        &metrics,
        &record.model,
        &engine,
        data_plane.clone(),
        tiers.as_ref().map_or_else(Weak::new, Arc::downgrade),
    );
    let drain_timeout = config.drain_timeout;
    let peers = Peers::new(Dialer::new(config.tls.clone()));
    let blending = Blending::new(&config, &engine);
    let (tickets, watchers) = (Tickets::default(), Watchers::default());
    let (links, peer_links) = (Links::default(), PeerLinks::default());
    let worker = Arc::new(Worker {
        config,
        record,
        engine,
        fetch_limits,
        tiers,
        lifecycle,
        metrics: worker_metrics,
        blending,
        data_plane,
        peers,
        tickets,
        links,
        peer_links,
        watchers,
    });
    let resuming = worker.tiers.clone().map(|tiers| tokio::spawn(tiers.resume_preempted()));
    let forgetting = worker.tiers.clone().map(|tiers| tokio::spawn(tiers.forget_spoiled()));
    let role = role(&worker);
    let control = WorkerServer::new(WorkerService { worker: worker.clone() });
    server.mount(role.routes.add_service(control));
    tracing::info!(
        worker = %worker.id(),
        role = %worker.record.role,
        address = %worker.record.address,
        num_blocks = worker.record.capacity.num_blocks,
        "worker serves"
    );

    let registration = register_over(&worker.config.discovery, worker.record.clone(), worker.dialer())?;
    let state = registration.state();
    let help = "1 if the worker is registered; a router that starts does not find one that is not";
    metrics.watch("baton_worker_registered", help, move || *state.borrow() == RegistrationState::Registered);
    let names = [role.name, "baton.worker.v1.Worker"];
    tokio::select! {
        () = shutdown.cancelled() => worker.lifecycle.drain(),
        () = worker.lifecycle.draining() => {}
        () = engine_ended(&worker.engine) => {}
        never = announce_readiness(&registration, &worker.lifecycle, &server, &names) => match never {},
    }

    server.set_serving(&names, false).await;
    drain(&worker, registration, drain_timeout).await;
    worker.engine.shutdown();
    let ended = tokio::task::spawn_blocking(|| thread.join()).await.context("the engine thread")?;
    if let Some(resuming) = resuming {
        resuming.await.context("the recalls of preempted sequences")?;
    }
    if let Some(forgetting) = forgetting {
        forgetting.await.context("what the tiers forget")?;
    }
    server.close().await;
    // Dropping the last clone of the data plane waits for its listeners and threads, and the tiers write what is queued.
    let _ = tokio::task::spawn_blocking(|| drop(worker)).await;
    ended.context(EngineBroke)
}

fn describe(config: &WorkerConfig, model: &Model, server: &Server) -> anyhow::Result<WorkerRecord> {
    let layout = model.executor.kv_layout();
    let host_tier = config.tiers().stores.host;
    Ok(WorkerRecord {
        id: config.id.clone(),
        incarnation: new_incarnation(),
        role: config.role,
        address: config.address(server.address())?,
        model: model.name.clone(),
        kv_format: KvFormat::new(model.revision.clone(), &layout, model.rope.clone()),
        capacity: Capacity {
            num_blocks: match (&model.block_device, model.simulated_blocks) {
                (Some(device), _) => {
                    host_memory::check(None, host_tier.as_ref())?;
                    let utilisation = config.gpu_memory_utilisation;
                    device.num_blocks(utilisation, &layout, model.draft_block_bytes())?
                }
                (None, Some(num_blocks)) => num_blocks,
                (None, None) => {
                    host_memory::check(Some(config.kv), host_tier.as_ref())?;
                    config.kv.num_blocks(layout.block_bytes() + model.draft_block_bytes())?
                }
            },
            block_size: layout.block_size,
            max_running: config.max_running,
            context_length: model.context_length,
        },
        compute: model.compute.clone(),
    })
}

fn start_engine(
    config: &WorkerConfig,
    mut model: Model,
    record: &WorkerRecord,
) -> anyhow::Result<(EngineHandle, EngineThread)> {
    let engine = EngineConfig {
        num_blocks: record.capacity.num_blocks,
        max_running: config.max_running,
        token_budget: config.token_budget,
        max_drafted_step_tokens: match model.block_device {
            Some(_) => MAX_DRAFTED_STEP_TOKENS_ON_GPU,
            None => MAX_DRAFTED_STEP_TOKENS,
        },
        itl_target: config.itl_target,
        context_length: model.context_length,
        max_waiting: config.max_waiting,
        prefix_cache: config.prefix_cache,
        model_revision: model.revision,
        step_prior: model.step_prior,
        grammars: model.grammars,
        blending: config.blend.map(|blend| BlendConfig { max_store_bytes: blend.max_store_bytes }),
        clock: Instant::now,
        thread_waits: thread_waits::of_this_thread,
    };
    if let (Some(device), Some(Drafter::Model { executor, storage, .. })) =
        (&model.block_device, &mut model.drafter)
    {
        let blocks = device.draft_blocks(executor.kv_layout(), engine.num_blocks);
        *storage = Some(blocks.context("cannot place the draft model's KV blocks")?);
    }
    let max_draft_tokens = config.max_draft_tokens;
    let speculation = model.drafter.map(|drafter| Speculation { drafter, max_draft_tokens });
    let started = match model.block_device {
        None => baton_engine::start(model.executor, speculation, engine),
        Some(device) => {
            let blocks =
                device.blocks(model.executor.kv_layout(), &engine).context("cannot place KV blocks")?;
            baton_engine::start_over(blocks, model.executor, speculation, engine)
        }
    };
    started.context("cannot start the engine")
}

/// Random; 0 stays free for "none".
fn new_incarnation() -> u64 {
    (uuid::Uuid::new_v4().as_u128() as u64).max(1)
}

/// Completes when the engine has ended. By itself it ends only when it breaks.
async fn engine_ended(engine: &EngineHandle) {
    let mut load = engine.load();
    while load.changed().await.is_ok() {}
}

/// A worker is ready once it is registered. Losing discovery later changes nothing: routers remember it.
async fn announce_readiness(
    registration: &Registration,
    lifecycle: &Lifecycle,
    server: &Server,
    names: &[&str],
) -> std::convert::Infallible {
    let mut state = registration.state();
    // Invariant 11: only a registered worker is ready. Invariant 10: losing discovery later does not change that.
    if state.wait_for(|state| *state == RegistrationState::Registered).await.is_ok() {
        lifecycle.ready();
        server.set_serving(names, true).await;
    }
    std::future::pending().await
}

/// Leaves discovery, waits for running requests, then ends the rest.
async fn drain(worker: &Worker, registration: Registration, drain_timeout: Duration) {
    let lifecycle = &worker.lifecycle;
    lifecycle.drain();
    tracing::info!(num_busy = lifecycle.num_busy(), "draining");
    registration.withdraw().await;
    tokio::select! {
        () = lifecycle.idle() => return,
        () = tokio::time::sleep(drain_timeout) => {
            tracing::warn!(num_busy = lifecycle.num_busy(), "drain timeout passed; ending the requests that still run");
        }
        // A broken engine fails each of its streams: that is worth waiting for.
        () = engine_ended(&worker.engine) => {
            if timeout(HALT_TIMEOUT, lifecycle.idle()).await.is_ok() {
                return;
            }
        }
    }
    // Invariant 2: each request that still runs ends with a typed failure before the process ends.
    lifecycle.halt();
    if timeout(HALT_TIMEOUT, lifecycle.idle()).await.is_err() {
        tracing::error!(
            num_busy = lifecycle.num_busy(),
            "some tasks do not end after a halt; the worker ends without them"
        );
    }
}

/// The gRPC service of a role, by its full name.
pub fn service_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "baton.worker.v1.Prefill",
        Role::Decode => "baton.worker.v1.Decode",
    }
}
