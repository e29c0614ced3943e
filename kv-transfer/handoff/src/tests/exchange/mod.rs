//! A model of one handoff: both machines, a stream that keeps the order of messages but may break at any time, and engines and
//! a data plane that answer in any order or fail. Each step asserts the promises of the crate's documentation.

mod events;
mod play;

use std::{
    collections::{BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use baton_kv_layout::BlockId;
use baton_request::{Failure, FailureKind};

pub(super) use self::events::{Event, Flaw};
use crate::Limits;
use crate::{
    Begin, DecodeMessage, Generation, Grant, Piece, PieceWrite, PrefillMessage, Secret, TransportKind,
};
use crate::{KvFault, PushError, Pushed, RouteError, decode::RemotePrefilled};

use super::machines::{decode, prefill};

const LAYERS: usize = 2;
const GENERATION: Generation = Generation(1);
const LIMITS: Limits =
    Limits { total: Duration::from_secs(100), stall: Duration::from_secs(30), stop: Duration::from_secs(10) };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocks {
    None,
    /// In a grant: the peer may write.
    Granted,
    /// The grant is revoked, but the peer has not closed its route.
    Quarantined,
    /// Free, or in use by another request.
    Released,
    Committed,
}

/// The length of the sequence, and the block sizes of both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) num_tokens: usize,
    pub(super) prefill_block_size: usize,
    pub(super) decode_block_size: usize,
    /// For a prefix fetch: how many of its own blocks P has cached.
    pub(super) cached: Option<usize>,
}

impl Sizes {
    /// Blocks of one token on both sides.
    pub(super) fn blocks(num_blocks: usize) -> Sizes {
        Sizes { num_tokens: num_blocks, prefill_block_size: 1, decode_block_size: 1, cached: None }
    }
}

#[derive(Clone, Debug)]
pub(super) struct World {
    /// Whether the peer writes into D's memory. Otherwise D's threads write what the peer sends.
    is_one_sided: bool,
    flaw: Option<Flaw>,
    now: Instant,
    sizes: Sizes,
    decode: decode::DecodeHandoff,
    prefill: prefill::PrefillHandoff,
    /// Blocks of D.
    num_blocks: usize,
    num_cached_blocks: usize,
    // The stream.
    to_prefill: VecDeque<DecodeMessage>,
    to_decode: VecDeque<PrefillMessage<u32>>,
    has_decode_closed: bool,
    has_prefill_closed: bool,
    /// Messages are lost, and neither side notices.
    is_partitioned: bool,
    /// Which side has read the end of the stream: prefill, decode.
    has_read_end: [bool; 2],
    // D's engine and data plane.
    is_reserving: bool,
    /// How many more `Progress` messages D may send.
    num_decode_progress_left: usize,
    blocks: Blocks,
    verifying: VecDeque<Vec<Piece>>,
    verified: BTreeSet<(u32, u32)>,
    // P's engine and data plane.
    engine: VecDeque<prefill::Input>,
    /// How many more `Progress` messages P may send.
    num_progress_left: usize,
    is_routing: bool,
    is_route_open: bool,
    pushing: Vec<Vec<PieceWrite>>,
    is_stopping: bool,
    was_stopped: bool,
    // Outcomes.
    decode_outcomes: Vec<bool>,
    decode_closes: usize,
    num_tokens: usize,
    /// D has succeeded without KV.
    is_done: bool,
    prefill_outcomes: Vec<bool>,
    prefill_closes: usize,
    num_computes: usize,
    num_releases: usize,
}

impl World {
    fn new(sizes: Sizes, num_cached_blocks: usize, incarnation: u64) -> World {
        World::with(sizes, num_cached_blocks, incarnation, true, None)
    }

    pub(super) fn with(
        sizes: Sizes,
        num_cached_blocks: usize,
        incarnation: u64,
        is_one_sided: bool,
        flaw: Option<Flaw>,
    ) -> World {
        let Sizes { num_tokens, prefill_block_size, decode_block_size: block_size, cached } = sizes;
        let now = Instant::now();
        let begin = Begin {
            request_id: "r".into(),
            attempt: 0,
            prefill_incarnation: 7,
            num_tokens,
            block_size,
            deadline: LIMITS.total,
        };
        let num_blocks = begin.num_blocks();
        let (decode, actions) = decode::DecodeHandoff::begin(begin, cached.is_some(), LAYERS, LIMITS, now);
        let mut world = World {
            is_one_sided,
            flaw,
            now,
            sizes,
            decode,
            prefill: prefill::PrefillHandoff::new(incarnation, prefill_block_size, LAYERS, LIMITS, now),
            num_blocks,
            num_cached_blocks: num_cached_blocks.min(num_blocks),
            to_prefill: VecDeque::new(),
            to_decode: VecDeque::new(),
            has_decode_closed: false,
            has_prefill_closed: false,
            is_partitioned: false,
            has_read_end: [false; 2],
            is_reserving: false,
            num_decode_progress_left: 1,
            blocks: Blocks::None,
            verifying: VecDeque::new(),
            verified: BTreeSet::new(),
            engine: VecDeque::new(),
            num_progress_left: 1,
            is_routing: false,
            is_route_open: false,
            pushing: Vec::new(),
            is_stopping: false,
            was_stopped: false,
            decode_outcomes: Vec::new(),
            decode_closes: 0,
            num_tokens: 0,
            is_done: false,
            prefill_outcomes: Vec::new(),
            prefill_closes: 0,
            num_computes: 0,
            num_releases: 0,
        };
        world.perform_decode(actions);
        world
    }

    pub(super) fn enabled(&self, with_faults: bool) -> Vec<Event> {
        let prefill_can_read =
            !self.to_prefill.is_empty() || (self.has_decode_closed && !self.has_read_end[0]);
        let decode_can_read =
            !self.to_decode.is_empty() || (self.has_prefill_closed && !self.has_read_end[1]);
        let mut events = Vec::new();
        let mut offer = |event, is_possible| {
            if is_possible {
                events.push(event);
            }
        };
        let is_whole = !self.is_partitioned;
        offer(Event::ToPrefill, is_whole && prefill_can_read && !self.prefill.is_over());
        offer(Event::ToDecode, is_whole && decode_can_read && !self.decode.is_over());
        offer(Event::Reserved, self.is_reserving);
        offer(Event::Verified, !self.verifying.is_empty());
        offer(Event::Engine, !self.engine.is_empty());
        offer(Event::Progress, self.num_progress_left > 0 && !self.engine.is_empty());
        // Before the first token it changes nothing.
        offer(
            Event::DecodeProgress,
            self.num_decode_progress_left > 0 && self.is_reserving && self.num_tokens == 1,
        );
        offer(Event::Routed, self.is_routing);
        offer(Event::Pushed, !self.pushing.is_empty());
        offer(Event::Idle, self.is_stopping && self.pushing.is_empty() && !self.is_routing);
        if with_faults {
            let time = !self.decode.is_over() || !self.prefill.is_over();
            offer(Event::Time, time);
            offer(Event::Cancel, !self.decode.is_over());
            offer(Event::RequestEnds, self.num_tokens == 1 && self.decode_outcomes.is_empty());
            offer(Event::Break, !self.has_decode_closed || !self.has_prefill_closed);
            offer(Event::EngineFails, !self.engine.is_empty());
            offer(Event::ReserveFails, self.is_reserving);
            offer(Event::PushFails, !self.pushing.is_empty());
            offer(Event::RouteFails, self.is_routing);
            offer(Event::WrongBytes, !self.verifying.is_empty());
            offer(Event::RepeatToPrefill, !self.to_prefill.is_empty());
            offer(Event::RepeatToDecode, !self.to_decode.is_empty());
            offer(Event::SwapToPrefill, self.to_prefill.len() > 1);
            offer(Event::SwapToDecode, self.to_decode.len() > 1);
            offer(Event::NoBlocks, self.is_reserving);
            offer(Event::EngineHangs, !self.engine.is_empty());
            offer(Event::Partition, !self.is_partitioned);
            offer(Event::PrefillDies, !self.prefill.is_over());
            offer(Event::PrefillRestarts, self.num_computes == 0 && !self.prefill.is_over());
        }
        events
    }

    pub(super) fn apply(&mut self, event: Event, nth: usize) {
        match event {
            Event::ToPrefill => {
                let input = match self.to_prefill.pop_front() {
                    Some(message) => prefill::Input::Message(message),
                    None => prefill::Input::StreamClosed("closed".into()),
                };
                self.has_read_end[0] |= matches!(input, prefill::Input::StreamClosed(_));
                self.input_prefill(input);
            }
            Event::ToDecode => {
                let input = match self.to_decode.pop_front() {
                    Some(message) => decode::Input::Message(message),
                    None => decode::Input::StreamClosed("closed".into()),
                };
                self.has_read_end[1] |= matches!(input, decode::Input::StreamClosed(_));
                self.input_decode(input);
            }
            Event::Reserved => {
                self.is_reserving = false;
                self.blocks = Blocks::Granted;
                let num_blocks = self.num_blocks - self.num_cached_blocks;
                self.input_decode(decode::Input::Granted(Grant {
                    generation: GENERATION,
                    secret: Secret::default(),
                    num_cached_blocks: self.num_cached_blocks,
                    block_ids: (0..num_blocks as u32).map(BlockId).collect(),
                    offers: vec![],
                }));
            }
            Event::ReserveFails => {
                self.is_reserving = false;
                self.input_decode(decode::Input::ReserveFailed(Failure::new(FailureKind::Full, "full")));
            }
            Event::Verified => {
                let pieces = self.verifying.pop_front().expect("enabled");
                // Verification fails for a grant that was revoked meanwhile.
                let result =
                    if self.blocks == Blocks::Granted { Ok(()) } else { Err(KvFault::WrongGeneration) };
                if result.is_ok() {
                    self.verified.extend(pieces.iter().map(|piece| (piece.block_idx, piece.layer_idx)));
                }
                self.input_decode(decode::Input::Verified { num_pieces: pieces.len(), result });
            }
            Event::WrongBytes => {
                let pieces = self.verifying.pop_front().expect("enabled");
                let Piece { block_idx, layer_idx, .. } = pieces[nth % pieces.len()];
                let result = Err(KvFault::Checksum { block_idx, layer_idx });
                self.input_decode(decode::Input::Verified { num_pieces: pieces.len(), result });
            }
            Event::Engine => {
                let input = self.engine.pop_front().expect("enabled");
                self.input_prefill(input);
            }
            Event::Progress => {
                self.num_progress_left -= 1;
                self.input_prefill(prefill::Input::Progress);
            }
            Event::DecodeProgress => {
                self.num_decode_progress_left -= 1;
                self.input_decode(decode::Input::Progress);
            }
            Event::EngineFails => {
                self.engine.clear();
                self.input_prefill(prefill::Input::Fail(Failure::new(FailureKind::Internal, "broken")));
            }
            Event::Routed => {
                self.is_routing = false;
                self.is_route_open = self.blocks == Blocks::Granted;
                if self.is_stopping {
                    // It was opened too late. It is closed before `Idle`.
                    return;
                }
                let result = match self.is_route_open {
                    true => Ok(()),
                    false => Err(RouteError::Unreachable("revoked".into())),
                };
                self.input_prefill(prefill::Input::Routed(result));
            }
            Event::RouteFails => {
                self.is_routing = false;
                if self.is_stopping {
                    return;
                }
                self.input_prefill(prefill::Input::Routed(Err(RouteError::Unreachable("no".into()))));
            }
            Event::Pushed => {
                let writes = self.pushing.swap_remove(nth % self.pushing.len());
                if !self.write() {
                    self.input_prefill(prefill::Input::Pushed(Err(PushError::Revoked)));
                    return;
                }
                let pieces = writes
                    .iter()
                    .map(|w| Piece { block_idx: w.block_idx, layer_idx: w.layer_idx, checksum: 0 })
                    .collect();
                let pushed = Pushed { pieces, transport: TransportKind::Shm, bytes: 1 };
                self.input_prefill(prefill::Input::Pushed(Ok(pushed)));
            }
            Event::PushFails => {
                self.pushing.swap_remove(nth % self.pushing.len());
                self.input_prefill(prefill::Input::Pushed(Err(PushError::Revoked)));
            }
            Event::NoBlocks => self.is_reserving = false,
            Event::EngineHangs => self.engine.clear(),
            Event::Partition => {
                self.is_partitioned = true;
                self.to_prefill.clear();
                self.to_decode.clear();
            }
            Event::RepeatToPrefill => self.to_prefill.push_front(self.to_prefill[0].clone()),
            Event::RepeatToDecode => self.to_decode.push_front(self.to_decode[0].clone()),
            Event::SwapToPrefill => self.to_prefill.swap(0, 1),
            Event::SwapToDecode => self.to_decode.swap(0, 1),
            Event::PrefillDies | Event::PrefillRestarts => {
                let has_read = self.prefill_outcomes.len();
                self.has_prefill_closed = true;
                self.engine.clear();
                self.pushing.clear();
                (self.is_routing, self.is_stopping) = (false, false);
                self.close_route();
                if event == Event::PrefillRestarts && has_read == 0 && !self.has_decode_closed {
                    // The stream begins anew with what was not read.
                    self.has_prefill_closed = false;
                    self.prefill = prefill::PrefillHandoff::new(
                        6,
                        self.sizes.prefill_block_size,
                        LAYERS,
                        LIMITS,
                        self.now,
                    );
                } else {
                    self.kill_prefill();
                }
            }
            Event::Idle => {
                self.is_stopping = false;
                self.close_route();
                self.input_prefill(prefill::Input::Idle);
            }
            Event::Time => {
                let deadlines = [self.decode.deadline(), self.prefill.deadline()];
                self.now = deadlines.into_iter().flatten().min().expect("enabled").max(self.now);
                self.input_decode(decode::Input::Tick);
                self.input_prefill(prefill::Input::Tick);
            }
            Event::Cancel => self.input_decode(decode::Input::Cancel("client left".into())),
            Event::RequestEnds => {
                let actions = self.decode.request_ended(self.now);
                self.perform_decode(actions);
            }
            Event::Break => {
                self.has_decode_closed = true;
                self.has_prefill_closed = true;
                // What was on the way is lost, or some of it arrives.
                self.to_prefill.truncate(nth % 3);
                self.to_decode.truncate(nth % 2);
            }
        }
    }

    /// Asserts that no write reaches blocks that are free or in use by another request. Returns whether D accepts the write.
    fn write(&mut self) -> bool {
        // D's own threads check the grant.
        if !self.is_one_sided && self.blocks != Blocks::Granted {
            return false;
        }
        assert!(
            matches!(self.blocks, Blocks::Granted | Blocks::Quarantined),
            "late write into {:?} blocks",
            self.blocks
        );
        true
    }

    /// A dead worker sends no message and holds no blocks.
    fn kill_prefill(&mut self) {
        while !self.prefill.is_over() {
            let over: Vec<prefill::Action> =
                self.prefill.on(prefill::Input::StreamClosed("dead".into()), self.now);
            drop(over);
            let _: Vec<prefill::Action> = self.prefill.on(prefill::Input::Idle, self.now);
        }
        (self.prefill_outcomes, self.prefill_closes) = (vec![false], 1);
        self.num_releases = self.num_computes;
    }

    fn input_decode(&mut self, input: decode::Input<u32>) {
        if self.flaw == Some(Flaw::NeverTicks) && matches!(input, decode::Input::Tick) {
            return;
        }
        let actions = self.decode.on(input, self.now);
        self.perform_decode(actions);
        assert_eq!(self.decode.deadline().is_some(), !self.decode.is_over());
    }

    fn perform_decode(&mut self, actions: Vec<decode::Action<u32>>) {
        use decode::Action as A;
        for action in actions {
            assert!(self.decode_closes == 0 || matches!(action, A::Revoke(_)), "{action:?} after Close");
            match action {
                A::Send(message) => {
                    if !self.has_decode_closed && !self.is_partitioned {
                        self.to_prefill.push_back(message);
                    }
                }
                A::Reserve { num_tokens } => {
                    self.is_reserving = true;
                    self.num_blocks = num_tokens.div_ceil(self.sizes.decode_block_size);
                    self.num_cached_blocks = self.num_cached_blocks.min(self.num_blocks);
                }
                A::FirstToken(_) => {
                    assert!(self.decode_outcomes.is_empty());
                    self.num_tokens += 1;
                }
                A::Verify(pieces) if self.flaw == Some(Flaw::VerifiesNothing) => {
                    let num_pieces = pieces.len();
                    self.input_decode(decode::Input::Verified { num_pieces, result: Ok(()) });
                }
                A::Verify(pieces) => self.verifying.push_back(pieces),
                A::Revoke(_) if self.flaw == Some(Flaw::ForgetsToRevoke) => {}
                A::Revoke(generation) => {
                    self.revoke(generation);
                    if self.flaw == Some(Flaw::RevokesTwice) {
                        self.revoke(generation);
                    }
                }
                A::WriterStopped(_) => {
                    assert!(!self.is_route_open && self.pushing.is_empty(), "Stopped was not true");
                    self.blocks = Blocks::Released;
                }
                A::Finish(result) => {
                    self.is_done |= result == Ok(RemotePrefilled::Ended);
                    if let Ok(RemotePrefilled::Committed(committed)) = &result {
                        assert_eq!((committed.generation, self.blocks), (GENERATION, Blocks::Granted));
                        let num_pieces = (self.num_blocks - self.num_cached_blocks) * LAYERS;
                        assert_eq!(self.verified.len(), num_pieces, "committed without verification");
                        assert!(self.pushing.is_empty(), "committed while something is written");
                        assert_eq!(self.num_tokens, usize::from(self.sizes.cached.is_none()));
                        self.blocks = Blocks::Committed;
                    }
                    // D does not wait for blocks any more, but a reservation may complete at the same time.
                    self.decode_outcomes.push(result.is_ok());
                }
                A::Close => {
                    self.decode_closes += 1;
                    self.has_decode_closed = true;
                }
            }
        }
    }

    fn revoke(&mut self, generation: Generation) {
        assert_eq!((generation, self.blocks), (GENERATION, Blocks::Granted), "revoked once");
        let is_fenced = !(self.is_one_sided && self.is_route_open);
        self.blocks = match is_fenced || self.flaw == Some(Flaw::FreesBeforeTheFence) {
            true => Blocks::Released,
            false => Blocks::Quarantined,
        };
    }

    fn input_prefill(&mut self, input: prefill::Input) {
        if self.flaw == Some(Flaw::NeverTicks) && matches!(input, prefill::Input::Tick) {
            return;
        }
        let actions = self.prefill.on(input, self.now);
        self.perform_prefill(actions);
        assert_eq!(self.prefill.deadline().is_some(), !self.prefill.is_over());
    }

    fn perform_prefill(&mut self, actions: Vec<prefill::Action>) {
        use prefill::Action as A;
        for action in actions {
            assert_eq!(self.prefill_closes, 0, "{action:?} after Close");
            match action {
                A::Compute => {
                    self.num_computes += 1;
                    self.compute();
                }
                A::Hold => {
                    self.num_computes += 1;
                    let num_blocks = self.sizes.cached.expect("this is a prefix fetch");
                    let blocks = (0..num_blocks as u32).map(BlockId).collect();
                    self.engine.push_back(prefill::Input::Held { blocks });
                }
                A::Route { .. } => self.is_routing = true,
                A::Push(pieces) => {
                    assert!(!self.was_stopped && self.num_releases == 0 && !pieces.is_empty());
                    self.pushing.push(pieces);
                }
                A::Send(message) => {
                    if message == PrefillMessage::Stopped {
                        assert!(!self.is_route_open && self.pushing.is_empty(), "not stopped");
                    }
                    if !self.has_prefill_closed && !self.is_partitioned {
                        self.to_decode.push_back(message);
                    }
                }
                A::Finish(result) => self.prefill_outcomes.push(result.is_ok()),
                A::Stop => {
                    self.engine.clear();
                    self.is_stopping = true;
                    self.was_stopped = true;
                    if self.flaw == Some(Flaw::SaysStoppedAtOnce) && !self.has_prefill_closed {
                        self.to_decode.push_back(PrefillMessage::Stopped);
                    }
                }
                A::Release => {
                    self.num_releases += 1;
                    self.num_releases += usize::from(self.flaw == Some(Flaw::ReleasesTwice));
                    let was_good = self.prefill_outcomes == [true];
                    assert!(self.was_stopped || (was_good && self.pushing.is_empty()));
                    // Dropping the route does not interrupt writes in flight.
                    if self.pushing.is_empty() {
                        self.close_route();
                    }
                }
                A::Close => {
                    self.prefill_closes += 1;
                    self.has_prefill_closed = true;
                }
            }
        }
    }

    /// How many variants `event` has: which push ends, or which messages of the stream are lost.
    pub(super) fn num_variants(&self, event: Event) -> usize {
        match event {
            Event::Pushed | Event::PushFails => self.pushing.len(),
            // See `apply`.
            Event::Break => 6,
            _ => 1,
        }
    }

    /// A hash of the state.
    pub(super) fn fingerprint(&self) -> u128 {
        struct Hasher(xxhash_rust::xxh3::Xxh3);
        impl std::fmt::Write for Hasher {
            fn write_str(&mut self, text: &str) -> std::fmt::Result {
                self.0.update(text.as_bytes());
                Ok(())
            }
        }
        let mut hasher = Hasher(xxhash_rust::xxh3::Xxh3::new());
        std::fmt::Write::write_fmt(&mut hasher, format_args!("{self:?}")).expect("hashing does not fail");
        hasher.0.digest128()
    }

    fn compute(&mut self) {
        self.engine.push_back(prefill::Input::Started);
        // First a cached prefix, all layers at once. Then the rest, layer by layer.
        let num_blocks = self.sizes.num_tokens.div_ceil(self.sizes.prefill_block_size);
        let num_prefix_blocks = num_blocks / 2;
        let blocks = |range: std::ops::Range<usize>| range.map(|n| BlockId(n as u32)).collect::<Vec<_>>();
        self.engine.push_back(prefill::Input::Ready {
            layers: 0..LAYERS,
            first_block_idx: 0,
            blocks: blocks(0..num_prefix_blocks),
        });
        for layer_idx in 0..LAYERS {
            self.engine.push_back(prefill::Input::Ready {
                layers: layer_idx..layer_idx + 1,
                first_block_idx: num_prefix_blocks,
                blocks: blocks(num_prefix_blocks..num_blocks),
            });
        }
        self.engine.push_back(prefill::Input::FirstToken(5));
    }

    /// Closes the route of the peer. Quarantined blocks become free.
    fn close_route(&mut self) {
        self.is_route_open = false;
        if self.blocks == Blocks::Quarantined {
            self.blocks = Blocks::Released;
        }
    }
}
