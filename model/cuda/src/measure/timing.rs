//! Medians of repeated measurements.

use baton_cuda::CudaError;
use baton_cuda_kernels::device::TimedDevice;

/// Median seconds of `repetitions` runs on the device's clock, after three warm-up runs.
pub fn median<D: TimedDevice>(
    repetitions: usize,
    device: &mut D,
    work: &mut dyn FnMut(&mut D) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    (0..3).try_for_each(|_| work(device))?;
    let mut seconds = Vec::with_capacity(repetitions);
    for _ in 0..repetitions {
        let from = device.stamp()?;
        work(device)?;
        let to = device.stamp()?;
        seconds.push(device.seconds_between(&from, &to)?);
    }
    Ok(middle(seconds))
}

pub fn middle(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
