//! A handoff in one process: the parts of two workers and a transport.

use std::collections::HashSet;

use baton_engine::{
    CachedPrefix, EngineHandle, HeldBlocks, PrefillEvent, PrefixReservation, Request, Reservation,
    SampledToken,
};
use baton_kv_cache::BlockId;

use super::{Output, collect};

/// The events of a prefill, checked to be in order and complete.
pub struct Prefilled {
    pub blocks: Vec<BlockId>,
    pub cached_tokens: usize,
    pub first: SampledToken,
    pub held: HeldBlocks,
}

pub async fn prefill(engine: &EngineHandle, request: Request) -> Prefilled {
    let num_layers = engine.storage().layout().num_layers;
    let num_blocks = engine.storage().layout().num_blocks_for(request.num_known_tokens());
    let (mut events, held) = engine.prefill(request).expect("accepted");
    let Some(PrefillEvent::Started { mut cached_tokens }) = events.next().await else {
        panic!("starts first")
    };
    let mut pieces = HashSet::new();
    let mut table = vec![None; num_blocks];
    let first = loop {
        match events.next().await.expect("a terminal event comes first") {
            PrefillEvent::Ready { layers, first_block_idx, blocks } => {
                for (idx, block) in (first_block_idx..).zip(blocks) {
                    assert_eq!(*table[idx].get_or_insert(block), block, "a block keeps its place");
                    for layer_idx in layers.clone() {
                        assert!(pieces.insert((idx, layer_idx)), "a piece is named once");
                    }
                }
            }
            PrefillEvent::Adopted { cached_tokens: num } => cached_tokens += num,
            PrefillEvent::FirstToken(token) => break token,
            other => panic!("unexpected {other:?}"),
        }
    };
    assert_eq!(events.next().await, None, "nothing follows the first token");
    assert_eq!(pieces.len(), num_blocks * num_layers, "every piece is named");
    let blocks = table.into_iter().map(|block| block.expect("named")).collect();
    Prefilled { blocks, cached_tokens, first, held }
}

/// Copies the blocks that the receiver has not cached, as a transport does.
pub fn copy(from: &EngineHandle, blocks: &[BlockId], to: &EngineHandle, reservation: &Reservation) -> usize {
    assert_eq!(blocks.len(), reservation.blocks().len());
    let pairs = blocks.iter().zip(reservation.blocks()).skip(reservation.num_cached_blocks());
    for (&source, &destination) in pairs.clone() {
        for layer_idx in 0..from.storage().layout().num_layers {
            // SAFETY: the source is held and complete; the destination is reserved and in no batch.
            unsafe {
                let bytes = from.storage().layer(source, layer_idx);
                to.storage().layer_mut(destination, layer_idx).copy_from_slice(bytes);
            }
        }
    }
    pairs.len()
}

/// Holds what an engine has cached of a request's known tokens.
pub async fn hold(engine: &EngineHandle, request: &Request) -> CachedPrefix {
    let hashes = engine.prefix_hashes(request, request.num_known_tokens());
    engine.hold_cached(hashes.into()).await.expect("the engine lives")
}

/// Reserves blocks for the first `num_tokens` tokens of a request, as a fetch does. `None`: there is no room.
pub async fn reserve_prefix(
    engine: &EngineHandle,
    request: &Request,
    num_tokens: usize,
) -> Option<PrefixReservation> {
    let hashes = engine.prefix_hashes(request, num_tokens);
    engine.reserve_blocks(&hashes, 0, hashes.len()).await.expect("the engine lives")
}

/// Copies a held prefix to a reserved one, as a transport does.
pub fn copy_prefix(
    from: &EngineHandle,
    held: &CachedPrefix,
    to: &EngineHandle,
    reservation: &PrefixReservation,
) {
    copy_blocks(from, held.blocks(), to, reservation);
}

/// Copies held blocks to reserved ones.
pub fn copy_blocks(
    from: &EngineHandle,
    blocks: &[BlockId],
    to: &EngineHandle,
    reservation: &PrefixReservation,
) {
    let pairs = blocks.iter().zip(reservation.blocks()).skip(reservation.num_cached_blocks());
    for (&source, &destination) in pairs {
        for layer_idx in 0..from.storage().layout().num_layers {
            // SAFETY: the source is held and complete; the destination is reserved and in no batch.
            unsafe {
                let bytes = from.storage().layer(source, layer_idx);
                to.storage().layer_mut(destination, layer_idx).copy_from_slice(bytes);
            }
        }
    }
}

/// Runs the whole handoff. Returns the tokens, the first one included, and the number of copied blocks.
pub async fn hand_off(p: &EngineHandle, d: &EngineHandle, request: Request) -> (Output, usize) {
    let prefilled = prefill(p, request.clone()).await;
    let reservation = d.reserve(request).await.expect("granted");
    let num_copied = copy(p, &prefilled.blocks, d, &reservation);
    drop(prefilled.held);
    let first = prefilled.first.id;
    let mut output = collect(d.decode(reservation, prefilled.first).expect("accepted")).await;
    output.tokens.insert(0, first);
    (output, num_copied)
}
