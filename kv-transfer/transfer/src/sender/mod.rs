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
mod route;
mod route_state;
mod transport;

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    thread,
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
    /// Bytes per second of each offer that was measured.
    rates: Mutex<HashMap<TransportOffer, f64>>,
}

/// How much faster a transport must be than the one before it in the order of kinds to be preferred. Measurements on a
/// busy machine differ by as much, and earlier kinds take less time of the processors.
const MARGIN: f64 = 1.5;

/// Most rates that are kept. When there are more, most of their pools have gone.
const MAX_RATES: usize = 4096;

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
        let context = Arc::new(SenderContext { storage, config, counters: Counters::default() });
        let (pools, rates) = (Mutex::default(), Mutex::default());
        Ok(Sender { shared: Arc::new(Shared { context, transports, pools, rates }) })
    }

    /// A route to granted blocks that are arranged as this side's blocks, over the best of `offers` that is allowed and
    /// reachable. Best is the first kind of [`TransportKind::ALL`], or the fastest if [`measure`](Self::measure) has
    /// measured all of them.
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
        self.sort(&mut candidates);
        if candidates.is_empty() {
            return Err(RouteError::NoCommonTransport {
                offered: names(offers.iter().map(|offer| offer.kind().name()).collect()),
                allowed: names(
                    self.shared.transports.iter().map(|transport| transport.kind().name()).collect(),
                ),
            });
        }
        let mut failures = Vec::new();
        let mut error = None;
        for offer in candidates {
            let Some(transport) = self.transport(offer) else { continue };
            let pool = self.pool(transport, offer, &layout);
            let (open, opened) = Open::new(access_key);
            pool.open(open);
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
                    let codec = match transport.takes_wire_formats() {
                        true => WireCodec::new(&layout, wire),
                        false => None,
                    };
                    let form = Form { layout, mapping, codec, sum_of: pool.sum_of() };
                    return Ok(Route::new(
                        RouteState::new(access_key, offer.kind(), context, form, Box::new(keep)),
                        pool,
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

    /// Sorts best first: by kind, or by rate if the rates of all candidates are known.
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

#[cfg(test)]
mod tests {
    use baton_handoff::TransportKind;

    use super::*;
    use crate::testing::LAYOUT;

    #[test]
    fn the_fastest_way_is_taken_once_all_are_known() {
        let storage = Arc::new(BlockStorage::new(LAYOUT, 4).unwrap());
        let sender = Sender::start(storage, SenderConfig::default(), Vec::new()).unwrap();
        let shm = TransportOffer::Shm { host_id: "here".into(), socket_path: "s".into(), pool: 1 };
        let tcp = TransportOffer::Tcp { address: "here:1".into(), pool: 1 };
        let best_of = |offers: &[&TransportOffer]| {
            let mut candidates = offers.to_vec();
            sender.sort(&mut candidates);
            candidates[0].kind()
        };
        let best = || best_of(&[&tcp, &shm]);
        sender.remember(&tcp, 9e9);
        assert_eq!(best(), TransportKind::Shm, "one is unknown");
        sender.remember(&shm, 8e9);
        assert_eq!(best(), TransportKind::Shm, "hardly slower");
        sender.remember(&shm, 1e9);
        assert_eq!(best(), TransportKind::Tcp);
        assert_eq!(best_of(&[&shm]), TransportKind::Shm, "the only one");
    }
}
