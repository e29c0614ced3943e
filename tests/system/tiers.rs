//! KV below the pool, with real workers: what was computed survives the death of the process, and evictions.

use std::{fs::OpenOptions, os::unix::fs::FileExt, path::Path, time::Duration};

use baton_proto::v1::PrefillMode;
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, eventually, sum_metric},
    prefix::{BLOCK_SIZE, PATIENT, address_of, answer, computed},
};

const NUM_BLOCKS: usize = 30;
/// One more token than the blocks have: the last token of a prompt is always computed.
const NUM_TOKENS: usize = NUM_BLOCKS * BLOCK_SIZE + 1;
const NUM_NEXT: usize = 40;

fn prompt(nth: usize) -> Vec<u32> {
    (0..NUM_TOKENS).map(|at| 100 + ((at * 37 + nth * 101) % 1900) as u32).collect()
}

fn on_disk(dir: &Path) -> String {
    format!("--disk-kv {} --disk-kv-size 64M {PATIENT}", dir.display())
}

async fn tier(cluster: &Cluster, id: &str, count: &str, tier: &str) -> usize {
    let address = address_of(cluster, id).await;
    let label = format!("tier=\"{tier}\"");
    cluster.metric(&address, &format!("baton_kv_tier_{count}"), &[&label]).await as usize
}

async fn until_saved(cluster: &Cluster, id: &str, tier_name: &str, num_blocks: usize) {
    eventually("blocks that are saved", Duration::from_secs(60), async || {
        (tier(cluster, id, "blocks", tier_name).await >= num_blocks).then_some(())
    })
    .await;
}

/// Until the router's index has so many blocks, each level of a worker counted by itself.
async fn until_known(cluster: &Cluster, num_blocks: usize) {
    until_metric(cluster, "baton_router_index_memberships", num_blocks).await;
}

async fn until_metric(cluster: &Cluster, name: &str, expected: usize) {
    eventually(name, Duration::from_secs(30), async || {
        let metrics = cluster.http.get("/metrics").await.ok()?.text;
        (sum_metric(&metrics, name, &[]) as usize == expected).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_killed_worker_serves_from_disk_what_it_computed_before() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut cluster =
        Cluster::new().prefill(0).decode(1).flags_of("decode-0", &on_disk(dir.path())).start().await;
    let tokens = answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await;
    // The last token of the answer is never computed.
    let num_saved = (NUM_TOKENS + NUM_NEXT - 1) / BLOCK_SIZE;
    until_saved(&cluster, "decode-0", "disk", num_saved).await;

    cluster.kill("decode-0");
    cluster.start_again("decode-0");
    cluster.wait_for_workers(0, 1).await;
    assert_eq!(answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await, tokens);
    assert_eq!(
        computed(&cluster, "decode-0").await,
        NUM_NEXT as f64,
        "one prompt token, and all but the last"
    );
    assert_eq!(tier(&cluster, "decode-0", "hits_total", "disk").await, NUM_BLOCKS);

    // The conversation goes on after another death: the answer's blocks are there, too.
    cluster.kill("decode-0");
    cluster.start_again("decode-0");
    cluster.wait_for_workers(0, 1).await;
    let next = [&prompt(0)[..], &tokens, &[7; 5]].concat();
    answer(&cluster, &next, 1, PrefillMode::Local, "").await;
    assert_eq!(computed(&cluster, "decode-0").await, (next.len() - num_saved * BLOCK_SIZE) as f64);
    // Another tenant's salt finds nothing.
    let before = computed(&cluster, "decode-0").await;
    assert_eq!(answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "other").await, tokens);
    assert_eq!(computed(&cluster, "decode-0").await - before, (NUM_TOKENS + NUM_NEXT - 1) as f64);
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn a_killed_prefill_worker_hands_over_what_it_has_on_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut cluster = Cluster::new().flags_of("prefill-0", &on_disk(dir.path())).start().await;
    let tokens = answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Remote, "").await;
    until_saved(&cluster, "prefill-0", "disk", NUM_BLOCKS).await;
    for name in ["prefill-0", "decode-0"] {
        cluster.kill(name);
        cluster.start_again(name);
    }
    cluster.wait_for_workers(1, 1).await;
    assert_eq!(answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Remote, "").await, tokens);
    assert_eq!(computed(&cluster, "prefill-0").await, 1.0);
    assert_eq!(tier(&cluster, "prefill-0", "hits_total", "disk").await, NUM_BLOCKS);
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn a_changed_bit_on_disk_is_computed_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut cluster =
        Cluster::new().prefill(0).decode(1).flags_of("decode-0", &on_disk(dir.path())).start().await;
    let tokens = answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await;
    until_saved(&cluster, "decode-0", "disk", NUM_BLOCKS).await;
    cluster.kill("decode-0");
    let slabs =
        OpenOptions::new().read(true).write(true).open(dir.path().join("slabs")).expect("it is there");
    let body_bytes = slabs.metadata().expect("a file").len() / num_slots(dir.path());
    // Slots are taken in order: the eleventh block.
    let (mut byte, offset) = ([0], 10 * body_bytes + 99);
    slabs.read_exact_at(&mut byte, offset).expect("it is long enough");
    slabs.write_all_at(&[byte[0] ^ 1], offset).expect("it is long enough");
    cluster.start_again("decode-0");
    cluster.wait_for_workers(0, 1).await;
    assert_eq!(answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await, tokens);
    assert_eq!(tier(&cluster, "decode-0", "damaged_total", "disk").await, 1);
    assert_eq!(tier(&cluster, "decode-0", "hits_total", "disk").await, 10);
}

/// The index has a page, and a head of 512 bytes for each slot with 16 tokens.
fn num_slots(dir: &Path) -> u64 {
    (dir.join("index").metadata().expect("a file").len() - 4096) / 512
}

#[tokio::test]
async fn on_processors_host_memory_makes_the_pool_larger() {
    // The pool alone has room for a few prompts.
    let flags = format!("--kv-memory 4M --host-kv 64M {PATIENT}");
    let cluster = Cluster::new().prefill(0).decode(1).worker_flags(&flags).start().await;
    let num_prompts = 12;
    let mut tokens = Vec::new();
    for nth in 0..num_prompts {
        tokens.push(answer(&cluster, &prompt(nth), 2, PrefillMode::Local, "").await);
    }
    let before = computed(&cluster, "decode-0").await;
    for (nth, tokens) in tokens.iter().enumerate() {
        assert_eq!(&answer(&cluster, &prompt(nth), 2, PrefillMode::Local, "").await, tokens, "prompt {nth}");
    }
    assert_eq!(computed(&cluster, "decode-0").await - before, (2 * num_prompts) as f64);
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn workers_of_a_machine_have_one_host_tier_that_outlives_them() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let flags = format!("--host-kv 8M --host-kv-dir {} {PATIENT}", dir.path().display());
    let mut cluster = Cluster::new().prefill(0).decode(2).worker_flags(&flags).start().await;
    cluster.kill("decode-1");
    cluster.wait_for_workers(0, 1).await;
    let tokens = answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await;
    cluster.start_again("decode-1");
    let num_saved = (NUM_TOKENS + NUM_NEXT - 1) / BLOCK_SIZE;
    cluster.wait_for_workers(0, 2).await;
    for id in ["decode-0", "decode-1"] {
        until_saved(&cluster, id, "host", num_saved).await;
    }
    let written = tier(&cluster, "decode-0", "writes_total", "host").await;
    assert_eq!((written, tier(&cluster, "decode-1", "writes_total", "host").await), (num_saved, 0));
    // Another worker goes on, and after the death of all of them a new one.
    for (dead, alive) in [("decode-0", "decode-1"), ("decode-1", "decode-0")] {
        cluster.kill(dead);
        cluster.wait_for_workers(0, 1).await;
        assert_eq!(answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await, tokens);
        assert_eq!(
            computed(&cluster, alive).await,
            NUM_NEXT as f64,
            "one prompt token, and all but the last"
        );
        assert_eq!(tier(&cluster, alive, "hits_total", "host").await, NUM_BLOCKS);
        cluster.assert_all_blocks_free().await;
        if alive == "decode-1" {
            cluster.kill(alive);
            cluster.start_again(dead);
            cluster.start_again(alive);
            cluster.wait_for_workers(0, 2).await;
        }
    }
}

#[tokio::test]
async fn a_router_knows_which_tier_has_what() {
    let (memory, disk) = (tempfile::tempdir_in("/dev/shm"), tempfile::tempdir());
    let (memory, disk) = (memory.expect("a directory in memory"), disk.expect("a directory"));
    let flags = format!("--host-kv 700K --host-kv-dir {} {}", memory.path().display(), on_disk(disk.path()));
    let mut cluster = Cluster::new().prefill(0).decode(1).worker_flags(&flags).start().await;
    answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await;
    let num_saved = (NUM_TOKENS + NUM_NEXT - 1) / BLOCK_SIZE;
    until_saved(&cluster, "decode-0", "disk", num_saved).await;
    let num_in_memory = tier(&cluster, "decode-0", "blocks", "host").await;
    assert!((1..num_saved).contains(&num_in_memory), "{num_in_memory}: a part of it");
    // All that is cached, what is in the pool, and what is there or in memory.
    until_known(&cluster, 3 * num_saved).await;

    cluster.kill("decode-0");
    cluster.start_again("decode-0");
    cluster.wait_for_workers(0, 1).await;
    until_known(&cluster, num_saved + num_in_memory).await;
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn an_object_store_serves_sealed_what_was_used_twice_also_to_another_worker() {
    let dir = tempfile::tempdir().expect("a directory");
    let key = dir.path().join("key");
    std::fs::write(&key, "1f".repeat(32)).expect("written");
    let url = format!("file://{}", dir.path().join("kv").display());
    let flags = format!("--object-kv {url} --object-kv-size 64M --kv-key-file {} {PATIENT}", key.display());
    let mut cluster = Cluster::new().prefill(0).decode(1).flags_of("decode-0", &flags).start().await;
    let tokens = answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await;
    assert_eq!(answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await, tokens);
    let num_saved = (NUM_TOKENS + NUM_NEXT - 1) / BLOCK_SIZE;
    until_saved(&cluster, "decode-0", "object", num_saved).await;
    cluster.kill("decode-0");

    let args = format!("decode-worker --id another --router {} {flags}", cluster.base);
    let args: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
    let another = cluster.start_beside("another", &args);
    eventually("a measured store", Duration::from_secs(120), async || {
        another.log().contains("object store measured").then_some(())
    })
    .await;
    cluster.wait_for_workers(0, 1).await;
    // What the dead worker wrote, the other one tells.
    until_metric(&cluster, "baton_router_object_store_blocks", num_saved).await;
    assert_eq!(answer(&cluster, &prompt(0), NUM_NEXT, PrefillMode::Local, "").await, tokens);
    assert_eq!(tier(&cluster, "another", "hits_total", "object").await, NUM_BLOCKS);
    assert_eq!(
        computed(&cluster, "another").await,
        NUM_NEXT as f64,
        "one prompt token, and all but the last"
    );
}

#[tokio::test]
async fn a_second_worker_is_refused_the_directory_of_the_first() {
    let dir = tempfile::tempdir().expect("a directory");
    let flags = on_disk(dir.path());
    let cluster = Cluster::new().prefill(0).decode(1).flags_of("decode-0", &flags).start().await;
    let args = format!("decode-worker --id second --router {} {flags}", cluster.base);
    let args: Vec<String> = args.split_whitespace().map(str::to_owned).collect();
    let mut second = cluster.start_beside("second", &args);
    let status =
        eventually("the end of the second", Duration::from_secs(120), async || second.exit_status()).await;
    assert!(!status.success());
    assert!(second.log().contains("another worker uses this directory"), "{}", second.log());
}

/// Tokens of a prompt that were cached when it came with this `cache_control`.
async fn cached(cluster: &Cluster, nth: usize, control: Value) -> usize {
    let body = json!({"prompt": prompt(nth), "max_tokens": 2, "temperature": 0, "cache_control": control});
    let answer = cluster.complete(&body).await;
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count") as usize
}

#[tokio::test]
async fn a_prompt_that_is_to_be_kept_outlives_more_newer_ones_than_the_pool_holds() {
    let cluster = Cluster::new().prefill(0).decode(1).worker_flags("--kv-memory 8M").start().await;
    let loads = cluster.loads().await;
    let num_blocks = loads[0].load.as_ref().expect("it reported").num_total_blocks as usize;
    assert!(num_blocks > 4 * (NUM_BLOCKS + 1), "both kept prompts are at most half of {num_blocks} blocks");
    let newer = 10..11 + num_blocks / NUM_BLOCKS;
    let whole = NUM_BLOCKS * BLOCK_SIZE;
    let kept = json!({"type": "ephemeral", "ttl": "1h"});
    for (nth, control) in [(0, kept), (1, json!({"ttl": "1s"})), (2, Value::Null)] {
        assert_eq!(cached(&cluster, nth, control).await, 0);
    }
    // The second one's time passes.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for nth in newer.clone() {
        assert_eq!(cached(&cluster, nth, Value::Null).await, 0);
    }
    for (nth, expected) in [(0, whole), (1, 0), (2, 0)] {
        assert_eq!(cached(&cluster, nth, Value::Null).await, expected, "prompt {nth}");
    }
    // Prompts that come once push out nothing but each other.
    for nth in newer {
        cached(&cluster, 100 + nth, json!({"priority": "low"})).await;
    }
    for (nth, expected) in [(0, whole), (1, whole), (2, whole), (110, 0)] {
        assert_eq!(cached(&cluster, nth, Value::Null).await, expected, "prompt {nth}");
    }
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn plans_know_what_a_tier_has_that_is_larger_than_the_pool() {
    const NUM_PROMPTS: usize = 8;
    let dir = tempfile::tempdir().expect("a directory");
    let flags = format!("--kv-memory 4M {}", on_disk(dir.path()));
    let cluster = Cluster::new().prefill(0).decode(1).worker_flags(&flags).start().await;
    let loads = cluster.loads().await;
    let num_blocks = loads[0].load.as_ref().expect("it reported").num_total_blocks as usize;
    assert!((NUM_BLOCKS + 1..NUM_PROMPTS * NUM_BLOCKS).contains(&num_blocks), "{num_blocks}");
    let plan = async |nth| {
        let body = json!({"prompt": prompt(nth), "max_tokens": 2, "temperature": 0, "explain": true});
        cluster.complete(&body).await["plans"][0]["chosen"].clone()
    };
    for nth in 0..NUM_PROMPTS {
        assert_eq!(plan(nth).await["recall_ms"], 0.0, "it is new");
    }
    until_saved(&cluster, "decode-0", "disk", NUM_PROMPTS * NUM_BLOCKS).await;
    // In turn none is in the pool any more. The first recall tells what recalls take.
    let mut nth = 0;
    let recalled = eventually("a plan that counts a recall", Duration::from_secs(20), async || {
        nth = (nth + 1) % NUM_PROMPTS;
        let plan = plan(nth).await;
        (plan["recall_ms"].as_f64()? > 0.0).then_some(plan)
    })
    .await;
    let new = plan(NUM_PROMPTS).await;
    let compute_ms = |plan: &Value| plan["compute_ms"].as_f64().expect("a time");
    assert!(
        compute_ms(&recalled) < compute_ms(&new) / 4.0,
        "one token beside a whole prompt: {recalled} {new}"
    );
    let health = cluster.http.get("/health").await.expect("the router answers").json();
    assert_eq!(health["workers"][0]["index"], "exact", "{health}");
    cluster.assert_all_blocks_free().await;
}

#[tokio::test]
async fn an_object_store_gets_at_its_first_use_what_is_to_be_kept_and_nothing_low() {
    let dir = tempfile::tempdir().expect("a directory");
    let flags = format!("--object-kv file://{} --object-kv-size 64M", dir.path().join("kv").display());
    // A remote prefill: both workers get it.
    let cluster = Cluster::new().worker_flags(&flags).start().await;
    for (nth, control) in [(0, json!({"priority": "low"})), (1, json!({"type": "ephemeral"}))] {
        for _ in 0..2 - nth {
            let body = json!({"prompt": prompt(nth), "max_tokens": 2, "prefill_mode": "remote", "cache_control": control});
            cluster.complete(&body).await;
        }
    }
    for id in ["prefill-0", "decode-0"] {
        until_saved(&cluster, id, "object", NUM_BLOCKS).await;
        assert_eq!(tier(&cluster, id, "blocks", "object").await, NUM_BLOCKS, "{id}");
    }
}
