//! The device that computes, processors or GPUs, and the memory of the blocks on it.

use std::{fmt, str::FromStr};

use baton_engine::EngineConfig;
use baton_kv_cache::{BlockKernels, BlockStorage, KvLayout, KvShard};
use baton_model::num_cuda_devices;
use baton_transfer::cuda::{blocks_on_device, blocks_on_devices};

use crate::config::ConfigError;

/// The device to compute on. Its text is "auto", "cpu" or "cuda:0".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The first GPU, or processors where there is none.
    Auto,
    /// This machine's processors.
    Cpu,
    /// A GPU, as CUDA counts those that this process sees. With several ranks it is the first rank's, and the others take the
    /// next ones.
    Cuda(u32),
}

impl Device {
    /// The GPU to compute on, if it is one.
    pub fn ordinal(self) -> Option<u32> {
        match self {
            Device::Cpu => None,
            Device::Cuda(ordinal) => Some(ordinal),
            Device::Auto => num_cuda_devices().is_ok().then_some(0),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(Device::Auto),
            ("cpu", _) => Ok(Device::Cpu),
            ("cuda", _) => Ok(Device::Cuda(0)),
            (_, Some(Ok(ordinal))) => Ok(Device::Cuda(ordinal)),
            _ => Err("expected auto, cpu or cuda:N".into()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Auto => f.write_str("auto"),
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The GPUs that hold the blocks, one for each rank, each with the blocks of its kv heads.
#[derive(Debug)]
pub struct BlockDevice {
    /// The number of the first one, which also holds a draft model.
    pub(crate) ordinal: u32,
    /// How many there are; their numbers follow each other.
    pub(crate) num_ranks: usize,
    /// Bytes of its memory that are left after the weights, the largest batch (also of a draft model) and `kernels`; the least
    /// of all GPUs.
    pub(crate) free_bytes: usize,
    /// Each rank's kernels, with which handoffs gather, scatter and hash blocks.
    pub(crate) kernels: Vec<Box<dyn BlockKernels>>,
}

impl BlockDevice {
    /// The GPUs of so many ranks, in their order.
    pub(crate) fn ordinals(first: u32, num_ranks: usize) -> Vec<u32> {
        (first..).take(num_ranks).collect()
    }

    /// How many blocks fit into a share of the free memory, when a draft model keeps `draft_block_bytes` beside each.
    pub(crate) fn num_blocks(
        &self,
        utilisation: f64,
        layout: &KvLayout,
        draft_block_bytes: usize,
    ) -> anyhow::Result<usize> {
        let bytes = (self.free_bytes as f64 * utilisation) as usize;
        // All ranks have as many as the first one, which has the least memory left: it alone holds a draft model's blocks.
        let block_bytes = KvShard::new(layout, self.num_ranks, 0)?.layout().block_bytes() + draft_block_bytes;
        match bytes / block_bytes {
            0 => Err(ConfigError::GpuMemoryTooSmall { bytes, block_bytes }.into()),
            num_blocks => Ok(num_blocks),
        }
    }

    /// The memory of a draft model's blocks. They are never handed over.
    pub(crate) fn draft_blocks(&self, layout: KvLayout, num_blocks: usize) -> std::io::Result<BlockStorage> {
        blocks_on_device(self.ordinal, layout, num_blocks, None)
    }

    /// The memory of so many blocks.
    pub(crate) fn blocks(self, layout: KvLayout, config: &EngineConfig) -> std::io::Result<BlockStorage> {
        let BlockDevice { ordinal, num_ranks, mut kernels, .. } = self;
        match num_ranks {
            1 => blocks_on_device(ordinal, layout, config.num_blocks, kernels.pop()),
            _ => {
                let ordinals = BlockDevice::ordinals(ordinal, num_ranks);
                blocks_on_devices(&ordinals, layout, config.num_blocks, kernels)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_kv_cache::KvDtype;

    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for (text, device) in [("auto", Device::Auto), ("cpu", Device::Cpu), ("cuda:3", Device::Cuda(3))] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }

    #[test]
    fn blocks_take_their_share_of_what_is_free() {
        let layout =
            KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::Bf16 };
        let of = |num_ranks| BlockDevice {
            ordinal: 2,
            num_ranks,
            free_bytes: 10 * layout.block_bytes(),
            kernels: vec![],
        };
        let device = of(1);
        assert_eq!(device.num_blocks(1.0, &layout, 0).unwrap(), 10);
        // Two kv heads: of two ranks each has a half, and of four each has one of them, too.
        for num_ranks in [2, 4] {
            assert_eq!(of(num_ranks).num_blocks(1.0, &layout, 0).unwrap(), 20);
            // A draft model's, a quarter as large, are whole on the first.
            assert_eq!(of(num_ranks).num_blocks(1.0, &layout, layout.block_bytes() / 4).unwrap(), 13);
        }
        assert_eq!(device.num_blocks(1.0, &layout, layout.block_bytes() / 4).unwrap(), 8);
        assert_eq!(BlockDevice::ordinals(2, 3), [2, 3, 4]);
        assert_eq!(device.num_blocks(0.95, &layout, 0).unwrap(), 9);
        for (utilisation, draft_block_bytes) in [(0.05, 0), (0.1, 1)] {
            let error = device.num_blocks(utilisation, &layout, draft_block_bytes).unwrap_err().to_string();
            assert!(error.contains("--gpu-memory-utilization"), "{error}");
        }
    }
}
