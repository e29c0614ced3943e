//! Clusters whose workers compute nothing (`--device sim:GPU`): two real routers, real etcd, real handoffs between many workers
//! in a few processes. Workers are killed while streams run; no stream may fail, and none may change a token.
//!
//! A short form runs with all tests. The whole one, 100 workers for two minutes, also compares the time to the first token with
//! the simulator's, which needs a machine without other work:
//!
//! ```text
//! cargo test -p baton-tests --test system -- --ignored --nocapture a_hundred_simulated_workers
//! ```

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::Path,
    rc::Rc,
    time::{Duration, Instant},
};

use baton_cluster_record::Role;
use baton_cost::LinkLine;
use baton_kv_cache::{KvDtype, KvFormat};
use baton_proto::v1::{
    GenerateRequest, SamplingParams, TokenIds, generate_request::Prompt, generate_response::Event,
    inference_client::InferenceClient,
};
use baton_simulator::{
    Change, ChangeKind, ClusterSpec, PolicyName, RequestEnd, SimTime, SloTarget, WorkerSpec,
    model::ModelOnDevice,
    report::percentile,
    simulate,
    trace::{Arrival, Arrivals, Trace},
};
use futures_util::{StreamExt, future::join_all, stream};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::{LocalSet, spawn_local};

use crate::{
    harness::{Cluster, Http, Process, wait_for_workers},
    ports::free_port,
};

/// Tokens in a block of KV, sequences and tokens of a step.
const BLOCK_SIZE: usize = 16;
const MAX_RUNNING: usize = 64;
const TOKEN_BUDGET: usize = 512;

/// So many workers of a role: some have a process each, so that one can be killed, and the others share a few.
#[derive(Clone, Copy, Debug)]
struct Fleet {
    role: &'static str,
    num_alone: usize,
    num_processes: usize,
    num_in_process: usize,
}

impl Fleet {
    fn num_workers(&self) -> usize {
        self.num_alone + self.num_processes * self.num_in_process
    }
}

/// Two routers, etcd and simulated workers.
struct Simulated {
    cluster: Cluster,
    /// URLs of both routers.
    routers: [String; 2],
    _beside: Vec<Process>,
    model: TempDir,
}

/// A directory with the tiny model's tokenizer and the configuration of a large model.
fn model_directory(shape: &Value) -> TempDir {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"] {
        std::fs::copy(tiny.join(name), dir.path().join(name)).expect("the tiny model is there");
    }
    let config = std::fs::read(tiny.join("config.json")).expect("the tiny model is there");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    for (name, value) in shape.as_object().expect("fields") {
        config[name] = value.clone();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("it can be written");
    dir
}

/// The shape of Llama 3 with 8 B parameters, but for its vocabulary.
fn shape_8b() -> Value {
    json!({
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    })
}

/// The same with 70 B.
fn shape_70b() -> Value {
    json!({
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    })
}

impl Simulated {
    async fn start(shape: &Value, device: &str, fleets: [Fleet; 2]) -> Simulated {
        let model = model_directory(shape);
        let model_flags = format!("--model {} --model-name sim", model.path().display());
        let worker_flags =
            format!("{model_flags} {device} --max-running {MAX_RUNNING} --token-budget {TOKEN_BUDGET}");
        let [prefill, decode] = fleets;
        let cluster = Cluster::new()
            .with_etcd()
            .prefill(prefill.num_alone)
            .decode(decode.num_alone)
            .router_flags(&model_flags)
            .worker_flags(&worker_flags)
            .start()
            .await;
        let etcd = cluster.etcd.as_ref().expect("it was asked for").endpoint.clone();
        let port = free_port();
        let words = |text: String| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let discovery = format!("--discovery etcd --etcd-endpoints {etcd}");
        let second = words(format!("router --listen 127.0.0.1:{port} {model_flags} {discovery}"));
        let mut beside = vec![cluster.start_beside("router-1", &second)];
        for Fleet { role, num_processes, num_in_process, .. } in fleets {
            for idx in 0..num_processes {
                let name = format!("{role}-group-{idx}");
                let flags = words(format!(
                    "{role}-worker --id {name} --num-workers {num_in_process} {worker_flags} {discovery}"
                ));
                beside.push(cluster.start_beside(&name, &flags));
            }
        }
        let routers = [cluster.base.clone(), format!("http://127.0.0.1:{port}")];
        for router in &routers {
            wait_for_workers(&Http::new(router.clone()), prefill.num_workers(), decode.num_workers()).await;
        }
        Simulated { cluster, routers, _beside: beside, model }
    }

    /// Kills a worker and starts it again, as another incarnation.
    fn replace(&mut self, name: &str) {
        self.cluster.kill(name);
        self.cluster.start_again(name);
    }
}

/// Prompts of different lengths, each asked again and again. Equal prompts have equal answers, from every worker.
#[derive(Clone, Debug)]
struct Kinds(Vec<(u32, u32)>);

/// What became of one request.
struct Answer {
    kind: usize,
    tokens: Vec<u32>,
    ttft: Duration,
}

impl Kinds {
    /// Asks the `idx`th prompt. No request finds a cached prefix of another one.
    async fn ask(&self, router: String, idx: usize) -> anyhow::Result<Answer> {
        let kind = idx % self.0.len();
        let (num_prompt, num_output) = self.0[kind];
        // Ordinary tokens, different ones for each kind.
        let ids = (0..num_prompt).map(|at| 100 + (at * 31 + kind as u32 * 97) % 1900).collect();
        let request = GenerateRequest {
            prompt: Some(Prompt::TokenIds(TokenIds { ids, passages: Vec::new() })),
            sampling: Some(SamplingParams {
                max_tokens: Some(num_output),
                temperature: Some(0.0),
                ..SamplingParams::default()
            }),
            cache_salt: idx.to_string(),
            ..GenerateRequest::default()
        };
        let mut client = InferenceClient::connect(router).await?;
        let began = Instant::now();
        let mut events = client.generate(request).await?.into_inner();
        let (mut tokens, mut ttft) = (Vec::new(), None);
        while let Some(response) = events.message().await? {
            if let Some(Event::Output(output)) = response.event {
                ttft.get_or_insert_with(|| began.elapsed());
                tokens.extend(output.token_ids);
            }
        }
        anyhow::ensure!(tokens.len() == num_output as usize, "{} of {num_output} tokens", tokens.len());
        Ok(Answer { kind, tokens, ttft: ttft.expect("there are tokens") })
    }
}

/// Answers, by kind: all of a kind must be equal.
fn assert_no_token_changed(answers: &[Answer]) {
    let mut by_kind: BTreeMap<usize, &[u32]> = BTreeMap::new();
    for Answer { kind, tokens, .. } in answers {
        let first = by_kind.entry(*kind).or_insert(tokens);
        assert_eq!(first, tokens, "answers of kind {kind} differ");
    }
    let different: std::collections::BTreeSet<_> = by_kind.values().map(|tokens| &tokens[..8]).collect();
    assert_eq!(different.len(), by_kind.len(), "different prompts have different answers");
}

#[tokio::test]
async fn simulated_workers_that_are_killed_cost_no_stream_and_no_token() {
    let fleets = [
        Fleet { role: "prefill", num_alone: 1, num_processes: 1, num_in_process: 7 },
        Fleet { role: "decode", num_alone: 2, num_processes: 1, num_in_process: 10 },
    ];
    let system = Simulated::start(&shape_8b(), "--device sim:H100", fleets).await;
    let kinds = Kinds((0..12).map(|kind| (200 + 150 * kind, 20 + 3 * kind)).collect());
    let routers = system.routers.clone();
    let system = Rc::new(RefCell::new(system));
    let num_ended = RefCell::new(0);
    let asked = stream::iter(0..150).map(async |idx| {
        let answer = kinds.ask(routers[idx % 2].clone(), idx).await;
        *num_ended.borrow_mut() += 1;
        // Other streams run at these moments.
        match *num_ended.borrow() {
            30 | 90 => system.borrow_mut().replace("decode-0"),
            60 => system.borrow_mut().replace("prefill-0"),
            120 => system.borrow_mut().replace("decode-1"),
            _ => {}
        }
        answer.unwrap_or_else(|error| panic!("request {idx}: {error:#}"))
    });
    let answers: Vec<Answer> = asked.buffer_unordered(24).collect().await;
    assert_no_token_changed(&answers);
    let http = system.borrow().cluster.http.clone();
    let health = http.get("/health").await.expect("the router lives").json();
    let of_groups = |role: &str| {
        let workers = health["workers"].as_array().expect("a list").iter();
        workers.filter(|worker| worker["id"].as_str().is_some_and(|id| id.contains(role))).count()
    };
    assert_eq!((of_groups("prefill-group"), of_groups("decode-group")), (7, 10));
}

/// Every so many seconds a worker dies; it is back after about so many.
const KILL_EVERY: u64 = 10;
const BACK_AFTER: f64 = 2.0;
const NUM_KILLS: usize = 12;
/// Requests per second.
const RATE: f64 = 16.0;
/// The part by which the median time to the first token may differ from the simulator's.
const TOLERANCE: f64 = 0.15;

#[tokio::test]
#[ignore = "two minutes on a machine without other work; see the top of the file"]
async fn a_hundred_simulated_workers_serve_as_the_simulator_predicts_while_one_dies_every_ten_seconds() {
    let fleets = [
        Fleet { role: "prefill", num_alone: 4, num_processes: 2, num_in_process: 18 },
        Fleet { role: "decode", num_alone: 6, num_processes: 3, num_in_process: 18 },
    ];
    assert_eq!(fleets.iter().map(Fleet::num_workers).sum::<usize>(), 100);
    let device = "--device sim:A100 --tensor-parallel 4";
    let mut system = Simulated::start(&shape_70b(), device, fleets).await;
    let kinds = Kinds((0..40).map(|kind| (1000 + 350 * (kind * 7 % 40), 30 + kind)).collect());
    let trace = Trace::of_lengths(kinds.0.iter().copied());
    let num_requests = (RATE * (KILL_EVERY as usize * NUM_KILLS) as f64) as usize;
    let arrivals = Arrivals::Poisson { rate: RATE, num_requests, bursts: None }.of(&trace, 1);
    let predicted = predict(system.model.path(), &trace, &arrivals, fleets);

    let routers = system.routers.clone();
    let local = LocalSet::new();
    let answers = local
        .run_until(async {
            let began = Instant::now();
            let ask = |(idx, arrival): (usize, &Arrival)| {
                let (kinds, router) = (kinds.clone(), routers[idx % 2].clone());
                let at = began + Duration::from_nanos(arrival.at.0);
                spawn_local(async move {
                    tokio::time::sleep_until(at.into()).await;
                    kinds.ask(router, idx).await
                })
            };
            let asked: Vec<_> = arrivals.iter().enumerate().map(ask).collect();
            for nth in 0..NUM_KILLS {
                let at = began + Duration::from_secs(KILL_EVERY * nth as u64 + KILL_EVERY / 2);
                tokio::time::sleep_until(at.into()).await;
                system.replace(&victim(nth));
            }
            join_all(asked).await
        })
        .await;
    let answers = answers.into_iter().enumerate().map(|(idx, answer)| {
        let answer = answer.expect("no panic");
        answer.unwrap_or_else(|error| panic!("request {idx}: {error:#}"))
    });
    let answers: Vec<Answer> = answers.collect();
    assert_no_token_changed(&answers);
    let mut measured: Vec<f32> = answers.iter().map(|answer| answer.ttft.as_secs_f32()).collect();
    measured.sort_by(f32::total_cmp);
    println!("{num_requests} requests, {NUM_KILLS} kills: no stream failed, no token changed");
    println!("time to the first token, seconds: simulator, measured");
    for part in [0.1, 0.5, 0.9, 0.99] {
        let (simulated, real) = (percentile(&predicted, part), percentile(&measured, part));
        println!(
            "p{:<4} {simulated:8.3} {real:8.3}  {:+.1} %",
            100.0 * part,
            100.0 * (real / simulated - 1.0)
        );
    }
    let ratio = percentile(&measured, 0.5) / percentile(&predicted, 0.5);
    assert!((ratio - 1.0).abs() <= TOLERANCE, "the median is {ratio:.3} of the predicted one");
}

/// Decode and prefill workers die in turn.
fn victim(nth: usize) -> String {
    match nth % 2 {
        0 => format!("decode-{}", nth / 2 % 6),
        _ => format!("prefill-{}", nth / 2 % 4),
    }
}

/// The times to the first token that the simulator gives, sorted.
fn predict(model: &Path, trace: &Trace, arrivals: &[Arrival], fleets: [Fleet; 2]) -> Vec<f32> {
    let model = ModelOnDevice::new(&model.display().to_string(), "A100", 4, None).expect("the model fits");
    // What simulated workers really send each other.
    let kv_format = KvFormat {
        model_revision: "sim".into(),
        dtype: KvDtype::F32,
        block_size: BLOCK_SIZE,
        num_layers: 1,
        num_kv_heads: 1,
        head_dim: 1,
        tensor_parallel: 1,
        rope: String::new(),
    };
    let worker = |role: Role| WorkerSpec {
        role,
        num_devices: 4,
        step: model.step,
        slowness: 1.0,
        compute: None,
        kv_format: kv_format.clone(),
        kv_bytes_per_token: 8.0,
        num_blocks: model.num_kv_tokens / BLOCK_SIZE,
        tiers: Vec::new(),
        max_running: MAX_RUNNING,
        max_waiting: 1024,
        token_budget: TOKEN_BUDGET,
        itl_target: None,
        context_length: model.context_length,
    };
    let [prefill, decode] = fleets;
    let of = |role: Role, num: usize| std::iter::repeat_n(role, num).map(worker);
    let changes = (0..NUM_KILLS).flat_map(|nth| {
        let worker_idx = match nth % 2 {
            0 => nth / 2 % 6,
            _ => decode.num_workers() + nth / 2 % 4,
        };
        let at = (KILL_EVERY * nth as u64 + KILL_EVERY / 2) as f64;
        [(at, ChangeKind::Fail), (at + BACK_AFTER, ChangeKind::Join)].map(|(at, kind)| Change {
            at: SimTime::from_seconds(at),
            worker_idx,
            kind,
        })
    });
    let spec = ClusterSpec {
        workers: of(Role::Decode, decode.num_workers())
            .chain(of(Role::Prefill, prefill.num_workers()))
            .collect(),
        num_routers: 2,
        policy: PolicyName::Baton,
        slo_ttft: SloTarget::Seconds(1e6),
        slo_tpot: SloTarget::Seconds(1e6),
        report_interval: SimTime::from_seconds(0.05),
        call: SimTime::from_seconds(0.001),
        link: LinkLine { latency_seconds: 0.002, bytes_per_second: 1e9 },
        max_attempts: 16,
        balances: false,
        recovery_timeout: Duration::from_secs(60),
        noise: 0.0,
        changes: changes.collect(),
        seed: 1,
    };
    let report = simulate(&spec, trace, arrivals, &mut |_| {});
    assert!(report.outcomes.iter().all(|outcome| outcome.end == RequestEnd::Finished));
    let mut ttft: Vec<f32> = report.outcomes.iter().map(|outcome| outcome.ttft).collect();
    ttft.sort_by(f32::total_cmp);
    ttft
}
