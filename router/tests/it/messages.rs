//! Anthropic's Messages over HTTP.

use serde_json::{Value, json};

use crate::{
    client::named_events,
    fake::{FakeWorker, Step, say},
    harness::Router,
    model::{MODEL, ids, write_template},
};

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const CALL: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";

fn ask(fields: Value) -> Value {
    let mut body =
        json!({"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn add() -> Value {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    json!({"name": "add", "description": "Adds.", "input_schema": schema})
}

async fn hermes() -> (Router, FakeWorker) {
    Router::with_worker_and(|config| config.tool_format = Some(baton_router::ToolFormat::Hermes)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_has_blocks_a_reason_and_usage() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("Good day."));
    let body = ask(
        json!({"system": [{"type": "text", "text": "S"}], "temperature": 0.5, "metadata": {"user_id": "u"}}),
    );
    let answer = router.client.post(PATH, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    assert_eq!(
        (&answer["type"], &answer["role"], &answer["model"]),
        (&json!("message"), &json!("assistant"), &json!(MODEL))
    );
    assert_eq!(answer["content"][0]["text"], "Good day.");
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    let request = worker.requests().pop().unwrap();
    let shown: Vec<u32> = ids("<|system|>S").into_iter().chain([257]).chain(ids("Hi")).chain([258]).collect();
    assert_eq!(request.prompt_token_ids, shown);
    // The fake reports three cached tokens.
    let usage = &answer["usage"];
    assert_eq!(
        (&usage["input_tokens"], &usage["cache_read_input_tokens"]),
        (&json!(shown.len() - 3), &json!(3))
    );
    assert_eq!(usage["output_tokens"], 10);
    let counted = json!({"messages": body["messages"], "system": body["system"], "model": MODEL});
    assert_eq!(router.client.post(COUNT, &counted).await.json(), json!({"input_tokens": shown.len()}));

    let cut = router.client.post(PATH, &ask(json!({"max_tokens": 4}))).await.json();
    assert_eq!((&cut["stop_reason"], &cut["content"][0]["text"]), (&json!("max_tokens"), &json!("Good")));
    let stopped = router.client.post(PATH, &ask(json!({"stop_sequences": [" day"]}))).await.json();
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!(" day"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_are_called_and_their_results_are_messages() {
    let (router, worker) = hermes().await;
    worker.script(say(&format!("Let me see.\n{CALL}")));
    let messages = json!([
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "T", "signature": ""},
            {"type": "text", "text": "A"},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
            {"type": "text", "text": "Thanks", "cache_control": {"type": "ephemeral"}}]},
    ]);
    let answer = router.client.post(PATH, &ask(json!({"messages": messages, "tools": [add()]}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    assert_eq!(answer["stop_reason"], "tool_use");
    assert_eq!(answer["content"][0]["text"], "Let me see.");
    let call = &answer["content"][1];
    assert_eq!(
        (&call["type"], &call["name"], &call["input"]),
        (&json!("tool_use"), &json!("add"), &json!({"a": 1}))
    );
    assert!(call["id"].as_str().unwrap().starts_with("toolu_"));
    let shown = [257].into_iter().chain(ids("U")).chain([258]).chain(ids("A<|tool|>2")).chain([257]);
    let shown: Vec<u32> = shown.chain(ids("Thanks[1 tools]")).chain([258]).collect();
    assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, shown);
    for (choice, part) in [
        (json!({"type": "auto"}), Some("TEXT")),
        (json!({"type": "any"}), Some("answer: call (\"\\n\" call)*")),
        (json!({"type": "tool", "name": "add"}), Some("answer: call\n")),
        (json!({"type": "auto", "disable_parallel_tool_use": true}), Some("after_mark)? TEXT")),
        (json!({"type": "none"}), None),
    ] {
        let answer = router.client.post(PATH, &ask(json!({"tools": [add()], "tool_choice": choice}))).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let grammar = worker.requests().pop().unwrap().sampling.unwrap().grammar;
        match (&grammar, part) {
            (Some(grammar), Some(part)) => assert!(grammar.text.contains(part), "{choice} {}", grammar.text),
            (grammar, part) => assert_eq!((grammar.is_some(), part), (false, None), "{choice}"),
        }
    }
    let format = json!({"format": {"type": "json_schema", "schema": {"type": "null"}}});
    assert_eq!(router.client.post(PATH, &ask(json!({"output_config": format}))).await.status, 200);
    assert_eq!(
        worker.requests().pop().unwrap().sampling.unwrap().grammar.unwrap().text,
        "{\"type\":\"null\"}"
    );
    // What asks for nothing else than what is done.
    for fields in [
        json!({"output_config": {"effort": "high"}}),
        json!({"thinking": {"type": "adaptive"}}),
        json!({"context_management": {"edits": []}}),
    ] {
        let answer = router.client.post(PATH, &ask(fields)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let long =
        json!({"output_config": {"format": {"type": "json_schema", "schema": {"x": "y".repeat(300 << 10)}}}});
    let refused = router.client.post(PATH, &ask(long)).await;
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("output_config.format: "), "{}", refused.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_may_have_more_tools_than_a_chat() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("Good day."));
    let many = |num: usize| ask(json!({"tools": vec![add(); num]}));
    assert_eq!(router.client.post(PATH, &many(1024)).await.status, 200);
    let shown = [257].into_iter().chain(ids("Hi[1024 tools]")).chain([258]).collect::<Vec<_>>();
    assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, shown);
    let refused = router.client.post(PATH, &many(1025)).await;
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("tools: 1025 tools, at most 1024"), "{}", refused.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_turn_that_goes_on_has_thoughts() {
    let template =
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }};{% endfor %}";
    let (router, worker) = Router::with_worker_and(|config| write_template(&config.model, template)).await;
    let thinking = |text: &str| json!({"type": "thinking", "thinking": text, "signature": "s"});
    let sealed = json!({"type": "redacted_thinking", "data": "x"});
    let call = json!({"type": "tool_use", "id": "t", "name": "add", "input": {}});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": "2"});
    let past = [
        json!({"role": "user", "content": "U"}),
        json!({"role": "assistant", "content": [thinking("T"), sealed, {"type": "text", "text": "A"}]}),
        json!({"role": "user", "content": "V"}),
    ];
    let called = json!({"role": "assistant", "content": [thinking("W"), sealed, call]});
    let answered = json!({"role": "user", "content": [result]});
    let thanked = json!({"role": "user", "content": [result, {"type": "text", "text": "X"}]});
    for (more, shown) in [
        (vec![], ""),
        (vec![called.clone(), answered], "assistant:W;tool:2;"),
        (vec![called, thanked], "assistant:;tool:2;user:X;"),
    ] {
        let messages: Vec<Value> = past.iter().cloned().chain(more).collect();
        let answer = router.client.post(PATH, &ask(json!({"messages": messages}))).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let shown = format!("user:U;assistant:A;user:V;{shown}");
        assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids(&shown), "{shown}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_one_role_are_one_turn() {
    use baton_router::ToolFormat::{Hermes, Mistral, MistralArgs};
    // As Mistral's templates do, it refuses two turns of one role, and does not count calls and results.
    let template = "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}\
                    {% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
                    {% set ns.n = ns.n + 1 %}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let any = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let user = |content: Value| json!({"role": "user", "content": content});
    let says = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
    let call = json!({"type": "tool_use", "id": "t", "name": "add", "input": {}});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": "2", "is_error": true});
    let called = [
        user(json!("U")),
        json!({"role": "assistant", "content": "Well."}),
        json!({"role": "assistant", "content": [call]}),
    ];
    let in_one: Vec<Value> = called.iter().cloned().chain([user(json!([result, says("X")]))]).collect();
    let in_two: Vec<Value> =
        called.iter().cloned().chain([user(json!([result])), user(json!("X"))]).collect();
    let joined = "user:U;assistant:Well.;tool:Error: 2\nX;";
    let apart = "user:U;assistant:Well.;tool:Error: 2;user:X;";
    for (format, template) in [(Mistral, template), (MistralArgs, template), (Hermes, any)] {
        let (router, worker) = Router::with_worker_and(|config| {
            config.tool_format = Some(format);
            write_template(&config.model, template);
        })
        .await;
        worker.script(say("Good day."));
        let shown = if format == Hermes { apart } else { joined };
        let cases: [(&Vec<Value>, &str); 3] = [
            (&vec![user(json!("U")), user(json!([says("V")])), user(json!("W"))], "user:U\nV\nW;"),
            (&in_one, shown),
            (&in_two, shown),
        ];
        for (messages, shown) in cases {
            let answer = router.client.post(PATH, &ask(json!({"messages": messages}))).await;
            assert_eq!(answer.status, 200, "{format:?}: {}", answer.text());
            assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids(shown), "{format:?}");
            let counted = router.client.post(COUNT, &json!({"messages": messages})).await;
            assert_eq!(counted.json(), json!({"input_tokens": shown.len()}));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn thinking_is_what_the_template_is_told() {
    let said = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let switched = |name: &str| {
        let part = "{% if SWITCH is defined %}[{{ 'on' if SWITCH else 'off' }}]{% endif %}";
        format!("{said}{}", part.replace("SWITCH", name))
    };
    // It shows what is thought, too, so the model thinks.
    let thinks = format!("{said}{{# <think></think> #}}");
    let effort = "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}";
    let none = format!("{thinks}{effort}{{% if reasoning_effort == 'none' %}}[]{{% endif %}}");
    let (on, off) = (json!({"type": "enabled", "budget_tokens": 1024}), json!({"type": "disabled"}));
    let adaptive = json!({"type": "adaptive"});
    for (template, thinking, shown) in [
        (switched("enable_thinking"), &off, Some("Hi[off]")),
        (switched("enable_thinking"), &on, Some("Hi[on]")),
        (switched("enable_thinking"), &adaptive, Some("Hi[on]")),
        (switched("enable_thinking"), &Value::Null, Some("Hi")),
        (switched("thinking"), &off, Some("Hi[off]")),
        (said.to_owned(), &off, Some("Hi")),
        (thinks.clone(), &on, Some("Hi")),
        (thinks.clone(), &off, None),
        (format!("{thinks}{effort}"), &off, None),
        (none.clone(), &off, Some("Hi[none][]")),
        (none, &on, Some("Hi[high]")),
    ] {
        let (router, worker) =
            Router::with_worker_and(|config| write_template(&config.model, &template)).await;
        worker.script(say("Good day."));
        let answer = router.client.post(PATH, &ask(json!({"thinking": thinking}))).await;
        let counted = json!({"messages": [{"role": "user", "content": "Hi"}], "thinking": thinking});
        let counted = router.client.post(COUNT, &counted).await;
        match shown {
            Some(shown) => {
                assert_eq!(answer.status, 200, "{template}: {}", answer.text());
                assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids(shown), "{template}");
                assert_eq!(counted.json(), json!({"input_tokens": shown.len()}), "{template}");
            }
            None => {
                assert_eq!((answer.status, counted.status), (400, 400), "{template}");
                assert!(answer.text().contains("thinking: the chat template"), "{}", answer.text());
            }
        }
    }
}

/// As that program sends it.
#[tokio::test(flavor = "multi_thread")]
async fn the_body_of_claude_code_is_served() {
    let effort = "{% for m in messages %}{{ m.content }}{% endfor %}\
                  {% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}\
                  {% if tools %}[{{ tools | length }} tools]{% endif %}";
    let (router, worker) = Router::with_worker_and(|config| write_template(&config.model, effort)).await;
    worker.script(say("Good day."));
    let mark = json!({"type": "ephemeral", "ttl": "1h", "scope": "global"});
    let text = |text: &str| json!({"type": "text", "text": text, "cache_control": mark});
    let mut body = json!({
        "model": MODEL, "max_tokens": 100, "stream": true, "temperature": 1, "metadata": {"user_id": "u"},
        "system": [text("S")], "messages": [{"role": "user", "content": [text("Hi")]}], "tools": [add()],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    });
    let answer = router.client.post(&format!("{PATH}?beta=true"), &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let shown = "SHi[medium][1 tools]";
    assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids(shown));
    for field in ["max_tokens", "stream", "temperature", "metadata"] {
        body.as_object_mut().unwrap().remove(field);
    }
    assert_eq!(router.client.post(COUNT, &body).await.json(), json!({"input_tokens": shown.len()}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_blocks_that_begin_and_end() {
    let (router, worker) = hermes().await;
    worker.script(say(&format!("Well.\n{CALL}")));
    let events =
        named_events(&router.client.post(PATH, &ask(json!({"tools": [add()], "stream": true}))).await);
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let expected: Vec<&str> = ["message_start"]
        .into_iter()
        .chain(block)
        .chain(block)
        .chain(["message_delta", "message_stop"])
        .collect();
    assert_eq!(kinds, expected);
    let joined = |field: &str| -> String {
        events.iter().filter_map(|event| event["delta"][field].as_str()).collect()
    };
    assert_eq!((joined("text"), joined("partial_json")), ("Well.".into(), "{\"a\": 1}".into()));
    let start = &events[0]["message"];
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
    assert!(start["usage"]["input_tokens"].as_u64().unwrap() > 0);
    let last = &events[events.len() - 2];
    assert_eq!(last["delta"]["stop_reason"], "tool_use");
    assert!(last["usage"]["output_tokens"].as_u64().unwrap() > 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_continues_what_the_assistant_has_begun() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say(" day."));
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good"}]);
    let answer = router.client.post(PATH, &ask(json!({"messages": messages}))).await.json();
    assert_eq!(answer["content"][0]["text"], " day.");
    let shown: Vec<u32> = [257].into_iter().chain(ids("Hi")).chain([258]).chain(ids("Good")).collect();
    assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, shown);
    // The same as a chat.
    let chat = json!({"messages": messages, "continue_final_message": true});
    let path = "/v1/chat/completions";
    assert_eq!(router.client.post(path, &chat).await.json()["choices"][0]["message"]["content"], " day.");
    assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, shown);
    let tokens = router.client.post("/tokenize", &chat).await.json()["tokens"].clone();
    assert_eq!(tokens, json!(shown));
    let begins = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true});
    assert_eq!(router.client.post(path, &begins).await.json()["error"]["param"], "continue_final_message");
    let empty = json!({"messages": [{"role": "user", "content": " "}], "continue_final_message": true});
    assert_eq!(router.client.post(path, &empty).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_anthropics_shape() {
    let (router, worker) = Router::with_worker().await;
    let block = |kind: &str| json!({"messages": [{"role": "user", "content": [{"type": kind}]}]});
    for (fields, status, kind, reason) in [
        (json!({"model": "gpt"}), 404, "not_found_error", "\"gpt\" does not exist"),
        (json!({"max_tokens": null}), 400, "invalid_request_error", "max_tokens"),
        (json!({"max_tokens": 0}), 400, "invalid_request_error", "max_tokens"),
        (json!({"messages": []}), 400, "invalid_request_error", "messages is empty"),
        (
            json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": []}]}),
            400,
            "invalid_request_error",
            "messages[1].content: expected a string or a list of blocks that is not empty",
        ),
        (block("image"), 400, "invalid_request_error", "messages[0].content[0].type: \"image\""),
        (
            json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}),
            400,
            "invalid_request_error",
            "no tool \"bash_20250124\"",
        ),
        (
            json!({"tools": [{"name": "a b", "input_schema": {}}]}),
            400,
            "invalid_request_error",
            "tools[0].name",
        ),
        (json!({"tool_choice": {"type": "any"}}), 400, "invalid_request_error", "there are no tools"),
        (json!({"thinking": {"type": "on"}}), 400, "invalid_request_error", "thinking.type: expected"),
        (
            json!({"output_config": {"effort": "loud"}}),
            400,
            "invalid_request_error",
            "output_config.effort: ",
        ),
        (
            json!({"output_config": {"task_budget": {}}}),
            400,
            "invalid_request_error",
            "output_config.task_budget",
        ),
        (
            json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            400,
            "invalid_request_error",
            "otherwise shorten the conversation",
        ),
        (
            json!({"context_management": {"edits": [{"type": "clear_thinking_20251015"}, {"type": "compact_20260112"}]}}),
            400,
            "invalid_request_error",
            "otherwise shorten the conversation",
        ),
        (json!({"container": "c"}), 400, "invalid_request_error", "runs no code"),
        (
            json!({"max_completion_tokens": 3}),
            400,
            "invalid_request_error",
            "a field of /v1/chat/completions",
        ),
        (
            json!({"stop_sequences": ["x", ""]}),
            400,
            "invalid_request_error",
            "stop_sequences must not contain an empty string",
        ),
        (
            json!({"stop_sequences": vec!["x"; 17]}),
            400,
            "invalid_request_error",
            "stop_sequences has 17 strings",
        ),
        (json!({"stop_sequence": ["x"]}), 400, "invalid_request_error", "did you mean stop_sequences?"),
    ] {
        let answer = router.client.post(PATH, &ask(fields.clone())).await;
        let body = answer.json();
        assert_eq!(
            (answer.status, &body["type"], &body["error"]["type"]),
            (status, &json!("error"), &json!(kind)),
            "{body}"
        );
        assert!(body["error"]["message"].as_str().unwrap().contains(reason), "{body} does not say {reason}");
    }
    assert!(worker.requests().is_empty());
    let refused = router
        .client
        .post(COUNT, &json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}))
        .await;
    assert_eq!((refused.status, &refused.json()["type"]), (400, &json!("error")));
    // Of paths of this API that do not exist, too.
    for (method, path, status) in [("GET", PATH, 405), ("POST", "/v1/messages/batches", 404)] {
        let answer = router.client.send(method, path, &[], bytes::Bytes::new()).await;
        assert_eq!((answer.status, &answer.json()["type"]), (status, &json!("error")), "{path}");
    }
    assert_eq!(router.client.get("/v1/messagesx").await.json()["error"]["code"], "not_found");
    // After the first event an error is an event.
    worker.script(|_| vec![Step::Token(65), Step::Fail(baton_proto::worker::failed::Kind::Invalid)]);
    let events = named_events(&router.client.post(PATH, &ask(json!({"stream": true}))).await);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_long_is_told_in_anthropics_sentences() {
    let (router, worker) = Router::with_worker().await;
    let long = json!([{"role": "user", "content": "x".repeat(600)}]);
    for (fields, expected) in [
        (json!({"messages": long, "max_tokens": 1}), "prompt is too long: 602 tokens > 511 maximum"),
        (
            json!({"max_tokens": 512, "stream": true}),
            "input length and `max_tokens` exceed context limit: 4 + 512 > 512, decrease input length or `max_tokens` \
             and try again",
        ),
    ] {
        let answer = router.client.post(PATH, &ask(fields)).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["type"]), (400, &json!("invalid_request_error")));
        assert_eq!(error["message"], expected);
    }
    assert!(worker.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thread_is_refused_so_that_clients_go_on_without_it() {
    use baton_router::UnknownFields::{Ignore, Refuse};
    for unknown in [Refuse, Ignore] {
        let (router, worker) = Router::with_worker_and(|config| config.unknown_fields = unknown).await;
        worker.script(say("Good day."));
        let refused = router.client.post(PATH, &ask(json!({"thread": {"type": "create"}}))).await;
        let error = &refused.json()["error"];
        assert_eq!((refused.status, &error["type"]), (400, &json!("invalid_request_error")), "{error}");
        let details = json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
        assert_eq!(error["details"], details);
        assert!(worker.requests().is_empty());
        let other = router.client.post(PATH, &ask(json!({"container": "c"}))).await.json();
        assert_eq!(other["error"]["details"], Value::Null);
        assert_eq!(router.client.post(PATH, &ask(json!({"thread": null}))).await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_cut_off_is_no_tool_use() {
    let (router, worker) = hermes().await;
    worker.script(say(CALL));
    let fields = json!({"tools": [add()], "stop_sequences": ["1}"]});
    let answer = router.client.post(PATH, &ask(fields)).await.json();
    assert_eq!(answer["stop_reason"], "stop_sequence");
    worker.script(say(&CALL[..45]));
    let whole = router.client.post(PATH, &ask(json!({"tools": [add()]}))).await.json();
    assert_eq!(whole["stop_reason"], "end_turn");
    let streamed = router.client.post(PATH, &ask(json!({"tools": [add()], "stream": true}))).await;
    let events = named_events(&streamed);
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "end_turn");
}

#[tokio::test(flavor = "multi_thread")]
async fn models_have_anthropics_shape_for_its_clients() {
    let (router, _worker) = Router::with_worker().await;
    let version = [("anthropic-version", "2023-06-01")];
    let list = router.client.send("GET", "/v1/models", &version, bytes::Bytes::new()).await;
    let model = list.json()["data"][0].clone();
    assert_eq!(list.json(), json!({"data": [model], "has_more": false, "first_id": MODEL, "last_id": MODEL}));
    let created = model["created_at"].as_str().unwrap();
    assert!(created.len() == 20 && created.ends_with('Z'), "{created}");
    assert_eq!(model, json!({"type": "model", "id": MODEL, "display_name": MODEL, "created_at": created}));
    assert_eq!(list.header("request-id"), list.header("x-request-id"));
    let path = format!("/v1/models/{MODEL}");
    let one = router.client.send("GET", &path, &version, bytes::Bytes::new()).await;
    assert_eq!(one.json(), model);
    let none = router.client.send("GET", "/v1/models/gpt", &version, bytes::Bytes::new()).await;
    let error = none.json();
    assert_eq!((none.status, &error["error"]["type"]), (404, &json!("not_found_error")), "{error}");
    assert_eq!(error["request_id"], none.header("x-request-id"));
    // Without the header it is a call of OpenAI's API.
    assert_eq!(router.client.get(&path).await.json()["object"], "model");
    assert_eq!(router.client.get("/v1/models/gpt").await.json()["error"]["code"], "model_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_and_errors_tell_the_id_of_the_request() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("Good day."));
    let headers = [("content-type", "application/json"), ("x-request-id", "mine-1")];
    let count = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for (method, path, body, status) in [
        ("POST", PATH, ask(json!({})), 200),
        ("POST", COUNT, count, 200),
        ("POST", PATH, ask(json!({"max_tokens": 0})), 400),
        ("POST", COUNT, json!({}), 400),
        ("GET", PATH, json!({}), 405),
        ("POST", "/v1/messages/batches", json!({}), 404),
    ] {
        let answer = router.client.send(method, path, &headers, body.to_string().into()).await;
        assert_eq!((answer.status, answer.header("request-id")), (status, "mine-1"), "{method} {path}");
        assert_eq!(answer.header("x-request-id"), "mine-1");
        if status != 200 {
            assert_eq!(answer.json()["request_id"], "mine-1", "{method} {path}");
            assert_eq!(answer.header("content-length"), answer.body.len().to_string());
        }
    }
    let made = router.client.post(PATH, &ask(json!({}))).await;
    assert_eq!(
        (made.header("request-id").len(), made.header("request-id")),
        (36, made.header("x-request-id"))
    );
    worker.script(|_| vec![Step::Token(65), Step::Fail(baton_proto::worker::failed::Kind::Invalid)]);
    let body = ask(json!({"stream": true})).to_string();
    let events = named_events(&router.client.send("POST", PATH, &headers, body.into()).await);
    assert_eq!(events.last().unwrap()["request_id"], "mine-1");
    let other = router.client.post("/v1/chat/completions", &json!({})).await;
    assert_eq!((other.header("request-id"), &other.json()["request_id"]), ("", &Value::Null));
}
