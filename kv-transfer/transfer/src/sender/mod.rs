//! The prefill worker's end of the data plane. It finds the best way to a decode worker's granted
//! blocks and writes pieces there.
//!
//! The decode worker's blocks may have another size or another element type. Then this side assembles each piece in the
//! decode worker's form before it writes it. It may also encode pieces for the wire ([`RouteState::load`]).
//!
//! ```text
//! Sender --- route(access key, offers, keep) ---> Route --- push(pieces) * ---> close()
//!    |                                              |
//!    +--- pools, one per pool and transport: persistent connections and threads
//! ```
//!
//! `keep` holds the source blocks allocated. It is dropped when the route is closed and no thread
//! reads from the blocks any more. How a transport moves a frame is not known here.

mod context;
mod frame;
mod jobs;
mod measure;
mod open_grants;
mod pace;
mod ranking;
mod route;
mod route_state;
mod transport;

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Instant,
};

use baton_handoff::{AccessKey, RouteError, TransportOffer};
use baton_kv_cache::{BlockStorage, KvLayout, KvMapping, KvShard, ShardError, WireCodec, WireFormat};
use tracing::{debug, warn};

pub use context::{SenderConfig, SenderContext};
pub use frame::Frame;
pub use jobs::{Job, JobThread, Jobs, MAX_LOSSES, Open};
pub use measure::{Measured, copy_rate, stream_rate};
pub use open_grants::OpenGrants;
pub use pace::Pace;
pub use route::Route;
use route_state::Form;
pub use route_state::{Active, Assembly, Loaded, RouteState, Scratch, Staging, max_pieces, unread};
pub use transport::{RemotePool, SendingTransport};

use crate::counters::Counters;

/// Writes blocks of one pool into blocks of other workers. Cheap to clone. Connections and threads
/// end with the last clone and the last route.
#[derive(Clone)]
pub struct Sender {
    shared: Arc<Shared>,
}

struct Shared {
    context: Arc<SenderContext>,
    transports: Vec<Box<dyn SendingTransport>>,
    pools: Mutex<HashMap<(TransportOffer, KvLayout), Arc<dyn RemotePool>>>,
}

/// Largest piece that is assembled for a peer. A peer's message must not make this side allocate an unbounded amount.
const MAX_STAGED_BYTES: usize = 64 << 20;

impl Sender {
    /// A sender that reads from `storage` and writes over `transports`. It connects to a peer when the first route
    /// needs it.
    ///
    /// # Errors
    /// When `frame_bytes` is 0.
    pub fn start(
        storage: Arc<BlockStorage>,
        config: SenderConfig,
        transports: Vec<Box<dyn SendingTransport>>,
    ) -> io::Result<Sender> {
        if config.frame_bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "frame_bytes must not be 0"));
        }
        let context = Arc::new(SenderContext::new(storage, config));
        Ok(Sender { shared: Arc::new(Shared { context, transports, pools: Mutex::default() }) })
    }

    /// A route to granted blocks that are arranged as this side's blocks, over the best of `offers` that is allowed and
    /// reachable. Best is the first kind of [`TransportKind::ALL`], or the fastest if [`measure`](Self::measure) has
    /// measured all of them. An offer that failed lately is tried after the other ones.
    ///
    /// # Errors
    /// When no offer leads to the blocks. `keep` is dropped then.
    pub async fn route(
        &self,
        access_key: AccessKey,
        offers: &[TransportOffer],
        keep: impl Send + 'static,
    ) -> Result<Route, RouteError> {
        let own = self.shared.own_shard().map_err(|error| RouteError::OtherKv(error.to_string()))?;
        self.route_to(&own, WireFormat::AsIs, access_key, offers, keep).await
    }

    /// A route to granted blocks that hold the part `peer` of the model's KV. Pieces travel in the format `wire` if the
    /// transport [supports](SendingTransport::takes_wire_formats) it and the format is smaller than the pieces.
    ///
    /// # Errors
    /// When no offer leads to the blocks, or they cannot hold this side's KV. `keep` is dropped then.
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
        let names = |kinds: Vec<&str>| if kinds.is_empty() { "none".to_owned() } else { kinds.join(", ") };
        let mut candidates: Vec<_> = offers
            .iter()
            .filter(|offer| self.transport(offer).is_some_and(|transport| transport.may_reach(offer)))
            .collect();
        let best = self.shared.context.ranking().sort(&mut candidates, Instant::now());
        let Some(best) = best else {
            return Err(RouteError::NoCommonTransport {
                offered: names(offers.iter().map(|offer| offer.kind().name()).collect()),
                allowed: names(
                    self.shared.transports.iter().map(|transport| transport.kind().name()).collect(),
                ),
            });
        };
        let mut failures = Vec::new();
        let mut error = None;
        for offer in candidates {
            let Some(transport) = self.transport(offer) else { continue };
            let pool = self.pool(transport, offer, &layout);
            let (open, opened) = Open::new(access_key);
            pool.open(open);
            match opened.await.unwrap_or(Err(RouteError::Closed)) {
                Ok(()) => {
                    self.shared.context.counters.of(offer.kind()).routed(offer != best);
                    if !failures.is_empty() {
                        let why = failures.join("; ");
                        warn!(generation = %access_key.generation, transport = %offer.kind(), %why, "fell back to a slower transport");
                    } else {
                        debug!(generation = %access_key.generation, transport = %offer.kind(), "route opened");
                    }
                    let context = Arc::clone(&self.shared.context);
                    let codec = match transport.takes_wire_formats() {
                        true => WireCodec::new(&layout, wire),
                        false => None,
                    };
                    let form = Form { layout, mapping, codec, sum_of: pool.sum_of() };
                    return Ok(Route::new(
                        RouteState::new(access_key, offer.clone(), context, form, Box::new(keep)),
                        pool,
                    ));
                }
                Err(failure) => {
                    // A refusal is about the grant.
                    if !matches!(failure, RouteError::OtherIncarnation(_)) {
                        self.shared.context.failed(offer, &failure);
                    }
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

    /// The transport of an offer, if this sender has it.
    fn transport(&self, offer: &TransportOffer) -> Option<&dyn SendingTransport> {
        let mut transports = self.shared.transports.iter();
        transports.find(|transport| transport.kind() == offer.kind()).map(|transport| &**transport)
    }

    fn pool(
        &self,
        transport: &dyn SendingTransport,
        offer: &TransportOffer,
        layout: &KvLayout,
    ) -> Arc<dyn RemotePool> {
        let mut pools = self.shared.pools.lock().unwrap_or_else(PoisonError::into_inner);
        // Forget pools that have gone: their offers never come back.
        let mut cold = Vec::new();
        pools.retain(|(known, _), pool| {
            let keep = known == offer || Arc::strong_count(pool) > 1 || !pool.is_cold();
            if !keep {
                cold.push(Arc::clone(pool));
            }
            keep
        });
        let pool = pools
            .entry((offer.clone(), *layout))
            .or_insert_with(|| transport.pool(&self.shared.context, offer, layout));
        let pool = Arc::clone(pool);
        drop(pools);
        if !cold.is_empty() {
            // The end of a pool waits for its threads, which may be connecting. The caller does not.
            let ending = thread::Builder::new().name("kv-pool-end".into()).spawn(move || drop(cold));
            if let Err(error) = ending {
                warn!(%error, "no thread ends lost pools: their end was waited for");
            }
        }
        pool
    }
}

impl Shared {
    /// The part of the model's KV that this side's pool holds: all heads.
    fn own_shard(&self) -> Result<KvShard, ShardError> {
        KvShard::new(self.context.storage.layout(), 1, 0)
    }

    /// How pieces of this side become pieces of `peer`. `None`: they are the same bytes on both sides.
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
