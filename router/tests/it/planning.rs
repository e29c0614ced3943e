//! Plans by what workers report of their steps, what counts until a report does, and explained plans.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use baton_cluster::Role;
use baton_proto::v1;
use baton_request::FailureKind;
use serde_json::{Value, json};
use tracing::{Metadata, field::Field, span};

use crate::{
    fake::{FakeWorker, Step, say},
    grpc,
    harness::{Router, SOON},
    index::{blocks, says, until_index},
    model::ids,
    page::Stream,
};

const TEXT: &str = "/v1/completions";

/// Steps of 10 ms, and 10,000 prompt tokens a second.
const STEP: v1::StepLine =
    v1::StepLine { fixed: 0.01, per_token: 1e-4, per_context_token: 1e-6, per_pair: 1e-9, num_steps: 100 };

/// A worker that reports what its steps take and which requests it counts.
pub(crate) async fn reporting(router: &mut Router, id: &str, role: Role) -> FakeWorker {
    let worker = FakeWorker::start(id, role, 1).await;
    worker.set_load(|load| {
        load.step = Some(STEP);
        load.max_step_tokens = 2048;
        load.covered = Some(v1::Covered::default());
    });
    router.register(&worker).await;
    worker
}

fn prompt(first: char, num_tokens: usize) -> Value {
    json!({"prompt": format!("{first}{}", "y".repeat(num_tokens - 1)), "max_tokens": 8})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_counts_until_a_report_covers_it() {
    let mut router = Router::start(|_| {}).await;
    let d0 = reporting(&mut router, "d0", Role::Decode).await;
    let d1 = reporting(&mut router, "d1", Role::Decode).await;
    for worker in [&d0, &d1] {
        worker.script(|_| vec![Step::Hang]);
    }
    let router = Arc::new(router);
    let send = |first: char, num_tokens: usize| {
        let (router, body) = (router.clone(), prompt(first, num_tokens));
        tokio::spawn(async move { router.client.post(TEXT, &body).await.status })
    };
    // Neither report says anything of what the other requests brought.
    let mut running = vec![send('a', 400)];
    let (first, second) = tokio::select! {
        _ = d0.next_arrived() => (&d0, &d1),
        _ = d1.next_arrived() => (&d1, &d0),
    };
    running.push(send('b', 100));
    second.next_arrived().await;
    running.push(send('c', 100));
    second.next_arrived().await;
    let numbers = |worker: &FakeWorker| {
        let tickets = worker.requests().into_iter().map(|request| request.ticket.expect("one"));
        tickets.map(|ticket| (ticket.number, ticket.settled_below)).collect::<Vec<_>>()
    };
    assert_eq!(numbers(first), [(0, 0)]);
    assert_eq!(numbers(second), [(0, 0), (1, 0)]);

    // The report covers the long prompt: the worker says that it has computed it.
    first.set_load(|load| load.covered = Some(v1::Covered { below: 0, numbers: vec![0] }));
    first.set_load(|load| load.num_running = 1);
    tokio::time::timeout(SOON, async {
        loop {
            running.push(send('d', 40));
            let at_first = tokio::select! {
                _ = first.next_arrived() => true,
                _ = second.next_arrived() => false,
            };
            if at_first {
                return;
            }
            // The report has not come yet.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("it is the emptier one");
    let (_, settled_below) = *numbers(first).last().expect("it came");
    assert_eq!(settled_below, 1);
    for worker in [&d0, &d1] {
        worker.release(Step::Finish(v1::FinishReason::Stop));
    }
    for request in running {
        assert_eq!(request.await.expect("no panic"), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_a_stop_string_ends_is_cached_where_it_was_given() {
    let mut router = Router::start(|_| {}).await;
    let d0 = reporting(&mut router, "d0", Role::Decode).await;
    let answer = format!("{}.", "x".repeat(100));
    let tokens = ids(&answer);
    d0.script(move |_| tokens.iter().copied().map(Step::Token).chain([Step::Hang]).collect());
    let compute_ms = async |prompt: String| {
        let body = json!({"prompt": prompt, "max_tokens": 200, "stop": ".", "explain": true});
        let answer = router.client.post(TEXT, &body).await.json();
        answer["plans"][0]["chosen"]["compute_ms"].as_f64().expect("ms")
    };
    compute_ms("abc".to_owned()).await;
    let next = compute_ms(format!("abc{answer} More")).await;
    assert!(next < 15.0, "{next} ms: all but 13 tokens are cached, which take 1.3 ms and the step's 10");
}

/// Workers compute all of it, and cache nothing of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_whose_log_probabilities_were_told_is_not_believed_to_be_cached() {
    let mut router = Router::start(|_| {}).await;
    let _d0 = reporting(&mut router, "d0", Role::Decode).await;
    let compute_ms = async |prompt_logprobs: Option<u32>| {
        let mut body = prompt('a', 400);
        (body["explain"], body["prompt_logprobs"]) = (json!(true), json!(prompt_logprobs));
        let answer = router.client.post(TEXT, &body).await.json();
        answer["plans"][0]["chosen"]["compute_ms"].as_f64().expect("ms")
    };
    compute_ms(Some(0)).await;
    let again = compute_ms(None).await;
    assert!(again > 35.0, "{again} ms: 400 tokens take 40 ms");
    let cached = compute_ms(None).await;
    assert!(cached < 15.0, "{cached} ms: other answers are cached");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_explained_answer_says_how_it_was_planned() {
    let mut router = Router::start(|_| {}).await;
    let decode = reporting(&mut router, "d0", Role::Decode).await;
    let prefill = reporting(&mut router, "p0", Role::Prefill).await;
    decode.script(say("Hello"));
    // Sequences that would wait for the prompt.
    decode.set_load(|load| {
        load.num_decoding = 5;
        load.num_running = 5;
        load.num_context_tokens = 5000;
    });
    let explained = |first: char| {
        let mut body = prompt(first, 400);
        body["explain"] = json!(true);
        body
    };
    let mut plans = Value::Null;
    // The report may not have come yet. Each time another prompt, because a computed one is cached.
    for first in 'a'..='z' {
        let answer = router.client.post(TEXT, &explained(first)).await;
        assert_eq!(answer.status, 200);
        plans = answer.json()["plans"].clone();
        if plans[0]["chosen"]["prefill"] == "p0" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(plans[0]["chosen"]["prefill"], "p0", "{plans}");
    assert_eq!(plans.as_array().map(Vec::len), Some(1), "{plans}");
    let plan = &plans[0];
    assert_eq!(
        (&plan["index"], &plan["attempt"], &plan["chosen"]["decode"]),
        (&json!(0), &json!(0), &json!("d0"))
    );
    let options = plan["options"].as_array().expect("a list");
    assert!(options.iter().any(|option| option["prefill"] == "p0"), "{plan}");
    assert!(options.iter().any(|option| option["prefill"].is_null()), "{plan}");
    for option in options {
        for field in ["queue_ms", "compute_ms", "ttft_ms", "tpot_ms", "harm_ms", "total_ms"] {
            assert!(option[field].is_number(), "{field} in {option}");
        }
    }
    let totals: Vec<f64> = options.iter().map(|option| option["total_ms"].as_f64().expect("ms")).collect();
    assert!(totals.is_sorted(), "{totals:?}");
    let sent = decode.requests();
    let remote = sent.iter().find(|request| request.prefill.is_some()).expect("one was remote");
    assert!(remote.prefill_ticket.is_some() && remote.ticket.is_some());
    drop(prefill);

    // In a stream they come last, and without being asked they do not come.
    let mut body = explained('A');
    body["stream"] = json!(true);
    let events = router.client.post(TEXT, &body).await.events();
    assert_eq!(events.last().expect("events")["plans"].as_array().map(Vec::len), Some(1));
    body["explain"] = json!(false);
    let events = router.client.post(TEXT, &body).await.events();
    assert!(events.iter().all(|event| event.get("plans").is_none()));
    let metrics = router.client.get("/metrics").await.text();
    assert!(metrics.contains("baton_router_ttft_ratio_bucket"), "{metrics}");
    assert!(!metrics.contains("baton_router_predicted_ttft_seconds_count 0"), "{metrics}");
}

/// A tier with room, that takes so long for the KV of a token.
fn tier(recall_token_seconds: f64) -> v1::KvTier {
    v1::KvTier { num_slots: 100, recall_token_seconds, ..v1::KvTier::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_in_a_pool_is_worth_more_than_one_in_a_slow_tier() {
    let mut router = Router::start(|_| {}).await;
    let d0 = reporting(&mut router, "d0", Role::Decode).await;
    let d1 = reporting(&mut router, "d1", Role::Decode).await;
    // d1 has a little to do, which is less than a recall of 399 tokens takes, and more than nothing.
    d1.set_load(|load| (load.num_decoding, load.num_running, load.num_context_tokens) = (1, 1, 100));
    d0.set_load(|load| load.tiers = vec![tier(5e-5)]);
    let body = {
        let mut body = prompt('a', 400);
        body["explain"] = json!(true);
        body
    };
    let stored =
        v1::CacheEvent { stored: blocks(body["prompt"].as_str().unwrap()), ..v1::CacheEvent::default() };
    let pooled = |stored: Vec<u64>| v1::CacheEvent { stored, level: 1, ..v1::CacheEvent::default() };
    says(&d0, 0, vec![stored.clone(), pooled(Vec::new())], v1::CacheBatch::DumpEnd);
    says(&d1, 0, vec![stored.clone()], v1::CacheBatch::DumpEnd);
    until_index(&router, "d0", "exact").await;
    until_index(&router, "d1", "exact").await;
    let answer = router.client.post(TEXT, &body).await.json();
    let plan = &answer["plans"][0];
    assert_eq!(
        (&plan["chosen"]["decode"], &plan["chosen"]["recall_ms"]),
        (&json!("d1"), &json!(0.0)),
        "{plan}"
    );
    let options = plan["options"].as_array().expect("a list");
    let other = options.iter().find(|option| option["decode"] == "d0").expect("it is an option");
    // All but the last token, which is computed. That is 19.95 ms, 0.4 of computing them: so the beginning is computed meanwhile.
    assert_eq!(other["recall_ms"], 13.82, "{plan}");

    // Once it is in the pool of both, the idle one is better.
    let body = {
        let mut body = body.clone();
        body["prompt"] = json!(body["prompt"].as_str().unwrap().replace('a', "b"));
        body
    };
    let stored =
        v1::CacheEvent { stored: blocks(body["prompt"].as_str().unwrap()), ..v1::CacheEvent::default() };
    says(&d0, 1, vec![stored.clone(), pooled(stored.stored.clone())], v1::CacheBatch::DumpEnd);
    says(&d1, 1, vec![stored], v1::CacheBatch::DumpEnd);
    router.until_metric(&format!("baton_router_index_memberships {}", 3 * 25)).await;
    let plan = router.client.post(TEXT, &body).await.json()["plans"][0].clone();
    assert_eq!(plan["chosen"]["decode"], "d0", "{plan}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_is_told_over_grpc_has_the_time_of_the_recall() {
    use v1::{generate_request::Prompt, generate_response::Event};
    let mut router = Router::start(|_| {}).await;
    let d0 = reporting(&mut router, "d0", Role::Decode).await;
    d0.set_load(|load| load.tiers = vec![tier(5e-5)]);
    let text = prompt('a', 400)["prompt"].as_str().expect("a text").to_owned();
    let stored = v1::CacheEvent { stored: blocks(&text), ..v1::CacheEvent::default() };
    let pooled = v1::CacheEvent { level: 1, ..v1::CacheEvent::default() };
    says(&d0, 0, vec![stored, pooled], v1::CacheBatch::DumpEnd);
    until_index(&router, "d0", "exact").await;
    let request =
        v1::GenerateRequest { prompt: Some(Prompt::Text(text)), explain: true, ..Default::default() };
    let mut client = grpc::client(&router).await;
    let mut stream = client.generate(request).await.expect("it begins").into_inner();
    let finished = loop {
        let response = stream.message().await.expect("it goes on").expect("it has an end");
        if let Some(Event::Finished(finished)) = response.event {
            break finished;
        }
    };
    let chosen = finished.plans[0].chosen.as_ref().expect("a way");
    let times = chosen.times.as_ref().expect("the worker says what steps take");
    assert!(times.recall > 0.01 && times.ttft >= times.recall + times.fetch, "{times:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_in_memory_is_worth_more_than_one_on_a_disk() {
    let mut router = Router::start(|_| {}).await;
    let d0 = reporting(&mut router, "d0", Role::Decode).await;
    let d1 = reporting(&mut router, "d1", Role::Decode).await;
    [&d0, &d1]
        .into_iter()
        .for_each(|worker| worker.set_load(|load| load.tiers = vec![tier(1e-6), tier(2e-5)]));
    let mut body = prompt('a', 400);
    body["explain"] = json!(true);
    let stored = blocks(body["prompt"].as_str().unwrap());
    let at =
        |level, num| v1::CacheEvent { stored: stored[..num].to_vec(), level, ..v1::CacheEvent::default() };
    let num = stored.len();
    // Both have all of it, and nothing in their pools. One has it in memory.
    for (worker, num_in_memory) in [(&d0, 0), (&d1, num)] {
        says(worker, 0, vec![at(0, num), at(1, 0), at(2, num_in_memory)], v1::CacheBatch::DumpEnd);
    }
    until_index(&router, "d0", "exact").await;
    until_index(&router, "d1", "exact").await;
    let plan = router.client.post(TEXT, &body).await.json()["plans"][0].clone();
    // All but the last token.
    assert_eq!(
        (&plan["chosen"]["decode"], &plan["chosen"]["recall_ms"]),
        (&json!("d1"), &json!(0.399)),
        "{plan}"
    );
    let options = plan["options"].as_array().expect("a list");
    let other = options.iter().find(|option| option["decode"] == "d0").expect("it is an option");
    assert_eq!(other["recall_ms"], 7.98, "{plan}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_object_store_has_counts_at_every_worker_that_shares_it_also_if_the_one_that_told_it_dies() {
    let mut router = Router::start(|_| {}).await;
    let d0 = reporting(&mut router, "d0", Role::Decode).await;
    let d1 = reporting(&mut router, "d1", Role::Decode).await;
    let bodies = ['a', 'b', 'c'].map(|first| {
        let mut body = prompt(first, 400);
        body["explain"] = json!(true);
        body
    });
    let [a, b, c] = bodies.each_ref().map(|body| blocks(body["prompt"].as_str().unwrap()));
    d0.set_segments(vec![(4, a[..10].to_vec()), (2, a[10..].to_vec())], vec![]);
    d1.set_segments(vec![(0, b[..20].to_vec()), (1, c)], vec![]);
    let shares = |worker: &FakeWorker, recall_token_seconds| {
        let object =
            v1::KvTier { store_name: 7, recall_latency_seconds: 0.002, ..tier(recall_token_seconds) };
        worker.set_load(|load| load.tiers = vec![tier(1e-6), object]);
    };
    // The first that reports the store tells what it has.
    shares(&d0, 1e-5);
    router.until_metric("baton_router_object_store_blocks 25").await;
    shares(&d1, 1e-5);
    d1.set_free_blocks(63);
    router.until_metric("baton_router_worker_free_blocks{worker=\"d1\"} 63").await;
    let plan = async |nth: usize| {
        let plan = router.client.post(TEXT, &bodies[nth]).await.json()["plans"][0].clone();
        let options = plan["options"].as_array().expect("a list").iter();
        let recalls: Vec<_> = options.map(|option| option["recall_ms"].as_f64().expect("ms")).collect();
        (recalls, plan["chosen"]["compute_ms"].as_f64().expect("ms"))
    };
    // All but the last token, and the store's latency. No cache has it.
    let (recalls, compute) = plan(0).await;
    assert_eq!(recalls, [5.99; 2]);
    assert!(compute < 20.0, "{compute} ms for a token");

    // A segment makes room.
    d0.set_segments(vec![], vec![2]);
    router.until_metric("baton_router_object_store_blocks 10").await;
    d0.kill();
    router.until_metric("baton_router_object_store_blocks 45").await;
    let (recalls, compute) = plan(1).await;
    assert_eq!(recalls, [5.2], "320 tokens");
    assert!(compute > 15.0, "{compute} ms for 80 tokens");

    // A store that is not measured is not read.
    shares(&d1, 0.0);
    d1.set_load(|load| load.num_waiting = 3);
    router.until_metric("baton_router_worker_waiting_sequences{worker=\"d1\"} 3").await;
    let (recalls, compute) = plan(2).await;
    assert_eq!(recalls, [0.0]);
    assert!(compute > 40.0, "{compute} ms for 400 tokens");
}

/// As while weights are updated: both kinds serve, and KV stays among workers of one kind.
#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_computed_by_workers_of_the_same_weights() {
    let mut router = Router::start(|_| {}).await;
    let mut workers = Vec::new();
    for (id, role, revision) in [
        ("d1", Role::Decode, "r1"),
        ("d2", Role::Decode, "r2"),
        ("p1", Role::Prefill, "r1"),
        ("p2", Role::Prefill, "r2"),
    ] {
        let mut worker = FakeWorker::start(id, role, 1).await;
        worker.record.kv_format.model_revision = revision.to_owned();
        worker.script(|_| vec![Step::Token(97), Step::Hang]);
        router.register(&worker).await;
        workers.push(worker);
    }
    router.until_metric("baton_router_kv_formats 2").await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let body = json!({"prompt": "abc", "stream": true, "prefill_mode": "remote"}).to_string();
        let header = [("content-type", "application/json")];
        streams.push(router.client.begin("POST", TEXT, &header, body.into()).await);
    }
    for (decode, prefill) in [(&workers[0], &workers[2]), (&workers[1], &workers[3])] {
        let requests = decode.requests();
        assert_eq!(requests.len(), 2);
        for request in requests {
            assert_eq!(request.prefill.expect("it is remote").address, prefill.record.address);
            assert_eq!(request.prefix_source, None);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slos_that_no_request_can_have_are_refused() {
    let (router, _worker) = Router::with_worker().await;
    for (field, value) in [("slo_ttft", json!(0)), ("slo_tpot", json!(-1.5)), ("slo_ttft", json!(-0.0))] {
        let answer = router.client.post(TEXT, &json!({"prompt": "x", field: value})).await;
        assert_eq!(answer.status, 400);
        assert_eq!(answer.json()["error"]["param"], field);
    }
    let fine = json!({"prompt": "x", "slo_ttft": 200, "slo_tpot": 20.5});
    assert_eq!(router.client.post(TEXT, &fine).await.status, 200);
}

/// The messages of warnings of this thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        self.0.lock().unwrap().push(format!("{event:?}"));
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// On one thread, so that all of the router logs to the test.
#[tokio::test]
async fn loads_that_cannot_be_true_are_logged_once_for_each_worker_and_do_no_harm() {
    type Change = fn(&mut v1::Load);
    let changes: [Change; 5] = [
        |load| load.step = Some(v1::StepLine { fixed: f64::NAN, ..STEP }),
        |load| load.step = Some(v1::StepLine { per_token: -1.0, ..STEP }),
        |load| (load.step, load.recent_itl_seconds) = (Some(STEP), f64::INFINITY),
        |load| {
            let rate = v1::LinkRate { latency_seconds: -5.0, ..v1::LinkRate::default() };
            (load.recent_itl_seconds, load.links) = (0.0, vec![rate]);
        },
        |load| (load.links, load.recent_tokens_per_step) = (Vec::new(), f64::NAN),
    ];
    let warnings = Warnings::default();
    let _logged = tracing::subscriber::set_default(warnings.clone());
    for (idx, first) in changes.into_iter().enumerate() {
        let mut router = Router::start(|_| {}).await;
        let worker = reporting(&mut router, &format!("d{idx}"), Role::Decode).await;
        worker.script(say("Hello"));
        let mut events = Stream::open(&router).await;
        for (num_waiting, change) in (1..).zip([first].into_iter().chain(changes)) {
            worker.set_load(|load| {
                change(load);
                load.num_waiting = num_waiting;
            });
            while events.next("cluster").await.expect("a picture")["workers"][0]["num_waiting"] != num_waiting
            {
            }
        }
        assert_eq!(router.client.post(TEXT, &prompt('a', 50)).await.status, 200);
        // Addresses in the text may hold its name, too.
        let name = format!("worker: d{idx},");
        let logged = warnings.0.lock().unwrap().clone();
        let of_worker: Vec<_> = logged.iter().filter(|warning| warning.contains(&name)).collect();
        assert_eq!(of_worker.len(), 1, "{of_worker:?}");
        assert!(of_worker[0].contains("cannot be"), "{of_worker:?}");
    }
}

/// `plan.options` of each attempt whose span begins on this thread.
#[derive(Clone, Default)]
struct AttemptSpans(Arc<Mutex<Vec<Option<String>>>>);

impl tracing::Subscriber for AttemptSpans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.name() == "attempt"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        let mut spans = self.0.lock().unwrap();
        spans.push(None);
        span::Id::from_u64(spans.len() as u64)
    }

    fn record(&self, id: &span::Id, values: &span::Record<'_>) {
        let idx = id.into_u64() as usize - 1;
        values.record(&mut OptionsOf(&mut self.0.lock().unwrap()[idx]));
    }

    fn event(&self, _: &tracing::Event<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

struct OptionsOf<'a>(&'a mut Option<String>);

impl tracing::field::Visit for OptionsOf<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "plan.options" {
            *self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

/// On one thread, so that all spans of the router come to the test.
#[tokio::test]
async fn each_attempt_of_an_explained_request_has_in_its_span_what_it_was_chosen_from() {
    let mut router = Router::start(|_| {}).await;
    let mut workers = Vec::new();
    for id in ["d0", "d1"] {
        let worker = reporting(&mut router, id, Role::Decode).await;
        worker.script(say("Hello"));
        // Then the report has come.
        worker.set_load(|load| load.num_waiting = 1);
        let line = format!("baton_router_worker_waiting_sequences{{worker=\"{id}\"}} 1");
        router.until_metric(&line).await;
        workers.push(worker);
    }
    // The program's first attempt, perhaps in a test beside this one, must not come while only this one records: tracing would take
    // the spans of attempts for ones that are recorded nowhere.
    assert_eq!(router.client.post(TEXT, &prompt('b', 50)).await.status, 200);
    let spans = AttemptSpans::default();
    let _recorded = tracing::subscriber::set_default(spans.clone());
    for worker in &workers {
        worker.script(|request| match request.attempt {
            0 => vec![Step::Refuse(FailureKind::Draining)],
            _ => say("Hello")(request),
        });
    }
    let mut body = prompt('a', 50);
    body["explain"] = json!(true);
    body["n"] = json!(2);
    let answer = router.client.post(TEXT, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let plans = answer["plans"].as_array().expect("it is explained");
    assert_eq!(plans.len(), 4, "two choices, and each is planned again");
    let options: Vec<Value> = plans.iter().map(|plan| plan["options"].clone()).collect();
    assert!(options.iter().all(|options| options[0]["ttft_ms"].is_number()), "{options:?}");
    let read =
        |text: &Option<String>| serde_json::from_str::<Value>(text.as_deref().expect("recorded")).unwrap();
    let recorded: Vec<_> = spans.0.lock().unwrap().iter().map(read).collect();
    assert_eq!(recorded, options);
}
