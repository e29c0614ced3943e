//! Matrix products in GFLOP/s and, where reading the weights is what takes time, GB/s; attention alike.
//!
//! `cargo bench -p baton-model`. Criterion's "thrpt" counts floating-point operations for many rows
//! (Gelem/s are GFLOP/s) and bytes of weights or KV for one row.

use std::hint::black_box;

use baton_kv_cache::KvDtype;
use baton_model::benchmark::{Attention, Gemm, Weights};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn thread_counts() -> Vec<usize> {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    if all == 1 { vec![1] } else { vec![1, all] }
}

fn products(criterion: &mut Criterion) {
    let (n, k) = (8192, 2048);
    for threads in thread_counts() {
        for (name, weights) in Weights::available() {
            let mut group = criterion.benchmark_group(format!("gemm_{name}_8192x2048_{threads}_threads"));
            group.sample_size(10);
            for m in [1, 2, 4, 8, 16, 32, 64, 512] {
                group.throughput(match m {
                    1 => Throughput::Bytes(weights.matrix_bytes(n, k) as u64),
                    _ => Throughput::Elements((2 * m * n * k) as u64),
                });
                let mut gemm = Gemm::new(m, n, k, weights, threads);
                group.bench_function(BenchmarkId::from_parameter(m), |bencher| {
                    bencher.iter(|| black_box(gemm.run()))
                });
            }
        }
    }
}

fn attention(criterion: &mut Criterion) {
    let context = 4096;
    for threads in thread_counts() {
        let mut group = criterion.benchmark_group(format!("attention_bf16_{context}_{threads}_threads"));
        group.sample_size(10);
        for rows in [1, 256] {
            group.throughput(match rows {
                1 => Throughput::Bytes((context * 2 * 8 * 128 * 2) as u64),
                rows => Throughput::Elements((4 * 32 * 128 * rows * (context - rows / 2)) as u64),
            });
            let mut attention = Attention::new(rows, context, KvDtype::Bf16, threads);
            group.bench_function(BenchmarkId::from_parameter(rows), |bencher| {
                bencher.iter(|| black_box(attention.run()));
            });
        }
    }
}

criterion_group!(benches, products, attention);
criterion_main!(benches);
