//! How KV travels between workers: the flags of a worker, and the same flags for a child process.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use baton_command::{Transport, at_least_one};
use baton_kv_cache::WireFormat;
use baton_worker::{TransportKind, WorkerConfig};
use clap::{Args, ValueEnum};
use tracing::debug;

/// A free port that only this host reaches.
const FREE_LOCAL_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// How KV travels between workers.
#[derive(Clone, Debug, Args)]
pub(crate) struct TransferArgs {
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
    #[arg(long, value_name = "ADDR", default_value_t = FREE_LOCAL_PORT, env = "BATON_DATA_LISTEN")]
    pub data_listen: SocketAddr,
    /// Address and port at which senders set up rdma. Port 0 takes a free one. Default: a free port at the
    /// address of --data-listen.
    #[arg(long, value_name = "ADDR", env = "BATON_RDMA_LISTEN")]
    pub rdma_listen: Option<SocketAddr>,
    /// NIXL's library for rdma: libnixl_capi.so or its folder. Default: where the system's loader finds it.
    #[arg(long, value_name = "PATH", env = "BATON_NIXL")]
    pub nixl: Option<PathBuf>,
    /// Address and port at which peers set up nccl with a decode worker. Port 0 takes a free one.
    #[arg(long, value_name = "ADDR", default_value_t = FREE_LOCAL_PORT, env = "BATON_NCCL_LISTEN")]
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
    /// Until the first token, any computation of the prefill worker counts as progress; while the decode worker waits
    /// for blocks, any of its own does. From then on KV must arrive at least every 30 seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, env = "BATON_HANDOFF_DEADLINE")]
    pub handoff_deadline: u64,
    /// Milliseconds to fetch a cached prefix from another worker. What has not arrived by then is computed.
    /// Default: about the time that computing it takes.
    #[arg(long, value_name = "MS", value_parser = at_least_one, env = "BATON_FETCH_DEADLINE")]
    pub fetch_deadline: Option<usize>,
}

impl TransferArgs {
    /// Makes these settings those of a worker. Its TLS is set before.
    pub(crate) fn configure(self, config: &mut WorkerConfig) {
        config.kv_wire = self.kv_wire;
        config.transports = match self.transports.is_empty() {
            // What rdma carries is not encrypted: with certificates it has to be asked for.
            true if config.tls.is_some() => vec![TransportKind::Shm, TransportKind::Tcp],
            true => default_transports(self.nixl.as_deref()),
            false => self.transports.into_iter().map(transport).collect(),
        };
        config.rdma_listen = self.rdma_listen;
        config.nixl = self.nixl;
        config.nccl_listen = self.nccl_listen;
        config.nccl = self.nccl;
        config.data_listen = self.data_listen;
        config.data_host = self.data_host;
        config.shm_dir = self.shm_dir;
        config.handoff_deadline = Duration::from_secs(self.handoff_deadline);
        config.fetch_deadline = self.fetch_deadline.map(|ms| Duration::from_millis(ms as u64));
    }

    /// Whether these settings say how KV travels, so that there are to be workers that hand it over.
    pub(crate) fn asks_for_handoffs(&self) -> bool {
        // Every field is named, so that none is forgotten. Images name libraries that they bring, and deadlines ask for nothing.
        let TransferArgs {
            transports,
            kv_wire,
            data_listen,
            rdma_listen,
            nixl: _,
            nccl_listen,
            nccl: _,
            data_host,
            shm_dir,
            handoff_deadline: _,
            fetch_deadline: _,
        } = self;
        !transports.is_empty()
            || kv_wire.is_some()
            || rdma_listen.is_some()
            || data_host.is_some()
            || shm_dir.is_some()
            || [*data_listen, *nccl_listen] != [FREE_LOCAL_PORT; 2]
    }

    /// These settings as flags of a worker.
    pub(crate) fn flags(&self) -> Vec<String> {
        // Every field is named, so that none is forgotten.
        let TransferArgs {
            transports,
            kv_wire,
            data_listen,
            rdma_listen,
            nixl,
            nccl_listen,
            nccl,
            data_host,
            shm_dir,
            handoff_deadline,
            fetch_deadline,
        } = self;
        let names = transports.iter().map(|transport| {
            transport.to_possible_value().expect("no transport is hidden").get_name().to_owned()
        });
        let names = names.collect::<Vec<_>>().join(",");
        let path = |flag: &str, path: &Option<PathBuf>| {
            path.as_ref().map(|path| format!("{flag}={}", path.display()))
        };
        let flags = [
            (!names.is_empty()).then(|| format!("--transports={names}")),
            kv_wire.map(|wire| format!("--kv-wire={}", wire.name())),
            Some(format!("--data-listen={data_listen}")),
            rdma_listen.map(|address| format!("--rdma-listen={address}")),
            path("--nixl", nixl),
            Some(format!("--nccl-listen={nccl_listen}")),
            path("--nccl", nccl),
            data_host.as_ref().map(|host| format!("--data-host={host}")),
            path("--shm-dir", shm_dir),
            Some(format!("--handoff-deadline={handoff_deadline}")),
            fetch_deadline.map(|ms| format!("--fetch-deadline={ms}")),
        ];
        flags.into_iter().flatten().collect()
    }
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

fn parse_kv_wire(name: &str) -> Result<WireFormat, String> {
    WireFormat::from_name(name).ok_or_else(|| format!("expected one of {}", WireFormat::names()))
}
