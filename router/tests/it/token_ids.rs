//! The tokens of prompts and answers, and prompts before their answers.

use serde_json::{Value, json};

use crate::{
    fake::Step,
    harness::Router,
    model::{END, MODEL},
};
use baton_proto::v1;

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
    let answer = router.client.post(path, &json!({"prompt": "ab", "echo": true, "logprobs": 1})).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["error"]["param"], "echo");
}
