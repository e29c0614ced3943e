//! Kernels for NVIDIA GPUs.
//!
//! Each file of `kernels/` has a module here: the arguments of its kernels, how they are launched, and tests against a plain
//! reference. Where there is no GPU the tests run them by an emulator.

use baton_kv_cache::{KvDtype, KvLayout};

pub use compile::CompileError;
pub use cuda_executor::CudaExecutor;
pub use inputs::BatchLimits;
pub use start::StartError;

mod attention;
mod buffers;
pub mod check;
mod compile;
mod cuda_executor;
mod device;
mod driver;
mod embed;
mod executor;
mod gate;
mod inputs;
mod kernel;
mod lt;
mod norm;
mod pass;
mod pool;
mod rope;
mod rows;
mod start;
mod weights;

#[cfg(test)]
mod emulated;
#[cfg(test)]
mod emulator;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod testing;

/// Every file, for the shapes that models have.
fn sources() -> Vec<kernel::Source> {
    let alone = vec![embed::source(), gate::source(crate::Activation::Silu), norm::source(), rows::source()];
    let rope = KvDtype::ALL.map(|dtype| {
        rope::source(128, &KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 1, head_dim: 128, dtype })
    });
    [alone, rope.to_vec(), attention::sources()].concat()
}
