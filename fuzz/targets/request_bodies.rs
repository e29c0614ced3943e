//! JSON bodies that clients send to each endpoint of a router without workers.
#![no_main]

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use arbitrary::Arbitrary;
use baton_cluster::DiscoveryConfig;
use baton_fuzz::json::{self, Edit, Json};
use baton_fuzz::pick;
use baton_router::RouterConfig;
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};

/// The seeds name them by their places.
const PATHS: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
];

const WORDS: &[&str] = &[
    "messages",
    "prompt",
    "tokens",
    "role",
    "content",
    "type",
    "text",
    "user",
    "assistant",
    "tool_calls",
    "function",
    "arguments",
    "{\"a\": 1}",
    "name",
    "tools",
    "model",
    "n",
    "stream",
    "stream_options",
    "include_usage",
    "stop",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
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
    "cache_salt",
    "priority",
    "prefill_mode",
    "auto",
    "remote",
    "speculation_mode",
    "off",
    "kv_wire",
    "int4",
    "logprobs",
    "top_logprobs",
    "chat_template_kwargs",
    "add_generation_prompt",
    "response_format",
    "tool_choice",
    "none",
    "json_schema",
    "json_object",
    "schema",
    "strict",
    "parameters",
    "input_schema",
    "object",
    "string",
    "integer",
    "array",
    "properties",
    "required",
    "items",
    "enum",
    "additionalProperties",
    "description",
    "parallel_tool_calls",
    "any",
    "tool",
    "allowed_tools",
    "structured_outputs",
    "json",
    "regex",
    "choice",
    "grammar",
    "input",
    "instructions",
    "max_output_tokens",
    "format",
    "reasoning",
    "effort",
    "low",
    "input_text",
    "function_call",
    "function_call_output",
    "call_id",
    "output",
    "system",
    "stop_sequences",
    "thinking",
    "enabled",
    "output_config",
    "tool_use",
    "tool_result",
    "tool_use_id",
    "id",
    "is_error",
    "cache_control",
    "ephemeral",
    "documents",
    "passage",
    "blend",
    "echo",
    "suffix",
    "best_of",
    "modalities",
    "return_token_strs",
    "add_special_tokens",
    "prompt_logprobs",
    "<|bos|>",
    "1",
    "-1",
    "ü\u{301}\u{0}\u{fffd}",
    "                                ",
];

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    /// Any body.
    Text { path: u8, body: &'a [u8] },
    /// Fields of a valid body.
    Fields { path: u8, messages: Vec<Message>, edits: Vec<Edit> },
}

#[derive(Arbitrary, Debug)]
enum Message {
    Text(String),
    Parts(Vec<String>),
    Fields(Vec<Edit>),
    Other(Json),
}

static ADDRESS: LazyLock<SocketAddr> = LazyLock::new(|| {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let address = listener.local_addr().expect("an address");
    let model = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny"));
    let discovery = DiscoveryConfig::Static { workers: vec!["http://127.0.0.1:1".into()] };
    // No worker listens at this address, so every generation fails.
    let config = RouterConfig {
        recovery_timeout: Duration::ZERO,
        ..RouterConfig::new(model, "tiny".into(), discovery)
    };
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            baton_router::run_on(listener, config, Default::default()).await.expect("a router");
        });
    });
    // `/tokenize` answers once the tokenizer is loaded.
    while post(&mut connect(address), "/tokenize", b"{\"prompt\": \"a\"}").is_ok_and(|status| status != 200) {
        std::thread::sleep(Duration::from_millis(10));
    }
    address
});

fn connect(address: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(address).expect("a connection");
    // A grammar may wait for others for five seconds, and then be compiled for five.
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    socket
}

fuzz_target!(|input: Input<'_>| {
    static SOCKET: LazyLock<Mutex<TcpStream>> = LazyLock::new(|| Mutex::new(connect(*ADDRESS)));
    let (path, body) = match input {
        Input::Text { path, body } => (*pick(PATHS, path), body.to_owned()),
        Input::Fields { path, messages, edits } => {
            let path = *pick(PATHS, path);
            (path, fields(path, messages, &edits))
        }
    };
    let mut socket = SOCKET.lock().expect("one thread");
    let status = post(&mut socket, path, &body).expect("an answer");
    assert!(status != 500, "status {status}");
});

/// A valid body of this path, with edits.
fn fields(path: &str, messages: Vec<Message>, edits: &[Edit]) -> Vec<u8> {
    let messages = messages.into_iter().map(|message| match message {
        Message::Text(text) => json!({"role": "user", "content": text}),
        Message::Parts(texts) => {
            let parts = texts.into_iter().map(|text| json!({"type": "text", "text": text}));
            json!({"role": "user", "content": parts.collect::<Vec<_>>()})
        }
        Message::Fields(edits) => {
            let mut message = Map::new();
            message.insert("role".into(), json!("assistant"));
            json::edit(&mut message, &edits, WORDS);
            Value::Object(message)
        }
        Message::Other(value) => value.value(WORDS),
    });
    let mut messages: Vec<Value> = messages.collect();
    if messages.is_empty() {
        messages.push(json!({"role": "user", "content": "a"}));
    }
    let mut body = match path {
        "/v1/completions" => json!({"prompt": "a b"}),
        "/detokenize" => json!({"tokens": [1, 2]}),
        "/v1/responses" => json!({"input": messages}),
        "/v1/messages" => json!({"max_tokens": 4, "messages": messages}),
        "/v1/embeddings" => json!({"input": "a"}),
        _ => json!({"messages": messages}),
    };
    json::edit(body.as_object_mut().expect("written as an object"), edits, WORDS);
    body.to_string().into_bytes()
}

/// The status of the response.
fn post(socket: &mut TcpStream, path: &str, body: &[u8]) -> io::Result<u16> {
    let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    socket.write_all(&[head.as_bytes(), body].concat())?;
    let mut answer = Vec::new();
    let end = loop {
        let mut piece = [0; 4096];
        let len = match socket.read(&mut piece) {
            // By libFuzzer's clock.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            len => len?,
        };
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        answer.extend_from_slice(&piece[..len]);
        let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
        let is_whole = match head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()) {
            Some(len) => answer.len() >= end + 4 + len.parse::<usize>().map_err(io::Error::other)?,
            None => answer.ends_with(b"0\r\n\r\n"),
        };
        if is_whole {
            break end;
        }
    };
    let status =
        std::str::from_utf8(&answer[..end]).ok().and_then(|head| head.split(' ').nth(1)?.parse().ok());
    status.ok_or_else(|| io::Error::other("no status"))
}
