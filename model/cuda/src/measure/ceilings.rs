//! Measures the ceilings of a device: a large copy and a large product.

use baton_cuda_kernels::device::{Product, TimedDevice};
use baton_cuda_kernels::noise::Noise;

use super::figure::{Amount, Figure, Finding, fits};
use super::sizes::Sizes;
use super::timing::median;
use crate::error::StartError;

/// The upper limits of all other measurements.
pub struct Ceilings {
    bytes_per_second: f64,
    operations_per_second: f64,
}

impl Ceilings {
    /// `None`: they do not fit into the memory, so nothing can be compared with them.
    pub fn measure<D: TimedDevice>(
        device: &mut D,
        sizes: &Sizes,
        report: &mut dyn FnMut(&Finding),
    ) -> Result<Option<Ceilings>, StartError> {
        let bytes = sizes.copied_bytes;
        let n = sizes.product;
        let matrix = 2 * n * n;
        if !fits(device, "the ceilings, and all that is compared with them", 2 * bytes + 3 * matrix, report)?
        {
            return Ok(None);
        }
        let noise = Noise::new(device)?;
        let [from, to] = [noise.fill_new(device, bytes)?, device.allocate(bytes)?];
        // SAFETY: both allocations have this size.
        let seconds =
            median(sizes.repetitions, device, &mut |device| unsafe { device.copy(to, from, bytes) })?;
        let copied = 2.0 * bytes as f64;
        let figure = |what: &str, seconds, amount| {
            let what = what.to_owned();
            Finding::Measured(Figure { what, seconds, amount, share: None, target: None })
        };
        report(&figure("copy within the device's memory", seconds, Amount::Bytes(copied)));
        let bytes_per_second = copied / seconds;

        let (left, right) = (noise.fill_new(device, matrix)?, noise.fill_new(device, matrix)?);
        let out = device.allocate(matrix)?;
        let [num_rows, num_out, num_in, left_stride, out_stride] = [n as u64; 5];
        let (is_out_f32, beta) = (0, 0.0);
        let product = Product {
            left,
            right,
            out,
            num_rows,
            num_out,
            num_in,
            left_stride,
            out_stride,
            is_out_f32,
            beta,
        };
        // SAFETY: the three allocations have these sizes.
        let seconds = median(sizes.repetitions, device, &mut |device| unsafe { device.multiply(&product) })?;
        let operations = 2.0 * (n as f64).powi(3);
        report(&figure(
            &format!("product of bf16, {n} x {n} x {n}"),
            seconds,
            Amount::Operations(operations),
        ));
        Ok(Some(Ceilings { bytes_per_second, operations_per_second: operations / seconds }))
    }

    pub fn figure(&self, what: String, seconds: f64, amount: Amount, target: Option<f64>) -> Finding {
        let least = match amount {
            Amount::Bytes(bytes) => bytes / self.bytes_per_second,
            Amount::Operations(operations) => operations / self.operations_per_second,
        };
        Finding::Measured(Figure { what, seconds, amount, share: Some(least / seconds), target })
    }
}
