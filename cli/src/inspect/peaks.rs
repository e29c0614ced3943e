//! The peak rates of a device: as its maker states them, as given, or measured here.

use std::{num::NonZero, thread};

use anyhow::ensure;
use baton_model::{Backend, CpuPeak, CpuPeaks, StoredWeights};
use clap::ValueEnum;

/// A device by its peak numbers: as its maker states them, or measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// NVIDIA A100 SXM 80 GB: 312 TFLOP/s, 2039 GB/s
    A100,
    /// NVIDIA H100 SXM: 989 TFLOP/s, 3350 GB/s
    H100,
    /// NVIDIA H200 SXM: 989 TFLOP/s, 4800 GB/s
    H200,
    /// NVIDIA B200: 2250 TFLOP/s, 8000 GB/s
    B200,
    /// NVIDIA L40S: 362 TFLOP/s, 864 GB/s
    L40s,
    /// NVIDIA L4: 121 TFLOP/s, 300 GB/s
    L4,
    /// AMD MI300X: 1307 TFLOP/s, 5300 GB/s
    Mi300x,
    /// This machine's processors, measured
    Cpu,
}

impl Device {
    /// What computes there.
    pub(super) fn backend(self) -> Backend {
        if self == Self::Cpu { Backend::Cpu } else { Backend::Cuda }
    }

    /// TFLOP/s and GB/s; `None`: to be measured.
    fn peaks(self) -> Option<(f64, f64)> {
        Some(match self {
            Self::A100 => (312.0, 2039.0),
            Self::H100 => (989.0, 3350.0),
            Self::H200 => (989.0, 4800.0),
            Self::B200 => (2250.0, 8000.0),
            Self::L40s => (362.0, 864.0),
            Self::L4 => (121.0, 300.0),
            Self::Mi300x => (1307.0, 5300.0),
            Self::Cpu => return None,
        })
    }
}

/// What bounds a step on a device.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Peaks {
    pub(super) device: String,
    /// Operations per second by type. The first is the roof of the model's products.
    pub(super) roofs: Vec<(&'static str, f64)>,
    pub(super) bytes_per_second: f64,
}

impl Peaks {
    /// Of a device, with what is given in TFLOP/s and GB/s in place of its own, and weights that are stored so.
    pub(super) fn of(
        device: Device,
        threads: Option<usize>,
        (flops, bandwidth): (Option<f64>, Option<f64>),
        weights: StoredWeights,
    ) -> anyhow::Result<Peaks> {
        let flops = flops.map(|value| positive("--flops", value)).transpose()?;
        let bandwidth = bandwidth.map(|value| positive("--bandwidth", value)).transpose()?;
        if let (Some(flops), Some(bandwidth)) = (flops, bandwidth) {
            return Ok(Peaks::stated("given".to_owned(), flops, bandwidth));
        }
        let name = device.to_possible_value().expect("no device is hidden").get_name().to_owned();
        let mut peaks = match device.peaks() {
            Some((flops, bandwidth)) => Peaks::stated(name, flops, bandwidth),
            None => Peaks::measured(threads, weights),
        };
        if let Some(flops) = flops {
            peaks.roofs = vec![("given", flops * 1e12)];
        }
        peaks.bytes_per_second = bandwidth.map_or(peaks.bytes_per_second, |gigabytes| gigabytes * 1e9);
        Ok(peaks)
    }

    fn stated(device: String, teraflops: f64, gigabytes: f64) -> Peaks {
        Peaks { device, roofs: vec![("bf16", teraflops * 1e12)], bytes_per_second: gigabytes * 1e9 }
    }

    fn measured(threads: Option<usize>, weights: StoredWeights) -> Peaks {
        let threads = threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, NonZero::get));
        let peaks = CpuPeaks::measure(threads);
        let of_weights = peaks.of_weights(weights);
        let device = format!("cpu ({}, {threads} threads, measured)", peaks.isa.name());
        Peaks { device, roofs: sorted(peaks.operations, of_weights), bytes_per_second: peaks.read }
    }
}

/// The peak that bounds products with the model's weights comes first, and then the others, the fastest first.
fn sorted(mut operations: Vec<(CpuPeak, f64)>, of_weights: CpuPeak) -> Vec<(&'static str, f64)> {
    operations.sort_by(|(a, fast), (b, faster)| {
        (*b == of_weights).cmp(&(*a == of_weights)).then(faster.total_cmp(fast))
    });
    operations.into_iter().map(|(peak, rate)| (peak.name(), rate)).collect()
}

/// The value of a flag, if it is more than 0.
pub(super) fn positive(name: &str, value: f64) -> anyhow::Result<f64> {
    ensure!(value.is_finite() && value > 0.0, "{name} must be more than 0");
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_roof_of_the_weights_comes_first() {
        let rates = vec![
            (CpuPeak::F32, 4.0),
            (CpuPeak::Int8, 8.0),
            (CpuPeak::Bf16Tiles, 16.0),
            (CpuPeak::Int8Tiles, 32.0),
        ];
        let roofs = sorted(rates, CpuPeak::Bf16Tiles);
        assert_eq!(roofs, [("bf16 tiles", 16.0), ("int8 tiles", 32.0), ("int8", 8.0), ("f32", 4.0)]);
    }
}
