//! Messages between the two sides of a handoff: any messages from the peer, while this side's engine and data plane
//! follow the rules of the state machines.
#![no_main]

use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use baton_fuzz::{Change, pick};
use baton_handoff::{
    Begin, DecodeMessage, Generation, Grant, KvFault, Limits, Piece, PieceWrite, PrefillMessage, PushError,
    Pushed, RouteError, Secret, TransportKind,
    decode::{DecodeAction, DecodeInput, PrefixFetch, RemotePrefill, RemotePrefilled},
    prefill::{CachedHandoff, ComputeInput, ComputedHandoff, Opening, OwnSide, PrefillAction, PrefillInput},
};
use baton_kv_cache::{BlockId, KvDtype, KvLayout};
use baton_proto::worker as proto;
use baton_request::{Failure, FailureKind};
use baton_worker_messages::{
    FirstToken, Payload, decode_message_from_proto, decode_message_to_proto, grant_from_proto,
    grant_to_proto, prefill_message_from_proto, prefill_message_to_proto, request_from_begin,
};
use libfuzzer_sys::fuzz_target;
use prost::Message;

const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };
const INCARNATION: u64 = 7;
const GENERATION: u64 = 11;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    /// A message as bytes.
    Bytes(&'a [u8]),
    ToPrefill {
        limits: u8,
        steps: Vec<PrefillStep<'a>>,
    },
    ToDecode {
        num_blocks: u8,
        num_cached_blocks: u8,
        is_cached: bool,
        steps: Vec<DecodeStep<'a>>,
    },
}

#[derive(Arbitrary, Debug)]
enum PrefillStep<'a> {
    Bytes(&'a [u8]),
    Begin {
        num_tokens: Change,
        num_output_tokens: Change,
        incarnation: bool,
        dtype: u8,
        block_size: Change,
        deadline_ms: Change,
        cached_only: bool,
    },
    Grant {
        cached: Change,
        blocks: Vec<u8>,
        offers: Vec<(bool, &'a str, u64)>,
    },
    Progress,
    Commit {
        generation: bool,
    },
    Cancel {
        finished: bool,
    },
    StreamClosed,
    Time(u8),
    /// The next answer that the engine or the data plane owes.
    Started,
    Held {
        num_blocks: u8,
    },
    Ready {
        layers: u8,
    },
    FirstToken,
    Fail,
    Routed(bool),
    Pushed(bool),
    Idle,
}

#[derive(Arbitrary, Debug)]
enum DecodeStep<'a> {
    Bytes(&'a [u8]),
    Started,
    Held { num_tokens: Change },
    FirstToken { id: u32, top: Vec<(u32, f32)>, cached_tokens: u32 },
    Written { generation: bool, transport: u8, pieces: Vec<(u8, u8)>, rest: bool, last: bool, bytes: Change },
    Stopped,
    Failed(i32),
    StreamClosed,
    Time(u8),
    Progress,
    Granted { fits: bool },
    ReserveFailed,
    Verified(bool),
    Cancel,
    RequestEnded,
}

fuzz_target!(|input: Input<'_>| match input {
    Input::Bytes(bytes) => {
        // A message that is accepted is converted back to the same message.
        if let Some(message) = to_prefill(bytes) {
            again(&message);
        }
        if let Some(message) = to_decode(bytes) {
            let said = prefill_message_to_proto(message.clone());
            // NaN does not equal itself.
            let heard = prefill_message_from_proto(said).expect("own words");
            assert_eq!(format!("{heard:?}"), format!("{message:?}"));
        }
        // Blocks that a decode worker lends for a measurement.
        for grant in proto::Loan::decode(bytes).into_iter().flat_map(|loan| loan.grants).map(grant_from_proto)
        {
            assert_eq!(grant_from_proto(grant_to_proto(grant.clone())), grant);
        }
    }
    Input::ToPrefill { limits, steps } => Prefill::new(limits).run(&steps),
    Input::ToDecode { num_blocks, num_cached_blocks, is_cached, steps } => {
        Decode::new(num_blocks.into(), num_cached_blocks.into(), is_cached).run(&steps);
    }
});

fn to_prefill(bytes: &[u8]) -> Option<DecodeMessage> {
    from_decode_worker(proto::DecodeMessage::decode(bytes).ok()?)
}

/// Converts a message as a prefill worker does.
fn from_decode_worker(message: proto::DecodeMessage) -> Option<DecodeMessage> {
    let mut num_tokens = None;
    if let Some(proto::decode_message::Message::Begin(begin)) = &message.message {
        num_tokens = Some(request_from_begin(begin).ok()?.num_known_tokens());
    }
    let message = decode_message_from_proto(message).ok()?;
    if let DecodeMessage::Begin(begin) | DecodeMessage::Fetch(begin) = &message {
        assert_eq!(Some(begin.num_tokens), num_tokens);
    }
    Some(message)
}

fn again(message: &DecodeMessage) {
    if !matches!(message, DecodeMessage::Begin(_) | DecodeMessage::Fetch(_)) {
        let (request, kv_format) = Default::default();
        let format = baton_kv_cache::KvFormat::new(kv_format, &LAYOUT, String::new());
        let payload =
            Payload { request: &request, kv_format: &format, wire: None, prefix_source: None, ticket: None };
        let said = decode_message_to_proto(message.clone(), payload);
        assert_eq!(decode_message_from_proto(said).as_ref(), Ok(message));
    }
}

fn to_decode(bytes: &[u8]) -> Option<PrefillMessage<FirstToken>> {
    prefill_message_from_proto(proto::PrefillMessage::decode(bytes).ok()?).ok()
}

fn generation(is_right: bool) -> u64 {
    if is_right { GENERATION } else { 1 }
}

/// An event at a prefill worker.
enum Give {
    Engine(ComputeInput<FirstToken>),
    Held(Vec<BlockId>),
    Other(PrefillInput),
}

fn said(message: Option<DecodeMessage>) -> PrefillInput {
    message.map_or_else(|| PrefillInput::StreamClosed("nonsense".into()), PrefillInput::Message)
}

/// The machine of a prefill worker. The first message of its peer decides which one.
enum Machine {
    Opening(Opening),
    Computed(ComputedHandoff),
    Cached(CachedHandoff),
    Over,
}

impl Machine {
    fn deadline(&self) -> Option<Instant> {
        match self {
            Machine::Opening(opening) => Some(opening.deadline()),
            Machine::Computed(machine) => machine.deadline(),
            Machine::Cached(machine) => machine.deadline(),
            Machine::Over => None,
        }
    }
}

/// A prefill worker whose peer sends any messages.
struct Prefill {
    machine: Machine,
    now: Instant,
    is_computing: bool,
    is_holding: bool,
    num_layers_ready: usize,
    is_routing: bool,
    pushing: Vec<Vec<PieceWrite>>,
    is_stopping: bool,
    num_blocks: usize,
    num_peer_blocks: usize,
    num_finished: usize,
    num_released: usize,
    was_computed: bool,
    is_closed: bool,
}

impl Prefill {
    fn new(limits: u8) -> Prefill {
        let now = Instant::now();
        let limits = Limits { total: Duration::from_secs(limits.into()), ..Limits::default() };
        let KvLayout { block_size, num_layers, .. } = LAYOUT;
        let own = OwnSide { incarnation: INCARNATION, block_size, num_layers };
        Prefill {
            machine: Machine::Opening(Opening::new(own, limits, now)),
            now,
            is_computing: false,
            is_holding: false,
            num_layers_ready: 0,
            is_routing: false,
            pushing: vec![],
            is_stopping: false,
            num_blocks: 0,
            num_peer_blocks: 0,
            num_finished: 0,
            num_released: 0,
            was_computed: false,
            is_closed: false,
        }
    }

    fn run(mut self, steps: &[PrefillStep<'_>]) {
        for step in steps {
            if let Some(input) = self.input(step) {
                self.take(input);
            }
        }
        // The machine ends by itself from every state.
        for _ in 0..4 {
            if let Some(deadline) = self.machine.deadline() {
                self.now = self.now.max(deadline);
                self.take(Give::Other(PrefillInput::Tick));
            }
        }
        assert!(self.machine.deadline().is_none() && self.is_closed);
        assert_eq!(self.num_finished, 1);
        assert_eq!(self.num_released, usize::from(self.was_computed));
    }

    fn take(&mut self, input: Give) {
        let now = self.now;
        self.machine = match (std::mem::replace(&mut self.machine, Machine::Over), input) {
            (Machine::Opening(opening), Give::Other(PrefillInput::Message(DecodeMessage::Begin(begin)))) => {
                match opening.begin(&begin, now) {
                    Ok(machine) => {
                        (self.is_computing, self.was_computed) = (true, true);
                        Machine::Computed(machine)
                    }
                    Err(actions) => self.obey(actions, Machine::Over),
                }
            }
            (Machine::Opening(opening), Give::Other(PrefillInput::Message(DecodeMessage::Fetch(begin)))) => {
                match opening.fetch(&begin, now) {
                    Ok(machine) => {
                        (self.is_holding, self.was_computed) = (true, true);
                        Machine::Cached(machine)
                    }
                    Err(actions) => self.obey(actions, Machine::Over),
                }
            }
            (Machine::Opening(opening), Give::Other(input)) => match opening.on(input, now) {
                Ok(opening) => Machine::Opening(opening),
                Err(actions) => self.obey(actions, Machine::Over),
            },
            (Machine::Computed(mut machine), Give::Engine(input)) => {
                let actions = machine.on(input, now);
                self.obey(actions, Machine::Computed(machine))
            }
            (Machine::Computed(mut machine), Give::Other(input)) => {
                let actions = machine.on(ComputeInput::Other(input), now);
                self.obey(actions, Machine::Computed(machine))
            }
            (Machine::Cached(mut machine), Give::Held(blocks)) => {
                let actions = machine.held(&blocks, now);
                self.obey(actions, Machine::Cached(machine))
            }
            (Machine::Cached(mut machine), Give::Other(input)) => {
                let actions = machine.on(input, now);
                self.obey(actions, Machine::Cached(machine))
            }
            (machine, _) => machine,
        };
    }

    fn obey<E>(&mut self, actions: Vec<PrefillAction<FirstToken, E>>, machine: Machine) -> Machine {
        use PrefillAction as A;
        for action in actions {
            assert!(!self.is_closed, "nothing follows Close");
            match action {
                A::Route { .. } => self.is_routing = true,
                A::Push(pieces) => {
                    assert!(!self.is_stopping);
                    self.pushing.push(pieces);
                }
                A::Send(message) => drop(prefill_message_to_proto(message)),
                A::Finish(_) => self.num_finished += 1,
                A::Stop => {
                    (self.is_computing, self.is_routing, self.is_stopping) = (false, false, true);
                    self.is_holding = false;
                    self.pushing.clear();
                }
                A::Release => {
                    self.num_released += 1;
                    self.is_computing = false;
                }
                A::Close => self.is_closed = true,
            }
        }
        machine
    }

    fn input(&mut self, step: &PrefillStep<'_>) -> Option<Give> {
        use ComputeInput as C;
        use PrefillInput as I;
        let sent = |message: proto::decode_message::Message| {
            let bytes = proto::DecodeMessage { message: Some(message) }.encode_to_vec();
            Some(Give::Other(said(to_prefill(&bytes))))
        };
        Some(match step {
            PrefillStep::Bytes(bytes) => {
                let message = to_prefill(bytes);
                if let Some(DecodeMessage::Begin(begin) | DecodeMessage::Fetch(begin)) = &message {
                    self.began(begin.num_tokens, begin.block_size);
                }
                Give::Other(said(message))
            }
            PrefillStep::Begin {
                num_tokens,
                num_output_tokens,
                incarnation,
                dtype,
                block_size,
                deadline_ms,
                cached_only,
            } => {
                let num_tokens = num_tokens.of(10).min(1000) as usize;
                let block_size = block_size.of(LAYOUT.block_size as u64) as u32;
                self.began(num_tokens, block_size as usize);
                let dtype = (*pick(&["f32", "f32", "f16", "none"], *dtype)).to_owned();
                return sent(proto::decode_message::Message::Begin(proto::Begin {
                    request_id: "r".into(),
                    token_ids: vec![1; num_tokens],
                    num_output_tokens: num_output_tokens.of(0) as u32,
                    prefill_incarnation: if *incarnation { INCARNATION } else { 1 },
                    sampling: Some(proto::Sampling::default()),
                    kv_format: Some(proto::KvFormat { dtype, block_size, ..proto::KvFormat::default() }),
                    deadline_ms: deadline_ms.of(1000),
                    cached_only: *cached_only,
                    ..proto::Begin::default()
                }));
            }
            PrefillStep::Grant { cached, blocks, offers } => {
                let rest = self.num_peer_blocks.saturating_sub(blocks.len());
                let transports = offers.iter().map(|(is_tcp, place, pool)| {
                    use proto::transport_offer::Transport;
                    let transport = match is_tcp {
                        true => Transport::Tcp(proto::TcpOffer { address: (*place).into(), pool: *pool }),
                        false => Transport::Shm(proto::ShmOffer {
                            host_id: "h".into(),
                            socket_path: (*place).into(),
                            pool: *pool,
                        }),
                    };
                    proto::TransportOffer { transport: Some(transport) }
                });
                return sent(proto::decode_message::Message::Grant(proto::Grant {
                    generation: GENERATION,
                    token: vec![7; 16].into(),
                    num_cached_blocks: cached.of(rest as u64) as u32,
                    block_ids: blocks.iter().map(|block| u32::from(*block)).collect(),
                    transports: transports.collect(),
                }));
            }
            PrefillStep::Progress => {
                return sent(proto::decode_message::Message::Progress(proto::Progress {}));
            }
            PrefillStep::Commit { generation: is_right } => {
                let generation = generation(*is_right);
                return sent(proto::decode_message::Message::Commit(proto::Commit { generation }));
            }
            PrefillStep::Cancel { finished } => {
                let cancel = proto::Cancel { finished: *finished, ..proto::Cancel::default() };
                return sent(proto::decode_message::Message::Cancel(cancel));
            }
            PrefillStep::StreamClosed => Give::Other(I::StreamClosed("left".into())),
            PrefillStep::Time(seconds) => {
                self.now += Duration::from_secs((*seconds).into());
                Give::Other(I::Tick)
            }
            PrefillStep::Started if self.is_computing && self.num_layers_ready == 0 => {
                self.num_layers_ready = 1;
                Give::Engine(C::Started)
            }
            // Full blocks within the sequence, as in an engine's prefix cache.
            PrefillStep::Held { num_blocks } if std::mem::take(&mut self.is_holding) => {
                let num_blocks = usize::from(*num_blocks).min(self.num_blocks);
                Give::Held((0..num_blocks as u32).map(BlockId).collect())
            }
            // In the order of an engine: layer by layer, all blocks, once it has started.
            PrefillStep::Ready { layers } if self.is_computing && self.num_layers_ready > 0 => {
                let first = self.num_layers_ready - 1;
                let end = LAYOUT.num_layers.min(first + usize::from(*layers % 3));
                self.num_layers_ready = end + 1;
                let blocks = (0..self.num_blocks as u32).map(BlockId).collect();
                Give::Engine(C::Ready { layers: first..end, first_block_idx: 0, blocks })
            }
            PrefillStep::FirstToken if self.is_computing && self.num_layers_ready > LAYOUT.num_layers => {
                self.is_computing = false;
                let token = baton_engine::SampledToken { id: 1, logprobs: None };
                Give::Engine(C::FirstToken(FirstToken {
                    token,
                    cached_tokens: 0,
                    blended_tokens: 0,
                    pace: None,
                }))
            }
            PrefillStep::Fail if self.is_computing => {
                self.is_computing = false;
                Give::Other(I::Fail(Failure::new(FailureKind::Internal, "broken")))
            }
            PrefillStep::Routed(is_ok) if std::mem::take(&mut self.is_routing) => {
                Give::Other(I::Routed(match is_ok {
                    true => Ok(()),
                    false => Err(RouteError::Closed),
                }))
            }
            PrefillStep::Pushed(is_ok) => {
                let pieces = self.pushing.pop()?;
                let piece = |write: &PieceWrite| Piece {
                    block_idx: write.block_idx,
                    layer_idx: write.layer_idx,
                    checksum: 0,
                };
                Give::Other(I::Pushed(match is_ok {
                    true => Ok(Pushed {
                        pieces: pieces.iter().map(piece).collect(),
                        transport: TransportKind::Tcp,
                        bytes: 1,
                    }),
                    false => Err(PushError::Closed),
                }))
            }
            PrefillStep::Idle if std::mem::take(&mut self.is_stopping) => Give::Other(I::Idle),
            _ => return None,
        })
    }

    /// The first `Begin` is the one that counts.
    fn began(&mut self, num_tokens: usize, peer_block_size: usize) {
        if !self.was_computed {
            self.num_blocks = LAYOUT.num_blocks_for(num_tokens);
            // A block of no tokens is refused.
            self.num_peer_blocks = num_tokens.div_ceil(peer_block_size.max(1));
        }
    }
}

/// The machine of a decode worker.
enum Taking {
    Prefill(RemotePrefill),
    Fetch(PrefixFetch),
}

/// A decode worker whose peer sends any messages.
struct Decode {
    machine: Taking,
    now: Instant,
    num_blocks: usize,
    num_cached_blocks: usize,
    is_reserving: bool,
    is_granted: bool,
    verifying: Vec<usize>,
    num_verified: usize,
    num_tokens: usize,
    num_finished: usize,
    is_closed: bool,
}

impl Decode {
    fn new(num_blocks: usize, num_cached_blocks: usize, is_fetch: bool) -> Decode {
        let now = Instant::now();
        let begin = Begin {
            request_id: "r".into(),
            attempt: 0,
            prefill_incarnation: INCARNATION,
            num_tokens: num_blocks * LAYOUT.block_size,
            block_size: LAYOUT.block_size,
            deadline: Limits::default().total,
        };
        let limits = Limits::default();
        let machine = match is_fetch {
            true => Taking::Fetch(PrefixFetch::begin(begin, LAYOUT.num_layers, limits, now).0),
            false => {
                let (machine, _) = RemotePrefill::begin::<FirstToken>(begin, LAYOUT.num_layers, limits, now);
                Taking::Prefill(machine)
            }
        };
        Decode {
            machine,
            now,
            num_blocks,
            num_cached_blocks: num_cached_blocks.min(num_blocks),
            is_reserving: false,
            is_granted: false,
            verifying: vec![],
            num_verified: 0,
            num_tokens: 0,
            num_finished: 0,
            is_closed: false,
        }
    }

    fn run(mut self, steps: &[DecodeStep<'_>]) {
        for step in steps {
            if matches!(step, DecodeStep::RequestEnded) {
                self.end_request();
            } else if let Some(input) = self.input(step) {
                self.take(input);
            }
        }
        for _ in 0..4 {
            if let Some(deadline) = self.deadline() {
                self.now = self.now.max(deadline);
                self.take(DecodeInput::Tick);
            }
        }
        assert!(self.deadline().is_none() && self.is_closed);
        assert_eq!(self.num_finished, 1);
        assert!(self.num_tokens <= 1);
    }

    fn deadline(&self) -> Option<Instant> {
        match &self.machine {
            Taking::Prefill(machine) => machine.deadline(),
            Taking::Fetch(machine) => machine.deadline(),
        }
    }

    fn take(&mut self, input: DecodeInput<FirstToken>) {
        match &mut self.machine {
            Taking::Prefill(machine) => {
                let actions = machine.on(input, self.now);
                self.obey(actions, |outcome| match outcome {
                    RemotePrefilled::Committed(_) => Some(1),
                    RemotePrefilled::Ended => None,
                });
            }
            Taking::Fetch(machine) => {
                let actions = machine.on(input, self.now);
                self.obey(actions, |_| Some(0));
            }
        }
    }

    /// The call of the driver after a first token that ends the request.
    fn end_request(&mut self) {
        if let Taking::Prefill(machine) = &mut self.machine {
            let actions = machine.request_ended::<FirstToken>(self.now);
            self.obey(actions, |outcome| {
                assert_eq!(outcome, RemotePrefilled::Ended);
                None
            });
        }
    }

    /// `num_tokens`: the number of first tokens of a handoff that commits.
    fn obey<T, E>(&mut self, actions: Vec<DecodeAction<T, E>>, num_tokens: impl Fn(E) -> Option<usize>) {
        use DecodeAction as A;
        for action in actions {
            assert!(!self.is_closed || matches!(action, A::Revoke(_)), "nothing but Revoke follows Close");
            match action {
                A::Reserve { num_tokens } => {
                    self.is_reserving = true;
                    self.num_blocks = num_tokens.div_ceil(LAYOUT.block_size);
                    self.num_cached_blocks = self.num_cached_blocks.min(self.num_blocks);
                }
                A::FirstToken(_) => self.num_tokens += 1,
                A::Verify(pieces) => self.verifying.push(pieces.len()),
                A::Finish(result) => {
                    self.num_finished += 1;
                    self.verifying.clear();
                    self.is_reserving = false;
                    let Ok(outcome) = result else { continue };
                    let Some(num_tokens) = num_tokens(outcome) else {
                        assert_eq!(self.num_tokens, 1, "the first token ends a request");
                        continue;
                    };
                    let num_pieces = (self.num_blocks - self.num_cached_blocks) * LAYOUT.num_layers;
                    assert!(self.is_granted && self.num_tokens == num_tokens);
                    assert_eq!(self.num_verified, num_pieces, "decodes on KV that was not verified");
                }
                A::Close => self.is_closed = true,
                A::Send(_) | A::Revoke(_) | A::WriterStopped(_) => {}
            }
        }
    }

    fn input(&mut self, step: &DecodeStep<'_>) -> Option<DecodeInput<FirstToken>> {
        use DecodeInput as I;
        use proto::prefill_message::Message as M;
        let received = |bytes: &[u8]| match to_decode(bytes) {
            Some(message) => I::Message(message),
            None => I::StreamClosed("nonsense".into()),
        };
        let sent =
            |message: M| Some(received(&proto::PrefillMessage { message: Some(message) }.encode_to_vec()));
        Some(match step {
            DecodeStep::Bytes(bytes) => received(bytes),
            DecodeStep::Started => return sent(M::Started(proto::Started { reads_progress: true })),
            DecodeStep::Held { num_tokens } => {
                let num_tokens = num_tokens.of(LAYOUT.block_size as u64);
                return sent(M::Held(proto::Held { num_tokens }));
            }
            DecodeStep::FirstToken { id, top, cached_tokens } => {
                let top =
                    top.iter().map(|&(token_id, logprob)| baton_proto::v1::TopLogprob { token_id, logprob });
                let logprobs = baton_proto::v1::TokenLogprobs {
                    token_id: *id,
                    logprob: 0.0,
                    top: top.collect(),
                    rank: 0,
                };
                let token = proto::Token { id: *id, logprobs: Some(logprobs), ..proto::Token::default() };
                let (token, cached_tokens) = (Some(token), *cached_tokens);
                return sent(M::FirstToken(proto::FirstToken { token, cached_tokens, blended_tokens: 0 }));
            }
            DecodeStep::Written { generation: is_right, transport, pieces, rest, last, bytes } => {
                let piece =
                    |block_idx: u32, layer_idx: u32| proto::Piece { block_idx, layer_idx, checksum: 0 };
                let mut pieces: Vec<_> =
                    pieces.iter().map(|&(block, layer)| piece(block.into(), layer.into())).collect();
                if *rest {
                    let num_blocks = (self.num_blocks - self.num_cached_blocks) as u32;
                    pieces.extend((0..num_blocks).flat_map(|block| [piece(block, 0), piece(block, 1)]));
                }
                return sent(M::Written(proto::Written {
                    generation: generation(*is_right),
                    transport: (*pick(&["tcp", "shm", "rdma"], *transport)).to_owned(),
                    pieces,
                    last: *last,
                    bytes: bytes.of(512),
                }));
            }
            DecodeStep::Stopped => return sent(M::Stopped(proto::Stopped {})),
            DecodeStep::Failed(kind) => {
                return sent(M::Failed(proto::Failed { kind: *kind, ..proto::Failed::default() }));
            }
            DecodeStep::StreamClosed => I::StreamClosed("left".into()),
            DecodeStep::Time(seconds) => {
                self.now += Duration::from_secs((*seconds).into());
                I::Tick
            }
            DecodeStep::Progress => I::Progress,
            DecodeStep::Granted { fits } if std::mem::take(&mut self.is_reserving) => {
                self.is_granted = *fits;
                let num_blocks = self.num_blocks - self.num_cached_blocks + usize::from(!fits);
                I::Granted(Grant {
                    generation: Generation(GENERATION),
                    secret: Secret([7; Secret::NUM_BYTES]),
                    num_cached_blocks: self.num_cached_blocks,
                    block_ids: (0..num_blocks as u32).map(BlockId).collect(),
                    offers: vec![],
                })
            }
            DecodeStep::ReserveFailed if std::mem::take(&mut self.is_reserving) => {
                I::ReserveFailed(Failure::new(FailureKind::Full, "full"))
            }
            DecodeStep::Verified(is_ok) => {
                let num_pieces = self.verifying.pop()?;
                self.num_verified += if *is_ok { num_pieces } else { 0 };
                let result = if *is_ok { Ok(()) } else { Err(KvFault::WrongGeneration) };
                I::Verified { num_pieces, result }
            }
            DecodeStep::Cancel => I::Cancel("left".into()),
            _ => return None,
        })
    }
}
