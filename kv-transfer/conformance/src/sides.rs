//! What every transport must do when the two workers arrange their KV in different ways: the decode worker's blocks
//! must hold the bytes that it would have written itself for the prefill worker's numbers.

use std::ops::Range;

use baton_handoff::{KvFault, PieceWrite, PushError, RouteError, Source};
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout, KvShard, VectorCodec, WireFormat};

use crate::{Guards, LAYOUT, TestTransport, TransferPair, bytes, change, fill, soon};

/// Tokens of the sequence: no multiple of any block size here.
const NUM_TOKENS: usize = 23;
const UNTOUCHED: u8 = 0xa5;

/// (block size, type) of the prefill worker and of the decode worker.
const PAIRS: [((usize, KvDtype), (usize, KvDtype)); 10] = [
    ((4, KvDtype::F32), (4, KvDtype::Int8)),
    ((4, KvDtype::F32), (8, KvDtype::F32)),
    ((8, KvDtype::F32), (4, KvDtype::F32)),
    ((4, KvDtype::Bf16), (6, KvDtype::Bf16)),
    ((6, KvDtype::Int8), (4, KvDtype::Int8)),
    ((4, KvDtype::Bf16), (32, KvDtype::Fp8)),
    ((32, KvDtype::Int8), (4, KvDtype::F16)),
    ((5, KvDtype::F16), (3, KvDtype::Int8)),
    ((1, KvDtype::Fp8), (7, KvDtype::Bf16)),
    ((7, KvDtype::Bf16), (1, KvDtype::F32)),
];

/// A sequence in one pool, in blocks out of order.
struct Table<'a> {
    storage: &'a BlockStorage,
    blocks: Vec<BlockId>,
}

impl<'a> Table<'a> {
    fn new(storage: &'a BlockStorage) -> Table<'a> {
        let num_blocks = storage.layout().num_blocks_for(NUM_TOKENS) as u32;
        Table { storage, blocks: (0..num_blocks).map(|idx| BlockId((idx * 37 + 5) % 64)).collect() }
    }

    fn layout(&self) -> &KvLayout {
        self.storage.layout()
    }

    /// Where a vector is: block, and in its piece the elements and the scale.
    fn place(&self, half: usize, head: usize, token: usize) -> (BlockId, [Range<usize>; 2]) {
        let layout = self.layout();
        let (block, slot) = (self.blocks[token / layout.block_size], token % layout.block_size);
        let head = half * layout.half_bytes() + layout.head_offset(head);
        let (elements, scale) = (head + layout.token_offset(slot), head + layout.scale_offset(slot));
        let elements_bytes = layout.head_dim * layout.dtype.size_bytes();
        (block, [elements..elements + elements_bytes, scale..scale + layout.dtype.scale_bytes()])
    }

    fn store(&self, layer_idx: usize, (half, head, token): (usize, usize, usize), vector: &[f32]) {
        let (block, [elements, scale]) = self.place(half, head, token);
        change(self.storage, block, layer_idx, |piece| {
            let (front, back) = piece.split_at_mut(scale.start);
            self.layout().dtype.store_vector(vector, &mut front[elements], &mut back[..scale.len()]);
        });
    }

    fn load(&self, layer_idx: usize, (half, head, token): (usize, usize, usize)) -> Vec<f32> {
        let (block, [elements, scale]) = self.place(half, head, token);
        let piece = bytes(self.storage, block, layer_idx);
        let mut vector = vec![0.0; self.layout().head_dim];
        self.layout().dtype.load_vector(&piece[elements], &piece[scale], &mut vector);
        vector
    }

    /// Elements and scale as they are stored in memory.
    fn vector_bytes(&self, layer_idx: usize, (half, head, token): (usize, usize, usize)) -> [Vec<u8>; 2] {
        let (block, places) = self.place(half, head, token);
        let piece = bytes(self.storage, block, layer_idx);
        places.map(|place| piece[place].to_vec())
    }
}

fn each_vector(mut f: impl FnMut(usize, (usize, usize, usize))) {
    for layer_idx in 0..LAYOUT.num_layers {
        for half in 0..2 {
            for head in 0..LAYOUT.num_kv_heads {
                for token in 0..NUM_TOKENS {
                    f(layer_idx, (half, head, token));
                }
            }
        }
    }
}

/// The pieces of all blocks but the first `num_cached`, layer by layer.
fn writes(from: &Table<'_>, to: &Table<'_>, num_cached: usize) -> Vec<PieceWrite> {
    let (own, peer) = (from.layout().block_size, to.layout().block_size);
    let write = |layer_idx: usize, block_idx: usize| {
        let tokens = block_idx * peer..NUM_TOKENS.min((block_idx + 1) * peer);
        let blocks = &from.blocks[tokens.start / own..tokens.end.div_ceil(own)];
        let src = match own == peer {
            true => Source::Block(blocks[0]),
            false => Source::Tokens { tokens, blocks: blocks.into() },
        };
        let (layer_idx, position) = (layer_idx as u32, (block_idx - num_cached) as u32);
        PieceWrite { layer_idx, block_idx: position, src, dst: to.blocks[block_idx] }
    };
    (0..LAYOUT.num_layers)
        .flat_map(|layer_idx| (num_cached..to.blocks.len()).map(move |block_idx| (layer_idx, block_idx)))
        .map(|(layer_idx, block_idx)| write(layer_idx, block_idx))
        .collect()
}

/// Between blocks of any sizes and types, what arrives is what the receiver would have written itself.
pub async fn kv_arrives_as_the_receiver_would_have_written_it(transport: TestTransport) {
    let kind = transport.kind;
    for (from, to) in PAIRS {
        for num_cached in [0, 1] {
            let [from, to] = [from, to].map(|(block_size, dtype)| KvLayout { block_size, dtype, ..LAYOUT });
            let what = format!("{from:?} to {to:?}");
            let fabric = TransferPair::between(&[transport], from, to);
            let (source, target) = (Table::new(&fabric.source), Table::new(&fabric.target));
            each_vector(|layer_idx, at @ (half, head, token)| {
                let seed = (layer_idx * 1000 + half * 500 + head * 100 + token) as f32;
                let vector: Vec<f32> = (0..LAYOUT.head_dim).map(|idx| (seed + idx as f32).sin()).collect();
                source.store(layer_idx, at, &vector);
            });
            for block_idx in 0..64 {
                for layer_idx in 0..LAYOUT.num_layers {
                    fill(&fabric.target, BlockId(block_idx), layer_idx, UNTOUCHED);
                }
            }

            // Of blocks as large as the sequence there is one.
            let num_cached = num_cached.min(target.blocks.len());
            let uncached = &target.blocks[num_cached..];
            let granted = fabric.receiver.grant(uncached.to_vec(), ());
            let peer = KvShard::new(&to, 1, 0).unwrap();
            let offers = granted.offers().to_vec();
            let routed = fabric.sender.route_to(&peer, WireFormat::AsIs, granted.access_key(), &offers, ());
            let route = soon(routed).await.unwrap();
            let writes = writes(&source, &target, num_cached);
            let mut num_bytes = 0;
            for some in writes.chunks(3) {
                let pushed = soon(route.push(some.to_vec())).await.unwrap();
                assert_eq!(pushed.bytes, (some.len() * to.layer_bytes()) as u64);
                num_bytes += pushed.bytes;
                soon(granted.verify(pushed.pieces)).await.unwrap();
            }
            for counters in [fabric.sender.counters(), fabric.receiver.counters()] {
                assert_eq!(counters.of(kind).read().bytes, num_bytes, "{what}");
            }
            // Each vector is what the receiver makes of the sender's numbers, or the sender's own bytes.
            each_vector(|layer_idx, at| {
                if at.2 < num_cached * to.block_size {
                    return;
                }
                let arrived = target.vector_bytes(layer_idx, at);
                let expected = if from.dtype == to.dtype {
                    source.vector_bytes(layer_idx, at)
                } else {
                    target.store(layer_idx, at, &source.load(layer_idx, at));
                    target.vector_bytes(layer_idx, at)
                };
                assert_eq!(arrived, expected, "{what}, layer {layer_idx}, {at:?}");
            });
            for block_idx in (0..64).map(BlockId).filter(|block| !uncached.contains(block)) {
                for layer_idx in 0..LAYOUT.num_layers {
                    let bytes = bytes(&fabric.target, block_idx, layer_idx);
                    assert!(bytes.iter().all(|&byte| byte == UNTOUCHED), "{what}: {block_idx}");
                }
            }
            assert!(soon(granted.commit()).await.is_some());
        }
    }
}

/// Conversion changes nothing about verification and fences.
pub async fn converted_pieces_are_verified_and_fenced_as_others_are(transport: TestTransport) {
    let to = KvLayout { block_size: 6, dtype: KvDtype::Int8, ..LAYOUT };
    let fabric = TransferPair::between(&[transport], LAYOUT, to);
    let (source, target) = (Table::new(&fabric.source), Table::new(&fabric.target));
    let guards = Guards::default();
    let granted = fabric.receiver.grant(target.blocks.clone(), guards.guard());
    let peer = KvShard::new(&to, 1, 0).unwrap();
    let offers = granted.offers().to_vec();
    let route = soon(fabric.sender.route_to(&peer, WireFormat::AsIs, granted.access_key(), &offers, ()))
        .await
        .unwrap();
    let mut now = writes(&source, &target, 0);
    let late = now.split_off(4);
    let pushed = soon(route.push(now)).await.unwrap();

    let flipped = target.blocks[2];
    change(&fabric.target, flipped, 0, |piece| piece[9] ^= 1);
    let fault = soon(granted.verify(pushed.pieces)).await.unwrap_err();
    assert_eq!(fault, KvFault::Checksum { block_idx: 2, layer_idx: 0 });

    drop(soon(granted.revoke()).await.expect("fenced"));
    assert_eq!(guards.num_out(), 0);
    let before: Vec<_> = target.blocks.iter().map(|&block| bytes(&fabric.target, block, 2)).collect();
    assert_eq!(soon(route.push(late)).await.unwrap_err(), PushError::Revoked);
    let after: Vec<_> = target.blocks.iter().map(|&block| bytes(&fabric.target, block, 2)).collect();
    assert_eq!(after, before);
}

/// Pieces whose sources do not cover them are refused.
pub async fn sources_that_do_not_fit_are_refused(transport: TestTransport) {
    let to = KvLayout { block_size: 6, ..LAYOUT };
    let fabric = TransferPair::between(&[transport], LAYOUT, to);
    let target = Table::new(&fabric.target);
    let granted = fabric.receiver.grant(target.blocks.clone(), ());
    let peer = KvShard::new(&to, 1, 0).unwrap();
    let offers = granted.offers().to_vec();
    let route = soon(fabric.sender.route_to(&peer, WireFormat::AsIs, granted.access_key(), &offers, ()))
        .await
        .unwrap();
    let write = |src| PieceWrite { layer_idx: 0, block_idx: 0, src, dst: target.blocks[0] };
    let tokens = |tokens, blocks: &[u32]| Source::Tokens {
        tokens,
        blocks: blocks.iter().map(|&block| BlockId(block)).collect(),
    };
    for src in [
        Source::Block(BlockId(1)),
        tokens(0..6, &[1]),
        tokens(0..6, &[1, 2, 3]),
        tokens(0..6, &[1, 64]),
        tokens(4..8, &[1]),
        tokens(3..3, &[]),
    ] {
        let error = soon(route.push(vec![write(src)])).await.unwrap_err();
        assert!(matches!(error, PushError::Refused(_)), "{error}");
    }
    soon(route.push(vec![write(tokens(0..6, &[1, 2]))])).await.unwrap();
}

/// KV of other models has no route.
pub async fn kv_that_cannot_go_there_finds_no_route(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let granted = fabric.receiver.grant(vec![BlockId(1)], ());
    let shard = |layout| KvShard::new(&layout, 1, 0).unwrap();
    let unlike = [
        // Other models, and blocks that are too large.
        shard(KvLayout { num_layers: 4, ..LAYOUT }),
        shard(KvLayout { num_kv_heads: 4, ..LAYOUT }),
        shard(KvLayout { head_dim: 16, ..LAYOUT }),
        shard(KvLayout { block_size: 1 << 30, ..LAYOUT }),
    ];
    for peer in unlike {
        let guards = Guards::default();
        let routed = fabric.sender.route_to(
            &peer,
            WireFormat::AsIs,
            granted.access_key(),
            granted.offers(),
            guards.guard(),
        );
        let error = soon(routed).await.err().unwrap();
        assert!(matches!(error, RouteError::OtherKv(_)), "{error}");
        assert_eq!(guards.num_out(), 0);
    }
    // A valid layout, but another one than that of the pool that answers.
    let other = shard(KvLayout { block_size: 8, ..LAYOUT });
    let routed = fabric.sender.route_to(&other, WireFormat::AsIs, granted.access_key(), granted.offers(), ());
    let error = soon(routed).await.err().unwrap();
    // Over a network, no peer is told the reason.
    assert!(matches!(error, RouteError::Unreachable(_) | RouteError::OtherIncarnation(_)), "{error}");
    // The refused connection does not affect routes with the right layout.
    let own = shard(LAYOUT);
    let route =
        soon(fabric.sender.route_to(&own, WireFormat::AsIs, granted.access_key(), granted.offers(), ()))
            .await
            .unwrap();
    let src = Source::Block(BlockId(1));
    soon(route.push(vec![PieceWrite { layer_idx: 0, block_idx: 0, src, dst: BlockId(1) }])).await.unwrap();
}
