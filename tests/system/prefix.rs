//! Prefixes that one worker has cached and another one fetches, with real workers and real KV.

use baton_proto::v1::{
    GenerateRequest, PrefillMode, SamplingParams, TokenIds, generate_request::Prompt,
    generate_response::Event, inference_client::InferenceClient,
};

use crate::harness::{Cluster, ClusterBuilder};

pub(crate) const BLOCK_SIZE: usize = 16;

/// A long fetch deadline: a slow machine must not compute a prefix because its fetch was late.
pub(crate) const PATIENT: &str = "--fetch-deadline 60000";

pub(crate) async fn address_of(cluster: &Cluster, id: &str) -> String {
    let loads = cluster.loads().await;
    let worker = loads.iter().find(|worker| worker.worker_id == id);
    worker.unwrap_or_else(|| panic!("no worker {id}")).address.clone()
}

pub(crate) async fn computed(cluster: &Cluster, id: &str) -> f64 {
    let address = address_of(cluster, id).await;
    cluster.metric(&address, "baton_engine_computed_tokens_total", &[]).await
}

/// The greedy answer of `max_tokens` tokens.
pub(crate) async fn answer(
    cluster: &Cluster,
    prompt: &[u32],
    num_tokens: usize,
    mode: PrefillMode,
    salt: &str,
) -> Vec<u32> {
    let request = GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: prompt.to_vec(), passages: Vec::new() })),
        sampling: Some(SamplingParams {
            max_tokens: Some(num_tokens as u32),
            temperature: Some(0.0),
            ignore_eos: true,
            ..SamplingParams::default()
        }),
        cache_salt: salt.into(),
        prefill_mode: mode.into(),
        ..GenerateRequest::default()
    };
    let mut client = InferenceClient::connect(cluster.base.clone()).await.expect("the router listens");
    let mut events = client.generate(request).await.expect("the call begins").into_inner();
    let mut tokens = Vec::new();
    while let Some(response) = events.message().await.expect("the call goes on") {
        if let Some(Event::Output(output)) = response.event {
            tokens.extend(output.token_ids);
        }
    }
    assert_eq!(tokens.len(), num_tokens);
    tokens
}

const NUM_NEXT: usize = 24;

/// A cluster that fetches every long prefix. By time, a busy machine may well find that computing this one is quicker.
fn fetching() -> ClusterBuilder {
    Cluster::new().router_flags("--plan-by constants").worker_flags(PATIENT)
}

fn question() -> Vec<u32> {
    (0..200).map(|idx| 300 + idx * 7 % 900).collect()
}

fn next_question() -> Vec<u32> {
    (0..20).map(|idx| 400 + idx * 3).collect()
}

#[tokio::test]
async fn a_prefill_worker_fetches_the_history_of_a_conversation_from_the_decode_worker() {
    let cluster = fetching().start().await;
    let first = answer(&cluster, &question(), 60, PrefillMode::Local, "a").await;
    assert_eq!(computed(&cluster, "prefill-0").await, 0.0);
    // The last token of an answer is not computed.
    let num_held = (question().len() + first.len() - 1) / BLOCK_SIZE * BLOCK_SIZE;
    let turn = [question(), first, next_question()].concat();
    let fetched = answer(&cluster, &turn, NUM_NEXT, PrefillMode::Remote, "a").await;
    assert_eq!(computed(&cluster, "prefill-0").await, (turn.len() - num_held) as f64);
    let plain = answer(&cluster, &turn, NUM_NEXT, PrefillMode::Local, "b").await;
    assert_eq!(fetched, plain);
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn a_decode_worker_fetches_a_prefix_from_a_prefill_worker() {
    let mut cluster = fetching().decode(2).start().await;
    cluster.kill("decode-1");
    cluster.wait_for_workers(1, 1).await;
    answer(&cluster, &question(), 8, PrefillMode::Remote, "a").await;
    cluster.kill("decode-0");
    cluster.start_again("decode-1");
    cluster.wait_for_workers(1, 1).await;
    let before = computed(&cluster, "prefill-0").await;
    let turn = [question(), next_question()].concat();
    let fetched = answer(&cluster, &turn, NUM_NEXT, PrefillMode::Local, "a").await;
    let num_held = question().len() / BLOCK_SIZE * BLOCK_SIZE;
    let num_computed = (turn.len() - num_held + NUM_NEXT - 1) as f64;
    assert_eq!(computed(&cluster, "decode-1").await, num_computed);
    assert_eq!(computed(&cluster, "prefill-0").await, before, "the source computes nothing");
    let plain = answer(&cluster, &turn, NUM_NEXT, PrefillMode::Local, "b").await;
    assert_eq!(fetched, plain);
    cluster.assert_all_blocks_free().await;
}
