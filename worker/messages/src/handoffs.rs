//! Converts between the protocol's handoff messages and those of `baton-handoff`.
//!
//! `Begin` also carries the request, which [`request_from_begin`](crate::request_from_begin) reads.

use std::time::Duration;

use baton_engine::{Request, SampledToken};
use baton_handoff::{
    Begin, DecodeMessage, Generation, Grant, Piece, PrefillMessage, Pushed, Secret, TransportKind,
    TransportOffer, Written,
};
use baton_kv_cache::{BlockId, KvFormat, WireFormat};
use baton_proto::{kv_format_from_proto, kv_format_to_proto, v1, worker as proto};
use baton_worker_metrics::PromptPace;
use proto::{decode_message, prefill_message, transport_offer};

use crate::requests::{WireError, token_from_proto, token_to_proto};

/// The wire format of a `Begin` whose decode side accepts any.
const ANY_WIRE_FORMAT: &str = "any";

/// The first token, as the state machines carry it.
#[derive(Clone, Debug, PartialEq)]
pub struct FirstToken {
    /// The token.
    pub token: SampledToken,
    /// Prompt tokens found in the prefill worker's prefix cache.
    pub cached_tokens: usize,
    /// Prompt tokens whose KV came from passages that the prefill worker had kept.
    pub blended_tokens: usize,
    /// How long the prompt took there.
    pub pace: Option<PromptPace>,
}

/// What `Begin` carries beside the state machine's own fields.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'a> {
    /// The request.
    pub request: &'a Request,
    /// The format of the decode worker's blocks.
    pub kv_format: &'a KvFormat,
    /// How KV may travel; `None`: as the prefill side prefers.
    pub wire: Option<WireFormat>,
    /// The worker that probably has more of it cached than the prefill worker.
    pub prefix_source: Option<&'a proto::PrefillPeer>,
    /// The router's number for what the prefill worker gets, if it gave one.
    pub ticket: Option<proto::Ticket>,
}

/// The reason that goes with [`DecodeMessage::Done`], for prefill workers that know only `Cancel`.
const DONE: &str = "the first token ended the request";

/// Converts for the wire; only `Begin` and `Fetch` use `payload`.
pub fn decode_message_to_proto(message: DecodeMessage, payload: Payload<'_>) -> proto::DecodeMessage {
    use decode_message::Message;
    let message = match message {
        DecodeMessage::Begin(begin) => Message::Begin(begin_to_proto(begin, false, payload)),
        DecodeMessage::Fetch(begin) => Message::Begin(begin_to_proto(begin, true, payload)),
        DecodeMessage::Grant(grant) => Message::Grant(grant_to_proto(grant)),
        DecodeMessage::Progress => Message::Progress(proto::Progress {}),
        DecodeMessage::Commit { generation } => Message::Commit(proto::Commit { generation: generation.0 }),
        DecodeMessage::Cancel { reason } => Message::Cancel(proto::Cancel { reason, finished: false }),
        DecodeMessage::Done => Message::Cancel(proto::Cancel { reason: DONE.to_owned(), finished: true }),
    };
    proto::DecodeMessage { message: Some(message) }
}

/// Converts for the wire.
pub fn grant_to_proto(grant: Grant) -> proto::Grant {
    proto::Grant {
        generation: grant.generation.0,
        token: grant.secret.0.to_vec().into(),
        num_cached_blocks: grant.num_cached_blocks as u32,
        block_ids: grant.block_ids.iter().map(|block| block.0).collect(),
        transports: grant.offers.iter().map(offer_to_proto).collect(),
    }
}

/// Converts from the wire. Offers of unknown transports are dropped.
pub fn grant_from_proto(grant: proto::Grant) -> Grant {
    Grant {
        generation: Generation(grant.generation),
        // A secret of another length opens nothing.
        secret: grant.token[..].try_into().map(Secret).unwrap_or_default(),
        num_cached_blocks: grant.num_cached_blocks as usize,
        block_ids: grant.block_ids.into_iter().map(BlockId).collect(),
        offers: grant.transports.into_iter().filter_map(offer_from_proto).collect(),
    }
}

fn begin_to_proto(begin: Begin, cached_only: bool, payload: Payload<'_>) -> proto::Begin {
    let Payload { request, kv_format, wire, prefix_source, ticket } = payload;
    proto::Begin {
        request_id: begin.request_id,
        attempt: begin.attempt,
        prefill_incarnation: begin.prefill_incarnation,
        token_ids: [&request.prompt[..], &request.output].concat(),
        num_output_tokens: request.output.len() as u32,
        sampling: Some((&request.sampling).into()),
        kv_format: Some(kv_format_to_proto(kv_format)),
        priority: request.priority,
        cache_salt: request.cache_salt.clone(),
        deadline_ms: u64::try_from(begin.deadline.as_millis()).unwrap_or(u64::MAX),
        wire_format: wire.map_or(ANY_WIRE_FORMAT, WireFormat::name).to_owned(),
        cached_only,
        prefix_source: prefix_source.cloned(),
        ticket,
        blend: request.blend.as_ref().map(proto::Blend::from),
        retention: Some((&request.retention).into()),
    }
}

/// How the KV of a router's request may travel; `None`: as the decode worker prefers.
///
/// # Errors
/// When the wire format is unknown here.
pub fn wire_from_generate(message: &proto::GenerateRequest) -> Result<Option<WireFormat>, WireError> {
    Ok(match v1::KvWire::try_from(message.kv_wire) {
        Ok(v1::KvWire::Unspecified) => None,
        Ok(v1::KvWire::AsIs) => Some(WireFormat::AsIs),
        Ok(v1::KvWire::Int8) => Some(WireFormat::Int8),
        Ok(v1::KvWire::Int4) => Some(WireFormat::Int4),
        Err(_) => {
            return Err(WireError::Invalid {
                field: "kv_wire",
                value: message.kv_wire.to_string(),
                expected: "0 (as configured), 1 (as is), 3 (int8) or 4 (int4)",
            });
        }
    })
}

/// How KV may travel by a `Begin`; `None`: as the prefill side prefers. Where the wire format is unknown here KV travels as it
/// is, which every decode worker accepts.
pub fn wire_from_begin(message: &proto::Begin) -> Option<WireFormat> {
    match message.wire_format.as_str() {
        ANY_WIRE_FORMAT => None,
        name => Some(WireFormat::from_name(name).unwrap_or_default()),
    }
}

/// The state machine's part of a `Begin`, and the decode worker's KV format.
///
/// # Errors
/// When the message is invalid.
pub fn begin_from_proto(message: &proto::Begin) -> Result<(Begin, KvFormat), WireError> {
    let format = message.kv_format.clone().ok_or(WireError::Missing("kv_format"))?;
    let dtype = format.dtype.clone();
    let format = kv_format_from_proto(format).map_err(|_| WireError::Invalid {
        field: "kv_format.dtype",
        value: dtype,
        expected: "f32, f16, bf16, fp8 or int8",
    })?;
    if format.block_size == 0 {
        return Err(WireError::Missing("kv_format.block_size"));
    }
    if message.deadline_ms == 0 {
        return Err(WireError::Missing("deadline_ms"));
    }
    let begin = Begin {
        request_id: message.request_id.clone(),
        attempt: message.attempt,
        prefill_incarnation: message.prefill_incarnation,
        num_tokens: message.token_ids.len(),
        block_size: format.block_size,
        deadline: Duration::from_millis(message.deadline_ms),
    };
    Ok((begin, format))
}

/// Converts from the wire. The request in a `Begin` is read elsewhere.
///
/// # Errors
/// When the message is invalid.
pub fn decode_message_from_proto(message: proto::DecodeMessage) -> Result<DecodeMessage, WireError> {
    use decode_message::Message;
    match message.message.ok_or(WireError::Missing("message"))? {
        Message::Begin(message) => {
            let (begin, _) = begin_from_proto(&message)?;
            Ok(if message.cached_only { DecodeMessage::Fetch(begin) } else { DecodeMessage::Begin(begin) })
        }
        Message::Grant(grant) => Ok(DecodeMessage::Grant(grant_from_proto(grant))),
        Message::Progress(proto::Progress {}) => Ok(DecodeMessage::Progress),
        Message::Commit(commit) => Ok(DecodeMessage::Commit { generation: Generation(commit.generation) }),
        Message::Cancel(proto::Cancel { finished: true, .. }) => Ok(DecodeMessage::Done),
        Message::Cancel(cancel) => Ok(DecodeMessage::Cancel { reason: cancel.reason }),
    }
}

/// Converts for the wire.
pub fn prefill_message_to_proto(message: PrefillMessage<FirstToken>) -> proto::PrefillMessage {
    use prefill_message::Message;
    let message = match message {
        PrefillMessage::Started => Message::Started(proto::Started { reads_progress: true }),
        PrefillMessage::Held { num_tokens } => Message::Held(proto::Held { num_tokens: num_tokens as u64 }),
        PrefillMessage::Progress => Message::Progress(proto::Progress {}),
        PrefillMessage::FirstToken(first) => Message::FirstToken(proto::FirstToken {
            token: Some(proto::Token {
                queue_seconds: first.pace.map(|pace| pace.queue.as_secs_f64()),
                prefill_seconds: first.pace.map(|pace| pace.prefill.as_secs_f64()),
                ..token_to_proto(&first.token)
            }),
            cached_tokens: u32::try_from(first.cached_tokens).unwrap_or(u32::MAX),
            blended_tokens: u32::try_from(first.blended_tokens).unwrap_or(u32::MAX),
        }),
        PrefillMessage::Written(written) => Message::Written(written_to_proto(written)),
        PrefillMessage::Stopped => Message::Stopped(proto::Stopped {}),
        PrefillMessage::Failed(failed) => Message::Failed(failed.into()),
    };
    proto::PrefillMessage { message: Some(message) }
}

/// Converts from the wire.
///
/// # Errors
/// When the message is invalid.
pub fn prefill_message_from_proto(
    message: proto::PrefillMessage,
) -> Result<PrefillMessage<FirstToken>, WireError> {
    use prefill_message::Message;
    Ok(match message.message.ok_or(WireError::Missing("message"))? {
        Message::Started(proto::Started { .. }) => PrefillMessage::Started,
        Message::Held(held) => {
            PrefillMessage::Held { num_tokens: usize::try_from(held.num_tokens).unwrap_or(usize::MAX) }
        }
        Message::Progress(proto::Progress {}) => PrefillMessage::Progress,
        Message::FirstToken(first) => {
            let token = first.token.ok_or(WireError::Missing("token"))?;
            PrefillMessage::FirstToken(FirstToken {
                pace: pace_of(&token),
                token: token_from_proto(token),
                cached_tokens: first.cached_tokens as usize,
                blended_tokens: first.blended_tokens as usize,
            })
        }
        Message::Written(written) => PrefillMessage::Written(written_from_proto(written)?),
        Message::Stopped(proto::Stopped {}) => PrefillMessage::Stopped,
        Message::Failed(failed) => PrefillMessage::Failed(failed.into()),
    })
}

/// Durations that are none count as not said.
fn pace_of(token: &proto::Token) -> Option<PromptPace> {
    let duration = |seconds: Option<f64>| Duration::try_from_secs_f64(seconds?).ok();
    Some(PromptPace { queue: duration(token.queue_seconds)?, prefill: duration(token.prefill_seconds)? })
}

fn written_to_proto(written: Written) -> proto::Written {
    let Written { generation, pushed, last } = written;
    // Older decode workers need a transport even where nothing moved.
    let Pushed { pieces, transport, bytes } =
        pushed.unwrap_or(Pushed { pieces: Vec::new(), transport: TransportKind::Tcp, bytes: 0 });
    let piece = |piece: &Piece| proto::Piece {
        block_idx: piece.block_idx,
        layer_idx: piece.layer_idx,
        checksum: piece.checksum,
    };
    proto::Written {
        generation: generation.0,
        transport: transport.name().to_owned(),
        pieces: pieces.iter().map(piece).collect(),
        last,
        bytes,
    }
}

fn written_from_proto(written: proto::Written) -> Result<Written, WireError> {
    let proto::Written { generation, transport, pieces, last, bytes } = written;
    let (generation, mut pushed) = (Generation(generation), None);
    if !pieces.is_empty() {
        let transport = TransportKind::from_name(&transport).ok_or(WireError::Invalid {
            field: "transport",
            value: transport,
            expected: "shm, rdma, nccl or tcp",
        })?;
        let piece = |piece: proto::Piece| Piece {
            block_idx: piece.block_idx,
            layer_idx: piece.layer_idx,
            checksum: piece.checksum,
        };
        let pieces = pieces.into_iter().map(piece).collect();
        pushed = Some(Pushed { pieces, transport, bytes });
    }
    Ok(Written { generation, pushed, last })
}

fn offer_to_proto(offer: &TransportOffer) -> proto::TransportOffer {
    let transport = match offer {
        TransportOffer::Shm { host_id, socket_path, pool } => {
            transport_offer::Transport::Shm(proto::ShmOffer {
                host_id: host_id.clone(),
                socket_path: socket_path.to_string_lossy().into_owned(),
                pool: *pool,
            })
        }
        TransportOffer::Rdma { address, pool } => {
            transport_offer::Transport::Rdma(proto::RdmaOffer { address: address.clone(), pool: *pool })
        }
        TransportOffer::Nccl { address, pool } => {
            transport_offer::Transport::Nccl(proto::NcclOffer { address: address.clone(), pool: *pool })
        }
        TransportOffer::Tcp { address, pool } => {
            transport_offer::Transport::Tcp(proto::TcpOffer { address: address.clone(), pool: *pool })
        }
    };
    proto::TransportOffer { transport: Some(transport) }
}

fn offer_from_proto(offer: proto::TransportOffer) -> Option<TransportOffer> {
    Some(match offer.transport? {
        transport_offer::Transport::Shm(shm) => {
            TransportOffer::Shm { host_id: shm.host_id, socket_path: shm.socket_path.into(), pool: shm.pool }
        }
        transport_offer::Transport::Rdma(rdma) => {
            TransportOffer::Rdma { address: rdma.address, pool: rdma.pool }
        }
        transport_offer::Transport::Nccl(nccl) => {
            TransportOffer::Nccl { address: nccl.address, pool: nccl.pool }
        }
        transport_offer::Transport::Tcp(tcp) => TransportOffer::Tcp { address: tcp.address, pool: tcp.pool },
    })
}

#[cfg(test)]
mod tests {
    use baton_kv_cache::{KvDtype, KvLayout};
    use baton_request::{Failure, FailureKind, Retention};

    use super::*;

    fn layout() -> KvLayout {
        KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 2, dtype: KvDtype::F16 }
    }

    #[test]
    fn messages_of_the_decode_side_survive_the_wire() {
        let (id, prompt, output) = ("r".into(), [1; 9].into(), vec![2]);
        let retention = Retention { rest_is_low: true, ..Retention::default() };
        let request = Request { id, prompt, output, priority: -4, retention, ..Request::default() };
        let kv_format = KvFormat::new("rev".into(), &layout(), "theta".into());
        let (kv_format, prefix_source) = (&kv_format, None);
        let payload = Payload { request: &request, kv_format, wire: None, prefix_source, ticket: None };
        let begin = Begin {
            request_id: "r".into(),
            attempt: 2,
            prefill_incarnation: 7,
            num_tokens: 10,
            block_size: 4,
            deadline: Duration::from_millis(1500),
        };
        let wire = decode_message_to_proto(DecodeMessage::Begin(begin.clone()), payload);
        let Some(decode_message::Message::Begin(wire)) = wire.message else { panic!("{wire:?}") };
        assert_eq!(begin_from_proto(&wire), Ok((begin.clone(), kv_format.clone())));
        assert_eq!(wire.priority, -4);
        assert!(wire.retention.as_ref().is_some_and(|retention| retention.rest_is_low));
        let source =
            proto::PrefillPeer { worker_id: "d1".into(), incarnation: 3, address: "http://h".into() };
        let sourced =
            begin_to_proto(begin.clone(), false, Payload { prefix_source: Some(&source), ..payload });
        assert_eq!(sourced.prefix_source, Some(source));
        let ticket = Some(proto::Ticket { router: 3, number: 5, settled_below: 4 });
        assert_eq!(begin_to_proto(begin.clone(), false, Payload { ticket, ..payload }).ticket, ticket);
        for message in [DecodeMessage::Begin(begin.clone()), DecodeMessage::Fetch(begin.clone())] {
            let wire = decode_message_to_proto(message.clone(), payload);
            assert_eq!(decode_message_from_proto(wire), Ok(message));
        }
        for wire in [None, Some(WireFormat::AsIs), Some(WireFormat::Int4)] {
            let wire_format = begin_to_proto(begin.clone(), false, Payload { wire, ..payload }).wire_format;
            assert_eq!(wire_from_begin(&proto::Begin { wire_format, ..proto::Begin::default() }), wire);
        }
        for unknown in ["", "int2"] {
            let begin = proto::Begin { wire_format: unknown.into(), ..proto::Begin::default() };
            assert_eq!(wire_from_begin(&begin), Some(WireFormat::AsIs));
        }
        let format_without_block_size = KvFormat { block_size: 0, ..kv_format.clone() };
        let wire = proto::Begin { kv_format: Some(kv_format_to_proto(&format_without_block_size)), ..wire };
        assert_eq!(begin_from_proto(&wire), Err(WireError::Missing("kv_format.block_size")));

        let messages = [
            DecodeMessage::Grant(Grant {
                secret: Secret([7; Secret::NUM_BYTES]),
                generation: Generation(5),
                num_cached_blocks: 1,
                block_ids: vec![BlockId(3), BlockId(9)],
                offers: vec![
                    TransportOffer::Shm { host_id: "h".into(), socket_path: "/s".into(), pool: 4 },
                    TransportOffer::Rdma { address: "h:2".into(), pool: 4 },
                    TransportOffer::Nccl { address: "h:3".into(), pool: 4 },
                    TransportOffer::Tcp { address: "h:1".into(), pool: 4 },
                ],
            }),
            DecodeMessage::Progress,
            DecodeMessage::Commit { generation: Generation(5) },
            DecodeMessage::Cancel { reason: "why".into() },
            DecodeMessage::Done,
        ];
        for message in messages {
            let wire = decode_message_to_proto(message.clone(), payload);
            assert_eq!(decode_message_from_proto(wire), Ok(message));
        }
    }

    #[test]
    fn messages_of_the_prefill_side_survive_the_wire() {
        let messages = [
            PrefillMessage::Started,
            PrefillMessage::Held { num_tokens: 48 },
            PrefillMessage::Progress,
            PrefillMessage::FirstToken(FirstToken {
                token: SampledToken { id: 3, logprobs: None },
                cached_tokens: 16,
                blended_tokens: 9,
                pace: Some(PromptPace {
                    queue: Duration::from_millis(250),
                    prefill: Duration::from_millis(500),
                }),
            }),
            PrefillMessage::Written(Written {
                generation: Generation(5),
                pushed: Some(Pushed {
                    pieces: vec![Piece { block_idx: 1, layer_idx: 2, checksum: u64::MAX }],
                    transport: TransportKind::Shm,
                    bytes: 99,
                }),
                last: true,
            }),
            PrefillMessage::Written(Written { generation: Generation(5), pushed: None, last: true }),
            PrefillMessage::Stopped,
            PrefillMessage::Failed(Failure::new(FailureKind::Full, "no room")),
        ];
        for message in messages {
            assert_eq!(prefill_message_from_proto(prefill_message_to_proto(message.clone())), Ok(message));
        }
        // What older workers do not say.
        let started = prefill_message_to_proto(PrefillMessage::Started).message;
        assert_eq!(started, Some(prefill_message::Message::Started(proto::Started { reads_progress: true })));
    }

    #[test]
    fn older_workers_read_a_done_handoff_as_cancelled_and_nothing_written_as_tcp() {
        let request = Request::default();
        let kv_format = KvFormat::new("rev".into(), &layout(), "theta".into());
        let (kv_format, prefix_source) = (&kv_format, None);
        let payload = Payload { request: &request, kv_format, wire: None, prefix_source, ticket: None };
        let done = decode_message_to_proto(DecodeMessage::Done, payload);
        let Some(decode_message::Message::Cancel(cancel)) = done.message else { panic!("{done:?}") };
        assert_eq!(cancel.reason, DONE);

        let nothing = Written { generation: Generation(5), pushed: None, last: true };
        assert_eq!(written_to_proto(nothing.clone()).transport, "tcp");
        // Without pieces the transport is not read.
        let wire = proto::Written { generation: 5, last: true, ..proto::Written::default() };
        assert_eq!(written_from_proto(wire), Ok(nothing));
    }
}
