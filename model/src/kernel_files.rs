//! Embeds the sources of GPU kernels into programs.
//!
//! Crates that launch kernels do not embed them, so a changed kernel rebuilds only this crate and its users.

use std::path::PathBuf;

use baton_cuda_kernels::kernel::{KernelCode, KernelFiles};
use baton_cuda_kernels::shipped;

macro_rules! files {
    ($($name:literal,)*) => {
        KernelFiles::new(&[$(($name, include_str!(concat!("../cuda-kernels/kernels/", $name)))),*])
    };
}

/// All files of `cuda-kernels/kernels/`.
pub const KERNEL_FILES: KernelFiles = files![
    "attention.cuh",
    "attention_decode.cu",
    "attention_plain.cu",
    "attention_prefill.cu",
    "attention_tiles.cuh",
    "attention_wgmma.cu",
    "blend.cu",
    "blocks.cu",
    "checksum.cu",
    "codes.cu",
    "common.cuh",
    "embed.cu",
    "expert_products.cu",
    "expert_products_wgmma.cu",
    "expert_tiles.cuh",
    "experts.cu",
    "gate.cu",
    "norm.cu",
    "one_row.cu",
    "products.cu",
    "ranks.cu",
    "rope.cu",
    "rows.cu",
    "sample.cu",
    "sample_rows.cuh",
    "sample_search.cuh",
    "warpgroup.cuh",
];

/// Kernels of [`KERNEL_FILES`]: those that are installed beside this program, and others compiled and cached in
/// `cache_dir`.
pub fn kernel_code(cache_dir: Option<PathBuf>) -> KernelCode {
    KernelCode { files: KERNEL_FILES, cache_dir, shipped: shipped::beside_program() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_embedded() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda-kernels/kernels");
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            assert_eq!(KERNEL_FILES.text(name), std::fs::read_to_string(&path).unwrap(), "{name}");
        }
    }
}
