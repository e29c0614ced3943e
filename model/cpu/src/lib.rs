//! Decoders on this machine's CPUs.
//!
//! [`load`] reads a model and packs its weights into the layout that kernels stream. A [`CpuExecutor`] computes
//! batches with them; a [`ParallelCpuExecutor`] computes with several ranks.
//!
//! This crate does not know GPUs, requests or the network.

pub mod benchmark;
mod blend;
mod executor;
mod experts;
mod fastest;
mod forward;
mod linear;
mod load;
mod model;
mod packed;
mod parallel;
mod rope;
mod weight_files;
mod whole_pages;

pub use blend::PassageNumbers;
pub use executor::CpuExecutor;
pub use load::{load, load_ranks};
pub use model::CpuModel;
pub use packed::PackedMatrix;
pub use parallel::ParallelCpuExecutor;

/// Models on other instruction sets than the best one, for tests.
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing {
    pub use crate::load::load_on;
    pub use baton_cpu_kernels::Isa;
    pub use baton_cpu_kernels::testing::tested_isas;
}
