//! What the two sides of a handoff say to each other: any messages from the peer, while this side's engine and data plane
//! keep to the state machines' rules.
#![no_main]

use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use baton_fuzz::{Change, pick};
use baton_handoff::{
    Begin, DecodeMessage, Extent, Failed, FailureKind, Generation, Grant, KvFault, Limits, Piece, PieceWrite,
    PrefillMessage, PushError, Pushed, RouteError, Secret, TransportKind, decode, prefill,
};
use baton_kv_cache::{BlockId, KvDtype, KvLayout};
use baton_proto::worker as proto;
use baton_worker::{
    convert::request_from_begin,
    convert_handoff::{
        FirstToken, Payload, begin_from_proto, decode_message_from_proto, decode_message_to_proto,
        grant_from_proto, grant_to_proto, prefill_message_from_proto, prefill_message_to_proto,
    },
};
use libfuzzer_sys::fuzz_target;
use prost::Message;

const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };
const INCARNATION: u64 = 7;
const GENERATION: u64 = 11;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    /// As bytes on the wire.
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
    Commit {
        generation: bool,
    },
    Cancel,
    StreamClosed,
    Time(u8),
    /// Whatever the engine or the data plane owes.
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
    Granted { fits: bool },
    ReserveFailed,
    Verified(bool),
    Cancel,
}

fuzz_target!(|input: Input<'_>| match input {
    Input::Bytes(bytes) => {
        // What is understood is said back in the same words.
        if let Some(message) = to_prefill(bytes) {
            again(&message);
        }
        if let Some(message) = to_decode(bytes) {
            let said = prefill_message_to_proto(message.clone());
            // NaN is not itself.
            let heard = prefill_message_from_proto(said).expect("own words");
            assert_eq!(format!("{heard:?}"), format!("{message:?}"));
        }
        // What a decode worker lends to be measured.
        for grant in proto::Loan::decode(bytes).into_iter().flat_map(|loan| loan.grants).map(grant_from_proto)
        {
            assert_eq!(grant_from_proto(grant_to_proto(grant.clone())), grant);
        }
    }
    Input::ToPrefill { limits, steps } => Prefill::new(limits).run(&steps),
    Input::ToDecode { num_blocks, num_cached_blocks, is_cached, steps } => {
        let extent = if is_cached { Extent::Cached } else { Extent::Whole };
        Decode::new(num_blocks.into(), num_cached_blocks.into(), extent).run(&steps);
    }
});

fn to_prefill(bytes: &[u8]) -> Option<DecodeMessage> {
    from_decode_worker(proto::DecodeMessage::decode(bytes).ok()?)
}

/// As a prefill worker reads it.
fn from_decode_worker(message: proto::DecodeMessage) -> Option<DecodeMessage> {
    let Some(proto::decode_message::Message::Begin(begin)) = &message.message else {
        return decode_message_from_proto(message).ok();
    };
    let request = request_from_begin(begin).ok()?;
    let (begin, format) = begin_from_proto(begin).ok()?;
    assert_eq!(begin.num_blocks(), request.num_known_tokens().div_ceil(format.block_size));
    Some(DecodeMessage::Begin(begin))
}

fn again(message: &DecodeMessage) {
    if !matches!(message, DecodeMessage::Begin(_)) {
        let (request, kv_format) = Default::default();
        let format = baton_kv_cache::KvFormat::new(kv_format, &LAYOUT, String::new());
        let payload = Payload { request: &request, kv_format: &format, wire: None, prefix_source: None };
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

/// A prefill worker whose peer says anything.
struct Prefill {
    machine: prefill::PrefillHandoff,
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
        Prefill {
            machine: prefill::PrefillHandoff::new(
                INCARNATION,
                LAYOUT.block_size,
                LAYOUT.num_layers,
                limits,
                now,
            ),
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
        // However it was left, it comes to an end by itself.
        for _ in 0..4 {
            if let Some(deadline) = self.machine.deadline() {
                self.now = self.now.max(deadline);
                self.take(prefill::Input::Tick);
            }
        }
        assert!(self.machine.is_over() && self.is_closed);
        assert_eq!(self.num_finished, 1);
        assert_eq!(self.num_released, usize::from(self.was_computed));
    }

    fn take(&mut self, input: prefill::Input<FirstToken>) {
        for action in self.machine.on(input, self.now) {
            self.obey(action);
        }
    }

    fn obey(&mut self, action: prefill::Action<FirstToken>) {
        use prefill::Action as A;
        assert!(!self.is_closed, "nothing follows Close");
        match action {
            A::Compute => (self.is_computing, self.was_computed) = (true, true),
            A::Hold => (self.is_holding, self.was_computed) = (true, true),
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

    fn input(&mut self, step: &PrefillStep<'_>) -> Option<prefill::Input<FirstToken>> {
        use prefill::Input as I;
        let sent = |message: proto::decode_message::Message| {
            let bytes = proto::DecodeMessage { message: Some(message) }.encode_to_vec();
            Some(to_prefill(&bytes).map_or_else(|| I::StreamClosed("nonsense".into()), I::Message))
        };
        Some(match step {
            PrefillStep::Bytes(bytes) => {
                let message = to_prefill(bytes);
                if let Some(DecodeMessage::Begin(begin)) = &message {
                    self.began(begin.num_tokens, begin.block_size);
                }
                message.map_or_else(|| I::StreamClosed("nonsense".into()), I::Message)
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
            PrefillStep::Commit { generation: is_right } => {
                let generation = generation(*is_right);
                return sent(proto::decode_message::Message::Commit(proto::Commit { generation }));
            }
            PrefillStep::Cancel => {
                return sent(proto::decode_message::Message::Cancel(proto::Cancel::default()));
            }
            PrefillStep::StreamClosed => I::StreamClosed("left".into()),
            PrefillStep::Time(seconds) => {
                self.now += Duration::from_secs((*seconds).into());
                I::Tick
            }
            PrefillStep::Started if self.is_computing && self.num_layers_ready == 0 => {
                self.num_layers_ready = 1;
                I::Started
            }
            // Full blocks within the sequence, as an engine finds them.
            PrefillStep::Held { num_blocks } if std::mem::take(&mut self.is_holding) => {
                let num_blocks = usize::from(*num_blocks).min(self.num_blocks);
                I::Held { blocks: (0..num_blocks as u32).map(BlockId).collect() }
            }
            // In the order of an engine: layer by layer, all blocks, once it has started.
            PrefillStep::Ready { layers } if self.is_computing && self.num_layers_ready > 0 => {
                let first = self.num_layers_ready - 1;
                let end = LAYOUT.num_layers.min(first + usize::from(*layers % 3));
                self.num_layers_ready = end + 1;
                let blocks = (0..self.num_blocks as u32).map(BlockId).collect();
                I::Ready { layers: first..end, first_block_idx: 0, blocks }
            }
            PrefillStep::FirstToken if self.is_computing && self.num_layers_ready > LAYOUT.num_layers => {
                self.is_computing = false;
                let token = baton_engine::SampledToken { id: 1, logprobs: None };
                I::FirstToken(FirstToken { token, cached_tokens: 0 })
            }
            PrefillStep::Fail if self.is_computing => {
                self.is_computing = false;
                I::Fail(Failed::new(FailureKind::Internal, "broken"))
            }
            PrefillStep::Routed(is_ok) if std::mem::take(&mut self.is_routing) => I::Routed(match is_ok {
                true => Ok(()),
                false => Err(RouteError::Closed),
            }),
            PrefillStep::Pushed(is_ok) => {
                let pieces = self.pushing.pop()?;
                let piece = |write: &PieceWrite| Piece {
                    block_idx: write.block_idx,
                    layer_idx: write.layer_idx,
                    checksum: 0,
                };
                I::Pushed(match is_ok {
                    true => Ok(Pushed {
                        pieces: pieces.iter().map(piece).collect(),
                        transport: TransportKind::Tcp,
                        bytes: 1,
                    }),
                    false => Err(PushError::Closed),
                })
            }
            PrefillStep::Idle if std::mem::take(&mut self.is_stopping) => I::Idle,
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

/// A decode worker whose peer says anything.
struct Decode {
    machine: decode::DecodeHandoff,
    now: Instant,
    extent: Extent,
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
    fn new(num_blocks: usize, num_cached_blocks: usize, extent: Extent) -> Decode {
        let now = Instant::now();
        let begin = Begin {
            request_id: "r".into(),
            attempt: 0,
            prefill_incarnation: INCARNATION,
            decode_worker_id: "d".into(),
            decode_incarnation: 8,
            num_tokens: num_blocks * LAYOUT.block_size,
            block_size: LAYOUT.block_size,
            deadline: Limits::default().total,
            extent,
        };
        let (machine, _) =
            decode::DecodeHandoff::begin::<FirstToken>(begin, LAYOUT.num_layers, Limits::default(), now);
        Decode {
            machine,
            now,
            extent,
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
            if let Some(input) = self.input(step) {
                self.take(input);
            }
        }
        for _ in 0..4 {
            if let Some(deadline) = self.machine.deadline() {
                self.now = self.now.max(deadline);
                self.take(decode::Input::Tick);
            }
        }
        assert!(self.machine.is_over() && self.is_closed);
        assert_eq!(self.num_finished, 1);
        assert!(self.num_tokens <= 1);
    }

    fn take(&mut self, input: decode::Input<FirstToken>) {
        for action in self.machine.on(input, self.now) {
            self.obey(action);
        }
    }

    fn obey(&mut self, action: decode::Action<FirstToken>) {
        use decode::Action as A;
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
                if result.is_ok() {
                    let num_pieces = (self.num_blocks - self.num_cached_blocks) * LAYOUT.num_layers;
                    let num_tokens = usize::from(self.extent == Extent::Whole);
                    assert!(self.is_granted && self.num_tokens == num_tokens);
                    assert_eq!(self.num_verified, num_pieces, "decodes on KV that was not verified");
                }
            }
            A::Close => self.is_closed = true,
            A::Send(_) | A::Revoke(_) | A::WriterStopped(_) => {}
        }
    }

    fn input(&mut self, step: &DecodeStep<'_>) -> Option<decode::Input<FirstToken>> {
        use decode::Input as I;
        use proto::prefill_message::Message as M;
        let received = |bytes: &[u8]| match to_decode(bytes) {
            Some(message) => I::Message(message),
            None => I::StreamClosed("nonsense".into()),
        };
        let sent =
            |message: M| Some(received(&proto::PrefillMessage { message: Some(message) }.encode_to_vec()));
        Some(match step {
            DecodeStep::Bytes(bytes) => received(bytes),
            DecodeStep::Started => return sent(M::Started(proto::Started {})),
            DecodeStep::Held { num_tokens } => {
                let num_tokens = num_tokens.of(LAYOUT.block_size as u64);
                return sent(M::Held(proto::Held { num_tokens }));
            }
            DecodeStep::FirstToken { id, top, cached_tokens } => {
                let top =
                    top.iter().map(|&(token_id, logprob)| baton_proto::v1::TopLogprob { token_id, logprob });
                let logprobs =
                    baton_proto::v1::TokenLogprobs { token_id: *id, logprob: 0.0, top: top.collect() };
                let token = proto::Token { id: *id, logprobs: Some(logprobs), ..proto::Token::default() };
                let (token, cached_tokens) = (Some(token), *cached_tokens);
                return sent(M::FirstToken(proto::FirstToken { token, cached_tokens }));
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
                I::ReserveFailed(Failed::new(FailureKind::Full, "full"))
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
