//! The flags of tiers below the pools of workers.

use anyhow::ensure;
use baton_cost::LinkLine;
use clap::Args;

use crate::cluster::TierSpec;

/// What a recall takes besides its bytes, in seconds.
const HOST_LATENCY: f64 = 0.001;
const DISK_LATENCY: f64 = 0.002;
/// What devices read from host memory, in gigabytes per second.
const HOST_RATE: f64 = 35.0;

/// The tiers of each worker.
#[derive(Clone, Debug, Default, Args)]
pub struct TierArgs {
    /// Tokens whose KV a worker's host tier holds. Default: there is none.
    #[arg(long, value_name = "TOKENS")]
    pub host_kv_tokens: Option<usize>,
    /// What a device reads from the host tier, and at the same time writes, in gigabytes per second.
    #[arg(long, value_name = "GB/S", default_value_t = HOST_RATE)]
    pub host_kv_rate: f64,
    /// Tokens whose KV a worker's disk tier holds. Default: there is none.
    #[arg(long, value_name = "TOKENS")]
    pub disk_kv_tokens: Option<usize>,
    /// What a worker reads from its disk, and at the same time writes, in gigabytes per second.
    #[arg(long, value_name = "GB/S", default_value_t = 5.0)]
    pub disk_kv_rate: f64,
}

impl TierArgs {
    /// A host tier of so many tokens, or none.
    pub(super) fn host(num_tokens: Option<usize>) -> TierArgs {
        TierArgs { host_kv_tokens: num_tokens, host_kv_rate: HOST_RATE, ..TierArgs::default() }
    }

    /// The tiers of a worker with so many devices, the fastest first.
    pub(super) fn specs(&self, block_size: usize, num_devices: usize) -> anyhow::Result<Vec<TierSpec>> {
        let host = (self.host_kv_tokens, self.host_kv_rate, num_devices as f64, HOST_LATENCY);
        let disk = (self.disk_kv_tokens, self.disk_kv_rate, 1.0, DISK_LATENCY);
        let mut specs = Vec::new();
        for (name, (num_tokens, rate, num_links, latency_seconds)) in [("host", host), ("disk", disk)] {
            let Some(num_tokens) = num_tokens else { continue };
            ensure!((1e-6..=1e6).contains(&rate), "--{name}-kv-rate is {rate} GB/s");
            let num_blocks = num_tokens / block_size;
            ensure!(
                (1..1 << 32).contains(&num_blocks),
                "--{name}-kv-tokens is {num_tokens}; it has to be at least a block, of {block_size} tokens, and below 2^32 blocks"
            );
            let link = LinkLine { latency_seconds, bytes_per_second: rate * 1e9 * num_links };
            specs.push(TierSpec { num_blocks, link });
        }
        Ok(specs)
    }
}
