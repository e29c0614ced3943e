//! The prefill worker's end of the data plane: it finds the best way to a decode worker's granted
//! blocks and writes pieces there.
//!
//! The other pool's blocks may have another size, and hold another element type: what is not the same bytes there is
//! put together piece by piece before it is written, and may be coded for the way ([`RouteState::load`]).
//!
//! ```text
//! Sender --- route(access_key, offers, keep) ---> Route --- push(pieces) * ---> close()
//!    |                                              |
//!    +--- peers, one per pool and transport: persistent connections and threads
//! ```
//!
//! `keep` is what holds the source blocks allocated. It is dropped when the route is, and no thread
//! reads from the blocks any more.

mod jobs;
mod measure;
mod open_grants;
mod pace;
mod route;

use std::{
    collections::HashMap,
    io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use baton_kv_cache::{BlockStorage, KvLayout, KvMapping, KvShard, ShardError, WireCodec, WireFormat};
use baton_tls::Tls;
use tracing::{debug, warn};

use baton_handoff::{AccessKey, RouteError, TransportKind, TransportOffer};
pub(crate) use jobs::{Job, JobThread, Jobs, Open};
pub use measure::{Measured, copy_rate, stream_rate};
pub(crate) use open_grants::{MAX_LOSSES, OpenGrants};
pub(crate) use pace::Pace;
use route::Form;
pub use route::Route;
pub(crate) use route::{Active, Assembly, Frame, RouteState, Staging, max_pieces, unread};

use crate::{
    checksum::SumOf,
    counters::Counters,
    cuda::refuse_divided,
    nccl::{self, Fabric, NcclPeer, NcclSender},
    rdma::{Nixl, RdmaPeer},
    shm::{ShmPeer, host_id},
    tcp::TcpPeer,
};

#[cfg(any(test, feature = "testing"))]
use crate::nccl::TestFabric;

/// How a [`Sender`] reaches its peers.
#[derive(Clone, Debug)]
pub struct SenderConfig {
    /// What may be used. Of these the best that both sides have is taken.
    pub transports: Vec<TransportKind>,
    /// `rdma`: NIXL's C library, or the folder that it is in; `None` leaves that to the system.
    pub nixl: Option<PathBuf>,
    /// `nccl`: NCCL's library, or the folder that it is in; `None` leaves that to the system.
    pub nccl: Option<PathBuf>,
    /// What tests have in its place.
    #[cfg(any(test, feature = "testing"))]
    pub fabric: Option<TestFabric>,
    /// `shm`: frames of up to so many bytes are copied by whoever pushes them, if the peer's thread has nothing to do: as
    /// many as a core copies while it would wake another.
    pub copy_at_once_bytes: usize,
    /// `tcp`: connections to one peer.
    pub streams_per_peer: usize,
    /// `tcp`: KV bytes of one frame, at least one piece. Large frames cost less, small ones spread
    /// better over the streams.
    pub frame_bytes: usize,
    /// `tcp`: bytes of a socket's send buffer; `None` lets the kernel choose, and change it as it goes.
    pub socket_buffer_bytes: Option<usize>,
    /// `tcp`: who this side is, and whom it trusts; `None` speaks plainly.
    pub tls: Option<Tls>,
    /// To reach a peer and shake hands.
    pub connect_timeout: Duration,
    /// For a peer to take or confirm what is written.
    pub io_timeout: Duration,
}

impl Default for SenderConfig {
    fn default() -> SenderConfig {
        SenderConfig {
            transports: vec![TransportKind::Shm, TransportKind::Tcp],
            nixl: None,
            nccl: None,
            #[cfg(any(test, feature = "testing"))]
            fabric: None,
            copy_at_once_bytes: 256 << 10,
            streams_per_peer: 2,
            frame_bytes: 1 << 20,
            socket_buffer_bytes: None,
            tls: None,
            connect_timeout: Duration::from_secs(3),
            io_timeout: Duration::from_secs(10),
        }
    }
}

impl SenderConfig {
    /// What carries `nccl`.
    fn fabric(&self, storage: &BlockStorage) -> io::Result<Arc<dyn Fabric>> {
        #[cfg(any(test, feature = "testing"))]
        if let Some(TestFabric(fabric)) = &self.fabric {
            return Ok(Arc::clone(fabric));
        }
        nccl::start(self.nccl.as_deref(), storage).map_err(io::Error::other)
    }
}

/// Writes blocks of one pool into those of other workers. Cheap to clone; connections and threads
/// stop with the last clone and the last route.
#[derive(Clone)]
pub struct Sender {
    shared: Arc<Shared>,
}

struct Shared {
    context: Arc<SenderContext>,
    host_id: String,
    /// There if `rdma` may be used.
    nixl: Option<Nixl>,
    /// There if `nccl` may be used.
    nccl: Option<Arc<NcclSender>>,
    peers: Mutex<HashMap<(TransportOffer, KvLayout), Arc<dyn Peer>>>,
    /// Bytes a second, where somebody has asked for a measurement.
    rates: Mutex<HashMap<TransportOffer, f64>>,
}

/// How much faster a way must be than the one before it in the order of kinds to be taken instead: measurements of a
/// busy machine differ by as much, and what comes first costs less of the processors.
const MARGIN: f64 = 1.5;

/// Rates beyond these belong to pools that have gone.
const MAX_RATES: usize = 4096;

/// Bytes of the largest piece that is put together for a peer: its word must not make this side allocate any amount.
const MAX_STAGED_BYTES: usize = 64 << 20;

/// What every peer needs.
pub(crate) struct SenderContext {
    pub(crate) storage: Arc<BlockStorage>,
    pub(crate) config: SenderConfig,
    pub(crate) counters: Counters,
}

/// The seam between routes and transports: one other pool, reached in one way.
pub(crate) trait Peer: Send + Sync {
    /// Makes sure that the peer is connected and may be written to under the grant.
    fn open(&self, open: Open);
    /// Queues a frame of an opened route; it ends by [`Frame::done`] or [`Frame::fail`].
    fn push(&self, frame: Frame);
    /// The route is closed: drops what is queued of it, and tells the peer where that matters.
    fn retire(&self, route: &Arc<RouteState>);
    /// Whether nothing is connected, so that the peer may be forgotten.
    fn is_cold(&self) -> bool;
    /// What the checksums of its pieces are of. Known when a grant was opened.
    fn sum_of(&self) -> SumOf;
}

impl Sender {
    /// A sender that reads from `storage`. Peers are connected when first needed.
    ///
    /// # Errors
    /// When the configuration makes no sense, or asks for `rdma` where NIXL is not, for `nccl` where NCCL or a device is
    /// not, or where blocks lie on several devices.
    pub fn start(storage: Arc<BlockStorage>, config: SenderConfig) -> io::Result<Sender> {
        if config.streams_per_peer == 0 || config.frame_bytes == 0 {
            let message = "streams_per_peer and frame_bytes must not be 0";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        for &kind in &config.transports {
            refuse_divided(&storage, kind)?;
        }
        let context = Arc::new(SenderContext { storage, config, counters: Counters::default() });
        let nixl = match context.config.transports.contains(&TransportKind::Rdma) {
            true => {
                let nixl = Nixl::start(context.config.nixl.as_deref(), &context.storage);
                Some(nixl.map_err(io::Error::other)?)
            }
            false => None,
        };
        let nccl = match context.config.transports.contains(&TransportKind::Nccl) {
            true => {
                let fabric = context.config.fabric(&context.storage)?;
                Some(Arc::new(NcclSender::new(fabric, &context.storage).map_err(io::Error::other)?))
            }
            false => None,
        };
        let (peers, rates) = (Mutex::default(), Mutex::default());
        Ok(Sender { shared: Arc::new(Shared { context, host_id: host_id(), nixl, nccl, peers, rates }) })
    }

    /// A way to the blocks of a grant, arranged as those of this side: the best of `offers` that is allowed and
    /// reachable. Best is the first kind of [`TransportKind::ALL`], or the fastest where [`measure`](Self::measure) has
    /// found the rates of all.
    ///
    /// # Errors
    /// When there is none. `keep` is dropped then.
    pub async fn route(
        &self,
        access_key: AccessKey,
        offers: &[TransportOffer],
        keep: impl Send + 'static,
    ) -> Result<Route, RouteError> {
        let own = self.shared.own_shard().map_err(|error| RouteError::OtherKv(error.to_string()))?;
        self.route_to(&own, WireFormat::AsIs, access_key, offers, keep).await
    }

    /// A way to the blocks of a grant, which hold `peer` of the model's KV. Over TCP pieces travel as `wire` says,
    /// where that is smaller than they are; what is written one-sidedly stays as it is.
    ///
    /// # Errors
    /// When there is none, or KV cannot go there. `keep` is dropped then.
    pub async fn route_to(
        &self,
        peer: &KvShard,
        wire: WireFormat,
        access_key: AccessKey,
        offers: &[TransportOffer],
        keep: impl Send + 'static,
    ) -> Result<Route, RouteError> {
        let layout = *peer.layout();
        let mapping = self.shared.mapping(peer)?;
        let allowed = &self.shared.context.config.transports;
        let names = |kinds: Vec<&str>| if kinds.is_empty() { "none".to_owned() } else { kinds.join(", ") };
        let mut candidates: Vec<_> =
            offers.iter().filter(|offer| allowed.contains(&offer.kind()) && self.may_reach(offer)).collect();
        self.sort(&mut candidates);
        if candidates.is_empty() {
            return Err(RouteError::NoCommonTransport {
                offered: names(offers.iter().map(|offer| offer.kind().name()).collect()),
                allowed: names(allowed.iter().map(|kind| kind.name()).collect()),
            });
        }
        let mut failures = Vec::new();
        let mut error = None;
        for offer in candidates {
            let peer = self.peer(offer, &layout);
            let (open, opened) = Open::new(access_key);
            peer.open(open);
            match opened.await.unwrap_or(Err(RouteError::Closed)) {
                Ok(()) => {
                    let is_fallback = !failures.is_empty();
                    self.shared.context.counters.of(offer.kind()).routed(is_fallback);
                    if is_fallback {
                        let why = failures.join("; ");
                        warn!(generation = %access_key.generation, transport = %offer.kind(), %why, "fell back to a slower transport");
                    } else {
                        debug!(generation = %access_key.generation, transport = %offer.kind(), "route opened");
                    }
                    let context = Arc::clone(&self.shared.context);
                    let codec = match offer.kind() {
                        TransportKind::Shm | TransportKind::Rdma | TransportKind::Nccl => None,
                        TransportKind::Tcp => WireCodec::new(&layout, wire),
                    };
                    let form = Form { layout, mapping, codec, sum_of: peer.sum_of() };
                    return Ok(Route::new(
                        RouteState::new(access_key, offer.kind(), context, form, Box::new(keep)),
                        peer,
                    ));
                }
                Err(failure) => {
                    let kind = offer.kind();
                    failures.push(match &failure {
                        RouteError::Unreachable(why) => format!("{kind}: {why}"),
                        other => format!("{kind}: {other}"),
                    });
                    error = Some(failure);
                }
            }
        }
        Err(match error {
            Some(error @ RouteError::OtherIncarnation(_)) => error,
            _ => RouteError::Unreachable(failures.join("; ")),
        })
    }

    /// What was sent, by transport.
    pub fn counters(&self) -> &Counters {
        &self.shared.context.counters
    }

    /// Best first: in the order of kinds, unless the rates of all are known.
    fn sort(&self, candidates: &mut [&TransportOffer]) {
        candidates.sort_by_key(|offer| offer.kind());
        let rates = self.shared.rates.lock().unwrap_or_else(PoisonError::into_inner);
        let known: Option<Vec<f64>> = candidates.iter().map(|offer| rates.get(*offer).copied()).collect();
        let Some(known) = known else { return };
        let worth = known.iter().zip(0..).map(|(rate, rank)| rate / MARGIN.powi(rank));
        let worth: HashMap<_, _> = candidates.iter().copied().zip(worth).collect();
        candidates.sort_by(|a, b| worth[b].total_cmp(&worth[a]));
    }

    fn remember(&self, offer: &TransportOffer, bytes_per_second: f64) {
        let mut rates = self.shared.rates.lock().unwrap_or_else(PoisonError::into_inner);
        if rates.len() >= MAX_RATES {
            rates.clear();
        }
        rates.insert(offer.clone(), bytes_per_second);
    }

    /// Another host's memory is not worth a try, nor a word that something slower is taken.
    fn may_reach(&self, offer: &TransportOffer) -> bool {
        match offer {
            TransportOffer::Shm { host_id, .. } => *host_id == self.shared.host_id,
            TransportOffer::Rdma { .. } | TransportOffer::Nccl { .. } | TransportOffer::Tcp { .. } => true,
        }
    }

    fn peer(&self, offer: &TransportOffer, layout: &KvLayout) -> Arc<dyn Peer> {
        let mut peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        // Pools that have gone: their offers never come back.
        let mut cold = Vec::new();
        peers.retain(|(known, _), peer| {
            let keep = known == offer || Arc::strong_count(peer) > 1 || !peer.is_cold();
            if !keep {
                cold.push(Arc::clone(peer));
            }
            keep
        });
        let peer = peers.entry((offer.clone(), *layout)).or_insert_with(|| match offer {
            TransportOffer::Tcp { address, pool } => {
                Arc::new(TcpPeer::new(Arc::clone(&self.shared.context), address.clone(), *pool, *layout))
            }
            TransportOffer::Rdma { address, pool } => {
                let nixl = self.shared.nixl.clone().expect("loaded, as rdma is among the transports");
                Arc::new(RdmaPeer::new(
                    Arc::clone(&self.shared.context),
                    nixl,
                    address.clone(),
                    *pool,
                    *layout,
                ))
            }
            TransportOffer::Nccl { address, pool } => {
                let nccl = self.shared.nccl.clone().expect("started, as nccl is among the transports");
                let context = Arc::clone(&self.shared.context);
                Arc::new(NcclPeer::new(context, nccl, address.clone(), *pool, *layout))
            }
            TransportOffer::Shm { socket_path, pool, .. } => {
                Arc::new(ShmPeer::new(Arc::clone(&self.shared.context), socket_path, *pool, *layout))
            }
        });
        let peer = Arc::clone(peer);
        drop(peers);
        drop(cold);
        peer
    }
}

impl Shared {
    /// What this side holds: all heads, as long as a worker is one rank.
    fn own_shard(&self) -> Result<KvShard, ShardError> {
        KvShard::new(self.context.storage.layout(), 1, 0)
    }

    /// How KV goes from here to `peer`; `None` when every piece is the same there.
    fn mapping(&self, peer: &KvShard) -> Result<Option<KvMapping>, RouteError> {
        let mapping = self.own_shard().and_then(|own| KvMapping::new(&own, peer));
        let mapping = mapping.map_err(|error| RouteError::OtherKv(error.to_string()))?;
        if mapping.is_identity() {
            return Ok(None);
        }
        let piece_bytes = peer.layout().layer_bytes();
        if piece_bytes > MAX_STAGED_BYTES {
            return Err(RouteError::OtherKv(format!("pieces of {piece_bytes} bytes are not converted")));
        }
        Ok(Some(mapping))
    }
}
