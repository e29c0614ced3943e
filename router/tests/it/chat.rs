use serde_json::{Value, json};

use crate::{
    client::content,
    fake::{Step, say},
    harness::Router,
    model::{END, MODEL, ids},
};
use baton_proto::v1;

fn ask(extra: Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Replaces the values that differ between runs.
fn masked(text: &str) -> String {
    let mask = |text: &str, after: &str, until: char| {
        let mut pieces = text.split(after);
        let mut out = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            out.push_str(after);
            out.push('*');
            out.push_str(&piece[piece.find(until).unwrap_or(0)..]);
        }
        out
    };
    mask(&mask(text, "\"id\":\"", '"'), "\"created\":", ',')
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_what_openai_sends() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("Hé"));
    let answer = router.client.post("/v1/chat/completions", &ask(json!({"stream": true}))).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "text/event-stream; charset=utf-8");
    let head = r#"data: {"id":"*","object":"chat.completion.chunk","created":*,"model":"bytes","system_fingerprint":"FP","choices":[{"index":0,"delta":"#
        .replace("FP", concat!("fp_baton_", env!("CARGO_PKG_VERSION")));
    let expected = [
        r#"{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
        r#"{"content":"H"},"logprobs":null,"finish_reason":null}]}"#,
        // A character of two tokens comes in one chunk.
        r#"{"content":"é"},"logprobs":null,"finish_reason":null}]}"#,
        r#"{},"logprobs":null,"finish_reason":"stop"}]}"#,
    ];
    let expected: String = expected.iter().map(|rest| format!("{head}{rest}\n\n")).collect();
    assert_eq!(masked(&answer.text()), format!("{expected}data: [DONE]\n\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_is_null_until_the_last_chunk() {
    let (router, _worker) = Router::with_worker().await;
    let body = ask(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let mut events = router.client.post("/v1/chat/completions", &body).await.events();
    let last = events.pop().unwrap();
    assert_eq!(last["choices"], json!([]));
    // <|user|>, H, i, <|assistant|>; five letters and the end token; the fake reports 3 cached tokens.
    let usage = json!({"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10,
                       "prompt_tokens_details": {"cached_tokens": 3}});
    assert_eq!(last["usage"], usage);
    for event in events {
        assert!(event["usage"].is_null() && event.as_object().unwrap().contains_key("usage"), "{event}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn drafts_are_accounted_for_also_when_a_stop_string_ends_the_answer() {
    let (router, worker) = Router::with_worker().await;
    let token = |byte: u8| u32::from(byte);
    worker.script(move |_| {
        vec![
            Step::Token(token(b'a')),
            Step::Verified(token(b'b'), 4, 2),
            Step::Token(token(b'c')),
            Step::Verified(token(b'd'), 3, 3),
            Step::Token(token(b'e')),
            Step::Finish(v1::FinishReason::Length),
        ]
    });
    // The stop string leaves out tokens of the last step. No more are accepted than there are.
    for (stop, completion_tokens, accepted) in [(json!([]), 5, 5), (json!(["d"]), 4, 4)] {
        let answer = router.client.post("/v1/chat/completions", &ask(json!({"stop": stop}))).await.json();
        let details = json!({"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": 2});
        assert_eq!(answer["usage"]["completion_tokens_details"], details, "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], completion_tokens, "{answer}");
    }
    assert_eq!(worker.requests()[0].speculation_mode(), v1::SpeculationMode::Unspecified);
}

#[tokio::test(flavor = "multi_thread")]
async fn draft_counts_that_overflow_are_saturated() {
    let (router, worker) = Router::with_worker().await;
    // Of two choices with two tokens each. More accepted tokens than there are tokens are none.
    for (accepted, rejected) in [(0, u32::MAX), (1, u32::MAX - 4), (u32::MAX, 0)] {
        worker.script(move |_| {
            let token = Step::Verified(u32::from(b'a'), u32::MAX, accepted);
            vec![token.clone(), token, Step::Finish(v1::FinishReason::Length)]
        });
        let answer = router.client.post("/v1/chat/completions", &ask(json!({"n": 2}))).await.json();
        let details = json!({"accepted_prediction_tokens": 4 * accepted.min(1), "rejected_prediction_tokens": rejected});
        assert_eq!(answer["usage"]["completion_tokens_details"], details, "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_streaming() {
    let (router, worker) = Router::with_worker().await;
    let answer = router.client.post("/v1/chat/completions", &ask(json!({"max_tokens": 4, "seed": 7}))).await;
    let body = answer.json();
    assert_eq!(body["object"], "chat.completion");
    let choice = json!({"index": 0, "message": {"role": "assistant", "content": "Hell", "refusal": null},
                        "logprobs": null, "finish_reason": "length"});
    assert_eq!(body["choices"], json!([choice]));
    assert_eq!(body["usage"]["completion_tokens"], 4);

    let request = &worker.requests()[0];
    assert_eq!(request.prompt_token_ids, [257, b'H'.into(), b'i'.into(), 258]);
    let sampling = request.sampling.as_ref().unwrap();
    assert_eq!((sampling.max_tokens, sampling.seed), (4, 7));
    assert_eq!(sampling.temperature, 0.5, "generation_config.json's default");
    assert_eq!(sampling.stop_token_ids, [END]);
    assert!(request.prefill.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_sampling_field_reaches_the_worker() {
    let (router, worker) = Router::with_worker().await;
    let body = ask(json!({
        "max_completion_tokens": 9, "min_tokens": 2, "temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.25,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "logit_bias": {"65": -100, "66": 1.5}, "stop_token_ids": [10], "ignore_eos": true, "seed": -1,
        "logprobs": true, "top_logprobs": 2, "cache_salt": "tenant", "prefill_mode": "local",
        "speculation_mode": "off", "kv_wire": "int4", "priority": -3,
    }));
    assert_eq!(router.client.post("/v1/chat/completions", &body).await.status, 200);
    let request = worker.requests().remove(0);
    assert_eq!(request.cache_salt, "tenant\0KV_WIRE_INT4", "what was rounded is for those who asked for it");
    assert_eq!(request.kv_wire(), v1::KvWire::Int4);
    assert_eq!(request.speculation_mode(), v1::SpeculationMode::Off);
    assert_eq!(request.priority, -3);
    let expected = baton_proto::worker::Sampling {
        max_tokens: 9,
        min_tokens: 2,
        temperature: 0.0,
        top_k: 5,
        top_p: 0.5,
        min_p: 0.25,
        repetition_penalty: 1.5,
        presence_penalty: 0.5,
        frequency_penalty: -0.5,
        logit_bias: [(65, -100.0), (66, 1.5)].into(),
        seed: u64::MAX,
        stop_token_ids: vec![10],
        logprobs: Some(2),
        prompt_logprobs: None,
        grammar: None,
    };
    assert_eq!(request.sampling, Some(expected));
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_end_a_stream_across_tokens_and_cancel_the_worker() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| {
        let mut steps: Vec<_> = ids("one twothree").into_iter().map(Step::Token).collect();
        steps.push(Step::Hang);
        steps
    });
    let body = ask(json!({"stream": true, "stop": ["twofold", "woth"]}));
    let events = router.client.post("/v1/chat/completions", &body).await.events();
    assert_eq!(content(&events, 0), "one t");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    worker.next_dropped().await;

    // The usage is complete, although the worker sent no terminal event.
    let answer = router.client.post("/v1/chat/completions", &ask(json!({"stop": "woth"}))).await.json();
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3, "{answer}");
    worker.next_dropped().await;

    // Held back text that became no stop string is delivered.
    worker.script(say("one twof"));
    let body = ask(json!({"stop": "twofold"}));
    let answer = router.client.post("/v1/chat/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "one twof");
}

#[tokio::test(flavor = "multi_thread")]
async fn n_choices_are_separate_requests_with_consecutive_seeds() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|request| {
        let seed = request.sampling.as_ref().unwrap().seed;
        say(&format!("choice {seed}"))(request)
    });
    let body = ask(json!({"n": 3, "seed": 40}));
    let answer = router.client.post("/v1/chat/completions", &body).await.json();
    let texts: Vec<_> =
        (0..3).map(|idx| answer["choices"][idx]["message"]["content"].as_str().unwrap().to_owned()).collect();
    assert_eq!(texts, ["choice 40", "choice 41", "choice 42"]);
    assert_eq!(answer["usage"]["prompt_tokens"], 4, "the prompt is counted once");
    assert_eq!(answer["usage"]["completion_tokens"], 30);

    let body = ask(json!({"n": 2, "seed": 40, "stream": true}));
    let events = router.client.post("/v1/chat/completions", &body).await.events();
    assert_eq!((content(&events, 0), content(&events, 1)), ("choice 40".into(), "choice 41".into()));
    for index in 0..2 {
        let of_index: Vec<_> = events.iter().filter(|event| event["choices"][0]["index"] == index).collect();
        assert_eq!(of_index[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        assert_eq!(of_index.last().unwrap()["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logprobs_name_tokens_and_bytes() {
    let (router, worker) = Router::with_worker().await;
    let e = u32::from(b'\xc3');
    worker.script(move |_| {
        vec![
            Step::Logprobs(u32::from(b'A'), -0.5, vec![(u32::from(b'A'), -0.5), (e, -1.5)]),
            Step::Finish(v1::FinishReason::Length),
        ]
    });
    let expected = json!({"content": [{
        "token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": [
            {"token": "A", "logprob": -0.5, "bytes": [65]},
            {"token": "\u{fffd}", "logprob": -1.5, "bytes": [0xc3]},
        ]}], "refusal": null});
    let body = ask(json!({"logprobs": true, "top_logprobs": 2}));
    let answer = router.client.post("/v1/chat/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["logprobs"], expected);

    let body = ask(json!({"logprobs": true, "top_logprobs": 2, "stream": true}));
    let events = router.client.post("/v1/chat/completions", &body).await.events();
    assert_eq!(events[1]["choices"][0]["logprobs"], expected);
    assert_eq!(events[1]["choices"][0]["delta"]["content"], "A");
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_and_tools_reach_the_template() {
    let (router, worker) = Router::with_worker().await;
    let body = json!({
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    });
    assert_eq!(router.client.post("/v1/chat/completions", &body).await.status, 200);
    let mut expected = vec![257];
    expected.extend(ids("a\nb[1 tools]"));
    expected.push(258);
    assert_eq!(worker.requests()[0].prompt_token_ids, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_developer_says_the_system_says() {
    let (router, worker) = Router::with_worker().await;
    for role in ["developer", "system", "user"] {
        let body = json!({"messages": [{"role": role, "content": "D"}, {"role": "user", "content": "U"}]});
        assert_eq!(router.client.post("/v1/chat/completions", &body).await.status, 200);
    }
    let prompts: Vec<_> = worker.requests().into_iter().map(|request| request.prompt_token_ids).collect();
    assert_eq!(prompts[0], prompts[1]);
    assert_ne!(prompts[1], prompts[2]);
}
