//! Finds out which E4M3 products a library has on a device, by trying them. Support depends on the version and on the
//! GPU, and the library may reject a product as late as at the call.

use baton_cuda::CudaError;

use crate::device::{FP8_BLOCK, Fp8Product, Fp8Products, Fp8Scaling, KernelDevice};
use crate::kernel::Address;
use crate::products::E4M3_ONE;

/// Numbers of rows that are tried: prompts have any number. Products with scales of blocks round up to a multiple of 4.
const NUM_ROWS: [usize; 4] = [132, 65, 71, 259];
const NUM_OUT: usize = 2 * FP8_BLOCK;
/// A number of blocks that is not a multiple of four.
const NUM_IN: usize = 5 * FP8_BLOCK;

/// In order: a device that has one of these also has those before it.
pub const WAYS: [(Fp8Products, Fp8Scaling); 3] = [
    (Fp8Products::Plain, Fp8Scaling::None),
    (Fp8Products::Scaled, Fp8Scaling::Rows),
    (Fp8Products::Blocks, Fp8Scaling::Blocks),
];

/// The highest level that the device supports. Takes little memory.
///
/// # Errors
/// When the device fails. A rejected product is not an error.
pub fn fp8_products<D: KernelDevice>(device: &mut D) -> Result<Fp8Products, CudaError> {
    let mut most = Fp8Products::None;
    for (products, scaling) in WAYS {
        if !multiplies(device, scaling)? {
            break;
        }
        most = products;
    }
    Ok(most)
}

/// Whether the device has products with this scaling and computes them correctly.
pub fn multiplies<D: KernelDevice>(device: &mut D, scaling: Fp8Scaling) -> Result<bool, CudaError> {
    for num_rows in NUM_ROWS {
        let num_rows = if scaling == Fp8Scaling::Blocks { num_rows.next_multiple_of(4) } else { num_rows };
        if !multiplies_rows(device, scaling, num_rows)? {
            tracing::info!(?scaling, num_rows, "the library does not multiply fp8 with this number of rows");
            return Ok(false);
        }
    }
    Ok(true)
}

fn multiplies_rows<D: KernelDevice>(
    device: &mut D,
    scaling: Fp8Scaling,
    num_rows: usize,
) -> Result<bool, CudaError> {
    let num_groups = NUM_IN / FP8_BLOCK;
    let (num_left, num_right) = match scaling {
        Fp8Scaling::None => (0, 0),
        Fp8Scaling::Rows => (num_rows, NUM_OUT),
        Fp8Scaling::Blocks => (num_groups * num_rows, NUM_OUT / FP8_BLOCK * num_groups.next_multiple_of(4)),
    };
    // Powers of two, so that the sums of products are exact.
    let scales = |num: usize| (0..num).map(|idx| [1.0f32, 2.0, 4.0][(idx + idx / 7) % 3]).collect::<Vec<_>>();
    let (left, right) = (scales(num_left), scales(num_right));
    let of_group = |row: usize, column: usize, group: usize| match scaling {
        Fp8Scaling::None => 1.0,
        Fp8Scaling::Rows => left[row] * right[column],
        Fp8Scaling::Blocks => {
            left[group * num_rows + row] * right[column / FP8_BLOCK * num_groups.next_multiple_of(4) + group]
        }
    };
    let mut scales_of = |scales: &[f32]| match scaling {
        Fp8Scaling::None => Ok(Address::NULL),
        Fp8Scaling::Rows | Fp8Scaling::Blocks => device.allocate_holding(bytemuck::cast_slice(scales)),
    };
    let (left_scales, right_scales) = (scales_of(&left)?, scales_of(&right)?);
    let mut found = vec![0xff; num_rows * NUM_OUT * 2];
    let product = Fp8Product {
        left: device.allocate_holding(&vec![E4M3_ONE; num_rows * NUM_IN])?,
        right: device.allocate_holding(&[E4M3_ONE; NUM_OUT * NUM_IN])?,
        // NaN, which is never the correct result.
        out: device.allocate_holding(&found)?,
        left_scales,
        right_scales,
        num_rows: num_rows as u64,
        num_out: NUM_OUT as u64,
        num_in: NUM_IN as u64,
        scaling,
    };
    // SAFETY: all were allocated above with these shapes.
    unsafe {
        if !device.multiply_fp8(&product)? {
            return Ok(false);
        }
        device.download(product.out, &mut found)?;
    }
    Ok(found.chunks_exact(2).enumerate().all(|(idx, pair)| {
        let sum: f32 = (0..num_groups).map(|group| of_group(idx / NUM_OUT, idx % NUM_OUT, group)).sum();
        half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32() == FP8_BLOCK as f32 * sum
    }))
}
