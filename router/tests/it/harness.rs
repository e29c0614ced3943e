//! A router on a free port, with fake workers registered at it.

use std::{net::SocketAddr, time::Duration};

use baton_cluster::{DiscoveryConfig, Registration, RegistrationKey, Role};
use baton_router::RouterConfig;
use tempfile::TempDir;
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::{client::Client, fake::FakeWorker, model};

/// A bound for every wait of a test. A test that reaches it has failed.
pub const SOON: Duration = Duration::from_secs(60);

pub struct Router {
    pub address: SocketAddr,
    pub client: Client,
    /// Shown by workers that register.
    pub worker_key: Option<String>,
    shutdown: CancellationToken,
    task: Option<JoinHandle<anyhow::Result<()>>>,
    registrations: Vec<Registration>,
    _dir: TempDir,
}

impl Router {
    /// A router without registered workers.
    pub async fn start(change: impl FnOnce(&mut RouterConfig)) -> Router {
        let dir = model::directory();
        let discovery = DiscoveryConfig::Embedded { router: "http://127.0.0.1:1".into(), key: None };
        let mut config = RouterConfig::new(dir.path().to_owned(), model::MODEL.to_owned(), discovery);
        change(&mut config);
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(baton_router::run_on(listener, config, shutdown.clone()));
        let client = Client::new(address);
        let router = Router {
            address,
            client,
            worker_key: None,
            shutdown,
            task: Some(task),
            registrations: Vec::new(),
            _dir: dir,
        };
        router.until("/startupz", 200).await;
        router
    }

    /// A router with one decode worker.
    pub async fn with_worker() -> (Router, FakeWorker) {
        Router::with_worker_and(|_| {}).await
    }

    pub async fn with_worker_and(change: impl FnOnce(&mut RouterConfig)) -> (Router, FakeWorker) {
        let mut router = Router::start(change).await;
        let worker = FakeWorker::start("d0", Role::Decode, 1).await;
        router.register(&worker).await;
        (router, worker)
    }

    /// Registers a worker and waits until the router can send to it.
    pub async fn register(&mut self, worker: &FakeWorker) {
        let key = self.worker_key.clone().map(RegistrationKey::new);
        let config = DiscoveryConfig::Embedded { router: format!("http://{}", self.address), key };
        let registration = baton_cluster::register(&config, worker.record.clone()).expect("a valid record");
        self.registrations.push(registration);
        let id = worker.record.id.0.clone();
        self.until_health(|health| {
            let workers = health["workers"].as_array().expect("a list");
            workers.iter().any(|worker| worker["id"] == id && worker["answers"] == true)
        })
        .await;
    }

    /// Withdraws the worker that was registered first.
    pub async fn withdraw_first(&mut self) {
        self.registrations.remove(0).withdraw().await;
    }

    /// Polls until the path answers with the status.
    pub async fn until(&self, path: &str, status: u16) {
        let asking = async {
            while self.client.get(path).await.status != status {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(SOON, asking).await.unwrap_or_else(|_| panic!("{path} never answered {status}"));
    }

    /// Polls until the workers have the expected state.
    pub async fn until_health(&self, wanted: impl Fn(&serde_json::Value) -> bool) {
        let asking = async {
            while !wanted(&self.client.get("/health").await.json()) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(SOON, asking).await.expect("the workers' state is reached");
    }

    /// Polls until `/metrics` has the line.
    pub async fn until_metric(&self, line: &str) {
        let mut text = String::new();
        let asking = async {
            loop {
                text = self.client.get("/metrics").await.text();
                if text.lines().any(|found| found == line) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        let reached = tokio::time::timeout(SOON, asking).await.is_ok();
        assert!(reached, "no line {line:?} in\n{text}");
    }

    /// Begins the shutdown.
    pub fn begin_shutdown(&self) {
        self.shutdown.cancel();
    }

    /// Waits for the end of a router whose shutdown has begun.
    pub async fn ended(mut self) -> anyhow::Result<()> {
        let task = self.task.take().expect("it is waited for once");
        tokio::time::timeout(SOON, task).await.expect("the router ends").expect("it does not panic")
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}
