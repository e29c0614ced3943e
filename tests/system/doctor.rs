//! `baton doctor` on a running cluster.

use std::{
    process::{Command, Output},
    time::Duration,
};

use serde_json::Value;

use crate::harness::{BATON, Cluster, Etcd, Http, eventually};

fn doctor(args: &[&str]) -> Output {
    Command::new(BATON).arg("doctor").args(args).output().expect("the program runs")
}

#[tokio::test]
async fn doctor_measures_every_transport_between_workers_and_frees_its_blocks() {
    let cluster = Cluster::new().start().await;
    let output = doctor(&["--router", &cluster.base, "--json", "-"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let pairs = report["pairs"].as_array().expect("pairs");
    assert_eq!(pairs.len(), 1);
    let measured = &pairs[0]["measured"];
    let ways = measured["transports"].as_array().expect("transports");
    for name in ["shm", "tcp"] {
        let way =
            ways.iter().find(|way| way["name"] == name).unwrap_or_else(|| panic!("no {name} in {report}"));
        assert!(
            way["unavailable"].is_null() && way["gb_per_s"].as_f64().is_some_and(|rate| rate > 0.0),
            "{way}"
        );
    }
    assert!(measured["copy_gb_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{report}");
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn doctor_says_which_transport_is_missing_and_why() {
    let cluster = Cluster::new().worker_flags("--transports tcp").start().await;
    let output = doctor(&["--router", &cluster.base]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("shm    not available: the prefill worker does not use it; see its --transports"),
        "{text}"
    );
    assert!(text.contains("tcp is the only one"), "{text}");

    let without_workers = doctor(&["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1"]);
    let text = String::from_utf8_lossy(&without_workers.stdout);
    assert!(!without_workers.status.success() && text.contains("no worker at http://127.0.0.1:1"), "{text}");
}

#[tokio::test]
async fn doctor_measures_the_conversion_where_blocks_differ() {
    let cluster = Cluster::new()
        .prefill_flags("--block-size 8")
        .decode_flags("--block-size 32 --kv-dtype int8")
        .start()
        .await;
    let output = doctor(&["--router", &cluster.base]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("become blocks of 32 tokens in int8, which is part of what is measured"), "{text}");
    assert!(text.contains("<- taken") && !text.contains("not measured"), "{text}");
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn an_etcd_with_a_certificate_of_an_authority_of_the_system_needs_no_other() {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let etcd = Etcd::start(dir.path());
    let says = |authority: &str| {
        let authority = format!("{}/../tls/testdata/{authority}", env!("CARGO_MANIFEST_DIR"));
        let args = ["doctor", "--host", "--discovery", "etcd", "--etcd-endpoints", &etcd.tls_endpoint];
        let output = Command::new(BATON).args(args).env("SSL_CERT_FILE", authority).output();
        String::from_utf8_lossy(&output.expect("the program runs").stdout).into_owned()
    };
    let found = format!("at {}, with a leader", etcd.tls_endpoint);
    let plain = Http::new(etcd.endpoint.clone());
    eventually("an etcd that answers", Duration::from_secs(60), async || plain.get("/health").await.ok())
        .await;
    let known = says("ca.pem");
    assert!(known.contains(&found), "{known}");
    let unknown = says("other-ca.pem");
    assert!(!unknown.contains(&found), "{unknown}");
}
