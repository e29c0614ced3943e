use std::{collections::HashMap, time::Duration};

use baton_cluster::Role;
use baton_proto::{
    v1::{
        self, AbortRequest, ChatMessage, ChatMessages, FinishReason, GenerateRequest, LoadsRequest,
        ModelInfoRequest, SamplingParams, TokenIds, TokenRange, generate_request::Prompt,
        generate_response::Event, inference_client::InferenceClient,
    },
    worker::failed::Kind,
};
use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper_util::{client::legacy, rt::TokioExecutor};
use prost::Message;
use serde_json::json;
use tokio_stream::StreamExt;
use tonic::{
    Code,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    fake::{FakeWorker, Step, say},
    harness::{Router, SOON},
    model::{END, ids},
    planning::reporting,
};

async fn channel(router: &Router) -> Channel {
    let address = format!("http://{}", router.address);
    tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap()
}

pub(crate) async fn client(router: &Router) -> InferenceClient<Channel> {
    InferenceClient::new(channel(router).await)
}

/// A client that shows this key.
pub(crate) async fn client_with(
    router: &Router,
    key: &str,
) -> InferenceClient<InterceptedService<Channel, impl Interceptor + use<>>> {
    let authorization: MetadataValue<Ascii> = format!("Bearer {key}").parse().unwrap();
    InferenceClient::with_interceptor(channel(router).await, move |mut request: tonic::Request<()>| {
        request.metadata_mut().insert("authorization", authorization.clone());
        Ok(request)
    })
}

fn text(prompt: &str) -> GenerateRequest {
    GenerateRequest { prompt: Some(Prompt::Text(prompt.into())), ..GenerateRequest::default() }
}

/// The text of each choice, and its finish reason.
async fn generate(
    client: &mut InferenceClient<Channel>,
    request: GenerateRequest,
) -> Result<HashMap<u32, (String, v1::Finished)>, tonic::Status> {
    let mut stream = client.generate(request).await?.into_inner();
    let mut texts: HashMap<u32, String> = HashMap::new();
    let mut ended = HashMap::new();
    while let Some(response) = stream.next().await {
        let response = response?;
        match response.event.unwrap() {
            Event::Output(output) => texts.entry(response.index).or_default().push_str(&output.text),
            Event::Finished(finished) => {
                let text = texts.remove(&response.index).unwrap_or_default();
                assert!(ended.insert(response.index, (text, finished)).is_none(), "one end per choice");
            }
        }
    }
    Ok(ended)
}

/// Its window is full while another stream of the connection is read, so nothing else ends it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_not_read_beside_others_ends_with_its_request() {
    let (router, worker) =
        Router::with_worker_and(|config| config.unread_timeout = Duration::from_secs(1)).await;
    worker.script(|request| match request.prompt_token_ids.len() {
        1 => {
            // In several frames, of which hyper takes the first one and waits with the second.
            let tokens =
                [vec![Step::Token(97); 50], vec![Step::Progress(Duration::from_millis(20))]].concat();
            [vec![tokens; 8].concat(), vec![Step::Silence]].concat()
        }
        _ => say("Hello")(request),
    });
    let address = format!("http://{}", router.address);
    let endpoint =
        tonic::transport::Endpoint::from_shared(address).unwrap().initial_stream_window_size(1 << 10);
    let mut client = InferenceClient::new(endpoint.connect().await.unwrap());
    let mut unread = client.generate(text("x")).await.unwrap().into_inner();
    let mut waiting = client
        .generate(GenerateRequest { request_id: "waiting".into(), ..text("x") })
        .await
        .unwrap()
        .into_inner();
    let read = async { while waiting.next().await.unwrap().is_ok() {} };
    // One that is read waits for its next token for as long.
    let is_over = tokio::time::timeout(Duration::from_secs(3), read).await.is_ok();
    assert!(!is_over);
    router.until_metric("baton_router_requests_running 1").await;
    assert_eq!(generate(&mut client, text("xy")).await.unwrap()[&0].0, "Hello");
    let last = loop {
        if let Err(error) = unread.next().await.expect("it does not end well") {
            break error;
        }
    };
    assert_eq!(last.code(), Code::Internal, "{last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn generates_from_text_chat_and_ids() {
    let (router, worker) = Router::with_worker().await;
    let mut client = client(&router).await;
    let message = ChatMessage { role: "user".into(), content: "Hi".into(), ..Default::default() };
    let message_of = |role: &str| ChatMessage { role: role.into(), ..message.clone() };
    let chat =
        |role: &str| Prompt::Chat(ChatMessages { messages: vec![message_of(role)], ..Default::default() });
    let prompts = [
        (Prompt::Text("Hi".into()), ids("Hi")),
        (Prompt::TokenIds(TokenIds { ids: vec![1, 2], passages: Vec::new() }), vec![1, 2]),
        (chat("user"), vec![257, 72, 105, 258]),
        (chat("developer"), [ids("<|system|>Hi"), vec![258]].concat()),
        (chat("system"), [ids("<|system|>Hi"), vec![258]].concat()),
    ];
    for (prompt, tokens) in prompts {
        let request = GenerateRequest { prompt: Some(prompt), ..GenerateRequest::default() };
        let mut ended = generate(&mut client, request).await.unwrap();
        let (text, finished) = ended.remove(&0).unwrap();
        assert_eq!(text, "Hello");
        assert_eq!(finished.reason(), FinishReason::Stop);
        let usage = v1::Usage {
            prompt_tokens: tokens.len() as u32,
            completion_tokens: 6,
            cached_tokens: 3.min(tokens.len() as u32),
            ..v1::Usage::default()
        };
        assert_eq!(finished.usage, Some(usage));
        assert_eq!(worker.requests().last().unwrap().prompt_token_ids, tokens);
    }
    let sampling = worker.requests()[0].sampling.clone().unwrap();
    assert_eq!(sampling.max_tokens, 510, "what is left of the context");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_attempt_blends_a_prompt_whose_log_probabilities_are_asked_for() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|request| {
        let mut steps = say("Hello")(request);
        if request.attempt == 0 {
            let first = steps.iter().position(|step| matches!(step, Step::Token(_))).expect("a token");
            steps.truncate(first + 1);
            steps.push(Step::Fail(Kind::Internal));
        }
        steps
    });
    let mut client = client(&router).await;
    for (prompt_logprobs, is_blended) in [(None, true), (Some(1), false)] {
        let passages = vec![TokenRange { start: 0, end: 2 }];
        let request = GenerateRequest {
            prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![1, 2, 3], passages })),
            sampling: Some(SamplingParams { prompt_logprobs, ..SamplingParams::default() }),
            blend: Some(v1::Blend { mode: Some(v1::blend::Mode::Ratio(0.5)) }),
            ..GenerateRequest::default()
        };
        assert_eq!(generate(&mut client, request).await.unwrap()[&0].0, "Hello");
        let [.., first, second] = &worker.requests()[..] else { panic!("asked twice") };
        assert_eq!((first.output_token_ids.len(), second.output_token_ids.len()), (0, 1));
        assert_eq!((first.blend.is_some(), second.blend.is_some()), (is_blended, is_blended));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_prompt_gets_a_ratio_while_audits_of_a_worker_have_closed_blending() {
    for (blend_closed, ratio) in [(false, Some(0.5)), (true, None)] {
        let mut router = Router::start(|_| {}).await;
        let worker = FakeWorker::start("d0", Role::Decode, 1).await;
        worker.set_load(|load| load.blend_closed = blend_closed);
        router.register(&worker).await;
        worker.script(say("Hello"));
        let passages = vec![TokenRange { start: 0, end: 2 }];
        let request = GenerateRequest {
            prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![1, 2, 3], passages })),
            blend: Some(v1::Blend { mode: Some(v1::blend::Mode::Ratio(0.5)) }),
            ..GenerateRequest::default()
        };
        generate(&mut client(&router).await, request).await.unwrap();
        let blend = worker.requests()[0].blend.clone().expect("it has passages");
        assert_eq!(blend.ratio, ratio);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_choice_ends_with_its_plans_if_they_are_asked_for() {
    let mut router = Router::start(|_| {}).await;
    let worker = reporting(&mut router, "d0", Role::Decode).await;
    worker.script(say("Hello"));
    let mut client = client(&router).await;
    let answers = generate(&mut client, GenerateRequest { n: 2, explain: true, ..text("Hi") }).await.unwrap();
    assert_eq!(answers.len(), 2);
    for (_, finished) in answers.values() {
        let [plan] = &finished.plans[..] else { panic!("{finished:?}") };
        let chosen = plan.chosen.as_ref().unwrap();
        assert_eq!((plan.attempt, &*chosen.decode, &chosen.prefill), (0, "d0", &None));
        let times = chosen.times.as_ref().unwrap();
        assert!(times.ttft > 0.0 && times.total >= times.ttft, "{times:?}");
        assert_eq!(plan.options.len(), 1, "{plan:?}");
    }
    let answers = generate(&mut client, text("Hi")).await.unwrap();
    assert!(answers.values().all(|(_, finished)| finished.plans.is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_and_choices() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("one two"));
    let request = GenerateRequest { n: 2, stop: vec![" t".into()], ..text("x") };
    let ended = generate(&mut client(&router).await, request).await.unwrap();
    for index in 0..2 {
        let (text, finished) = &ended[&index];
        assert_eq!((text.as_str(), finished.stop.as_deref()), ("one", Some(" t")));
        assert_eq!(finished.reason(), FinishReason::Stop);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_request_ends_with_that_reason() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| vec![Step::Token(97), Step::Hang]);
    let mut client = client(&router).await;
    let request = GenerateRequest { request_id: "mine".into(), ..text("x") };
    let mut stream = client.generate(request.clone()).await.unwrap().into_inner();
    let first = stream.next().await.unwrap().unwrap();
    assert_eq!(first.request_id, "mine");

    let twice = client.generate(request).await.unwrap_err();
    assert_eq!(twice.code(), Code::AlreadyExists);
    client.abort(AbortRequest { request_id: "mine".into() }).await.unwrap();
    let last = stream.next().await.unwrap().unwrap();
    let Some(Event::Finished(finished)) = last.event else { panic!("{last:?}") };
    assert_eq!(finished.reason(), FinishReason::Abort);
    assert!(stream.next().await.is_none());
    worker.next_dropped().await;
    router.until_metric("baton_router_requests_running 0").await;
    let gone = client.abort(AbortRequest { request_id: "mine".into() }).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_get_the_right_status() {
    let (router, worker) = Router::with_worker_and(|config| config.max_body_bytes = 2000).await;
    let mut client = client(&router).await;
    let sampling = |sampling| GenerateRequest { sampling: Some(sampling), ..text("x") };
    let none = SamplingParams::default();
    let cases = [
        (GenerateRequest::default(), Code::InvalidArgument, "prompt is missing"),
        (text(""), Code::InvalidArgument, "no tokens"),
        (text(&"x".repeat(600)), Code::InvalidArgument, "512 tokens"),
        (text(&"x".repeat(3000)), Code::ResourceExhausted, "message length too large"),
        (GenerateRequest { model: "other".into(), ..text("x") }, Code::NotFound, "other"),
        (GenerateRequest { n: 129, ..text("x") }, Code::InvalidArgument, "at most 128"),
        (GenerateRequest { kv_wire: 9, ..text("x") }, Code::InvalidArgument, "kv_wire: 9"),
        (GenerateRequest { kv_wire: 2, ..text("x") }, Code::InvalidArgument, "3 (int8) and 4 (int4)"),
        (
            GenerateRequest { request_id: "x".repeat(129), ..text("x") },
            Code::InvalidArgument,
            "128 characters",
        ),
        (
            GenerateRequest { request_id: "x\n2026-01-01 INFO planned".into(), ..text("x") },
            Code::InvalidArgument,
            "graphic ASCII",
        ),
        (GenerateRequest { request_id: "é".into(), ..text("x") }, Code::InvalidArgument, "graphic ASCII"),
        (
            GenerateRequest {
                prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![259], passages: Vec::new() })),
                ..text("x")
            },
            Code::InvalidArgument,
            "vocabulary",
        ),
        (
            GenerateRequest {
                prompt: Some(Prompt::Chat(ChatMessages {
                    messages: vec![ChatMessage { role: "evil".into(), ..Default::default() }],
                    ..Default::default()
                })),
                ..text("x")
            },
            Code::InvalidArgument,
            "no evil",
        ),
        (
            sampling(SamplingParams { temperature: Some(f32::NAN), ..none.clone() }),
            Code::InvalidArgument,
            "temperature",
        ),
        (
            sampling(SamplingParams { temperature: Some(-1.0), ..none.clone() }),
            Code::InvalidArgument,
            "temperature",
        ),
        (
            sampling(SamplingParams { max_tokens: Some(0), ..none.clone() }),
            Code::InvalidArgument,
            "max_tokens",
        ),
        (
            sampling(SamplingParams { logit_bias: [(1, f32::NAN)].into(), ..none }),
            Code::InvalidArgument,
            "logit_bias",
        ),
    ];
    for (request, code, message) in cases {
        let status = generate(&mut client, request).await.unwrap_err();
        assert_eq!(status.code(), code, "{message}: {status}");
        assert!(status.message().contains(message), "{message}: {status}");
    }
    assert_eq!(worker.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_numbers_of_enums_are_refused_by_their_field() {
    let (router, worker) = Router::with_worker().await;
    let mut client = client(&router).await;
    let message = ChatMessage { role: "user".into(), content: "Hi".into(), ..Default::default() };
    let chat =
        |chat: ChatMessages| GenerateRequest { prompt: Some(Prompt::Chat(chat)), ..Default::default() };
    let choice = v1::ToolChoice { mode: 9, name: String::new() };
    let control = || Some(v1::CacheControl { priority: 9, ttl_seconds: None });
    let part = v1::ContentPart { text: "Hi".into(), cache_control: control(), ..Default::default() };
    let with_part = ChatMessage { parts: vec![part], ..message.clone() };
    let grammar = |kind| {
        let grammar = v1::Grammar { kind, text: "a".into() };
        let sampling = SamplingParams { grammar: Some(grammar), ..SamplingParams::default() };
        GenerateRequest { sampling: Some(sampling), ..text("x") }
    };
    let cases = [
        (GenerateRequest { prefill_mode: 9, ..text("x") }, "prefill_mode: 9 is"),
        (GenerateRequest { speculation_mode: -1, ..text("x") }, "speculation_mode: -1 is"),
        (GenerateRequest { cache_control: control(), ..text("x") }, "cache_control.priority: 9 is"),
        (
            chat(ChatMessages { messages: vec![with_part], ..Default::default() }),
            "messages[0].parts[0].cache_control.priority: 9 is",
        ),
        (
            chat(ChatMessages { messages: vec![message], tool_choice: Some(choice), ..Default::default() }),
            "tool_choice.mode: 9 is",
        ),
        (grammar(9), "grammar.kind: 9 is"),
        (grammar(0), "grammar.kind: it is missing"),
    ];
    for (request, message) in cases {
        let status = generate(&mut client, request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{message}: {status}");
        assert!(status.message().starts_with(message), "{message}: {status}");
    }
    assert_eq!(worker.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_without_a_journal_resumes_nothing() {
    let (router, _worker) = Router::with_worker().await;
    let resume = v1::ResumeRequest { request_id: "mine".into(), next_token_idx: 0 };
    let status = client(&router).await.resume(resume).await.err().unwrap();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("--durable"), "{status}");
    let answer = router.client.get("/v1/streams/mine").await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "stream_not_durable");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_workers_it_is_unavailable() {
    let router = Router::start(|_| {}).await;
    let status = generate(&mut client(&router).await, text("x")).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "no decode worker is registered"));
    assert_eq!(status.metadata().get("retry-after").unwrap(), "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_has_the_code_and_the_field_of_an_error_over_http() {
    let (router, worker) = Router::with_worker_and(|config| config.max_attempts = 1).await;
    worker.script(|_| vec![Step::Token(97), Step::Break]);
    let mut client = client(&router).await;
    for (request, code, param) in [
        (text(&"x".repeat(600)), Some("context_length_exceeded"), Some("text")),
        (GenerateRequest { model: "other".into(), ..text("x") }, Some("model_not_found"), Some("model")),
        (GenerateRequest { n: 129, ..text("x") }, None, Some("n")),
        // After the first token.
        (text("x"), Some("service_unavailable"), None),
    ] {
        let status = generate(&mut client, request).await.unwrap_err();
        let said = ["baton-code", "baton-param"].map(|name| status.metadata().get(name)?.to_str().ok());
        assert_eq!(said, [code, param], "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tokenizers_end_ends_answers_and_an_end_that_the_model_lacks_is_ignored() {
    let (router, worker) = Router::with_worker_and(|config| {
        let file = config.model.join("generation_config.json");
        std::fs::write(file, r#"{"eos_token_id": [257, 9999]}"#).expect("the directory is writable");
    })
    .await;
    let mut client = client(&router).await;
    let info = client.model_info(ModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.eos_token_ids, [257, END]);
    generate(&mut client, text("x")).await.unwrap();
    let sampling = worker.requests()[0].sampling.clone().unwrap();
    assert_eq!(sampling.stop_token_ids, [END, 257]);
}

#[tokio::test(flavor = "multi_thread")]
async fn model_info_and_loads() {
    let mut router = Router::start(|_| {}).await;
    let decode = FakeWorker::start("d0", Role::Decode, 1).await;
    decode.set_load(|load| {
        load.covered = Some(v1::Covered { below: 7, numbers: Vec::new() });
        load.is_home_of_another = true;
    });
    router.register(&decode).await;
    let mut client = client(&router).await;
    let info = client.model_info(ModelInfoRequest {}).await.unwrap().into_inner();
    let expected = v1::ModelInfoResponse {
        model: "bytes".into(),
        architecture: "LlamaForCausalLM".into(),
        context_length: Some(512),
        vocab_size: 259,
        eos_token_ids: vec![END],
        has_chat_template: true,
    };
    assert_eq!(info, expected);
    let loads = client.loads(LoadsRequest {}).await.unwrap().into_inner();
    let worker = &loads.workers[0];
    assert_eq!((worker.worker_id.as_str(), worker.role.as_str()), ("d0", "decode"));
    let load = worker.load.as_ref().unwrap();
    assert_eq!(load.num_total_blocks, 64);
    // What it tells the router alone.
    assert!(load.covered.is_none() && !load.is_home_of_another, "{load:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_context_that_is_not_known_has_no_length() {
    let mut router = Router::start(|config| {
        let file = config.model.join("config.json");
        std::fs::write(file, r#"{"vocab_size": 259}"#).expect("the directory is writable");
    })
    .await;
    let mut client = client(&router).await;
    let worker = FakeWorker::start("d0", Role::Decode, 1).await;
    for length in [None, Some(512)] {
        if length.is_some() {
            router.register(&worker).await;
        }
        let info = client.model_info(ModelInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(info.context_length, length);
        let model = router.client.get("/v1/models/bytes").await.json();
        let tokenized = router.client.post("/tokenize", &json!({"prompt": "x"})).await.json();
        assert_eq!([&model["max_model_len"], &tokenized["max_model_len"]], [&json!(length); 2]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn health_follows_readiness() {
    let mut router = Router::start(|_| {}).await;
    let mut health = HealthClient::new(channel(&router).await);
    let ask = |service: &str| HealthCheckRequest { service: service.into() };
    assert_eq!(health.check(ask("other")).await.unwrap_err().code(), Code::NotFound);
    let mut watched = health.watch(ask("baton.v1.Inference")).await.unwrap().into_inner();
    assert_eq!(watched.next().await.unwrap().unwrap().status(), ServingStatus::NotServing);

    let worker = crate::fake::FakeWorker::start("d0", baton_cluster::Role::Decode, 1).await;
    router.register(&worker).await;
    assert_eq!(watched.next().await.unwrap().unwrap().status(), ServingStatus::Serving);
    assert_eq!(health.check(ask("")).await.unwrap().into_inner().status(), ServingStatus::Serving);
    router.withdraw_first().await;
    assert_eq!(watched.next().await.unwrap().unwrap().status(), ServingStatus::NotServing);

    router.begin_shutdown();
    assert_eq!(watched.next().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    assert!(watched.next().await.is_none(), "a watcher does not keep the server from ending");
    drop(health);
    router.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_health_are_bounded() {
    let router = Router::start(|_| {}).await;
    let mut health = HealthClient::new(channel(&router).await);
    let all = HealthCheckRequest::default;
    let mut open = Vec::new();
    for _ in 0..1024 {
        open.push(health.watch(all()).await.unwrap());
    }
    let refused = health.watch(all()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(health.check(all()).await.is_ok());
    open.pop();
    let asking = async {
        while health.watch(all()).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, asking).await.expect("a stream that was closed makes room");
}

#[tokio::test(flavor = "multi_thread")]
async fn reflection_lists_the_services_in_both_versions() {
    let (router, _worker) = Router::with_worker().await;
    let channel = channel(&router).await;
    macro_rules! names {
        ($version:ident) => {{
            use tonic_reflection::pb::$version::{
                ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
                server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
            };
            let request = ServerReflectionRequest {
                host: String::new(),
                message_request: Some(MessageRequest::ListServices(String::new())),
            };
            let mut client = ServerReflectionClient::new(channel.clone());
            let mut answers =
                client.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
            let answer = answers.next().await.unwrap().unwrap();
            let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
                panic!("{answer:?}")
            };
            list.service.into_iter().map(|service| service.name).collect::<Vec<_>>()
        }};
    }
    for names in [names!(v1), names!(v1alpha)] {
        for service in ["baton.v1.Inference", "grpc.health.v1.Health"] {
            assert!(names.iter().any(|name| name == service), "{names:?}");
        }
    }
}

/// A status is a header, of which clients take 8 to 16 KiB.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_status_quotes_is_cut() {
    let (router, _worker) = Router::with_worker().await;
    let request = GenerateRequest { model: "é".repeat(50_000), ..text("x") };
    let status = generate(&mut client(&router).await, request).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound, "{status}");
    assert!(status.message().contains("éé") && status.message().len() <= 2048, "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn values_in_strings_count_as_what_they_take() {
    let (router, _worker) = Router::with_worker_and(|config| config.max_bodies_bytes = 100_000).await;
    let mut client = client(&router).await;
    let mut ask = async |num: usize, of_tool: bool| {
        let json = format!("{{\"a\": [{}]}}", vec!["{}"; num].join(","));
        let call = v1::ToolCall { name: "f".into(), arguments: json.clone(), ..v1::ToolCall::default() };
        let message = ChatMessage {
            role: "assistant".into(),
            content: "x".repeat(512),
            tool_calls: if of_tool { vec![] } else { vec![call] },
            ..ChatMessage::default()
        };
        let tool = v1::Tool { name: "f".into(), parameters: json, ..v1::Tool::default() };
        let tools = if of_tool { vec![tool] } else { vec![] };
        let chat = ChatMessages { messages: vec![message], tools, ..ChatMessages::default() };
        let request = GenerateRequest { prompt: Some(Prompt::Chat(chat)), ..GenerateRequest::default() };
        generate(&mut client, request).await.unwrap_err().code()
    };
    for of_tool in [true, false] {
        assert_eq!(ask(400, of_tool).await, Code::ResourceExhausted);
        assert_eq!(ask(10, of_tool).await, Code::InvalidArgument, "too long a prompt");
    }
    router.until_metric("baton_router_body_bytes 0").await;
}

type Raw = BoxBody<Bytes, std::convert::Infallible>;

/// Sends bytes as a gRPC message, and returns status and message.
async fn raw(router: &Router, path: &str, body: Raw) -> (String, String) {
    let client: legacy::Client<_, Raw> =
        legacy::Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let request = Request::post(format!("http://{}{path}", router.address))
        .header("content-type", "application/grpc")
        .body(body)
        .unwrap();
    let response = client.request(request).await.unwrap();
    let headers: HeaderMap = response.headers().clone();
    let value = |name: &str| headers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    (value("grpc-status"), value("grpc-message"))
}

pub(crate) fn framed(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(message.len() as u32);
    frame.put_slice(message);
    frame.freeze()
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_messages_are_invalid_arguments() {
    let (router, _worker) =
        Router::with_worker_and(|config| config.body_timeout = Duration::from_millis(300)).await;
    let path = "/baton.v1.Inference/Generate";
    let mut message = text("??").encode_to_vec();
    let at = message.windows(2).position(|bytes| bytes == b"??").unwrap();
    message[at..at + 2].copy_from_slice(&[0xff, 0xfe]);
    let (status, message) = raw(&router, path, Full::new(framed(&message)).boxed()).await;
    assert_eq!(status, (Code::InvalidArgument as i32).to_string(), "{message}");

    // An incomplete message.
    let half = framed(&text("x").encode_to_vec()).slice(..4);
    let pieces = tokio_stream::once(Ok(hyper::body::Frame::data(half))).chain(tokio_stream::pending());
    let (status, message) = raw(&router, path, BodyExt::boxed(StreamBody::new(pieces))).await;
    assert_eq!(status, (Code::DeadlineExceeded as i32).to_string(), "{message}");

    let (status, _) = raw(&router, "/baton.v1.Other/Call", Full::new(framed(&[])).boxed()).await;
    assert_eq!(status, (Code::Unimplemented as i32).to_string());
}
