//! Both ends of the data plane over a worker's block pool: every worker may receive KV, and every worker may send it.

use std::sync::Arc;

use anyhow::Context;
use baton_cluster::WorkerRecord;
use baton_engine::EngineHandle;
use baton_handoff::TransportKind;
use baton_kv_cache::BlockStorage;
use baton_transfer::{
    Receiver, ReceiverConfig, ReceivingTransport, Sender, SenderConfig, SendingTransport, TransportCounts,
};
use baton_transport_nccl::{NcclReceiving, NcclSending};
use baton_transport_rdma::{RdmaReceiving, RdmaSending};
use baton_transport_shm::{ShmReceiving, ShmSending};
use baton_transport_tcp::{TcpReceiving, TcpSending};

use crate::config::{WorkerConfig, private_runtime_dir};

/// The direction of KV through a worker's data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDirection {
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

impl KvDirection {
    /// Both.
    pub const ALL: [KvDirection; 2] = [KvDirection::Sent, KvDirection::Received];

    /// "sent" or "received".
    pub fn name(self) -> &'static str {
        match self {
            KvDirection::Sent => "sent",
            KvDirection::Received => "received",
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
        for kind in config.unencrypted(&transports) {
            tracing::warn!("kv that travels over {kind} is not encrypted, nor is its control connection");
        }
        let storage = engine.storage();
        let receiving: anyhow::Result<_> =
            transports.iter().map(|&kind| receiving(kind, config, storage)).collect();
        let limits = ReceiverConfig {
            advertise_host: Some(config.data_host(&record.address)),
            ..ReceiverConfig::default()
        };
        let receiver = receiving
            .and_then(|receiving| Ok(Receiver::start(Arc::clone(storage), &limits, receiving)?))
            .context("cannot start receiving KV")?;
        let sending: anyhow::Result<_> =
            transports.iter().map(|&kind| sending(kind, config, storage)).collect();
        let sender = sending
            .and_then(|sending| Ok(Sender::start(Arc::clone(storage), SenderConfig::default(), sending)?))
            .context("cannot start sending KV")?;
        Ok(DataPlane { receiver, sender })
    }

    /// Counts of one transport in one direction.
    pub fn read(&self, direction: KvDirection, kind: TransportKind) -> TransportCounts {
        match direction {
            KvDirection::Sent => self.sender.counters().of(kind).read(),
            KvDirection::Received => self.receiver.counters().of(kind).read(),
        }
    }
}

/// The decode side of each transport.
fn receiving(
    kind: TransportKind,
    config: &WorkerConfig,
    storage: &Arc<BlockStorage>,
) -> anyhow::Result<Box<dyn ReceivingTransport>> {
    Ok(match kind {
        TransportKind::Shm => Box::new(ShmReceiving {
            dir: match &config.shm_dir {
                Some(dir) => dir.clone(),
                None => private_runtime_dir().context("no directory for the sockets of the shm transport")?,
            },
        }),
        TransportKind::Rdma => {
            Box::new(RdmaReceiving::start(storage, config.nixl.as_deref(), config.rdma_listen())?)
        }
        TransportKind::Nccl => {
            Box::new(NcclReceiving::start(storage, config.nccl.as_deref(), config.nccl_listen)?)
        }
        TransportKind::Tcp => {
            Box::new(TcpReceiving { tls: config.tls.clone(), ..TcpReceiving::new(config.data_listen) })
        }
    })
}

/// The prefill side of each transport.
fn sending(
    kind: TransportKind,
    config: &WorkerConfig,
    storage: &Arc<BlockStorage>,
) -> anyhow::Result<Box<dyn SendingTransport>> {
    Ok(match kind {
        TransportKind::Shm => Box::new(ShmSending::default()),
        TransportKind::Rdma => Box::new(RdmaSending::start(storage, config.nixl.as_deref())?),
        TransportKind::Nccl => Box::new(NcclSending::start(storage, config.nccl.as_deref())?),
        TransportKind::Tcp => Box::new(TcpSending { tls: config.tls.clone(), ..TcpSending::default() }),
    })
}
