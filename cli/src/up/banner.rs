//! The message of `baton up` when all processes are ready: the URL, and how to call it.

use std::{net::SocketAddr, time::Duration};

use baton_keys::ApiKey;
use http::{Request, header};
use http_body_util::{BodyExt, Empty};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};

use super::logs::Logs;
use crate::log::LogStyle;

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Waits until the router is ready with all workers, then prints. A router with keys lists its workers to the holder of one.
pub(super) async fn print_when_ready(
    address: SocketAddr,
    prefill: usize,
    decode: usize,
    model: String,
    key: Option<ApiKey>,
    logs: Logs,
) {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let base = base_url(address);
    while !is_ready(&client, &base, key.as_ref(), prefill, decode).await {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    match logs.style() {
        LogStyle::Json => logs.note(&format!("Baton is ready: {base} (model {model})")),
        LogStyle::Pretty | LogStyle::Compact => println!("{}", text(&base, &model, key.is_some())),
    }
}

type HttpClient = Client<HttpConnector, Empty<&'static [u8]>>;

fn base_url(address: SocketAddr) -> String {
    let host = if address.ip().is_unspecified() { "localhost".to_owned() } else { address.ip().to_string() };
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    format!("http://{host}:{}", address.port())
}

async fn get(client: &HttpClient, url: &str, key: Option<&ApiKey>) -> Option<serde_json::Value> {
    let mut request = Request::get(url);
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {}", key.secret()));
    }
    let response = client.request(request.body(Empty::default()).ok()?).await.ok()?;
    if !response.status().is_success() {
        return None;
    }
    let body = response.into_body().collect().await.ok()?.to_bytes();
    serde_json::from_slice(&body).ok()
}

async fn is_ready(
    client: &HttpClient,
    base: &str,
    key: Option<&ApiKey>,
    prefill: usize,
    decode: usize,
) -> bool {
    let Some(health) = get(client, &format!("{base}/health"), key).await else { return false };
    let workers = health["workers"].as_array().map_or(&[][..], Vec::as_slice);
    let num = |role: &str| {
        workers.iter().filter(|worker| worker["role"] == role && worker["answers"] == true).count()
    };
    num("prefill") >= prefill && num("decode") >= decode
}

fn text(base: &str, model: &str, needs_key: bool) -> String {
    let authority = base.trim_start_matches("http://");
    let authorization = if needs_key { " -H \"Authorization: Bearer $BATON_API_KEY\"" } else { "" };
    format!(
        r#"
  Baton is ready: {base}  (model {model})
  Open it in a browser to chat and to watch the workers.

  HTTP, OpenAI style:
    curl -N {base}/v1/chat/completions{authorization} -H 'Content-Type: application/json' -d '{{
      "model": "{model}", "stream": true, "max_tokens": 40, "temperature": 0,
      "messages": [{{"role": "user", "content": "Mara keeps the red key. What does Mara keep?"}}]}}'

  gRPC:
    grpcurl -plaintext{authorization} -d '{{"chat": {{"messages": [{{"role": "user", "content": "Hello!"}}]}},
      "sampling": {{"max_tokens": 40}}}}' {authority} baton.v1.Inference/Generate

  Or talk to it: baton chat{chat_flag}
"#,
        chat_flag = if base.ends_with(":8080") { String::new() } else { format!(" --url {base}") },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_is_one_that_can_be_called() {
        let cases = [
            ("127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("0.0.0.0:80", "http://localhost:80"),
            ("[::1]:80", "http://[::1]:80"),
        ];
        for (address, expected) in cases {
            assert_eq!(base_url(address.parse().unwrap()), expected);
        }
    }
}
