//! What workers say of their caches decides where requests go, across gaps, restarts and deaths.

use baton_cluster::Role;
use baton_kv_cache::HashRoot;
use baton_proto::v1;
use serde_json::json;

use crate::{fake::FakeWorker, harness::Router, model::ids};

const TEXT: &str = "/v1/completions";
const BLOCK_SIZE: usize = 16;

/// Seven full blocks, and a bit.
fn prompt(first: char) -> String {
    format!("{first}{}", "y".repeat(115))
}

/// The blocks of a prompt, as workers name them.
pub(crate) fn blocks(prompt: &str) -> Vec<u64> {
    HashRoot::new("r1", "", "").block_hashes(&ids(prompt), BLOCK_SIZE).map(|hash| hash.short()).collect()
}

fn stored(prompt: &str) -> v1::CacheEvent {
    v1::CacheEvent { stored: blocks(prompt), ..v1::CacheEvent::default() }
}

pub(crate) fn says(worker: &FakeWorker, first: u64, events: Vec<v1::CacheEvent>, kind: v1::CacheBatch) {
    worker.set_load(|load| load.cache = Some(v1::CacheEvents { first, events, kind: kind.into() }));
}

pub(crate) async fn until_index(router: &Router, id: &str, state: &str) {
    router
        .until_health(|health| {
            let workers = health["workers"].as_array().expect("a list");
            workers.iter().any(|worker| worker["id"] == id && worker["index"] == state)
        })
        .await;
}

/// Sends a prompt, and says which of the workers got it.
async fn send<'a>(router: &Router, workers: &[&'a FakeWorker], prompt: &str) -> &'a str {
    let before: Vec<usize> = workers.iter().map(|worker| worker.requests().len()).collect();
    let body = json!({"prompt": prompt, "max_tokens": 2});
    assert_eq!(router.client.post(TEXT, &body).await.status, 200);
    let got = workers.iter().zip(before).find(|(worker, before)| worker.requests().len() > *before);
    got.expect("one of them got it").0.record.id.as_str()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_go_where_a_worker_says_that_their_prefix_is() {
    let mut router = Router::start(|_| {}).await;
    let d0 = FakeWorker::start("d0", Role::Decode, 1).await;
    let d1 = FakeWorker::start("d1", Role::Decode, 1).await;
    // d1 has more to do, which a cached prefix outweighs.
    d1.set_load(|load| load.num_running = 1);
    for worker in [&d0, &d1] {
        router.register(worker).await;
    }
    let workers = [&d0, &d1];
    until_index(&router, "d1", "approximate").await;
    assert!(d1.watched(0).await.cache_events, "it is asked for its events");
    assert_eq!(send(&router, &workers, &prompt('a')).await, "d0", "no worker has said anything");

    says(&d1, 3, vec![stored(&prompt('b'))], v1::CacheBatch::DumpEnd);
    until_index(&router, "d1", "exact").await;
    router.until_metric("baton_router_index_sources{state=\"exact\"} 1").await;
    assert_eq!(send(&router, &workers, &prompt('b')).await, "d1");
    assert_eq!(send(&router, &workers, &prompt('a')).await, "d0", "it is believed to have it");

    // An event is lost: the router asks for it, and goes on with what it knows.
    says(&d1, 4, vec![stored(&prompt('c'))], v1::CacheBatch::Events);
    until_index(&router, "d1", "degraded").await;
    assert_eq!(d1.watched(1).await.cache_from, Some(3));
    assert_eq!(send(&router, &workers, &prompt('b')).await, "d1");
    assert_eq!(send(&router, &workers, &prompt('c')).await, "d0");
    // It has lost the event, too: asked once more, it tells everything.
    assert_eq!(d1.watched(2).await.cache_from, None);
    says(&d1, 5, vec![stored(&prompt('e'))], v1::CacheBatch::DumpEnd);
    until_index(&router, "d1", "exact").await;
    assert_eq!(send(&router, &workers, &prompt('e')).await, "d1");
    router.until_metric("baton_router_index_sources{state=\"degraded\"} 0").await;

    // Another life of the worker remembers nothing.
    let address = d1.kill();
    let d1 = FakeWorker::start_at("d1", Role::Decode, 2, address).await;
    d1.set_load(|load| load.num_running = 1);
    router.register(&d1).await;
    let workers = [&d0, &d1];
    assert_eq!(d1.watched(0).await.cache_from, None, "it is asked for everything");
    until_index(&router, "d1", "approximate").await;
    assert_eq!(send(&router, &workers, &prompt('e')).await, "d0");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_worker_held_goes_with_it() {
    let mut router = Router::start(|_| {}).await;
    let d0 = FakeWorker::start("d0", Role::Decode, 1).await;
    router.register(&d0).await;
    says(&d0, 0, vec![stored(&prompt('a'))], v1::CacheBatch::Events);
    router.until_metric("baton_router_index_memberships 7").await;
    router.until_metric("baton_router_index_sources{state=\"exact\"} 1").await;
    // More than its pool of 64 blocks: contained, and not exact any more.
    let many = v1::CacheEvent { stored: (1..=100).collect(), ..v1::CacheEvent::default() };
    says(&d0, 1, vec![many], v1::CacheBatch::Events);
    until_index(&router, "d0", "degraded").await;
    router.until_metric("baton_router_worker_index_source{worker=\"d0\",state=\"degraded\"} 1").await;
    let metrics = router.client.get("/metrics").await.text();
    assert_eq!(metrics.matches("baton_router_worker_index_source{").count(), 1, "it has one state");
    router.until_metric("baton_router_index_memberships 64").await;
    router.withdraw_first().await;
    router.until_metric("baton_router_index_memberships 0").await;
    router.until_metric("baton_router_index_sources{state=\"degraded\"} 0").await;
    let metrics = router.client.get("/metrics").await.text();
    assert!(!metrics.contains("baton_router_worker_index_source{"), "it has left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_may_hold_what_fits_into_its_pool_and_its_tiers() {
    let mut router = Router::start(|_| {}).await;
    let d0 = FakeWorker::start("d0", Role::Decode, 1).await;
    router.register(&d0).await;
    // A pool of 64 blocks.
    let many = v1::CacheEvent { stored: (1..=100).collect(), ..v1::CacheEvent::default() };
    says(&d0, 0, vec![many.clone()], v1::CacheBatch::DumpEnd);
    until_index(&router, "d0", "degraded").await;
    router.until_metric("baton_router_index_memberships 64").await;
    d0.set_load(|load| load.tiers = vec![v1::KvTier { num_slots: 36, ..v1::KvTier::default() }]);
    says(&d0, 1, vec![many], v1::CacheBatch::DumpEnd);
    until_index(&router, "d0", "exact").await;
    router.until_metric("baton_router_index_memberships 100").await;
}
