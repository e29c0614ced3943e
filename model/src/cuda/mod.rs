//! Kernels for NVIDIA GPUs.
//!
//! Each file of `kernels/` has a module here: the arguments of its kernels, how they are launched, and tests against a plain
//! reference. Where there is no GPU the tests run them by an emulator.

use baton_kv_cache::{KvDtype, KvLayout};

use baton_model_spec::Activation;

pub use block_queue::block_kernels;
pub use compile::CompileError;
pub use inputs::BatchLimits;
pub use on_devices::ModelOnDevices;
pub use start::StartError;
pub use weights::DeviceWeightBytes;

mod attention;
mod block_queue;
mod blocks;
mod buffers;
pub mod check;
mod checksum;
mod codes;
mod compile;
mod device;
mod draws;
mod driver;
mod embed;
mod executor;
mod expert_products;
mod experts;
mod form;
mod fp8_trial;
mod gate;
mod inputs;
mod kernel;
mod loaded;
mod lt;
pub mod measure;
mod multiply;
mod nccl;
mod norm;
mod on_devices;
mod parallel;
mod part;
mod pass;
mod pool;
mod products;
mod ranks;
mod rope;
mod rows;
mod sample;
mod start;
mod weights;

#[cfg(test)]
mod drawing_tests;
#[cfg(any(test, feature = "emulator"))]
#[cfg_attr(not(test), allow(dead_code))] // tests of other crates use a part
mod emulated;
#[cfg(any(test, feature = "emulator"))]
#[cfg_attr(not(test), allow(dead_code))] // tests of other crates use a part
mod emulator;
#[cfg(test)]
mod low_bit_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod parallel_drawing_tests;
#[cfg(test)]
mod parallel_faults;
#[cfg(test)]
mod parallel_low_bit_tests;
#[cfg(test)]
mod parallel_tests;
#[cfg(test)]
mod pretended_tests;
#[cfg(any(test, feature = "emulator"))]
#[cfg_attr(not(test), allow(dead_code))] // tests of other crates use a part
mod test_device;
#[cfg(any(test, feature = "emulator"))]
pub mod test_model;
#[cfg(any(test, feature = "emulator"))]
#[cfg_attr(not(test), allow(dead_code))] // tests of other crates use a part
mod testing;

/// Every file, for the shapes that models have.
fn sources() -> Vec<kernel::Source> {
    let layout =
        |head_dim, dtype| KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 1, head_dim, dtype };
    let ropes = [64, 128]
        .into_iter()
        .flat_map(|head_dim| KvDtype::ALL.map(|dtype| rope::source(head_dim, &layout(head_dim, dtype))));
    let gates = [Activation::Silu, Activation::Gelu, Activation::GeluTanh].map(gate::source);
    let others = [
        embed::source(),
        norm::source(),
        rows::source(),
        sample::source(),
        experts::source(),
        blocks::source(),
        checksum::source(),
        ranks::source(),
    ];
    let large =
        [attention::usual_sources(), products::sources(), expert_products::sources(), codes::sources()]
            .concat();
    large.into_iter().chain(ropes).chain(gates).chain(others).collect()
}
