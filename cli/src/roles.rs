//! One part of a cluster in this process: arguments become its configuration, it runs until a signal.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use baton_cluster::{DiscoveryConfig, EtcdAuth, EtcdConfig, EtcdTls, Role, WorkerId};
use baton_router::RouterConfig;
use baton_telemetry::{TelemetryConfig, TelemetryGuard};
use baton_tls::{Tls, TlsConfig};
use baton_worker::{DrafterConfig, KvMemory, TransportKind, WorkerConfig};
use tracing::debug;

use crate::{
    args::{
        Discovery, DiscoveryArgs, EngineArgs, LogArgs, LogColor, LogFormat, Migration, ModelArgs, RouterArgs,
        Speculate, TlsArgs, Transport, WorkerArgs,
    },
    embedded_model,
};

/// Runs a router.
pub async fn router(args: RouterArgs) -> anyhow::Result<()> {
    let _telemetry = init_telemetry(&args.log, "baton-router", &args.listen.to_string())?;
    let (model, model_name) = model(&args.model)?;
    let discovery = discovery(&args.discovery, String::new(), args.workers)?;
    let mut config = RouterConfig::new(model, model_name, discovery);
    config.listen = args.listen;
    config.tls = tls(&args.tls)?;
    config.max_requests = args.max_requests;
    config.policy.local_prefill_below = args.local_prefill_below;
    config.policy.fetch_prefix_from = args.fetch_prefix_from;
    config.migration = match args.migration {
        Migration::Off => baton_router::MigrationMode::Off,
        Migration::Drain => baton_router::MigrationMode::Drain,
        Migration::Balance => baton_router::MigrationMode::Balance,
    };
    baton_router::run(config, crate::shutdown_signal()?).await
}

/// Runs a prefill worker.
pub async fn prefill_worker(args: WorkerArgs) -> anyhow::Result<()> {
    let (config, _telemetry) = worker(Role::Prefill, args)?;
    baton_prefill_worker::run(config, crate::shutdown_signal()?).await
}

/// Runs a decode worker.
pub async fn decode_worker(args: WorkerArgs) -> anyhow::Result<()> {
    let (config, _telemetry) = worker(Role::Decode, args)?;
    baton_decode_worker::run(config, crate::shutdown_signal()?).await
}

fn worker(role: Role, args: WorkerArgs) -> anyhow::Result<(WorkerConfig, TelemetryGuard)> {
    let (name, service) = match role {
        Role::Prefill => ("prefill", "baton-prefill-worker"),
        Role::Decode => ("decode", "baton-decode-worker"),
    };
    let id = args.id.unwrap_or_else(|| format!("{name}-{}-{}", host_name(), std::process::id()));
    let telemetry = init_telemetry(&args.log, service, &id)?;
    let (model, model_name) = model(&args.model)?;
    let discovery = discovery(&args.discovery, args.router, Vec::new())?;
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
    config.tls = tls(&args.tls)?;
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

fn init_telemetry(args: &LogArgs, service: &str, instance: &str) -> anyhow::Result<TelemetryGuard> {
    baton_telemetry::init(&TelemetryConfig {
        log: args.log.clone(),
        format: match args.log_format {
            LogFormat::Pretty => baton_telemetry::LogFormat::Pretty,
            LogFormat::Compact => baton_telemetry::LogFormat::Compact,
            LogFormat::Json => baton_telemetry::LogFormat::Json,
        },
        color: match args.log_color {
            LogColor::Auto => None,
            LogColor::Always => Some(true),
            LogColor::Never => Some(false),
        },
        otlp_endpoint: args.otlp_endpoint.clone(),
        service_name: service.to_owned(),
        instance: instance.to_owned(),
    })
}

/// Directory and name of the model: the given one, or the embedded one.
fn model(args: &ModelArgs) -> anyhow::Result<(PathBuf, String)> {
    let Some(model) = &args.model else {
        let name = args.model_name.clone().unwrap_or_else(|| embedded_model::NAME.to_owned());
        return Ok((embedded_model::directory()?, name));
    };
    let model = model_path(model)?;
    let name = args.model_name.clone().unwrap_or_else(|| baton_worker::name_of(&model));
    Ok((model, name))
}

/// The whole path of a model. A link to a file keeps its name: what it links to may have one that says nothing, such as
/// the blobs of a download cache.
pub(crate) fn model_path(model: &Path) -> anyhow::Result<PathBuf> {
    let whole = match model.is_file() {
        true => std::path::absolute(model),
        false => model.canonicalize(),
    };
    whole.with_context(|| format!("model {}", model.display()))
}

/// Directory of the draft model if there is to be one: the given one, or that of the embedded model.
pub(crate) fn draft_model(engine: &EngineArgs, is_embedded: bool) -> anyhow::Result<Option<PathBuf>> {
    match (engine.speculate, &engine.draft_model) {
        (Speculate::Draft, Some(draft)) => model_path(draft).map(Some),
        (Speculate::Draft, None) if is_embedded => embedded_model::draft_directory().map(Some),
        (Speculate::Draft, None) => {
            bail!("--speculate draft needs a smaller model: say where with --draft-model")
        }
        (Speculate::Off | Speculate::Ngram, Some(_)) => {
            bail!("--draft-model is for --speculate draft; give both or neither")
        }
        (Speculate::Off | Speculate::Ngram, None) => Ok(None),
    }
}

/// Certificates, if there are any.
pub(crate) fn tls(args: &TlsArgs) -> anyhow::Result<Option<Tls>> {
    let TlsArgs { tls_cert: Some(cert), tls_key: Some(key), tls_ca: Some(ca), tls_name } = args.clone()
    else {
        return Ok(None);
    };
    Ok(Some(Tls::load(TlsConfig { cert, key, ca, name: tls_name })?))
}

fn discovery(args: &DiscoveryArgs, router: String, workers: Vec<String>) -> anyhow::Result<DiscoveryConfig> {
    Ok(match args.discovery {
        Discovery::Embedded => DiscoveryConfig::Embedded { router },
        Discovery::Static => DiscoveryConfig::Static { workers },
        Discovery::Etcd => DiscoveryConfig::Etcd(EtcdConfig {
            endpoints: args.etcd_endpoints.clone(),
            prefix: args.etcd_prefix.clone(),
            lease_ttl: Duration::from_secs(args.etcd_lease_ttl),
            tls: etcd_tls(args),
            auth: etcd_auth(args)?,
        }),
    })
}

fn etcd_tls(args: &DiscoveryArgs) -> Option<EtcdTls> {
    let (ca, cert, key) = (args.etcd_ca.clone(), args.etcd_cert.clone(), args.etcd_key.clone());
    (ca.is_some() || cert.is_some()).then_some(EtcdTls { ca, cert, key, domain: args.etcd_tls_name.clone() })
}

fn etcd_auth(args: &DiscoveryArgs) -> anyhow::Result<Option<EtcdAuth>> {
    let (user, file) = match (&args.etcd_user, &args.etcd_password_file) {
        (Some(user), Some(file)) => (user.clone(), file),
        (None, None) => return Ok(None),
        _ => bail!("--etcd-user and --etcd-password-file belong together; give both or neither"),
    };
    let password = fs::read_to_string(file).with_context(|| format!("password file {}", file.display()))?;
    Ok(Some(EtcdAuth { user, password: password.trim_end_matches(['\r', '\n']).to_owned() }))
}

/// What this host can do without being told. Not nccl: blocks lie in host memory, where it is a detour.
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
