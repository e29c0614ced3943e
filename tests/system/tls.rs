//! TLS between all processes, and peers that are refused.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    harness::{BATON, Cluster, eventually, tls_flags},
    prompts::filler,
};

fn body(mode: &str, salt: &str) -> Value {
    json!({
        "model": "baton-tiny", "prompt": filler(3, 150), "max_tokens": 24, "temperature": 0,
        "ignore_eos": true, "prefill_mode": mode, "cache_salt": salt,
    })
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_prompt_is_handed_over_over_tls() {
    let cluster = Cluster::new().with_tls().worker_flags("--transports tcp").start().await;
    let mut texts = Vec::new();
    for (mode, salt) in [("local", "a"), ("remote", "b")] {
        texts.push(cluster.complete(&body(mode, salt)).await["choices"][0]["text"].clone());
    }
    assert_eq!(texts[0], texts[1]);
    // Load reports arrive with a delay.
    let workers = eventually("KV that both ends have counted", Duration::from_secs(10), async || {
        let workers = cluster.loads().await;
        let have_moved = workers.iter().all(|worker| {
            let load = worker.load.as_ref().expect("it reports");
            load.handoff_bytes.iter().any(|bytes| bytes.transport == "tcp" && bytes.bytes > 0)
        });
        have_moved.then_some(workers)
    })
    .await;
    assert_eq!(workers.len(), 2);
    for worker in &workers {
        assert!(worker.address.starts_with("https://"), "{}", worker.address);
    }
    let log = cluster.log("decode-0");
    let opened =
        log.lines().find(|line| line.contains("kv data connection opened")).expect("a data connection");
    assert!(opened.contains("identity"), "the log names no identity: {opened}");

    // The doctor sees the workers only with a certificate.
    let doctor = |flags: &str| {
        let args = format!("doctor --router {} {flags}", cluster.base);
        Command::new(BATON).args(args.split_whitespace()).output().expect("the program runs")
    };
    let known = doctor(&tls_flags("a", "ca.pem"));
    assert!(known.status.success(), "{}", String::from_utf8_lossy(&known.stdout));
    let unknown = doctor("");
    assert!(!unknown.status.success());
    assert!(String::from_utf8_lossy(&unknown.stdout).contains("give this process --tls-cert"));

    // A worker's port tells a plain client only that it speaks TLS.
    let address = workers[0].address.trim_start_matches("https://").to_owned();
    let mut socket = TcpStream::connect(address).expect("the worker listens");
    socket.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket has timeouts");
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    socket.read_to_string(&mut answer).expect("it answers and closes");
    assert!(answer.starts_with("HTTP/1.0 400") && answer.ends_with("this port speaks TLS\n"), "{answer}");
}

/// Whether the program succeeds with one line of input, and its output on both streams.
fn said_by(args: &str) -> (bool, String) {
    let mut command = Command::new(BATON);
    command.args(args.split_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program runs");
    // The program may have ended already.
    let _ = child.stdin.take().expect("piped").write_all(b"What is the colour of the sky?\n");
    let output = child.wait_with_output().expect("it ends");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[tokio::test]
async fn chat_and_bench_speak_tls_and_report_a_peer_that_does_not() {
    let cluster = Cluster::new().with_tls().prefill(0).start().await;
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tls/testdata");
    let secure = cluster.base.replacen("http", "https", 1);
    let worker = cluster.loads().await[0].address.clone();
    let chat = "chat --max-tokens 8 --temperature 0";
    let bench = "bench --quiet --requests 2 --warmup 0 --concurrency 1 --input-tokens 8 --output-tokens 4";
    let ca = format!("--tls-ca {dir}/ca.pem");
    for args in [
        format!("{chat} --url {secure} {ca}"),
        format!("{chat} --url {secure} {}", tls_flags("b", "ca.pem")),
        // The router also accepts clients without TLS.
        format!("{chat} --url {}", cluster.base),
        format!("{bench} --url {secure} {ca}"),
        format!("{bench} --worker {worker} {}", tls_flags("b", "ca.pem")),
    ] {
        let (has_worked, said) = said_by(&args);
        assert!(has_worked && !said.contains("no TLS"), "{args}: {said}");
        assert!(!said.trim().is_empty(), "{args}");
    }

    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let plain = format!("https://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let mut socket = socket.expect("a connection");
            let _ = socket.read(&mut [0; 1024]);
            let _ = socket.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
        }
    });
    let deaf = worker.replacen("https", "http", 1);
    for (args, expected) in [
        (format!("--url {secure}"), "https needs --tls-ca"),
        (format!("--url {} {ca}", cluster.base), "write https://"),
        (format!("--url {secure} --tls-ca {dir}/other-ca.pem"), "UnknownIssuer"),
        (format!("--url {secure} {ca} --tls-name else.where"), "not valid for name"),
        (format!("--url {deaf}"), "this port speaks TLS: write https://"),
        (format!("--url {plain} {ca}"), "does not speak TLS"),
    ] {
        for command in [chat, bench] {
            let (has_worked, said) = said_by(&format!("{command} {args}"));
            assert!(!has_worked && said.contains(expected), "{command} {args}: {said}");
        }
    }
    let (has_worked, said) = said_by(&format!("{bench} --worker {worker}"));
    assert!(!has_worked && said.contains("give this process --tls-cert"), "{said}");
}

#[tokio::test]
async fn workers_with_foreign_certificates_or_none_are_refused() {
    let cluster = Cluster::new().with_tls().prefill(0).start().await;
    // The foreign worker trusts the router's authority. The router does not trust the worker's.
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tls/testdata");
    let both = tempfile::NamedTempFile::new().expect("a file can be made");
    let read = |name: &str| std::fs::read_to_string(format!("{dir}/{name}")).expect("it is there");
    std::fs::write(both.path(), read("ca.pem") + &read("other-ca.pem")).expect("it can be written");
    let secure = cluster.base.replacen("http", "https", 1);
    let foreign = format!(
        "prefill-worker --id foreign --router {secure} --kv-memory 64M --tls-cert {dir}/foreign.pem --tls-key \
         {dir}/foreign.key --tls-ca {}",
        both.path().display()
    );
    let plain = format!("prefill-worker --id plain --router {} --kv-memory 64M", cluster.base);
    // The router's log has the reason. A worker whose certificate is refused only sees its connection end.
    for (name, args, expected) in
        [("foreign", foreign, "UnknownIssuer"), ("plain", plain, "a worker registers over https")]
    {
        let process = cluster.start_beside(name, &words(&args));
        eventually(expected, Duration::from_secs(120), async || {
            (process.log() + &cluster.log("router")).contains(expected).then_some(())
        })
        .await;
        let health = cluster.http.get("/health").await.expect("the router answers").text;
        assert!(!health.contains(name), "{health}");
    }
    // An expired certificate is refused at start.
    let expired = tls_flags("expired", "ca.pem");
    let args = format!("decode-worker --id late --router {secure} {expired}");
    let output = Command::new(BATON).args(args.split_whitespace()).output().expect("the program runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("expired.pem") && said.contains("expired"), "{said}");
}
