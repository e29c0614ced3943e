//! Every field of the request schemas of OpenAI and vLLM, with a value that asks for something: it is honoured, it is
//! harmless, or the request is refused. None is accepted and ignored.

use serde_json::{Value, json};

use crate::harness::Router;

/// Fields that may be answered with 200: honoured, or without effect on the answer. The others must be refused.
const ACCEPTED: &[&str] = &[
    "messages",
    "documents",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "stop",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "tools",
    "parallel_tool_calls",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "echo",
    "return_token_ids",
    "cache_salt",
    "priority",
    "stream_options",
    "stream",
    "prompt",
    "user",
    "metadata",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "guided_decoding_backend",
];

/// `CreateChatCompletionRequest` of OpenAI's API (2025), and what vLLM's `ChatCompletionRequest` adds.
fn chat_fields() -> Value {
    json!({
        "model": crate::model::MODEL, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
        "prompt_cache_retention": "24h", "service_tier": "flex", "temperature": 0.5, "top_p": 0.5,
        "top_logprobs": 2, "logprobs": true, "max_completion_tokens": 2, "max_tokens": 2, "n": 2, "stop": ["x"],
        "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"1": 1.0}, "stream": true,
        "stream_options": {"include_usage": true}, "store": true, "reasoning_effort": "high", "verbosity": "low",
        "modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"},
        "prediction": {"type": "content", "content": "x"}, "web_search_options": {}, "tool_choice": "required",
        "parallel_tool_calls": false, "response_format": {"type": "json_object"}, "function_call": "auto",
        "functions": [{"name": "f"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "best_of": 2, "use_beam_search": true, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1,
        "length_penalty": 2.0, "stop_token_ids": [1], "include_stop_str_in_output": true, "ignore_eos": true,
        "min_tokens": 1, "skip_special_tokens": false, "spaces_between_special_tokens": false,
        "truncate_prompt_tokens": 4, "prompt_logprobs": 1, "allowed_token_ids": [1, 2], "bad_words": ["x"],
        "echo": true, "add_generation_prompt": false, "continue_final_message": true, "add_special_tokens": true,
        "documents": [{"text": "x"}], "chat_template": "x", "chat_template_kwargs": {"a": 1},
        "mm_processor_kwargs": {}, "structured_outputs": {"regex": "a"}, "structural_tag": "x",
        "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "start: \"a\"",
        "guided_decoding_backend": "x", "guided_whitespace_pattern": "x", "priority": 1, "request_id": "r",
        "logits_processors": ["x"], "return_tokens_as_token_ids": true, "return_token_ids": true,
        "cache_salt": "s", "kv_transfer_params": {}, "vllm_xargs": {"a": 1}, "include_reasoning": false,
        "thinking_token_budget": 1, "repetition_detection": {}, "prompt_embeds": "x", "grammar": "x",
        "json_schema": {}, "n_predict": 3, "max_tokns": 3, "suffix": "x",
    })
}

/// `CreateCompletionRequest` of OpenAI's API, and what vLLM's `CompletionRequest` adds.
fn completion_fields() -> Value {
    let mut fields = chat_fields();
    let fields_map = fields.as_object_mut().unwrap();
    fields_map["logprobs"] = json!(2);
    fields_map["add_special_tokens"] = json!(false);
    fields
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_is_honoured_or_harmless_or_refused() {
    let (router, _worker) = Router::with_worker().await;
    let cases = [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "x"}]}), chat_fields()),
        ("/v1/completions", json!({"prompt": "x"}), completion_fields()),
    ];
    for (path, base, fields) in cases {
        for (name, value) in fields.as_object().unwrap() {
            let mut body = base.clone();
            body[name] = value.clone();
            if name == "top_logprobs" && path.contains("chat") {
                body["logprobs"] = json!(true);
            }
            let answer = router.client.post(path, &body).await;
            let text = answer.text();
            match answer.status {
                200 => assert!(ACCEPTED.contains(&name.as_str()), "{path}: {name} is ignored"),
                400 => {
                    let param = answer.json()["error"]["param"].clone();
                    assert_eq!(param, name.as_str(), "{path}: {text}");
                    let is_refused_here = !ACCEPTED.contains(&name.as_str())
                        || [
                            "tools",
                            "documents",
                            "parallel_tool_calls",
                            "max_completion_tokens",
                            "top_logprobs",
                            "chat_template_kwargs",
                            "add_generation_prompt",
                            "continue_final_message",
                            "echo",
                        ]
                        .contains(&name.as_str());
                    assert!(is_refused_here, "{path}: {text}");
                }
                status => panic!("{path} {name}: {status} {text}"),
            }
            // Absent and null are the same.
            body[name] = Value::Null;
            if base.get(name).is_none() {
                assert_eq!(router.client.post(path, &body).await.status, 200, "{path}: {name} null");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_can_be_ignored_and_known_ones_cannot() {
    let change = |config: &mut baton_router::RouterConfig| {
        config.unknown_fields = baton_router::UnknownFields::Ignore;
    };
    let (router, _worker) = Router::with_worker_and(change).await;
    let path = "/v1/completions";
    assert_eq!(router.client.post(path, &json!({"prompt": "x", "max_tokns": 3})).await.status, 200);
    assert_eq!(router.client.post(path, &json!({"prompt": "x", "grammar": "x"})).await.status, 400);
}
