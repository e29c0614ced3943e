//! OpenAI's Responses over HTTP.

use serde_json::{Value, json};

use crate::{
    client::named_events,
    fake::say,
    harness::Router,
    model::{MODEL, ids, write_template},
};

const PATH: &str = "/v1/responses";
const CALL: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";

fn add() -> Value {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    json!({"type": "function", "name": "add", "description": "Adds.", "parameters": parameters})
}

async fn hermes() -> (Router, crate::fake::FakeWorker) {
    Router::with_worker_and(|config| config.tool_format = Some(baton_router::ToolFormat::Hermes)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_is_a_message_and_the_request_is_repeated() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("Good day."));
    let body = json!({
        "model": MODEL, "input": "Hi", "instructions": "Be kind.", "metadata": {"a": "b"}, "temperature": 0.7,
        "top_p": 0.9, "max_output_tokens": 40, "store": false,
    });
    let answer = router.client.post(PATH, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
    let message = &answer["output"][0];
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(message["content"][0]["text"], "Good day.");
    let prompt = "<|system|>Be kind.<|user|>Hi<|assistant|>";
    let usage = &answer["usage"];
    let request = worker.requests().pop().unwrap();
    assert_eq!(usage["input_tokens"], request.prompt_token_ids.len());
    assert_eq!(
        (&usage["output_tokens"], &usage["input_tokens_details"]["cached_tokens"]),
        (&json!(10), &json!(3))
    );
    assert_eq!(usage["input_tokens_details"], json!({"cached_tokens": 3, "cache_write_tokens": 0}));
    let system: Vec<u32> =
        ids("<|system|>Be kind.").into_iter().chain([257]).chain(ids("Hi")).chain([258]).collect();
    assert_eq!(request.prompt_token_ids, system, "{prompt}");
    for field in ["instructions", "metadata", "temperature", "top_p", "max_output_tokens", "store"] {
        assert_eq!(answer[field], body[field], "{field}");
    }
    // An answer that is cut off.
    let cut = router.client.post(PATH, &json!({"input": "Hi", "max_output_tokens": 4})).await.json();
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]),
        (&json!("incomplete"), &json!({"reason": "max_output_tokens"}))
    );
    assert_eq!(cut["output"][0]["content"][0]["text"], "Good");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_with_calls_is_a_chat() {
    let (router, worker) = hermes().await;
    worker.script(say(&format!("Let me see.\n{CALL}")));
    let input = json!([
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{\"a\": 1}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "A", "annotations": []}, {"type": "refusal", "refusal": "R"}]},
    ]);
    let answer = router.client.post(PATH, &json!({"input": input, "tools": [add()]})).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let output = answer["output"].as_array().unwrap();
    assert_eq!(
        output.iter().map(|item| item["type"].as_str().unwrap()).collect::<Vec<_>>(),
        ["message", "function_call"]
    );
    assert_eq!(output[0]["content"][0]["text"], "Let me see.");
    assert_eq!((&output[1]["name"], &output[1]["arguments"]), (&json!("add"), &json!("{\"a\": 1}")));
    assert!(output[1]["call_id"].as_str().unwrap().starts_with("call_"));
    let prompt = worker.requests().pop().unwrap().prompt_token_ids;
    // The template of the test shows roles and contents.
    let shown =
        ids("<|system|>D").into_iter().chain([257]).chain(ids("U")).chain([258]).chain(ids("<|tool|>2"));
    let shown: Vec<u32> = shown.chain([258]).chain(ids("A\nR[1 tools]")).chain([258]).collect();
    assert_eq!(prompt, shown);
    // Choices and formats reach the grammar.
    for (fields, part) in [
        (json!({"tool_choice": {"type": "function", "name": "add"}}), "answer: call\n"),
        (
            json!({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [add()]}}),
            "answer: call (\"\\n\" call)*",
        ),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}}}}),
            "other: %json {\"type\":\"null\"",
        ),
        (
            json!({"tool_choice": "none", "text": {"format": {"type": "json_object"}}}),
            "{\"type\":\"object\"}",
        ),
    ] {
        let mut body = json!({"input": "x", "tools": [add()]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = router.client.post(PATH, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let grammar = worker.requests().pop().unwrap().sampling.unwrap().grammar.unwrap().text;
        assert!(grammar.contains(part), "{grammar}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_effort_of_reasoning_is_what_the_template_is_told() {
    let said = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let switch = "{% if enable_thinking is defined %}[{{ 'on' if enable_thinking else 'off' }}]{% endif %}";
    let effort = "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}";
    let refuses = "{% if reasoning_effort == 'max' %}{{ raise_exception('no') }}{% endif %}";
    for (template, reasoning, shown) in [
        (format!("{said}{switch}"), json!({"effort": "none"}), Some("Hi[off]")),
        (format!("{said}{switch}"), json!({"effort": "low", "summary": "auto"}), Some("Hi[on]")),
        (format!("{said}{switch}{effort}"), json!({"effort": "low"}), Some("Hi[on][low]")),
        (format!("{said}{switch}{effort}"), json!({"effort": "none"}), Some("Hi[off]")),
        (format!("{said}{switch}{effort}"), json!({"effort": null, "summary": "auto"}), Some("Hi")),
        // A hint that the template does not know.
        (format!("{said}{switch}{effort}{refuses}"), json!({"effort": "max"}), Some("Hi[on]")),
        (format!("{said}{effort}{{# </think> #}}"), json!({"effort": "none"}), None),
    ] {
        let (router, worker) =
            Router::with_worker_and(|config| write_template(&config.model, &template)).await;
        worker.script(say("Good day."));
        let answer = router.client.post(PATH, &json!({"input": "Hi", "reasoning": reasoning})).await;
        match shown {
            Some(shown) => {
                assert_eq!(answer.status, 200, "{template}: {}", answer.text());
                assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids(shown), "{template}");
            }
            None => assert_eq!(answer.json()["error"]["param"], "reasoning.effort", "{template}"),
        }
    }
}

/// As that program sends it.
#[tokio::test(flavor = "multi_thread")]
async fn the_body_of_codex_is_served_with_its_functions() {
    let (router, worker) = hermes().await;
    worker.script(say(CALL));
    let other = ["web_search", "web_search_preview_2025_03_11", "local_shell", "image_generation"];
    let mut tools: Vec<Value> = other.iter().map(|kind| json!({"type": kind})).collect();
    tools.push(json!({"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}));
    tools.push(json!({"type": "namespace", "name": "mcp", "tools": [add()]}));
    let mut body = json!({
        "model": MODEL, "instructions": "S", "tool_choice": "auto", "parallel_tool_calls": true, "store": false,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"id": "i"},
    });
    for (functions, shown) in [(vec![], "Hi"), (vec![add()], "Hi[1 tools]")] {
        body["tools"] = tools.iter().chain(&functions).cloned().collect();
        let answer = router.client.post(PATH, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["tools"], json!(functions));
        let prompt = worker.requests().pop().unwrap().prompt_token_ids;
        let shown: Vec<u32> =
            ids("<|system|>S").into_iter().chain([257]).chain(ids(shown)).chain([258]).collect();
        assert_eq!(prompt, shown);
    }
    // A call can still be required, of a function.
    body["tool_choice"] = json!("required");
    let answer = router.client.post(PATH, &body).await.json();
    assert_eq!(answer["output"][0]["name"], "add", "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_every_event_and_ends_with_the_whole_response() {
    let (router, worker) = hermes().await;
    worker.script(say(&format!("Well.\n{CALL}")));
    let body = json!({"input": "x", "tools": [add()], "stream": true});
    let events = named_events(&router.client.post(PATH, &body).await);
    for (idx, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], idx);
    }
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let deltas = |kind: &str| -> String {
        let deltas = events.iter().filter(|event| event["type"] == kind);
        deltas.map(|event| event["delta"].as_str().unwrap()).collect()
    };
    assert_eq!(deltas("response.output_text.delta"), "Well.");
    assert_eq!(deltas("response.function_call_arguments.delta"), "{\"a\": 1}");
    assert_eq!(events[0]["response"]["output"], json!([]));
    let whole = &events.last().unwrap()["response"];
    let done: Vec<&Value> =
        events.iter().filter(|event| event["type"] == "response.output_item.done").collect();
    assert_eq!(whole["output"], json!([done[0]["item"], done[1]["item"]]));
    assert!(
        whole["usage"]["output_tokens"].as_u64().unwrap() > 10 && whole["id"] == events[0]["response"]["id"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_ends_a_stream_with_its_event() {
    use crate::fake::Step;
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| vec![Step::Token(65), Step::Fail(baton_proto::worker::failed::Kind::Invalid)]);
    let events = named_events(&router.client.post(PATH, &json!({"input": "x", "stream": true})).await);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(last["response"]["error"]["message"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_done_is_refused_by_field() {
    let (router, worker) = Router::with_worker().await;
    let many: Value = (0..17).map(|idx| (format!("k{idx}"), json!("v"))).collect();
    for (fields, param, reason) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id", "keeps no answers"),
        (json!({"conversation": "c"}), "conversation", "keeps no conversations"),
        (json!({"store": true}), "store", "anything but `false`"),
        (json!({"background": true}), "background", "anything but"),
        (json!({"metadata": {"a": [{}]}}), "metadata", "up to 16 strings"),
        (json!({"metadata": ["a"]}), "metadata", "up to 16 strings"),
        (json!({"metadata": {"k".repeat(65): "v"}}), "metadata", "names of up to 64"),
        (json!({"metadata": {"k": "v".repeat(513)}}), "metadata", "up to 512 characters"),
        (json!({"metadata": many}), "metadata", "up to 16 strings"),
        (json!({"truncation": "auto"}), "truncation", "anything but"),
        (json!({"include": ["message.output_text.logprobs"]}), "include", "anything but an empty list"),
        (json!({"reasoning": {"effort": "loud", "summary": null}}), "reasoning.effort", "expected \"none\""),
        (json!({"reasoning": {"context": "all"}}), "reasoning.context", "not supported"),
        (json!({"context_management": [{"type": "compaction"}]}), "context_management", "shorten"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type", "retrieval"),
        (json!({"tools": [{"type": "mcp"}], "tool_choice": "required"}), "tool_choice", "there are no tools"),
        (
            json!({"tools": [add(), {"type": "custom", "name": "x"}], "tool_choice": {"type": "custom", "name": "x"}}),
            "tool_choice.type",
            "no tools of its own",
        ),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name", "missing"),
        (json!({"tool_choice": {"type": "file_search"}}), "tool_choice.type", "no tools of its own"),
        (
            json!({"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [add()]}}),
            "tool_choice.mode",
            "it is not \"auto\" or \"required\"",
        ),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type", "it is not"),
        (json!({"text": {"verbosity": "loud"}}), "text.verbosity", "not supported"),
        (json!({"max_output_tokens": 0}), "max_output_tokens", "max_output_tokens"),
        (json!({"max_tokens": 3}), "max_tokens", "a field of /v1/chat/completions"),
        (json!({"max_output_tokns": 3}), "max_output_tokns", "did you mean max_output_tokens?"),
        (json!({"input": []}), "input", "a string or a list of items"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type", "keeps no items"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0].type",
            "input_image",
        ),
        (json!({"input": [{"role": "evil", "content": "x"}]}), "input", "no evil"),
    ] {
        let mut body = json!({"input": "x"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = router.client.post(PATH, &body).await;
        assert_eq!(answer.status, 400, "{fields}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(reason), "{error} does not say {reason}");
    }
    assert!(worker.requests().is_empty());
    let answer = router.client.post("/v1/embeddings", &json!({"input": "x"})).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (501, &json!("not_implemented")));
    assert_eq!(answer.header("x-should-retry"), "false");
}

/// Every running answer keeps what it repeats.
#[tokio::test(flavor = "multi_thread")]
async fn what_answers_repeat_has_a_bound_while_they_run() {
    use crate::fake::Step;
    let (router, worker) = Router::with_worker_and(|config| config.max_bodies_bytes = 500_000).await;
    worker.script(|_| vec![Step::Token(65), Step::Hang]);
    let pairs: Value = (0..16).map(|idx| (format!("{idx:064}"), json!("\u{1f600}".repeat(512)))).collect();
    let body = json!({"input": "x", "stream": true, "metadata": pairs, "user": "u".repeat(200_000)});
    let headers = [("content-type", "application/json")];
    let running = router.client.begin("POST", PATH, &headers, body.to_string().into()).await;
    let refused = router.client.post(PATH, &body).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    drop(running);
    router.until_metric("baton_router_body_bytes 0").await;
    worker.script(say("Good day."));
    let answer = router.client.post(PATH, &json!({"input": "x", "metadata": pairs})).await;
    assert_eq!((answer.status, &answer.json()["metadata"]), (200, &pairs));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_cut_off_is_incomplete() {
    let (router, worker) = hermes().await;
    for (answer, status) in [(CALL, "completed"), (&CALL[..45], "incomplete")] {
        worker.script(say(answer));
        let answer = router.client.post(PATH, &json!({"input": "Hi", "tools": [add()]})).await.json();
        let call = &answer["output"][0];
        assert_eq!((&call["type"], &call["status"]), (&json!("function_call"), &json!(status)), "{answer}");
    }
}
