//! What of a prompt is to be kept, in the words of each API, reaches workers as counts of tokens.

use baton_proto::{
    v1::{
        CacheControl, ChatMessage, ChatMessages, ContentPart, GenerateRequest, cache_control::Priority,
        generate_request::Prompt,
    },
    worker::{KeptPrefix, Retention},
};
use serde_json::{Value, json};
use tonic::Code;

use crate::{
    fake::{FakeWorker, say},
    harness::Router,
};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";

fn kept<const N: usize>(kept: [(u32, u32); N], rest_is_low: bool) -> Option<Retention> {
    let prefix = |(num_tokens, ttl_seconds)| KeptPrefix { num_tokens, ttl_seconds };
    Some(Retention { kept: kept.map(prefix).to_vec(), rest_is_low })
}

fn asked(worker: &FakeWorker) -> Option<Retention> {
    worker.requests().pop().expect("a request came").retention
}

/// Tokens are bytes, and `<|user|>`, `<|assistant|>` one each.
#[tokio::test(flavor = "multi_thread")]
async fn marks_reach_workers_as_prefixes() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("Hi"));
    let short = json!({"type": "ephemeral"});
    let long = json!({"type": "ephemeral", "ttl": "1h"});
    let marked = |text: &str, mark: &Value| json!({"type": "text", "text": text, "cache_control": mark});
    let text = |text: &str| json!({"type": "text", "text": text});
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let call = json!({"type": "tool_use", "id": "t", "name": "add", "input": {}});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": "2", "cache_control": short});
    let add =
        |mark: &Value| json!({"name": "add", "input_schema": {"type": "object"}, "cache_control": mark});
    for (path, body, expected) in [
        (MESSAGES, json!({"messages": user(json!("Hi"))}), kept([], false)),
        // `<|system|>` is text: 10 bytes.
        (
            MESSAGES,
            json!({"system": [marked("Be brief.", &long)], "messages": user(json!([marked("Read", &short), text("Go")]))}),
            kept([(10 + 9 + 1 + 4, 300), (10 + 9, 3600)], false),
        ),
        // What a later mark keeps as long has no prefix of its own.
        (
            MESSAGES,
            json!({"system": [marked("Be brief.", &short)], "messages": user(json!([text("Read"), marked("Go", &long)]))}),
            kept([(10 + 9 + 1 + 7, 3600)], false),
        ),
        (
            MESSAGES,
            json!({"tools": [add(&short)], "messages": [
                {"role": "user", "content": "Go"}, {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result, text("Thanks")]}]}),
            kept([(1 + 2 + 1 + "<|tool|>2".len() as u32, 300)], false),
        ),
        (MESSAGES, json!({"tools": [add(&short)], "messages": user(json!("Go"))}), kept([(1, 300)], false)),
        (
            CHAT,
            json!({"messages": user(json!([marked("Read", &json!({"ttl": "30s"})), text("Go")])),
                   "cache_control": {"priority": "low"}}),
            kept([(5, 30)], true),
        ),
        (CHAT, json!({"messages": user(json!("Hi")), "cache_control": short}), kept([(4, 300)], false)),
        (
            CHAT,
            json!({"messages": user(json!("Hi")), "documents": ["D"], "cache_control": {"priority": "normal"}}),
            kept([], false),
        ),
        // Documents are placed before the text of the message.
        (
            CHAT,
            json!({"messages": user(json!([marked("Read", &short), text("Go")])), "documents": ["Doc"]}),
            kept([(1 + 5 + 4, 300)], false),
        ),
        ("/v1/completions", json!({"prompt": "x", "cache_control": long}), kept([(1, 3600)], false)),
        ("/v1/completions", json!({"prompt": [1, 2], "cache_control": long}), kept([(2, 3600)], false)),
        ("/v1/responses", json!({"input": "Hi", "cache_control": {"priority": "low"}}), kept([], true)),
    ] {
        let mut body = body;
        if path == MESSAGES {
            body["max_tokens"] = 20.into();
        }
        let answer = router.client.post(path, &body).await;
        assert_eq!(answer.status, 200, "{body} {}", answer.text());
        assert_eq!(asked(&worker), expected, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_marks_are_refused_by_their_place() {
    let (router, worker) = Router::with_worker().await;
    let part = |mark: Value| json!({"type": "text", "text": "x", "cache_control": mark});
    let good = json!({"type": "ephemeral"});
    for (fields, param) in [
        (json!({"cache_control": {"ttl": "5 minutes"}}), "cache_control.ttl"),
        (json!({"cache_control": "5m"}), "cache_control"),
        (
            json!({"messages": [{"role": "user", "content": [part(json!({"type": "x"}))]}]}),
            "messages[0].content[0].cache_control.type",
        ),
        (
            json!({"messages": [{"role": "user", "content": [part(json!({"priority": "low"}))]}]}),
            "messages[0].content[0].cache_control.priority",
        ),
        (json!({"messages": [{"role": "user", "content": vec![part(good.clone()); 5]}]}), "cache_control"),
    ] {
        for path in [CHAT, MESSAGES] {
            let mut body = json!({"max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]});
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let answer = router.client.post(path, &body).await;
            assert_eq!(answer.status, 400, "{path} {body} {}", answer.text());
            let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with(&format!("{param}: ")), "{message:?} does not name {param}");
        }
    }
    assert!(worker.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_says_the_same() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("Hi"));
    let mut client = crate::grpc::client(&router).await;
    let control = |priority: Priority, ttl_seconds| CacheControl { priority: priority.into(), ttl_seconds };
    let part = |text: &str, cache_control| ContentPart { text: text.into(), passage: false, cache_control };
    let chat = |parts| {
        let message = ChatMessage { role: "user".into(), parts, ..ChatMessage::default() };
        Some(Prompt::Chat(ChatMessages { messages: vec![message], ..ChatMessages::default() }))
    };
    let marked = Some(control(Priority::Unspecified, Some(300)));
    let low = Some(control(Priority::Low, None));
    for (prompt, cache_control, expected) in [
        (Some(Prompt::Text("Hi".into())), Some(control(Priority::High, Some(60))), kept([(2, 60)], false)),
        (Some(Prompt::Text("Hi".into())), None, kept([], false)),
        (chat(vec![part("Read", marked), part("Go", None)]), low, kept([(5, 300)], true)),
    ] {
        let request = GenerateRequest { prompt, cache_control, ..GenerateRequest::default() };
        let mut stream = client.generate(request).await.unwrap().into_inner();
        while stream.message().await.unwrap().is_some() {}
        assert_eq!(asked(&worker), expected);
    }
    let text = || Some(Prompt::Text("Hi".into()));
    for (prompt, cache_control, reason) in [
        (text(), Some(control(Priority::High, Some(86_401))), "cache_control.ttl_seconds: 86401 is not"),
        (text(), Some(CacheControl::default()), "cache_control.priority: it is missing"),
        (
            chat(vec![part("Go", None), part("Read", Some(control(Priority::High, Some(0))))]),
            None,
            "messages[0].parts[1].cache_control.ttl_seconds: 0 is not",
        ),
        (text(), Some(control(Priority::Low, Some(60))), "cache_control.ttl_seconds: only"),
        (chat(vec![part("Read", low)]), None, "messages[0].parts[0].cache_control.priority: only"),
    ] {
        let request = GenerateRequest { prompt, cache_control, ..GenerateRequest::default() };
        let status = client.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().starts_with(reason), "{status:?} does not say {reason}");
    }
}
