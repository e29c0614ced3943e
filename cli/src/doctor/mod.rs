//! `baton doctor`: what this host offers; how KV can travel between the workers of a cluster, how fast each way is, which
//! one is taken and what limits it.
//!
//! The prefill worker measures, over a few blocks that the decode worker lends it; see `Probe` and `Lend` in
//! `proto/baton/worker/v1/worker.proto`. Neither does when it is busy.

mod host;

use std::{fmt, path::PathBuf, time::Duration};

use anyhow::{Context, anyhow, bail};
use baton_cluster::{Dialer, DiscoveryConfig};
use baton_command::{ApiKeyArgs, TlsArgs, print};
use baton_proto::{
    v1::{KvTier, LoadsRequest, inference_client::InferenceClient},
    worker::{
        InfoRequest, ProbeReport, ProbeRequest, ProbedTransport, Role, WatchLoadRequest, WorkerRecord,
        prefill_client::PrefillClient, worker_client::WorkerClient,
    },
};
use baton_transport_nccl::NcclFindings;
use clap::Args;
use serde::Serialize;
use tonic::{
    Code, Status,
    metadata::{Ascii, MetadataValue},
    transport::Channel,
};

use self::host::{Finding as HostFinding, Host};
use crate::discovery::DiscoveryArgs;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A measurement ends by itself before this.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// Ports of the router, and of workers by the examples: calls, KV, rdma.
const PORTS: [u16; 4] = [8080, 8090, 8091, 8092];

const EXAMPLES: &str = "\
Of this host: GPUs and their driver, libraries, RDMA devices, the limit on
locked memory, /dev/shm, the clock, ports, the files of --model, and etcd with
--discovery etcd. What is not well says how to mend it. --host stops there, and
fails when something is broken.

Printed for each pair of prefill and decode worker, and each transport:
  GB/s       of transfers of so many MiB, into blocks that the decode worker
             reserves for a moment; busy workers reject the measurement
  us         until one piece, a layer of a block, has arrived
  <- taken   the transport that a handoff between the two uses now
  x a copy   speed of shm, relative to a copy in the prefill worker's memory
  x a plain  speed of the others, relative to a plain TCP stream on loopback
and why a transport is not available, and whether handoffs fell back to it.
Of workers with --host-kv, --disk-kv or --object-kv: what these tiers hold and have done.

Fails when KV cannot travel between two workers.";

/// Smaller transfers measure wake-ups and caches only.
const MIN_TELLING_BYTES: u64 = 8 << 20;

/// The arguments of `baton doctor`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Router whose workers are examined: each prefill worker with each decode worker.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080", env = "BATON_ROUTER")]
    router: String,
    #[command(flatten)]
    api_key: ApiKeyArgs,
    /// Prefill workers to examine, instead of those of the router.
    #[arg(long, value_name = "URL", requires = "decode")]
    prefill: Vec<String>,
    /// Decode workers to examine, instead of those of the router.
    #[arg(long, value_name = "URL", requires = "prefill")]
    decode: Vec<String>,
    /// Look at this host alone; neither a router nor workers are needed.
    #[arg(long, conflicts_with_all = ["prefill", "decode"])]
    host: bool,
    /// Model whose files are looked at: a directory of Hugging Face, or a .gguf file.
    #[arg(long, value_name = "DIR|FILE", env = "BATON_MODEL")]
    model: Option<PathBuf>,
    /// Ports that must be free on this host.
    #[arg(long, value_name = "PORTS", value_delimiter = ',', default_values_t = PORTS)]
    ports: Vec<u16>,
    /// NIXL's library to look for on this host: libnixl_capi.so or its folder.
    #[arg(long, value_name = "PATH", env = "BATON_NIXL")]
    nixl: Option<PathBuf>,
    #[command(flatten)]
    discovery: DiscoveryArgs,
    /// NCCL's library to look for on this host: libnccl.so.2 or its folder.
    #[arg(long, value_name = "PATH", env = "BATON_NCCL")]
    nccl: Option<PathBuf>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Write the report as JSON to a file, or with - to standard output instead of the text.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The report.
#[derive(Debug, Default, Serialize)]
struct Report {
    /// What this host offers.
    host: Vec<HostFinding>,
    /// The state of NCCL on this host.
    nccl: String,
    /// Workers that did not report their load, each with the reason.
    silent: Vec<String>,
    /// Of workers with any.
    tiers: Vec<TiersOf>,
    pairs: Vec<Pair>,
}

/// The tiers of KV below the pool of a worker.
#[derive(Debug, Serialize)]
struct TiersOf {
    worker: String,
    tiers: Vec<Tier>,
}

/// What a tier holds, in blocks, and what it has done since the worker started.
#[derive(Debug, Default, Serialize)]
struct Tier {
    name: String,
    held: u64,
    capacity: u64,
    block_bytes: u64,
    hits: u64,
    writes: u64,
    evictions: u64,
    dropped: u64,
    damaged: u64,
    declined: u64,
    errors: u64,
    /// 0: not known.
    recall_token_seconds: f64,
}

/// A prefill worker and a decode worker.
#[derive(Debug, Serialize)]
struct Pair {
    prefill: String,
    decode: String,
    #[serde(flatten)]
    finding: Finding,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Finding {
    Measured(Measured),
    /// Why nothing could be measured.
    Failed(String),
}

#[derive(Debug, Serialize)]
struct Measured {
    /// Empty: no handoff is possible.
    chosen: String,
    /// Bytes of one transfer.
    bytes: u64,
    /// The conversion of blocks on their way; `None` if there is none.
    conversion: Option<String>,
    copy_gb_per_s: f64,
    stream_gb_per_s: f64,
    transports: Vec<Way>,
}

#[derive(Debug, Serialize)]
struct Way {
    name: String,
    /// Why it cannot be used, if so.
    unavailable: Option<String>,
    gb_per_s: f64,
    latency_us: f64,
    num_routes: u64,
    num_fallbacks: u64,
}

/// Examines, and prints the report. Fails when there is a pair between which KV cannot travel.
pub(crate) async fn run(args: DoctorArgs) -> anyhow::Result<()> {
    let mut report = Report { host: look_at_host(&args).await?, ..Report::default() };
    // Loading a library can block.
    let library = args.nccl.clone();
    let nccl = tokio::task::spawn_blocking(move || NcclFindings::look(library.as_deref())).await?;
    report.nccl = nccl.to_string();
    if args.host {
        print(&report, args.json.as_deref())?;
        let num_broken = report.host.iter().filter(|finding| finding.is_broken()).count();
        return if num_broken == 0 { Ok(()) } else { bail!("{num_broken} findings on this host are BROKEN") };
    }
    let dialer = Dialer::new(args.tls.load()?);
    let (prefill, decode) = match args.prefill.is_empty() {
        true => workers_of(&dialer, &args.router, args.api_key.key()).await?,
        false => (args.prefill, args.decode),
    };
    for address in prefill.iter().chain(&decode) {
        match tiers_of(&dialer, address).await {
            Ok(of_worker) if of_worker.tiers.is_empty() => {}
            Ok(of_worker) => report.tiers.push(of_worker),
            Err(error) => report.silent.push(format!("{address}: {error:#}")),
        }
    }
    for prefill in &prefill {
        for decode in &decode {
            report.pairs.push(examine(&dialer, prefill, decode).await);
        }
    }
    print(&report, args.json.as_deref())?;
    match (prefill.len(), decode.len()) {
        (0, 0) => bail!("no worker is registered at {}; --host looks at this host alone", args.router),
        (num, 0) => bail!("{num} prefill workers and no decode worker: nothing can be served"),
        (0, num) => eprintln!(
            "No prefill worker: KV does not travel. The prompts of {num} decode workers are their own."
        ),
        _ => {}
    }
    let is_well =
        |pair: &Pair| matches!(&pair.finding, Finding::Measured(measured) if !measured.chosen.is_empty());
    let num_ill = report.pairs.iter().filter(|pair| !is_well(pair)).count();
    if num_ill > 0 {
        bail!(
            "{num_ill} of {} pairs of workers cannot be measured or cannot hand KV over",
            report.pairs.len()
        );
    }
    Ok(())
}

/// What this host offers, and whether it reaches etcd, if etcd is how the parts find each other.
async fn look_at_host(args: &DoctorArgs) -> anyhow::Result<Vec<HostFinding>> {
    let named = ["BATON_CUBLASLT", "BATON_NVRTC"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let host = Host {
        root: "/".into(),
        library_path: std::env::var_os("LD_LIBRARY_PATH"),
        libraries: named.chain(args.nccl.clone()).chain(args.nixl.clone()).collect(),
        clock: host::kernel_clock(),
        ports: args.ports.clone(),
        model: args.model.clone(),
    };
    let mut findings = tokio::task::spawn_blocking(move || host::examine(&host)).await?;
    if let DiscoveryConfig::Etcd(config) = args.discovery.config(args.router.clone(), None, Vec::new())? {
        let endpoints = config.endpoints.join(", ");
        findings.push(match baton_cluster::reach_etcd(&config).await {
            Ok(version) => HostFinding::ok("etcd", format!("{version} at {endpoints}, with a leader")),
            Err(error) => HostFinding::broken(
                "etcd",
                format!("{endpoints}: {error}"),
                "start etcd, open its port 2379 to this host, or correct --etcd-endpoints (BATON_ETCD_ENDPOINTS), --etcd-ca \
                 (BATON_ETCD_CA) or --etcd-user (BATON_ETCD_USER)",
            ),
        });
    }
    Ok(findings)
}

/// Addresses of prefill and decode workers.
async fn workers_of(
    dialer: &Dialer,
    router: &str,
    key: Option<String>,
) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    // A router also accepts clients without TLS.
    let plain = Dialer::default();
    let dialer = if router.starts_with("https") { dialer } else { &plain };
    let channel = connect(dialer, router).await.with_context(|| {
        format!(
            "no router at {router}; start one with `baton up`, name another with --router (BATON_ROUTER), or name workers \
             with --prefill and --decode"
        )
    })?;
    let mut request = tonic::Request::new(LoadsRequest {});
    if let Some(key) = key {
        let header = format!("Bearer {key}").parse::<MetadataValue<Ascii>>();
        let header = header.context("--api-key (BATON_API_KEY, OPENAI_API_KEY) is no plain text")?;
        request.metadata_mut().insert("authorization", header);
    }
    let mut client = InferenceClient::new(channel);
    let loads = soon(client.loads(request)).await.map_err(|status| anyhow!(not_listed(router, &status)))?;
    let (prefill, decode): (Vec<_>, Vec<_>) =
        loads.into_inner().workers.into_iter().partition(|worker| worker.role == "prefill");
    let addresses =
        |workers: Vec<baton_proto::v1::WorkerLoad>| workers.into_iter().map(|worker| worker.address);
    Ok((addresses(prefill).collect(), addresses(decode).collect()))
}

/// Why a router does not list its workers, with the option to change.
fn not_listed(router: &str, status: &Status) -> String {
    let advice = match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => {
            "give the key of a client or an operator with --api-key (BATON_API_KEY)"
        }
        _ => "--router (BATON_ROUTER) names the port of its HTTP and gRPC API",
    };
    format!("{router} does not list its workers: {}; {advice}", status.message())
}

async fn examine(dialer: &Dialer, prefill: &str, decode: &str) -> Pair {
    let names = tokio::join!(name_of(dialer, prefill, Role::Prefill), name_of(dialer, decode, Role::Decode));
    let (prefill_name, decode_name) = match names {
        (Ok(prefill), Ok(decode)) => (prefill, decode),
        (Err(error), _) | (_, Err(error)) => {
            let finding = Finding::Failed(format!("{error:#}"));
            return Pair { prefill: prefill.to_owned(), decode: decode.to_owned(), finding };
        }
    };
    let finding = match probe(dialer, prefill, decode).await {
        Ok(report) => Finding::Measured(report.into()),
        Err(error) => Finding::Failed(format!("{error:#}")),
    };
    Pair { prefill: prefill_name, decode: decode_name, finding }
}

/// By the worker's next load report.
async fn tiers_of(dialer: &Dialer, address: &str) -> anyhow::Result<TiersOf> {
    let mut client = WorkerClient::new(connect(dialer, address).await?);
    let worker = soon(client.info(InfoRequest {})).await?.into_inner().id;
    let request = WatchLoadRequest { router: 0, cache_events: false, cache_from: None };
    let mut reports = soon(client.watch_load(request)).await?.into_inner();
    let report = soon(reports.message()).await?;
    let tiers = report.map(|load| load.tiers).unwrap_or_default();
    Ok(TiersOf { worker, tiers: tiers.into_iter().map(Tier::from).collect() })
}

async fn name_of(dialer: &Dialer, address: &str, expected: Role) -> anyhow::Result<String> {
    let channel = connect(dialer, address).await.with_context(|| format!("no worker at {address}"))?;
    let mut client = WorkerClient::new(channel);
    let info = soon(client.info(InfoRequest {})).await;
    let record: WorkerRecord = info.with_context(|| format!("no worker at {address}"))?.into_inner();
    if record.role() != expected {
        bail!(
            "{} at {address} is not a {role} worker, as --{role} says",
            record.id,
            role = if expected == Role::Prefill { "prefill" } else { "decode" }
        );
    }
    Ok(record.id)
}

async fn probe(dialer: &Dialer, prefill: &str, decode: &str) -> anyhow::Result<ProbeReport> {
    let mut client = PrefillClient::new(connect(dialer, prefill).await?);
    let mut request = tonic::Request::new(ProbeRequest { decode_address: decode.to_owned() });
    request.set_timeout(PROBE_TIMEOUT);
    let answer = client.probe(request).await.map_err(|status| anyhow::anyhow!("{}", status.message()))?;
    Ok(answer.into_inner())
}

/// A frozen process keeps its connections, and answers nothing.
async fn soon<T>(answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = |_| Status::deadline_exceeded(format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()));
    tokio::time::timeout(CONNECT_TIMEOUT, answer).await.map_err(late)?
}

async fn connect(dialer: &Dialer, url: &str) -> anyhow::Result<Channel> {
    let endpoint = dialer.endpoint(url)?.connect_timeout(CONNECT_TIMEOUT);
    Ok(dialer.connect(endpoint).await?)
}

impl From<ProbeReport> for Measured {
    fn from(report: ProbeReport) -> Measured {
        let way = |way: ProbedTransport| Way {
            name: way.transport,
            unavailable: Some(way.unavailable).filter(|why| !why.is_empty()),
            gb_per_s: way.bytes_per_second / 1e9,
            latency_us: way.latency_seconds * 1e6,
            num_routes: way.num_routes,
            num_fallbacks: way.num_fallbacks,
        };
        Measured {
            chosen: report.chosen,
            bytes: report.bytes,
            conversion: Some(report.conversion).filter(|words| !words.is_empty()),
            copy_gb_per_s: report.copy_bytes_per_second / 1e9,
            stream_gb_per_s: report.stream_bytes_per_second / 1e9,
            transports: report.transports.into_iter().map(way).collect(),
        }
    }
}

impl Measured {
    /// What keeps a way from being faster, as far as it can be told from here.
    fn limit(&self, way: &Way) -> String {
        let (base, what) = match way.name.as_str() {
            "shm" => (self.copy_gb_per_s, "a copy in the prefill worker's memory"),
            _ => (self.stream_gb_per_s, "a plain TCP stream on the prefill worker's host"),
        };
        let ratio = way.gb_per_s / base;
        let why = match (way.name.as_str(), ratio) {
            // Slower by wake-ups, or faster by caches.
            (_, ..0.7 | 1.5..) if self.bytes < MIN_TELLING_BYTES => {
                "transfers are too small to tell what limits it"
            }
            ("shm", 0.7..) => "limited by memory",
            ("shm", _) if self.conversion.is_some() => "limited by putting blocks of the other form together",
            ("shm", _) => "processors are busy, or pages of the pool were not touched before",
            (_, 0.7..) => "limited by sockets and processors of this host",
            _ => "limited by the network, or processors are busy on either host",
        };
        format!("{ratio:.2} x {what} ({base:.2} GB/s); {why}")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "this host")?;
        self.host.iter().try_for_each(|finding| write!(f, "{finding}"))?;
        writeln!(f, "  {:<10} {}\n", "nccl", self.nccl)?;
        self.silent.iter().try_for_each(|why| writeln!(f, "no load report from {why}\n"))?;
        for TiersOf { worker, tiers } in &self.tiers {
            writeln!(f, "{worker}, KV below the pool")?;
            tiers.iter().try_for_each(|tier| write!(f, "{tier}"))?;
            writeln!(f)?;
        }
        for pair in &self.pairs {
            let measured = match &pair.finding {
                Finding::Measured(measured) => measured,
                Finding::Failed(why) => {
                    writeln!(f, "{} -> {}\n  not measured: {why}\n", pair.prefill, pair.decode)?;
                    continue;
                }
            };
            let mib = measured.bytes as f64 / f64::from(1 << 20);
            writeln!(f, "{} -> {}, transfers of {mib:.1} MiB", pair.prefill, pair.decode)?;
            if let Some(conversion) = &measured.conversion {
                writeln!(f, "  {conversion}, which is part of what is measured")?;
            }
            for way in &measured.transports {
                if let Some(why) = &way.unavailable {
                    writeln!(f, "  {:<6} not available: {why}", way.name)?;
                } else {
                    let mark = if way.name == measured.chosen { "  <- taken" } else { "" };
                    let (gb_per_s, latency_us) = (way.gb_per_s, way.latency_us);
                    writeln!(f, "  {:<6}{gb_per_s:>7.2} GB/s{latency_us:>8.0} us a piece{mark}", way.name)?;
                    writeln!(f, "         {}", measured.limit(way))?;
                }
                if way.num_fallbacks > 0 {
                    writeln!(
                        f,
                        "         warning: {} of {} handoffs over {} were fallbacks from a better transport; the prefill \
                         worker's log says why",
                        way.num_fallbacks, way.num_routes, way.name
                    )?;
                }
            }
            match measured.chosen.as_str() {
                "" => writeln!(
                    f,
                    "  no transport can be used: prompts for this pair are computed by the decode worker\n"
                )?,
                chosen => writeln!(f, "  {}\n", measured.why(chosen))?,
            }
        }
        Ok(())
    }
}

impl From<KvTier> for Tier {
    fn from(tier: KvTier) -> Tier {
        Tier {
            name: tier.name,
            held: tier.num_held,
            capacity: tier.num_slots,
            block_bytes: tier.record_bytes,
            hits: tier.num_hits,
            writes: tier.num_writes,
            evictions: tier.num_evicted,
            dropped: tier.num_dropped,
            damaged: tier.num_damaged,
            declined: tier.num_declined,
            errors: tier.num_errors,
            recall_token_seconds: tier.recall_token_seconds,
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |num_blocks: u64| (num_blocks * self.block_bytes) as f64 / f64::from(1 << 30);
        let Tier { name, held, hits, writes, evictions, .. } = self;
        let (size, room) = (gib(*held), gib(self.capacity));
        writeln!(f, "  {name:<6} {size:.2} of {room:.2} GiB, {held} blocks")?;
        let pace = match self.recall_token_seconds {
            seconds if seconds > 0.0 => format!(", in {:.1} us per token lately", 1e6 * seconds),
            _ => String::new(),
        };
        writeln!(
            f,
            "         {hits} blocks were read{pace}, {writes} written, {evictions} made room for others"
        )?;
        let troubles = [
            (self.dropped, "blocks were not saved, because the tier is too slow"),
            (self.damaged, "blocks were damaged, or are sealed by another key; they are computed again"),
            (self.declined, "blocks were not read, because computing them is faster"),
            (self.errors, "reads or writes failed; the worker's log says why"),
        ];
        let mut troubles = troubles.iter().filter(|(num, _)| *num > 0);
        troubles.try_for_each(|(num, what)| writeln!(f, "         warning: {num} {what}"))
    }
}

impl Measured {
    fn why(&self, chosen: &str) -> String {
        let usable = self.transports.iter().filter(|way| way.unavailable.is_none());
        let others: Vec<_> = usable.filter(|way| way.name != chosen).map(|way| way.name.as_str()).collect();
        let is_first = self
            .transports
            .iter()
            .find(|way| way.unavailable.is_none())
            .is_some_and(|way| way.name == chosen);
        match (others.is_empty(), is_first) {
            (true, _) => format!("{chosen} is the only one"),
            (_, true) => {
                format!("{chosen} is preferred to {}, unless found to be much slower", others.join(" and "))
            }
            (_, false) => format!("{chosen} was found much faster than {}", others.join(" and ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(chosen: &str, shm: f64, tcp: f64) -> Measured {
        let way = |name: &str, gb_per_s: f64, unavailable: Option<&str>| Way {
            name: name.to_owned(),
            unavailable: unavailable.map(str::to_owned),
            gb_per_s,
            latency_us: 12.0,
            num_routes: 9,
            num_fallbacks: u64::from(name == "tcp") * 3,
        };
        let no_rdma = way("rdma", 0.0, Some("the decode worker does not offer it; see its --transports"));
        Measured {
            chosen: chosen.to_owned(),
            bytes: 16 << 20,
            conversion: None,
            copy_gb_per_s: 10.0,
            stream_gb_per_s: 2.0,
            transports: vec![no_rdma, way("shm", shm, None), way("tcp", tcp, None)],
        }
    }

    fn text(finding: Finding) -> String {
        let pairs = vec![Pair { prefill: "p-0".into(), decode: "d-0".into(), finding }];
        Report { nccl: "no device".into(), pairs, ..Report::default() }.to_string()
    }

    #[test]
    fn a_pair_says_what_is_taken_why_and_what_limits_it() {
        let text = text(Finding::Measured(measured("shm", 15.0, 1.0)));
        for expected in [
            "this host\n  nccl       no device\n",
            "p-0 -> d-0, transfers of 16.0 MiB",
            "rdma   not available: the decode worker does not offer it",
            "15.00 GB/s      12 us a piece  <- taken",
            "1.50 x a copy in the prefill worker's memory (10.00 GB/s); limited by memory",
            "0.50 x a plain TCP stream",
            "limited by the network, or",
            "3 of 9 handoffs over tcp were fallbacks",
            "shm is preferred to tcp, unless found to be much slower",
        ] {
            assert!(text.contains(expected), "no {expected:?} in\n{text}");
        }
    }

    #[test]
    fn tiers_say_what_they_hold_and_what_went_wrong() {
        let disk = Tier {
            name: "disk".into(),
            held: 1024,
            capacity: 4096,
            block_bytes: 1 << 19,
            hits: 7,
            damaged: 2,
            recall_token_seconds: 1.25e-5,
            ..Tier::default()
        };
        let tiers = vec![TiersOf { worker: "d-0".into(), tiers: vec![disk] }];
        let text = Report { tiers, ..Report::default() }.to_string();
        for expected in [
            "d-0, KV below the pool\n  disk   0.50 of 2.00 GiB, 1024 blocks\n         7 blocks were read, in 12.5 us per token lately, 0",
            "warning: 2 blocks were damaged",
        ] {
            assert!(text.contains(expected), "no {expected:?} in\n{text}");
        }
        assert!(!text.contains("too slow"), "{text}");
    }

    #[test]
    fn a_router_that_does_not_list_its_workers_is_told_with_the_option_to_change() {
        for (status, expected) in [
            (Status::unauthenticated("this server needs an API key"), "API key; give the key of a client"),
            (Status::permission_denied("this API key is for workers"), "--api-key (BATON_API_KEY)"),
            (Status::unimplemented("no such method"), "--router (BATON_ROUTER)"),
        ] {
            let text = not_listed("http://r:1", &status);
            assert!(text.starts_with("http://r:1 does not") && text.contains(expected), "{text}");
        }
    }

    /// The kernel accepts its connections, as it does for a frozen process.
    #[tokio::test]
    async fn a_frozen_peer_is_told_of_after_a_while() {
        let frozen = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (url, dialer) = (format!("http://{}", frozen.local_addr().unwrap()), Dialer::default());
        let answers = async {
            tokio::join!(
                tiers_of(&dialer, &url),
                name_of(&dialer, &url, Role::Decode),
                workers_of(&dialer, &url, None)
            )
        };
        let (tiers, name, workers) = tokio::time::timeout(2 * CONNECT_TIMEOUT, answers).await.unwrap();
        for error in [tiers.err(), name.err(), workers.err()] {
            let error = format!("{:#}", error.unwrap());
            assert!(error.contains("no answer within 5 s"), "{error}");
        }
    }

    #[test]
    fn slow_memory_and_missing_ways_are_said() {
        assert!(
            text(Finding::Measured(measured("tcp", 0.5, 2.0))).contains("tcp was found much faster than shm")
        );
        assert!(text(Finding::Measured(measured("", 0.0, 0.0))).contains("no transport can be used"));
        assert!(text(Finding::Failed("d-0 is busy".into())).contains("not measured: d-0 is busy"));
        let conversion = Some("blocks of 16 tokens in f32 become blocks of 32 tokens in int8".to_owned());
        let converted = text(Finding::Measured(Measured { conversion, ..measured("shm", 1.0, 0.9) }));
        assert!(converted.contains("become blocks of 32 tokens in int8, which is part of"), "{converted}");
        assert!(converted.contains("limited by putting blocks of the other form together"), "{converted}");
        for (shm, limit) in
            [(15.0, "too small to tell"), (10.0, "limited by memory"), (1.0, "too small to tell")]
        {
            let text = text(Finding::Measured(Measured { bytes: 2 << 20, ..measured("shm", shm, 2.0) }));
            assert!(text.contains(limit), "{text}");
        }
        let json = serde_json::to_value(Report {
            pairs: vec![Pair {
                prefill: "p".into(),
                decode: "d".into(),
                finding: Finding::Measured(measured("shm", 1.0, 1.0)),
            }],
            ..Report::default()
        });
        assert_eq!(json.unwrap()["pairs"][0]["measured"]["chosen"], "shm");
    }
}
