//! `baton prefill-worker` and `baton decode-worker`: their arguments become a configuration, and one runs until a signal.

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use anyhow::ensure;
use baton_cluster::{RegistrationKey, Role, WorkerId};
use baton_command::{Blend, EngineArgs, Speculate, TlsArgs, at_least_one, draft_model, embedded_model};
use baton_telemetry::TelemetryGuard;
use baton_worker::{BlendSettings, ComputeDevice, DrafterConfig, KvMemory, WorkerConfig};
use clap::Args;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    config::LayerArgs, discovery::DiscoveryArgs, log::LogArgs, model::ModelArgs, open_files, shutdown,
    transfer::TransferArgs,
};

/// Data connections that a worker admits: two of each peer in a large cluster.
const DATA_CONNECTIONS: usize = 4096;

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
    /// Workers in this process, each with a port and an id of its own. Only with --device sim:GPU.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, env = "BATON_NUM_WORKERS")]
    pub num_workers: usize,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub discovery: DiscoveryArgs,
    /// URL of the router, for `--discovery embedded`.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080", env = "BATON_ROUTER")]
    pub router: String,
    /// API key with which it registers, of role worker, for `--discovery embedded` and a router with --api-keys.
    #[arg(long, value_name = "KEY", env = "BATON_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub transfer: TransferArgs,
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

/// Runs a prefill worker, or several simulated ones.
pub(crate) async fn run_prefill(args: WorkerArgs) -> anyhow::Result<()> {
    let num_workers = args.num_workers;
    let (config, _telemetry) = worker(Role::Prefill, args)?;
    run_all(several(config, num_workers)?, baton_prefill_worker::run).await
}

/// Runs a decode worker, or several simulated ones.
pub(crate) async fn run_decode(args: WorkerArgs) -> anyhow::Result<()> {
    let num_workers = args.num_workers;
    let (config, _telemetry) = worker(Role::Decode, args)?;
    run_all(several(config, num_workers)?, baton_decode_worker::run).await
}

/// Configurations of so many workers like that one: `id-0`, `id-1` and so on.
fn several(config: WorkerConfig, num_workers: usize) -> anyhow::Result<Vec<WorkerConfig>> {
    if num_workers == 1 {
        return Ok(vec![config]);
    }
    ensure!(
        matches!(config.device, ComputeDevice::Sim(_)),
        "--num-workers is {num_workers}, but workers that compute have a process each; it goes with --device sim:GPU"
    );
    let ports = [("--listen", config.listen.port()), ("--data-listen", config.data_listen.port())];
    for (flag, port) in ports {
        ensure!(
            port == 0,
            "{flag} has port {port}, but --num-workers {num_workers} needs one for each; take port 0"
        );
    }
    ensure!(config.advertise.is_none(), "--advertise names one worker, but --num-workers is {num_workers}");
    let nth = |idx| WorkerConfig { id: format!("{}-{idx}", config.id).as_str().into(), ..config.clone() };
    Ok((0..num_workers).map(nth).collect())
}

/// Runs workers until a signal, or until one of them fails: then all end.
async fn run_all<F>(
    configs: Vec<WorkerConfig>,
    run: impl Fn(WorkerConfig, CancellationToken) -> F,
) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let shutdown = shutdown::on_signal()?;
    let mut workers = JoinSet::new();
    for config in configs {
        workers.spawn(run(config, shutdown.clone()));
    }
    let mut outcome = Ok(());
    while let Some(ended) = workers.join_next().await {
        shutdown.cancel();
        outcome = outcome.and(ended.map_err(anyhow::Error::from).flatten());
    }
    outcome
}

fn worker(role: Role, args: WorkerArgs) -> anyhow::Result<(WorkerConfig, TelemetryGuard)> {
    let (name, service) = match role {
        Role::Prefill => ("prefill", "baton-prefill-worker"),
        Role::Decode => ("decode", "baton-decode-worker"),
    };
    let id = args.id.unwrap_or_else(|| format!("{name}-{}-{}", host_name(), std::process::id()));
    let telemetry = args.log.init(service, &id)?;
    open_files::allow(DATA_CONNECTIONS, "data connections");
    let (model, model_name) = args.model.resolve()?;
    let discovery = args.discovery.config(args.router, args.api_key.map(RegistrationKey::new), Vec::new())?;
    let draft_model = draft_model(&args.engine, args.model.model.is_none())?;
    let mut config = WorkerConfig::new(role, WorkerId::from(id), model, discovery);
    config.model_name = Some(model_name);
    config.listen = args.listen;
    config.advertise = args.advertise;
    let (kv_bytes, host_kv_bytes) = args.engine.kv_and_host_bytes();
    config.kv = KvMemory::Bytes(kv_bytes);
    config.block_size = args.engine.block_size;
    config.kv_dtype = args.engine.kv_dtype;
    config.max_running = args.engine.max_running();
    config.max_waiting = args.engine.max_waiting;
    config.token_budget = args.engine.token_budget();
    config.itl_target = args.engine.itl_target.map(|ms| Duration::from_millis(ms as u64));
    config.prefix_cache = !args.engine.no_prefix_cache;
    config.host_kv_bytes = host_kv_bytes.map(|bytes| bytes as u64);
    config.host_kv_dir = args.engine.host_kv_dir;
    config.disk_kv =
        args.engine.disk_kv.zip(args.engine.disk_kv_size).map(|(dir, size)| (dir, size.0 as u64));
    config.object_kv =
        args.engine.object_kv.zip(args.engine.object_kv_size).map(|(url, size)| (url, size.0 as u64));
    config.kv_key_file = args.engine.kv_key_file;
    config.threads = args.engine.threads;
    config.tensor_parallel = args.engine.tensor_parallel;
    config.pin_threads = args.engine.pin_threads;
    config.quantise = args.engine.quantize;
    config.activations = args.engine.activations;
    config.is_deterministic = args.engine.deterministic;
    config.step_profile = args.engine.step_profile;
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
    config.blend = (args.engine.blend == Blend::Auto).then_some(BlendSettings {
        max_store_bytes: args.engine.blend_memory.0,
        max_kl: args.engine.blend_max_kl,
        audit: args.engine.blend_audit,
    });
    config.tls = args.tls.load()?;
    args.transfer.configure(&mut config);
    config.drain_timeout = Duration::from_secs(args.drain_timeout);
    Ok((config, telemetry))
}

fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "host".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn config_of(flags: &str) -> (WorkerConfig, usize) {
        let cli = Cli::parse_from(format!("baton decode-worker --id d {flags}").split_whitespace());
        let Command::DecodeWorker(args) = cli.command else { panic!("not a decode worker") };
        let discovery = args.discovery.config(args.router.clone(), None, Vec::new()).expect("the default");
        let mut config = WorkerConfig::new(Role::Decode, "d".into(), "/model".into(), discovery);
        config.listen = args.listen;
        config.advertise = args.advertise;
        config.device = args.engine.device;
        config.data_listen = args.transfer.data_listen;
        (config, args.num_workers)
    }

    #[test]
    fn a_process_has_several_workers_only_if_they_are_simulated() {
        let ids = |flags: &str| {
            let (config, num_workers) = config_of(flags);
            let configs = several(config, num_workers).map_err(|error| error.to_string())?;
            Ok::<_, String>(configs.into_iter().map(|config| config.id.0).collect::<Vec<_>>())
        };
        assert_eq!(ids(""), Ok(vec!["d".to_owned()]));
        assert_eq!(ids("--device sim:H100"), Ok(vec!["d".to_owned()]));
        assert_eq!(ids("--device sim:H100 --num-workers 2"), Ok(vec!["d-0".to_owned(), "d-1".to_owned()]));
        for (flags, message) in [
            ("--num-workers 2", "it goes with --device sim:GPU"),
            ("--device sim:H100 --num-workers 2 --listen 127.0.0.1:81", "--listen has port 81"),
            ("--device sim:H100 --num-workers 2 --data-listen 127.0.0.1:82", "--data-listen has port 82"),
            ("--device sim:H100 --num-workers 2 --advertise http://h:1", "--advertise"),
        ] {
            let error = ids(flags).unwrap_err();
            assert!(error.contains(message), "{flags}: {error}");
        }
    }

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
