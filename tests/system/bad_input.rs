//! Every invalid request gets a clear, typed error and frees its blocks.

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::harness::Cluster;

fn chat(changes: Value) -> Value {
    let mut body = json!({"model": "baton-tiny", "messages": [{"role": "user", "content": "Hello!"}]});
    for (key, value) in changes.as_object().expect("changes are an object") {
        body[key] = value.clone();
    }
    body
}

fn completion(changes: Value) -> Value {
    let mut body = json!({"model": "baton-tiny", "prompt": "Hello"});
    for (key, value) in changes.as_object().expect("changes are an object") {
        body[key] = value.clone();
    }
    body
}

#[tokio::test]
async fn mistakes_are_named_in_openai_shape() {
    let cluster = Cluster::new().start().await;
    let long = "word ".repeat(6000);
    // Path, body, status, and a word that the message must contain.
    let cases = [
        ("/v1/chat/completions", chat(json!({"temperature": -1})), 400, "temperature"),
        ("/v1/chat/completions", chat(json!({"temperature": "hot"})), 400, "temperature"),
        ("/v1/chat/completions", chat(json!({"n": 0})), 400, "n"),
        ("/v1/chat/completions", chat(json!({"top_p": 1.5})), 400, "top_p"),
        ("/v1/chat/completions", chat(json!({"max_tokens": -3})), 400, "max_tokens"),
        ("/v1/chat/completions", chat(json!({"messages": []})), 400, "messages"),
        ("/v1/chat/completions", chat(json!({"messages": "Hello"})), 400, "messages"),
        ("/v1/chat/completions", chat(json!({"model": "gpt-4"})), 404, "gpt-4"),
        ("/v1/chat/completions", chat(json!({"logit_bias": {"99999999": 1}})), 400, "logit_bias"),
        ("/v1/completions", completion(json!({"prompt": [1, 99_999_999]})), 400, "99999999"),
        ("/v1/completions", completion(json!({"prompt": long})), 400, "2048"),
        ("/v1/completions", completion(json!({"prompt": 7})), 400, "prompt"),
        ("/v1/completions", completion(json!({"stop": vec!["a"; 99]})), 400, "stop"),
    ];
    for (path, body, status, word) in cases {
        let answer = cluster.http.post(path, &body).await.expect("the router answers");
        let shown: String = answer.text.chars().take(300).collect();
        assert_eq!(answer.status.as_u16(), status, "{shown}");
        let error = &answer.json()["error"];
        assert!(error["message"].as_str().is_some_and(|message| message.contains(word)), "{word}: {shown}");
        assert!(error["type"].is_string(), "{shown}");
    }
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn an_incomplete_request_is_closed_after_a_while() {
    let cluster = Cluster::new().start().await;
    let address = cluster.base.trim_start_matches("http://").to_owned();
    let halves = [
        "POST /v1/chat/comple",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n\r\n{\"mod",
    ];
    for half in halves {
        let mut socket = TcpStream::connect(&address).await.expect("the router listens");
        socket.write_all(half.as_bytes()).await.expect("the router reads");
        let mut rest = Vec::new();
        // The test is that the router closes the connection.
        let read = tokio::time::timeout(std::time::Duration::from_secs(90), socket.read_to_end(&mut rest));
        read.await.expect("the router ends a silent request").ok();
        let answer = String::from_utf8_lossy(&rest);
        assert!(answer.is_empty() || answer.contains(" 408 ") || answer.contains(" 400 "), "{answer}");
    }
    cluster.assert_all_blocks_free().await;
}

/// A pool smaller than the model's context limits the context. A request without a length gets the tokens that fit, and a
/// request for more is refused at once.
#[tokio::test]
async fn a_pool_smaller_than_the_context_shortens_it() {
    // 32 KiB a block of 16 tokens.
    let cluster = Cluster::new().worker_flags("--kv-memory 1M").start().await;
    let served = cluster.http.get("/v1/models").await.expect("the router answers").json();
    assert_eq!(served["data"][0]["max_model_len"], 512, "{served}");
    let log = cluster.log("decode-0");
    assert!(log.contains("--kv-memory") && log.contains("context_length=512"), "{log}");

    let open = chat(json!({"temperature": 0, "ignore_eos": true}));
    let answer = cluster.http.post("/v1/chat/completions", &open).await.expect("the router answers");
    assert_eq!(answer.status.as_u16(), 200, "{}", answer.text);
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length", "{}", answer.text);
    assert_eq!(answer.json()["usage"]["total_tokens"], 512, "{}", answer.text);
    for body in [completion(json!({"prompt": vec![9; 600]})), completion(json!({"max_tokens": 600}))] {
        let answer = cluster.http.post("/v1/completions", &body).await.expect("the router answers");
        assert_eq!(answer.status.as_u16(), 400, "{}", answer.text);
        assert_eq!(answer.json()["error"]["code"], "context_length_exceeded", "{}", answer.text);
    }
    cluster.assert_all_blocks_free().await;
}
