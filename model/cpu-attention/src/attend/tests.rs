//! Compares attention with its formula, over shapes, types and divisions of the work.

use baton_kv_cache::{BlockId, KvDtype, KvLayout};

use super::*;
use crate::kv::store_rows;
use crate::kv::testing::read_vectors;
use crate::shape::SPAN;
use baton_cpu_kernels::has_pairs;
use baton_cpu_simd::Isa;
use baton_cpu_simd::tiles::tested_isas;
use baton_model_testing::{hash_of_bits, noise};

struct Case {
    shape: AttentionShape,
    block_size: usize,
    dtype: KvDtype,
    len: usize,
}

/// KV of one sequence in blocks of shuffled order.
fn fill(case: &Case) -> (BlockStorage, Vec<BlockId>, Vec<f32>, Vec<f32>) {
    let shape = &case.shape;
    let layout = KvLayout {
        block_size: case.block_size,
        num_layers: 2,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        dtype: case.dtype,
    };
    let num_blocks = layout.num_blocks_for(case.len);
    let storage = BlockStorage::new(layout, num_blocks + 3).unwrap();
    for block in 0..storage.num_blocks() {
        // Contents that are not written yet must not matter. SAFETY: no other code uses the storage.
        unsafe { storage.layer_mut(BlockId(block as u32), 1) }.fill(0xff);
    }
    let blocks: Vec<BlockId> = (0..num_blocks).rev().map(|idx| BlockId(idx as u32 + 2)).collect();
    let width = shape.num_kv_heads * shape.head_dim;
    let [keys, values] = [1, 2].map(|seed| noise(seed, case.len * width));
    for (position, (key, value)) in keys.chunks(width).zip(values.chunks(width)).enumerate() {
        // SAFETY: no other code uses the storage.
        unsafe { store_rows(&storage, 1, &blocks, position, 0, key, value) };
    }
    let [k, v] = [0, 1].map(|half| {
        (0..case.len * shape.num_kv_heads)
            .flat_map(|idx| {
                let (position, kv_head) = (idx / shape.num_kv_heads, idx % shape.num_kv_heads);
                let kv = HeadKv::new(&storage, 1, &blocks, kv_head);
                // SAFETY: no other code writes.
                let [key, value] = unsafe { read_vectors(&kv, position) };
                if half == 0 { key } else { value }
            })
            .collect()
    });
    (storage, blocks, k, v)
}

/// The formula, in f64.
fn reference(shape: &AttentionShape, q: &[f32], k: &[f32], v: &[f32], position: usize) -> Vec<f64> {
    let dim = shape.head_dim;
    let group = shape.num_heads / shape.num_kv_heads;
    let from = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let mut out = vec![0.0; shape.num_heads * dim];
    for head in 0..shape.num_heads {
        let at = |t: usize| (t * shape.num_kv_heads + head / group) * dim;
        let scores: Vec<f64> = (from..=position)
            .map(|t| {
                let dot: f64 = (0..dim).map(|i| f64::from(q[head * dim + i]) * f64::from(k[at(t) + i])).sum();
                let score = dot * f64::from(shape.scale);
                shape.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            })
            .collect();
        let max = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
        let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        for (t, score) in (from..=position).zip(&scores) {
            for i in 0..dim {
                out[head * dim + i] += (score - max).exp() / total * f64::from(v[at(t) + i]);
            }
        }
    }
    out
}

/// Fills the scratch memory with what other operations may leave there.
fn spoil(cpu: &mut Cpu, num_threads: usize) {
    const LEN: usize = 1 << 18;
    let (_, _, scratch, _) = cpu.parts();
    let scratch = scratch.reserve(num_threads, LEN);
    for thread_idx in 0..num_threads {
        // SAFETY: the memory was reserved, and no other code uses it.
        unsafe { std::slice::from_raw_parts_mut(scratch.of(thread_idx), LEN) }.fill(f32::NAN);
    }
}

/// The tolerance is 5e-6 absolute for values of magnitude one. It is 2e-3, half a unit in the last place of bf16,
/// where weights are rounded to bf16.
fn check(isa: Isa, case: &Case) -> Vec<f32> {
    let shape = &case.shape;
    let (storage, blocks, k, v) = fill(case);
    let width = shape.num_heads * shape.head_dim;
    let stride = width + 5;
    let mut queries: Vec<f32> = noise(3, case.len * stride).iter().map(|x| x * 4.0).collect();
    let in_pairs = shape.bf16_pairs && has_pairs_of(case.dtype);
    if in_pairs {
        // The kernel rounds scaled queries; it then finds them rounded already.
        let scale = shape.scale * if shape.soft_cap.is_none() { std::f32::consts::LOG2_E } else { 1.0 };
        for x in &mut queries {
            *x = half::bf16::from_f32(*x * scale).to_f32() / scale;
        }
    }
    let tolerance = if in_pairs { 2e-3 } else { 5e-6 };
    let run = |threads: usize, chunks: &[(usize, usize)]| {
        let mut cpu = Cpu::new(isa, threads).unwrap();
        spoil(&mut cpu, threads);
        let mut out = vec![f32::NAN; case.len * width];
        for &(start, num_rows) in chunks {
            let sequence = BatchSequence {
                tokens: &vec![0; num_rows],
                start_idx: start,
                blocks: &blocks,
                num_logits: 0,
            };
            // SAFETY: no other code writes; pairs are multiplied in plain Rust, or where the CPU has them.
            unsafe {
                attend(
                    &mut cpu,
                    shape,
                    &storage,
                    1,
                    &[sequence],
                    &[0],
                    &queries[start * stride..],
                    stride,
                    &mut out[start * width..],
                );
            }
        }
        out
    };
    let whole = run(2, &[(0, case.len)]);
    for position in [0, 1, case.len / 2, case.len - 1] {
        let expected = reference(shape, &queries[position * stride..], &k, &v, position);
        for (i, expected) in expected.iter().enumerate() {
            let got = f64::from(whole[position * width + i]);
            assert!(
                (got - expected).abs() < tolerance,
                "{isa:?} {shape:?} {position}/{i}: {got} not {expected}"
            );
        }
    }
    let same_rows = |threads: usize, first: usize, rows: usize| {
        let chunks: Vec<_> = (first..case.len).step_by(rows).map(|s| (s, rows.min(case.len - s))).collect();
        let (got, expected) = (&run(threads, &chunks)[first * width..], &whole[first * width..]);
        assert!(
            got == expected,
            "{isa:?} {shape:?}: {rows} rows at a time from {first} on, {threads} threads"
        );
    };
    same_rows(1, 0, 7);
    same_rows(2, 0, 3);
    same_rows(3, case.len / 2, 300);
    // One thread processes span after span; several threads share the spans.
    same_rows(1, case.len - 40, 1);
    same_rows(5, case.len - 40, 1);
    whole
}

/// Checks every instruction set. Those with fused multiply-adds must agree bit for bit; returns their result.
fn check_all(case: &Case) -> Option<Vec<f32>> {
    let fused = |isa: &Isa| *isa != Isa::Portable || cfg!(target_arch = "aarch64");
    let found: Vec<_> = tested_isas().into_iter().map(|isa| (isa, check(isa, case))).collect();
    let mut results: Vec<_> = found.into_iter().filter(|(isa, _)| fused(isa)).map(|(_, out)| out).collect();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "instruction sets differ: {:?}", case.shape);
    results.pop()
}

const BASE: AttentionShape = AttentionShape {
    num_heads: 4,
    num_kv_heads: 2,
    first_kv_head: 0,
    head_dim: 16,
    scale: 0.25,
    soft_cap: None,
    window: None,
    bf16_pairs: false,
};

#[test]
fn attention_matches_the_formula_and_does_not_depend_on_chunks() {
    for dtype in KvDtype::ALL {
        check_all(&Case { shape: BASE, block_size: 16, dtype, len: 150 });
        check_all(&Case { shape: AttentionShape { head_dim: 64, ..BASE }, block_size: 16, dtype, len: 140 });
        let odd = AttentionShape { head_dim: 24, num_heads: 3, num_kv_heads: 1, ..BASE };
        check_all(&Case { shape: odd, block_size: 5, dtype, len: 135 });
    }
    let shapes = [
        AttentionShape { head_dim: 5, num_heads: 2, ..BASE },
        AttentionShape { head_dim: 64, num_heads: 10, ..BASE },
        AttentionShape { head_dim: 128, num_heads: 9, num_kv_heads: 1, ..BASE },
        AttentionShape { num_heads: 2, window: Some(30), ..BASE },
        AttentionShape { window: Some(1), ..BASE },
        AttentionShape { window: Some(70), ..BASE },
        AttentionShape { soft_cap: Some(5.0), head_dim: 80, ..BASE },
    ];
    for shape in shapes {
        check_all(&Case { shape, block_size: 5, dtype: KvDtype::F32, len: 135 });
    }
}

/// Includes odd numbers of elements in a head, rows in a chunk and positions in a tile.
#[test]
fn pairs_match_the_formula_and_do_not_depend_on_chunks() {
    let base = AttentionShape { bf16_pairs: true, ..BASE };
    let shapes = [
        base,
        AttentionShape { head_dim: 64, ..base },
        AttentionShape { head_dim: 128, num_heads: 9, num_kv_heads: 1, ..base },
        AttentionShape { head_dim: 24, num_heads: 3, num_kv_heads: 1, ..base },
        AttentionShape { head_dim: 5, num_heads: 2, ..base },
        AttentionShape { head_dim: 96, window: Some(33), ..base },
        AttentionShape { head_dim: 64, soft_cap: Some(5.0), num_heads: 16, ..base },
    ];
    for shape in shapes {
        for dtype in [KvDtype::Bf16, KvDtype::Fp8, KvDtype::Int8] {
            let case = Case { shape, block_size: 5, dtype, len: 135 };
            check(Isa::Portable, &case);
            for isa in tested_isas().into_iter().filter(|isa| has_pairs(*isa)) {
                check(isa, &case);
            }
        }
    }
}

/// Scores that grow by more than weights may, several spans, and windows that end in the middle of a block. Up to sixteen
/// queries read whole tiles of keys of bf16 in place, more read copies.
#[test]
fn tiles_have_the_same_bits_as_their_model() {
    let base = AttentionShape { bf16_pairs: true, num_heads: 2, num_kv_heads: 1, ..BASE };
    let in_place = AttentionShape { head_dim: 64, ..base };
    let cases = [
        (AttentionShape { scale: 4.0, ..base }, 16, KvDtype::Bf16, 2 * SPAN + 70),
        (AttentionShape { head_dim: 40, window: Some(SPAN + 9), ..base }, 16, KvDtype::Int8, SPAN + 150),
        (AttentionShape { window: Some(100), scale: 4.0, ..base }, 16, KvDtype::Fp8, SPAN + 20),
        (AttentionShape { soft_cap: Some(5.0), num_heads: 3, ..base }, 16, KvDtype::Int8, 300),
        (AttentionShape { scale: 4.0, ..in_place }, 16, KvDtype::Bf16, 2 * SPAN + 70),
        (AttentionShape { head_dim: 96, window: Some(100), ..in_place }, 48, KvDtype::Bf16, SPAN + 20),
        (AttentionShape { soft_cap: Some(5.0), num_heads: 3, ..in_place }, 32, KvDtype::Bf16, 300),
    ];
    for (shape, block_size, dtype, len) in cases {
        let case = Case { shape, block_size, dtype, len };
        let isas = tested_isas().into_iter().filter(|isa| isa.has_tiles());
        let results: Vec<_> = isas.map(|isa| check(isa, &case)).collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{shape:?}");
    }
}

/// Recorded with AVX-512.
#[test]
fn x86_and_arm_attend_with_the_same_bits() {
    let shape = AttentionShape { head_dim: 64, num_heads: 10, soft_cap: Some(5.0), window: Some(70), ..BASE };
    for (dtype, hash) in [(KvDtype::F16, 0x91c8_bf6a_a532_34d1), (KvDtype::Int8, 0xb72d_9375_a0ec_7c62)] {
        let Some(out) = check_all(&Case { shape, block_size: 5, dtype, len: 135 }) else {
            eprintln!("skipped: this CPU has no fused multiply-adds");
            return;
        };
        assert_eq!(hash_of_bits(&out), hash, "{dtype:?}");
    }
}

#[test]
fn folded_spans_do_not_depend_on_the_threads() {
    let shapes = [
        AttentionShape { num_heads: 2, num_kv_heads: 1, ..BASE },
        AttentionShape { num_heads: 2, num_kv_heads: 1, window: Some(SPAN + 9), ..BASE },
        AttentionShape { num_heads: 1, num_kv_heads: 1, soft_cap: Some(5.0), window: Some(33), ..BASE },
    ];
    for shape in shapes {
        for len in [SPAN, SPAN + 1, 2 * SPAN + 70] {
            check_all(&Case { shape, block_size: 16, dtype: KvDtype::Bf16, len });
        }
    }
}
