//! Requests that their first token ends: the prefill worker computes it, and the KV is not needed.

use baton_engine::{Request, SamplingParams};
use baton_worker::KvMemory;

use crate::harness::{decode, expected, generate, prefill, prompt, request};

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_its_first_token_ends_counts_as_finished_on_both_sides() {
    let p = prefill().start().await;
    let d = decode().with(|config| config.kv = KvMemory::Blocks(16)).start().await;
    // The decode worker has no room for its KV, so the first token comes before any grant.
    let sampling = SamplingParams { max_tokens: 1, ..SamplingParams::default() };
    let other = Request { id: "o".into(), prompt: prompt(7, 60).into(), sampling, ..Request::default() };
    let taken = d.worker.engine().reserve(other).await.unwrap();
    let asked = prompt(1, 40);
    let answer = generate(&d.client().await, request(&asked, 1, Some(p.peer()))).await.unwrap();
    assert_eq!(answer.finished(), expected(&asked, 1));
    for worker in [&p, &d] {
        worker.await_metric("baton_handoffs_total{outcome=\"finished\"} 1").await;
        assert!(worker.metrics().await.contains("baton_handoffs_total{outcome=\"cancelled\"} 0\n"));
    }
    p.assert_all_free().await;
    drop(taken);
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_their_first_token_ends_free_every_block_in_every_state_of_the_transfer() {
    let (p, d) = (prefill().start().await, decode().start().await);
    let client = d.client().await;
    for seed in 0..20 {
        let asked = prompt(seed, 1 + seed as usize * 9);
        let answer = generate(&client, request(&asked, 1, Some(p.peer()))).await.unwrap();
        assert_eq!(answer.finished(), expected(&asked, 1));
    }
    p.assert_all_free().await;
    d.assert_all_free().await;
    // The KV of some was committed before the first token came.
    for worker in [&p, &d] {
        let metrics = worker.metrics().await;
        let counted = |outcome: &str| {
            let start = format!("baton_handoffs_total{{outcome=\"{outcome}\"}} ");
            let line = metrics.lines().find_map(|line| line.strip_prefix(&start));
            line.map_or(0, |count| count.parse::<u64>().unwrap())
        };
        assert_eq!(counted("finished") + counted("committed"), 20, "{metrics}");
    }
}
