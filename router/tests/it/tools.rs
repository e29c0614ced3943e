//! Response formats, tools and reasoning over HTTP and gRPC.

use baton_proto::v1;
use serde_json::{Value, json};

use crate::{
    client::content,
    fake::say,
    grpc::client,
    harness::Router,
    model::{END, MODEL, ids, write_template},
};

const PATH: &str = "/v1/chat/completions";
const CALL: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";

fn ask(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn tools(extra: Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let mut body = ask(json!({"tools": [tool("add"), tool("sub")]}));
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn hermes() -> (Router, crate::fake::FakeWorker) {
    Router::with_worker_and(|config| config.tool_format = Some(baton_router::ToolFormat::Hermes)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_output_must_match_reaches_the_worker() {
    let (router, worker) = Router::with_worker().await;
    let schema = json!({"type": "object", "properties": {"b": {"type": "string"}, "a": {}}});
    let kind =
        |kind: v1::grammar::Kind, text: &str| Some(v1::Grammar { kind: kind.into(), text: text.into() });
    use v1::grammar::Kind;
    for (fields, expected) in [
        (json!({"response_format": {"type": "text"}}), None),
        (json!({"response_format": {"type": "json_object"}}), kind(Kind::JsonSchema, r#"{"type":"object"}"#)),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}),
            kind(Kind::JsonSchema, &schema.to_string()),
        ),
        (json!({"structured_outputs": {"regex": "a+"}}), kind(Kind::Regex, "a+")),
        (json!({"guided_choice": ["x", "y"]}), kind(Kind::Choice, r#"["x","y"]"#)),
        (json!({"guided_grammar": "start: \"a\""}), kind(Kind::Lark, "start: \"a\"")),
    ] {
        for (path, base) in [(PATH, ask(json!({}))), ("/v1/completions", json!({"prompt": "x"}))] {
            let mut body = base;
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let answer = router.client.post(path, &body).await;
            assert_eq!(answer.status, 200, "{path} {fields}: {}", answer.text());
            let sampling = worker.requests().pop().unwrap().sampling.unwrap();
            assert_eq!(sampling.grammar, expected, "{path} {fields}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_compiled_is_refused_with_the_field_and_the_reason() {
    let (router, worker) = hermes().await;
    let named = json!({"type": "function", "function": {"name": "mul"}});
    let parameters = json!({"type": "object", "description": "y".repeat(300 << 10)});
    let long = json!({
        "tools": [{"type": "function", "function": {"name": "add", "parameters": parameters}}],
        "tool_choice": "required", "response_format": {"type": "json_object"},
    });
    for (body, param, reason) in [
        (ask(json!({"guided_regex": "("})), "guided_regex", "cannot be compiled"),
        (ask(json!({"guided_json": {"type": "colour"}})), "guided_json", "colour"),
        (ask(json!({"guided_grammar": "root ::= \"a\""})), "guided_grammar", "write Lark"),
        (ask(json!({"guided_regex": "a", "min_tokens": 1})), "min_tokens", "with a grammar"),
        (
            ask(json!({"guided_regex": "a", "guided_choice": ["b"]})),
            "guided_choice",
            "asks for a format already",
        ),
        (tools(json!({"guided_grammar": "start: \"a\""})), "guided_grammar", "a grammar and tools exclude"),
        (tools(json!({"response_format": {"type": "xml"}})), "response_format.type", "it is not"),
        (tools(json!({"tool_choice": named})), "tool_choice", "no tool \"mul\""),
        (ask(long), "tools", "bytes"),
        (ask(json!({"tool_choice": "required"})), "tool_choice", "there are no tools"),
        (ask(json!({"tools": [{"type": "retrieval"}]})), "tools[0].type", "not \"function\""),
    ] {
        let answer = router.client.post(PATH, &body).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{body}");
        assert!(error["message"].as_str().unwrap().contains(reason), "{error} does not say {reason}");
    }
    assert!(worker.requests().is_empty());
    // Without a format, a call cannot be required.
    let (router, _worker) = Router::with_worker().await;
    let answer = router.client.post(PATH, &tools(json!({"tool_choice": "required"}))).await;
    assert!(answer.status == 400 && answer.text().contains("--tool-format"), "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_read_from_an_answer() {
    let (router, worker) = hermes().await;
    worker.script(say(&format!("Let me see.\n{CALL}\n{CALL}")));
    let answer = router.client.post(PATH, &tools(json!({}))).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("Let me see."))
    );
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    for call in calls {
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        assert_eq!(
            (&call["type"], &call["function"]),
            (&json!("function"), &json!({"name": "add", "arguments": "{\"a\": 1}"}))
        );
    }
    let one = router.client.post(PATH, &tools(json!({"parallel_tool_calls": false}))).await.json();
    assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    // Nothing but a call.
    worker.script(say(CALL));
    let answer = router.client.post(PATH, &tools(json!({}))).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], Value::Null);
    // Tools that may not be called are not described, and nothing is read.
    let answer = router.client.post(PATH, &tools(json!({"tool_choice": "none"}))).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], CALL);
    let prompt = worker.requests().pop().unwrap().prompt_token_ids;
    assert!(!prompt.windows(5).any(|window| window == ids("tools")));
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_streamed_as_deltas() {
    let (router, worker) = hermes().await;
    worker.script(say(&format!("Well: {CALL}")));
    let events = router.client.post(PATH, &tools(json!({"stream": true}))).await.events();
    assert_eq!(content(&events, 0), "Well:");
    let deltas = events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array());
    let deltas: Vec<&Value> = deltas.map(|calls| &calls[0]).collect();
    assert!(deltas[0]["id"].as_str().unwrap().starts_with("call_") && deltas[0]["type"] == "function");
    assert_eq!(deltas[0]["function"], json!({"name": "add", "arguments": ""}));
    assert!(deltas.len() > 5, "arguments come as they are generated");
    let arguments: String =
        deltas.iter().map(|delta| delta["function"]["arguments"].as_str().unwrap()).collect();
    assert_eq!(arguments, "{\"a\": 1}");
    assert!(deltas.iter().all(|delta| delta["index"] == 0));
    let last = events.iter().rfind(|event| !event["choices"][0]["finish_reason"].is_null()).unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_constrain_the_output() {
    let (router, worker) = hermes().await;
    worker.script(say(CALL));
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}});
    let named = json!({"type": "function", "function": {"name": "sub"}});
    let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}});
    // Fields; whether the grammar has the tool "add", free text, and the format.
    for (fields, expected) in [
        (json!({}), Some([true, true, false])),
        (json!({"tool_choice": "auto", "response_format": format}), Some([true, false, true])),
        (json!({"tool_choice": "required"}), Some([true, false, false])),
        (json!({"tool_choice": "required", "response_format": format}), Some([true, false, false])),
        (json!({"tool_choice": named}), Some([false, false, false])),
        (json!({"tool_choice": allowed}), Some([false, true, false])),
        // A text of a grammar may end before these fields allow it.
        (json!({"min_tokens": 3}), None),
        (json!({"ignore_eos": true}), None),
    ] {
        let answer = router.client.post(PATH, &tools(fields.clone())).await;
        assert_eq!(answer.status, 200, "{fields}: {}", answer.text());
        let grammar = worker.requests().pop().unwrap().sampling.unwrap().grammar;
        let found = grammar.map(|grammar| {
            ["\\\"add\\\"", "TEXT:", "other: %json {\"type\":\"null\""]
                .map(|part| grammar.text.contains(part))
        });
        assert_eq!(found, expected, "{fields}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_strict_function_must_have_a_schema_that_can_be_compiled() {
    let (router, worker) = hermes().await;
    worker.script(say(CALL));
    let odd = |strict: Value| {
        let function = json!({"name": "odd", "strict": strict, "parameters": {"type": "object",
            "properties": {"a": {"type": "colour"}}}});
        ask(json!({"tools": [{"type": "function", "function": function}]}))
    };
    for strict in [json!(null), json!(false)] {
        let answer = router.client.post(PATH, &odd(strict)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(worker.requests().pop().unwrap().sampling.unwrap().grammar, None);
    }
    let answer = router.client.post(PATH, &odd(json!(true))).await;
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("tools")));
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_whose_grammar_is_too_long_are_not_constrained_unless_they_must_be() {
    let (router, worker) = hermes().await;
    worker.script(say(CALL));
    let parameters = json!({"type": "object", "description": "y".repeat(300 << 10)});
    let tool = |strict: Value| {
        let function = json!({"name": "add", "parameters": parameters, "strict": strict});
        json!({"type": "function", "function": function})
    };
    let answer = router.client.post(PATH, &ask(json!({"tools": [tool(json!(null))]}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(worker.requests().pop().unwrap().sampling.unwrap().grammar, None);
    assert_eq!(answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "add");
    for (strict, choice) in [(json!(true), "auto"), (json!(null), "required")] {
        let body = ask(json!({"tools": [tool(strict)], "tool_choice": choice}));
        let refused = router.client.post(PATH, &body).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("tools")), "{choice}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_cannot_be_compiled_loosens_its_own_tool_alone() {
    let (router, worker) = hermes().await;
    worker.script(say(CALL));
    let tool = |name: &str, strict: Value, a: Value| {
        let parameters = json!({"type": "object", "properties": {"a": a}, "required": ["a"]});
        json!({"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}})
    };
    let odd = json!({"type": "array", "uniqueItems": true});
    for (choice, strict) in [("auto", json!(null)), ("required", json!(false)), ("auto", json!(false))] {
        let tools = [tool("odd", strict, odd.clone()), tool("add", json!(true), json!({"enum": ["only"]}))];
        let answer = router.client.post(PATH, &ask(json!({"tools": tools, "tool_choice": choice}))).await;
        assert_eq!(answer.status, 200, "{choice}: {}", answer.text());
        let grammar =
            worker.requests().pop().unwrap().sampling.unwrap().grammar.expect("calls are constrained").text;
        assert!(grammar.contains("only") && grammar.contains("odd"), "{choice}: {grammar}");
        assert!(!grammar.contains("uniqueItems"), "{choice}: {grammar}");
    }
    let tools = [tool("add", json!(null), json!({"type": "integer"})), tool("odd", json!(true), odd)];
    let error = router.client.post(PATH, &ask(json!({"tools": tools}))).await.json()["error"].clone();
    let message = error["message"].as_str().unwrap();
    assert!(
        message.starts_with("tools[1].function.parameters: the JSON schema cannot be compiled"),
        "{message}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_is_taken_over_grpc() {
    let (router, worker) = Router::with_worker().await;
    let mut client = client(&router).await;
    let request = |text: &str| v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::Text("x".into())),
        sampling: Some(v1::SamplingParams {
            grammar: Some(v1::Grammar { kind: v1::grammar::Kind::Regex.into(), text: text.into() }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut stream = client.generate(request("[0-9]+")).await.expect("accepted").into_inner();
    while stream.message().await.expect("no error").is_some() {}
    let sampling = worker.requests().pop().unwrap().sampling.unwrap();
    assert_eq!(sampling.grammar.unwrap().text, "[0-9]+");
    assert!(sampling.stop_token_ids.contains(&END));
    let status = client.generate(request("(")).await.expect_err("refused");
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    assert!(status.message().starts_with("grammar: the regular expression cannot be compiled"), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_over_grpc_has_tools_and_says_what_its_text_is() {
    use v1::{answer_part::Part, generate_response::Event, tool_choice::Mode};
    let (router, worker) = hermes().await;
    worker.script(say(&format!("Well.\n{CALL}")));
    let mut client = client(&router).await;
    let parameters = r#"{"type": "object", "properties": {"a": {"type": "integer"}}}"#;
    let tool = v1::Tool {
        name: "add".into(),
        description: "Adds.".into(),
        parameters: parameters.into(),
        strict: None,
    };
    let message = |role: &str, content: &str| v1::ChatMessage {
        role: role.into(),
        content: content.into(),
        ..Default::default()
    };
    let call = v1::ToolCall { id: "c".into(), name: "add".into(), arguments: "{\"a\": 1}".into() };
    let chat = v1::ChatMessages {
        messages: vec![
            message("user", "U"),
            v1::ChatMessage { tool_calls: vec![call], ..message("assistant", "A") },
            v1::ChatMessage { tool_call_id: "c".into(), name: "add".into(), ..message("tool", "2") },
        ],
        tools: vec![tool],
        tool_choice: None,
        parallel_tool_calls: None,
        continue_final_message: false,
        documents: Vec::new(),
    };
    let request = |chat: &v1::ChatMessages| v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::Chat(chat.clone())),
        ..Default::default()
    };
    let mut stream = client.generate(request(&chat)).await.expect("accepted").into_inner();
    let (mut content, mut names, mut arguments) = (String::new(), Vec::new(), String::new());
    while let Some(response) = stream.message().await.expect("no error") {
        let Some(Event::Output(output)) = response.event else { continue };
        for part in output.parts {
            match part.part.expect("a part") {
                Part::Content(text) => content += &text,
                Part::Call(call) => names.push(call.name),
                Part::Arguments(text) => arguments += &text,
                Part::Reasoning(text) => panic!("{text}"),
            }
        }
    }
    assert_eq!((content.as_str(), arguments.as_str()), ("Well.", "{\"a\": 1}"));
    assert_eq!(names, ["add"]);
    let request_seen = worker.requests().pop().unwrap();
    assert!(request_seen.sampling.unwrap().grammar.unwrap().text.contains("TEXT"));
    let shown = [257].into_iter().chain(ids("U")).chain([258]).chain(ids("A<|tool|>2[1 tools]")).chain([258]);
    assert_eq!(request_seen.prompt_token_ids, shown.collect::<Vec<u32>>());

    let choice = v1::ToolChoice { mode: Mode::Named.into(), name: "add".into() };
    let named = v1::ChatMessages { tool_choice: Some(choice), ..chat.clone() };
    let mut stream = client.generate(request(&named)).await.expect("accepted").into_inner();
    while stream.message().await.expect("no error").is_some() {}
    assert!(
        worker.requests().pop().unwrap().sampling.unwrap().grammar.unwrap().text.contains("answer: call\n")
    );

    let odd = r#"{"type": "object", "properties": {"a": {"type": "colour"}}}"#;
    for (parameters, wrong) in [("{", "it is not JSON"), (odd, "the JSON schema cannot be compiled")] {
        let mut bad = chat.clone();
        bad.tools[0] = v1::Tool { parameters: parameters.into(), strict: Some(true), ..bad.tools[0].clone() };
        let status = client.generate(request(&bad)).await.expect_err("refused");
        assert!(status.message().starts_with(&format!("tools[0].parameters: {wrong}")), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_cannot_be_compiled_is_named_as_its_api_names_it() {
    let (router, _worker) = hermes().await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "colour"}}});
    let of_responses = json!({"type": "function", "name": "odd", "strict": true, "parameters": schema});
    let of_messages = json!({"name": "odd", "strict": true, "input_schema": schema});
    for (path, body, name) in [
        ("/v1/responses", json!({"input": "Hi", "tools": [of_responses]}), "parameters"),
        (
            "/v1/messages",
            ask(json!({"model": MODEL, "max_tokens": 9, "tools": [of_messages]})),
            "input_schema",
        ),
    ] {
        let answer = router.client.post(path, &body).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
        let error = answer.json()["error"].clone();
        let begins = format!("tools[0].{name}: the JSON schema cannot be compiled");
        assert!(error["message"].as_str().expect("a message").starts_with(&begins), "{path}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mistrals_templates_see_ids_of_nine_letters_and_digits() {
    use baton_router::ToolFormat::{Hermes, Mistral, MistralArgs};
    let template = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.id }},{% endfor %}{% endif %}\
                    {% if m.tool_call_id %}{{ m.tool_call_id }},{% endif %}{% endfor %}";
    let (long, short) = ("call_0123456789abcdef0123456789abcdef0", "a1B2c3D4e");
    let call =
        |id: &str| json!({"id": id, "type": "function", "function": {"name": "add", "arguments": "{}"}});
    let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "2"});
    let called = json!({"role": "assistant", "content": null, "tool_calls": [call(long), call(short)]});
    let messages = json!([{"role": "user", "content": "U"}, called, result(short), result(long)]);
    for (format, is_mistrals) in [(Mistral, true), (MistralArgs, true), (Hermes, false)] {
        let (router, worker) = Router::with_worker_and(|config| {
            config.tool_format = Some(format);
            write_template(&config.model, template);
        })
        .await;
        worker.script(say("Two."));
        let answer = router.client.post(PATH, &json!({"messages": messages})).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let prompt = worker.requests().pop().unwrap().prompt_token_ids;
        let prompt: String = prompt.into_iter().map(|id| char::from(id as u8)).collect();
        let seen: Vec<&str> = prompt.split_terminator(',').collect();
        assert_eq!((seen.len(), seen[1], seen[2]), (4, short, short), "{prompt}");
        assert_eq!(seen[0], seen[3], "a call and its result");
        match is_mistrals {
            true => assert!(seen[0].len() == 9 && seen[0].bytes().all(|byte| byte.is_ascii_alphanumeric())),
            false => assert_eq!(seen[0], long),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn llamas_templates_see_each_call_before_its_result() {
    let template = "{% for m in messages %}{% if m.tool_calls %}\
                    {% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}\
                    {{ m.content }}({{ m.tool_calls[0].function.arguments.a }})\
                    {% elif m.role == 'tool' %}={{ m.content }}{% endif %}{% endfor %}";
    let (router, worker) = Router::with_worker_and(|config| {
        config.tool_format = Some(baton_router::ToolFormat::Llama3);
        write_template(&config.model, template);
    })
    .await;
    worker.script(say("Three."));
    let arguments = |a: u32| format!("{{\"a\": {a}}}");
    let call = |id: &str, a: u32| json!({"id": id, "type": "function", "function": {"name": "add", "arguments": arguments(a)}});
    let result = |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    let called = json!({"role": "assistant", "content": "A", "tool_calls": [call("c1", 1), call("c2", 2)]});
    let chat = json!({"messages": [called, result("c2", "two"), result("c1", "one")]});
    let item = |id: &str, a: u32| json!({"type": "function_call", "call_id": id, "name": "add", "arguments": arguments(a)});
    let output =
        |id: &str, text: &str| json!({"type": "function_call_output", "call_id": id, "output": text});
    let responses = json!({"input": [{"role": "assistant", "content": "A"}, item("c1", 1), item("c2", 2),
        output("c2", "two"), output("c1", "one")]});
    let used = |id: &str, a: u32| json!({"type": "tool_use", "id": id, "name": "add", "input": {"a": a}});
    let messages = json!({"max_tokens": 20, "messages": [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": [{"type": "text", "text": "A"}, used("c1", 1), used("c2", 2)]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c2", "content": "two", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_result", "tool_use_id": "c1", "content": "one"}]}]});
    let shown = "A(1)=one(2)=two";
    for (path, body) in [(PATH, chat), ("/v1/responses", responses), ("/v1/messages", messages)] {
        let answer = router.client.post(path, &body).await;
        assert_eq!(answer.status, 200, "{path} {}", answer.text());
        assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids(shown), "{path}");
    }
    // The mark has moved with its text.
    let kept = worker.requests().pop().unwrap().retention.unwrap().kept;
    assert_eq!(kept.iter().map(|prefix| prefix.num_tokens as usize).collect::<Vec<_>>(), [shown.len()]);

    let call = |id: &str, a: u32| v1::ToolCall { id: id.into(), name: "add".into(), arguments: arguments(a) };
    let message = |role: &str, content: &str, id: &str| v1::ChatMessage {
        role: role.into(),
        content: content.into(),
        tool_call_id: id.into(),
        ..Default::default()
    };
    let tool_calls = vec![call("c1", 1), call("c2", 2)];
    let called = v1::ChatMessage { tool_calls, ..message("assistant", "A", "") };
    let messages = vec![called, message("tool", "two", "c2"), message("tool", "one", "c1")];
    let chat = v1::ChatMessages { messages, ..Default::default() };
    let prompt = Some(v1::generate_request::Prompt::Chat(chat));
    let request = v1::GenerateRequest { prompt, ..Default::default() };
    let mut stream = client(&router).await.generate(request).await.expect("accepted").into_inner();
    while stream.message().await.expect("no error").is_some() {}
    assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids(shown));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_in_a_channel_is_continued() {
    let messages =
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I wish you a good"}]);
    let chat = json!({"messages": messages, "continue_final_message": true});
    for (channel, key, kind) in [("final", "content", "text"), ("analysis", "reasoning_content", "thinking")]
    {
        let template = format!(
            "{{% for m in messages %}}<|start|>{{{{ m.role }}}}<|channel|>{channel}<|message|>{{{{ m.content }}}}<|end|>\
             {{% endfor %}}"
        );
        let (router, worker) = Router::with_worker_and(|config| {
            config.tool_format = Some(baton_router::ToolFormat::Harmony);
            write_template(&config.model, &template);
        })
        .await;
        worker.script(say(" day.<|return|>"));
        let answer = router.client.post(PATH, &chat).await.json();
        assert_eq!(answer["choices"][0]["message"][key], " day.", "{answer}");
        let body = json!({"messages": messages, "max_tokens": 100});
        let answer = router.client.post("/v1/messages", &body).await.json();
        assert_eq!(answer["content"][0][kind], " day.", "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gpt_oss_templates_see_reasoning_that_comes_back() {
    let template = "{% for m in messages %}{% if m.tool_calls %}\
                    {% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}\
                    [{{ m.thinking or m.content }}]{% endif %}{% endfor %}";
    let (router, worker) = Router::with_worker_and(|config| {
        config.tool_format = Some(baton_router::ToolFormat::Harmony);
        write_template(&config.model, template);
    })
    .await;
    worker.script(say("<|channel|>final<|message|>Two."));
    let call = json!({"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}});
    let result = json!({"role": "tool", "tool_call_id": "c", "content": "2"});
    let called = |fields: Value| {
        let mut message = json!({"role": "assistant", "content": "A", "tool_calls": [call]});
        message.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"messages": [message, result]})
    };
    let responses = json!({"input": [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
        {"role": "assistant", "content": "A"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"}]});
    let messages = json!({"max_tokens": 100, "messages": [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "T", "signature": ""}, {"type": "text", "text": "A"},
            {"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]}]});
    for (path, body, shown) in [
        (PATH, called(json!({"reasoning_content": "T"})), "[T]"),
        (PATH, called(json!({})), "[A]"),
        ("/v1/responses", responses, "[T]"),
        ("/v1/messages", messages, "[T]"),
    ] {
        let answer = router.client.post(path, &body).await;
        assert_eq!(answer.status, 200, "{path} {}", answer.text());
        assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids(shown), "{path}");
    }
    let call = v1::ToolCall { id: "c".into(), name: "add".into(), arguments: "{}".into() };
    let message = v1::ChatMessage {
        role: "assistant".into(),
        content: "A".into(),
        reasoning: "T".into(),
        tool_calls: vec![call],
        ..Default::default()
    };
    let chat = v1::ChatMessages { messages: vec![message], ..Default::default() };
    let prompt = Some(v1::generate_request::Prompt::Chat(chat));
    let request = v1::GenerateRequest { prompt, ..Default::default() };
    let mut stream = client(&router).await.generate(request).await.expect("accepted").into_inner();
    while stream.message().await.expect("no error").is_some() {}
    assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids("[T]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn gpt_oss_templates_see_each_of_several_calls() {
    let template = "{% for m in messages %}{% if m.tool_calls %}\
                    {{ m.thinking or '' }}({{ m.tool_calls[0].function.arguments.a }})\
                    {% elif m.role == 'tool' %}={{ m.content }}{% endif %}{% endfor %}";
    let (router, worker) = Router::with_worker_and(|config| {
        config.tool_format = Some(baton_router::ToolFormat::Harmony);
        write_template(&config.model, template);
    })
    .await;
    worker.script(say("<|channel|>final<|message|>Three."));
    let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}});
    let calls = [call("c1", "{\"a\": 1}"), call("c2", "{\"a\": 2}")];
    let result = |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    let called = json!({"role": "assistant", "content": "", "reasoning_content": "T", "tool_calls": calls});
    let chat = json!({"messages": [called, result("c1", "one"), result("c2", "two")]});
    let answer = router.client.post(PATH, &chat).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(worker.requests().pop().unwrap().prompt_token_ids, ids("T(1)=one(2)=two"));
}

#[tokio::test(flavor = "multi_thread")]
async fn arguments_of_earlier_calls_are_read_alike_over_http_and_grpc() {
    let template = "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}\
                    {% endif %}{% endfor %}";
    let (router, worker) = Router::with_worker_and(|config| write_template(&config.model, template)).await;
    let mut client = client(&router).await;
    for (sent, shown) in [("{\"a\": 1}", "{\"a\": 1}"), (" ", "{}"), ("[1]", "\"[1]\""), ("1.", "\"1.\"")] {
        let function = json!({"name": "add", "arguments": sent});
        let call = json!({"id": "c", "type": "function", "function": function});
        let said = json!({"role": "assistant", "content": null, "tool_calls": [call]});
        let answer = router.client.post(PATH, &json!({"messages": [said]})).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let call = v1::ToolCall { id: "c".into(), name: "add".into(), arguments: sent.into() };
        let said = v1::ChatMessage { role: "assistant".into(), tool_calls: vec![call], ..Default::default() };
        let chat = v1::ChatMessages { messages: vec![said], ..Default::default() };
        let prompt = Some(v1::generate_request::Prompt::Chat(chat));
        let request = v1::GenerateRequest { prompt, ..Default::default() };
        let mut stream = client.generate(request).await.expect("accepted").into_inner();
        while stream.message().await.expect("no error").is_some() {}
        let requests = worker.requests();
        for request in &requests[requests.len() - 2..] {
            assert_eq!(request.prompt_token_ids, ids(shown), "{sent}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_ends_within_a_call_says_what_ended_it() {
    let (router, worker) = hermes().await;
    worker.script(say(&format!("{CALL}\n{CALL}")));
    for (fields, expected) in [
        (json!({"stop": "\n</"}), "tool_calls"),
        (json!({"stop": "1}"}), "stop"),
        (json!({"max_tokens": 45}), "length"),
    ] {
        let whole = router.client.post(PATH, &tools(fields.clone())).await.json();
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], expected, "{fields}");
        assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
        let mut fields = fields;
        fields["stream"] = json!(true);
        let events = router.client.post(PATH, &tools(fields)).await.events();
        let last = events.iter().rfind(|event| !event["choices"][0]["finish_reason"].is_null()).unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], expected);
    }
    // The model itself ended it.
    worker.script(say(&CALL[..45]));
    let answer = router.client.post(PATH, &tools(json!({}))).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "add");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_call_that_is_cut_early_is_no_content() {
    let (router, worker) = hermes().await;
    worker.script(say(CALL));
    // Within the mark, behind it, and within the name.
    for max_tokens in [5, 13, 24] {
        let fields = json!({"tool_choice": "required", "max_tokens": max_tokens});
        let answer = router.client.post(PATH, &tools(fields)).await.json();
        let choice = &answer["choices"][0];
        assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("length"), &json!("")));
        let fields = json!({"tool_choice": "required", "max_tokens": max_tokens, "stream": true});
        assert_eq!(content(&router.client.post(PATH, &tools(fields)).await.events(), 0), "");
    }
    // An answer that may be text is one.
    let answer = router.client.post(PATH, &tools(json!({"max_tokens": 13}))).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "<tool_call>\n{");
}
