//! Workers whose KV layouts differ. Where only the block size differs, every number arrives unchanged, so the tokens are
//! those of a local prefill. Where the number formats differ, the decode worker quantises the prefill worker's numbers to
//! its own format, over any transport and into blocks of any size.

use std::path::Path;

use baton_engine_testing::FakeModel;
use baton_handoff::TransportKind;
use baton_kv_cache::{KvDtype, WireCodec, WireFormat};
use baton_proto::{v1::KvWire, worker as proto};

use crate::{
    architectures::{FIXTURES, token_ids},
    harness::{TestWorker, decode, expected, generate, prefill, prompt, request, transports},
};

/// Of the prefill worker and of the decode worker.
const BLOCK_SIZES: [(usize, usize); 5] = [(4, 8), (8, 4), (3, 7), (32, 1), (1, 16)];

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_other_sizes_hold_the_same_tokens() {
    for kind in transports() {
        for (ours, theirs) in BLOCK_SIZES {
            let p = prefill().block_size(ours).transport(kind).start().await;
            let d = decode().block_size(theirs).transport(kind).start().await;
            let client = d.client().await;
            let block_bytes = FakeModel::new(theirs).layout.block_bytes() as u64;
            let mut expected_bytes = 0;
            // Shorter than a block; full blocks on both sides; several chunks; a last block that is full on neither side.
            for (seed, num_tokens) in [(1, 1), (2, 56), (4, 101), (5, 24)] {
                let prompt = prompt(seed, num_tokens);
                let answer = generate(&client, request(&prompt, 20, Some(p.peer()))).await.unwrap();
                let what = format!("{ours} to {theirs} over {kind}, {num_tokens} tokens");
                assert_eq!(answer.finished(), expected(&prompt, 20), "{what}");
                expected_bytes += num_tokens.div_ceil(theirs) as u64 * block_bytes;
                assert_eq!((p.moved(kind), d.moved(kind)), (expected_bytes, expected_bytes), "{what}");
            }
            p.assert_all_free().await;
            d.assert_all_free().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cached_blocks_are_counted_in_blocks_of_the_decode_worker() {
    for (ours, theirs) in BLOCK_SIZES {
        let (p, d) = (prefill().block_size(ours).start().await, decode().block_size(theirs).start().await);
        let client = d.client().await;
        let first = prompt(9, 64);
        generate(&client, request(&first, 8, Some(p.peer()))).await.unwrap().finished();
        let moved = d.moved(TransportKind::Shm);
        // A second turn: the decode worker has every full block of the first.
        let second = [&first[..], &prompt(3, 21)].concat();
        let answer = generate(&client, request(&second, 8, Some(p.peer()))).await.unwrap();
        assert_eq!(answer.finished(), expected(&second, 8), "{ours} to {theirs}");
        let num_blocks = second.len().div_ceil(theirs) - first.len() / theirs;
        let expected_bytes = num_blocks * FakeModel::new(theirs).layout.block_bytes();
        assert_eq!(d.moved(TransportKind::Shm) - moved, expected_bytes as u64, "{ours} to {theirs}");
        p.assert_all_free().await;
        d.assert_all_free().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_handoffs_between_block_sizes_keep_their_tokens() {
    let (p, d) = (prefill().block_size(8).start().await, decode().block_size(6).start().await);
    let client = d.client().await;
    let tasks: Vec<_> = (0..24)
        .map(|seed| {
            let (client, peer) = (client.clone(), p.peer());
            tokio::spawn(async move {
                let prompt = prompt(seed, 20 + 4 * seed as usize);
                let answer = generate(&client, request(&prompt, 12, Some(peer))).await.unwrap();
                assert_eq!(answer.finished(), expected(&prompt, 12), "request {seed}");
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    p.assert_all_free().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_number_format_is_quantised_once_over_any_transport() {
    let dir = Path::new(FIXTURES).join("llama");
    let recorded = token_ids(&dir.join("expected.safetensors"));
    let (prompt, greedy) = (&recorded["prompt"], &recorded["greedy"]);
    let tokens = async |ours: (usize, KvDtype), theirs: (usize, KvDtype), kind| {
        let p = prefill().model(dir.clone()).kv_dtype(ours.1).block_size(ours.0).transport(kind);
        let d = decode().model(dir.clone()).kv_dtype(theirs.1).block_size(theirs.0).transport(kind);
        let (p, d) = (p.start().await, d.start().await);
        let remote = generate(&d.client().await, request(prompt, 12, Some(p.peer()))).await.unwrap();
        assert!(d.moved(kind) > 0);
        p.assert_all_free().await;
        d.assert_all_free().await;
        remote.finished()
    };
    // The prefill worker computes like the recording. Decoding with KV in f16 or bf16 does not change this model's
    // tokens.
    for dtype in [KvDtype::F16, KvDtype::Bf16] {
        let remote = tokens((16, KvDtype::F32), (16, dtype), TransportKind::Shm).await;
        assert_eq!(remote, greedy[..12], "{}", dtype.name());
    }
    for (ours, theirs) in
        [(KvDtype::F32, KvDtype::Int8), (KvDtype::Bf16, KvDtype::Fp8), (KvDtype::Int8, KvDtype::F16)]
    {
        let of_one_size = tokens((16, ours), (16, theirs), TransportKind::Shm).await;
        for kind in transports() {
            let of_other_sizes = tokens((8, ours), (6, theirs), kind).await;
            assert_eq!(of_other_sizes, of_one_size, "{} to {} over {kind}", ours.name(), theirs.name());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_travels_in_the_wire_format_that_both_sides_allow() {
    let dir = Path::new(FIXTURES).join("llama");
    let recorded = token_ids(&dir.join("expected.safetensors"));
    let (prompt, greedy) = (&recorded["prompt"], &recorded["greedy"]);
    use WireFormat::{AsIs, Int4, Int8};
    for (kind, theirs, ours, expected) in [
        (TransportKind::Tcp, None, None, AsIs),
        (TransportKind::Tcp, Some(Int8), None, Int8),
        (TransportKind::Tcp, None, Some(Int4), Int4),
        (TransportKind::Tcp, Some(Int8), Some(Int4), Int8),
        (TransportKind::Tcp, Some(Int8), Some(AsIs), AsIs),
        (TransportKind::Shm, Some(Int4), Some(Int4), AsIs),
    ] {
        let p = prefill().model(dir.clone()).transport(kind).with(|config| config.kv_wire = ours);
        let d = decode().model(dir.clone()).transport(kind).with(|config| config.kv_wire = theirs);
        let (p, d) = (p.start().await, d.start().await);
        let answer = generate(&d.client().await, request(prompt, 12, Some(p.peer()))).await.unwrap();
        let what = format!("{theirs:?} and {ours:?} over {kind}");
        let tokens = answer.finished();
        assert_eq!(tokens.len(), 12);
        // Quantisation to eight bits does not change this model's tokens.
        assert!(tokens == greedy[..12] || expected == Int4, "{what}: {tokens:?}");

        let num_bytes = wire_bytes(&d, prompt.len(), expected);
        assert_eq!((p.moved(kind), d.moved(kind)), (num_bytes, num_bytes), "{what}");
        p.assert_all_free().await;
        d.assert_all_free().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_chooses_the_wire_format_of_its_kv() {
    let dir = Path::new(FIXTURES).join("llama");
    let recorded = token_ids(&dir.join("expected.safetensors"));
    let (prompt, greedy) = (&recorded["prompt"], &recorded["greedy"]);
    use WireFormat::{AsIs, Int4, Int8};
    let kind = TransportKind::Tcp;
    for (ours, theirs, expected) in [
        (None, None, [AsIs, AsIs, Int8, Int4, AsIs]),
        (Some(Int4), Some(Int8), [Int8, AsIs, Int8, Int4, Int8]),
        // A prefill worker that never quantises does not do so for a request either.
        (Some(AsIs), Some(Int8), [AsIs; 5]),
    ] {
        let p = prefill().model(dir.clone()).transport(kind).with(|config| config.kv_wire = ours);
        let d = decode().model(dir.clone()).transport(kind).with(|config| config.kv_wire = theirs);
        let (p, d) = (p.start().await, d.start().await);
        let client = d.client().await;
        use KvWire::{AsIs as Plain, Unspecified};
        let asked = [Unspecified, Plain, KvWire::Int8, KvWire::Int4, Unspecified];
        for (idx, (asked, expected)) in asked.into_iter().zip(expected).enumerate() {
            let before = d.moved(kind);
            let mut request = request(prompt, 12, Some(p.peer()));
            // Each request moves its whole prompt.
            request.cache_salt = idx.to_string();
            request.set_kv_wire(asked);
            let tokens = generate(&client, request).await.unwrap().finished();
            let what = format!("{asked:?} of {theirs:?} and {ours:?}");
            assert_eq!(d.moved(kind) - before, wire_bytes(&d, prompt.len(), expected), "{what}");
            assert!(tokens == greedy[..12] || expected == Int4, "{what}: {tokens:?}");
        }
        let unknown = proto::GenerateRequest { kv_wire: 9, ..request(prompt, 12, Some(p.peer())) };
        let refused = generate(&client, unknown).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        assert!(refused.message().contains("kv_wire: 9"), "{refused}");
        p.assert_all_free().await;
        d.assert_all_free().await;
    }
}

/// Bytes of a prompt's KV in transit.
fn wire_bytes(worker: &TestWorker, num_tokens: usize, format: WireFormat) -> u64 {
    let layout = worker.worker.engine().storage().layout();
    let piece_bytes =
        WireCodec::new(layout, format).map_or(layout.layer_bytes(), |codec| codec.piece_bytes());
    (layout.num_blocks_for(num_tokens) * layout.num_layers * piece_bytes) as u64
}
