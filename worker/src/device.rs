//! The device that a worker computes on, as a flag names it.

use std::{fmt, str::FromStr};

use baton_cost::GpuKind;
use baton_model::num_cuda_devices;

/// The device to compute on. Its text is "auto", "cpu", "cuda:0" or "sim:H100".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeDevice {
    /// The first GPU, or processors where there is none.
    Auto,
    /// This machine's processors.
    Cpu,
    /// A GPU, as CUDA counts those that this process sees. With several ranks it is the first rank's, and the others take the
    /// next ones.
    Cuda(u32),
    /// None: steps take what GPUs of this kind would take, and tokens are made up. With several ranks it is so many GPUs.
    Sim(GpuKind),
}

impl ComputeDevice {
    /// The GPU to compute on, if it is one.
    pub fn ordinal(self) -> Option<u32> {
        match self {
            ComputeDevice::Cpu | ComputeDevice::Sim(_) => None,
            ComputeDevice::Cuda(ordinal) => Some(ordinal),
            ComputeDevice::Auto => num_cuda_devices().is_ok().then_some(0),
        }
    }
}

impl FromStr for ComputeDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<ComputeDevice, String> {
        if let Some(gpu) = text.strip_prefix("sim") {
            let kind = gpu.strip_prefix(':').and_then(GpuKind::named);
            return kind.map(ComputeDevice::Sim).ok_or_else(|| {
                format!(
                    "a simulated device is sim: and the GPU that it stands for, one of {}",
                    GpuKind::names()
                )
            });
        }
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(ComputeDevice::Auto),
            ("cpu", _) => Ok(ComputeDevice::Cpu),
            ("cuda", _) => Ok(ComputeDevice::Cuda(0)),
            (_, Some(Ok(ordinal))) => Ok(ComputeDevice::Cuda(ordinal)),
            _ => Err("expected auto, cpu, cuda:N or sim:GPU".into()),
        }
    }
}

impl fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ComputeDevice::Auto => f.write_str("auto"),
            ComputeDevice::Cpu => f.write_str("cpu"),
            ComputeDevice::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            ComputeDevice::Sim(gpu) => write!(f, "sim:{}", gpu.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for (text, device) in [
            ("auto", ComputeDevice::Auto),
            ("cpu", ComputeDevice::Cpu),
            ("cuda:3", ComputeDevice::Cuda(3)),
            ("sim:H200", ComputeDevice::Sim(GpuKind::H200)),
        ] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(ComputeDevice::Cuda(0)));
        assert_eq!("sim:a100".parse(), Ok(ComputeDevice::Sim(GpuKind::A100)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "sim", "sim:", "simH100", "sim:B200"] {
            let error = text.parse::<ComputeDevice>().expect_err(text);
            assert!(!text.starts_with("sim") || error.contains("H100"), "{error}");
        }
    }
}
