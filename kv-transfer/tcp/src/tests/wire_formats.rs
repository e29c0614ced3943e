//! Pieces that travel in another format than they are stored in. The decode worker verifies what it decoded.

use baton_handoff::{PushError, TransportKind};
use baton_kv_cache::{KvDtype, KvLayout, KvShard, VectorCodec, WireCodec, WireFormat, WireScratch};

use crate::tests::TCP;
use baton_transfer_conformance::{LAYOUT, Setup, TransferPair, blocks, bytes, change, fill, soon, writes};

const CODED: [WireFormat; 2] = [WireFormat::Int8, WireFormat::Int4];

/// A fabric whose source holds numbers of one magnitude.
fn fabric(from: KvLayout, to: KvLayout) -> TransferPair {
    let fabric = TransferPair::between(TCP, from, to);
    for block in blocks(0..64) {
        for layer_idx in 0..LAYOUT.num_layers {
            let numbers = |piece: &mut [u8]| {
                for (head_idx, head) in piece.chunks_exact_mut(from.head_bytes()).enumerate() {
                    let (elements, scales) = head.split_at_mut(from.scale_offset(0));
                    let seed = block.idx() * 100 + layer_idx * 10 + head_idx;
                    let vectors: Vec<f32> =
                        (0..from.block_size * from.head_dim).map(|idx| ((seed + idx) as f32).sin()).collect();
                    from.dtype.store_vectors(&vectors, from.head_dim, elements, scales);
                }
            };
            change(&fabric.source, block, layer_idx, numbers);
        }
    }
    fabric
}

/// What a piece is after its way.
fn coded(layout: &KvLayout, format: WireFormat, piece: &[u8]) -> Vec<u8> {
    let Some(codec) = WireCodec::new(layout, format) else { return piece.to_vec() };
    let mut scratch = WireScratch::default();
    let (mut coded, mut decoded) = (vec![0; codec.piece_bytes()], vec![0; piece.len()]);
    codec.encode(piece, &mut coded, &mut scratch);
    codec.decode(&coded, &mut decoded, &mut scratch);
    decoded
}

#[tokio::test]
async fn quantised_pieces_are_smaller_on_the_wire_and_verify() {
    let layout = KvLayout { dtype: KvDtype::Bf16, head_dim: 64, ..LAYOUT };
    let setups = [Setup::Plain, Setup::Devices, Setup::Divided];
    for (format, setup) in WireFormat::ALL.into_iter().flat_map(|format| setups.map(|setup| (format, setup)))
    {
        let _setup = setup.enter();
        let fabric = fabric(layout, layout);
        let dst = blocks([9, 2, 33, 60]);
        // Any form is welcome, or this one.
        for asked in [None, Some(format)] {
            let granted = fabric.receiver.grant_as(dst.clone(), asked, ());
            let peer = KvShard::new(&layout, 1, 0).unwrap();
            let before = fabric.receiver.counters().of(TransportKind::Tcp).read().bytes;
            let routed = fabric.sender.route_to(&peer, format, granted.access_key(), granted.offers(), ());
            let route = soon(routed).await.unwrap();
            let pushed = soon(route.push(writes(&dst))).await.unwrap();
            let piece_bytes =
                WireCodec::new(&layout, format).map_or(layout.layer_bytes(), |codec| codec.piece_bytes());
            assert_eq!(pushed.bytes, (12 * piece_bytes) as u64, "{format:?}");
            let after = fabric.receiver.counters().of(TransportKind::Tcp).read().bytes;
            assert_eq!(after - before, pushed.bytes, "{format:?}");
            soon(granted.verify(pushed.pieces)).await.unwrap();
            for &block in &dst {
                for layer_idx in 0..LAYOUT.num_layers {
                    let expected = coded(&layout, format, &bytes(&fabric.source, block, layer_idx));
                    assert_eq!(bytes(&fabric.target, block, layer_idx), expected, "{format:?}");
                }
            }
            assert!(soon(granted.commit()).await.is_some());
        }
    }
}

#[tokio::test]
async fn decoded_pieces_equal_the_receivers_own_conversion() {
    let from = KvLayout { dtype: KvDtype::F32, head_dim: 64, ..LAYOUT };
    for dtype in [KvDtype::F16, KvDtype::Bf16, KvDtype::Int8] {
        for format in CODED {
            let to = KvLayout { dtype, ..from };
            let (plain, fabric) = (fabric(from, to), fabric(from, to));
            let dst = blocks([5, 6]);
            let peer = KvShard::new(&to, 1, 0).unwrap();
            for (fabric, format) in [(&plain, WireFormat::AsIs), (&fabric, format)] {
                let granted = fabric.receiver.grant_as(dst.clone(), None, ());
                let routed =
                    fabric.sender.route_to(&peer, format, granted.access_key(), granted.offers(), ());
                let route = soon(routed).await.unwrap();
                let pushed = soon(route.push(writes(&dst))).await.unwrap();
                soon(granted.verify(pushed.pieces)).await.unwrap();
            }
            let expected = coded(&to, format, &bytes(&plain.target, dst[1], 2));
            assert_eq!(bytes(&fabric.target, dst[1], 2), expected, "{dtype:?} as {format:?}");
        }
    }
}

#[tokio::test]
async fn a_flipped_bit_after_decoding_is_found() {
    let fabric = fabric(LAYOUT, LAYOUT);
    let dst = blocks([4, 5]);
    let granted = fabric.receiver.grant_as(dst.clone(), Some(WireFormat::Int8), ());
    let peer = KvShard::new(&LAYOUT, 1, 0).unwrap();
    let offers = granted.offers().to_vec();
    let routed = fabric.sender.route_to(&peer, WireFormat::Int8, granted.access_key(), &offers, ());
    let pushed = soon(soon(routed).await.unwrap().push(writes(&dst))).await.unwrap();
    change(&fabric.target, dst[1], 2, |piece| piece[77] ^= 4);
    let fault = soon(granted.verify(pushed.pieces)).await.unwrap_err();
    assert_eq!(fault, baton_handoff::KvFault::Checksum { block_idx: 1, layer_idx: 2 });
}

#[tokio::test]
async fn a_wire_format_that_was_not_agreed_on_is_refused() {
    let fabric = fabric(LAYOUT, LAYOUT);
    let dst = blocks([7]);
    fill(&fabric.target, dst[0], 0, 0xEE);
    let peer = KvShard::new(&LAYOUT, 1, 0).unwrap();
    for asked in [WireFormat::AsIs, WireFormat::Int8] {
        let granted = fabric.receiver.grant_as(dst.clone(), Some(asked), ());
        let offers = granted.offers().to_vec();
        let routed = fabric.sender.route_to(&peer, WireFormat::Int4, granted.access_key(), &offers, ());
        let mut pieces = writes(&dst);
        pieces.truncate(1);
        let error = soon(soon(routed).await.unwrap().push(pieces)).await.unwrap_err();
        assert!(matches!(error, PushError::Refused(_)), "{error}");
        assert!(bytes(&fabric.target, dst[0], 0).iter().all(|&byte| byte == 0xEE));
    }
}

#[tokio::test]
async fn a_late_quantised_write_is_dropped() {
    let fabric = fabric(LAYOUT, LAYOUT);
    let dst = blocks([7]);
    let granted = fabric.receiver.grant_as(dst.clone(), None, ());
    let peer = KvShard::new(&LAYOUT, 1, 0).unwrap();
    let offers = granted.offers().to_vec();
    let routed = fabric.sender.route_to(&peer, WireFormat::Int4, granted.access_key(), &offers, ());
    let route = soon(routed).await.unwrap();
    let mut now = writes(&dst);
    let late = now.split_off(1);
    soon(route.push(now)).await.unwrap();
    soon(granted.revoke()).await.expect("fenced");
    (0..LAYOUT.num_layers).for_each(|layer_idx| fill(&fabric.target, dst[0], layer_idx, 0xEE));
    assert_eq!(soon(route.push(late)).await.unwrap_err(), PushError::Revoked);
    for layer_idx in 0..LAYOUT.num_layers {
        assert!(bytes(&fabric.target, dst[0], layer_idx).iter().all(|&byte| byte == 0xEE));
    }
}
