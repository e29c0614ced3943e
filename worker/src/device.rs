//! The device that a worker computes on, as a flag names it.

use std::{fmt, str::FromStr};

use baton_model::num_cuda_devices;

/// The device to compute on. Its text is "auto", "cpu" or "cuda:0".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeDevice {
    /// The first GPU, or processors where there is none.
    Auto,
    /// This machine's processors.
    Cpu,
    /// A GPU, as CUDA counts those that this process sees. With several ranks it is the first rank's, and the others take the
    /// next ones.
    Cuda(u32),
}

impl ComputeDevice {
    /// The GPU to compute on, if it is one.
    pub fn ordinal(self) -> Option<u32> {
        match self {
            ComputeDevice::Cpu => None,
            ComputeDevice::Cuda(ordinal) => Some(ordinal),
            ComputeDevice::Auto => num_cuda_devices().is_ok().then_some(0),
        }
    }
}

impl FromStr for ComputeDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<ComputeDevice, String> {
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(ComputeDevice::Auto),
            ("cpu", _) => Ok(ComputeDevice::Cpu),
            ("cuda", _) => Ok(ComputeDevice::Cuda(0)),
            (_, Some(Ok(ordinal))) => Ok(ComputeDevice::Cuda(ordinal)),
            _ => Err("expected auto, cpu or cuda:N".into()),
        }
    }
}

impl fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ComputeDevice::Auto => f.write_str("auto"),
            ComputeDevice::Cpu => f.write_str("cpu"),
            ComputeDevice::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for (text, device) in
            [("auto", ComputeDevice::Auto), ("cpu", ComputeDevice::Cpu), ("cuda:3", ComputeDevice::Cuda(3))]
        {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(ComputeDevice::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU"] {
            assert!(text.parse::<ComputeDevice>().is_err(), "{text}");
        }
    }
}
