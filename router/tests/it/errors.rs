use baton_cluster::Role;
use baton_proto::worker::failed::Kind;
use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    fake::{FakeWorker, Step, say},
    harness::Router,
};

/// Path, body, status, `param`, `code`, and a part of the message.
type Case<'a> = (&'a str, &'a str, u16, Option<&'a str>, Option<&'a str>, &'a str);

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_refused_with_the_field_and_the_reason() {
    let (router, worker) = Router::with_worker().await;
    let long = format!("{{\"prompt\":\"{}\"}}", "x".repeat(512));
    let long_stop = json!({"prompt": "x", "stop": ["y", "z".repeat(1025)]}).to_string();
    let long_salt = json!({"prompt": "x", "cache_salt": "s".repeat(257)}).to_string();
    let many_prompts = json!({"prompt": vec!["x"; 129]}).to_string();
    let cases: &[Case<'_>] = &[
        (TEXT, "{\"prompt\": \"x\",}", 400, None, Some("invalid_json"), "line 1 column 16"),
        (TEXT, "{\"prompt\": \"x\"} trailing", 400, None, Some("invalid_json"), "line 1 column 17"),
        (TEXT, "{\"prompt\": NaN}", 400, None, Some("invalid_json"), "line 1 column"),
        (TEXT, "", 400, None, Some("invalid_json"), "EOF"),
        (TEXT, "[]", 400, None, None, "invalid type"),
        (TEXT, "{}", 400, Some("prompt"), None, "missing field `prompt`"),
        (CHAT, "{}", 400, Some("messages"), None, "missing field `messages`"),
        (TEXT, r#"{"prompt":"x","n":0}"#, 400, Some("n"), None, "at least 1"),
        (TEXT, r#"{"prompt":"x","n":1000}"#, 400, Some("n"), None, "at most 128"),
        (TEXT, &many_prompts, 400, Some("prompt"), None, "129 choices were requested, at most 128"),
        (TEXT, r#"{"prompt":"x","n":"two"}"#, 400, Some("n"), None, "expected u32"),
        (TEXT, r#"{"prompt":"x","temperature":-1}"#, 400, Some("temperature"), None, "between 0 and 2"),
        (TEXT, r#"{"prompt":"x","temperature":1e39}"#, 400, Some("temperature"), None, "between 0 and 2"),
        (TEXT, r#"{"prompt":"x","temperature":"hot"}"#, 400, Some("temperature"), None, "expected f32"),
        (TEXT, r#"{"prompt":"x","top_p":0}"#, 400, Some("top_p"), None, "above 0"),
        (TEXT, r#"{"prompt":"x","top_k":-2}"#, 400, Some("top_k"), None, "-2"),
        (TEXT, r#"{"prompt":"x","min_p":2}"#, 400, Some("min_p"), None, "between 0 and 1"),
        (TEXT, r#"{"prompt":"x","repetition_penalty":0}"#, 400, Some("repetition_penalty"), None, "above 0"),
        (
            TEXT,
            r#"{"prompt":"x","presence_penalty":3}"#,
            400,
            Some("presence_penalty"),
            None,
            "between -2 and 2",
        ),
        (TEXT, r#"{"prompt":"x","max_tokens":0}"#, 400, Some("max_tokens"), None, "at least 1"),
        (TEXT, r#"{"prompt":"x","max_tokens":-5}"#, 400, Some("max_tokens"), None, "expected u32"),
        (TEXT, r#"{"prompt":"x","max_tokens":2,"min_tokens":3}"#, 400, Some("min_tokens"), None, "exceed"),
        (TEXT, r#"{"prompt":"x","logprobs":21}"#, 400, Some("logprobs"), None, "at most 20"),
        (
            TEXT,
            r#"{"prompt":"x","logit_bias":{"a":1}}"#,
            400,
            Some("logit_bias"),
            None,
            "\"a\" is not a token id",
        ),
        (TEXT, r#"{"prompt":"x","logit_bias":{"01":1}}"#, 400, Some("logit_bias"), None, "\"01\" is not"),
        (TEXT, r#"{"prompt":"x","logit_bias":{"+1":1}}"#, 400, Some("logit_bias"), None, "\"+1\" is not"),
        (TEXT, r#"{"prompt":"x","logit_bias":{"999":1}}"#, 400, Some("logit_bias"), None, "vocabulary"),
        (TEXT, r#"{"prompt":"x","stop":["a",1]}"#, 400, Some("stop"), None, "list of strings"),
        (TEXT, r#"{"prompt":"x","stop":""}"#, 400, Some("stop"), None, "empty string"),
        (TEXT, &long_stop, 400, Some("stop"), None, "1025 bytes, at most 1024"),
        (TEXT, r#"{"prompt":""}"#, 400, Some("prompt"), None, "no tokens"),
        (TEXT, r#"{"prompt":[]}"#, 400, Some("prompt"), None, "empty"),
        (TEXT, r#"{"prompt":[1,259]}"#, 400, Some("prompt"), None, "259 is outside the vocabulary"),
        (TEXT, r#"{"prompt":[1,-1]}"#, 400, Some("prompt"), None, "-1 is not a token id"),
        (TEXT, r#"{"prompt":{"a":1}}"#, 400, Some("prompt"), None, "expected a string"),
        (TEXT, r#"{"prompt":"x","stop_token_ids":[300]}"#, 400, Some("stop_token_ids"), None, "300"),
        (TEXT, &long, 400, Some("prompt"), Some("context_length_exceeded"), "512 tokens"),
        (
            TEXT,
            r#"{"prompt":"x","max_tokens":512}"#,
            400,
            Some("max_tokens"),
            Some("context_length_exceeded"),
            "513",
        ),
        (
            TEXT,
            r#"{"prompt":"x","echo":true,"logprobs":1,"stream":true}"#,
            400,
            Some("echo"),
            Some("unsupported_parameter"),
            "log-probabilities of a prompt",
        ),
        (
            TEXT,
            r#"{"prompt":"x","suffix":"y"}"#,
            400,
            Some("suffix"),
            Some("unsupported_parameter"),
            "not supported",
        ),
        (
            TEXT,
            r#"{"prompt":"x","best_of":4}"#,
            400,
            Some("best_of"),
            Some("unsupported_parameter"),
            "not supported",
        ),
        (
            TEXT,
            r#"{"prompt":"x","n":2,"best_of":3}"#,
            400,
            Some("best_of"),
            Some("unsupported_parameter"),
            "anything but 1 or the value of n",
        ),
        (TEXT, r#"{"prompt":"x","prefill_mode":"both"}"#, 400, Some("prefill_mode"), None, "expected one of"),
        (
            TEXT,
            r#"{"prompt":"x","speculation_mode":"on"}"#,
            400,
            Some("speculation_mode"),
            None,
            "expected `auto` or `off`",
        ),
        (TEXT, r#"{"prompt":"x","priority":1.5}"#, 400, Some("priority"), None, "expected i32"),
        (TEXT, &long_salt, 400, Some("cache_salt"), None, "257 bytes, at most 256"),
        (TEXT, r#"{"prompt":"x","kv_wire":"int2"}"#, 400, Some("kv_wire"), None, "expected one of"),
        (TEXT, r#"{"prompt":"x","kv_wire":"fp8"}"#, 400, Some("kv_wire"), None, "`int8`, `int4`"),
        (TEXT, r#"{"prompt":"x","model":"other"}"#, 404, Some("model"), Some("model_not_found"), "\"other\""),
        (CHAT, r#"{"messages":[]}"#, 400, Some("messages"), None, "empty"),
        (CHAT, r#"{"messages":[1]}"#, 400, Some("messages[0]"), None, "expected an object"),
        (CHAT, r#"{"messages":[{"content":"x"}]}"#, 400, Some("messages[0].role"), None, "expected a string"),
        (
            CHAT,
            r#"{"messages":[{"role":"user"}]}"#,
            400,
            Some("messages[0].content"),
            None,
            "expected a string",
        ),
        (CHAT, r#"{"messages":[{"role":"evil","content":""}]}"#, 400, Some("messages"), None, "no evil"),
        (
            CHAT,
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#,
            400,
            Some("messages[0].content[0].type"),
            Some("unsupported_parameter"),
            "image_url",
        ),
        (
            CHAT,
            r#"{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"xml"}}"#,
            400,
            Some("response_format.type"),
            None,
            "json_schema",
        ),
        (
            CHAT,
            r#"{"messages":[{"role":"user","content":"x"}],"audio":{"voice":"x"}}"#,
            400,
            Some("audio"),
            Some("unsupported_parameter"),
            "not supported",
        ),
        (
            CHAT,
            r#"{"messages":[{"role":"user","content":"x"}],"top_logprobs":2}"#,
            400,
            Some("top_logprobs"),
            None,
            "needs logprobs",
        ),
        ("/tokenize", "{}", 400, Some("prompt"), None, "either prompt or messages"),
        ("/tokenize", r#"{"prompt":[97]}"#, 400, Some("prompt"), None, "expected a string"),
        ("/tokenize", r#"{"prompt":["x"]}"#, 400, Some("prompt"), None, "expected a string"),
        ("/detokenize", r#"{"tokens":[999]}"#, 400, Some("tokens"), None, "999"),
        ("/nowhere", "{}", 404, None, Some("not_found"), "POST /nowhere"),
        ("/v1/models", "{}", 405, None, Some("method_not_allowed"), "POST"),
    ];
    for (path, body, status, param, code, message) in cases {
        let answer = router.client.post_text(path, body).await;
        let shown = format!("{path} {}", &body[..body.len().min(100)]);
        assert_eq!(answer.status, *status, "{shown}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(error["type"], "invalid_request_error", "{shown}");
        assert_eq!(error["param"].as_str(), *param, "{shown}: {error}");
        assert_eq!(error["code"].as_str(), *code, "{shown}: {error}");
        let found = error["message"].as_str().unwrap();
        assert!(found.contains(message), "{shown}: {found:?} does not say {message:?}");
    }
    assert_eq!(worker.requests().len(), 0, "no worker was bothered");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_media_types_and_large_bodies_are_refused() {
    let (router, _worker) = Router::with_worker_and(|config| config.max_body_bytes = 1000).await;
    let plain = [("content-type", "text/plain")];
    let answer = router.client.send("POST", TEXT, &plain, Bytes::from_static(b"{}")).await;
    assert_eq!(answer.status, 415);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("text/plain"));

    // What `curl -d` says of any body.
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let answer = router.client.send("POST", TEXT, &form, Bytes::from_static(br#"{"prompt":"x"}"#)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());

    let answer = router.client.post(TEXT, &json!({"prompt": "x".repeat(1000)})).await;
    assert_eq!(answer.status, 413);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("1000 bytes"));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_workers_the_error_names_the_missing_role() {
    let mut router = Router::start(|_| {}).await;
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.header("retry-after"), "1");
    let error = answer.json()["error"].clone();
    assert_eq!(error["message"], "no decode worker is registered");
    assert_eq!(
        (error["type"].as_str(), error["code"].as_str()),
        (Some("server_error"), Some("service_unavailable"))
    );
    assert_eq!(router.client.get("/readyz").await.text(), "no decode worker is registered\n");

    let worker = FakeWorker::start("d0", Role::Decode, 1).await;
    router.register(&worker).await;
    let answer = router.client.post(TEXT, &json!({"prompt": "x", "prefill_mode": "remote"})).await;
    assert_eq!(answer.status, 503);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("no prefill worker is usable"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_router_and_full_workers_are_429() {
    let (router, worker) = Router::with_worker_and(|config| config.max_requests = 1).await;
    worker.script(|_| vec![Step::Fail(Kind::Full)]);
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, "1"), "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "rate_limit_exceeded");

    worker.script(|_| vec![Step::Token(97), Step::Hang]);
    let json = [("content-type", "application/json")];
    let body = Bytes::from(json!({"prompt": "x", "stream": true}).to_string());
    let running = router.client.begin("POST", TEXT, &json, body).await;
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, "1"), "{}", answer.text());

    // After the first request has ended there is room again.
    drop(running);
    worker.next_dropped().await;
    router.until_metric("baton_router_requests_running 0").await;
    worker.script(|_| vec![Step::Fail(Kind::Invalid)]);
    let answer = router.client.post(TEXT, &json!({"prompt": "x"})).await;
    assert_eq!(answer.status, 400, "the worker's word is taken: {}", answer.text());
    assert_eq!(answer.json()["error"]["message"], "scripted Invalid");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_after_the_first_byte_is_an_event() {
    let (router, worker) = Router::with_worker_and(|config| config.max_attempts = 1).await;
    worker.script(|_| vec![Step::Token(97), Step::Break]);
    let answer = router.client.post(TEXT, &json!({"prompt": "x", "stream": true})).await;
    assert_eq!(answer.status, 200);
    let text = answer.text();
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    let error: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "service_unavailable");
    assert!(error["error"]["message"].as_str().unwrap().contains("scripted break"), "{error}");
}

/// Pools of workers differ by a few blocks, and their contexts differ with them.
#[tokio::test(flavor = "multi_thread")]
async fn contexts_may_differ() {
    let mut router = Router::start(|_| {}).await;
    let mut workers = Vec::new();
    for (id, context_length) in [("d0", 500), ("d1", 512)] {
        let mut worker = FakeWorker::start(id, Role::Decode, 1).await;
        worker.record.capacity.context_length = context_length;
        router.register(&worker).await;
        workers.push(worker);
    }
    let lengths_of = |worker: &FakeWorker| -> Vec<u32> {
        worker.requests().iter().map(|request| request.sampling.as_ref().unwrap().max_tokens).collect()
    };
    // A request without a length fits any worker. The second one goes to the idle worker.
    let json = [("content-type", "application/json")];
    let open = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true});
    let mut streams = Vec::new();
    for worker in &workers {
        worker.script(|_| vec![Step::Token(97), Step::Hang]);
    }
    for _ in &workers {
        streams.push(router.client.begin("POST", CHAT, &json, Bytes::from(open.to_string())).await);
    }
    for worker in &workers {
        assert_eq!(lengths_of(worker), [500 - 4]);
        worker.script(say("Hello"));
    }
    drop(streams);
    // A request that fits only one worker goes there, with and without a given length.
    let asked = json!({"prompt": [1, 1], "max_tokens": 510});
    assert_eq!(router.client.post(TEXT, &asked).await.status, 200);
    assert_eq!(lengths_of(&workers[1]).last(), Some(&510));
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(498)}]});
    assert_eq!(router.client.post(CHAT, &long).await.status, 200);
    assert_eq!(lengths_of(&workers[1]).last(), Some(&12));
    let longer = json!({"prompt": [1, 1], "max_tokens": 511});
    let answer = router.client.post(TEXT, &longer).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
}
