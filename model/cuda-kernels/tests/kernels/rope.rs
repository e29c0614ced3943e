//! `kernels/rope.cu` against a plain reference.

use baton_cuda_emulator::emulator::{Emulator, Memory};
use baton_cuda_emulator::numbers::{assert_close, bf16, floats, widened};
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::rope::*;
use baton_cuda_kernels::rows::NONE;
use baton_kv_cache::{KvDtype, KvLayout, VectorCodec};
use baton_model_testing::noise;

const NUM_HEADS: usize = 3;
const FACTOR: f32 = 1.25;
const EPS: f32 = 1e-6;
const NUM_LAYERS: usize = 2;
const LAYER_IDX: usize = 1;
/// Position and sequence of each row.
const ROWS: [(u32, u32); 5] = [(131_071, 1), (0, 0), (77, NONE), (1, 0), (9, 2)];

fn frequencies(rotary_dim: usize) -> Vec<f32> {
    (0..rotary_dim / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / rotary_dim as f32)).collect()
}

fn layout(dtype: KvDtype, head_dim: usize, block_size: usize) -> KvLayout {
    KvLayout { block_size, num_layers: NUM_LAYERS, num_kv_heads: 2, head_dim, dtype }
}

/// The blocks of each sequence are separate. Only blocks with rows exist.
fn block_tables(block_size: usize) -> (Vec<u32>, usize) {
    let max_blocks = 131_072usize.div_ceil(block_size);
    let mut tables = vec![NONE; 3 * max_blocks];
    let mut next = 7;
    for (position, sequence) in ROWS {
        if sequence != NONE {
            let entry = &mut tables[sequence as usize * max_blocks + position as usize / block_size];
            if *entry == NONE {
                next -= 2;
                *entry = next;
            }
        }
    }
    (tables, max_blocks)
}

struct Found {
    memory: Memory,
    kernel: StoreQkv,
    table: Address,
    storage: Address,
}

/// Runs all three kernels.
fn run(
    rotary_dim: usize,
    layout: &KvLayout,
    qkv: &[u8],
    norms: Option<[&[f32]; 2]>,
    bias: Option<&[f32]>,
) -> Found {
    let mut emulator = Emulator::new(source(rotary_dim, layout));
    let [positions, sequence_of] = [ROWS.map(|row| row.0), ROWS.map(|row| row.1)];
    let (tables, max_blocks) = block_tables(layout.block_size);
    let positions = emulator.buffer(bytemuck::cast_slice(&positions));
    let slots = emulator.poisoned(ROWS.len() * 4);
    let table = emulator.poisoned(ROWS.len() * rotary_dim * 4);
    let place = PlaceRows {
        positions,
        sequence_of: emulator.buffer(bytemuck::cast_slice(&sequence_of)),
        block_tables: emulator.buffer(bytemuck::cast_slice(&tables)),
        slots,
        max_blocks: max_blocks as u32,
        block_size: layout.block_size as u32,
        num_rows: ROWS.len() as u64,
    };
    emulator.launch(&place);
    let angles = RopeTable {
        positions,
        inverse_frequencies: emulator.buffer(bytemuck::cast_slice(&frequencies(rotary_dim))),
        cos_sin: table,
        factor: FACTOR,
        num_rows: ROWS.len() as u32,
        rotary_dim: rotary_dim as u64,
    };
    emulator.launch(&angles);
    let storage = emulator.poisoned(6 * layout.block_bytes());
    let [query_norm, key_norm] = match norms {
        Some(norms) => norms.map(|norm| emulator.buffer(bytemuck::cast_slice(norm))),
        None => [Address::NULL; 2],
    };
    let kernel = StoreQkv {
        qkv: emulator.buffer(qkv),
        slots,
        cos_sin: table,
        query_norm,
        key_norm,
        bias: bias.map_or(Address::NULL, |bias| emulator.buffer(bytemuck::cast_slice(bias))),
        layer: storage.offset_by(layout.layer_offset(LAYER_IDX)),
        block_bytes: layout.block_bytes() as u64,
        num_rows: ROWS.len() as u32,
        num_heads: NUM_HEADS as u32,
        num_kv_heads: layout.num_kv_heads as u32,
        block_size: layout.block_size as u32,
        eps: EPS,
        lanes: lanes(layout.head_dim, rotary_dim),
    };
    emulator.launch(&kernel);
    Found { memory: emulator.run(), kernel, table, storage }
}

fn cos_sin(position: u32, frequency: f32) -> (f32, f32) {
    let (sine, cosine) = f64::from(position as f32 * frequency).sin_cos();
    (cosine as f32 * FACTOR, sine as f32 * FACTOR)
}

fn rotate(position: u32, rotary_dim: usize, head: &mut [f32]) {
    let half = rotary_dim / 2;
    for (i, frequency) in frequencies(rotary_dim).into_iter().enumerate() {
        let ((cosine, sine), a, b) = (cos_sin(position, frequency), head[i], head[i + half]);
        head[i] = a * cosine - b * sine;
        head[i + half] = b * cosine + a * sine;
    }
}

/// The expected queries and the expected pool.
fn reference(
    rotary_dim: usize,
    layout: &KvLayout,
    qkv: &[f32],
    norms: Option<[&[f32]; 2]>,
) -> (Vec<f32>, Vec<u8>) {
    let KvLayout { block_size, num_kv_heads, head_dim, dtype, .. } = *layout;
    let (tables, max_blocks) = block_tables(block_size);
    let width = (NUM_HEADS + 2 * num_kv_heads) * head_dim;
    let (mut out, mut storage) = (qkv.to_vec(), vec![0xff; 6 * layout.block_bytes()]);
    for ((position, sequence), row) in ROWS.into_iter().zip(out.chunks_exact_mut(width)) {
        if sequence == NONE {
            continue;
        }
        let at = position as usize;
        let block = tables[sequence as usize * max_blocks + at / block_size] as usize;
        for (head_idx, from) in row.chunks_exact_mut(head_dim).enumerate() {
            let mut head = from.to_vec();
            if head_idx < NUM_HEADS + num_kv_heads {
                if let Some(norms) = norms {
                    let weight = norms[usize::from(head_idx >= NUM_HEADS)];
                    let mean = head.iter().map(|x| x * x).sum::<f32>() / head_dim as f32;
                    head.iter_mut().zip(weight).for_each(|(x, w)| *x *= w / (mean + EPS).sqrt());
                }
                rotate(position, rotary_dim, &mut head);
            }
            if head_idx < NUM_HEADS {
                from.copy_from_slice(&head);
                continue;
            }
            let (half, kv_head) =
                ((head_idx - NUM_HEADS) / num_kv_heads, (head_idx - NUM_HEADS) % num_kv_heads);
            let first = block * layout.block_bytes()
                + layout.layer_offset(LAYER_IDX)
                + half * layout.half_bytes()
                + layout.head_offset(kv_head);
            let (elements, scales) =
                storage[first..][..layout.head_bytes()].split_at_mut(layout.scale_offset(0));
            let token = at % block_size;
            let vector_bytes = head_dim * dtype.size_bytes();
            dtype.store_vector(
                &head,
                &mut elements[layout.token_offset(token)..][..vector_bytes],
                &mut scales[token * dtype.scale_bytes()..][..dtype.scale_bytes()],
            );
        }
    }
    (out, storage)
}

fn rows(layout: &KvLayout) -> Vec<f32> {
    let width = (NUM_HEADS + 2 * layout.num_kv_heads) * layout.head_dim;
    noise(7, ROWS.len() * width).iter().enumerate().map(|(i, x)| x * 10f32.powi(i as i32 % 5 - 2)).collect()
}

/// The start of each row.
fn heads(rows: &[f32], width: usize, len: usize) -> Vec<f32> {
    rows.chunks_exact(width).flat_map(|row| &row[..len]).copied().collect()
}

#[test]
fn rotated_heads_are_stored_to_the_bit() {
    let cases = [
        (KvDtype::F32, 80, 32, 5),
        (KvDtype::F16, 20, 12, 3),
        (KvDtype::Bf16, 128, 128, 16),
        (KvDtype::Fp8, 10, 6, 7),
        (KvDtype::Fp8, 256, 256, 16),
        (KvDtype::Int8, 64, 64, 5),
    ];
    for (dtype, head_dim, rotary_dim, block_size) in cases {
        let layout = layout(dtype, head_dim, block_size);
        let mut qkv = rows(&layout);
        // Values of the second row: a head of zeros, and a head with a NaN.
        let values = &mut qkv[2 * (NUM_HEADS + 4) * head_dim - 2 * head_dim..][..2 * head_dim];
        values[..head_dim].fill(0.0);
        values[head_dim + 3] = f32::NEG_INFINITY;
        let (bytes, qkv) = bf16(&qkv);
        let width = (NUM_HEADS + 4) * head_dim;
        let bias = noise(3, width);
        for bias in [None, Some(&bias[..])] {
            let mut summed = qkv.clone();
            for (row, (_, sequence)) in summed.chunks_exact_mut(width).zip(ROWS) {
                let bias = bias.filter(|_| sequence != NONE).unwrap_or_default();
                row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
            let (queries, storage) = reference(rotary_dim, &layout, &summed, None);
            let found = run(rotary_dim, &layout, &bytes, None, bias);
            let what = format!("{layout:?}, {rotary_dim}, bias: {}", bias.is_some());
            assert!(found.memory.of(found.storage) == storage, "{what}");
            let queries = heads(&queries, width, NUM_HEADS * head_dim);
            let found = heads(&widened(found.memory.of(found.kernel.qkv)), width, NUM_HEADS * head_dim);
            assert_eq!(bf16(&found).0, bf16(&queries).0, "{what}");
        }
    }
}

#[test]
fn heads_are_normed_before_they_are_rotated() {
    let (head_dim, rotary_dim) = (80, 32);
    let layout = layout(KvDtype::F32, head_dim, 5);
    let (bytes, qkv) = bf16(&rows(&layout));
    let weights = [1, 2].map(|seed| noise(seed, head_dim));
    let norms = Some([&weights[0][..], &weights[1]]);
    let (queries, storage) = reference(rotary_dim, &layout, &qkv, norms);
    let found = run(rotary_dim, &layout, &bytes, norms, None);
    // Half a unit in the last place of bf16, and f32 sums in a different order, whose differences may cancel.
    assert_close(&widened(found.memory.of(found.kernel.qkv)), &queries, 1.0 / 256.0, 2e-6);
    let finite = |numbers: Vec<f32>| {
        numbers.into_iter().map(|x| if x.is_nan() { -1e9 } else { x }).collect::<Vec<_>>()
    };
    let keys = finite(floats(found.memory.of(found.storage)));
    assert_close(&keys, &finite(floats(&storage)), 1e-6, 2e-6);
}

#[test]
fn cosines_and_sines_match_the_host() {
    let (rotary_dim, layout) = (128, layout(KvDtype::Bf16, 128, 16));
    let found = run(rotary_dim, &layout, &bf16(&rows(&layout)).0, None, None);
    let frequencies = frequencies(rotary_dim);
    let expected: Vec<f32> = ROWS
        .iter()
        .flat_map(|&(position, _)| {
            let (cos, sin): (Vec<f32>, Vec<f32>) =
                frequencies.iter().map(|&frequency| cos_sin(position, frequency)).unzip();
            [cos, sin].concat()
        })
        .collect();
    assert_eq!(floats(found.memory.of(found.table)), expected);
}
