//! Measures products of quantised weights with few rows, in both ways between which [`FEW_ROWS`](crate::multiply::FEW_ROWS)
//! decides: by the kernel that reads the weights as they are, and by cuBLASLt.

use baton_cuda_kernels::device::TimedDevice;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::noise::Noise;
use baton_cuda_kernels::products::{Scales, WeightKind};

use super::ceilings::Ceilings;
use super::figure::{Amount, Finding, fits};
use super::sizes::Sizes;
use super::timing::median;
use crate::error::StartError;
use crate::multiply::{ProductScratch, WIDENED_BYTES};
use crate::weights::{DeviceLinear, DeviceMatrix};

/// Memory for all but weights and rows.
const REST_BYTES: usize = 64 << 20;

/// Numbers of rows up to the limit and above.
const ROWS: [usize; 7] = [1, 8, 16, 32, 64, 128, 256];

/// Numbers that share a scale in 4-bit weights.
const INT4_GROUP: usize = 32;

/// Products of the first layer's weights in 4 bits and in FP8: gate and up, whose outputs alone fill a GPU with blocks, and
/// down, whose K is divided, too.
pub fn measure<D: TimedDevice>(
    device: &mut D,
    sizes: &Sizes,
    ceilings: &Ceilings,
    report: &mut dyn FnMut(&Finding),
) -> Result<(), StartError> {
    let (hidden, inner) = (sizes.spec.hidden_size, sizes.spec.layers[0].mlp.intermediate_size());
    let most_rows = ROWS[ROWS.len() - 1];
    // FP8 products take multiples of 16.
    let matrices = [(2 * inner, hidden), (hidden, inner)];
    for (kind, (num_out, num_in)) in
        [WeightKind::Int4, WeightKind::Fp8].into_iter().flat_map(|kind| matrices.map(|shape| (kind, shape)))
    {
        let group = if kind == WeightKind::Int4 { INT4_GROUP } else { num_in };
        let name = format!("few rows, {} weights of {num_out} x {num_in}", name_of(kind));
        let weight_bytes = num_out * kind.row_bytes(num_in);
        let num_scales = num_in.div_ceil(group) * num_out.next_multiple_of(4);
        let row_bytes = most_rows * (3 * num_in + 2 * num_out + 4);
        if !fits(
            device,
            &name,
            weight_bytes + num_scales * 4 + row_bytes + WIDENED_BYTES + REST_BYTES,
            report,
        )? {
            continue;
        }
        let noise = Noise::new(device)?;
        let weight = DeviceMatrix {
            at: noise.fill_new(device, weight_bytes)?,
            kind,
            scales: Scales {
                scales: device.allocate_holding(bytemuck::cast_slice(&vec![1.0f32; num_scales]))?,
                zeros: Address::NULL,
                rows_per_scale: 1,
                row_stride: 1,
                group_stride: num_out.next_multiple_of(4) as u32,
                group: group as u32,
            },
            num_out,
            num_in,
        };
        let linear = DeviceLinear { weight, bias: Address::NULL };
        let rows = noise.fill_new(device, most_rows * num_in * 2)?;
        let out = device.allocate(most_rows * num_out * 2)?;
        let widened_bytes = WIDENED_BYTES.min(num_out * num_in * 2);
        let mut scratch = ProductScratch {
            widened: device.allocate(widened_bytes)?,
            widened_bytes,
            quantised: device.allocate(most_rows * num_in)?,
            row_scales: device.allocate(most_rows * 4)?,
            ..ProductScratch::of_bf16()
        };
        scratch.make_room_for_parts(device, &[weight])?;
        let fp8 = device.fp8_products();
        let mut ways = vec![("as they are", ProductScratch { few_rows: usize::MAX, ..scratch })];
        ways.extend(weight.fp8_scaling(fp8).map(|_| ("in fp8", ProductScratch { fp8, ..scratch })));
        ways.push(("widened", scratch));
        for num_rows in ROWS {
            for (way, scratch) in &ways {
                // SAFETY: everything was just allocated with these shapes.
                let seconds = median(sizes.repetitions, device, &mut |device| unsafe {
                    scratch.apply(device, &linear, rows, out, num_rows)
                })?;
                let what = format!("{name}, {num_rows} rows, {way}");
                let read_bytes = (weight_bytes + num_scales * 4) as f64;
                report(&ceilings.figure(what, seconds, Amount::Bytes(read_bytes), None));
            }
        }
    }
    Ok(())
}

fn name_of(kind: WeightKind) -> &'static str {
    if kind == WeightKind::Int4 { "4-bit" } else { "fp8" }
}
