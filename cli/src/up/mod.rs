//! `baton up`: a router and workers as separate processes under one supervisor.
//!
//! The supervisor knows commands and exit codes only. It starts the router first, so that the port
//! answers at once, and stops it first, so that it can end its streams while workers still serve.

mod banner;
mod child;
mod logs;
mod places;
mod separation;

use std::{
    ffi::OsString,
    io::IsTerminal,
    net::SocketAddr,
    num::NonZero,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use baton_command::{EngineArgs, TlsArgs, at_least_one, draft_model, embedded_model, model_path};
use baton_keys::ApiKey;
use baton_model::num_cuda_devices;
use baton_worker::{ComputeDevice, ThreadPinning};
use clap::Args;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{config::LayerArgs, keys, log::LogArgs, router::RoutingArgs, shutdown, transfer::TransferArgs};
use child::{Child, Supervised};
use logs::Logs;
use places::Place;
use separation::Separation;

/// How long the router gets to end its streams before the workers are told to stop.
const ROUTER_DRAIN: Duration = Duration::from_secs(10);

/// How much longer than its drain a router or worker may take to end after SIGTERM.
const STOP_MARGIN: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Directory of a Hugging Face model, or a .gguf file. Default: the tiny model that is embedded in this
    /// program.
    pub model: Option<PathBuf>,
    /// The same as MODEL, as other commands have it.
    #[arg(long = "model", value_name = "DIR|FILE", conflicts_with = "model")]
    pub model_flag: Option<PathBuf>,
    /// Port of the HTTP and gRPC API.
    #[arg(long, default_value_t = 8080, env = "BATON_PORT")]
    pub port: u16,
    /// Address to listen on. 0.0.0.0 accepts connections from other machines.
    #[arg(long, default_value = "127.0.0.1", env = "BATON_HOST")]
    pub host: std::net::IpAddr,
    /// Prefill workers to start. With 0, decode workers compute prompts themselves.
    ///
    /// Default: 1 on GPUs, for the embedded model and on at least four processors; on fewer 0, as two workers would share them.
    /// Flags that say how KV travels, such as --transports, start one there, too.
    #[arg(long, value_name = "N", env = "BATON_PREFILL")]
    pub prefill: Option<usize>,
    /// Decode workers to start.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, env = "BATON_DECODE")]
    pub decode: usize,
    /// Name of the model in the API. Default: the name of the directory, or of the file without .gguf.
    #[arg(long, value_name = "NAME", env = "BATON_MODEL_NAME")]
    pub model_name: Option<String>,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub transfer: TransferArgs,
    #[command(flatten)]
    pub routing: RoutingArgs,
    /// Seconds after SIGTERM for running requests to finish; those of a worker may migrate.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, env = "BATON_DRAIN_TIMEOUT")]
    pub drain_timeout: u64,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub layers: LayerArgs,
}

impl UpArgs {
    /// The model that was given, with or without the flag.
    fn given_model(&self) -> Option<PathBuf> {
        self.model.clone().or_else(|| self.model_flag.clone())
    }

    /// What the default number of prefill workers depends on, on a machine with so many processors.
    fn separation(&self, num_processors: usize) -> Separation {
        let num_processors = match &self.engine.pin_threads {
            ThreadPinning::Cpus(cpus) => cpus.num_cpus().min(num_processors),
            ThreadPinning::None | ThreadPinning::Auto => num_processors,
        };
        Separation {
            has_gpu: self.engine.has_gpu(),
            is_embedded: self.given_model().is_none(),
            asks_for_handoffs: self.transfer.asks_for_handoffs(),
            num_processors,
        }
    }
}

/// Refuses to serve the embedded model to a user who names another one as all other commands take it. Here the variable cannot have a
/// flag's place: clap would take it and MODEL as a contradiction.
fn refuse_variable(has_model: bool, variable: Option<OsString>) -> anyhow::Result<()> {
    match variable {
        Some(model) if !has_model => {
            let model = model.display();
            bail!("BATON_MODEL is set, but up takes its model as an argument: baton up {model}")
        }
        _ => Ok(()),
    }
}

/// Runs until Ctrl-C or SIGTERM, or until a part cannot be started.
pub(crate) async fn run(mut args: UpArgs) -> anyhow::Result<()> {
    args.model = args.given_model();
    refuse_variable(args.model.is_some(), std::env::var_os("BATON_MODEL"))?;
    let model = match &args.model {
        Some(model) => model_path(model)?,
        None => embedded_model::directory()?,
    };
    if args.model.is_none() && args.model_name.is_none() {
        args.model_name = Some(embedded_model::NAME.to_owned());
    }
    args.engine.draft_model = draft_model(&args.engine, args.model.is_none())?;
    // Checked here for a clear message, as below.
    args.tls.load()?;
    let address = free_address(SocketAddr::new(args.host, args.port))?;

    let shutdown = shutdown::on_signal()?;
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let num_gpus = num_cuda_devices().unwrap_or(0);
    let separation = args.separation(std::thread::available_parallelism().map_or(1, NonZero::get));
    let num_prefill = args.prefill.unwrap_or_else(|| separation.num_prefill());
    let places =
        places::divide(&args.engine, num_prefill + args.decode, num_gpus).context("--pin-threads")?;
    let worker_key = args.routing.api_keys.is_some().then(keys::new_key).transpose()?;
    let children = plan(&args, num_prefill, address, &model, &places, worker_key.as_ref(), colour);
    let width = children.iter().map(|child| child.name.len()).max().unwrap_or(0);
    let logs = Logs::new(args.log.log_format, width, colour);
    unused_gpus(args.engine.device, num_gpus).iter().for_each(|note| logs.note(note));
    if args.prefill.is_none() && num_prefill == 0 {
        logs.note(&separation.why_none(args.decode));
    }
    let mut children = children.into_iter();
    let router = children.next().expect("the plan begins with the router");
    let mut router = tokio::spawn(child::supervise(router, logs, shutdown.clone()));
    // Workers outlive the router's drain: their token is cancelled below, after the router has ended.
    let stop_workers = CancellationToken::new();
    let mut workers = JoinSet::new();
    for child in children {
        workers.spawn(child::supervise(child, logs, stop_workers.clone()));
    }

    let name = args.model_name.clone().unwrap_or_else(|| baton_worker::name_of(&model));
    let ready =
        tokio::spawn(banner::print_when_ready(address, num_prefill, args.decode, name, worker_key, logs));
    let outcome = tokio::select! {
        () = shutdown.cancelled() => {
            logs.note("stopping; press Ctrl-C again to stop at once");
            Ok(())
        }
        ended = &mut router => describe(ended?, &model),
        Some(ended) = workers.join_next() => describe(ended?, &model),
    };
    ready.abort();

    shutdown.cancel();
    if !router.is_finished() {
        // A router that does not end in time is killed when its task is dropped, with the runtime.
        let _ = tokio::time::timeout(ROUTER_DRAIN, &mut router).await;
    }
    stop_workers.cancel();
    while workers.join_next().await.is_some() {}
    outcome
}

/// What to say of GPUs that no worker uses.
fn unused_gpus(device: ComputeDevice, num_gpus: usize) -> Option<String> {
    match num_gpus {
        _ if device != ComputeDevice::Cpu => None,
        0 => None,
        1 => Some("1 GPU is here and not used; --device auto uses it".to_owned()),
        _ => Some(format!("{num_gpus} GPUs are here and none is used; --device auto uses them")),
    }
}

/// What ended everything, and what to do if it is the model.
fn describe(ended: Supervised, model: &Path) -> anyhow::Result<()> {
    let Supervised::GaveUp(message) = ended else { return Ok(()) };
    let path = model.display().to_string();
    if message.contains(&path) {
        bail!(
            "{message}\nhelp: a model is a directory with config.json, tokenizer.json and *.safetensors, or a .gguf file; \
             `baton inspect {path}` looks at it without starting anything"
        );
    }
    bail!(message)
}

/// The address, if it is free; with a port of 0, a free one, for workers and the banner have to know it. Without this check,
/// the router would fail and be restarted again and again.
fn free_address(address: SocketAddr) -> anyhow::Result<SocketAddr> {
    std::net::TcpListener::bind(address)
        .and_then(|listener| listener.local_addr())
        .with_context(|| format!("cannot listen on {address}; is another server running? try --port"))
}

/// The processes to run, the router first. `places` has one for each worker.
fn plan(
    args: &UpArgs,
    num_prefill: usize,
    address: SocketAddr,
    model: &Path,
    places: &[Place],
    worker_key: Option<&ApiKey>,
    colour: bool,
) -> Vec<Child> {
    let mut common = vec!["--model".to_owned(), model.display().to_string()];
    if let Some(name) = &args.model_name {
        common.extend(["--model-name".to_owned(), name.clone()]);
    }
    common.extend(args.tls.flags());
    common.extend(args.log.flags(colour));

    let mut router = vec!["router".to_owned(), "--listen".to_owned(), address.to_string()];
    router.extend(common.clone());
    router.extend(args.routing.flags());
    router.push(format!("--drain-timeout={}", args.drain_timeout));
    router.extend(worker_key.map(|key| format!("--worker-key-hash={}", key.hash())));

    // Workers reach the router over loopback, for every address that it listens on.
    let scheme = if args.tls.tls_cert.is_some() { "https" } else { "http" };
    let local = match address {
        SocketAddr::V4(_) => format!("{scheme}://127.0.0.1:{}", address.port()),
        SocketAddr::V6(_) => format!("{scheme}://[::1]:{}", address.port()),
    };
    let mut worker = vec!["--router".to_owned(), local];
    worker.extend(common);
    worker.extend(args.transfer.flags());
    worker.push(format!("--drain-timeout={}", args.drain_timeout));

    let stop_timeout = STOP_MARGIN + Duration::from_secs(args.drain_timeout);
    let name = "router".to_owned();
    let mut children = vec![Child { name, args: router, api_key: None, stop_timeout }];
    let mut places = places.iter();
    for (role, num) in [("prefill", num_prefill), ("decode", args.decode)] {
        for idx in 0..num {
            let name = format!("{role}-{idx}");
            let place = places.next().expect("one for each worker");
            let mut flags = vec![format!("{role}-worker"), "--id".to_owned(), name.clone()];
            flags.extend(worker.clone());
            let engine = place.engine(&args.engine);
            // A directory has one owner.
            let disk_kv = args.engine.disk_kv.as_ref().map(|dir| dir.join(&name));
            flags.extend(EngineArgs { disk_kv, ..engine }.flags());
            flags.push(format!("--pin-threads={}", place.cpus));
            children.push(Child { name, args: flags, api_key: worker_key.cloned(), stop_timeout });
        }
    }
    children
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn port_0_is_a_free_one_and_a_used_one_is_refused() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let free = free_address(any).unwrap();
        assert_ne!(free.port(), 0);
        let used = std::net::TcpListener::bind(any).unwrap();
        let error = free_address(used.local_addr().unwrap()).unwrap_err();
        assert!(error.to_string().contains("--port"), "{error}");
    }

    #[test]
    fn gpus_beside_workers_on_processors_are_named() {
        let note = |device, num_gpus| unused_gpus(device, num_gpus).unwrap_or_default();
        assert_eq!(note(ComputeDevice::Cpu, 8), "8 GPUs are here and none is used; --device auto uses them");
        assert_eq!(note(ComputeDevice::Cpu, 1), "1 GPU is here and not used; --device auto uses it");
        assert_eq!(note(ComputeDevice::Cpu, 0), "");
        assert_eq!(note(ComputeDevice::Cuda(0), 8), "");
    }

    #[test]
    fn a_model_is_given_with_or_without_the_flag() {
        for (words, expected) in [("", None), ("/m", Some("/m")), ("--model /m", Some("/m"))] {
            let cli = Cli::parse_from(format!("baton up {words}").split_whitespace());
            let Command::Up(args) = cli.command else { panic!("not up") };
            assert_eq!(args.given_model().as_deref(), expected.map(Path::new), "{words}");
        }
        assert!(Cli::try_parse_from(["baton", "up", "/m", "--model", "/n"]).is_err());
    }

    #[test]
    fn a_model_in_the_environment_is_not_ignored() {
        let refused = refuse_variable(false, Some("/m".into())).unwrap_err().to_string();
        assert!(refused.ends_with("baton up /m"), "{refused}");
        assert!(refuse_variable(true, Some("/m".into())).is_ok());
        assert!(refuse_variable(false, None).is_ok());
    }

    #[test]
    fn the_default_number_of_prefill_workers_follows_from_the_flags() {
        for (words, num_processors, expected) in [
            ("", 2, 1),
            ("/m", 2, 0),
            ("--model /m", 2, 0),
            ("/m", 4, 1),
            ("/m --pin-threads 0-1", 4, 0),
            ("/m --pin-threads 0-7", 2, 0),
            ("/m --pin-threads auto", 4, 1),
            ("/m --device cuda:0", 2, 1),
            ("/m --device sim:H100", 2, 1),
            ("/m --transports tcp", 2, 1),
            ("/m --kv-wire int8", 2, 1),
            ("/m --data-listen 127.0.0.2:0", 2, 1),
            ("/m --shm-dir /s", 2, 1),
            // What says nothing of the way, or is of use to a decode worker alone.
            ("/m --nixl /n --nccl /n --handoff-deadline 7 --fetch-deadline 8", 2, 0),
            ("/m --blend auto --find-passages --itl-target 40 --decode 2 --local-prefill-below 5", 2, 0),
        ] {
            let cli = Cli::parse_from(format!("baton up {words}").split_whitespace());
            let Command::Up(args) = cli.command else { panic!("not up") };
            assert_eq!(args.prefill, None, "{words}");
            assert_eq!(args.separation(num_processors).num_prefill(), expected, "{words}");
        }
    }

    #[test]
    fn children_get_what_up_was_told() {
        let cli = Cli::parse_from(
            "baton up --port 9 --prefill 2 --decode 2 --threads 2 --tensor-parallel 2 --kv-dtype fp8 --kv-memory 3M --itl-target 40 --no-prefix-cache --host-kv 8M --host-kv-dir /dev/shm/kv --disk-kv /kv --disk-kv-size 9M --object-kv s3://kv/x --object-kv-size 7M --kv-key-file /s \
             --quantize int4:64 --activations f32 --deterministic --device cuda:1 --gpu-memory-utilization 0.5 --speculate draft --draft-model /draft \
             --max-draft-tokens 3 --blend auto --blend-memory 2G --blend-max-kl 0.5 --blend-audit 0.25 --log-format json --log-color never \
             --transports tcp,shm --kv-wire int8 --data-listen 127.0.0.2:0 --rdma-listen 127.0.0.3:0 --nixl /n --nccl-listen 127.0.0.4:0 \
             --nccl /c --data-host h --shm-dir /s --handoff-deadline 7 --fetch-deadline 8 --drain-timeout 9 --model-name tiny \
             --slo-ttft 900 --slo-tpot 50 --local-prefill-below 5 --fetch-prefix-from 6 --migration off --max-requests 4 --max-connections 5 --unknown-fields ignore \
             --find-passages --durable /j --durable-size 5M --durable-ttl 77 --cors-origins https://a.example,https://b.example --api-keys /keys --public-metrics --otlp-endpoint http://127.0.0.1:4317 --tls-cert /c --tls-key /k --tls-ca /ca --tls-name baton"
                .split_whitespace(),
        );
        let Command::Up(args) = cli.command else { panic!("not up") };
        let place = |(idx, cpus): (u32, &str)| Place {
            cpus: cpus.parse().unwrap(),
            device: ComputeDevice::Cuda(idx),
            gpu_memory_utilization: 0.25,
        };
        let places = [(0, "0"), (1, "1"), (2, "2-3"), (3, "none")].map(place);
        let key = ApiKey::from_random([7; 32]);
        let address = "127.0.0.1:9".parse().unwrap();
        let num_prefill = args.prefill.expect("it is given");
        let children = plan(&args, num_prefill, address, Path::new("/model"), &places, Some(&key), true);
        let names: Vec<_> = children.iter().map(|child| child.name.as_str()).collect();
        assert_eq!(names, ["router", "prefill-0", "prefill-1", "decode-0", "decode-1"]);
        let mut places = places.into_iter();
        for child in &children {
            let line = std::iter::once("baton".to_owned()).chain(child.args.clone());
            let cli = Cli::try_parse_from(line).unwrap_or_else(|error| panic!("{}: {error}", child.name));
            let (engine, log, tls) = match cli.command {
                Command::Router(router) => {
                    assert_eq!(format!("{:?}", router.routing), format!("{:?}", args.routing));
                    assert_eq!((router.worker_key_hash, &child.api_key), (Some(key.hash()), &None));
                    assert_eq!(router.drain_timeout, 9);
                    (None, router.log, router.tls)
                }
                Command::PrefillWorker(worker) | Command::DecodeWorker(worker) => {
                    assert_eq!(format!("{:?}", worker.transfer), format!("{:?}", args.transfer));
                    assert_eq!(worker.drain_timeout, 9);
                    assert_eq!(child.api_key.as_ref(), Some(&key));
                    (Some(worker.engine), worker.log, worker.tls)
                }
                other => panic!("{other:?}"),
            };
            assert_eq!(format!("{log:?}"), format!("{:?}", args.log));
            assert_eq!(format!("{tls:?}"), format!("{:?}", args.tls));
            if let Some(engine) = engine {
                let place = places.next().unwrap();
                let engine_of_place = place.engine(&args.engine);
                let disk_kv = Some(Path::new("/kv").join(&child.name));
                let expected = EngineArgs { pin_threads: place.cpus, disk_kv, ..engine_of_place };
                assert_eq!(format!("{engine:?}"), format!("{expected:?}"));
            }
        }
    }
}
