//! Third-party clients: the official ones of OpenAI (Python and JavaScript) and Anthropic, and grpcio with code generated from our .proto files.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use crate::harness::{Process, Up};

fn target(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target").join(path)
}

/// Not captured, so that it shows in the output of a test that passes.
fn skip(what: &str) {
    let line = format!("SKIPPED {what}\n");
    std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
}

fn python() -> String {
    let path = target("venv/bin/python");
    assert!(path.exists(), "{} is missing; run `cargo xtask setup`", path.display());
    path.display().to_string()
}

pub(crate) fn run_script(script: &str, flags: &[&str]) {
    run_with(&python(), script, flags);
}

/// Clients of a server on this machine use no proxy.
const NO_PROXY: &str = "127.0.0.1,localhost";

fn run_with(program: &str, script: &str, flags: &[&str]) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients").join(script);
    let mut args = vec![path.display().to_string()];
    args.extend(flags.iter().map(|&flag| flag.to_owned()));
    let environment = ["no_proxy", "NO_PROXY"].map(|name| (name, Path::new(NO_PROXY)));
    let mut process = Process::start_in(&environment, script, program, &args, dir.path());
    let status = process.wait();
    println!("{}", process.log());
    assert!(status.success(), "{script}: {status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_official_openai_client_works() {
    let up = Up::start("--prefill 1").await;
    let base = up.base.clone();
    tokio::task::spawn_blocking(move || run_script("openai_client.py", &["--base-url", &base]))
        .await
        .expect("the script runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn aiperf_measures_a_running_server() {
    if !target("aiperf/bin/aiperf").exists() {
        skip("aiperf: no target/aiperf; see `cargo xtask setup`, which needs Python 3.11 to 3.13");
        return;
    }
    let up = Up::start("--prefill 1").await;
    let base = up.base.clone();
    tokio::task::spawn_blocking(move || run_script("aiperf_check.py", &["--base-url", &base]))
        .await
        .expect("the script runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_does_what_its_openapi_document_says() {
    let up = Up::start("--prefill 1").await;
    let base = up.base.clone();
    tokio::task::spawn_blocking(move || run_script("openapi_check.py", &["--base-url", &base]))
        .await
        .expect("the script runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_official_javascript_client_works() {
    let folder = target("node");
    if !folder.join("node_modules/openai").exists() {
        skip("the JavaScript client: no target/node; see `cargo xtask setup`, which needs npm");
        return;
    }
    let up = Up::start("--prefill 1").await;
    let (base, folder) = (up.base.clone(), folder.display().to_string());
    tokio::task::spawn_blocking(move || run_with("node", "openai_client.mjs", &[&base, &folder]))
        .await
        .expect("the script runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_official_anthropic_client_works() {
    let up = Up::start("--prefill 1").await;
    let base = up.base.clone();
    tokio::task::spawn_blocking(move || run_script("anthropic_client.py", &["--base-url", &base]))
        .await
        .expect("the script runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpcio_client_made_from_our_proto_works() {
    let up = Up::start("--prefill 1").await;
    let target = up.base.trim_start_matches("http://").to_owned();
    tokio::task::spawn_blocking(move || run_script("grpc_client.py", &["--target", &target]))
        .await
        .expect("the script runs");
}
