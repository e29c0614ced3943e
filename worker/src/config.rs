//! A worker's configuration. It is checked once, before anything is opened.

use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use baton_cluster::{DiscoveryConfig, Role, WorkerId};
use baton_handoff::TransportKind;
use baton_kv_cache::{KvDtype, WireFormat};
use baton_kv_store::{DiskConfig, HostConfig, ObjectConfig, StoreConfig};
use baton_model::{Activations, CpuList, CpuListError, Quantisation};
use baton_tls::Tls;
use baton_worker_tiers::TiersConfig;

use crate::device::ComputeDevice;

/// The configuration of one worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Which phase it serves.
    pub role: Role,
    /// Its name among all workers.
    pub id: WorkerId,
    /// Where gRPC, metrics and probes are served; port 0 takes a free one.
    pub listen: SocketAddr,
    /// URL at which others reach `listen`. `None`: the bound address.
    pub advertise: Option<String>,
    /// Directory of a Hugging Face model, or a GGUF file.
    pub model: PathBuf,
    /// Name that clients ask for. `None`: [that of the path](name_of).
    pub model_name: Option<String>,
    /// Size of the block pool. Bytes are those of this machine's memory: a GPU has as many blocks as fit there, and a simulated
    /// device as many as would.
    pub kv: KvMemory,
    /// Tokens in a block.
    pub block_size: usize,
    /// Type of KV elements. `None`: that of the weights, on GPUs bf16.
    pub kv_dtype: Option<KvDtype>,
    /// How KV travels over TCP. `None`: as the other worker prefers.
    pub kv_wire: Option<WireFormat>,
    /// Sequences that run at once.
    pub max_running: usize,
    /// Requests that may wait; more are refused.
    pub max_waiting: usize,
    /// Tokens that one step computes at most.
    pub token_budget: usize,
    /// Target time between two tokens while prompts are computed in the same steps.
    pub itl_target: Option<Duration>,
    /// Whether blocks are shared between requests of equal prefix.
    pub prefix_cache: bool,
    /// Bytes of host memory for KV that the pool no longer holds; `None`: no such tier.
    pub host_kv_bytes: Option<u64>,
    /// A directory in memory that has them, for all workers of this machine that name it; `None`: memory of this process.
    pub host_kv_dir: Option<PathBuf>,
    /// A directory of this worker alone for KV that outlives it, and the bytes of its files; `None`: no such tier.
    pub disk_kv: Option<(PathBuf, u64)>,
    /// The URL of an object store for KV, which workers may share, and the bytes that this one may write; `None`: no such tier.
    pub object_kv: Option<(String, u64)>,
    /// The file of the key that seals KV on disk and in the object store; `None`: it is plain.
    pub kv_key_file: Option<PathBuf>,
    /// Threads that compute. `None`: one for each processor that this process may use, or of `pin_threads`.
    pub threads: Option<usize>,
    /// Ranks among which the model is divided, each with its share of the threads or with a GPU of its own.
    pub tensor_parallel: usize,
    /// The processors that these threads are pinned to.
    pub pin_threads: ThreadPinning,
    /// Quantises weights to integers.
    pub quantise: Option<Quantisation>,
    /// How activations enter products.
    pub activations: Activations,
    /// On GPUs: the bits of products do not depend on the other requests of a step.
    pub is_deterministic: bool,
    /// The device to compute on.
    pub device: ComputeDevice,
    /// JSON file of what steps take until some were measured. `None`: a roofline of the model on the device.
    pub step_profile: Option<PathBuf>,
    /// The share of a GPU's memory for blocks, of what weights and the largest batch leave. Of a simulated GPU: the share of all
    /// its memory for weights and blocks.
    pub gpu_memory_utilisation: f64,
    /// Directory for packed weights, which processes of this host share; `None`: each keeps its own.
    pub weight_cache: Option<PathBuf>,
    /// The drafter for speculative decoding. Only decode workers speculate.
    pub drafter: Option<DrafterConfig>,
    /// How prompts with passages are blended. `None`: they are computed in full.
    pub blend: Option<BlendSettings>,
    /// Most tokens that are drafted for a sequence in one step.
    pub max_draft_tokens: usize,
    /// How routers find this worker.
    pub discovery: DiscoveryConfig,
    /// How KV may travel, best first.
    pub transports: Vec<TransportKind>,
    /// Where KV is received over TCP; port 0 takes a free one.
    pub data_listen: SocketAddr,
    /// Where the control connections of rdma are listened for; port 0 takes a free one. `None`: a free port
    /// of [`data_listen`](Self::data_listen)'s address, which is advertised for both.
    pub rdma_listen: Option<SocketAddr>,
    /// NIXL's C library, or its folder. `None`: where the system finds it.
    pub nixl: Option<PathBuf>,
    /// Where a decode worker listens for the control connections of nccl; port 0 takes a free one.
    pub nccl_listen: SocketAddr,
    /// NCCL's library, or its folder. `None`: where the system finds it.
    pub nccl: Option<PathBuf>,
    /// Host at which others reach `data_listen`, `rdma_listen` and `nccl_listen`. `None`: that of `advertise`.
    pub data_host: Option<String>,
    /// Directory of the shared-memory transport's sockets. `None`: a private one of this user.
    pub shm_dir: Option<PathBuf>,
    /// Certificates for TLS between this worker and others. `None`: no TLS.
    pub tls: Option<Tls>,
    /// How long a handoff may make no progress: from its begin, or from the prefill worker's last report of progress, to its
    /// end.
    pub handoff_deadline: Duration,
    /// Deadline for fetching a cached prefix from another worker. `None`: about as long as computing it would take.
    pub fetch_deadline: Option<Duration>,
    /// Time for running requests to migrate or finish when the worker drains.
    pub drain_timeout: Duration,
}

/// The processors that computing threads are pinned to, one thread to each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThreadPinning {
    /// Threads are not pinned.
    None,
    /// The processors that this process may use.
    Auto,
    /// These.
    Cpus(CpuList),
}

impl ThreadPinning {
    /// The processors for so many threads; `None` when threads are not pinned.
    ///
    /// # Errors
    /// When there are fewer, or the system does not say which there are.
    pub fn cpus(&self, threads: Option<usize>) -> Result<Option<CpuList>, CpuListError> {
        let cpus = match self {
            ThreadPinning::None => return Ok(None),
            ThreadPinning::Auto => CpuList::allowed()?,
            ThreadPinning::Cpus(cpus) => cpus.clone(),
        };
        threads.map_or(Ok(cpus.clone()), |num_threads| cpus.first(num_threads)).map(Some)
    }
}

impl FromStr for ThreadPinning {
    type Err = CpuListError;

    fn from_str(text: &str) -> Result<ThreadPinning, CpuListError> {
        match text {
            "none" => Ok(ThreadPinning::None),
            "auto" => Ok(ThreadPinning::Auto),
            list => list.parse().map(ThreadPinning::Cpus),
        }
    }
}

impl fmt::Display for ThreadPinning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ThreadPinning::None => f.write_str("none"),
            ThreadPinning::Auto => f.write_str("auto"),
            ThreadPinning::Cpus(cpus) => cpus.fmt(f),
        }
    }
}

/// The drafter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DrafterConfig {
    /// Proposes what followed the same few tokens earlier in the sequence.
    Ngram,
    /// A smaller model with the same vocabulary, in this directory.
    Model(PathBuf),
}

/// How prompts with passages are blended, and what they may lose by it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlendSettings {
    /// Memory for the KV of passages that are kept.
    pub max_store_bytes: usize,
    /// Mean divergence of an answer's first tokens from those of a full prefill, in nats, above which nothing is blended.
    pub max_kl: f64,
    /// The part of blended prompts, from 0 to 1, that is also computed in full, to compare.
    pub audit: f64,
}

impl Default for BlendSettings {
    fn default() -> BlendSettings {
        BlendSettings { max_store_bytes: 1 << 30, max_kl: 0.02, audit: 0.01 }
    }
}

/// How large the block pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMemory {
    /// So many blocks.
    Blocks(usize),
    /// As many blocks as fit into so many bytes.
    Bytes(usize),
}

impl KvMemory {
    /// Blocks, when each takes `block_bytes`.
    ///
    /// # Errors
    /// When not even one fits.
    pub fn num_blocks(self, block_bytes: usize) -> Result<usize, ConfigError> {
        match self {
            KvMemory::Blocks(num_blocks) => Ok(num_blocks),
            KvMemory::Bytes(bytes) if bytes >= block_bytes => Ok(bytes / block_bytes),
            KvMemory::Bytes(bytes) => Err(ConfigError::KvMemoryTooSmall { bytes, block_bytes }),
        }
    }
}

/// A configuration that cannot work, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A number that must not be 0.
    #[error("{0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// Not one block.
    #[error("--kv-memory is {bytes} bytes, but one KV block of this model takes {block_bytes}; give it more")]
    KvMemoryTooSmall {
        /// What was given.
        bytes: usize,
        /// What one block takes.
        block_bytes: usize,
    },
    /// More than the process may have.
    #[error(
        "KV takes {bytes} bytes of the host's memory (--host-kv, and --kv-memory where a processor computes), but this process may \
         use {limit} (the machine's memory, or the limit of its control group); give it less, and leave room for the weights"
    )]
    KvMemoryTooLarge {
        /// What was given.
        bytes: usize,
        /// What the process may use.
        limit: usize,
    },
    /// Not one block on a GPU.
    #[error(
        "--gpu-memory-utilization leaves {bytes} bytes for KV, but one block takes {block_bytes}, a draft model's part \
         included; give it more, or make --token-budget or --max-running smaller"
    )]
    GpuMemoryTooSmall {
        /// What is left.
        bytes: usize,
        /// What one block takes.
        block_bytes: usize,
    },
    /// No share of anything.
    #[error("--gpu-memory-utilization is {0}; expected a number above 0 and at most 1")]
    Utilisation(f64),
    /// No divergence.
    #[error("--blend-max-kl is {0}; expected nats, above 0")]
    BlendMaxKl(f64),
    /// No part of anything.
    #[error("--blend-audit is {0}; expected a number from 0 to 1")]
    BlendAudit(f64),
    /// Other workers cannot connect to "any address".
    #[error("--listen {listen} is no address that others can connect to; say with --advertise which is")]
    Unadvertised {
        /// What was given.
        listen: SocketAddr,
    },
    /// Not a URL.
    #[error("--advertise is {0:?}; expected http://host:port")]
    Advertise(String),
    /// With TLS it is https, without http.
    #[error("--advertise is {url:?}; this worker is reached by {expected}")]
    AdvertisedScheme {
        /// What was given.
        url: String,
        /// What it should begin with.
        expected: &'static str,
    },
    /// Other workers would connect to their own loopback, or be refused.
    #[error(
        "{announced_by} announces {host} to other workers, but {flag} {listen} is reached from this host alone; give {flag} an \
         address that they reach, such as 0.0.0.0:{}", listen.port()
    )]
    LoopbackListener {
        /// The flag that names the host.
        announced_by: &'static str,
        /// Where others look for KV's listeners.
        host: String,
        /// The flag of the listener.
        flag: &'static str,
        /// Its address.
        listen: SocketAddr,
    },
    /// A rank without a thread.
    #[error(
        "--threads is {threads}, but --tensor-parallel {num_ranks} needs a thread for each rank; give more threads, or \
         fewer ranks"
    )]
    TooFewThreads {
        /// What was given.
        threads: usize,
        /// The tensor-parallel degree.
        num_ranks: usize,
    },
    /// A rank without a GPU.
    #[error(
        "--tensor-parallel {num_ranks} with --device cuda:{ordinal} takes {num_ranks} GPUs, from cuda:{ordinal} on, but there \
         are {num_devices} in all; take a smaller degree, or let CUDA_VISIBLE_DEVICES name more"
    )]
    TooFewGpus {
        /// The first.
        ordinal: u32,
        /// The tensor-parallel degree.
        num_ranks: usize,
        /// That this process sees.
        num_devices: usize,
    },
    /// Communicators reach the blocks of one GPU.
    #[error(
        "ranks on several GPUs do not exchange KV over nccl, and --transports names nothing else; add tcp"
    )]
    OnlyNccl,
    /// A simulated device has nothing that the setting could change.
    #[error("--device {device} computes nothing; leave out {flag}")]
    NotSimulated {
        /// What was given.
        device: ComputeDevice,
        /// What contradicts it.
        flag: &'static str,
    },
    /// Tiers hold what the prefix cache held.
    #[error("{0} keeps what --no-prefix-cache does not keep; leave out one of them")]
    TierWithoutCache(&'static str),
    /// Host memory is never sealed.
    #[error("--kv-key-file seals KV on disk and in an object store; give --disk-kv or --object-kv, too")]
    NothingToSeal,
    /// No way for KV to travel.
    #[error("--transports is empty; give some of shm, rdma, nccl and tcp")]
    NoTransport,
    /// Discovery cannot work.
    #[error(transparent)]
    Discovery(#[from] baton_cluster::DiscoveryError),
}

impl WorkerConfig {
    /// The tiers below its pool.
    pub(crate) fn tiers(&self) -> TiersConfig {
        let disk = self.disk_kv.clone().map(|(dir, max_bytes)| DiskConfig { dir, max_bytes });
        let object = self.object_kv.clone();
        let object =
            object.map(|(url, max_bytes)| ObjectConfig { url, worker: self.id.to_string(), max_bytes });
        let dir = self.host_kv_dir.clone();
        let host = self.host_kv_bytes.map(|max_bytes| HostConfig { max_bytes, dir });
        let stores = StoreConfig { host, disk, object, key: None };
        TiersConfig { stores, key_file: self.kv_key_file.clone() }
    }

    /// Defaults for everything that has one.
    pub fn new(role: Role, id: WorkerId, model: PathBuf, discovery: DiscoveryConfig) -> WorkerConfig {
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        WorkerConfig {
            role,
            id,
            listen: any_port,
            advertise: None,
            model,
            model_name: None,
            kv: KvMemory::Bytes(512 << 20),
            block_size: 16,
            kv_dtype: None,
            kv_wire: None,
            max_running: 64,
            max_waiting: 1024,
            token_budget: 512,
            itl_target: None,
            prefix_cache: true,
            host_kv_bytes: None,
            host_kv_dir: None,
            disk_kv: None,
            object_kv: None,
            kv_key_file: None,
            threads: None,
            tensor_parallel: 1,
            pin_threads: ThreadPinning::None,
            quantise: None,
            activations: Activations::Auto,
            is_deterministic: false,
            step_profile: None,
            device: ComputeDevice::Cpu,
            gpu_memory_utilisation: 0.9,
            weight_cache: None,
            drafter: None,
            blend: None,
            max_draft_tokens: 8,
            discovery,
            transports: vec![TransportKind::Shm, TransportKind::Tcp],
            data_listen: any_port,
            rdma_listen: None,
            nixl: None,
            nccl_listen: any_port,
            nccl: None,
            data_host: None,
            shm_dir: None,
            tls: None,
            handoff_deadline: Duration::from_secs(60),
            fetch_deadline: None,
            drain_timeout: Duration::from_secs(30),
        }
    }

    /// Checks what can be checked without opening anything.
    ///
    /// # Errors
    /// Names the flag and what to do.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let counts = [
            ("--block-size", self.block_size),
            ("--max-running", self.max_running),
            ("--max-waiting", self.max_waiting),
            ("--token-budget", self.token_budget),
            ("--max-draft-tokens", self.max_draft_tokens),
            ("--threads", self.threads.unwrap_or(1)),
            ("--tensor-parallel", self.tensor_parallel),
            ("--handoff-deadline", usize::from(!self.handoff_deadline.is_zero())),
            ("the number of KV blocks", if let KvMemory::Blocks(num) = self.kv { num } else { 1 }),
        ];
        if let Some((name, _)) = counts.into_iter().find(|&(_, count)| count == 0) {
            return Err(ConfigError::Zero(name));
        }
        if !(self.gpu_memory_utilisation > 0.0 && self.gpu_memory_utilisation <= 1.0) {
            return Err(ConfigError::Utilisation(self.gpu_memory_utilisation));
        }
        if let Some(BlendSettings { max_kl, audit, .. }) = self.blend {
            if !(max_kl > 0.0 && max_kl.is_finite()) {
                return Err(ConfigError::BlendMaxKl(max_kl));
            }
            if !(0.0..=1.0).contains(&audit) {
                return Err(ConfigError::BlendAudit(audit));
            }
        }
        let is_on_cpu = self.device == ComputeDevice::Cpu;
        if let Some(threads) = self.threads.filter(|&threads| is_on_cpu && threads < self.tensor_parallel) {
            return Err(ConfigError::TooFewThreads { threads, num_ranks: self.tensor_parallel });
        }
        if let device @ ComputeDevice::Sim(_) = self.device
            && let Some(flag) = self.not_simulated()
        {
            return Err(ConfigError::NotSimulated { device, flag });
        }
        let tiers = [
            ("--host-kv", self.host_kv_bytes.is_some()),
            ("--disk-kv", self.disk_kv.is_some()),
            ("--object-kv", self.object_kv.is_some()),
        ];
        if let Some((flag, _)) = tiers.into_iter().find(|&(_, is_set)| is_set && !self.prefix_cache) {
            return Err(ConfigError::TierWithoutCache(flag));
        }
        if self.kv_key_file.is_some() && self.disk_kv.is_none() && self.object_kv.is_none() {
            return Err(ConfigError::NothingToSeal);
        }
        if self.transports.is_empty() {
            return Err(ConfigError::NoTransport);
        }
        self.check_listeners(&self.address(self.listen)?)?;
        self.discovery.validate()?;
        Ok(())
    }

    /// A setting that a simulated device contradicts.
    fn not_simulated(&self) -> Option<&'static str> {
        let settings = [
            ("--quantize", self.quantise.is_some()),
            ("--activations", self.activations != Activations::Auto),
            ("--deterministic", self.is_deterministic),
            ("--threads", self.threads.is_some()),
            ("--pin-threads", self.pin_threads != ThreadPinning::None),
            // Its KV is hashes: they do not survive rounding.
            ("--kv-dtype", self.kv_dtype.is_some()),
            ("--kv-wire", self.kv_wire.is_some_and(|wire| wire != WireFormat::AsIs)),
            // No draft would be right.
            ("--speculate", self.drafter.is_some()),
        ];
        settings.into_iter().find(|&(_, is_set)| is_set).map(|(flag, _)| flag)
    }

    /// The model's name.
    pub fn model_name(&self) -> String {
        self.model_name.clone().unwrap_or_else(|| name_of(&self.model))
    }
}

/// The default name of a model: its directory's, or its file's without `.gguf` and without the number of a part.
pub fn name_of(model: &Path) -> String {
    let name = model.file_name().map_or("model".into(), |name| name.to_string_lossy());
    let Some(stem) = name.strip_suffix(".gguf") else { return name.into_owned() };
    let whole = match stem.rsplit_once("-00001-of-") {
        Some((whole, count)) if count.len() == 5 => whole,
        _ => stem,
    };
    whole.to_owned()
}

/// A private directory of this user, the same for all workers of the user. It need not exist.
///
/// # Errors
/// When the user is unknown.
pub fn private_runtime_dir() -> std::io::Result<PathBuf> {
    if let Some(dir) = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        return Ok(PathBuf::from(dir).join("baton"));
    }
    let uid = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self")?);
    Ok(std::env::temp_dir().join(format!("baton-{uid}")))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn config() -> WorkerConfig {
        let discovery = DiscoveryConfig::Embedded { router: "http://127.0.0.1:8080".into(), key: None };
        WorkerConfig::new(Role::Prefill, "p0".into(), "/models/tiny".into(), discovery)
    }

    pub(crate) fn with(change: impl FnOnce(&mut WorkerConfig)) -> WorkerConfig {
        let mut config = config();
        change(&mut config);
        config
    }

    fn simulated(change: impl FnOnce(&mut WorkerConfig)) -> WorkerConfig {
        let mut config = with(|c| c.device = ComputeDevice::Sim(baton_cost::GpuKind::H100));
        change(&mut config);
        config
    }

    #[test]
    fn what_cannot_work_is_refused_with_what_to_do() {
        let cases = [
            (with(|c| c.max_running = 0), "--max-running is 0"),
            (with(|c| c.max_draft_tokens = 0), "--max-draft-tokens is 0"),
            (with(|c| c.tensor_parallel = 0), "--tensor-parallel is 0"),
            (
                with(|c| (c.threads, c.tensor_parallel) = (Some(3), 4)),
                "--threads is 3, but --tensor-parallel 4 needs a thread for each rank",
            ),
            (with(|c| c.kv = KvMemory::Blocks(0)), "number of KV blocks is 0"),
            (with(|c| c.transports.clear()), "give some of shm, rdma, nccl and tcp"),
            (with(|c| c.listen = ([0, 0, 0, 0], 80).into()), "say with --advertise"),
            (with(|c| c.advertise = Some("host:80".into())), "expected http://host:port"),
            (with(|c| c.advertise = Some("http://host".into())), "expected http://host:port"),
            (with(|c| c.advertise = Some("https://host:1".into())), "reached by http"),
            (
                with(|c| c.blend = Some(BlendSettings { max_kl: 0.0, ..Default::default() })),
                "--blend-max-kl is 0",
            ),
            (
                with(|c| c.blend = Some(BlendSettings { audit: 1.5, ..Default::default() })),
                "--blend-audit is 1.5",
            ),
            (with(|c| c.handoff_deadline = Duration::ZERO), "--handoff-deadline is 0"),
            (with(|c| c.kv_key_file = Some("/key".into())), "give --disk-kv or --object-kv"),
            (with(|c| (c.prefix_cache, c.object_kv) = (false, Some(("s3://kv".into(), 1)))), "--object-kv"),
            (simulated(|c| c.kv_dtype = Some(KvDtype::Int8)), "leave out --kv-dtype"),
            (
                simulated(|c| c.kv_wire = Some(WireFormat::Int8)),
                "sim:H100 computes nothing; leave out --kv-wire",
            ),
            (simulated(|c| c.drafter = Some(DrafterConfig::Ngram)), "leave out --speculate"),
            (simulated(|c| c.threads = Some(2)), "leave out --threads"),
        ];
        for (config, expected) in cases {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} does not say {expected:?}");
        }
        assert!(config().validate().is_ok());
        assert!(simulated(|c| c.tensor_parallel = 4).validate().is_ok());
        // On GPUs a rank has a device, however many threads there are.
        let on_gpus =
            with(|c| (c.threads, c.tensor_parallel, c.device) = (Some(3), 4, ComputeDevice::Cuda(0)));
        assert!(on_gpus.validate().is_ok());
        // The first of them computes a draft model, too.
        let draft = Some(DrafterConfig::Model("/models/draft".into()));
        let drafting = |num_ranks| {
            with(|c| {
                (c.drafter, c.tensor_parallel, c.device) = (draft.clone(), num_ranks, ComputeDevice::Cuda(0))
            })
        };
        assert!([1, 2].into_iter().all(|num_ranks| drafting(num_ranks).validate().is_ok()));
    }

    #[test]
    fn threads_take_the_first_of_their_processors() {
        let cpus = |text: &str, threads| {
            let pinning = text.parse::<ThreadPinning>().unwrap();
            assert_eq!(pinning.to_string(), text);
            pinning
                .cpus(threads)
                .map(|cpus| cpus.map(|cpus| cpus.to_string()))
                .map_err(|error| error.to_string())
        };
        assert_eq!(cpus("none", Some(4)), Ok(None));
        assert_eq!(cpus("auto", None), Ok(Some(CpuList::allowed().unwrap().to_string())));
        assert_eq!(cpus("4-7,9", None), Ok(Some("4-7,9".into())));
        assert_eq!(cpus("4-7,9", Some(2)), Ok(Some("4-5".into())));
        assert_eq!(cpus("4-7,9", Some(6)), Err("6 CPUs are needed, and there are 5: 4-7,9".into()));
    }

    #[test]
    fn models_are_named_by_their_paths() {
        for (path, name) in
            [("/models/Llama-3.2", "Llama-3.2"), ("/models/qwen-q4_k_m.gguf", "qwen-q4_k_m"), ("/", "model")]
        {
            assert_eq!(name_of(Path::new(path)), name);
        }
        assert_eq!(config().model_name(), "tiny");
    }

    #[test]
    fn memory_becomes_blocks() {
        assert_eq!(KvMemory::Bytes(2047).num_blocks(1024).unwrap(), 1);
        let error = KvMemory::Bytes(1023).num_blocks(1024).unwrap_err().to_string();
        assert!(error.contains("takes 1024"), "{error}");
    }
}
