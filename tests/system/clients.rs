//! Third-party clients: the official ones of OpenAI and Anthropic, and grpcio with code generated from our .proto files.

use std::path::Path;

use crate::harness::{Process, Up};

fn python() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv/bin/python");
    assert!(path.exists(), "{} is missing; run `cargo xtask setup`", path.display());
    path.display().to_string()
}

pub(crate) fn run_script(script: &str, flags: &[&str]) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients").join(script);
    let mut args = vec![path.display().to_string()];
    args.extend(flags.iter().map(|&flag| flag.to_owned()));
    let mut process = Process::start(script, &python(), &args, dir.path());
    let status = process.wait();
    println!("{}", process.log());
    assert!(status.success(), "{script}: {status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_official_openai_client_works() {
    let up = Up::start("").await;
    let base = up.base.clone();
    tokio::task::spawn_blocking(move || run_script("openai_client.py", &["--base-url", &base]))
        .await
        .expect("the script runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_official_anthropic_client_works() {
    let up = Up::start("").await;
    let base = up.base.clone();
    tokio::task::spawn_blocking(move || run_script("anthropic_client.py", &["--base-url", &base]))
        .await
        .expect("the script runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpcio_client_made_from_our_proto_works() {
    let up = Up::start("").await;
    let target = up.base.trim_start_matches("http://").to_owned();
    tokio::task::spawn_blocking(move || run_script("grpc_client.py", &["--target", &target]))
        .await
        .expect("the script runs");
}
