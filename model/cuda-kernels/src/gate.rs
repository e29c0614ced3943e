//! The activation between the two products of an MLP: `kernels/gate.cu`.

use baton_model_spec::Activation;

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source(activation: Activation) -> KernelSource {
    KernelSource { file: "gate.cu", defines: vec![("ACTIVATION", number_of(activation))] }
}

/// The number of the activation in `activated` of `kernels/common.cuh`.
pub fn number_of(activation: Activation) -> u64 {
    match activation {
        Activation::Silu => 0,
        Activation::Gelu => 1,
        Activation::GeluTanh => 2,
    }
}

/// `out = activation(gate) * up`. `width` is a multiple of 8.
///
/// Moves 6 bytes per element: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ApplyGate {
    /// `[rows][2 width]`, bf16: the gates of a row, then its up values.
    pub gate_up: Address,
    /// `[rows][width]`, bf16.
    pub out: Address,
    pub width: u32,
    pub num_rows: u32,
}

// SAFETY: the fields are those of `ApplyGate` in the kernel file.
unsafe impl Kernel for ApplyGate {
    const NAME: &'static str = "gate";

    fn shape(&self) -> LaunchShape {
        by_eights(self.num_rows, self.width)
    }
}

/// [`ApplyGate`], then [`QuantiseRows`](crate::products::QuantiseRows) or
/// [`QuantiseGroups`](crate::products::QuantiseGroups) of its output, with the same bits.
///
/// Moves 7 bytes per element: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GateQuantise {
    pub gate: ApplyGate,
    /// `[rows][width]`, E4M3.
    pub quantised: Address,
    /// `[rows]`, or `[width / 128][stride]`, f32: the factors that restore the numbers.
    pub scales: Address,
    /// 0: a scale for each row. Otherwise one for each 128 numbers of a row.
    pub stride: u32,
    pub unused: u32,
}

// SAFETY: the fields are those of `GateQuantise` in the kernel file.
unsafe impl Kernel for GateQuantise {
    const NAME: &'static str = "gate_rows";

    fn name(&self) -> &'static str {
        if self.stride == 0 { Self::NAME } else { "gate_groups" }
    }

    fn shape(&self) -> LaunchShape {
        if self.stride > 0 {
            return self.gate.shape();
        }
        let threads = (self.gate.width / 8).next_multiple_of(32).min(1024);
        LaunchShape { grid: [self.gate.num_rows, 1, 1], threads, shared_bytes: 0 }
    }
}

/// One thread per 8 elements of a row.
fn by_eights(num_rows: u32, width: u32) -> LaunchShape {
    debug_assert!(width.is_multiple_of(8), "16 bytes at a time");
    let chunks = width / 8;
    let threads = chunks.next_multiple_of(32).min(256);
    LaunchShape { grid: [num_rows, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
}
