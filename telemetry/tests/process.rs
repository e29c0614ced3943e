//! What a process sees that calls `init`: once per process, so each case is a process of its own.

use std::{
    env,
    io::{Read, Write},
    net::TcpListener,
    path::Path,
    process::{Command, Output},
    sync::Arc,
    thread,
};

use baton_telemetry::{TelemetryConfig, init};
use baton_tls::rustls::{
    self, ServerConfig, ServerConnection,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

const CASE: &str = "BATON_TELEMETRY_TEST_CASE";

/// Runs `case` of this test in a child process.
fn run_case(case: &str, otlp_endpoint: &str) -> Output {
    run_case_with(&[], case, otlp_endpoint)
}

/// The same with more variables in its environment.
fn run_case_with(environment: &[(&str, &str)], case: &str, otlp_endpoint: &str) -> Output {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CASE, case)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", otlp_endpoint)
        .env_remove("RUST_BACKTRACE")
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

/// Not a test by itself: the child's side of the others.
#[test]
fn child() {
    let Ok(case) = env::var(CASE) else { return };
    let format = if case == "json" { "json" } else { "pretty" }.parse().unwrap();
    let config = TelemetryConfig { format, ..TelemetryConfig::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let guard = if case == "async" { runtime.block_on(async { init(&config) }) } else { init(&config) };
    let guard = guard.unwrap();
    match case.as_str() {
        "panic" => {
            drop(thread::Builder::new().name("engine".into()).spawn(|| panic!("out of luck")).unwrap().join())
        }
        "twice" => tracing::info!("{:#}", init(&config).unwrap_err()),
        _ => tracing::info_span!(target: "baton_test", "request", id = 7).in_scope(|| {
            tracing::info!(worker = "d0", "ready");
            tracing::info_span!("handoff", prefill = "p0").in_scope(|| tracing::info!("kv received"));
        }),
    }
    drop(guard);
}

fn stderr(output: Output) -> String {
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn log_lines_are_for_people_or_machines() {
    let text = stderr(run_case("pretty", ""));
    assert!(text.contains(" INFO request{id=7}: ready worker=\"d0\"\n"), "{text}");
    assert!(!text.contains('\u{1b}'), "no colours in a pipe: {text}");
    let text = stderr(run_case("json", ""));
    assert!(text.contains("\"message\":\"ready\"") && text.contains("\"worker\":\"d0\""), "{text}");
    let line = text.lines().find(|line| line.contains("kv received")).expect("it is logged");
    let spans = r#""spans":[{"id":7,"name":"request"},{"prefill":"p0","name":"handoff"}]"#;
    assert!(line.contains(spans), "a line says which request it is of: {line}");
}

#[test]
fn panics_are_logged() {
    let text = stderr(run_case("panic", ""));
    assert!(text.contains("ERROR panicked: out of luck thread=\"engine\""), "{text}");
    assert!(text.contains("process.rs:"), "{text}");
}

#[test]
fn second_init_is_an_error() {
    let text = stderr(run_case("twice", ""));
    assert!(text.contains("logging can be set up only once in a process"), "{text}");
}

#[test]
fn spans_go_to_the_collector_and_a_deaf_one_does_not_hold_the_process() {
    // Connections and what they say wait in the listener's queue; nothing is ever answered.
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", collector.local_addr().unwrap());
    stderr(run_case("pretty", &endpoint));
    collector.set_nonblocking(true).unwrap();
    let (mut connection, _) = collector.accept().expect("the process has connected before it ended");
    let mut preface = [0; 24];
    connection.read_exact(&mut preface).unwrap();
    assert_eq!(&preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
}

/// What one HTTP/1.1 request says, head and body; it is answered with `status`.
fn answer_one(collector: &TcpListener, status: &str) -> String {
    let (mut connection, _) = collector.accept().unwrap();
    let (mut said, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let num = connection.read(&mut part).unwrap();
        said.extend_from_slice(&part[..num]);
        let text = String::from_utf8_lossy(&said).to_lowercase();
        let Some((head, _)) = text.split_once("\r\n\r\n") else { continue };
        let len =
            head.split_once("content-length: ").unwrap().1.lines().next().unwrap().parse::<usize>().unwrap();
        if said.len() >= head.len() + 4 + len {
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
            connection.write_all(answer.as_bytes()).unwrap();
            return text;
        }
    }
}

#[test]
fn spans_go_over_http_too() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", collector.local_addr().unwrap());
    let answering = thread::spawn(move || answer_one(&collector, "200 OK"));
    // Nothing that plain text needs is missing without certificates.
    let environment = [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("SSL_CERT_FILE", "/none"),
        ("SSL_CERT_DIR", "/none"),
    ];
    stderr(run_case_with(&environment, "pretty", &endpoint));
    let said = answering.join().unwrap();
    assert!(said.starts_with("post /v1/traces http/1.1\r\n"), "{said}");
    assert!(said.contains("application/x-protobuf") && said.contains("request"), "{said}");
}

#[test]
fn a_batch_that_fails_is_one_line_of_ours_and_none_of_opentelemetry() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", collector.local_addr().unwrap());
    let answering = thread::spawn(move || answer_one(&collector, "400 Bad Request"));
    let text =
        stderr(run_case_with(&[("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")], "pretty", &endpoint));
    answering.join().unwrap();
    assert!(text.contains(&format!("the trace collector at {endpoint} does not answer")), "{text}");
    assert_eq!(text.matches("WARN").count() + text.matches("ERROR").count(), 1, "{text}");
}

/// One TLS connection: the first bytes that came through it.
fn accept_one(collector: &TcpListener) -> std::io::Result<Vec<u8>> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tls/testdata");
    let certificates = CertificateDer::pem_file_iter(data.join("a.pem")).unwrap().map(Result::unwrap);
    let key = PrivateKeyDer::from_pem_file(data.join("a.key")).unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(certificates.collect(), key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let (mut connection, _) = collector.accept().unwrap();
    let mut tls = ServerConnection::new(Arc::new(config)).unwrap();
    let mut first = vec![0; 14];
    rustls::Stream::new(&mut tls, &mut connection).read_exact(&mut first)?;
    Ok(first)
}

#[test]
fn spans_go_over_tls_to_a_collector_that_is_trusted_and_to_no_other() {
    let ca = concat!(env!("CARGO_MANIFEST_DIR"), "/../tls/testdata/ca.pem");
    for (protocol, first) in [("grpc", "PRI * HTTP/2.0"), ("http/protobuf", "POST /v1/trace")] {
        for trusted in [true, false] {
            let collector = TcpListener::bind("127.0.0.1:0").unwrap();
            let endpoint = format!("https://localhost:{}", collector.local_addr().unwrap().port());
            let accepting = thread::spawn(move || accept_one(&collector));
            let ca = if trusted { ca } else { "" };
            let environment =
                [("OTEL_EXPORTER_OTLP_PROTOCOL", protocol), ("OTEL_EXPORTER_OTLP_CERTIFICATE", ca)];
            stderr(run_case_with(&environment, "pretty", &endpoint));
            match accepting.join().unwrap() {
                Ok(said) => assert!(trusted && said == first.as_bytes(), "{protocol}: {said:?}"),
                Err(error) => assert!(!trusted, "{protocol}: {error}"),
            }
        }
    }
}

#[test]
fn an_authority_that_cannot_be_read_is_named() {
    let environment = [("OTEL_EXPORTER_OTLP_CERTIFICATE", "/none.pem")];
    for case in ["pretty", "async"] {
        let output = run_case_with(&environment, case, "https://localhost:1");
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("OTEL_EXPORTER_OTLP_CERTIFICATE: cannot read \"/none.pem\""), "{text}");
        assert!(!text.contains("drop a runtime"), "{text}");
    }
}

#[test]
fn traces_that_are_not_sampled_are_not_sent() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", collector.local_addr().unwrap());
    let http = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
    stderr(run_case_with(&[http, ("OTEL_TRACES_SAMPLER", "always_off")], "pretty", &endpoint));
    collector.set_nonblocking(true).unwrap();
    assert!(collector.accept().is_err(), "nothing connects for a trace that is not sampled");
}

#[test]
fn unknown_protocol_is_named() {
    let output =
        run_case_with(&[("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")], "pretty", "http://127.0.0.1:1");
    assert!(!output.status.success());
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("carrier-pigeon") && text.contains("http/protobuf"), "{text}");
}
