//! The tokens of prompts and answers, and prompts before their answers.

use baton_cluster::Role;
use serde_json::{Value, json};

use crate::{
    fake::{FakeWorker, Step},
    harness::Router,
    model::{END, MODEL, write_sentence_piece},
};
use baton_proto::{v1, worker::failed::Kind};

async fn scripted() -> (Router, crate::fake::FakeWorker) {
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| {
        // 195 and 169 are the two bytes of "é": the first completes no character.
        let mut steps: Vec<Step> = [65, 195, 169, END].map(Step::Token).into();
        steps.push(Step::Finish(v1::FinishReason::Stop));
        steps
    });
    (router, worker)
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().into_iter().flatten().map(|id| id.as_u64().expect("an id")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tokens_of_a_prompt_and_of_its_answer_are_told_if_asked() {
    let (router, _worker) = scripted().await;
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    for (path, base) in [("/v1/chat/completions", chat), ("/v1/completions", json!({"prompt": "ab", "n": 2}))]
    {
        let mut body = base;
        let plain = router.client.post(path, &body).await.text();
        assert!(!plain.contains("token_ids"), "{plain}");
        body["return_token_ids"] = json!(true);
        let whole = router.client.post(path, &body).await.json();
        let prompt = |value: &Value| match path {
            "/v1/completions" => ids(&value["choices"][0]["prompt_token_ids"]),
            _ => ids(&value["prompt_token_ids"]),
        };
        assert_eq!(prompt(&whole).len() as u64, whole["usage"]["prompt_tokens"].as_u64().unwrap());
        let generated = ids(&whole["choices"][0]["token_ids"]);
        assert_eq!(generated[..3], [65, 195, 169]);
        body["stream"] = json!(true);
        let chunks = router.client.post(path, &body).await.events();
        let of_first = |chunk: &&Value| chunk["choices"][0]["index"] == 0;
        let streamed =
            chunks.iter().filter(of_first).flat_map(|chunk| ids(&chunk["choices"][0]["token_ids"]));
        assert_eq!(streamed.collect::<Vec<_>>(), generated, "{path}");
        let prompts: Vec<_> =
            chunks.iter().filter(of_first).map(prompt).filter(|ids| !ids.is_empty()).collect();
        assert_eq!(prompts, [prompt(&whole)], "{path}: told once");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_echoed_prompt_comes_before_the_answer() {
    let (router, _worker) = scripted().await;
    let path = "/v1/completions";
    for prompt in [json!("ab"), json!([97, 98])] {
        let mut body = json!({"model": MODEL, "prompt": prompt, "echo": true, "n": 2});
        let whole = router.client.post(path, &body).await.json();
        for choice in whole["choices"].as_array().unwrap() {
            assert_eq!(choice["text"], "abA\u{e9}", "{whole}");
        }
        body["stream"] = json!(true);
        let chunks = router.client.post(path, &body).await.events();
        let of_second = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == 1);
        let text: String = of_second.filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, "abA\u{e9}");
    }
    let streamed = json!({"prompt": "ab", "echo": true, "logprobs": 1, "stream": true});
    let answer = router.client.post(path, &streamed).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["error"]["param"], "echo");
}

/// Special tokens in a text are part of it, those among ids are not.
#[tokio::test(flavor = "multi_thread")]
async fn an_echoed_text_is_what_was_sent() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|_| {
        let scored = Step::Scored(1, vec![(257, -0.5), (98, -1.0)]);
        vec![scored, Step::Logprobs(65, -0.25, Vec::new()), Step::Finish(v1::FinishReason::Length)]
    });
    for (prompt, text, offsets) in
        [(json!("a<|user|>b"), "a<|user|>bA", [0, 1, 9, 10]), (json!([97, 257, 98]), "abA", [0, 1, 1, 2])]
    {
        let body = json!({"prompt": prompt, "max_tokens": 1, "logprobs": 0, "echo": true});
        let answer = router.client.post("/v1/completions", &body).await.json();
        let choice = &answer["choices"][0];
        assert_eq!(choice["text"], text, "{answer}");
        assert_eq!(choice["logprobs"]["text_offset"], json!(offsets), "{answer}");
    }
}

/// Tells half of a prompt's log-probabilities and fails. The next attempt tells all.
async fn scored() -> (Router, crate::fake::FakeWorker) {
    let (router, worker) = Router::with_worker().await;
    worker.script(|request| {
        let all = [(98, -0.5), (99, -1.0), (100, -2.0)];
        match request.attempt {
            0 => vec![Step::Scored(1, all[..2].into()), Step::Fail(Kind::PrefillLost)],
            _ => vec![
                Step::Scored(1, all[..1].into()),
                Step::Scored(2, all[1..].into()),
                Step::Logprobs(65, -0.25, vec![(65, -0.25)]),
                Step::Finish(v1::FinishReason::Length),
            ],
        }
    });
    (router, worker)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_token_of_a_prompt_has_one_log_probability_after_a_retry() {
    let entry = |id: u32, logprob: f64| {
        let text = |id: u32| char::from_u32(id).unwrap().to_string();
        json!({
            id.to_string(): {"logprob": logprob, "rank": 2, "decoded_token": text(id)},
            (id + 1).to_string(): {"logprob": logprob / 2.0, "rank": 1, "decoded_token": text(id + 1)},
        })
    };
    let expected = json!([null, entry(98, -0.5), entry(99, -1.0), entry(100, -2.0)]);

    let (router, _worker) = scored().await;
    let body = json!({"prompt": "abcd", "max_tokens": 1, "prompt_logprobs": 1});
    let whole = router.client.post("/v1/completions", &body).await.json();
    assert_eq!(whole["choices"][0]["prompt_logprobs"], expected, "{whole}");

    let (router, _worker) = scored().await;
    let mut chat = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    chat["prompt_logprobs"] = json!(1);
    let whole = router.client.post("/v1/chat/completions", &chat).await.json();
    assert_eq!(whole["prompt_logprobs"], expected, "{whole}");

    let (router, _worker) = scored().await;
    let body = json!({"prompt": "abcd", "max_tokens": 1, "logprobs": 0, "echo": true});
    let logprobs = router.client.post("/v1/completions", &body).await.json()["choices"][0]["logprobs"].take();
    assert_eq!(logprobs["tokens"], json!(["a", "b", "c", "d", "A"]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.5, -1.0, -2.0, -0.25]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4]));
    assert_eq!(logprobs["top_logprobs"][1], json!({"b": -0.5}));

    // The prompt alone, as evaluations ask for it.
    let (router, worker) = scored().await;
    let mut body = json!({"prompt": "abcd", "max_tokens": 0, "logprobs": 0, "echo": true});
    let answer = router.client.post("/v1/completions", &body).await.json();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("abcd"), &json!("length")));
    assert_eq!(choice["logprobs"]["tokens"], json!(["a", "b", "c", "d"]));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    assert_eq!(worker.requests()[0].sampling.as_ref().unwrap().max_tokens, 1);
    let metrics = router.client.get("/metrics").await.text();
    assert!(metrics.contains("\nbaton_router_output_tokens_total 0\n"), "{metrics}");
    body["echo"] = json!(false);
    assert_eq!(router.client.post("/v1/completions", &body).await.json()["error"]["param"], "max_tokens");
    let streamed = json!({"prompt": "abcd", "max_tokens": 0, "echo": true, "stream": true});
    assert_eq!(router.client.post("/v1/completions", &streamed).await.json()["error"]["param"], "max_tokens");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_does_not_tell_the_log_probabilities_of_a_prompt_has_failed() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|request| {
        // The first attempt is that of an older worker, which ignores the field.
        let scored = (request.attempt > 0).then(|| Step::Scored(1, vec![(98, -0.5)]));
        let answer = [Step::Token(65), Step::Finish(v1::FinishReason::Length)];
        scored.into_iter().chain(answer).collect()
    });
    let body = json!({"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 1});
    let answer = router.client.post("/v1/completions", &body).await.json();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], worker.requests().len()), (&json!("A"), 2), "{answer}");
    assert_eq!(choice["prompt_logprobs"].as_array().map(Vec::len), Some(2), "{answer}");
}

/// So many log-probabilities are written off the threads that serve connections.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_answer_has_all_log_probabilities_in_each_choice() {
    let (router, worker) = Router::with_worker().await;
    worker.script(|request| {
        let mut steps = vec![Step::Token(65), Step::Finish(v1::FinishReason::Length)];
        if request.sampling.as_ref().unwrap().prompt_logprobs.is_some() {
            let scored = request.prompt_token_ids[1..].iter().map(|id| (*id, -0.5));
            steps.insert(0, Step::Scored(1, scored.collect()));
        }
        steps
    });
    let text = "a".repeat(400);
    let chat = json!({"messages": [{"role": "user", "content": text}]});
    for (path, mut body) in [("/v1/completions", json!({"prompt": text})), ("/v1/chat/completions", chat)] {
        (body["n"], body["max_tokens"], body["prompt_logprobs"]) = (json!(2), json!(1), json!(1));
        let answer = router.client.post(path, &body).await.json();
        let num_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 2);
        // A chat has one prompt.
        let told = if path == "/v1/completions" { &choices[..] } else { std::slice::from_ref(&answer) };
        for told in told {
            let scored = told["prompt_logprobs"].as_array().unwrap();
            assert_eq!(scored.len(), num_tokens, "{path}");
            assert!(scored[1..].iter().all(|token| token.as_object().unwrap().len() == 2), "{path}");
        }
    }
}

/// A worker is asked once for both, and tells as many as the one that wants more.
#[tokio::test(flavor = "multi_thread")]
async fn an_echoed_prompt_has_as_many_log_probabilities_as_each_field_says() {
    let (router, worker) = scored().await;
    let mut body = json!({"prompt": "abcd", "max_tokens": 1, "echo": true, "logprobs": 1});
    body["prompt_logprobs"] = json!(0);
    let choice = router.client.post("/v1/completions", &body).await.json()["choices"][0].take();
    assert_eq!(worker.requests()[0].sampling.as_ref().unwrap().prompt_logprobs, Some(1));
    let itself = |text: &str, logprob: f64| json!({"logprob": logprob, "rank": 2, "decoded_token": text});
    let expected = json!([
        null, {"98": itself("b", -0.5)}, {"99": itself("c", -1.0)}, {"100": itself("d", -2.0)}
    ]);
    assert_eq!(choice["prompt_logprobs"], expected, "{choice}");
    assert_eq!(choice["logprobs"]["top_logprobs"][1], json!({"b": -0.5, "c": -0.25}), "{choice}");
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_are_those_of_the_text() {
    let (router, worker) = Router::with_worker().await;
    // The two bytes of a character, a token that is not shown, and a letter.
    let tokens = [195, 169, END, 97].map(|id| Step::Logprobs(id, -0.25, Vec::new()));
    let steps = [tokens.to_vec(), vec![Step::Finish(v1::FinishReason::Length)]].concat();
    worker.script(move |_| steps.clone());
    for stream in [false, true] {
        let body = json!({"prompt": "x", "logprobs": 0, "stream": stream});
        assert_eq!(offsets(&router, &body).await, [0, 1, 1, 1], "{body}");
    }
}

/// In one piece or in chunks.
async fn offsets(router: &Router, body: &Value) -> Vec<Value> {
    let text = router.client.post("/v1/completions", body).await.text();
    let pieces = text.split("data: ").filter_map(|piece| serde_json::from_str::<Value>(piece).ok());
    let offsets = pieces.flat_map(|piece| {
        let offsets = piece["choices"][0]["logprobs"]["text_offset"].as_array().cloned();
        offsets.unwrap_or_default()
    });
    offsets.collect()
}

/// A text does not begin with the space of its first token.
#[tokio::test(flavor = "multi_thread")]
async fn offsets_after_a_prompt_without_text_are_those_of_the_text() {
    let (router, worker) = Router::with_worker_and(|config| write_sentence_piece(&config.model)).await;
    worker.script(|_| {
        let tokens = [3, 4].map(|id| Step::Logprobs(id, -0.25, Vec::new()));
        [tokens.to_vec(), vec![Step::Finish(v1::FinishReason::Length)]].concat()
    });
    let mut body = json!({"prompt": "", "logprobs": 0, "max_tokens": 2});
    let answer = router.client.post("/v1/completions", &body).await.json();
    assert_eq!(answer["choices"][0]["text"], "Hello you", "{answer}");
    for stream in [false, true] {
        body["stream"] = json!(stream);
        assert_eq!(offsets(&router, &body).await, [0, 5], "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_of_a_prompt_cannot_be_streamed_or_come_from_another_worker() {
    let (router, worker) = scored().await;
    for (name, value) in [("stream", json!(true)), ("prefill_mode", json!("remote"))] {
        let mut body = json!({"prompt": "abcd", "max_tokens": 1, "prompt_logprobs": 1});
        body[name] = value;
        let answer = router.client.post("/v1/completions", &body).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("prompt_logprobs")));
    }
    assert!(worker.requests().is_empty());
}

/// The router would have each for every choice: 12 GB of the first.
#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_of_prompts_are_limited_for_all_choices_together() {
    let mut router = Router::start(|_| {}).await;
    let mut worker = FakeWorker::start("d0", Role::Decode, 1).await;
    worker.record.capacity.context_length = 40_000;
    router.register(&worker).await;
    let prompt = vec![1; 32_000];
    for (body, param) in [
        (json!({"prompt": prompt, "n": 128, "prompt_logprobs": 20}), "prompt_logprobs"),
        (json!({"prompt": vec![&prompt; 6], "prompt_logprobs": 20}), "prompt_logprobs"),
        (json!({"prompt": prompt, "n": 128, "echo": true, "logprobs": 0}), "echo"),
    ] {
        let answer = router.client.post("/v1/completions", &body).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (400, &json!(param)), "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("at most 4000000 are possible"), "{message}");
    }
    assert!(worker.requests().is_empty());
}

/// The router would have the text for every choice, once more in the answer.
#[tokio::test(flavor = "multi_thread")]
async fn echoed_prompts_are_limited_for_all_choices_together() {
    let mut router = Router::start(|_| {}).await;
    let mut worker = FakeWorker::start("d0", Role::Decode, 1).await;
    worker.record.capacity.context_length = 300_000;
    router.register(&worker).await;
    let num_tokens = 270_000;
    for prompt in [json!(vec![97; num_tokens]), json!("a".repeat(num_tokens))] {
        let body = json!({"prompt": prompt, "n": 128, "echo": true, "max_tokens": 1});
        let answer = router.client.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 400);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], "echo", "{error}");
        assert!(error["message"].as_str().unwrap().contains("more than 33554432 bytes"), "{error}");
    }
    assert!(worker.requests().is_empty());
}
