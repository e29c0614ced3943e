//! Products of all weight formats, with few and many rows.

use baton_cuda_emulator::numbers::{assert_close, bf16, floats};
use baton_cuda_emulator::session::Threads;
use baton_cuda_emulator::test_device::TestDevice;
use baton_cuda_kernels::device::{FP8_BLOCK, Fp8Products, KernelDevice};
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::products::WeightKind;
use baton_cuda_kernels::products::{Scales, pack, source};
use baton_kv_cache::e4m3;
use baton_model_cuda::form::MAX_SCALE_ROWS;
use baton_model_cuda::multiply::*;
use baton_model_cuda::weights::*;
use baton_model_spec::{IntegerFormat, IntegerRow, IntegerWidth};
use baton_model_testing::noise;

const FORMAT: IntegerFormat = IntegerFormat { width: IntegerWidth::Four, group: 32, has_zeros: false };

/// int4 rows on a device, and the numbers that they stand for.
fn uploaded(device: &mut TestDevice, num_out: usize, num_in: usize) -> (DeviceMatrix, Vec<f32>) {
    let kind = WeightKind::Int4;
    let (row_bytes, num_groups) = (kind.row_bytes(num_in), num_in.div_ceil(32));
    let mut bytes = vec![0; num_out * row_bytes];
    let (mut scales, mut values) = (vec![0.0; num_groups * num_out], vec![]);
    for row_idx in 0..num_out {
        let row = IntegerRow::quantise(&noise(row_idx as u64, num_in), FORMAT);
        pack(&row.levels, kind, &mut bytes[row_idx * row_bytes..][..row_bytes]);
        (0..num_groups).for_each(|group| scales[group * num_out + row_idx] = row.scales[group]);
        values.extend(row.values(FORMAT));
    }
    let at = upload(device, &bytes);
    let scales = Scales {
        scales: upload(device, bytemuck::cast_slice(&scales)),
        row_stride: 1,
        group_stride: num_out as u32,
        group: 32,
        ..Scales::NONE
    };
    (DeviceMatrix { at, kind, scales, num_out, num_in }, values)
}

fn upload(device: &mut TestDevice, bytes: &[u8]) -> Address {
    let at = device.allocate(bytes.len()).unwrap();
    // SAFETY: the allocations have these lengths.
    unsafe { device.upload(at, bytes).unwrap() };
    at
}

/// More outputs than are widened at a time. The last part is smaller than the others.
#[test]
fn weights_are_widened_in_parts() {
    let (num_rows, num_out, num_in) = (FEW_ROWS + 3, 2 * MAX_SCALE_ROWS + 40, 72);
    let mut device = TestDevice::new(&[source(WeightKind::Int4)], 1 << 20, Threads::Shuffled);
    let (matrix, values) = uploaded(&mut device, num_out, num_in);
    let widened_bytes = (MAX_SCALE_ROWS + 5) * num_in * 2;
    let scratch = ProductScratch {
        widened: device.allocate(widened_bytes).unwrap(),
        widened_bytes,
        quantised: Address::NULL,
        row_scales: Address::NULL,
        fp8: Fp8Products::None,
        few_rows: FEW_ROWS,
        wgmma_expert_rows: usize::MAX,
        ..ProductScratch::of_bf16()
    };
    let (x, x_values) = bf16(&noise(1, num_rows * num_in));
    let from = upload(&mut device, &x);
    let out = device.allocate(num_rows * num_out * 4).unwrap();
    let mut found = vec![0; num_rows * num_out * 4];
    // SAFETY: the allocations have this many rows.
    unsafe {
        scratch.multiply_exactly(&mut device, matrix, from, out, num_rows).unwrap();
        device.download(out, &mut found).unwrap();
    }
    let rows = x_values.chunks_exact(num_in);
    let sums = rows.flat_map(|row| {
        values
            .chunks_exact(num_in)
            .map(|weights| row.iter().zip(weights).map(|(x, weight)| x * weight).sum::<f32>())
    });
    // Each weight is rounded to bf16: 72 of them, up to 1, are off by 2^-9 at most each, and by less than a tenth of
    // that together.
    assert_close(&floats(&found), &sums.collect::<Vec<_>>(), 1.0 / 256.0, 72.0 / 512.0 / 4.0);
}

/// The same for experts. Two are widened at a time, and one is left.
#[test]
fn experts_are_widened_in_parts() {
    experts_are_widened(usize::MAX);
}

#[test]
fn widened_experts_are_multiplied_by_warpgroups() {
    experts_are_widened(0);
}

/// Experts with `wgmma_expert_rows` rows or more have warpgroup products.
fn experts_are_widened(wgmma_expert_rows: usize) {
    use baton_cuda_emulator::numbers::widened;
    use baton_cuda_kernels::expert_products;

    let (num_experts, num_out, num_in) = (3, 24, 40);
    let sources = [
        source(WeightKind::Int4),
        expert_products::source(EXPERT_TILE_ROWS, None),
        expert_products::wgmma_source(None),
    ];
    let mut device = TestDevice::new(&sources, 1 << 20, Threads::Shuffled);
    if wgmma_expert_rows == 0 && !device.wgmma().experts {
        return println!("SKIPPED: no wgmma");
    }
    let (all, values) = uploaded(&mut device, num_experts * num_out, num_in);
    let matrix = DeviceMatrix { num_out, ..all };
    let widened_bytes = 2 * num_out * num_in * 2 + 6;
    let scratch = ProductScratch {
        widened: device.allocate(widened_bytes).unwrap(),
        widened_bytes,
        quantised: Address::NULL,
        row_scales: Address::NULL,
        fp8: Fp8Products::None,
        few_rows: FEW_ROWS,
        wgmma_expert_rows,
        ..ProductScratch::of_bf16()
    };
    let offsets = [0u32, 70, 71, (FEW_ROWS * num_experts + 1) as u32];
    let num_pairs = offsets[num_experts] as usize;
    let places = ExpertPlaces {
        offsets: upload(&mut device, bytemuck::cast_slice(&offsets)),
        rows: Address::NULL,
        gate_up: Address::NULL,
        num_pairs: num_pairs as u32,
        num_experts: num_experts as u32,
    };
    let (x, x_values) = bf16(&noise(1, num_pairs * num_in));
    let from = upload(&mut device, &x);
    let out = device.allocate(num_pairs * num_out * 2).unwrap();
    let mut found = vec![0; num_pairs * num_out * 2];
    // SAFETY: the allocations have this many rows.
    unsafe {
        scratch.apply_experts(&mut device, matrix, &places, from, out, false).unwrap();
        device.download(out, &mut found).unwrap();
    }
    let expert_of = |place: usize| offsets.iter().filter(|offset| **offset as usize <= place).count() - 1;
    let expected: Vec<f32> = (0..num_pairs)
        .flat_map(|place| {
            let of_expert = &values[expert_of(place) * num_out * num_in..][..num_out * num_in];
            let row = &x_values[place * num_in..][..num_in];
            of_expert
                .chunks_exact(num_in)
                .map(|weights| row.iter().zip(weights).map(|(x, weight)| x * weight).sum::<f32>())
        })
        .collect();
    // As above with 40 weights. The result is rounded, too.
    assert_close(&widened(&found), &expected, 1.0 / 128.0, 40.0 / 512.0 / 4.0);
}

/// One product of each scaling, against numbers that are quantised like the kernels do.
#[test]
fn fp8_products_apply_the_scales_of_both_sides() {
    use baton_cuda_emulator::numbers::widened;

    for (fp8, group) in
        [(Fp8Products::Plain, 80), (Fp8Products::Scaled, 80), (Fp8Products::Blocks, FP8_BLOCK)]
    {
        let mut device = TestDevice::new(&[source(WeightKind::Fp8)], 1 << 20, Threads::Shuffled);
        if !device.limit_fp8(fp8) {
            println!("SKIPPED: the device does not multiply fp8 as {fp8:?}");
            continue;
        }
        let are_blocks = fp8 == Fp8Products::Blocks;
        // The rows and the groups are not multiples of four. The last block has fewer rows.
        let (num_rows, num_out) = (FEW_ROWS + 2, if are_blocks { FP8_BLOCK + 16 } else { 48 });
        let num_groups = if are_blocks { 3 } else { 1 };
        let num_in = num_groups * group;
        let codes: Vec<u8> = noise(2, num_out * num_in).iter().map(|x| e4m3::from_f32(x * 448.0)).collect();
        let rows_per_scale = if are_blocks { FP8_BLOCK } else { 1 };
        let row_stride = if are_blocks { 4 } else { 1 };
        let num_scales = num_out.div_ceil(rows_per_scale) * row_stride;
        let weight_scales: Vec<f32> = (1..=num_scales).map(|n| n as f32 / 1e4).collect();
        let scales = Scales {
            scales: upload(&mut device, bytemuck::cast_slice(&weight_scales)),
            rows_per_scale: rows_per_scale as u32,
            row_stride: row_stride as u32,
            group_stride: 1,
            group: group as u32,
            ..Scales::NONE
        };
        let at = upload(&mut device, &codes);
        let weight = DeviceMatrix { at, kind: WeightKind::Fp8, scales, num_out, num_in };
        let room = num_rows.next_multiple_of(4);
        let scratch = ProductScratch {
            widened: Address::NULL,
            widened_bytes: 0,
            quantised: device.allocate(room * num_in).unwrap(),
            row_scales: device.allocate(room * num_groups * 4).unwrap(),
            fp8,
            few_rows: FEW_ROWS,
            wgmma_expert_rows: usize::MAX,
            ..ProductScratch::of_bf16()
        };
        let values: Vec<f32> = noise(1, num_rows * num_in);
        let values: Vec<f32> =
            values.iter().enumerate().map(|(idx, x)| x * (1 + idx / group) as f32).collect();
        let (x, x_values) = bf16(&values);
        let from = upload(&mut device, &x);
        let out = device.allocate(room * num_out * 2).unwrap();
        let mut found = vec![0; num_rows * num_out * 2];
        let linear = DeviceLinear { weight, bias: Address::NULL };
        // SAFETY: the allocations have this many rows.
        unsafe {
            scratch.apply(&mut device, &linear, from, out, num_rows).unwrap();
            device.download(out, &mut found).unwrap();
        }
        let quantised: Vec<f32> = x_values
            .chunks_exact(group)
            .flat_map(|group| {
                let scale = group.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 448.0;
                let inverse = 1.0 / scale;
                group.iter().map(move |x| e4m3::to_f32(e4m3::from_f32(x * inverse)) * scale)
            })
            .collect();
        let mut expected = vec![];
        for row in quantised.chunks_exact(num_in) {
            for (n, codes) in codes.chunks_exact(num_in).enumerate() {
                let scales = &weight_scales[n / rows_per_scale * row_stride..];
                let weight = |k: usize| e4m3::to_f32(codes[k]) * scales[k / group];
                expected.push(row.iter().enumerate().map(|(k, x)| x * weight(k)).sum::<f32>());
            }
        }
        // Half a unit in the last place of bf16, twice, and sums in a different order that may cancel.
        let largest = |numbers: &[f32]| numbers.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let mut cancelled = 1e-5 * largest(&expected);
        if matches!(device, TestDevice::Guarded(_)) {
            // Hopper's tensor cores align the products of an instruction to the largest one, and keep 14 bits of each ("DeepSeek-V3
            // Technical Report", section 3.5.2).
            let largest_weight =
                448.0 * largest(&weight_scales[..num_out.div_ceil(rows_per_scale) * row_stride]);
            cancelled = num_in as f32 * largest(&quantised) * largest_weight / 16384.0;
        }
        assert_close(&widened(&found), &expected, 1.0 / 120.0, cancelled);
    }
}

/// The device multiplies fp8, but not this number of rows.
#[test]
fn refused_fp8_products_are_widened() {
    let refused = FEW_ROWS + 2;
    let (num_out, num_in) = (48, 80);
    let sources = [source(WeightKind::Fp8), baton_cuda_kernels::rows::source()];
    let mut device = TestDevice::new(&sources, 1 << 20, Threads::Shuffled);
    if !device.limit_fp8(Fp8Products::Scaled) || !device.refuse_fp8(refused) {
        return println!("SKIPPED: the device refuses no products");
    }
    let codes: Vec<u8> = noise(2, num_out * num_in).iter().map(|x| e4m3::from_f32(x * 448.0)).collect();
    let weight_scales: Vec<f32> = (1..=num_out).map(|n| n as f32 / 1e4).collect();
    let scales = Scales {
        scales: upload(&mut device, bytemuck::cast_slice(&weight_scales)),
        row_stride: 1,
        group: num_in as u32,
        ..Scales::NONE
    };
    let at = upload(&mut device, &codes);
    let weight = DeviceMatrix { at, kind: WeightKind::Fp8, scales, num_out, num_in };
    let bias = upload(&mut device, bytemuck::cast_slice(&noise(7, num_out)));
    let linear = DeviceLinear { weight, bias };
    let mut multiplied = |num_rows: usize, fp8: Fp8Products| {
        let widened_bytes = num_out * num_in * 2;
        let scratch = ProductScratch {
            widened: device.allocate(widened_bytes).unwrap(),
            widened_bytes,
            quantised: device.allocate(num_rows * num_in).unwrap(),
            row_scales: device.allocate(num_rows * 4).unwrap(),
            fp8,
            few_rows: FEW_ROWS,
            wgmma_expert_rows: usize::MAX,
            ..ProductScratch::of_bf16()
        };
        let from = upload(&mut device, &bf16(&noise(1, num_rows * num_in)).0);
        let out = device.allocate(num_rows * num_out * 2).unwrap();
        let mut found = vec![0; num_rows * num_out * 2];
        // SAFETY: the allocations have this many rows.
        unsafe {
            scratch.apply(&mut device, &linear, from, out, num_rows).unwrap();
            device.download(out, &mut found).unwrap();
        }
        found
    };
    // Twice: the second time the refusal is known.
    for _ in 0..2 {
        assert!(multiplied(refused, Fp8Products::Scaled) == multiplied(refused, Fp8Products::None));
    }
    assert!(multiplied(refused + 1, Fp8Products::Scaled) != multiplied(refused + 1, Fp8Products::None));
    // Fewer rows are multiplied as they are where fp8 takes no less time.
    for (num_rows, is_fp8) in [(FEW_FP8_ROWS, false), (FEW_FP8_ROWS + 1, true), (FEW_ROWS, true)] {
        let differs = multiplied(num_rows, Fp8Products::Scaled) != multiplied(num_rows, Fp8Products::None);
        assert_eq!(differs, is_fp8, "{num_rows} rows");
    }
}

/// What `--deterministic` costs for int4 weights: it reads them once for every 32 rows and multiplies them without
/// cuBLASLt. Otherwise they are read once, to be widened.
#[test]
fn fixed_products_read_weights_once_for_32_rows() {
    let (num_rows, num_out, num_in) = (FEW_ROWS + 32, 128, 256);
    let mut device = TestDevice::new(&[source(WeightKind::Int4)], 1 << 20, Threads::Shuffled);
    let (matrix, _) = uploaded(&mut device, num_out, num_in);
    let widened_bytes = num_out * num_in * 2;
    let [widened, out] =
        [widened_bytes, num_rows * num_out * 4].map(|num_bytes| device.allocate(num_bytes).unwrap());
    let from = upload(&mut device, &bf16(&noise(1, num_rows * num_in)).0);
    let mut work_of = |few_rows: usize| {
        let scratch = ProductScratch {
            widened,
            widened_bytes,
            quantised: Address::NULL,
            row_scales: Address::NULL,
            fp8: Fp8Products::None,
            few_rows,
            wgmma_expert_rows: usize::MAX,
            ..ProductScratch::of_bf16()
        };
        let TestDevice::Emulated(emulated) = &mut device else { return None };
        let before = emulated.work();
        // SAFETY: the allocations have this many rows.
        unsafe { scratch.multiply_exactly(emulated, matrix, from, out, num_rows).unwrap() };
        let after = emulated.work();
        Some((after.loaded_bytes - before.loaded_bytes, after.num_products - before.num_products))
    };
    let (Some(fast), Some(fixed)) = (work_of(FEW_ROWS), work_of(usize::MAX)) else {
        return println!("SKIPPED: only the emulated device counts");
    };
    let weight_bytes = (num_out * num_in / 2) as u64;
    // A warp multiplies 16 outputs with 8 rows, 16 numbers deep.
    let num_products = (num_out * num_rows * num_in / (16 * 8 * 16)) as u64;
    println!("{num_rows} rows of int4: {fast:?} otherwise, {fixed:?} with --deterministic");
    assert_eq!(fast, (weight_bytes, 0));
    let num_passes = num_rows.div_ceil(32) as u64;
    assert_eq!(fixed, (num_passes * weight_bytes, num_products));
}
