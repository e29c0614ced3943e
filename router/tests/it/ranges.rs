//! A sampling parameter outside its range is refused over HTTP and gRPC with its name, before a worker is called.

use baton_proto::v1::{
    GenerateRequest, SamplingParams, generate_request::Prompt, inference_client::InferenceClient,
};
use serde_json::{Value, json};
use tonic::Code;

use crate::harness::Router;

/// The field, its value over HTTP, and its value over gRPC.
type Case = (&'static str, Value, fn(&mut SamplingParams));

#[tokio::test(flavor = "multi_thread")]
async fn values_out_of_range_are_refused_with_the_name_of_the_field() {
    let (router, worker) = Router::with_worker().await;
    let address = format!("http://{}", router.address);
    let mut grpc = InferenceClient::connect(address).await.unwrap();
    let cases: [Case; 25] = [
        ("max_tokens", json!(0), |s| s.max_tokens = Some(0)),
        ("min_tokens", json!(1000), |s| s.min_tokens = Some(1000)),
        ("temperature", json!(-0.1), |s| s.temperature = Some(-0.1)),
        ("temperature", json!(2.1), |s| s.temperature = Some(2.1)),
        ("top_p", json!(0.0), |s| s.top_p = Some(0.0)),
        ("top_p", json!(-1.0), |s| s.top_p = Some(f32::NAN)),
        ("top_p", json!(1.1), |s| s.top_p = Some(1.1)),
        ("min_p", json!(-0.1), |s| s.min_p = Some(-0.1)),
        ("min_p", json!(1.0), |s| s.min_p = Some(1.0)),
        ("min_p", json!(2.0), |s| s.min_p = Some(2.0)),
        ("repetition_penalty", json!(0.0), |s| s.repetition_penalty = Some(0.0)),
        ("repetition_penalty", json!(101.0), |s| s.repetition_penalty = Some(101.0)),
        ("presence_penalty", json!(-2.1), |s| s.presence_penalty = Some(-2.1)),
        ("presence_penalty", json!(2.1), |s| s.presence_penalty = Some(2.1)),
        ("frequency_penalty", json!(-2.1), |s| s.frequency_penalty = Some(-2.1)),
        ("frequency_penalty", json!(2.1), |s| s.frequency_penalty = Some(2.1)),
        ("logit_bias", json!({"1": 100.5}), |s| s.logit_bias = [(1, 100.5)].into()),
        ("logit_bias", json!({"1": -100.5}), |s| s.logit_bias = [(1, -100.5)].into()),
        ("logit_bias", json!({"259": 1.0}), |s| s.logit_bias = [(259, 1.0)].into()),
        ("stop_token_ids", json!([259]), |s| s.stop_token_ids = vec![259]),
        ("logprobs", json!(21), |s| s.logprobs = Some(21)),
        ("temperature", json!(1e39), |s| s.temperature = Some(f32::INFINITY)),
        ("repetition_penalty", json!(-1.0), |s| s.repetition_penalty = Some(f32::NAN)),
        ("presence_penalty", json!(1e39), |s| s.presence_penalty = Some(f32::NAN)),
        ("max_tokens", json!(512), |s| s.max_tokens = Some(512)),
    ];
    for (field, value, change) in cases {
        let answer = router.client.post("/v1/completions", &json!({"prompt": "x", field: value})).await;
        assert_eq!(answer.status, 400, "{field} {value}: {}", answer.text());
        assert_eq!(answer.json()["error"]["param"], field, "{value}: {}", answer.text());

        let mut sampling = SamplingParams::default();
        change(&mut sampling);
        let prompt = Some(Prompt::Text("x".into()));
        let request = GenerateRequest { prompt, sampling: Some(sampling), ..GenerateRequest::default() };
        let status = grpc.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{field} {value}: {status}");
        // The error for a too small context has OpenAI's wording.
        let names = status.message().starts_with(&format!("{field}: ")) || value == 512;
        assert!(names, "{status} does not name {field}");
    }
    let chat = json!({
        "messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 21,
    });
    let answer = router.client.post("/v1/chat/completions", &chat).await;
    assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some("top_logprobs")));
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0});
    let answer = router.client.post("/v1/chat/completions", &chat).await;
    let param = answer.json()["error"]["param"].clone();
    assert_eq!((answer.status, param.as_str()), (400, Some("max_completion_tokens")));
    assert_eq!(worker.requests().len(), 0, "no worker is asked");
}
