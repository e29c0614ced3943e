//! Both ends of the data plane over a worker's block pool: every worker may receive KV, and every worker may send it.

use anyhow::Context;
use baton_cluster::WorkerRecord;
use baton_engine::EngineHandle;
use baton_handoff::TransportKind;
use baton_kv_transfer::{Receiver, ReceiverConfig, Sender, SenderConfig, TransportCounts};

use crate::config::{WorkerConfig, private_runtime_dir};

/// The direction of KV through a worker's data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Into other workers' blocks.
    Sent,
    /// Into its own.
    Received,
}

/// Moves KV. Cheap to clone; listeners and threads end with the last clone.
#[derive(Clone)]
pub struct DataPlane {
    /// Accepts writes of other workers into blocks of this one.
    pub receiver: Receiver,
    /// Writes into blocks of other workers. It connects when first used.
    pub sender: Sender,
}

impl Direction {
    /// Both.
    pub const ALL: [Direction; 2] = [Direction::Sent, Direction::Received];

    /// "sent" or "received".
    pub fn name(self) -> &'static str {
        match self {
            Direction::Sent => "sent",
            Direction::Received => "received",
        }
    }
}

impl DataPlane {
    /// Listens as configured.
    ///
    /// # Errors
    /// When a listener or a library cannot be opened.
    pub(crate) fn start(
        config: &WorkerConfig,
        record: &WorkerRecord,
        engine: &EngineHandle,
    ) -> anyhow::Result<DataPlane> {
        let transports = config.usable_transports(engine.storage().is_divided())?;
        if transports.len() < config.transports.len() {
            tracing::info!("blocks are on several devices; nccl is not offered");
        }
        let offers = |kind| transports.contains(&kind);
        let shm_dir = match &config.shm_dir {
            _ if !offers(TransportKind::Shm) => None,
            Some(dir) => Some(dir.clone()),
            None => Some(private_runtime_dir().context("no directory for the sockets of the shm transport")?),
        };
        let receiver = ReceiverConfig {
            rdma_listen: offers(TransportKind::Rdma).then(|| config.rdma_listen()),
            nixl: config.nixl.clone(),
            nccl_listen: offers(TransportKind::Nccl).then_some(config.nccl_listen),
            nccl: config.nccl.clone(),
            tcp_listen: offers(TransportKind::Tcp).then_some(config.data_listen),
            advertise_host: Some(config.data_host(&record.address)),
            shm_dir,
            tls: config.tls.clone(),
            ..ReceiverConfig::default()
        };
        if config.tls.is_some() && offers(TransportKind::Rdma) {
            tracing::warn!("kv that travels over rdma is not encrypted, nor is its control connection");
        }
        let receiver =
            Receiver::start(engine.storage().clone(), receiver).context("cannot start receiving KV")?;
        let sender = SenderConfig {
            transports,
            nixl: config.nixl.clone(),
            nccl: config.nccl.clone(),
            tls: config.tls.clone(),
            ..SenderConfig::default()
        };
        let sender = Sender::start(engine.storage().clone(), sender).context("cannot start sending KV")?;
        Ok(DataPlane { receiver, sender })
    }

    /// Counts of one transport in one direction.
    pub fn read(&self, direction: Direction, kind: TransportKind) -> TransportCounts {
        match direction {
            Direction::Sent => self.sender.counters().of(kind).read(),
            Direction::Received => self.receiver.counters().of(kind).read(),
        }
    }
}
