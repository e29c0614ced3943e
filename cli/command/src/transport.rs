//! The ways for KV blocks to travel, as flags name them.

use clap::ValueEnum;

/// A way for KV blocks to travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// Shared memory, between processes of one user on one host.
    Shm,
    /// One-sided writes of a network device, through NIXL.
    Rdma,
    /// From one CUDA device to another, through NCCL.
    Nccl,
    /// TCP.
    Tcp,
}
