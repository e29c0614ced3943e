//! The router's server: HTTP and gRPC around `baton-router-core`.
//!
//! [`run`] serves one model on one port. Requests are planned, sent and retried by the core, which knows no API.
#![forbid(unsafe_code)]

mod auth;
mod grpc;
mod http;

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use auth::LiveKeys;
use baton_cluster::Dialer;
use baton_router_port::{PagePolicy, PortConfig};
use baton_telemetry::Metrics;
use baton_tokenizer::Tokenizer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use baton_planner::Slo;
pub use baton_request_fields::UnknownFields;
use baton_router_core::{Core, Journal, RouterMetrics, ServedModel, Workers};
pub use baton_router_core::{JournalConfig, JournalOpenError, MigrationMode, PlanBasis, RouterConfig};
pub use baton_tools::ToolFormat;

/// Serves until `shutdown` is cancelled and running requests have ended.
///
/// # Errors
/// When the address is taken, the model's tokenizer cannot be loaded, or discovery is misconfigured.
pub async fn run(config: RouterConfig, shutdown: CancellationToken) -> anyhow::Result<()> {
    let listener = TcpListener::bind(config.listen)
        .await
        .with_context(|| format!("cannot listen on {}", config.listen))?;
    run_on(listener, config, shutdown).await
}

/// Like [`run`], on a listener that is there already; `config.listen` is not used.
///
/// # Errors
/// See [`run`].
pub async fn run_on(
    listener: TcpListener,
    config: RouterConfig,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let dialer = Dialer::new(config.tls.clone());
    let keys = config.api_keys.as_deref().map(|path| LiveKeys::read(path, config.worker_key)).transpose()?;
    let address = listener.local_addr()?;
    if keys.is_none() && !address.ip().is_loopback() {
        tracing::warn!(%address, "no --api-keys: every host that reaches this address may send requests and register workers");
    }
    let discovery = baton_cluster::watch_over(&config.discovery, &dialer)?;
    // New at every start: tickets of an earlier router mean nothing to this one's ledgers.
    let name = (uuid::Uuid::new_v4().as_u128() as u64).max(1);
    let workers = Workers::new(name, config.model_name.clone(), config.keep_alive, dialer);
    workers.follow(discovery.members());
    let metrics = RouterMetrics::new(&Metrics::of_process("router"));
    metrics.watch_discovery(discovery.is_connected());
    // A model that cannot be loaded ends the server like a shutdown.
    let drain = shutdown.child_token();
    let journal =
        config.durable.clone().map(|config| tokio::task::spawn_blocking(move || Journal::open(&config)));
    let journal = match journal {
        Some(opening) => Some(opening.await?.context("cannot open the journal (--durable)")?),
        None => None,
    };
    let core = Core::new(config.clone(), name, journal, workers.clone(), metrics, drain.clone());
    let loading = tokio::spawn(load_model(core.clone(), drain.clone()));
    let balancing = (config.migration == MigrationMode::Balance)
        .then(|| tokio::spawn(core.migrator.clone().balance(workers.clone(), drain.clone())));
    let readiness = grpc::Readiness::follow(core.clone());
    let following = keys.clone().map(|keys| tokio::spawn(keys.follow(drain.clone())));
    let mount = |router| grpc::mount(router, core.clone(), readiness.status(), discovery.registry());
    let pages = PagePolicy {
        origins: config.cors_origins.clone(),
        needs_local_name: keys.is_none() && address.ip().is_loopback(),
    };
    let routes = http::routes(core.clone(), mount, |router| {
        let router = match keys {
            Some(keys) => auth::guard(router, keys, config.has_public_metrics),
            None => router,
        };
        auth::guard_from_pages(router, pages)
    });
    tracing::info!(%address, model = config.model_name, "router listens");

    let abort = CancellationToken::new();
    // Not `drain`: the server would see it cancelled between the two looks that `select!` takes.
    let closing = CancellationToken::new();
    let port = PortConfig {
        tls: config.tls.clone(),
        header_timeout: config.header_timeout,
        unread_timeout: config.unread_timeout,
        keep_alive: config.keep_alive,
        max_connections: config.max_connections,
        spare_time: Duration::from_secs(1),
        connections: core.metrics.connections.clone(),
        full: core.metrics.connections_full.clone(),
    };
    let mut server = std::pin::pin!(baton_router_port::serve(listener, routes, &port, &closing, &abort));
    tokio::select! {
        biased;
        () = drain.cancelled() => {}
        () = &mut server => unreachable!("the server runs until it is told to drain"),
    }
    closing.cancel();
    tracing::info!(running = core.active.num_running(), "router drains");
    // Watch streams never end by themselves, and would keep the server from draining.
    readiness.stop().await;
    workers.settle();
    discovery.stop().await;
    drain_requests(&mut server, &core, &abort).await;
    workers.shut_down().await;
    if let Some(following) = following {
        following.await.context("the task that reads the key file failed")?;
    }
    if let Some(balancing) = balancing {
        balancing.await.context("the balancing task failed")?;
    }
    loading.await.context("the loading task failed")?
}

/// Waits for running requests, then ends them with an error, then drops the connections.
async fn drain_requests(
    mut server: impl Future<Output = ()> + Unpin,
    core: &Core,
    abort: &CancellationToken,
) {
    let timeout = core.config.drain_timeout;
    if tokio::time::timeout(timeout, &mut server).await.is_ok() {
        return;
    }
    tracing::warn!(
        running = core.active.num_running(),
        "requests that still run after {timeout:?} are ended with an error"
    );
    core.closing.cancel();
    if tokio::time::timeout(LAST_WORDS, &mut server).await.is_err() {
        abort.cancel();
        server.await;
    }
}

/// How long the last event of an ended stream may take to reach its client.
const LAST_WORDS: Duration = Duration::from_secs(1);

async fn load_model(core: Arc<Core>, drain: CancellationToken) -> anyhow::Result<()> {
    let loader = core.clone();
    let loaded = tokio::task::spawn_blocking(move || {
        let RouterConfig { model, model_name, tool_format, api_keys, .. } = &loader.config;
        let mut tokenizer = Tokenizer::load(model)?;
        if api_keys.is_some() {
            // Tenants learn nothing of each other's texts from times.
            tokenizer.forget_texts();
        }
        ServedModel::load(model, model_name, *tool_format, tokenizer)
    })
    .await;
    match loaded.context("the loading thread failed").and_then(|model| model) {
        Ok(model) => {
            tracing::info!(model = model.name, vocab_size = model.vocab_size, "tokenizer loaded");
            core.set_model(model);
            Ok(())
        }
        Err(error) => {
            drain.cancel();
            Err(error)
        }
    }
}
