//! How fast KV is converted from one side's layout to another's, and encoded and decoded for the wire, in GB/s of the
//! bytes in memory, beside a memcpy of the same pieces. Source and target are larger than the caches.
//!
//! A piece here is 16 tokens of 8 kv heads of 128 numbers.

use std::hint::black_box;

use baton_kv_cache::{
    KvDtype, KvLayout, KvMapping, KvShard, VectorCodec, WireCodec, WireFormat, WireScratch,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const LAYOUT: KvLayout =
    KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 8, head_dim: 128, dtype: KvDtype::Bf16 };
/// Tokens of one round: 128 MiB of bf16.
const NUM_TOKENS: usize = 32 << 10;

fn bench(criterion: &mut Criterion) {
    let of = |dtype, block_size| KvLayout { dtype, block_size, ..LAYOUT };
    memcpy(criterion);
    for format in [WireFormat::Int8, WireFormat::Int4] {
        encode(criterion, format);
    }
    for (from, to) in [
        (of(KvDtype::Bf16, 16), of(KvDtype::Bf16, 64)),
        (of(KvDtype::Bf16, 64), of(KvDtype::Bf16, 16)),
        (of(KvDtype::Bf16, 16), of(KvDtype::F32, 16)),
        (of(KvDtype::Bf16, 16), of(KvDtype::F16, 16)),
        (of(KvDtype::Bf16, 16), of(KvDtype::Fp8, 16)),
        (of(KvDtype::Bf16, 16), of(KvDtype::Int8, 16)),
        (of(KvDtype::Bf16, 16), of(KvDtype::Int8, 64)),
        (of(KvDtype::F16, 16), of(KvDtype::Bf16, 16)),
        (of(KvDtype::F16, 16), of(KvDtype::Int8, 16)),
        (of(KvDtype::F32, 16), of(KvDtype::Bf16, 16)),
        (of(KvDtype::Fp8, 16), of(KvDtype::Bf16, 16)),
        (of(KvDtype::Int8, 16), of(KvDtype::Bf16, 16)),
        (of(KvDtype::Int8, 16), of(KvDtype::Fp8, 16)),
    ] {
        convert(criterion, from, to);
    }
}

fn memcpy(criterion: &mut Criterion) {
    let source = kv(&LAYOUT);
    let mut target = vec![0u8; source.len()];
    let mut group = criterion.benchmark_group("memcpy");
    group.throughput(Throughput::Bytes(source.len() as u64));
    group.bench_function("bf16/16", |bencher| {
        bencher.iter(|| {
            let pieces = target.chunks_exact_mut(LAYOUT.layer_bytes());
            for (to, from) in pieces.zip(source.chunks_exact(LAYOUT.layer_bytes())) {
                to.copy_from_slice(black_box(from));
            }
        });
    });
}

/// Encodes and decodes piece by piece with one encoded piece, as a handoff does.
fn encode(criterion: &mut Criterion, format: WireFormat) {
    let codec = WireCodec::new(&LAYOUT, format).expect("smaller than bf16");
    let mut memory = kv(&LAYOUT);
    let mut coded = vec![0u8; codec.piece_bytes()];
    let mut scratch = WireScratch::default();
    let mut group = criterion.benchmark_group(format.name());
    group.throughput(Throughput::Bytes(memory.len() as u64));
    group.bench_function("encode", |bencher| {
        bencher.iter(|| {
            for piece in memory.chunks_exact(LAYOUT.layer_bytes()) {
                codec.encode(black_box(piece), &mut coded, &mut scratch);
                black_box(&mut coded);
            }
        });
    });
    group.bench_function("decode", |bencher| {
        bencher.iter(|| {
            for piece in memory.chunks_exact_mut(LAYOUT.layer_bytes()) {
                codec.decode(black_box(&coded), piece, &mut scratch);
            }
            black_box(&mut memory);
        });
    });
}

/// Converts piece by piece of the destination, as a handoff does.
fn convert(criterion: &mut Criterion, from: KvLayout, to: KvLayout) {
    let shard = |layout| KvShard::new(layout, 1, 0).expect("a valid layout");
    let mapping = KvMapping::new(&shard(&from), &shard(&to)).expect("both sides have the same model");
    let source = kv(&from);
    let mut target = vec![0u8; to.num_blocks_for(NUM_TOKENS) * to.layer_bytes()];
    let mut vectors = Vec::new();
    let name = |layout: &KvLayout| format!("{}/{}", layout.dtype.name(), layout.block_size);
    let mut group = criterion.benchmark_group("convert");
    group.throughput(Throughput::Bytes(source.len() as u64));
    group.bench_function(format!("{} > {}", name(&from), name(&to)), |bencher| {
        bencher.iter(|| {
            for (block_idx, piece) in target.chunks_exact_mut(to.layer_bytes()).enumerate() {
                let first = block_idx * to.block_size;
                for run in mapping.runs(first..first + to.block_size) {
                    let at = run.source.block_idx * from.layer_bytes();
                    mapping.apply(&run, &source[at..at + from.layer_bytes()], piece, &mut vectors);
                }
            }
            black_box(&mut target);
        });
    });
}

/// Numbers of one magnitude.
fn kv(layout: &KvLayout) -> Vec<u8> {
    let mut bytes = vec![0u8; layout.num_blocks_for(NUM_TOKENS) * layout.layer_bytes()];
    let vector: Vec<f32> = (0..layout.head_dim).map(|idx| (idx as f32).sin()).collect();
    for head in bytes.chunks_exact_mut(layout.head_bytes()) {
        let (elements, scales) = head.split_at_mut(layout.scale_offset(0));
        for token in 0..layout.block_size {
            let at = layout.token_offset(token);
            let len = layout.head_dim * layout.dtype.size_bytes();
            let scale = token * layout.dtype.scale_bytes();
            let scale = &mut scales[scale..scale + layout.dtype.scale_bytes()];
            layout.dtype.store_vector(&vector, &mut elements[at..at + len], scale);
        }
    }
    bytes
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).measurement_time(std::time::Duration::from_secs(2));
    targets = bench
}
criterion_main!(benches);
