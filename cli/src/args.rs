//! The command line: what a newcomer reads in `--help`.

use std::{net::SocketAddr, path::PathBuf};

use baton_kv_cache::{KvDtype, WireFormat};
use baton_model::{Activations, Quantisation};
use baton_worker::{Device, ThreadPinning};
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::{bench::BenchArgs, chat::ChatArgs, doctor::DoctorArgs, inspect::InspectArgs};

/// Serves large language models with prefill and decode on separate workers.
///
/// `baton up` starts everything on this machine. The other commands run one part of it.
#[derive(Debug, Parser)]
#[command(name = "baton", version, max_term_width = 100, args_override_self = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a router, a prefill worker and a decode worker on this machine, and keep them running.
    Up(UpArgs),
    /// Run a router: the HTTP and gRPC edge that plans where each request goes.
    Router(RouterArgs),
    /// Run a prefill worker: turns prompts into KV cache and their first token.
    PrefillWorker(WorkerArgs),
    /// Run a decode worker: owns requests and makes the rest of their tokens.
    DecodeWorker(WorkerArgs),
    /// Talk to a server in the terminal.
    Chat(ChatArgs),
    /// Put load on a server and measure latency, throughput and goodput; or measure transfers of KV blocks.
    Bench(BenchArgs),
    /// Measure how KV travels between the workers of a cluster, and say what limits it.
    Doctor(DoctorArgs),
    /// Print what a model costs: memory, arithmetic, and times on a device.
    Inspect(InspectArgs),
    /// Print a completion script for a shell.
    Completions(CompletionsArgs),
}

#[derive(Debug, Args)]
pub struct UpArgs {
    /// Directory of a Hugging Face model, or a .gguf file. Without it: a tiny model that is part of this program.
    pub model: Option<PathBuf>,
    /// Port of the HTTP and gRPC API.
    #[arg(long, default_value_t = 8080, env = "BATON_PORT")]
    pub port: u16,
    /// Address to listen on; 0.0.0.0 lets other machines in.
    #[arg(long, default_value = "127.0.0.1", env = "BATON_HOST")]
    pub host: std::net::IpAddr,
    /// Prefill workers to start. 0: decode workers prefill by themselves.
    #[arg(long, value_name = "N", default_value_t = 1, env = "BATON_PREFILL")]
    pub prefill: usize,
    /// Decode workers to start.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, env = "BATON_DECODE")]
    pub decode: usize,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub layers: LayerArgs,
}

#[derive(Debug, Args)]
pub struct RouterArgs {
    /// Address and port of the HTTP and gRPC API.
    #[arg(long, default_value = "127.0.0.1:8080", env = "BATON_LISTEN")]
    pub listen: SocketAddr,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub discovery: DiscoveryArgs,
    /// Addresses of the workers, for `--discovery static`: http://host:port, separated by commas.
    #[arg(long, value_name = "URLS", value_delimiter = ',', env = "BATON_WORKERS")]
    pub workers: Vec<String>,
    /// Prompts with fewer tokens than this to compute are prefilled by the decode worker itself.
    #[arg(long, value_name = "TOKENS", default_value_t = 32, env = "BATON_LOCAL_PREFILL_BELOW")]
    pub local_prefill_below: usize,
    /// Prefixes of which another worker has at least this many tokens more in its cache are fetched from there, where that
    /// is quicker than computing them.
    #[arg(long, value_name = "TOKENS", default_value_t = 64, env = "BATON_FETCH_PREFIX_FROM")]
    pub fetch_prefix_from: usize,
    /// Whether running requests move between decode workers: off; drain: from one that is told to leave, with their KV;
    /// balance: also from a much fuller one to an emptier one.
    #[arg(long, value_enum, default_value_t = Migration::Balance, env = "BATON_MIGRATION")]
    pub migration: Migration,
    /// Requests in flight at once; more are answered with 429.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one, env = "BATON_MAX_REQUESTS")]
    pub max_requests: usize,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub layers: LayerArgs,
}

#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// Name of this worker among all. Default: role, host name and process id.
    #[arg(long, env = "BATON_ID")]
    pub id: Option<String>,
    /// Address and port of its gRPC services, /metrics and probes. Port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0", env = "BATON_LISTEN")]
    pub listen: SocketAddr,
    /// URL at which others reach `listen`. Default: the address it is bound to.
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
    /// Ways for KV blocks to travel, separated by commas; of those that both sides have, the best is taken.
    /// Default: shm, tcp, and rdma where there are a device for it and NIXL.
    #[arg(long, value_enum, value_delimiter = ',', env = "BATON_TRANSPORTS")]
    pub transports: Vec<Transport>,
    /// How KV travels over TCP: as-is, or rounded to int8 or int4, which is smaller. Default: as the other
    /// worker wants. The decode worker's word counts; a prefill worker with as-is codes nothing. Over shared
    /// memory, RDMA and NCCL it stays as it is.
    #[arg(long, value_name = "FORM", value_parser = parse_kv_wire, env = "BATON_KV_WIRE")]
    pub kv_wire: Option<WireFormat>,
    /// Address and port at which KV is received over TCP. Port 0 takes a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0", env = "BATON_DATA_LISTEN")]
    pub data_listen: SocketAddr,
    /// Address and port at which rdma is arranged with those who send. Port 0 takes a free one. Default: a free
    /// port at the address of `data-listen`.
    #[arg(long, value_name = "ADDR", env = "BATON_RDMA_LISTEN")]
    pub rdma_listen: Option<SocketAddr>,
    /// NIXL's library for rdma, libnixl_capi.so or its folder. Default: where the system's loader finds it.
    #[arg(long, value_name = "PATH", env = "BATON_NIXL")]
    pub nixl: Option<PathBuf>,
    /// Address and port at which a decode worker arranges nccl with its peers. Port 0 takes a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0", env = "BATON_NCCL_LISTEN")]
    pub nccl_listen: SocketAddr,
    /// NCCL's library for nccl, and for --tensor-parallel on GPUs: libnccl.so.2 or its folder. Default: where the system's
    /// loader finds it.
    #[arg(long, value_name = "PATH", env = "BATON_NCCL")]
    pub nccl: Option<PathBuf>,
    /// Host name or address at which others reach `data-listen`, `rdma-listen` and `nccl-listen`. Default: that of `advertise`.
    #[arg(long, value_name = "HOST", env = "BATON_DATA_HOST")]
    pub data_host: Option<String>,
    /// Directory for the sockets of the shm transport. Default: a private one under the runtime directory.
    #[arg(long, value_name = "DIR", env = "BATON_SHM_DIR")]
    pub shm_dir: Option<PathBuf>,
    /// Seconds that a handoff may stand still: while its prompt waits for a prefill worker or is computed, whatever that
    /// worker computes counts as going on; from the first token on only the KV does.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, env = "BATON_HANDOFF_DEADLINE")]
    pub handoff_deadline: u64,
    /// Milliseconds within which a cached prefix must have come from another worker; what has not is computed. Default:
    /// about what computing it would take.
    #[arg(long, value_name = "MS", value_parser = at_least_one, env = "BATON_FETCH_DEADLINE")]
    pub fetch_deadline: Option<usize>,
    /// Seconds that running requests get to move or finish after SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, env = "BATON_DRAIN_TIMEOUT")]
    pub drain_timeout: u64,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub layers: LayerArgs,
}

/// Which model, and under which name.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// Directory of a Hugging Face model, or a .gguf file. Without it: a tiny model that is part of this program.
    #[arg(long, value_name = "DIR|FILE", env = "BATON_MODEL")]
    pub model: Option<PathBuf>,
    /// Name that clients ask for. Default: the directory's name, or the file's without .gguf.
    #[arg(long, value_name = "NAME", env = "BATON_MODEL_NAME")]
    pub model_name: Option<String>,
}

/// Certificates for what processes of Baton say to each other. All three, or none.
#[derive(Clone, Debug, Default, Args)]
pub struct TlsArgs {
    /// This process's certificate (PEM), with those between it and the authority's. Workers and the router then speak TLS
    /// with each other, both sides showing certificates; changed files are read by the next handshake.
    #[arg(long, value_name = "FILE", requires = "tls_key", requires = "tls_ca", env = "BATON_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Key (PEM) of the certificate.
    #[arg(long, value_name = "FILE", requires = "tls_cert", env = "BATON_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// Certificate authority (PEM) that the certificates of all workers and routers come from.
    #[arg(long, value_name = "FILE", requires = "tls_cert", env = "BATON_TLS_CA")]
    pub tls_ca: Option<PathBuf>,
    /// The name that every certificate must have. Default: the host name or address that is called.
    #[arg(long, value_name = "NAME", requires = "tls_cert", env = "BATON_TLS_NAME")]
    pub tls_name: Option<String>,
}

impl TlsArgs {
    /// The files, if they were given.
    pub fn files(&self) -> Option<[PathBuf; 3]> {
        Some([self.tls_cert.clone()?, self.tls_key.clone()?, self.tls_ca.clone()?])
    }
}

/// How the parts find each other.
#[derive(Clone, Debug, Args)]
pub struct DiscoveryArgs {
    /// How routers and workers find each other.
    #[arg(long, value_enum, default_value_t = Discovery::Embedded, env = "BATON_DISCOVERY")]
    pub discovery: Discovery,
    /// URLs of etcd, separated by commas.
    #[arg(
        long,
        value_name = "URLS",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:2379",
        env = "BATON_ETCD_ENDPOINTS"
    )]
    pub etcd_endpoints: Vec<String>,
    /// Prefix of every key in etcd: clusters with different prefixes do not see each other.
    #[arg(long, value_name = "KEY", default_value = "/baton", env = "BATON_ETCD_PREFIX")]
    pub etcd_prefix: String,
    /// Seconds after which etcd forgets a worker that fell silent.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, env = "BATON_ETCD_LEASE_TTL")]
    pub etcd_lease_ttl: u64,
    /// User name for etcd.
    #[arg(long, value_name = "NAME", env = "BATON_ETCD_USER")]
    pub etcd_user: Option<String>,
    /// File that holds the password for etcd.
    #[arg(long, value_name = "FILE", env = "BATON_ETCD_PASSWORD_FILE")]
    pub etcd_password_file: Option<PathBuf>,
    /// Certificate authority (PEM) that etcd's certificate must come from.
    #[arg(long, value_name = "FILE", env = "BATON_ETCD_CA")]
    pub etcd_ca: Option<PathBuf>,
    /// Client certificate (PEM) for etcd.
    #[arg(long, value_name = "FILE", requires = "etcd_key", env = "BATON_ETCD_CERT")]
    pub etcd_cert: Option<PathBuf>,
    /// Key (PEM) of the client certificate.
    #[arg(long, value_name = "FILE", requires = "etcd_cert", env = "BATON_ETCD_KEY")]
    pub etcd_key: Option<PathBuf>,
    /// Name in etcd's certificate, when it is not the host of the endpoint.
    #[arg(long, value_name = "NAME", requires = "etcd_ca", env = "BATON_ETCD_TLS_NAME")]
    pub etcd_tls_name: Option<String>,
}

/// How routers and workers find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Discovery {
    /// Workers register with the router; nothing else is needed.
    Embedded,
    /// Through etcd; several routers may share the workers.
    Etcd,
    /// The router is given a list of workers.
    Static,
}

/// Whether running requests move between decode workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Migration {
    /// They stay where they run.
    Off,
    /// They leave a worker that is told to leave.
    Drain,
    /// They also leave a worker that is much fuller than another one.
    Balance,
}

/// A way for KV blocks to travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// Shared memory, between processes of one user on one host.
    Shm,
    /// One-sided writes of a network device, through NIXL.
    Rdma,
    /// From one CUDA device to another, through NCCL.
    Nccl,
    /// TCP.
    Tcp,
}

/// The engine's sizes.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// Memory for the KV cache of each worker, such as 512M or 4G.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size, env = "BATON_KV_MEMORY")]
    pub kv_memory: Size,
    /// Tokens in a KV block.
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = at_least_one, env = "BATON_BLOCK_SIZE")]
    pub block_size: usize,
    /// Type of KV elements: f32, f16, bf16, fp8 or int8. Default: that of the weights.
    #[arg(long, value_name = "TYPE", value_parser = parse_kv_dtype, env = "BATON_KV_DTYPE")]
    pub kv_dtype: Option<KvDtype>,
    /// Sequences that run at once.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one, env = "BATON_MAX_RUNNING")]
    pub max_running: usize,
    /// Requests that may wait in a worker; more are refused.
    #[arg(long, value_name = "N", default_value_t = 1024, env = "BATON_MAX_WAITING")]
    pub max_waiting: usize,
    /// Tokens that one step computes at most: the size of a prefill chunk.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least_one, env = "BATON_TOKEN_BUDGET")]
    pub token_budget: usize,
    /// Milliseconds between two tokens to aim at: prompts that are computed beside running answers come in chunks that
    /// keep it, by what steps were measured to take. Default: chunks of the token budget.
    #[arg(long, value_name = "MS", value_parser = at_least_one, env = "BATON_ITL_TARGET")]
    pub itl_target: Option<usize>,
    /// Do not keep the KV of finished prompts for later ones that begin alike.
    #[arg(long, env = "BATON_NO_PREFIX_CACHE")]
    pub no_prefix_cache: bool,
    /// Threads that compute. Default: one per core, at most 64.
    #[arg(long, value_name = "N", value_parser = at_least_one, env = "BATON_THREADS")]
    pub threads: Option<usize>,
    /// Divide the model among so many ranks that compute each step together, each with its part of the weights and of the
    /// threads: heads, neurons and KV heads are divided, and must be divisible. Prefill and decode workers may have
    /// different numbers. On GPUs each rank has one of its own: with --device cuda:0, 2 takes cuda:0 and cuda:1, which NCCL
    /// connects (CUDA_VISIBLE_DEVICES says which GPUs these are); their KV does not travel over nccl. Not run on GPUs yet. On
    /// processors it is for trying out what devices do: threads alone compute as much.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one, env = "BATON_TENSOR_PARALLEL")]
    pub tensor_parallel: usize,
    /// Keep each thread that computes to a processor of its own: "auto" takes those that this process may use (by taskset,
    /// cpuset or container), or a list such as 0-3,8. The list then also says how many threads there are, unless
    /// --threads asks for fewer. `baton up` divides the processors among its workers.
    #[arg(long, value_name = "none|auto|CPUS", default_value = "none", env = "BATON_PIN_THREADS")]
    pub pin_threads: ThreadPinning,
    /// Round the weights of layers when loading: int8 or int4, perhaps with the number of weights that share a scale,
    /// as in int4:64. Half or a quarter of the memory of bf16, and as much faster per token.
    #[arg(long, value_name = "TYPE", env = "BATON_QUANTIZE")]
    pub quantize: Option<Quantisation>,
    /// How activations meet weights in bf16: auto takes what is faster on this processor, f32 rounds nothing (and widens
    /// the integers of quantised files), bf16 needs a processor with avx512_bf16. On a GPU they are in bf16; with auto those of
    /// prompts are rounded to fp8 where weights are in fp8 and the GPU multiplies such.
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = parse_activations, env = "BATON_ACTIVATIONS")]
    pub activations: Activations,
    /// What computes: cpu, cuda:N for a GPU of NVIDIA's, or auto for the first GPU if there is one. The GPU's part has been
    /// checked by an emulator, not run on a GPU yet: so the default is cpu. With --tensor-parallel it is the first rank's.
    #[arg(long, value_name = "auto|cpu|cuda:N", default_value = "cpu", env = "BATON_DEVICE")]
    pub device: Device,
    /// Share that KV takes, on a GPU, of the memory that weights and the largest step leave; --kv-memory is for processors.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, env = "BATON_GPU_MEMORY_UTILIZATION")]
    pub gpu_memory_utilization: f64,
    /// Directory for weights in the layout of the kernels, one copy for all processes of this host; "none": each
    /// process keeps its own. Default: a directory in the user's cache.
    #[arg(long, value_name = "DIR", env = "BATON_WEIGHT_CACHE")]
    pub weight_cache: Option<PathBuf>,
    /// Propose several tokens cheaply and verify them in one step of the model: answers are the same, and can come
    /// faster where a step is bound by reading weights, as with large models and few requests at a time. Decode
    /// workers do it; prefill workers ignore it.
    #[arg(long, value_enum, default_value_t = Speculate::Off, env = "BATON_SPECULATE")]
    pub speculate: Speculate,
    /// Directory or .gguf file of the draft model, for `--speculate draft`: smaller, with the same vocabulary. The
    /// model that is part of this program brings one. Its KV counts towards `--kv-memory`.
    /// On a GPU it is on the same one, or on the first rank's.
    #[arg(long, value_name = "DIR|FILE", env = "BATON_DRAFT_MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Tokens proposed for a request in one step at most. How many it is follows from how many were right.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one, env = "BATON_MAX_DRAFT_TOKENS")]
    pub max_draft_tokens: usize,
}

/// Who proposes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Speculate {
    /// Nobody: one token a step.
    Off,
    /// The text itself: what followed the same few tokens earlier. For answers that repeat their prompt.
    Ngram,
    /// A smaller model.
    Draft,
}

/// What is logged, and where traces go.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// What to log: error, warn, info, debug, trace, or rules such as info,baton_router=debug.
    #[arg(long, value_name = "FILTER", default_value = "info", env = "BATON_LOG")]
    pub log: String,
    /// How log lines look.
    #[arg(long, value_enum, default_value_t = LogFormat::Pretty, env = "BATON_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// Colours in log lines.
    #[arg(long, value_enum, default_value_t = LogColor::Auto, env = "BATON_LOG_COLOR")]
    pub log_color: LogColor,
    /// Send traces to this OpenTelemetry collector (gRPC), such as http://127.0.0.1:4317.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people: the time of day, the message, its fields.
    Pretty,
    /// For people who grep: one line with the full time and the module.
    Compact,
    /// For machines: one JSON object a line.
    Json,
}

/// Whether log lines are coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogColor {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Where settings come from.
#[derive(Clone, Debug, Args)]
pub struct LayerArgs {
    /// TOML file with a table for each role; flags and environment override it.
    #[arg(long, value_name = "FILE", env = "BATON_CONFIG")]
    pub config: Option<PathBuf>,
    /// Print every setting with its value and where it came from, and stop.
    #[arg(long)]
    pub print_config: bool,
}

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell to write the script for.
    pub shell: clap_complete::Shell,
}

impl CompletionsArgs {
    /// Writes the script to standard output.
    pub fn print(&self) {
        clap_complete::generate(self.shell, &mut Cli::command(), "baton", &mut std::io::stdout());
    }
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub usize);

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

pub(crate) fn parse_size(text: &str) -> Result<Size, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        unit => return Err(format!("unknown unit '{unit}'; use K, M, G or T (powers of 1024)")),
    };
    let number: usize = digits.parse().map_err(|_| format!("'{digits}' is not a whole number"))?;
    match number.checked_mul(1 << shift) {
        Some(bytes) if bytes > 0 => Ok(Size(bytes)),
        Some(_) => Err("must be more than 0".to_owned()),
        None => Err("is more than this machine can address".to_owned()),
    }
}

fn parse_activations(text: &str) -> Result<Activations, String> {
    Activations::from_name(text).ok_or_else(|| "expected auto, f32 or bf16".to_owned())
}

/// The type of KV that a flag names.
pub(crate) fn parse_kv_dtype(name: &str) -> Result<KvDtype, String> {
    KvDtype::from_name(name).ok_or_else(|| format!("expected one of {}", KvDtype::names()))
}

fn parse_kv_wire(name: &str) -> Result<WireFormat, String> {
    WireFormat::from_name(name).ok_or_else(|| format!("expected one of {}", WireFormat::names()))
}

pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("not a whole number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes() {
        let cases = [
            ("1", Ok(Size(1))),
            ("512M", Ok(Size(512 << 20))),
            ("4GiB", Ok(Size(4 << 30))),
            ("2k", Ok(Size(2048))),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_size(text), expected, "{text}");
        }
        for text in ["", "M", "0", "4X", "1.5G", "-1", "99999999999999T"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
