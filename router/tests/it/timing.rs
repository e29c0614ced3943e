//! What a request took, in every API.

use baton_proto::v1;
use serde_json::{Value, json};

use crate::{
    client::named_events,
    fake::{FakeWorker, Step},
    grpc::client,
    harness::Router,
    model::{END, MODEL},
};

/// Two tokens after a handoff.
async fn timed() -> (Router, FakeWorker) {
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| {
        vec![
            Step::Timed(65, [Some(0.25), Some(0.5), None]),
            Step::Timed(66, [None, None, Some(0.125)]),
            Step::Token(END),
            Step::Finish(v1::FinishReason::Stop),
        ]
    });
    (router, worker)
}

fn check(timing: &Value) {
    let [timing] = &timing.as_array().expect("a list")[..] else { panic!("{timing}") };
    assert_eq!((&timing["index"], &timing["queue_ms"]), (&json!(0), &json!(250.0)));
    assert_eq!((&timing["prefill_ms"], &timing["exposed_ms"]), (&json!(500.0), &json!(125.0)));
    assert_eq!((&timing["prefill_worker"], &timing["decode_worker"]), (&json!("d0"), &json!("d0")));
    assert!(timing["ttft_ms"].as_f64().unwrap() > 0.0 && timing["tpot_ms"].as_f64().unwrap() >= 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_api_tells_what_a_request_took_if_asked() {
    let (router, _worker) = timed().await;
    let message = json!([{"role": "user", "content": "x"}]);
    for (path, base) in [
        ("/v1/chat/completions", json!({"messages": message})),
        ("/v1/completions", json!({"prompt": "x"})),
        ("/v1/responses", json!({"input": "x"})),
        ("/v1/messages", json!({"messages": message, "max_tokens": 9, "model": MODEL})),
    ] {
        let mut body = base;
        assert!(router.client.post(path, &body).await.json().get("timing").is_none(), "{path}");
        body["include_timing"] = json!(true);
        check(&router.client.post(path, &body).await.json()["timing"]);
        body["stream"] = json!(true);
        let answer = router.client.post(path, &body).await;
        let events = if path.ends_with("completions") { answer.events() } else { named_events(&answer) };
        let told = events.iter().find_map(|event| event.get("timing").or(event["response"].get("timing")));
        check(told.unwrap_or_else(|| panic!("{path}: {events:?}")));
    }
    let mut client = client(&router).await;
    let request = v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::Text("x".into())),
        include_timing: true,
        ..Default::default()
    };
    let mut stream = client.generate(request).await.expect("accepted").into_inner();
    let mut told = None;
    while let Some(response) = stream.message().await.expect("no error") {
        if let Some(v1::generate_response::Event::Finished(finished)) = response.event {
            told = finished.timing;
        }
    }
    let told = told.expect("the timing was asked for");
    assert_eq!((told.queue, told.prefill, told.exposed), (Some(0.25), Some(0.5), Some(0.125)));
    assert!(told.ttft.is_some() && told.tpot.is_some() && told.decode_worker == "d0");
}
