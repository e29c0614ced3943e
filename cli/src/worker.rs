//! `baton prefill-worker` and `baton decode-worker`: their arguments become a configuration, and one runs until a signal.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use baton_cluster::{Role, WorkerId};
use baton_command::{EngineArgs, Speculate, TlsArgs, Transport, at_least_one, draft_model, embedded_model};
use baton_kv_cache::WireFormat;
use baton_telemetry::TelemetryGuard;
use baton_worker::{DrafterConfig, KvMemory, TransportKind, WorkerConfig};
use clap::Args;
use tracing::debug;

use crate::{config::LayerArgs, discovery::DiscoveryArgs, log::LogArgs, model::ModelArgs, shutdown};

#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Unique name of this worker. Default: role, host name and process id.
    #[arg(long, env = "BATON_ID")]
    pub id: Option<String>,
    /// Address and port of gRPC, /metrics and the probes. Port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0", env = "BATON_LISTEN")]
    pub listen: SocketAddr,
    /// URL at which routers and workers reach --listen. Default: the address that it is bound to.
    #[arg(long, value_name = "URL", env = "BATON_ADVERTISE")]
    pub advertise: Option<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub discovery: DiscoveryArgs,
    /// URL of the router, for `--discovery embedded`.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080", env = "BATON_ROUTER")]
    pub router: String,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Transports for KV blocks, separated by commas. Two workers use the best that both have. Default: shm,
    /// tcp, and rdma where NIXL and a device for it are found.
    #[arg(long, value_enum, value_delimiter = ',', env = "BATON_TRANSPORTS")]
    pub transports: Vec<Transport>,
    /// Format of KV on its way over TCP: as-is, or quantised to int8 or int4, which takes fewer bytes.
    ///
    /// The decode worker's setting decides; a prefill worker that is set to as-is never quantises. Over
    /// shared memory, RDMA and NCCL KV travels as it is. Default: as the other worker asks for.
    #[arg(long, value_name = "FORM", value_parser = parse_kv_wire, env = "BATON_KV_WIRE")]
    pub kv_wire: Option<WireFormat>,
    /// Address and port that receive KV over TCP. Port 0 takes a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0", env = "BATON_DATA_LISTEN")]
    pub data_listen: SocketAddr,
    /// Address and port at which senders set up rdma. Port 0 takes a free one. Default: a free port at the
    /// address of --data-listen.
    #[arg(long, value_name = "ADDR", env = "BATON_RDMA_LISTEN")]
    pub rdma_listen: Option<SocketAddr>,
    /// NIXL's library for rdma: libnixl_capi.so or its folder. Default: where the system's loader finds it.
    #[arg(long, value_name = "PATH", env = "BATON_NIXL")]
    pub nixl: Option<PathBuf>,
    /// Address and port at which peers set up nccl with a decode worker. Port 0 takes a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0", env = "BATON_NCCL_LISTEN")]
    pub nccl_listen: SocketAddr,
    /// NCCL's library, for the nccl transport and for --tensor-parallel on GPUs: libnccl.so.2 or its folder.
    /// Default: where the system's loader finds it.
    #[arg(long, value_name = "PATH", env = "BATON_NCCL")]
    pub nccl: Option<PathBuf>,
    /// Host name or address at which other workers reach --data-listen, --rdma-listen and --nccl-listen.
    /// Default: the host of --advertise.
    #[arg(long, value_name = "HOST", env = "BATON_DATA_HOST")]
    pub data_host: Option<String>,
    /// Directory for the sockets of the shm transport. Default: a private one in the runtime directory.
    #[arg(long, value_name = "DIR", env = "BATON_SHM_DIR")]
    pub shm_dir: Option<PathBuf>,
    /// Seconds that a handoff may make no progress before it fails.
    ///
    /// Until the first token, any computation of the prefill worker counts as progress. From then on only
    /// arriving KV does.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, env = "BATON_HANDOFF_DEADLINE")]
    pub handoff_deadline: u64,
    /// Milliseconds to fetch a cached prefix from another worker. What has not arrived by then is computed.
    /// Default: about the time that computing it takes.
    #[arg(long, value_name = "MS", value_parser = at_least_one, env = "BATON_FETCH_DEADLINE")]
    pub fetch_deadline: Option<usize>,
    /// Seconds after SIGTERM for running requests to finish or migrate.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, env = "BATON_DRAIN_TIMEOUT")]
    pub drain_timeout: u64,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub layers: LayerArgs,
}

/// Runs a prefill worker.
pub(crate) async fn run_prefill(args: WorkerArgs) -> anyhow::Result<()> {
    let (config, _telemetry) = worker(Role::Prefill, args)?;
    baton_prefill_worker::run(config, shutdown::on_signal()?).await
}

/// Runs a decode worker.
pub(crate) async fn run_decode(args: WorkerArgs) -> anyhow::Result<()> {
    let (config, _telemetry) = worker(Role::Decode, args)?;
    baton_decode_worker::run(config, shutdown::on_signal()?).await
}

fn worker(role: Role, args: WorkerArgs) -> anyhow::Result<(WorkerConfig, TelemetryGuard)> {
    let (name, service) = match role {
        Role::Prefill => ("prefill", "baton-prefill-worker"),
        Role::Decode => ("decode", "baton-decode-worker"),
    };
    let id = args.id.unwrap_or_else(|| format!("{name}-{}-{}", host_name(), std::process::id()));
    let telemetry = args.log.init(service, &id)?;
    let (model, model_name) = args.model.resolve()?;
    let discovery = args.discovery.config(args.router, Vec::new())?;
    let draft_model = draft_model(&args.engine, args.model.model.is_none())?;
    let mut config = WorkerConfig::new(role, WorkerId::from(id), model, discovery);
    config.model_name = Some(model_name);
    config.listen = args.listen;
    config.advertise = args.advertise;
    config.kv = KvMemory::Bytes(args.engine.kv_memory.0);
    config.block_size = args.engine.block_size;
    config.kv_dtype = args.engine.kv_dtype;
    config.max_running = args.engine.max_running;
    config.max_waiting = args.engine.max_waiting;
    config.token_budget = args.engine.token_budget;
    config.itl_target = args.engine.itl_target.map(|ms| Duration::from_millis(ms as u64));
    config.prefix_cache = !args.engine.no_prefix_cache;
    config.threads = args.engine.threads;
    config.tensor_parallel = args.engine.tensor_parallel;
    config.pin_threads = args.engine.pin_threads;
    config.quantise = args.engine.quantize;
    config.activations = args.engine.activations;
    config.device = args.engine.device;
    config.gpu_memory_utilisation = args.engine.gpu_memory_utilization;
    config.weight_cache = match args.engine.weight_cache {
        Some(dir) if dir == Path::new("none") => None,
        Some(dir) => Some(dir),
        None => Some(embedded_model::cache_dir().join("weights")),
    };
    config.drafter = match args.engine.speculate {
        Speculate::Off => None,
        Speculate::Ngram => Some(DrafterConfig::Ngram),
        Speculate::Draft => draft_model.map(DrafterConfig::Model),
    };
    config.max_draft_tokens = args.engine.max_draft_tokens;
    config.kv_wire = args.kv_wire;
    config.tls = args.tls.load()?;
    config.transports = match args.transports.is_empty() {
        // What rdma carries is not encrypted: with certificates it has to be asked for.
        true if config.tls.is_some() => vec![TransportKind::Shm, TransportKind::Tcp],
        true => default_transports(args.nixl.as_deref()),
        false => args.transports.into_iter().map(transport).collect(),
    };
    config.rdma_listen = args.rdma_listen;
    config.nixl = args.nixl;
    config.nccl_listen = args.nccl_listen;
    config.nccl = args.nccl;
    config.data_listen = args.data_listen;
    config.data_host = args.data_host;
    config.shm_dir = args.shm_dir;
    config.handoff_deadline = Duration::from_secs(args.handoff_deadline);
    config.fetch_deadline = args.fetch_deadline.map(|ms| Duration::from_millis(ms as u64));
    config.drain_timeout = Duration::from_secs(args.drain_timeout);
    Ok((config, telemetry))
}

/// The default transports of this host. nccl is not among them: blocks are in host memory, where it is a detour.
fn default_transports(nixl: Option<&Path>) -> Vec<TransportKind> {
    match baton_worker::finds_rdma(nixl) {
        Ok(()) => vec![TransportKind::Shm, TransportKind::Rdma, TransportKind::Tcp],
        Err(why) => {
            debug!(why, "kv does not travel over rdma");
            vec![TransportKind::Shm, TransportKind::Tcp]
        }
    }
}

fn transport(transport: Transport) -> TransportKind {
    match transport {
        Transport::Shm => TransportKind::Shm,
        Transport::Rdma => TransportKind::Rdma,
        Transport::Nccl => TransportKind::Nccl,
        Transport::Tcp => TransportKind::Tcp,
    }
}

fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "host".to_owned() } else { name.to_owned() }
}

fn parse_kv_wire(name: &str) -> Result<WireFormat, String> {
    WireFormat::from_name(name).ok_or_else(|| format!("expected one of {}", WireFormat::names()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn a_draft_model_is_given_or_embedded_or_missed() {
        let draft = |flags: &str, is_embedded: bool| {
            let cli = Cli::parse_from(format!("baton decode-worker {flags}").split_whitespace());
            let Command::DecodeWorker(args) = cli.command else { panic!("not a decode worker") };
            draft_model(&args.engine, is_embedded).map_err(|error| error.to_string())
        };
        for flags in ["", "--speculate off", "--speculate ngram"] {
            assert_eq!(draft(flags, true), Ok(None), "{flags}");
        }
        let embedded = draft("--speculate draft", true).unwrap().unwrap();
        assert!(embedded.join("model.safetensors").is_file());
        let given = format!("--speculate draft --draft-model {}", embedded.display());
        assert_eq!(draft(&given, false).unwrap().unwrap(), embedded.canonicalize().unwrap());
        for (flags, message) in [
            ("--speculate draft", "say where with --draft-model"),
            ("--speculate draft --draft-model /nowhere", "/nowhere"),
            ("--draft-model /draft", "give both or neither"),
            ("--speculate ngram --draft-model /draft", "give both or neither"),
        ] {
            let error = draft(flags, false).unwrap_err();
            assert!(error.contains(message), "{flags}: {error}");
        }
    }
}
