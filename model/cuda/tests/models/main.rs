//! Executors of models and their parts, on the emulator or on the device that `BATON_KERNELS_ON` names.

mod blend;
mod block_queue;
mod block_tables;
mod fake_libraries;
mod graphs;
mod low_bit;
mod measure;
mod multiply;
mod ranks;
mod sampling;
mod whole;
