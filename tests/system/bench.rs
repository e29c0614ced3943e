//! `baton bench` on parts of the system, by themselves.

use std::process::Command;

use serde_json::Value;

use crate::harness::BATON;

#[test]
fn bench_transfer_moves_blocks_between_two_processes_by_every_transport() {
    let output = Command::new(BATON)
        .args([
            "bench",
            "transfer",
            "--from",
            "64K",
            "--to",
            "256K",
            "--seconds",
            "0.01",
            "--quiet",
            "--json",
            "-",
        ])
        .output()
        .expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    let shapes: Vec<_> = rows.iter().map(|row| (row["shape"].as_str(), row["size_bytes"].as_u64())).collect();
    let row = |shape, size_bytes| (Some(shape), Some(size_bytes));
    let expected = [row("contiguous", 65_536), row("contiguous", 262_144), row("scattered", 262_144)];
    assert_eq!(shapes, expected);
    for row in rows {
        let entries = row["entries"].as_array().expect("entries");
        let names: Vec<_> = entries.iter().map(|entry| entry["name"].as_str().unwrap_or_default()).collect();
        for name in ["memcpy", "stream", "shm", "tcp"] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert!(
            entries.iter().all(|entry| entry["gb_per_s"].as_f64().is_some_and(|rate| rate > 0.0)),
            "{row}"
        );
    }
}
