//! Measures every transport from this worker's blocks to those of a decode worker, with the sender that handoffs use.

use std::{sync::Arc, time::Duration};

use baton_handoff::{Grant, TransportKind, TransportOffer};
use baton_kv_cache::{KvFormat, KvShard, WireFormat};
use baton_proto::{
    kv_format_from_proto, kv_format_to_proto,
    worker::{self as proto, decode_client::DecodeClient},
};
use baton_transfer::{copy_rate, stream_rate};
use baton_worker_messages::grant_from_proto;
use tokio::{sync::Semaphore, time::timeout};
use tonic::Status;

use crate::{scratch::MAX_SCRATCH_BLOCKS, server::MAX_MESSAGE_BYTES, worker::Worker};

/// How long connecting to the decode worker may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the whole measurement may take. The decode worker lends blocks for the same time.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Measures one decode worker at a time.
#[derive(Clone)]
pub struct Prober {
    worker: Arc<Worker>,
    only_one: Arc<Semaphore>,
}

impl Prober {
    /// Measures with blocks of `worker`.
    pub fn new(worker: Arc<Worker>) -> Prober {
        Prober { worker, only_one: Arc::new(Semaphore::new(1)) }
    }

    /// Measures the transports to the decode worker at `address`.
    ///
    /// # Errors
    /// `UNAVAILABLE` when either worker is busy or the decode worker cannot be reached; else what the decode worker says.
    pub async fn probe(&self, address: &str) -> Result<proto::ProbeReport, Status> {
        let Ok(_permit) = self.only_one.try_acquire() else {
            return Err(Status::unavailable("another measurement is running"));
        };
        let _busy = self.worker.lifecycle().token();
        timeout(TOTAL_TIMEOUT, self.measure(address))
            .await
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("the measurement took too long")))
    }

    async fn measure(&self, address: &str) -> Result<proto::ProbeReport, Status> {
        let scratch = Arc::new(self.worker.reserve_scratch(MAX_SCRATCH_BLOCKS).await?);
        // This comes before blocks are lent, because the lease is short.
        let (copy_bytes_per_second, stream_bytes_per_second) = self.limits().await?;
        let dialer = self.worker.dialer();
        let endpoint = dialer
            .endpoint(address)
            .map_err(|error| Status::invalid_argument(format!("decode_address: {error}")))?;
        let channel = dialer
            .connect(endpoint.connect_timeout(CONNECT_TIMEOUT))
            .await
            .map_err(|error| Status::unavailable(format!("no decode worker at {address}: {error}")))?;
        let mut client = DecodeClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let request = proto::LendRequest {
            max_blocks: scratch.blocks().len() as u32,
            kv_format: Some(kv_format_to_proto(self.worker.kv_format())),
        };
        // The lease lasts as long as the stream.
        let mut lease = client.lend(request).await?.into_inner();
        let loan =
            lease.message().await?.ok_or_else(|| Status::unavailable("the decode worker lent nothing"))?;
        let format =
            loan.kv_format.ok_or_else(|| Status::internal("the decode worker did not say what it lent"))?;
        let format = kv_format_from_proto(format).map_err(|error| Status::internal(error.to_string()))?;
        let peer = KvShard::of_format(&format, 0).map_err(|error| Status::internal(error.to_string()))?;
        let mut grants: Vec<_> = loan.grants.into_iter().map(grant_from_proto).collect();
        let choice = grants.pop().ok_or_else(|| Status::unavailable("the decode worker lent nothing"))?;

        let mut num_bytes = 0;
        let num_each = grants.len() / choice.offers.len().max(1);
        let mut transports = Vec::new();
        for kind in TransportKind::ALL {
            let counts = self.worker.data_plane().sender.counters().of(kind).read();
            let mut probed = proto::ProbedTransport {
                transport: kind.name().to_owned(),
                num_routes: counts.routes,
                num_fallbacks: counts.fallbacks,
                ..proto::ProbedTransport::default()
            };
            let measured = match self.offer(kind, &choice) {
                Ok(offer) => {
                    let own = grants.split_off(grants.len().saturating_sub(num_each));
                    let keep = Arc::clone(&scratch);
                    self.worker.data_plane().sender.measure(&peer, offer, &own, scratch.blocks(), keep).await
                }
                Err(why) => Err(why.to_owned()),
            };
            match measured {
                Ok(measured) => {
                    num_bytes = measured.num_bytes;
                    probed.bytes_per_second = measured.bytes_per_second;
                    probed.latency_seconds = measured.latency.as_secs_f64();
                }
                Err(why) => probed.unavailable = why,
            }
            transports.push(probed);
        }
        let route = self.worker.data_plane().sender.route_to(
            &peer,
            WireFormat::AsIs,
            choice.access_key(),
            &choice.offers,
            Arc::clone(&scratch),
        );
        let route = route.await;
        Ok(proto::ProbeReport {
            transports,
            chosen: route.map_or_else(|_| String::new(), |route| route.transport().name().to_owned()),
            bytes: num_bytes,
            copy_bytes_per_second,
            stream_bytes_per_second,
            conversion: conversion(self.worker.kv_format(), &format),
        })
    }

    fn offer<'a>(&self, kind: TransportKind, grant: &'a Grant) -> Result<&'a TransportOffer, &'static str> {
        if !self.worker.config().transports.contains(&kind) {
            let is_rdma = kind == TransportKind::Rdma;
            return Err(match is_rdma {
                true => {
                    "the prefill worker has no RDMA device or no NIXL, or its --transports does not list rdma"
                }
                false => "the prefill worker does not use it; see its --transports",
            });
        }
        let offer = grant.offers.iter().find(|offer| offer.kind() == kind);
        offer.ok_or("the decode worker does not offer it; see its --transports")
    }

    /// Upper bounds of every transport on this host, in bytes per second: copies in memory, and plain sockets.
    async fn limits(&self) -> Result<(f64, f64), Status> {
        let piece_bytes = self.worker.engine().storage().layout().layer_bytes();
        let measured =
            tokio::task::spawn_blocking(move || (copy_rate(piece_bytes), stream_rate().unwrap_or_default()));
        measured.await.map_err(|error| Status::internal(error.to_string()))
    }
}

/// A text that says how blocks of one format are converted to the other; empty when they are not.
fn conversion(from: &KvFormat, to: &KvFormat) -> String {
    if (from.block_size, from.dtype) == (to.block_size, to.dtype) {
        return String::new();
    }
    let blocks = |format: &KvFormat| format!("{} tokens in {}", format.block_size, format.dtype.name());
    format!("blocks of {} become blocks of {}", blocks(from), blocks(to))
}
