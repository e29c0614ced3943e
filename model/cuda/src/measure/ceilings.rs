//! Measures the ceilings of a device: a large copy and a large product.

use baton_cuda_kernels::device::{Product, TimedDevice};
use baton_cuda_kernels::noise::Noise;

use super::figure::{Amount, Figure};
use super::sizes::Sizes;
use super::timing::median;
use crate::error::StartError;

/// The upper limits of all other measurements.
pub struct Ceilings {
    bytes_per_second: f64,
    operations_per_second: f64,
}

impl Ceilings {
    pub fn measure<D: TimedDevice>(
        device: &mut D,
        sizes: &Sizes,
        report: &mut dyn FnMut(&Figure),
    ) -> Result<Ceilings, StartError> {
        let (noise, bytes) = (Noise::new(device)?, sizes.copied_bytes);
        let [from, to] = [noise.fill_new(device, bytes)?, device.allocate(bytes)?];
        // SAFETY: both allocations have this size.
        let seconds =
            median(sizes.repetitions, device, &mut |device| unsafe { device.copy(to, from, bytes) })?;
        let copied = 2.0 * bytes as f64;
        let figure = |what: &str, seconds, amount| Figure {
            what: what.into(),
            seconds,
            amount,
            share: None,
            target: None,
        };
        report(&figure("copy within the device's memory", seconds, Amount::Bytes(copied)));
        let bytes_per_second = copied / seconds;

        let n = sizes.product;
        let matrix = || [n, n].into_iter().product::<usize>() * 2;
        let (left, right) = (noise.fill_new(device, matrix())?, noise.fill_new(device, matrix())?);
        let out = device.allocate(matrix())?;
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
        Ok(Ceilings { bytes_per_second, operations_per_second: operations / seconds })
    }

    pub fn figure(&self, what: String, seconds: f64, amount: Amount, target: Option<f64>) -> Figure {
        let least = match amount {
            Amount::Bytes(bytes) => bytes / self.bytes_per_second,
            Amount::Operations(operations) => operations / self.operations_per_second,
        };
        Figure { what, seconds, amount, share: Some(least / seconds), target }
    }
}
