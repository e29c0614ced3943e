//! Measures the products of routed experts: for a prompt, and for the few rows between which the kernels change.

use baton_cuda_kernels::device::TimedDevice;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::noise::Noise;
use baton_cuda_kernels::products::{Scales, WeightKind};

use super::ceilings::Ceilings;
use super::figure::{Amount, Finding, fits};
use super::sizes::{ExpertSizes, Sizes};
use super::timing::median;
use crate::error::StartError;
use crate::multiply::{ExpertPlaces, ProductScratch};
use crate::weights::DeviceMatrix;

/// Memory for all but weights, rows and results.
const REST_BYTES: usize = 64 << 20;

/// Rows of an expert around [`WGMMA_EXPERT_ROWS`](crate::multiply): the first number for which warpgroup products are
/// faster is what that limit should be.
const LIMIT_ROWS: [usize; 4] = [16, 32, 64, 128];

/// The share of the large product's rate that warpgroup products should reach. It is chosen, not derived: their tiles
/// take 85 operations for each byte from the L2 cache, whose rate NVIDIA does not publish. A tile of the narrow experts
/// has 12 stages of 1,024 cycles at best, and then stores 64 KiB: at the rate of HBM (`cuda-kernels/src/loops.rs`) in
/// 4,700 cycles, in which it does not multiply.
const WGMMA_TARGET: f64 = 0.5;

/// All products of one layer's experts, each of which has the same number of rows.
pub fn measure<D: TimedDevice>(
    device: &mut D,
    sizes: &Sizes,
    experts: &ExpertSizes,
    ceilings: &Ceilings,
    report: &mut dyn FnMut(&Finding),
) -> Result<(), StartError> {
    let Sizes { prompt, repetitions, .. } = *sizes;
    let ExpertSizes { num_experts, num_active, hidden_size, intermediate_size } = *experts;
    let name = format!("{num_active} of {num_experts} experts, {intermediate_size} x {hidden_size}");
    let most_pairs = prompt * num_active;
    let weight_bytes = 2 * 3 * num_experts * intermediate_size * hidden_size;
    let row_bytes = 2 * (prompt * hidden_size + most_pairs * (intermediate_size + hidden_size));
    if !fits(device, &name, weight_bytes + row_bytes + REST_BYTES, report)? {
        return Ok(());
    }
    let noise = Noise::new(device)?;
    let matrix = |device: &mut D, num_out: usize, num_in: usize| {
        let at = noise.fill_new(device, num_experts * num_out * num_in * 2)?;
        Ok::<_, StartError>(DeviceMatrix {
            at,
            kind: WeightKind::Bf16,
            scales: Scales::NONE,
            num_out,
            num_in,
        })
    };
    let gate_up = matrix(device, 2 * intermediate_size, hidden_size)?;
    let down = matrix(device, hidden_size, intermediate_size)?;
    let rows = noise.fill_new(device, prompt * hidden_size * 2)?;
    let gated = device.allocate(most_pairs * intermediate_size * 2)?;
    let out = device.allocate(most_pairs * hidden_size * 2)?;
    let mut measured = |device: &mut D, what: &str, num_pairs: usize, is_prompt: bool| {
        let offsets: Vec<u32> =
            (0..=num_experts).map(|expert| (expert * num_pairs / num_experts) as u32).collect();
        // The rows of an expert ascend.
        let num_rows = num_pairs / num_active;
        let row_of =
            |place: usize| (place % num_pairs.div_ceil(num_experts) * num_experts / num_active) % num_rows;
        let row_idxs: Vec<u32> = (0..num_pairs).map(|place| row_of(place) as u32).collect();
        let places = ExpertPlaces {
            offsets: device.allocate_holding(bytemuck::cast_slice(&offsets))?,
            rows: device.allocate_holding(bytemuck::cast_slice(&row_idxs))?,
            gate_up: Address::NULL,
            num_pairs: num_pairs as u32,
            num_experts: num_experts as u32,
        };
        // The products of few rows read weights, those of a prompt multiply.
        let (amount, target) = match is_prompt {
            true => {
                let operations = 2.0 * 3.0 * (num_pairs * intermediate_size) as f64 * hidden_size as f64;
                (Amount::Operations(operations), Some(WGMMA_TARGET))
            }
            false => (Amount::Bytes(weight_bytes as f64), None),
        };
        let seconds_of = |device: &mut D, wgmma_expert_rows: usize| {
            let scratch = ProductScratch { wgmma_expert_rows, ..ProductScratch::of_bf16() };
            median(repetitions, device, &mut |device| {
                let of_rows = ExpertPlaces { rows: Address::NULL, ..places };
                // SAFETY: everything was just allocated with these shapes.
                unsafe {
                    scratch.apply_experts(device, gate_up, &places, rows, gated, true)?;
                    scratch.apply_experts(device, down, &of_rows, gated, out, false)
                }
            })
        };
        let seconds = seconds_of(device, usize::MAX)?;
        report(&ceilings.figure(format!("{what}, mma.sync"), seconds, amount, None));
        if device.wgmma().experts {
            let seconds = seconds_of(device, 0)?;
            report(&ceilings.figure(format!("{what}, wgmma"), seconds, amount, target));
        }
        Ok::<_, StartError>(())
    };
    for rows_of_expert in LIMIT_ROWS {
        let num_pairs = rows_of_expert * num_experts;
        if num_pairs <= most_pairs && num_pairs.is_multiple_of(num_active) {
            measured(device, &format!("{name}, {rows_of_expert} rows of each"), num_pairs, false)?;
        }
    }
    measured(device, &format!("{name}, {prompt} tokens"), most_pairs, true)
}
