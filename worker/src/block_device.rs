//! The GPUs that hold a worker's blocks, and how many blocks fit there.

use baton_engine::EngineConfig;
use baton_kv_cache::{BlockKernels, BlockStorage, KvLayout, KvShard};
use baton_transfer::cuda::{blocks_on_device, blocks_on_devices};

use crate::config::ConfigError;

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
