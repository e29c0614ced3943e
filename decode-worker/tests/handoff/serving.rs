//! What a router receives: the same tokens with local and with remote prefill.

use std::path::Path;

use baton_engine::SamplingParams;
use baton_engine_testing::FakeModel;
use baton_handoff::TransportKind;
use baton_request::{Grammar, GrammarKind};
use tonic::Code;

use crate::{
    gate::gate,
    harness::{BLOCK_SIZE, decode, expected, generate, prefill, prompt, request, transports},
};

async fn remote_tokens_are_local_tokens(kind: TransportKind) {
    let p = prefill().transport(kind).start().await;
    let d = decode().transport(kind).start().await;
    let client = d.client().await;
    let block_bytes = FakeModel::new(BLOCK_SIZE).layout.block_bytes() as u64;
    let mut expected_bytes = 0;
    // Shorter than a block, just full, several chunks, a partial last block.
    for (seed, num_tokens) in [(1, 1), (2, 4), (3, 64), (4, 101), (5, 24)] {
        let prompt = prompt(seed, num_tokens);
        let local = generate(&client, request(&prompt, 20, None)).await.unwrap().finished();
        assert_eq!(local, expected(&prompt, 20));
        assert_eq!(d.moved(kind), expected_bytes, "a local prefill moves nothing");

        // The decode worker has cached the prompt's full blocks. Another salt hides them.
        let mut remote = request(&prompt, 20, Some(p.peer()));
        remote.cache_salt = "other".into();
        assert_eq!(generate(&client, remote).await.unwrap().finished(), local, "{num_tokens} tokens");
        expected_bytes += (num_tokens.div_ceil(BLOCK_SIZE)) as u64 * block_bytes;
        assert_eq!(d.moved(kind), expected_bytes, "every block of the prompt travels");
        assert_eq!(p.moved(kind), expected_bytes);
    }
    p.assert_all_free().await;
    d.assert_all_free().await;
    // The prefill worker counts a handoff when it receives the commit, and frees its blocks after that.
    for (worker, direction) in [(&p, "sent"), (&d, "received")] {
        let metrics = worker.metrics().await;
        let bytes = format!(
            "baton_handoff_bytes_total{{transport=\"{kind}\",direction=\"{direction}\"}} {expected_bytes}\n"
        );
        for line in [bytes.as_str(), "baton_handoffs_total{outcome=\"committed\"} 5\n"] {
            assert!(metrics.contains(line), "{line:?} is not in\n{metrics}");
        }
    }
    d.stop().await;
    p.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_tokens_are_local_tokens_over_tcp() {
    remote_tokens_are_local_tokens(TransportKind::Tcp).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_tokens_are_local_tokens_over_rdma() {
    if transports().any(|kind| kind == TransportKind::Rdma) {
        remote_tokens_are_local_tokens(TransportKind::Rdma).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_tokens_are_local_tokens_over_shm() {
    remote_tokens_are_local_tokens(TransportKind::Shm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_the_decode_worker_has_cached_are_not_transferred() {
    let (p, d) = (prefill().start().await, decode().start().await);
    let client = d.client().await;
    let prompt = prompt(9, 64);
    let first = generate(&client, request(&prompt, 8, Some(p.peer()))).await.unwrap();
    let moved = d.moved(TransportKind::Shm);
    assert!(moved > 0);
    let second = generate(&client, request(&prompt, 8, Some(p.peer()))).await.unwrap();
    assert_eq!(second.tokens, first.tokens);
    let again = d.moved(TransportKind::Shm) - moved;
    assert!(again < moved / 4, "{again} of {moved} bytes were transferred again");
    assert!(format!("{:?}", second.end).contains("cached_tokens: 6"), "60 of 64 or so: {second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_continues_where_an_earlier_attempt_stopped() {
    let (p, d) = (prefill().start().await, decode().start().await);
    let client = d.client().await;
    let prompt = prompt(3, 40);
    let whole = expected(&prompt, 30);
    for prefill in [None, Some(p.peer())] {
        let mut rest = request(&prompt, 30, prefill);
        rest.output_token_ids = whole[..13].to_vec();
        rest.attempt = 1;
        assert_eq!(generate(&client, rest).await.unwrap().finished(), whole[13..]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_one_token_needs_no_kv() {
    let (p, d) = (prefill().start().await, decode().start().await);
    let client = d.client().await;
    let prompt = prompt(3, 40);
    let answer = generate(&client, request(&prompt, 1, Some(p.peer()))).await.unwrap();
    assert_eq!(answer.finished(), expected(&prompt, 1));
    p.assert_all_free().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_requests_share_two_small_pools() {
    // A few sequences fill either pool. The others wait.
    let small = |config: &mut baton_worker::WorkerConfig| {
        config.kv = baton_worker::KvMemory::Blocks(40);
        config.max_running = 4;
    };
    let (p, d) = (prefill().with(small).start().await, decode().with(small).start().await);
    let client = d.client().await;
    let mut answers = tokio::task::JoinSet::new();
    for seed in 0..40 {
        let (client, peer) = (client.clone(), p.peer());
        answers.spawn(async move {
            let prompt = prompt(seed, 20 + seed as usize);
            let peer = (seed % 4 != 0).then_some(peer);
            let answer = generate(&client, request(&prompt, 16, peer)).await.unwrap();
            assert_eq!(answer.finished(), expected(&prompt, 16), "request {seed}");
        });
    }
    while let Some(answer) = answers.join_next().await {
        answer.unwrap();
    }
    assert!(d.moved(TransportKind::Shm) > 0);
    p.assert_all_free().await;
    d.assert_all_free().await;
}

/// A request with sampling parameters that our router would refuse.
fn with_sampling(
    mut request: baton_proto::worker::GenerateRequest,
    change: impl FnOnce(&mut baton_proto::worker::Sampling),
) -> baton_proto::worker::GenerateRequest {
    change(request.sampling.as_mut().expect("a request has sampling parameters"));
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_refused_by_name() {
    let (p, d) = (prefill().start().await, decode().start().await);
    let client = d.client().await;
    for peer in [None, Some(p.peer())] {
        let good = || request(&prompt(1, 10), 8, peer.clone());
        let cases = [
            (baton_proto::worker::GenerateRequest { request_id: String::new(), ..good() }, "request_id"),
            (baton_proto::worker::GenerateRequest { sampling: None, ..good() }, "sampling is missing"),
            (request(&[], 8, peer.clone()), "prompt: has no tokens"),
            (request(&[64], 8, peer.clone()), "prompt: token id 64 is outside"),
            (request(&prompt(1, 256), 8, peer.clone()), "leave no room in a context of 256"),
            (request(&prompt(1, 10), 0, peer.clone()), "max_tokens: 0"),
            (with_sampling(good(), |sampling| sampling.min_p = 1.0), "min_p: 1 is not"),
            (with_sampling(good(), |sampling| sampling.temperature = 2.5), "temperature: 2.5 is not"),
        ];
        for (request, message) in cases {
            let status = generate(&client, request).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
            assert!(status.message().contains(message), "{:?} does not say {message:?}", status.message());
        }
    }
    p.assert_all_free().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_measured_under_the_names_of_vllm() {
    let (p, d) = (prefill().start().await, decode().start().await);
    let client = d.client().await;
    let prompt = prompt(9, 64);
    let before = d.metrics().await;
    for series in ["vllm:request_success_total{", "finished_reason=\"stop\"", "vllm:num_preemptions_total{"] {
        assert!(before.contains(series), "{series} is not there from the start:\n{before}");
    }
    // The second one finds all blocks but the last in the cache. Nothing is found under another salt.
    for _ in 0..2 {
        generate(&client, request(&prompt, 8, None)).await.unwrap().finished();
    }
    let mut remote = request(&prompt, 8, Some(p.peer()));
    remote.cache_salt = "other".into();
    generate(&client, remote).await.unwrap().finished();
    p.assert_all_free().await;
    d.assert_all_free().await;

    let length = "finished_reason=\"length\"";
    for (name, label, of_prefill, of_decode) in [
        ("vllm:prompt_tokens_total", "", 64.0, 192.0),
        ("vllm:generation_tokens_total", "", 1.0, 24.0),
        ("vllm:prefix_cache_queries_total", "", 64.0, 128.0),
        ("vllm:prefix_cache_hits_total", "", 0.0, (64 - BLOCK_SIZE) as f64),
        ("vllm:request_success_total", length, 1.0, 3.0),
        ("vllm:time_to_first_token_seconds_count", "", 1.0, 3.0),
        ("vllm:request_queue_time_seconds_count", "", 1.0, 3.0),
        ("vllm:request_prefill_time_seconds_count", "", 1.0, 2.0),
        ("vllm:inter_token_latency_seconds_count", "", 0.0, 21.0),
        ("vllm:e2e_request_latency_seconds_count", "", 1.0, 3.0),
        ("vllm:num_requests_running", "", 0.0, 0.0),
        ("vllm:kv_cache_usage_perc", "", 0.0, 0.0),
        ("vllm:cache_config_info", "block_size=", 1.0, 1.0),
    ] {
        for (worker, expected) in [(&p, of_prefill), (&d, of_decode)] {
            let metrics = worker.metrics().await;
            let line =
                metrics.lines().find(|line| line.starts_with(&format!("{name}{{")) && line.contains(label));
            let line = line.unwrap_or_else(|| panic!("no {name} in\n{metrics}"));
            assert!(line.contains("model_name=\"") && line.contains("engine=\"0\""), "{line}");
            assert_eq!(line.rsplit(' ').next().unwrap().parse(), Ok(expected), "{line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_comes_during_a_step_waits_under_both_names() {
    let (steps, hook) = gate();
    let d = decode().hook(hook).start().await;
    let mut client = d.client().await;
    let first = client.generate(request(&prompt(1, 8), 4, None)).await.unwrap();
    tokio::task::block_in_place(|| steps.pass(0));
    let second = client.generate(request(&prompt(2, 8), 4, None)).await.unwrap();
    let metrics = d.metrics().await;
    let waiting = ["baton_engine_waiting ", "vllm:num_requests_waiting{"].map(|name| {
        let line = metrics.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        value.unwrap_or_else(|| panic!("no {name} in\n{metrics}"))
    });
    assert!(waiting[0] >= 1.0 && waiting[0] == waiting[1], "{waiting:?}");
    drop((first, second));
    steps.open();
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_lost_only_its_end_ends_where_its_grammar_does() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let (p, d) = (prefill().model(dir.clone()).start().await, decode().model(dir).start().await);
    let client = d.client().await;
    // Without a stop id, as with `ignore_eos`, only the grammar says that the answer has ended.
    let grammar = Grammar::new(GrammarKind::Regex, "yes|no");
    let sampling = SamplingParams { max_tokens: 20, grammar: Some(grammar), ..SamplingParams::default() };
    for peer in [None, Some(p.peer())] {
        let mut asked = request(&prompt(1, 9), 20, peer);
        asked.sampling = Some((&sampling).into());
        let tokens = generate(&client, asked.clone()).await.unwrap().finished();
        assert!((2..20).contains(&tokens.len()), "{tokens:?}");
        asked.output_token_ids = tokens;
        assert!(generate(&client, asked).await.unwrap().finished().is_empty());
    }
    p.assert_all_free().await;
    d.assert_all_free().await;
}
