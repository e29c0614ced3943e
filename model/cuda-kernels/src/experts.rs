//! Routed experts: `kernels/experts.cu`. Rows choose as the processor's pass has them choose, pairs of row and expert are
//! sorted by expert, [`ExpertProduct`](crate::expert_products::ExpertProduct)s are taken, and rows gather what was made.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "experts.cu", defines: vec![] }
}

/// Softmax over all experts, the largest few; of equals the first.
///
/// Reads 4 bytes a logit; a warp a row, bound by latency.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RouteToExperts {
    /// `[rows][num_experts]`, f32.
    pub logits: Address,
    /// `[rows]`, u32: `NONE` where a row is not wanted ([`PlaceRows`](crate::rope::PlaceRows)); null if all are.
    pub slots: Address,
    /// `[rows][num_active]`, u32, written: ascending.
    pub experts: Address,
    /// `[rows][num_active]`, f32, written.
    pub weights: Address,
    pub num_rows: u32,
    pub num_experts: u32,
    /// At most 32.
    pub num_active: u32,
    /// 1: weights are divided by their sum.
    pub renormalise: u32,
}

// SAFETY: as `RouteToExperts` in the file.
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

/// Gives each pair of row and expert its place: expert by expert, the rows of one in their order.
///
/// Reads 8 bytes a pair for each expert, most of them from the second cache.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SortPairs {
    /// `[pairs]`, by [`RouteToExperts`]; aligned to 16 bytes.
    pub experts: Address,
    /// `[num_experts + 1]`, u32, written: each expert's first place.
    pub offsets: Address,
    /// `[pairs]`, u32, written: the row of each place.
    pub rows: Address,
    /// `[pairs]`, u32, written: the place of each pair, or [`NONE`](crate::rows::NONE).
    pub places: Address,
    pub num_pairs: u32,
    pub num_active: u32,
    pub num_experts: u32,
    pub unused: u32,
}

// SAFETY: as `SortPairs` in the file.
unsafe impl Kernel for SortPairs {
    const NAME: &'static str = "sort_pairs";

    fn shape(&self) -> LaunchShape {
        let threads = self.num_pairs.div_ceil(4).next_multiple_of(32).min(1024);
        LaunchShape { grid: [self.num_experts, 1, 1], threads, shared_bytes: 0 }
    }
}

/// The sum of what a row's experts made, times their weights, in the order of their numbers. `hidden` is a multiple of 8.
///
/// Moves 2 bytes an element for each active expert, and 2 or 4: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Combine {
    /// `[places][hidden]`, bf16.
    pub outputs: Address,
    /// `[rows][num_active]`, by [`SortPairs`].
    pub places: Address,
    /// `[rows][num_active]`, by [`RouteToExperts`].
    pub weights: Address,
    /// `[rows][hidden]`, bf16.
    pub out: Address,
    pub hidden: u32,
    pub num_active: u32,
    /// 1: the sum is added to `out`.
    pub is_added: u32,
    pub num_rows: u32,
}

// SAFETY: as `Combine` in the file.
unsafe impl Kernel for Combine {
    const NAME: &'static str = "combine";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.hidden.is_multiple_of(8), "16 bytes at a time");
        let chunks = self.hidden / 8;
        let threads = chunks.next_multiple_of(32).min(256);
        LaunchShape { grid: [self.num_rows, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
    }
}
