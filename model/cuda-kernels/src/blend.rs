//! Blended prompts: `kernels/blend.cu`. Widths are multiples of 8.

use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

pub fn source() -> KernelSource {
    KernelSource { file: "blend.cu", defines: vec![] }
}

/// Copies the keys and values of rows, as their projection left them.
///
/// Moves 4 bytes per number: bound by memory bandwidth, or by the link to the host.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KeepKv {
    /// `[rows][width]`, bf16: queries, keys, values.
    pub qkv: Address,
    /// `[rows][kv_width]`, bf16, output: keys, values. It may be memory of the host.
    pub to: Address,
    pub width: u32,
    /// Numbers of the keys and values of a row.
    pub kv_width: u32,
    pub num_rows: u64,
}

// SAFETY: the fields are those of `KeepKv` in the kernel file.
unsafe impl Kernel for KeepKv {
    const NAME: &'static str = "keep_kv";

    fn shape(&self) -> LaunchShape {
        let blocks = (self.num_rows * u64::from(self.kv_width)).div_ceil(8 * 256);
        LaunchShape { grid: [blocks.clamp(1, 1024) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// The squared distance of each row's keys, with bias and norm and before the rotation, from those that its passage has, over
/// all heads.
///
/// Moves 4 bytes per number of a key: bound by memory bandwidth.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DeviateKeys {
    /// `[rows][width]`, bf16: queries, keys, values.
    pub qkv: Address,
    /// `[rows][2 num_kv_heads * head_dim]`, bf16, from [`KeepKv`].
    pub kept: Address,
    /// `[num_kv_heads * head_dim]`, f32, of the projection of keys, or null.
    pub bias: Address,
    /// `[head_dim]`, f32, or null.
    pub key_norm: Address,
    /// `[rows]`, f32, output.
    pub deviations: Address,
    pub width: u32,
    pub num_heads: u32,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    pub eps: f32,
    pub num_rows: u32,
}

// SAFETY: the fields are those of `DeviateKeys` in the kernel file.
unsafe impl Kernel for DeviateKeys {
    const NAME: &'static str = "deviate_keys";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_rows.div_ceil(4), 1, 1], threads: 128, shared_bytes: 0 }
    }
}
