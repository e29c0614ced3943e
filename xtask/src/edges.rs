//! The allowed dependencies between crates: the edges of ARCHITECTURE.md as data, checked against cargo's graph.
//!
//! A new edge is a design change: it is made here and in ARCHITECTURE.md, in the same commit.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::{
    check::Outcome,
    workspace::{Package, Workspace},
};

/// One crate of the workspace, and the crates that it may use.
struct Room {
    name: &'static str,
    /// Rooms it may depend on directly.
    uses: &'static [&'static str],
    /// Further rooms that only its tests may use.
    tests_use: &'static [&'static str],
    /// Packages that it must not reach, directly or indirectly.
    never: &'static [&'static str],
}

/// Top to bottom: a room uses only rooms below it.
const ROOMS: &[Room] = &[
    Room {
        name: "baton-tests",
        uses: &[
            "baton-cli",
            "baton-simulator",
            "baton-cluster-record",
            "baton-cost",
            "baton-proto",
            "baton-tokenizer",
            "baton-engine",
            "baton-model",
            "baton-gguf",
            "baton-kv-cache",
        ],
        tests_use: &[],
        never: &[],
    },
    Room {
        name: "baton-cli",
        uses: &[
            "baton-bench",
            "baton-simulator",
            "baton-command",
            "baton-router",
            "baton-keys",
            "baton-prefill-worker",
            "baton-decode-worker",
            "baton-worker",
            "baton-cost",
            "baton-model",
            "baton-transport-tcp",
            "baton-transport-shm",
            "baton-transport-rdma",
            "baton-transport-nccl",
            "baton-transfer",
            "baton-handoff",
            "baton-cluster",
            "baton-kv-cache",
            "baton-telemetry",
            "baton-proto",
        ],
        tests_use: &[],
        never: &[],
    },
    // The real scheduler and planner under a virtual clock. It knows no network, and loads no model.
    Room {
        name: "baton-simulator",
        uses: &[
            "baton-scheduler",
            "baton-planner",
            "baton-cost",
            "baton-cluster-record",
            "baton-model-sim",
            "baton-model-spec",
            "baton-kv-cache",
            "baton-kv-events",
            "baton-kv-index",
            "baton-random",
            "baton-request",
            "baton-tier-policy",
            "baton-traces",
        ],
        tests_use: &[],
        never: &[
            "baton-router",
            "baton-worker",
            "baton-engine",
            "baton-proto",
            "tonic",
            "hyper",
            "axum",
            "cudarc",
        ],
    },
    // Also measures a worker without a router, and transfers alone.
    Room {
        name: "baton-bench",
        uses: &[
            "baton-command",
            "baton-cost",
            "baton-handoff",
            "baton-transport-nccl",
            "baton-transport-rdma",
            "baton-transport-shm",
            "baton-transport-tcp",
            "baton-transfer",
            "baton-cluster",
            "baton-kv-cache",
            "baton-random",
            "baton-tls",
            "baton-traces",
            "baton-proto",
        ],
        tests_use: &[],
        never: &["baton-router"],
    },
    // What a simulator and a load generator replay.
    Room { name: "baton-traces", uses: &[], tests_use: &[], never: &["tokio"] },
    // Shared by several commands; it knows no command.
    Room {
        name: "baton-command",
        uses: &["baton-worker", "baton-model", "baton-kv-cache", "baton-tls"],
        tests_use: &[],
        never: &["baton-router"],
    },
    // HTTP and gRPC around the core.
    Room {
        name: "baton-router",
        uses: &[
            "baton-router-core",
            "baton-router-port",
            "baton-keys",
            "baton-request-fields",
            "baton-planner",
            "baton-cluster",
            "baton-tokenizer",
            "baton-telemetry",
            "baton-tools",
            "baton-proto",
            "baton-request",
        ],
        tests_use: &["baton-kv-cache"],
        never: ROUTER_NEVER,
    },
    // Connections. It does not know what is served over them.
    Room { name: "baton-router-port", uses: &["baton-tls"], tests_use: &[], never: ROUTER_NEVER },
    // Tokenises and plans. It loads no weights: it runs on machines without accelerators.
    Room {
        name: "baton-router-core",
        uses: &[
            "baton-keys",
            "baton-request-fields",
            "baton-router-workers",
            "baton-planner",
            "baton-journal",
            "baton-kv-index",
            "baton-cluster",
            "baton-kv-cache",
            "baton-tokenizer",
            "baton-gguf",
            "baton-grammar",
            "baton-telemetry",
            "baton-tls",
            "baton-tools",
            "baton-proto",
            "baton-request",
        ],
        tests_use: &[],
        never: ROUTER_NEVER,
    },
    // What a router knows of workers. It does not know what a request asks for.
    Room {
        name: "baton-router-workers",
        uses: &[
            "baton-planner",
            "baton-kv-index",
            "baton-cost",
            "baton-cluster",
            "baton-kv-cache",
            "baton-proto",
            "baton-request",
        ],
        tests_use: &[],
        never: ROUTER_NEVER,
    },
    // What survives the router, as bytes in files.
    Room {
        name: "baton-journal",
        uses: &[],
        tests_use: &[],
        never: &["baton-router", "baton-proto", "tonic", "hyper", "axum"],
    },
    // Pure decisions. A simulator can use it alone.
    Room {
        name: "baton-planner",
        uses: &["baton-cost", "baton-cluster-record", "baton-kv-events", "baton-random", "baton-request"],
        tests_use: &["baton-kv-cache", "baton-kv-index"],
        never: PURE,
    },
    // What workers' caches hold, by their events. It knows no worker.
    Room {
        name: "baton-kv-index",
        uses: &["baton-kv-events", "baton-random"],
        tests_use: &["baton-kv-cache"],
        never: PURE,
    },
    Room {
        name: "baton-prefill-worker",
        uses: ROLE,
        tests_use: &["baton-model", "baton-decode-worker"],
        never: &["baton-router"],
    },
    Room {
        name: "baton-decode-worker",
        uses: ROLE,
        tests_use: &["baton-model", "baton-prefill-worker", "baton-engine-testing", "baton-grammar"],
        never: &["baton-router"],
    },
    Room {
        name: "baton-worker",
        uses: &[
            "baton-engine",
            "baton-grammar",
            "baton-tokenizer",
            "baton-model",
            "baton-model-sim",
            "baton-transport-tcp",
            "baton-transport-shm",
            "baton-transport-rdma",
            "baton-transport-nccl",
            "baton-transfer",
            "baton-handoff",
            "baton-kv-cache",
            "baton-kv-store",
            "baton-cluster",
            "baton-cost",
            "baton-telemetry",
            "baton-tls",
            "baton-proto",
            "baton-request",
            "baton-worker-messages",
            "baton-worker-metrics",
            "baton-worker-tiers",
        ],
        tests_use: &["baton-engine-testing", "baton-kv-events"],
        never: &["baton-router"],
    },
    // What the protocol says, in the engine's words; no stream, no memory.
    Room {
        name: "baton-worker-messages",
        uses: &[
            "baton-engine",
            "baton-grammar",
            "baton-handoff",
            "baton-kv-cache",
            "baton-proto",
            "baton-request",
            "baton-worker-metrics",
        ],
        tests_use: &[],
        never: &["baton-transfer", "baton-cluster"],
    },
    // Measures; knows no protocol and no transport.
    Room {
        name: "baton-worker-metrics",
        uses: &["baton-engine", "baton-telemetry", "baton-request"],
        tests_use: &[],
        never: &["baton-proto", "baton-handoff", "baton-transfer"],
    },
    // Between an engine and the stores; knows no protocol and no transport.
    Room {
        name: "baton-worker-tiers",
        uses: &[
            "baton-engine",
            "baton-kv-store",
            "baton-kv-cache",
            "baton-kv-events",
            "baton-cost",
            "baton-request",
            "baton-tier-policy",
        ],
        tests_use: &["baton-engine-testing"],
        never: &["baton-proto", "baton-handoff", "baton-transfer"],
    },
    // A fake model for tests.
    Room {
        name: "baton-engine-testing",
        uses: &["baton-engine", "baton-model-spec", "baton-kv-cache"],
        tests_use: &[],
        never: &["baton-proto", "baton-transfer", "baton-cluster"],
    },
    // Knows no network and no protocol.
    Room {
        name: "baton-engine",
        uses: &[
            "baton-model-spec",
            "baton-kv-cache",
            "baton-kv-events",
            "baton-cost",
            "baton-drafting",
            "baton-grammar",
            "baton-request",
            "baton-sampler",
            "baton-scheduler",
        ],
        tests_use: &["baton-engine-testing", "baton-model", "baton-cuda-emulator"],
        never: &[
            "baton-model",
            "baton-checkpoint",
            "baton-proto",
            "baton-handoff",
            "baton-transfer",
            "baton-cluster",
            "tonic",
            "prost",
            "hyper",
            "axum",
            "h2",
        ],
    },
    // Decisions over sequences and blocks. It hashes blocks and nothing else of `kv-cache`.
    Room {
        name: "baton-scheduler",
        uses: &["baton-kv-cache", "baton-kv-events", "baton-cost", "baton-request"],
        tests_use: &[],
        never: &["baton-model-spec", "baton-sampler", "tokio", "tonic", "prost", "hyper", "axum", "h2"],
    },
    // Arithmetic over one sequence: it knows no batch.
    Room { name: "baton-drafting", uses: &[], tests_use: &[], never: &["baton-model-spec", "tokio"] },
    // A function of a row of logits and parameters: it knows no batch.
    Room {
        name: "baton-sampler",
        uses: &["baton-model-spec", "baton-grammar", "baton-random", "baton-request"],
        tests_use: &[],
        never: &["baton-model", "baton-proto", "tokio"],
    },
    // Loads a model onto a backend. The only crate that knows both backends.
    Room {
        name: "baton-model",
        uses: &[
            "baton-model-cuda",
            "baton-cuda-kernels",
            "baton-model-cpu",
            "baton-cpu-kernels",
            "baton-cpu-threads",
            "baton-checkpoint",
            "baton-model-spec",
            "baton-kv-cache",
            "baton-cuda",
        ],
        tests_use: &["baton-gguf", "baton-model-testing", "baton-tokenizer"],
        never: &["baton-cuda-emulator", "baton-proto", "tonic", "prost", "hyper", "axum", "h2", "tokio"],
    },
    // Takes the time of a model and computes nothing: the backend of workers that are only simulated.
    Room {
        name: "baton-model-sim",
        uses: &["baton-model-spec", "baton-cost", "baton-kv-cache", "baton-random"],
        tests_use: &[],
        never: &["baton-checkpoint", "baton-cuda", "cudarc", "tokio"],
    },
    // Emulates devices for tests of kernels and models. No production code uses it.
    Room {
        name: "baton-cuda-emulator",
        uses: &[
            "baton-model-cuda",
            "baton-cuda-kernels",
            "baton-checkpoint",
            "baton-model-spec",
            "baton-kv-cache",
            "baton-cuda",
        ],
        tests_use: &["baton-model-testing"],
        never: &["tokio"],
    },
    // The forward pass on devices, without panels and without the source of kernels.
    Room {
        name: "baton-model-cuda",
        uses: &["baton-cuda-kernels", "baton-checkpoint", "baton-model-spec", "baton-kv-cache", "baton-cuda"],
        tests_use: &["baton-cuda-emulator", "baton-model-cpu", "baton-model-testing"],
        never: &["baton-cuda-emulator", "baton-cpu-attention", "baton-cpu-kernels", "tokio"],
    },
    // Knows shapes and addresses, no models.
    Room {
        name: "baton-cuda-kernels",
        uses: &["baton-model-spec", "baton-kv-cache", "baton-cuda"],
        tests_use: &["baton-cuda-emulator", "baton-model-testing"],
        never: &["baton-cuda-emulator", "baton-checkpoint", "safetensors", "tokio"],
    },
    // The forward pass on processors, which never see a device.
    Room {
        name: "baton-model-cpu",
        uses: &[
            "baton-cpu-attention",
            "baton-cpu-kernels",
            "baton-cpu-threads",
            "baton-checkpoint",
            "baton-model-spec",
            "baton-kv-cache",
        ],
        tests_use: &[],
        never: &["baton-cuda", "cudarc", "tokio"],
    },
    // Attention over KV in its blocks: no weights.
    Room {
        name: "baton-cpu-attention",
        uses: &[
            "baton-cpu-kernels",
            "baton-cpu-simd",
            "baton-cpu-threads",
            "baton-model-spec",
            "baton-kv-cache",
        ],
        tests_use: &["baton-model-testing"],
        never: &["baton-checkpoint", "baton-cuda", "safetensors", "cudarc", "tokio"],
    },
    // Kernels: no weight files, no order of operations, no KV. Its own tests use some of its internals.
    Room {
        name: "baton-cpu-kernels",
        uses: &["baton-cpu-simd", "baton-cpu-threads", "baton-model-spec"],
        tests_use: &["baton-cpu-kernels", "baton-model-testing"],
        never: &["baton-checkpoint", "baton-cuda", "safetensors", "cudarc", "tokio"],
    },
    // Vectors, tiles, and the numbers that they widen: no tensors.
    Room {
        name: "baton-cpu-simd",
        uses: &["baton-cpu-threads", "baton-kv-cache"],
        tests_use: &[],
        never: &["baton-model-spec", "tokio"],
    },
    // Threads and the memory that they share, whatever they compute.
    Room { name: "baton-cpu-threads", uses: &[], tests_use: &[], never: &["tokio"] },
    // Files to matrices. It does not know how a backend stores them.
    Room {
        name: "baton-checkpoint",
        uses: &["baton-model-spec", "baton-kv-cache", "baton-gguf"],
        tests_use: &[],
        never: &["baton-cuda", "cudarc", "tokio"],
    },
    // The description of a model, and the seams of its backends: no weights, no devices.
    Room {
        name: "baton-model-spec",
        uses: &["baton-kv-cache", "baton-random"],
        tests_use: &["baton-model-testing"],
        never: &["baton-gguf", "baton-cuda", "safetensors", "memmap2", "cudarc", "tokio"],
    },
    // Numbers for tests: no production code uses it.
    Room { name: "baton-model-testing", uses: &[], tests_use: &[], never: &["tokio"] },
    // How KV travels. A transport knows no other one.
    Room {
        name: "baton-transport-tcp",
        uses: &["baton-transfer", "baton-handoff", "baton-kv-cache", "baton-tls"],
        tests_use: &["baton-transfer-conformance"],
        never: NO_ENGINE,
    },
    Room {
        name: "baton-transport-shm",
        uses: &["baton-transfer", "baton-handoff", "baton-kv-cache"],
        tests_use: &["baton-transfer-conformance"],
        never: NO_ENGINE,
    },
    Room {
        name: "baton-transport-rdma",
        uses: &["baton-transfer", "baton-handoff", "baton-kv-cache"],
        tests_use: &["baton-transfer-conformance"],
        never: NO_ENGINE,
    },
    Room {
        name: "baton-transport-nccl",
        uses: &["baton-transfer", "baton-handoff", "baton-kv-cache", "baton-cuda"],
        tests_use: &["baton-transfer-conformance"],
        never: NO_ENGINE,
    },
    // The conformance suite of transports. Only tests use it.
    Room {
        name: "baton-transfer-conformance",
        uses: &["baton-transfer", "baton-handoff", "baton-kv-cache", "baton-tls"],
        tests_use: &[],
        never: NO_ENGINE,
    },
    // Moves blocks. It knows neither their owners nor the transports.
    Room {
        name: "baton-transfer",
        uses: &["baton-handoff", "baton-kv-cache", "baton-cuda", "baton-tls"],
        tests_use: &["baton-transfer-conformance", "baton-transport-shm", "baton-transport-tcp"],
        never: NO_ENGINE,
    },
    // The protocol of a handoff: messages in, messages and actions out. Its caller acts.
    Room {
        name: "baton-handoff",
        uses: &["baton-kv-layout", "baton-request"],
        tests_use: &[],
        never: &[
            "baton-engine",
            "baton-model",
            "baton-transfer",
            "baton-proto",
            "baton-tls",
            "baton-cuda",
            "tokio",
            "tracing",
            "tonic",
            "prost",
            "hyper",
        ],
    },
    Room {
        name: "baton-cluster",
        uses: &["baton-cluster-record", "baton-kv-cache", "baton-proto", "baton-tls"],
        tests_use: &[],
        never: &["baton-engine", "baton-model", "baton-handoff", "baton-transfer"],
    },
    Room {
        name: "baton-proto",
        uses: &["baton-cluster-record", "baton-kv-events", "baton-kv-layout", "baton-request"],
        tests_use: &[],
        never: &[],
    },
    // The record of a worker, without the protocols that carry it, and what workers agree on without a third party.
    Room {
        name: "baton-cluster-record",
        uses: &["baton-kv-layout", "baton-random"],
        tests_use: &[],
        never: PURE,
    },
    // Tiers below a pool: they never know who fills it.
    Room {
        name: "baton-kv-store",
        uses: &["baton-cost", "baton-kv-cache", "baton-kv-events", "baton-tier-policy", "baton-tls"],
        tests_use: &["baton-random"],
        // HTTP only through object_store.
        never: &["baton-engine", "baton-model", "baton-proto", "tonic", "prost", "axum"],
    },
    // What decides of tiers, carried out by the store.
    Room {
        name: "baton-tier-policy",
        uses: &["baton-cost", "baton-kv-cache", "baton-kv-events"],
        tests_use: &["baton-random"],
        never: &["tokio", "tonic", "prost", "hyper", "axum", "h2"],
    },
    Room {
        name: "baton-kv-cache",
        uses: &["baton-kv-layout"],
        tests_use: &[],
        never: &["tokio", "tonic", "prost", "hyper"],
    },
    // What a prefix cache stores and evicts: told by engines, read by routers.
    Room { name: "baton-kv-events", uses: &[], tests_use: &[], never: PURE },
    // The layout of KV, without its memory.
    Room { name: "baton-kv-layout", uses: &[], tests_use: &[], never: PURE },
    Room {
        name: "baton-tokenizer",
        uses: &["baton-gguf"],
        tests_use: &[],
        never: &["tokio", "tonic", "prost", "hyper"],
    },
    // Grammars and vocabularies as plain data: no requests, no sampling.
    Room {
        name: "baton-grammar",
        uses: &["baton-request"],
        tests_use: &["baton-tokenizer"],
        never: &["tokio", "tonic", "prost", "hyper", "axum", "h2", "tokenizers"],
    },
    // Its own tests use its writer.
    Room { name: "baton-gguf", uses: &[], tests_use: &["baton-gguf"], never: &["tokio", "serde"] },
    Room { name: "baton-telemetry", uses: &["baton-tls"], tests_use: &["baton-tls"], never: &[] },
    // Knows identities of peers, not their messages.
    Room { name: "baton-tls", uses: &[], tests_use: &[], never: &["tonic", "prost", "hyper", "axum", "h2"] },
    // Knows devices and memory, not their use.
    Room { name: "baton-cuda", uses: &[], tests_use: &[], never: &["tokio"] },
    // How long work takes: measured by workers, predicted by the planner, lived by a simulator.
    Room { name: "baton-cost", uses: &[], tests_use: &[], never: PURE },
    // Who may call, and how much: no HTTP, no requests.
    Room {
        name: "baton-keys",
        uses: &[],
        tests_use: &[],
        never: &["tokio", "tonic", "prost", "hyper", "axum", "h2"],
    },
    // A table of names; a library finds similar ones.
    Room { name: "baton-request-fields", uses: &[], tests_use: &[], never: &["tokio", "axum", "tonic"] },
    // Text of answers and fields of requests.
    Room { name: "baton-tools", uses: &["baton-request"], tests_use: &["baton-grammar"], never: PURE },
    // Chance by seed.
    Room { name: "baton-random", uses: &[], tests_use: &[], never: PURE },
    // The definition of a request, shared by all processes.
    Room { name: "baton-request", uses: &[], tests_use: &[], never: PURE },
    Room { name: "xtask", uses: &[], tests_use: &[], never: &["tokio", "tonic"] },
];

/// A crate that moves KV knows neither the engine nor the protocol between workers.
const NO_ENGINE: &[&str] =
    &["baton-engine", "baton-model", "baton-proto", "tonic", "prost", "hyper", "axum", "h2"];

/// The dependencies of both roles are the same.
const ROUTER_NEVER: &[&str] = &[
    "baton-model",
    "baton-engine",
    "baton-handoff",
    "baton-transfer",
    "baton-worker",
    "safetensors",
    "cudarc",
];

const ROLE: &[&str] = &[
    "baton-worker",
    "baton-worker-messages",
    "baton-engine",
    "baton-handoff",
    "baton-transfer",
    "baton-cluster",
    "baton-kv-cache",
    "baton-telemetry",
    "baton-tls",
    "baton-proto",
    "baton-request",
];

/// Packages that rooms of plain data or pure decisions must not reach: runtimes, the operating system, protocols.
const PURE: &[&str] = &["tokio", "libc", "tonic", "prost", "hyper", "axum", "h2"];

/// Packages that only these rooms may use.
const BEHIND: &[(&str, &[&str])] = &[
    ("etcd-client", &["baton-cluster"]),
    ("tokenizers", &["baton-tokenizer"]),
    ("llguidance", &["baton-grammar"]),
    ("toktrie", &["baton-grammar"]),
    ("minijinja", &["baton-tokenizer"]),
    ("safetensors", &["baton-checkpoint"]),
    ("cudarc", &["baton-cuda", "baton-cuda-kernels", "baton-transfer", "baton-transport-nccl"]),
    ("opentelemetry-otlp", &["baton-telemetry"]),
    ("procfs", &["baton-telemetry"]),
    ("rustls", &["baton-tls"]),
    ("tokio-rustls", &["baton-tls"]),
    ("clap", &["baton-cli", "baton-bench", "baton-command", "baton-simulator", "xtask"]),
];

pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<Outcome> {
    let members = workspace.members();
    let mut findings = misordered(ROOMS);
    for member in &members {
        match ROOMS.iter().find(|room| room.name == member.name()) {
            Some(room) => findings.extend(forbidden_edges(workspace, room, *member)),
            None => findings.push(format!("{} has no entry in xtask/src/edges.rs", member.name())),
        }
    }
    let num_edges: usize = members.iter().map(|member| our_dependencies(*member).count()).sum();
    Ok(Outcome::of(findings, format!("{} crates, {num_edges} edges between them", members.len())))
}

/// Uses of rooms that do not stand below the user, and rooms that use what they forbid.
fn misordered(rooms: &[Room]) -> Vec<String> {
    let mut findings = Vec::new();
    for (above, room) in rooms.iter().enumerate() {
        for used in room.uses {
            if !rooms[above + 1..].iter().any(|below| below.name == *used) {
                findings.push(format!("{} -> {used} points up", room.name));
            }
            if room.never.contains(used) {
                findings.push(format!("{} both uses and forbids {used}", room.name));
            }
        }
    }
    findings
}

fn forbidden_edges(workspace: &Workspace, room: &Room, member: Package<'_>) -> Vec<String> {
    let mut findings = BTreeSet::new();
    for (name, for_tests) in our_dependencies(member) {
        let allowed = room.uses.contains(&name) || (for_tests && room.tests_use.contains(&name));
        if !allowed {
            let tests = if for_tests { " (in its tests)" } else { "" };
            findings.insert(format!("{} must not use {name}{tests}; see xtask/src/edges.rs", room.name));
        }
    }
    for (name, _) in member.dependencies().filter(|(_, for_tests)| !for_tests) {
        if let Some((_, owners)) = BEHIND.iter().find(|(package, _)| *package == name)
            && !owners.contains(&room.name)
        {
            findings.insert(format!(
                "{} must not use {name}: that is behind {}",
                room.name,
                owners.join(", ")
            ));
        }
    }
    for never in room.never {
        if let Some(path) = way_to(workspace, member.id(), never) {
            findings.insert(format!("{} must not reach {never}, but does: {path}", room.name));
        }
    }
    findings.into_iter().collect()
}

/// Direct dependencies that are members of the workspace.
fn our_dependencies<'a>(member: Package<'a>) -> impl Iterator<Item = (&'a str, bool)> {
    member.dependencies().filter(|(name, _)| name.starts_with("baton-"))
}

/// The shortest way from a package to one of this name, as "a -> b -> c".
pub(crate) fn way_to(workspace: &Workspace, from: &str, target: &str) -> Option<String> {
    let names: BTreeMap<&str, &str> = workspace.packages().map(|p| (p.id(), p.name())).collect();
    let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
    let mut queue = VecDeque::from([from]);
    while let Some(id) = queue.pop_front() {
        if names.get(id) == Some(&target) {
            let mut way = vec![target];
            let mut at = id;
            while let Some(before) = came_from.get(at) {
                at = before;
                way.push(names[at]);
            }
            way.reverse();
            return Some(way.join(" -> "));
        }
        for next in workspace.build_dependencies(id) {
            if next != from && !came_from.contains_key(next) {
                came_from.insert(next, id);
                queue.push_back(next);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_point_down() {
        assert_eq!(misordered(ROOMS), Vec::<String>::new());
    }

    #[test]
    fn misplaced_rooms_are_found() {
        let room = |name, uses, never| Room { name, uses, tests_use: &[], never };
        let rooms =
            [room("low", &[], &[]), room("high", &["low", "base"], &["base"]), room("base", &[], &[])];
        assert_eq!(misordered(&rooms), ["high -> low points up", "high both uses and forbids base"]);
    }
}
