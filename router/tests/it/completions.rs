use baton_proto::{v1, worker::GenerateRequest};
use serde_json::{Value, json};

use crate::{
    fake::{Step, say},
    harness::Router,
    model::ids,
};

async fn complete(router: &Router, body: Value) -> Value {
    let answer = router.client.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_come_as_text_ids_and_lists_of_either() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|request| {
        let first = request.prompt_token_ids[0];
        vec![Step::Token(first), Step::Finish(v1::FinishReason::Length)]
    });
    let cases = [
        (json!("abc"), vec!["a"]),
        (json!(["abc", "xyz"]), vec!["a", "x"]),
        (json!([98, 99]), vec!["b"]),
        (json!([[98, 99], [100]]), vec!["b", "d"]),
    ];
    for (prompt, expected) in cases {
        let body = complete(&router, json!({"prompt": prompt})).await;
        assert_eq!(body["object"], "text_completion");
        let texts: Vec<_> = body["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["text"].as_str().unwrap())
            .collect();
        assert_eq!(texts, expected, "{prompt}");
    }
    assert_eq!(worker.requests()[0].sampling.as_ref().unwrap().max_tokens, 16, "OpenAI's default");
}

/// However many there are, and whatever follows.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_prompts_is_read_up_to_a_bound() {
    let (router, _worker) = Router::with_worker().await;
    let mut prompts = vec![json!("x"); 1025];
    prompts.push(json!({"no": "prompt"}));
    for prompts in [json!(prompts), json!(vec![json!([1]); 1025])] {
        let answer = router.client.post("/v1/completions", &json!({"prompt": prompts})).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(error["param"], "prompt", "{error}");
        assert!(error["message"].as_str().unwrap().contains("more than 1024 choices"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_of_several_prompts_are_numbered_prompt_by_prompt() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|request| {
        let prompt =
            String::from_utf8(request.prompt_token_ids.iter().map(|id| *id as u8).collect()).unwrap();
        say(&format!("{prompt}{}", request.sampling.as_ref().unwrap().seed))(request)
    });
    let body = complete(&router, json!({"prompt": ["a", "b"], "n": 2, "seed": 1})).await;
    let choices = body["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a1", "a2", "b1", "b2"]);
    let indexes: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [0, 1, 2, 3]);
    assert_eq!(body["usage"]["prompt_tokens"], 2);
}

/// Clients that send the field send what OpenAI demands: at least `n`.
#[tokio::test(flavor = "multi_thread")]
async fn the_best_of_n_are_all_of_them() {
    let (router, _worker) = Router::with_worker().await;
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    for (path, base) in [("/v1/completions", json!({"prompt": "x"})), ("/v1/chat/completions", chat)] {
        for (n, best_of, num_choices) in [(json!(2), 2, 2), (json!(2), 1, 2), (json!(null), 1, 1)] {
            let mut body = base.clone();
            (body["n"], body["best_of"]) = (n, json!(best_of));
            let answer = router.client.post(path, &body).await;
            assert_eq!(answer.status, 200, "{path} {body}: {}", answer.text());
            assert_eq!(answer.json()["choices"].as_array().map(Vec::len), Some(num_choices), "{path} {body}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_prompts_without_a_seed_have_other_answers() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("x"));
    complete(&router, json!({"prompt": ["a", "a", "a"], "n": 2})).await;
    let seed = |request: &GenerateRequest| request.sampling.as_ref().unwrap().seed;
    let mut seeds: Vec<u64> = worker.requests().iter().map(seed).collect();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 6, "{seeds:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_what_openai_sends() {
    let (router, worker) = Router::with_worker().await;
    worker.script(say("ab"));
    let body = json!({"prompt": "x", "stream": true, "stream_options": {"include_usage": true}});
    let events = router.client.post("/v1/completions", &body).await.events();
    let choices: Vec<_> = events.iter().map(|event| event["choices"].clone()).collect();
    let choice = |text: &str, reason: Option<&str>| json!([{"text": text, "index": 0, "logprobs": null, "finish_reason": reason}]);
    assert_eq!(choices, [choice("a", None), choice("b", None), choice("", Some("stop")), json!([])]);
    assert!(events[0]["usage"].is_null());
    assert_eq!(events[3]["usage"]["total_tokens"], 4);
}

/// It is among the first `min_tokens` once, and then has a text.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_token_is_no_text_and_completes_no_stop_string() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| {
        let tokens = ids("\nab\n").into_iter().map(|id| Step::Logprobs(id, -0.5, vec![(id, -0.5)]));
        tokens.chain([Step::Finish(v1::FinishReason::Stop)]).collect()
    });
    let mut body = json!({"prompt": "x", "stop_token_ids": [10], "min_tokens": 1, "return_token_ids": true});
    body["logprobs"] = json!(1);
    for stop in [json!(null), json!("ab\n")] {
        body["stop"] = stop;
        let answer = complete(&router, body.clone()).await;
        let choice = &answer["choices"][0];
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("\nab"), &json!("stop")));
        assert_eq!(choice["token_ids"], json!(ids("\nab\n")));
        assert_eq!(choice["logprobs"]["tokens"], json!(["\n", "a", "b", "\n"]));
        assert_eq!(answer["usage"]["completion_tokens"], 4);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logprobs_are_parallel_lists() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| {
        let [a, b, c] = [97, 98, 99];
        vec![
            Step::Logprobs(a, -0.5, vec![(a, -0.5)]),
            Step::Logprobs(b, f32::NEG_INFINITY, vec![(c, -0.25)]),
            Step::Finish(v1::FinishReason::Length),
        ]
    });
    let body = complete(&router, json!({"prompt": "x", "logprobs": 1})).await;
    let expected = json!({
        "tokens": ["a", "b"], "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"a": -0.5}, {"b": -9999.0, "c": -0.25}], "text_offset": [0, 1],
    });
    assert_eq!(body["choices"][0]["logprobs"], expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_become_tokens_and_back() {
    let (router, _worker) = Router::with_worker().await;
    let body = json!({"prompt": "hé", "return_token_strs": true});
    let tokens = router.client.post("/tokenize", &body).await.json();
    let expected = json!({"count": 3, "max_model_len": 512, "tokens": ids("hé"),
                          "token_strs": ["h", "\u{fffd}", "\u{fffd}"]});
    assert_eq!(tokens, expected);
    let back = router.client.post("/detokenize", &json!({"tokens": tokens["tokens"]})).await.json();
    assert_eq!(back, json!({"prompt": "hé"}));
    let chat = json!({"messages": [{"role": "user", "content": "h"}], "add_generation_prompt": false});
    assert_eq!(router.client.post("/tokenize", &chat).await.json()["tokens"], json!([257, 104]));
}
