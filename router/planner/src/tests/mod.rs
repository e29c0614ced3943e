use std::{sync::Arc, time::Duration};

use baton_cluster_record::{Capacity, Compute, Role, WorkerRecord};
use baton_cost::{LinkLine, StepLine};
use baton_kv_cache::{KvDtype, KvFormat, KvLayout};

use crate::*;

mod by_time;
mod drafting;

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
        compute: None,
    }
}

/// Steps of 10 ms and so many seconds for each prompt token; 1,000 tokens of context and a million pairs cost 1 ms each.
fn pace(per_token: f64) -> WorkerPace {
    WorkerPace {
        step: StepLine { fixed: 0.01, per_token, per_context_token: 1e-6, per_pair: 1e-9 },
        is_measured: true,
        num_decoding: 0,
        num_context_tokens: 0,
        num_queued_pairs: 0,
        recent_itl: 0.0,
        step_yield: StepYield::default(),
        max_step_tokens: 2048,
        itl_target: 0.0,
    }
}

/// Reads lines like `d0 decode running=3 waiting=1 speed=1000 queued=100 queued-blocks=7 free=5 assigned=2 backing-off draining unreachable
/// age=0.1 other-format other-blocks context=64`. A worker with `rate=20000`, in prompt tokens a second, says what its steps take; then
/// `decoding=8`, `itl-target=0.05`, `yield=3`, `link=1e9`, `shm=1e10` and `on=machine:0,1` may follow.
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
        let (mut num_assigned, mut sent) = (0, SentWork::default());
        for word in words {
            match word.split_once('=') {
                Some(("running", n)) => load.num_running = n.parse().unwrap(),
                Some(("age", n)) => load.age = Duration::from_secs_f64(n.parse().unwrap()),
                Some(("queued", n)) => load.num_queued_tokens = n.parse().unwrap(),
                Some(("waiting", n)) => load.num_waiting = n.parse().unwrap(),
                Some(("queued-blocks", n)) => load.num_queued_blocks = n.parse().unwrap(),
                Some(("speed", n)) => load.prefill_tokens_per_second = n.parse().unwrap(),
                Some(("free", n)) => load.num_free_blocks = n.parse().unwrap(),
                Some(("assigned", n)) => num_assigned = n.parse().unwrap(),
                Some(("rate", n)) => load.pace = Some(pace(1.0 / n.parse::<f64>().unwrap())),
                Some(("decoding", n)) => {
                    let pace = load.pace.as_mut().expect("after rate=");
                    pace.num_decoding = n.parse().unwrap();
                    pace.num_context_tokens = 1000 * pace.num_decoding as u64;
                    load.num_running = pace.num_decoding;
                }
                Some(("itl-target", n)) => {
                    load.pace.as_mut().expect("after rate=").itl_target = n.parse().unwrap();
                }
                Some(("yield", n)) => {
                    let step_yield = StepYield::checked(n.parse().unwrap()).expect("it can be true");
                    load.pace.as_mut().expect("after rate=").step_yield = step_yield;
                }
                None if word == "prior" => {
                    load.pace.as_mut().expect("after rate=").is_measured = false;
                }
                Some((transport @ ("link" | "shm"), n)) => {
                    let bytes_per_second = n.parse().unwrap();
                    let line = Some(LinkLine { latency_seconds: 0.001, bytes_per_second });
                    if transport == "shm" { load.link_within = line } else { load.link_beyond = line }
                }
                Some(("on", machine)) => {
                    let (machine, units) = machine.split_once(':').unwrap_or((machine, ""));
                    let units = units.split_terminator(',').map(|unit| unit.parse().unwrap()).collect();
                    record.compute = Some(Compute { machine: machine.into(), device: "cpu".into(), units });
                }
                // Of the first tier, or of each.
                Some(("recalls", n)) => {
                    let seconds = n.split(',').map(|n| n.parse().unwrap());
                    load.recall_token_seconds.iter_mut().zip(seconds).for_each(|(tier, n)| *tier = n);
                }
                // Of its object store: latency, and seconds for a token.
                Some(("store", n)) => {
                    let (latency, token) = n.split_once(',').expect("store=<latency>,<seconds>");
                    let (latency_seconds, token_seconds) = (latency.parse().unwrap(), token.parse().unwrap());
                    load.store_pace = Some(StorePace { latency_seconds, token_seconds });
                }
                Some(("max-running", n)) => record.capacity.max_running = n.parse().unwrap(),
                Some(("sent", n)) => sent = SentWork { num_tokens: n.parse().unwrap(), ..sent },
                Some(("context", n)) => record.capacity.context_length = n.parse().unwrap(),
                None if word == "backing-off" => usability = Usability::BackingOff,
                None if word == "of-another-router" => load.is_home_of_another = true,
                None if word == "blends" => load.blends = true,
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
        let kv_class = record.kv_format.class();
        WorkerView { record: Arc::new(record), kv_class, usability, load, num_assigned, sent }
    });
    ClusterView { workers: workers.collect() }
}

/// `tokens=200 arriving=192 cached:d0=64/16 stored:d0=160 not:d1 local|remote`
pub(crate) fn request(text: &str) -> PlanRequest {
    let key = |id: &str| WorkerKey { id: id.into(), incarnation: 1 };
    let mut request = PlanRequest::default();
    for word in text.split_whitespace() {
        match word.split_once('=') {
            Some(("tokens", n)) => request.num_tokens = n.parse().unwrap(),
            Some(("arriving", n)) => request.num_arriving = n.parse().unwrap(),
            Some((name, n)) if name.starts_with("stored:") => {
                let worker = Arc::new(key(&name["stored:".len()..]));
                match request.cached.iter_mut().find(|held| held.worker == worker) {
                    Some(held) => held.with_store = n.parse().unwrap(),
                    None => {
                        let with_store = n.parse().unwrap();
                        request.cached.push(HeldPrefix { with_store, ..HeldPrefix::pooled(worker, 0) });
                    }
                }
            }
            Some((name, n)) => {
                let id = name.strip_prefix("cached:").expect("cached:<id>=<tokens>");
                // All of it, or `/` how much of it, is in the pool, and in the pool or the first tier.
                let mut nums = n.split('/').map(|num| num.parse().unwrap());
                let mut held = HeldPrefix::pooled(Arc::new(key(id)), nums.next().unwrap());
                held.above.iter_mut().zip(nums).for_each(|(above, num)| *above = num);
                request.cached.push(held);
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
        Ok(Plan { decode, prefill, prefix_source, .. }) => {
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
        (
            "blocks that others wait for are no room",
            "d0 decode free=20 queued-blocks=15\n d1 decode running=9",
            "tokens=100",
            "d1",
        ),
        (
            "what was just sent counts in full",
            "d0 decode\n p0 prefill sent=500\n p1 prefill",
            "tokens=200",
            "d0<-p1",
        ),
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
        let (mut request, view) = (request(wanted), view(workers));
        assert_eq!(outcome(&request, &view), expected, "{name}");
        request.cached.reverse();
        assert_eq!(outcome(&request, &view), expected, "{name}, prefixes in another order");
    }
}

/// Not a benchmark, but it fails if what each worker holds is looked for among what all hold: that takes a hundred times as long.
#[test]
fn a_prefix_that_all_workers_hold_hardly_slows_down_a_plan_by_constants() {
    let role = |idx: usize| if idx.is_multiple_of(2) { "decode" } else { "prefill" };
    let workers: String = (0..4000).map(|idx| format!("w{idx:04} {}\n", role(idx))).collect();
    let cluster = view(&workers);
    let key = |worker: &WorkerView| Arc::new(WorkerKey::of(&worker.record));
    let held = cluster.workers.iter().map(|worker| HeldPrefix::pooled(key(worker), 300)).collect();
    let seconds = |cached: Vec<HeldPrefix>| {
        let wanted = PlanRequest { cached, ..request("tokens=900") };
        let plan = |_| {
            let started = std::time::Instant::now();
            PrefixAware::default().plan(&wanted, &cluster).expect("a plan");
            started.elapsed().as_secs_f64()
        };
        (0..10).map(plan).fold(f64::INFINITY, f64::min)
    };
    let (without, with) = (seconds(Vec::new()), seconds(held));
    println!("{without} s a plan, {with} s with the prefix");
    assert!(with < 15.0 * without, "{with} s, and {without} s without the prefix");
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
