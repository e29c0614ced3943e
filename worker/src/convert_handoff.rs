//! Between the protocol's handoff messages and those of `kv-transfer`.
//!
//! `Begin` carries the request too; that part is [`request_from_begin`](crate::convert::request_from_begin)'s.

use std::time::Duration;

use baton_cluster::{kv_format_from_proto, kv_format_to_proto};
use baton_engine::{Request, SampledToken};
use baton_handoff::{
    Begin, DecodeMessage, Extent, Generation, Grant, Piece, PrefillMessage, Secret, TransportKind,
    TransportOffer, Written,
};
use baton_kv_cache::{BlockId, KvFormat, WireFormat};
use baton_proto::{v1, worker as proto};
use proto::{decode_message, prefill_message, transport_offer};

use crate::convert::{
    WireError, failed_from_proto, failed_to_proto, sampling_to_proto, token_from_proto, token_to_proto,
};

/// A `Begin` whose decode worker takes KV in any form.
const ANY_WIRE_FORMAT: &str = "any";

/// What the state machines carry as first token.
#[derive(Clone, Debug, PartialEq)]
pub struct FirstToken {
    /// The token.
    pub token: SampledToken,
    /// Prompt tokens found in the prefill worker's prefix cache.
    pub cached_tokens: usize,
}

/// The request that travels in `Begin`, beside what the state machine knows of it.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'a> {
    /// What is to be computed.
    pub request: &'a Request,
    /// What the decode worker's blocks mean.
    pub kv_format: &'a KvFormat,
    /// How KV shall travel; `None`: as the prefill worker likes.
    pub wire: Option<WireFormat>,
    /// Who is believed to have more of it cached than the prefill worker.
    pub prefix_source: Option<&'a proto::PrefillPeer>,
}

/// For the wire; `payload` is used by `Begin` alone.
pub fn decode_message_to_proto(message: DecodeMessage, payload: Payload<'_>) -> proto::DecodeMessage {
    use decode_message::Message;
    let message = match message {
        DecodeMessage::Begin(begin) => Message::Begin(begin_to_proto(begin, payload)),
        DecodeMessage::Grant(grant) => Message::Grant(grant_to_proto(grant)),
        DecodeMessage::Commit { generation } => Message::Commit(proto::Commit { generation: generation.0 }),
        DecodeMessage::Cancel { reason } => Message::Cancel(proto::Cancel { reason }),
    };
    proto::DecodeMessage { message: Some(message) }
}

/// For the wire.
pub fn grant_to_proto(grant: Grant) -> proto::Grant {
    proto::Grant {
        generation: grant.generation.0,
        token: grant.secret.0.to_vec().into(),
        num_cached_blocks: grant.num_cached_blocks as u32,
        block_ids: grant.block_ids.iter().map(|block| block.0).collect(),
        transports: grant.offers.iter().map(offer_to_proto).collect(),
    }
}

/// From the wire. An offer of a transport that is unknown here is one that cannot be taken.
pub fn grant_from_proto(grant: proto::Grant) -> Grant {
    Grant {
        generation: Generation(grant.generation),
        // Other lengths are no secret, and open nothing.
        secret: grant.token[..].try_into().map(Secret).unwrap_or_default(),
        num_cached_blocks: grant.num_cached_blocks as usize,
        block_ids: grant.block_ids.into_iter().map(BlockId).collect(),
        offers: grant.transports.into_iter().filter_map(offer_from_proto).collect(),
    }
}

fn begin_to_proto(begin: Begin, payload: Payload<'_>) -> proto::Begin {
    let Payload { request, kv_format, wire, prefix_source } = payload;
    proto::Begin {
        request_id: begin.request_id,
        attempt: begin.attempt,
        prefill_incarnation: begin.prefill_incarnation,
        decode_worker_id: begin.decode_worker_id,
        decode_incarnation: begin.decode_incarnation,
        token_ids: [&request.prompt[..], &request.output].concat(),
        num_output_tokens: request.output.len() as u32,
        sampling: Some(sampling_to_proto(&request.sampling)),
        kv_format: Some(kv_format_to_proto(kv_format)),
        cache_salt: request.cache_salt.clone(),
        deadline_ms: u64::try_from(begin.deadline.as_millis()).unwrap_or(u64::MAX),
        wire_format: wire.map_or(ANY_WIRE_FORMAT, WireFormat::name).to_owned(),
        cached_only: begin.extent == Extent::Cached,
        prefix_source: prefix_source.cloned(),
    }
}

/// How KV shall travel, by a request of the router's; `None`: as the decode worker likes.
///
/// # Errors
/// When the form is unknown here.
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

/// How KV shall travel, by a `Begin`; `None`: as the prefill worker likes. A form that is unknown here cannot be made,
/// and as it is every decode worker takes it.
pub fn wire_from_begin(message: &proto::Begin) -> Option<WireFormat> {
    match message.wire_format.as_str() {
        ANY_WIRE_FORMAT => None,
        name => Some(WireFormat::from_name(name).unwrap_or_default()),
    }
}

/// What the state machine knows of a `Begin`, and the decode worker's KV format.
///
/// # Errors
/// When the message is not one.
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
        decode_worker_id: message.decode_worker_id.clone(),
        decode_incarnation: message.decode_incarnation,
        num_tokens: message.token_ids.len(),
        block_size: format.block_size,
        deadline: Duration::from_millis(message.deadline_ms),
        extent: if message.cached_only { Extent::Cached } else { Extent::Whole },
    };
    Ok((begin, format))
}

/// From the wire; anything but `Begin`, which opens a handoff and is read by itself.
///
/// # Errors
/// When the message is not one.
pub fn decode_message_from_proto(message: proto::DecodeMessage) -> Result<DecodeMessage, WireError> {
    use decode_message::Message;
    match message.message.ok_or(WireError::Missing("message"))? {
        Message::Begin(_) => Err(WireError::Invalid {
            field: "message",
            value: "Begin".into(),
            expected: "Grant, Commit or Cancel, a handoff having one Begin",
        }),
        Message::Grant(grant) => Ok(DecodeMessage::Grant(grant_from_proto(grant))),
        Message::Commit(commit) => Ok(DecodeMessage::Commit { generation: Generation(commit.generation) }),
        Message::Cancel(cancel) => Ok(DecodeMessage::Cancel { reason: cancel.reason }),
    }
}

/// For the wire.
pub fn prefill_message_to_proto(message: PrefillMessage<FirstToken>) -> proto::PrefillMessage {
    use prefill_message::Message;
    let message = match message {
        PrefillMessage::Started => Message::Started(proto::Started {}),
        PrefillMessage::Held { num_tokens } => Message::Held(proto::Held { num_tokens: num_tokens as u64 }),
        PrefillMessage::Progress => Message::Progress(proto::Progress {}),
        PrefillMessage::FirstToken(first) => Message::FirstToken(proto::FirstToken {
            token: Some(token_to_proto(&first.token)),
            cached_tokens: u32::try_from(first.cached_tokens).unwrap_or(u32::MAX),
        }),
        PrefillMessage::Written(written) => Message::Written(proto::Written {
            generation: written.generation.0,
            transport: written.transport.name().to_owned(),
            pieces: written
                .pieces
                .iter()
                .map(|piece| proto::Piece {
                    block_idx: piece.block_idx,
                    layer_idx: piece.layer_idx,
                    checksum: piece.checksum,
                })
                .collect(),
            last: written.last,
            bytes: written.bytes,
        }),
        PrefillMessage::Stopped => Message::Stopped(proto::Stopped {}),
        PrefillMessage::Failed(failed) => Message::Failed(failed_to_proto(&failed)),
    };
    proto::PrefillMessage { message: Some(message) }
}

/// From the wire.
///
/// # Errors
/// When the message is not one.
pub fn prefill_message_from_proto(
    message: proto::PrefillMessage,
) -> Result<PrefillMessage<FirstToken>, WireError> {
    use prefill_message::Message;
    Ok(match message.message.ok_or(WireError::Missing("message"))? {
        Message::Started(proto::Started {}) => PrefillMessage::Started,
        Message::Held(held) => {
            PrefillMessage::Held { num_tokens: usize::try_from(held.num_tokens).unwrap_or(usize::MAX) }
        }
        Message::Progress(proto::Progress {}) => PrefillMessage::Progress,
        Message::FirstToken(first) => PrefillMessage::FirstToken(FirstToken {
            token: token_from_proto(first.token.ok_or(WireError::Missing("token"))?),
            cached_tokens: first.cached_tokens as usize,
        }),
        Message::Written(written) => PrefillMessage::Written(Written {
            generation: Generation(written.generation),
            transport: TransportKind::from_name(&written.transport).ok_or(WireError::Invalid {
                field: "transport",
                value: written.transport,
                expected: "shm, rdma, nccl or tcp",
            })?,
            pieces: written
                .pieces
                .into_iter()
                .map(|piece| Piece {
                    block_idx: piece.block_idx,
                    layer_idx: piece.layer_idx,
                    checksum: piece.checksum,
                })
                .collect(),
            last: written.last,
            bytes: written.bytes,
        }),
        Message::Stopped(proto::Stopped {}) => PrefillMessage::Stopped,
        Message::Failed(failed) => PrefillMessage::Failed(failed_from_proto(failed)),
    })
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
    use baton_handoff::{Failed, FailureKind};
    use baton_kv_cache::{KvDtype, KvLayout};

    use super::*;

    fn layout() -> KvLayout {
        KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 2, dtype: KvDtype::F16 }
    }

    #[test]
    fn what_d_says_arrives() {
        let request = Request { id: "r".into(), prompt: vec![1; 9], output: vec![2], ..Request::default() };
        let kv_format = KvFormat::new("rev".into(), &layout(), "theta".into());
        let payload = Payload { request: &request, kv_format: &kv_format, wire: None, prefix_source: None };
        let begin = Begin {
            request_id: "r".into(),
            attempt: 2,
            prefill_incarnation: 7,
            decode_worker_id: "d".into(),
            decode_incarnation: 8,
            num_tokens: 10,
            block_size: 4,
            deadline: Duration::from_millis(1500),
            extent: Extent::Whole,
        };
        let wire = decode_message_to_proto(DecodeMessage::Begin(begin.clone()), payload);
        let Some(decode_message::Message::Begin(wire)) = wire.message else { panic!("{wire:?}") };
        assert_eq!(begin_from_proto(&wire), Ok((begin.clone(), kv_format.clone())));
        let source =
            proto::PrefillPeer { worker_id: "d1".into(), incarnation: 3, address: "http://h".into() };
        let cached = begin_to_proto(
            Begin { extent: Extent::Cached, ..begin.clone() },
            Payload { prefix_source: Some(&source), ..payload },
        );
        assert_eq!(cached.prefix_source, Some(source));
        assert_eq!(begin_from_proto(&cached).map(|(begin, _)| begin.extent), Ok(Extent::Cached));
        for wire in [None, Some(WireFormat::AsIs), Some(WireFormat::Int4)] {
            let wire_format = begin_to_proto(begin.clone(), Payload { wire, ..payload }).wire_format;
            assert_eq!(wire_from_begin(&proto::Begin { wire_format, ..proto::Begin::default() }), wire);
        }
        for unknown in ["", "int2"] {
            let begin = proto::Begin { wire_format: unknown.into(), ..proto::Begin::default() };
            assert_eq!(wire_from_begin(&begin), Some(WireFormat::AsIs));
        }
        let kv_format_of_nothing = KvFormat { block_size: 0, ..kv_format.clone() };
        let wire = proto::Begin { kv_format: Some(kv_format_to_proto(&kv_format_of_nothing)), ..wire };
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
            DecodeMessage::Commit { generation: Generation(5) },
            DecodeMessage::Cancel { reason: "why".into() },
        ];
        for message in messages {
            let wire = decode_message_to_proto(message.clone(), payload);
            assert_eq!(decode_message_from_proto(wire), Ok(message));
        }
    }

    #[test]
    fn what_p_says_arrives() {
        let messages = [
            PrefillMessage::Started,
            PrefillMessage::Held { num_tokens: 48 },
            PrefillMessage::Progress,
            PrefillMessage::FirstToken(FirstToken {
                token: SampledToken { id: 3, logprobs: None },
                cached_tokens: 16,
            }),
            PrefillMessage::Written(Written {
                generation: Generation(5),
                transport: TransportKind::Shm,
                pieces: vec![Piece { block_idx: 1, layer_idx: 2, checksum: u64::MAX }],
                last: true,
                bytes: 99,
            }),
            PrefillMessage::Stopped,
            PrefillMessage::Failed(Failed::new(FailureKind::Full, "no room")),
        ];
        for message in messages {
            assert_eq!(prefill_message_from_proto(prefill_message_to_proto(message.clone())), Ok(message));
        }
    }
}
