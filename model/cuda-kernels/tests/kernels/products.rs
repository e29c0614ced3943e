//! `kernels/products.cu` against a plain reference.

use baton_cuda_emulator::emulator::{Emulator, Memory};
use baton_cuda_emulator::numbers::{assert_close, bf16, floats as floats_of, widened};
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::products::*;
use baton_cuda_kernels::rows::NONE;
use baton_kv_cache::e4m3;
use baton_model_spec::{IntegerFormat, IntegerRow, IntegerWidth};
use baton_model_testing::noise;

/// Weights of one kind: the device's form and the numbers that they stand for.
struct Weights {
    kind: WeightKind,
    n: usize,
    k: usize,
    bytes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<f32>,
    /// Addresses are null.
    places: Scales,
    /// `[n][k]`
    values: Vec<f64>,
}

fn integers(width: IntegerWidth, n: usize, k: usize, group: usize, has_zeros: bool) -> Weights {
    let kind = match width {
        IntegerWidth::Four => WeightKind::Int4,
        IntegerWidth::Eight => WeightKind::Int8,
    };
    let num_groups = k.div_ceil(group);
    let format = IntegerFormat { width, group, has_zeros };
    let (mut bytes, mut values) = (vec![], vec![]);
    // `[groups][n]`: kernels read the scales of four neighbouring rows together.
    let stride = n.next_multiple_of(4);
    let (mut scales, mut zeros) = (vec![0.0; num_groups * stride], vec![0.0; num_groups * stride]);
    for row_idx in 0..n {
        let seed = row_idx as u64 + 10;
        let top = 2.0 * f32::from(width.middle()) - 1.0;
        let level = |x: &f32| ((x + 1.0) / 2.0 * top).round() as u8;
        let row = IntegerRow {
            levels: noise(seed, k).iter().map(level).collect(),
            scales: noise(seed + 1000, num_groups).iter().map(|x| x * 0.01).collect(),
            // Some zeros are between two levels.
            zeros: noise(seed + 2000, if has_zeros { num_groups } else { 0 })
                .iter()
                .map(|x| (x + 1.0) / 2.0 * top)
                .collect(),
        };
        bytes.resize(bytes.len() + kind.row_bytes(k), 0xff);
        let first = row_idx * kind.row_bytes(k);
        pack(&row.levels, kind, &mut bytes[first..]);
        values.extend(row.values(format).map(f64::from));
        for group_idx in 0..num_groups {
            scales[group_idx * stride + row_idx] = row.scales[group_idx];
            if has_zeros {
                zeros[group_idx * stride + row_idx] = row.zeros[group_idx] - f32::from(width.middle());
            }
        }
    }
    let places = Scales { row_stride: 1, group_stride: stride as u32, group: group as u32, ..Scales::NONE };
    Weights { kind, n, k, bytes, scales, zeros: if has_zeros { zeros } else { vec![] }, places, values }
}

/// A scale for each block of rows and columns.
fn fp8(n: usize, k: usize, rows_per_scale: usize, group: usize) -> Weights {
    // All codes but NaN, including denormal numbers.
    let codes: Vec<u8> = noise(3, n * k).iter().map(|x| (x.to_bits() >> 5) as u8).collect();
    let codes: Vec<u8> =
        codes.into_iter().map(|code| if code & 0x7f == 0x7f { 0x01 } else { code }).collect();
    let num_groups = k.div_ceil(group);
    let scales: Vec<f32> =
        noise(4, n.div_ceil(rows_per_scale) * num_groups).iter().map(|x| x * 0.01).collect();
    let value = |idx: usize| {
        let scale = scales[idx / k / rows_per_scale * num_groups + idx % k / group];
        f64::from(scale) * f64::from(e4m3::to_f32(codes[idx]))
    };
    let places = Scales {
        rows_per_scale: rows_per_scale as u32,
        row_stride: num_groups as u32,
        group_stride: 1,
        group: group as u32,
        ..Scales::NONE
    };
    let values = (0..n * k).map(value).collect();
    Weights { kind: WeightKind::Fp8, n, k, bytes: codes, scales, zeros: vec![], places, values }
}

fn every_kind() -> Vec<Weights> {
    vec![
        fp8(40, 80, 1, 80),
        fp8(33, 272, 128, 128),
        fp8(32, 64, 32, 64),
        fp8(132, 1168, 128, 128),
        integers(IntegerWidth::Eight, 5, 40, 128, false),
        integers(IntegerWidth::Eight, 34, 328, 32, true),
        integers(IntegerWidth::Eight, 32, 576, 128, false),
        integers(IntegerWidth::Four, 7, 8, 32, false),
        integers(IntegerWidth::Four, 40, 1288, 32, false),
        integers(IntegerWidth::Four, 130, 1544, 128, true),
        integers(IntegerWidth::Four, 32, 392, 96, true),
        integers(IntegerWidth::Four, 33, 512, 256, true),
    ]
}

impl Weights {
    fn on(&self, emulator: &mut Emulator) -> (Address, Scales) {
        let mut floats = |values: &[f32]| match values {
            [] => Address::NULL,
            _ => emulator.buffer(bytemuck::cast_slice(values)),
        };
        let places = Scales { scales: floats(&self.scales), zeros: floats(&self.zeros), ..self.places };
        (emulator.buffer(&self.bytes), places)
    }

    /// K in parts of two chunks, if it has more.
    fn parts(&self) -> KParts {
        let chunk = if self.kind == WeightKind::Int4 { 256 } else { 128 };
        let num = self.k.div_ceil(2 * chunk) as u32;
        if num == 1 { KParts::ONE } else { KParts { num, chunks: 2 } }
    }
}

/// The kernel's result for `x`, and the launch.
fn multiply(
    weights: &Weights,
    x: &[u8],
    num_rows: usize,
    bias: Option<&[f32]>,
    is_f32: bool,
    parts: KParts,
) -> (Memory, MultiplyFew) {
    let n = weights.n;
    let mut emulator = Emulator::new(source(weights.kind));
    let (levels, scales) = weights.on(&mut emulator);
    let (sums, done) = parts.scratch_bytes(n, num_rows);
    let kernel = MultiplyFew {
        parts,
        part_sums: emulator.poisoned(sums),
        parts_done: emulator.buffer(&vec![0; done]),
        x: emulator.buffer(x),
        rows: Address::NULL,
        offsets: Address::NULL,
        weights: levels,
        scales,
        bias: bias.map_or(Address::NULL, |bias| emulator.buffer(bytemuck::cast_slice(bias))),
        out: emulator.poisoned(num_rows * n * if is_f32 { 4 } else { 2 }),
        k: weights.k as u32,
        n: n as u32,
        num_rows: num_rows as u32,
        num_experts: 1,
        is_f32: u32::from(is_f32),
        kind: weights.kind,
    };
    emulator.launch(&kernel);
    let memory = emulator.run();
    assert!(memory.of(kernel.parts_done).iter().all(|byte| *byte == 0), "counts after a launch");
    (memory, kernel)
}

/// Rows of `x` times `n` rows of `weights` from `first` on, and the error of sums of this size.
fn expected(weights: &Weights, x: &[f32], first: usize, n: usize) -> (Vec<f32>, f32) {
    let k = weights.k;
    let (mut sums, mut largest) = (vec![], 0.0f64);
    for row in x.chunks_exact(k) {
        for weights_row in weights.values[first * k..][..n * k].chunks_exact(k) {
            let products = row.iter().zip(weights_row).map(|(x, weight)| f64::from(*x) * weight);
            let size: f64 = products.clone().map(f64::abs).sum();
            // The kernel multiplies a level and its zero separately.
            largest = largest.max(if weights.zeros.is_empty() { size } else { 4.0 * size });
            sums.push(products.sum::<f64>() as f32);
        }
    }
    (sums, (largest * 2e-6) as f32)
}

#[test]
fn few_rows_are_multiplied() {
    for (idx, weights) in every_kind().iter().enumerate() {
        let (n, k) = (weights.n, weights.k);
        let num_rows = [1, 8, 9, 16, 3, 37][idx % 6];
        let (x, x_values) = bf16(&noise(1, num_rows * k));
        let bias = noise(6, n);
        let has_bias = idx % 2 == 1;
        let is_f32 = idx % 3 == 0;
        let parts = if idx % 4 < 3 { weights.parts() } else { KParts::ONE };
        let (memory, kernel) = multiply(weights, &x, num_rows, has_bias.then_some(&bias), is_f32, parts);
        let (mut expected, absolute) = expected(weights, &x_values, 0, n);
        if has_bias {
            expected.iter_mut().enumerate().for_each(|(idx, sum)| *sum += bias[idx % n]);
        }
        let bytes = memory.of(kernel.out);
        if is_f32 {
            assert_close(&floats_of(bytes), &expected, 1e-6, absolute);
        } else {
            assert_close(&widened(bytes), &expected, 1.0 / 256.0, absolute);
        }
    }
}

#[test]
fn each_place_is_multiplied_with_its_experts_weights() {
    // Experts without rows, with few rows, and with more rows than one pass covers.
    let counts = [0, 3, 21, 0, 8];
    for (n, all) in [
        (8, integers(IntegerWidth::Four, 40, 160, 32, true)),
        (36, integers(IntegerWidth::Eight, 180, 72, 64, false)),
        (33, fp8(165, 80, 1, 80)),
        (32, fp8(160, 144, 32, 64)),
    ] {
        let k = all.k;
        let mut offsets = vec![0u32];
        counts.iter().for_each(|count| offsets.push(offsets[offsets.len() - 1] + count));
        let num_places = *offsets.last().unwrap() as usize;
        let rows: Vec<u32> = (0..num_places as u32).map(|place| place * 7 % 13).collect();
        let (x, x_values) = bf16(&noise(1, 13 * k));
        let mut emulator = Emulator::new(source(all.kind));
        let (levels, scales) = all.on(&mut emulator);
        let kernel = MultiplyFew {
            x: emulator.buffer(&x),
            rows: emulator.buffer(bytemuck::cast_slice(&rows)),
            offsets: emulator.buffer(bytemuck::cast_slice(&offsets)),
            weights: levels,
            scales,
            bias: Address::NULL,
            out: emulator.poisoned(num_places * n * 2),
            k: k as u32,
            n: n as u32,
            num_rows: num_places as u32,
            num_experts: counts.len() as u32,
            is_f32: 0,
            kind: all.kind,
            parts: KParts::ONE,
            part_sums: Address::NULL,
            parts_done: Address::NULL,
        };
        emulator.launch(&kernel);
        let memory = emulator.run();
        let found = widened(memory.of(kernel.out));
        for (expert, places) in offsets.windows(2).enumerate() {
            for place in places[0] as usize..places[1] as usize {
                let row = &x_values[rows[place] as usize * k..][..k];
                let (expected, absolute) = expected(&all, row, expert * n, n);
                assert_close(&found[place * n..][..n], &expected, 1.0 / 256.0, absolute);
            }
        }
    }
}

#[test]
fn the_bits_of_a_row_do_not_depend_on_other_rows() {
    for weights in every_kind().iter().filter(|weights| weights.values.len() > 5000) {
        let (n, k) = (weights.n, weights.k);
        let (x, _) = bf16(&noise(8, 40 * k));
        let run = |rows: std::ops::Range<usize>| {
            let (memory, kernel) = multiply(
                weights,
                &x[rows.start * k * 2..rows.end * k * 2],
                rows.len(),
                None,
                true,
                weights.parts(),
            );
            memory.of(kernel.out).to_vec()
        };
        let all = run(0..40);
        for rows in [0..1, 7..8, 11..12, 2..10, 3..12, 15..33, 39..40] {
            let found = run(rows.clone());
            assert!(found == all[rows.start * n * 4..rows.end * n * 4], "{:?} {rows:?}", weights.kind);
        }
    }
}

#[test]
fn k_is_divided_where_outputs_alone_do_not_fill_a_gpu() {
    let of = |n, k| {
        let parts = KParts::of(WeightKind::Int4, n, k);
        (parts.num, parts.chunks)
    };
    // Llama 3.1 8B: gate and up, down, output, and queries, keys and values.
    assert_eq!(
        [of(28672, 4096), of(4096, 14336), of(4096, 4096), of(6144, 4096)],
        [(1, 0), (8, 7), (4, 4), (4, 4)]
    );
    assert_eq!([of(64, 512), of(64, 1024), of(64, 1280)], [(1, 0), (1, 0), (2, 4)]);
    assert_eq!(KParts::of(WeightKind::Fp8, 4096, 4096).num, 8);
    assert_eq!(KParts { num: 2, chunks: 4 }.scratch_bytes(130, 33), (2 * 33 * 132 * 4, 2 * 2 * 4));
}

#[test]
fn weights_are_dequantised_to_bf16() {
    for weights in &every_kind() {
        let (n, k) = (weights.n, weights.k);
        let mut emulator = Emulator::new(source(weights.kind));
        let (levels, scales) = weights.on(&mut emulator);
        let kernel = Dequantise {
            weights: levels,
            scales,
            rows: Address::NULL,
            out: emulator.poisoned(n * k * 2),
            k: k as u32,
            n: n as u32,
            num_held: n as u32,
            factor: 1.0,
            kind: weights.kind,
            first_row: 0,
        };
        emulator.launch(&kernel);
        // Looked-up rows with other rows before and after them. One row is unused.
        let (first_row, end) = (7, 7 + n as u32);
        let rows = [end - 1, first_row, NONE, first_row + 2, first_row - 1, end, 0];
        let some = Dequantise {
            first_row,
            rows: emulator.buffer(bytemuck::cast_slice(&rows)),
            out: emulator.poisoned(rows.len() * k * 2),
            n: rows.len() as u32,
            factor: 3.0,
            ..kernel
        };
        emulator.launch(&some);
        let memory = emulator.run();
        let expected: Vec<f32> = weights.values.iter().map(|value| *value as f32).collect();
        // Half a unit in the last place of bf16. A level minus its zero is rounded to f32, in a different order.
        assert_close(&widened(memory.of(kernel.out)), &expected, 1.0 / 256.0, 1e-6);
        let looked_up: Vec<f32> = rows
            .iter()
            .flat_map(|row| match row.checked_sub(first_row).filter(|&row| row < n as u32) {
                None => vec![0.0; k],
                Some(row) => expected[row as usize * k..][..k].iter().map(|x| x * 3.0).collect::<Vec<_>>(),
            })
            .collect();
        assert_close(&widened(memory.of(some.out)), &looked_up, 1.0 / 256.0, 3e-6);
    }
}

#[test]
fn products_are_scaled_on_both_sides() {
    for (num_rows, n) in [(1, 8), (5, 264), (3, 2056)] {
        let (x, values) = bf16(&noise(1, num_rows * n));
        let (row_scales, column_scales) = (noise(2, num_rows), noise(3, n));
        let mut emulator = Emulator::new(source(WeightKind::Fp8));
        let kernel = ScaleProduct {
            x: emulator.buffer(&x),
            row_scales: emulator.buffer(bytemuck::cast_slice(&row_scales)),
            column_scales: emulator.buffer(bytemuck::cast_slice(&column_scales)),
            n: n as u32,
            num_rows: num_rows as u32,
        };
        emulator.launch(&kernel);
        let scaled = |(idx, x): (usize, &f32)| x * row_scales[idx / n] * column_scales[idx % n];
        let expected: Vec<f32> = values.iter().enumerate().map(scaled).collect();
        // Half a unit in the last place of bf16.
        assert_close(&widened(emulator.run().of(kernel.x)), &expected, 1.0 / 256.0, 0.0);
    }
}

#[test]
fn activations_are_quantised_as_on_the_host() {
    for (num_rows, k) in [(1, 8), (5, 264), (3, 2056)] {
        let mut values = noise(9, num_rows * k);
        // Numbers that are small beside the largest, a row of zeros, and a row with NaN.
        values.iter_mut().step_by(3).for_each(|x| *x *= 1e-3);
        if num_rows > 2 {
            values[k..2 * k].fill(0.0);
            values[2 * k + 3] = f32::INFINITY;
        }
        let (x, x_values) = bf16(&values);
        let mut emulator = Emulator::new(source(WeightKind::Fp8));
        let kernel = QuantiseRows {
            x: emulator.buffer(&x),
            out: emulator.poisoned(num_rows * k),
            scales: emulator.poisoned(num_rows * 4),
            k: k as u32,
            num_rows: num_rows as u32,
        };
        emulator.launch(&kernel);
        let memory = emulator.run();
        let scales = floats_of(memory.of(kernel.scales));
        for (row_idx, row) in x_values.chunks(k).enumerate() {
            let largest = row.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            if !largest.is_finite() {
                assert!(scales[row_idx].is_nan());
                continue;
            }
            assert_eq!(scales[row_idx], largest / 448.0);
            let inverse = if largest == 0.0 { 0.0 } else { 1.0 / scales[row_idx] };
            let expected: Vec<u8> = row.iter().map(|x| e4m3::from_f32(x * inverse)).collect();
            assert!(memory.of(kernel.out)[row_idx * k..][..k] == expected, "{num_rows} x {k}, row {row_idx}");
        }
    }
}

#[test]
fn groups_of_activations_are_quantised_separately() {
    let (num_rows, stride) = (3, 4);
    for k in [128, 384, 2048 + 256] {
        let mut values = noise(9, num_rows * k);
        values.iter_mut().enumerate().for_each(|(idx, x)| *x *= (1 + idx / 128 % 5) as f32);
        // A group of zeros, and a group with NaN.
        values[k..k + 128].fill(0.0);
        values[3 * k - 2] = f32::NAN;
        let (x, x_values) = bf16(&values);
        let mut emulator = Emulator::new(source(WeightKind::Fp8));
        let kernel = QuantiseGroups {
            x: emulator.buffer(&x),
            out: emulator.poisoned(num_rows * k),
            scales: emulator.poisoned(k / 128 * stride * 4),
            k: k as u32,
            stride: stride as u32,
            num_rows: num_rows as u64,
        };
        emulator.launch(&kernel);
        let memory = emulator.run();
        let scales = floats_of(memory.of(kernel.scales));
        for (idx, group) in x_values.chunks(128).enumerate() {
            let (row, scale) = (idx / (k / 128), scales[idx % (k / 128) * stride + idx / (k / 128)]);
            if group.iter().any(|x| x.is_nan()) {
                assert!(scale.is_nan());
                continue;
            }
            assert_eq!(scale, group.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 448.0);
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            let expected: Vec<u8> = group.iter().map(|x| e4m3::from_f32(x * inverse)).collect();
            assert!(memory.of(kernel.out)[idx * 128..][..128] == expected, "{k}, row {row}");
        }
    }
}

#[test]
fn integers_are_packed_in_the_order_of_lanes() {
    let levels = |len: usize, top: usize| (0..len).map(|k| (k % top) as u8).collect::<Vec<_>>();
    let mut bytes = vec![0xff; WeightKind::Int8.row_bytes(72)];
    assert_eq!(bytes.len(), 128);
    pack(&levels(72, 256), WeightKind::Int8, &mut bytes);
    // The second lane: 8 to 15 and 40 to 47. The last step is padded.
    let signed = |levels: &[u8]| levels.iter().map(|level| level ^ 0x80).collect::<Vec<u8>>();
    assert_eq!(bytes[16..32], signed(&[8, 10, 9, 11, 12, 14, 13, 15, 40, 42, 41, 43, 44, 46, 45, 47]));
    assert_eq!(bytes[64..74], signed(&[64, 66, 65, 67, 68, 70, 69, 71, 0, 0]));
    let mut bytes = vec![0xff; WeightKind::Int4.row_bytes(128)];
    assert_eq!(bytes.len(), 64);
    pack(&levels(128, 16), WeightKind::Int4, &mut bytes);
    // Numbers 0 to 7, then 8 to 15 for the next lane.
    assert_eq!(bytes[..4], 0x7531_6420u32.to_le_bytes());
    assert_eq!(bytes[16..20], 0xfdb9_eca8u32.to_le_bytes());
}
