//! `kernels/codes.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_kernels::codes::*;
use baton_kv_cache::WireScratch;
use baton_kv_cache::{KvDtype, KvLayout, VectorCodec, WireCodec, WireFormat};
use baton_model_testing::noise;

/// Consecutive pieces with vectors of several magnitudes, and a zero vector in each head.
fn pieces(layout: &KvLayout, num_pieces: usize) -> Vec<u8> {
    let mut pieces = vec![0; num_pieces * layout.layer_bytes()];
    for (idx, head) in pieces.chunks_exact_mut(layout.head_bytes()).enumerate() {
        let (elements, scales) = head.split_at_mut(layout.scale_offset(0));
        let mut vectors = noise(idx as u64 + 1, layout.block_size * layout.head_dim);
        vectors.iter_mut().enumerate().for_each(|(i, x)| *x *= 10f32.powi((i % 7) as i32 - 3));
        vectors[..layout.head_dim].fill(0.0);
        layout.dtype.store_vectors(&vectors, layout.head_dim, elements, scales);
    }
    pieces
}

fn check(layout: KvLayout, format: WireFormat) {
    let codec = WireCodec::new(&layout, format).expect("it is smaller");
    let form = CodeFormat::of(&codec).expect("there is a kernel");
    let piece_bytes = layout.layer_bytes();
    let order = [2, 0, 3];
    let pool = pieces(&layout, 4);
    let mut scratch = WireScratch::default();
    let mut coded = vec![0; order.len() * codec.piece_bytes()];
    let mut decoded = vec![0xff; pool.len()];
    for (&idx, coded) in order.iter().zip(coded.chunks_exact_mut(codec.piece_bytes())) {
        codec.encode(&pool[idx * piece_bytes..][..piece_bytes], coded, &mut scratch);
        codec.decode(coded, &mut decoded[idx * piece_bytes..][..piece_bytes], &mut scratch);
    }
    let mut emulator = Emulator::new(source(&layout));
    let from = emulator.buffer(&pool);
    let between = emulator.poisoned(coded.len());
    let to = emulator.poisoned(pool.len());
    let offsets = emulator.buffer(bytemuck::cast_slice(&order.map(|idx| (idx * piece_bytes) as u64)));
    let encode = CodePieces {
        pool: from,
        offsets,
        coded: between,
        num_pieces: order.len() as u32,
        num_heads: 2 * layout.num_kv_heads as u32,
        form,
        direction: CodeDirection::Encoded,
    };
    emulator.launch(&encode);
    emulator.launch(&CodePieces { pool: to, direction: CodeDirection::Decoded, ..encode });
    let memory = emulator.run();
    assert!(memory.of(between) == coded, "{layout:?} as {format:?}");
    assert!(memory.of(to) == decoded, "{layout:?} from {format:?}: these pieces, and no others");
}

fn layout(dtype: KvDtype, block_size: usize, head_dim: usize) -> KvLayout {
    KvLayout { block_size, num_layers: 2, num_kv_heads: 3, head_dim, dtype }
}

#[test]
fn codes_match_the_host_to_the_bit() {
    let cases = [
        (layout(KvDtype::Bf16, 16, 128), &[WireFormat::Int8, WireFormat::Int4][..]),
        (layout(KvDtype::F32, 3, 320), &[WireFormat::Int8, WireFormat::Int4]),
        (layout(KvDtype::F16, 4, 37), &[WireFormat::Int8]),
        (layout(KvDtype::Int8, 5, 96), &[WireFormat::Int4]),
    ];
    for (layout, formats) in cases {
        formats.iter().for_each(|&format| check(layout, format));
    }
}

#[test]
fn partial_groups_are_left_to_processors() {
    let codec = |head_dim| WireCodec::new(&layout(KvDtype::Bf16, 4, head_dim), WireFormat::Int4).unwrap();
    assert_eq!(CodeFormat::of(&codec(80)), None);
    assert_eq!(CodeFormat::of(&codec(96)), Some(CodeFormat::Int4));
}

#[test]
fn infinity_is_decoded_as_nan() {
    for format in [WireFormat::Int8, WireFormat::Int4] {
        let layout = layout(KvDtype::F32, 3, 320);
        let codec = WireCodec::new(&layout, format).expect("it is smaller");
        let mut pool = vec![0; layout.layer_bytes()];
        pool[40 * 4..41 * 4].copy_from_slice(&f32::INFINITY.to_ne_bytes());
        let mut emulator = Emulator::new(source(&layout));
        let from = emulator.buffer(&pool);
        let coded = emulator.poisoned(codec.piece_bytes());
        let to = emulator.poisoned(pool.len());
        let offsets = emulator.buffer(&[0; 8]);
        let form = CodeFormat::of(&codec).expect("there is a kernel");
        let direction = CodeDirection::Encoded;
        let encode = CodePieces { pool: from, offsets, coded, num_pieces: 1, num_heads: 6, form, direction };
        emulator.launch(&encode);
        emulator.launch(&CodePieces { pool: to, direction: CodeDirection::Decoded, ..encode });
        let memory = emulator.run();
        let (numbers, _) = memory.of(to).as_chunks::<4>();
        let read: Vec<f32> = numbers.iter().map(|&bytes| f32::from_ne_bytes(bytes)).collect();
        let num_nan = if format == WireFormat::Int4 { 32 } else { 320 };
        assert_eq!(read.iter().filter(|x| x.is_nan()).count(), num_nan, "{format:?}");
        assert!(read.iter().all(|x| x.is_nan() || *x == 0.0));
    }
}
