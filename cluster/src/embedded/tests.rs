//! Workers and a registry, connected by real sockets.

use std::net::SocketAddr;

use tokio::{net::TcpListener, task::JoinHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::{
    Discovery, DiscoveryConfig, Membership, Registration, RegistrationState, Role, WorkerRecord, register,
    testing::{other_format, record, until, until_state},
    watch,
};

/// A router that serves only the registry.
struct Router {
    discovery: Discovery,
    address: SocketAddr,
    stop: CancellationToken,
    server: JoinHandle<()>,
}

impl Router {
    async fn start(address: &str) -> Router {
        let listener = TcpListener::bind(address).await.expect("the port is free");
        let address = listener.local_addr().expect("it is bound");
        let discovery = watch(&DiscoveryConfig::Embedded { router: String::new(), key: None }).unwrap();
        let registry = discovery.registry().expect("embedded discovery has a registry");
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let server = tokio::spawn(async move {
            Server::builder()
                .add_service(registry)
                .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stopped)
                .await
                .expect("the server runs until it is told to stop");
        });
        Router { discovery, address, stop, server }
    }

    fn config(&self) -> DiscoveryConfig {
        DiscoveryConfig::Embedded { router: format!("http://{}", self.address), key: None }
    }

    fn register(&self, record: WorkerRecord) -> Registration {
        register(&self.config(), record).unwrap()
    }

    fn members(&self) -> Membership {
        self.discovery.members()
    }

    /// Returns when every connection has been closed: registration streams do not hold it up.
    async fn stop(self) {
        self.stop.cancel();
        self.discovery.stop().await;
        self.server.await.unwrap();
    }
}

#[tokio::test]
async fn a_worker_is_known_while_its_stream_lives() {
    let router = Router::start("127.0.0.1:0").await;
    let mut members = router.members();
    let registration = router.register(record("p0", Role::Prefill));
    until_state(&registration, |state| *state == RegistrationState::Registered).await;
    until(&mut members, |members| members.iter().any(|record| record.role == Role::Prefill)).await;

    registration.withdraw().await;
    assert!(members.borrow().is_empty(), "withdraw returns once the registry has forgotten the worker");
    router.stop().await;
}

#[tokio::test]
async fn a_worker_whose_stream_breaks_is_removed() {
    let router = Router::start("127.0.0.1:0").await;
    let mut members = router.members();
    let registration = router.register(record("p0", Role::Prefill));
    until(&mut members, |members| members.len() == 1).await;
    drop(registration);
    until(&mut members, |members| members.is_empty()).await;
    router.stop().await;
}

#[tokio::test]
async fn a_worker_returns_to_a_router_that_was_restarted() {
    let router = Router::start("127.0.0.1:0").await;
    let address = router.address.to_string();
    let registration = router.register(record("d0", Role::Decode));
    until_state(&registration, |state| *state == RegistrationState::Registered).await;
    router.stop().await;
    until_state(&registration, |state| matches!(state, RegistrationState::Searching { .. })).await;

    let router = Router::start(&address).await;
    until(&mut router.members(), |members| members.get(&"d0".into()).is_some()).await;
    registration.withdraw().await;
    router.stop().await;
}

#[tokio::test]
async fn workers_that_cannot_exchange_kv_are_all_members() {
    let router = Router::start("127.0.0.1:0").await;
    let first = router.register(record("p0", Role::Prefill));
    until(&mut router.members(), |members| members.len() == 1).await;
    let second = router.register(other_format(record("d0", Role::Decode)));
    until_state(&second, |state| *state == RegistrationState::Registered).await;
    until(&mut router.members(), |members| members.len() == 2).await;

    first.withdraw().await;
    second.withdraw().await;
    router.stop().await;
}

#[tokio::test]
async fn a_second_worker_of_the_same_name_is_refused_but_a_restarted_one_is_not() {
    let router = Router::start("127.0.0.1:0").await;
    let mut members = router.members();
    let first = router.register(record("p0", Role::Prefill));
    until(&mut members, |members| members.len() == 1).await;

    let elsewhere =
        WorkerRecord { incarnation: 2, address: "http://127.0.0.1:10".into(), ..record("p0", Role::Prefill) };
    let second = router.register(elsewhere);
    let state = until_state(&second, |state| matches!(state, RegistrationState::Refused(_))).await;
    let RegistrationState::Refused(reason) = state else { unreachable!("just matched") };
    assert!(reason.contains("taken by a running worker at http://127.0.0.1:9"), "{reason}");
    second.withdraw().await;

    // The same address: the old process has ended, although its connection is still open here.
    let restarted = router.register(WorkerRecord { incarnation: 3, ..record("p0", Role::Prefill) });
    until(&mut members, |members| members.get(&"p0".into()).is_some_and(|p0| p0.incarnation == 3)).await;
    drop(first);
    // The end of the old stream does not end the new lease: a change of another worker comes later.
    let other = router.register(record("p1", Role::Prefill));
    until(&mut members, |members| members.get(&"p1".into()).is_some()).await;
    assert_eq!(members.borrow().get(&"p0".into()).map(|p0| p0.incarnation), Some(3));
    restarted.withdraw().await;
    other.withdraw().await;
    router.stop().await;
}

#[tokio::test]
async fn an_invalid_record_is_refused() {
    let router = Router::start("127.0.0.1:0").await;
    let bad = WorkerRecord { address: "nowhere".into(), ..record("p0", Role::Prefill) };
    let error = register(&router.config(), bad).unwrap_err().to_string();
    assert!(error.contains("address is \"nowhere\""), "{error}");
    router.stop().await;
}
