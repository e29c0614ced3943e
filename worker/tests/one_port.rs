//! The services of every worker beside those of its role: probes, metrics, health, reflection and load reports, on one
//! port.
#![forbid(unsafe_code)]

use std::{sync::Arc, time::Duration};

use baton_cluster::{DiscoveryConfig, Role};
use baton_engine::{Request as EngineRequest, SamplingParams};
use baton_engine_testing::FakeModel;
use baton_kv_events::{BatchKind, BlockHolder, CacheEvent, EventBatch, EventLog};
use baton_proto::worker::{DrainRequest, InfoRequest, WatchLoadRequest, worker_client::WorkerClient};
use baton_worker::{KvMemory, Model, RoleService, Worker, WorkerConfig, service_name};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tonic::{
    Code,
    service::Routes,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

const PATIENCE: Duration = Duration::from_secs(30);

struct TestWorker {
    worker: Arc<Worker>,
    shutdown: CancellationToken,
    ended: JoinHandle<anyhow::Result<()>>,
}

/// A worker without a role, in `discovery`.
async fn start(discovery: DiscoveryConfig) -> TestWorker {
    let mut config = WorkerConfig::new(Role::Decode, "d0".into(), "fake".into(), discovery);
    config.kv = KvMemory::Blocks(8);
    let model = Model {
        executor: FakeModel::new(4).executor(),
        block_device: None,
        simulated_blocks: None,
        drafter: None,
        name: "fake".into(),
        revision: "r1".into(),
        rope: "none".into(),
        context_length: 64,
        step_prior: None,
        grammars: None,
        compute: None,
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (give, worker) = oneshot::channel();
    let shutdown = CancellationToken::new();
    let ended = tokio::spawn(baton_worker::serve(config, model, listener, shutdown.clone(), |worker| {
        let _ = give.send(worker.clone());
        RoleService { routes: Routes::default(), name: service_name(Role::Decode) }
    }));
    TestWorker { worker: worker.await.expect("the worker starts"), shutdown, ended }
}

impl TestWorker {
    fn address(&self) -> &str {
        &self.worker.record().address
    }

    async fn channel(&self) -> Channel {
        let endpoint = Endpoint::from_shared(self.address().to_owned()).unwrap();
        endpoint.connect().await.expect("the worker listens")
    }

    /// One HTTP/1.1 GET: status line and the rest.
    async fn get(&self, path: &str) -> (String, String) {
        let host = self.address().trim_start_matches("http://");
        let mut stream = TcpStream::connect(host).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(PATIENCE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        let (status, rest) = answer.split_once("\r\n").unwrap();
        (status.to_owned(), rest.to_owned())
    }

    async fn until_ready(&self) {
        let mut phase = self.worker.lifecycle().watch();
        let ready = phase.wait_for(|phase| *phase == baton_worker::Phase::Serving);
        timeout(PATIENCE, ready).await.expect("in time").expect("the worker lives");
    }

    async fn stop(self) {
        self.shutdown.cancel();
        timeout(PATIENCE, self.ended).await.expect("in time").expect("no panic").expect("a good end");
    }
}

async fn health(channel: &Channel, service: &str) -> Result<ServingStatus, Code> {
    let request = HealthCheckRequest { service: service.into() };
    let answer = HealthClient::new(channel.clone()).check(request).await.map_err(|status| status.code())?;
    Ok(answer.into_inner().status())
}

fn found_by_list() -> DiscoveryConfig {
    DiscoveryConfig::Static { workers: Vec::new() }
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_metrics_health_and_services_share_one_port() {
    let worker = start(found_by_list()).await;
    worker.until_ready().await;
    assert_eq!(worker.get("/livez").await.0, "HTTP/1.1 200 OK");
    assert_eq!(worker.get("/readyz").await.0, "HTTP/1.1 200 OK");
    assert_eq!(worker.get("/nothing").await.0, "HTTP/1.1 404 Not Found");
    let (status, metrics) = worker.get("/metrics").await;
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(metrics.contains("openmetrics-text"), "{metrics}");
    assert!(metrics.contains("\nbaton_engine_total_blocks 8\n"), "{metrics}");
    assert!(metrics.contains("\nbaton_worker_registered 1\n"), "{metrics}");

    let channel = worker.channel().await;
    let info = WorkerClient::new(channel.clone()).info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.id.as_str(), info.incarnation), ("d0", worker.worker.incarnation()));
    let status = timeout(PATIENCE, async {
        // The worker is ready internally a moment before its health reports it.
        loop {
            match health(&channel, "").await {
                Ok(ServingStatus::NotServing) => tokio::task::yield_now().await,
                other => return other,
            }
        }
    });
    assert_eq!(status.await.unwrap(), Ok(ServingStatus::Serving));
    assert_eq!(health(&channel, "baton.worker.v1.Decode").await, Ok(ServingStatus::Serving));
    assert_eq!(health(&channel, "no.Such").await, Err(Code::NotFound));
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reflection_lists_the_services_in_both_versions() {
    let worker = start(found_by_list()).await;
    let channel = worker.channel().await;
    let names = {
        use tonic_reflection::pb::v1::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
        };
        let list = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let mut client = ServerReflectionClient::new(channel.clone());
        let answers = client.server_reflection_info(tokio_stream::once(list)).await.unwrap();
        let answer = answers.into_inner().message().await.unwrap().unwrap();
        match answer.message_response {
            Some(MessageResponse::ListServicesResponse(list)) => {
                list.service.into_iter().map(|service| service.name).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        }
    };
    for name in ["baton.worker.v1.Worker", "baton.worker.v1.Decode", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|found| found == name), "{name} is not in {names:?}");
    }
    {
        use tonic_reflection::pb::v1alpha::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest,
        };
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::FileContainingSymbol("baton.worker.v1.Worker".into())),
        };
        let mut client = ServerReflectionClient::new(channel);
        let answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
        let answer = answers.into_inner().message().await.unwrap().unwrap();
        assert!(format!("{answer:?}").contains("FileDescriptorResponse"), "{answer:?}");
    }
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unregistered_worker_is_alive_but_not_ready() {
    // A port without a listener.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let router = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let worker = start(DiscoveryConfig::Embedded { router, key: None }).await;
    assert_eq!(worker.get("/livez").await.0, "HTTP/1.1 200 OK");
    let (status, body) = worker.get("/readyz").await;
    assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
    assert!(body.ends_with("starting\n"), "{body}");
    let told = timeout(PATIENCE, async {
        while !worker.get("/metrics").await.1.contains("\nbaton_worker_registered 0\n") {
            tokio::task::yield_now().await;
        }
    });
    told.await.expect("metrics tell that it is not registered");
    assert_eq!(health(&worker.channel().await, "").await, Ok(ServingStatus::NotServing));
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn load_reports_come_at_once_at_changes_and_every_second() {
    let worker = start(found_by_list()).await;
    worker.until_ready().await;
    let mut client = WorkerClient::new(worker.channel().await);
    let mut reports = client.watch_load(WatchLoadRequest::default()).await.unwrap().into_inner();
    let first = timeout(PATIENCE, reports.message()).await.unwrap().unwrap().unwrap();
    assert_eq!((first.num_free_blocks, first.num_total_blocks, first.draining), (8, 8, false));
    // A report comes although the load has not changed.
    let second = timeout(PATIENCE, reports.message()).await.unwrap().unwrap().unwrap();
    assert_eq!(second, first);
    // The report of draining comes before the server closes.
    client.drain(DrainRequest {}).await.unwrap();
    let told = timeout(PATIENCE, async {
        while let Ok(Some(report)) = reports.message().await {
            if report.draining {
                return true;
            }
        }
        false
    });
    assert!(told.await.unwrap());
    timeout(PATIENCE, worker.ended).await.expect("in time").expect("no panic").expect("a good end");
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_bring_what_the_cache_stores_from_a_dump_on_or_from_where_a_reader_was() {
    let worker = start(found_by_list()).await;
    worker.until_ready().await;
    let channel = worker.channel().await;
    let watch = |cache_from| {
        let mut client = WorkerClient::new(channel.clone());
        async move {
            let request = WatchLoadRequest { cache_events: true, cache_from, ..WatchLoadRequest::default() };
            client.watch_load(request).await.unwrap().into_inner()
        }
    };
    async fn next(reports: &mut tonic::Streaming<baton_proto::v1::Load>) -> EventBatch {
        let cache = async {
            loop {
                let report = reports.message().await.unwrap().expect("another report");
                if let Some(cache) = report.cache {
                    return EventBatch::from(cache);
                }
            }
        };
        timeout(PATIENCE, cache).await.expect("in time")
    }
    let mut reports = watch(None).await;
    let empty = next(&mut reports).await;
    assert_eq!((empty.kind, empty.first, empty.events.len()), (BatchKind::DumpEnd, 0, 0));

    let generate = |prompt: Vec<u32>| {
        let sampling = SamplingParams { max_tokens: 2, ..SamplingParams::default() };
        let request = EngineRequest { prompt: prompt.into(), sampling, ..EngineRequest::default() };
        let mut tokens = worker.worker.engine().generate(request).expect("a valid request");
        async move { while tokens.next().await.is_some() {} }
    };
    generate((0..9).collect()).await;
    let mut known = EventLog::new(100);
    let mut num_stored = 0;
    while num_stored < 2 {
        let batch = next(&mut reports).await;
        num_stored += batch.events.iter().map(|event| event.blocks().len()).sum::<usize>();
        assert_eq!((batch.kind, batch.first), (BatchKind::Events, known.next()));
        known.append(BlockHolder::Pool, batch.events);
    }
    // A reader that comes back continues, and a new one gets everything.
    let from = known.next();
    let mut continued = watch(Some(from)).await;
    let whole = next(&mut watch(None).await).await;
    assert_eq!((whole.kind, whole.first), (BatchKind::DumpEnd, from));
    assert_eq!(whole.events.iter().map(|event| event.blocks().len()).sum::<usize>(), 2);
    // Eight blocks: the second prompt takes seven, and so evicts.
    generate((30..56).collect()).await;
    let mut was_removed = false;
    while !was_removed {
        let batch = next(&mut continued).await;
        assert_eq!((batch.kind, batch.first), (BatchKind::Events, known.next()));
        was_removed = batch.events.iter().any(|event| matches!(event, CacheEvent::Removed { .. }));
        known.append(BlockHolder::Pool, batch.events);
    }
    worker.stop().await;
}
