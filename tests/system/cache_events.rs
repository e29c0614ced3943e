//! What a router's index says of real workers' caches, against what the workers themselves say that they hold: after prompts,
//! evictions and a restart.

use std::{collections::BTreeSet, time::Duration};

use baton_kv_cache::HashRoot;
use baton_proto::{
    v1::{
        CacheBatch, GenerateRequest, SamplingParams, TokenIds, generate_request::Prompt,
        generate_response::Event, inference_client::InferenceClient,
    },
    worker::{InfoRequest, WatchLoadRequest, worker_client::WorkerClient},
};
use futures_util::future::join_all;

use crate::{
    harness::{Cluster, eventually, sum_metric},
    prefix::{BLOCK_SIZE, address_of},
};

const WORKERS: [&str; 2] = ["decode-0", "decode-1"];
/// Full blocks of a prompt. Computing one takes many times as long as a step: so a request goes where its prompt is cached.
const NUM_BLOCKS: usize = 100;
/// One more token than the blocks have: the last token of a prompt is always computed.
const NUM_TOKENS: usize = NUM_BLOCKS * BLOCK_SIZE + 1;
/// Five prompts fit into a pool.
const POOL: &str = "--kv-memory 16M";

fn prompt(nth: usize) -> Vec<u32> {
    (0..NUM_TOKENS).map(|at| 100 + ((at * 37 + nth * 101) % 1900) as u32).collect()
}

/// Everything that a worker has cached, by its own account.
async fn held(address: &str) -> BTreeSet<u64> {
    let mut client = WorkerClient::connect(address.to_owned()).await.expect("the worker listens");
    let everything = WatchLoadRequest { router: 0, cache_events: true, cache_from: None };
    let mut reports = client.watch_load(everything).await.expect("it reports").into_inner();
    let mut held = BTreeSet::new();
    loop {
        let report = reports.message().await.expect("it goes on").expect("it does not end");
        let Some(batch) = report.cache else { continue };
        assert_ne!(batch.kind(), CacheBatch::Events, "what is held comes first");
        held.extend(batch.events.iter().flat_map(|event| &event.stored));
        if batch.kind() == CacheBatch::DumpEnd {
            return held;
        }
    }
}

/// Sends a prompt. Returns how many of its tokens were cached where it was computed.
async fn ask(cluster: &Cluster, nth: usize) -> usize {
    let request = GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: prompt(nth), passages: Vec::new() })),
        sampling: Some(SamplingParams {
            max_tokens: Some(2),
            temperature: Some(0.0),
            ignore_eos: true,
            ..SamplingParams::default()
        }),
        ..GenerateRequest::default()
    };
    let mut client = InferenceClient::connect(cluster.base.clone()).await.expect("the router listens");
    let mut events = client.generate(request).await.expect("the call begins").into_inner();
    let mut num_cached = None;
    while let Some(response) = events.message().await.expect("the call goes on") {
        if let Some(Event::Finished(finished)) = response.event {
            num_cached = finished.usage.map(|usage| usage.cached_tokens as usize);
        }
    }
    num_cached.expect("it says how it finished")
}

/// Waits until the router knows both workers exactly and has as many blocks of them as they hold. Returns what they hold.
async fn until_exact(cluster: &Cluster) -> [BTreeSet<u64>; 2] {
    eventually("an index that holds what the workers hold", Duration::from_secs(120), async || {
        let health = cluster.http.get("/health").await.ok()?.json();
        let workers = health["workers"].as_array().expect("a list");
        let num_exact = workers.iter().filter(|worker| worker["index"] == "exact").count();
        let metrics = cluster.http.get("/metrics").await.ok()?.text;
        let num_known = sum_metric(&metrics, "baton_router_index_memberships", &[]) as usize;
        let held = [
            held(&address_of(cluster, WORKERS[0]).await).await,
            held(&address_of(cluster, WORKERS[1]).await).await,
        ];
        let num_held = held.iter().map(BTreeSet::len).sum::<usize>();
        (num_exact == 2 && num_known == num_held).then_some(held)
    })
    .await
}

/// Asks each prompt that exactly one worker holds. The router must send it there. Returns how many there were.
async fn ask_what_is_held(cluster: &Cluster, root: HashRoot, num_prompts: usize) -> usize {
    let mut num_asked = 0;
    for nth in 0..num_prompts {
        let held = until_exact(cluster).await;
        let blocks: Vec<u64> = root.block_hashes(&prompt(nth), BLOCK_SIZE).map(|hash| hash.short()).collect();
        let num_there = held.map(|held| blocks.iter().take_while(|block| held.contains(block)).count());
        if let [NUM_BLOCKS, 0] | [0, NUM_BLOCKS] = num_there {
            assert_eq!(ask(cluster, nth).await, NUM_BLOCKS * BLOCK_SIZE, "prompt {nth}, held {num_there:?}");
            num_asked += 1;
        }
    }
    num_asked
}

#[tokio::test]
async fn the_index_holds_exactly_what_workers_hold_after_evictions_and_a_restart() {
    let mut cluster = Cluster::new().prefill(0).decode(2).worker_flags(POOL).start().await;
    let address = address_of(&cluster, WORKERS[0]).await;
    let mut client = WorkerClient::connect(address).await.expect("the worker listens");
    let record = client.info(InfoRequest {}).await.expect("it answers").into_inner();
    let revision = record.kv_format.expect("it says what its KV is").model_revision;
    let root = HashRoot::new(&revision, "", "");
    assert!(until_exact(&cluster).await.iter().all(BTreeSet::is_empty));

    // Each worker has room for five. One by one all prompts may go to the worker that was measured first, if steps take less time
    // than expected before.
    let num_prompts = 16;
    for nth in (0..num_prompts).step_by(4) {
        join_all((nth..nth + 4).map(|nth| ask(&cluster, nth))).await;
    }
    let held = until_exact(&cluster).await;
    let num_held = held.iter().map(BTreeSet::len).sum::<usize>();
    assert!(num_held > 5 * NUM_BLOCKS && num_held < num_prompts * NUM_BLOCKS, "{num_held} blocks are held");
    assert!(ask_what_is_held(&cluster, root, num_prompts).await >= 4);

    cluster.kill(WORKERS[0]);
    cluster.start_again(WORKERS[0]);
    cluster.wait_for_workers(0, 2).await;
    let [restarted, other] = until_exact(&cluster).await;
    assert!(restarted.is_empty() && !other.is_empty());
    for nth in num_prompts..num_prompts + 6 {
        ask(&cluster, nth).await;
    }
    assert!(ask_what_is_held(&cluster, root, num_prompts + 6).await >= 4);
}
