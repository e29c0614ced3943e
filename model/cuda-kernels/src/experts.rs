//! Routed experts: `kernels/experts.cu`. The router chooses experts for each row, by the rules of the forward pass on
//! processors. Pairs of row and expert are sorted by expert,
//! [`ExpertProduct`](crate::expert_products::ExpertProduct)s are computed, and the outputs are combined for each row.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "experts.cu", defines: vec![] }
}

/// Softmax over all experts, then the experts with the largest weights. Equal weights go to the lower index.
///
/// Reads 4 bytes per logit. One warp computes a row: bound by latency.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RouteToExperts {
    /// `[rows][num_experts]`, f32.
    pub logits: Address,
    /// `[rows]`, u32: `NONE` where a row is not wanted ([`PlaceRows`](crate::rope::PlaceRows)). Null: all rows are
    /// wanted.
    pub slots: Address,
    /// `[rows][num_active]`, u32, output, in ascending order.
    pub experts: Address,
    /// `[rows][num_active]`, f32, output.
    pub weights: Address,
    pub num_rows: u32,
    pub num_experts: u32,
    /// At most 32.
    pub num_active: u32,
    /// 1: weights are divided by their sum.
    pub renormalise: u32,
}

// SAFETY: the fields are those of `RouteToExperts` in the kernel file.
unsafe impl Kernel for RouteToExperts {
    const NAME: &'static str = "route";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.num_active <= self.num_experts.min(32), "a lane for each");
        LaunchShape {
            grid: [self.num_rows.div_ceil(4), 1, 1],
            threads: 128,
            shared_bytes: 16 * self.num_experts,
        }
    }
}

/// Assigns a place to each pair of row and expert. Places are sorted by expert, then by row.
///
/// Reads 8 bytes per pair and expert, mostly from the L2 cache.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SortPairs {
    /// `[pairs]`, from [`RouteToExperts`], aligned to 16 bytes.
    pub experts: Address,
    /// `[num_experts + 1]`, u32, output: the first place of each expert.
    pub offsets: Address,
    /// `[pairs]`, u32, output: the row of each place.
    pub rows: Address,
    /// `[pairs]`, u32, output: the place of each pair, or [`NONE`](crate::rows::NONE).
    pub places: Address,
    pub num_pairs: u32,
    pub num_active: u32,
    pub num_experts: u32,
    pub unused: u32,
}

// SAFETY: the fields are those of `SortPairs` in the kernel file.
unsafe impl Kernel for SortPairs {
    const NAME: &'static str = "sort_pairs";

    fn shape(&self) -> LaunchShape {
        let threads = self.num_pairs.div_ceil(4).next_multiple_of(32).min(1024);
        LaunchShape { grid: [self.num_experts, 1, 1], threads, shared_bytes: 0 }
    }
}

/// The weighted sum of a row's expert outputs, in the order of the experts. `hidden` is a multiple of 8.
///
/// Moves 2 bytes per element and active expert, plus 2 or 4 bytes: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Combine {
    /// `[places][hidden]`, bf16.
    pub outputs: Address,
    /// `[rows][num_active]`, from [`SortPairs`].
    pub places: Address,
    /// `[rows][num_active]`, from [`RouteToExperts`].
    pub weights: Address,
    /// `[rows][hidden]`, bf16.
    pub out: Address,
    pub hidden: u32,
    pub num_active: u32,
    /// 1: the sum is added to `out`.
    pub is_added: u32,
    pub num_rows: u32,
}

// SAFETY: the fields are those of `Combine` in the kernel file.
unsafe impl Kernel for Combine {
    const NAME: &'static str = "combine";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.hidden.is_multiple_of(8), "16 bytes at a time");
        let chunks = self.hidden / 8;
        let threads = chunks.next_multiple_of(32).min(256);
        LaunchShape { grid: [self.num_rows, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
    }
}
