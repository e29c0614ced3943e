use std::sync::Arc;

use baton_cluster_record::{Capacity, Role, WorkerRecord};
use baton_kv_cache::{HashRoot, KvDtype, KvFormat, KvLayout};

use crate::*;

fn record(id: &str, role: Role) -> WorkerRecord {
    let layout =
        KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::F32 };
    WorkerRecord {
        id: id.into(),
        incarnation: 1,
        role,
        address: "http://127.0.0.1:9".into(),
        model: "tiny".into(),
        kv_format: KvFormat::new("r1".into(), &layout, "theta=10000".into()),
        capacity: Capacity { num_blocks: 100, block_size: 16, max_running: 8, context_length: 1000 },
    }
}

/// Reads lines like `d0 decode running=3 waiting=1 speed=1000 queued=100 free=5 assigned=2 backing-off draining unreachable
/// other-format other-blocks context=64`.
pub(crate) fn view(text: &str) -> ClusterView {
    let workers = text.lines().map(str::trim).filter(|line| !line.is_empty()).map(|line| {
        let mut words = line.split_whitespace();
        let id = words.next().expect("a line names a worker");
        let role = match words.next() {
            Some("decode") => Role::Decode,
            Some("prefill") => Role::Prefill,
            other => panic!("role {other:?}"),
        };
        let mut record = record(id, role);
        let mut usability = Usability::Ready;
        let mut load = Load { num_free_blocks: 100, num_total_blocks: 100, ..Load::default() };
        let mut num_assigned = 0;
        for word in words {
            match word.split_once('=') {
                Some(("running", n)) => load.num_running = n.parse().unwrap(),
                Some(("queued", n)) => load.num_queued_tokens = n.parse().unwrap(),
                Some(("waiting", n)) => load.num_waiting = n.parse().unwrap(),
                Some(("speed", n)) => load.prefill_tokens_per_second = n.parse().unwrap(),
                Some(("free", n)) => load.num_free_blocks = n.parse().unwrap(),
                Some(("assigned", n)) => num_assigned = n.parse().unwrap(),
                Some(("context", n)) => record.capacity.context_length = n.parse().unwrap(),
                None if word == "backing-off" => usability = Usability::BackingOff,
                None if word == "draining" => usability = Usability::Draining,
                None if word == "unreachable" => usability = Usability::Unreachable,
                None if word == "other-format" => record.kv_format.rope = "theta=1".into(),
                None if word == "other-blocks" => {
                    record.kv_format.block_size = 64;
                    record.kv_format.dtype = KvDtype::Int8;
                }
                _ => panic!("word {word:?}"),
            }
        }
        WorkerView { record: Arc::new(record), usability, load, num_assigned }
    });
    ClusterView { workers: workers.collect() }
}

/// `tokens=200 cached:d0=64 not:d1 local|remote`
pub(crate) fn request(text: &str) -> PlanRequest {
    let key = |id: &str| WorkerKey { id: id.into(), incarnation: 1 };
    let mut request = PlanRequest::default();
    for word in text.split_whitespace() {
        match word.split_once('=') {
            Some(("tokens", n)) => request.num_tokens = n.parse().unwrap(),
            Some((name, n)) => {
                let id = name.strip_prefix("cached:").expect("cached:<id>=<tokens>");
                request.cached.push((key(id), n.parse().unwrap()));
            }
            None => match word {
                "local" => request.prefill = PrefillMode::Local,
                "remote" => request.prefill = PrefillMode::Remote,
                _ => request.excluded.push(key(word.strip_prefix("not:").expect("not:<id>"))),
            },
        }
    }
    request
}

fn outcome(request: &PlanRequest, view: &ClusterView) -> String {
    match PrefixAware::default().plan(request, view) {
        Ok(Plan { decode, prefill, prefix_source }) => {
            let prefill = match prefill {
                Prefill::Local => String::new(),
                Prefill::Remote(worker) => format!("<-{}", worker.id),
            };
            let source = prefix_source.map_or_else(String::new, |worker| format!(" with {}", worker.id));
            format!("{}{prefill}{source}", decode.id)
        }
        Err(error) => error.to_string(),
    }
}

#[test]
fn plans() {
    let two = "d0 decode\n d1 decode\n p0 prefill\n p1 prefill";
    let cases = [
        ("long prompts are computed elsewhere", two, "tokens=200", "d0<-p0"),
        ("short ones are not", two, "tokens=31", "d0"),
        ("the threshold itself is long", two, "tokens=32", "d0<-p0"),
        ("the threshold counts uncached tokens", two, "tokens=200 cached:d1=176", "d1"),
        ("a cached prefix attracts decode", two, "tokens=200 cached:d1=48", "d1<-p0"),
        ("and prefill", two, "tokens=200 cached:p1=64", "d0<-p1"),
        ("a prefill worker fetches what it lacks", two, "tokens=200 cached:d1=64", "d1<-p0 with d1"),
        ("from the worker that has most", two, "tokens=300 cached:d1=160 cached:p1=64", "d1<-p1 with d1"),
        (
            "a decode worker, too, and computes the rest itself if that is little",
            "d0 decode running=9\n d1 decode\n p0 prefill",
            "tokens=200 cached:d0=176",
            "d1 with d0",
        ),
        (
            "also from one that leaves",
            "d0 decode draining\n d1 decode",
            "tokens=200 cached:d0=176",
            "d1 with d0",
        ),
        ("not from one that is gone", "d0 decode unreachable\n d1 decode", "tokens=200 cached:d0=176", "d1"),
        (
            "nor from one of another model",
            "d0 decode\n d1 decode running=9 other-format",
            "tokens=200 cached:d1=176",
            "d0",
        ),
        (
            "nor from one that failed",
            "d0 decode running=9\n d1 decode",
            "tokens=200 not:d0 cached:d0=176",
            "d1",
        ),
        // 256 bytes a token at 1 GB/s, and 5 ms: 176 tokens are worth it below 34,900 tokens a second.
        (
            "what is slow to compute is fetched",
            "d0 decode running=9\n d1 decode speed=34000",
            "tokens=200 cached:d0=176",
            "d1 with d0",
        ),
        (
            "what is quick is not",
            "d0 decode running=9\n d1 decode speed=36000",
            "tokens=200 cached:d0=176",
            "d1",
        ),
        ("a demand for local wins", two, "tokens=200 local", "d0"),
        ("a demand for remote wins", two, "tokens=8 remote", "d0<-p0"),
        ("the idle one is taken", "d0 decode running=1\n d1 decode", "tokens=8", "d1"),
        ("our own newest requests count", "d0 decode assigned=1\n d1 decode", "tokens=8", "d1"),
        (
            "a long queue outweighs a cached prefix",
            "d0 decode running=8\n d1 decode",
            "tokens=200 cached:d0=160",
            "d1 with d0",
        ),
        ("one without room comes last", "d0 decode free=2\n d1 decode running=9", "tokens=100", "d1"),
        ("queued prompts count", "d0 decode\n p0 prefill queued=500\n p1 prefill", "tokens=200", "d0<-p1"),
        (
            "any number may be said to be queued",
            "d0 decode queued=18446744073709551615\n d1 decode queued=18446744073709551615 free=0\n d2 decode",
            "tokens=8",
            "d2",
        ),
        ("who failed this request is not asked", two, "tokens=200 not:d0 not:p0", "d1<-p1"),
        ("no prefill worker: local", "d0 decode", "tokens=200", "d0"),
        ("a failed prefill worker: local", "d0 decode\n p0 prefill backing-off", "tokens=200", "d0"),
        (
            "formats that cannot be bridged are not paired",
            "d0 decode\n p0 prefill other-format",
            "tokens=200",
            "d0",
        ),
        (
            "blocks of another size and type are",
            "d0 decode\n p0 prefill other-blocks",
            "tokens=200",
            "d0<-p0",
        ),
        (
            "room is counted in a worker's own blocks",
            "d0 decode free=7\n d1 decode free=7 running=9 other-blocks",
            "tokens=128 local",
            "d1",
        ),
        (
            "remote or nothing",
            "d0 decode\n p0 prefill draining",
            "tokens=200 remote",
            "no prefill worker is usable, and the request demands one",
        ),
        ("no decode worker", "p0 prefill", "tokens=8", "no decode worker is registered"),
        (
            "no decode worker answers",
            "d0 decode unreachable",
            "tokens=8",
            "no decode worker answers (1 registered)",
        ),
        (
            "all leave",
            "d0 decode draining\n d1 decode unreachable",
            "tokens=8",
            "every decode worker is draining",
        ),
        (
            "all failed",
            "d0 decode backing-off\n d1 decode",
            "tokens=8 not:d1",
            "every decode worker has failed a moment ago",
        ),
        ("too long for one", "d0 decode context=64\n d1 decode running=9", "tokens=64", "d1"),
        (
            "too long for all",
            "d0 decode context=64",
            "tokens=64",
            "no decode worker has a context of 65 tokens",
        ),
        (
            "not for the one that is away",
            "d0 decode context=64\n d1 decode unreachable",
            "tokens=64",
            "no decode worker answers (1 registered)",
        ),
    ];
    for (name, workers, wanted, expected) in cases {
        assert_eq!(outcome(&request(wanted), &view(workers)), expected, "{name}");
    }
}

#[test]
fn another_incarnation_is_neither_excluded_nor_holds_anything() {
    let mut view = view("d0 decode\n d1 decode");
    let mut restarted = (*view.workers[0].record).clone();
    restarted.incarnation = 2;
    view.workers[0].record = Arc::new(restarted);
    assert_eq!(outcome(&request("tokens=200 not:d0"), &view), "d0");
    assert_eq!(outcome(&request("tokens=200 cached:d0=64 cached:d1=16"), &view), "d1");
}

fn key(id: &str, incarnation: u64) -> WorkerKey {
    WorkerKey { id: id.into(), incarnation }
}

fn hashes(tokens: std::ops::Range<u32>) -> Vec<baton_kv_cache::BlockHash> {
    HashRoot::new("m", "", "").block_hashes(&tokens.collect::<Vec<_>>(), 4).collect()
}

#[test]
fn prefixes_are_found_as_far_as_they_reach() {
    let mut index = PrefixIndex::new(100);
    index.insert(&hashes(0..40), &key("a", 1));
    index.insert(&hashes(0..12), &key("b", 1));
    let mut found = index.holders(&hashes(0..24));
    found.sort();
    assert_eq!(found, [(key("a", 1), 6), (key("b", 1), 3)]);
    assert_eq!(index.holders(&hashes(1..24)), []);

    index.insert(&hashes(0..4), &key("a", 2));
    assert_eq!(index.holders(&hashes(0..4)), [(key("b", 1), 1), (key("a", 2), 1)]);
}

#[test]
fn what_was_used_longest_ago_is_forgotten_first_and_ends_go_before_beginnings() {
    let mut index = PrefixIndex::new(8);
    index.insert(&hashes(0..24), &key("a", 1)); // 6 blocks
    index.insert(&hashes(100..116), &key("b", 1)); // 4 blocks: 2 must go
    assert_eq!(index.len(), 8);
    assert_eq!(index.holders(&hashes(0..24)), [(key("a", 1), 4)]);
    assert_eq!(index.holders(&hashes(100..116)), [(key("b", 1), 4)]);
    for _ in 0..100 {
        index.insert(&hashes(100..116), &key("b", 1));
    }
    assert_eq!(index.holders(&hashes(0..24)), [(key("a", 1), 4)], "reuse of others evicts nothing");
    index.insert(&hashes(200..264), &key("a", 1)); // 16 blocks
    assert_eq!(index.holders(&hashes(200..264)), [(key("a", 1), 8)], "of a long prompt, its beginning");
}
