//! Every kernel against a plain reference: on the emulator, or on the device that `BATON_KERNELS_ON` names.

mod algorithms;
mod attention;
mod blend;
mod blocks;
mod checksum;
mod codes;
mod embed;
mod expert_products;
mod experts;
mod fake_libraries;
mod fp8_trial;
mod gate;
mod graphs;
mod nccl;
mod norm;
mod one_row;
mod products;
mod ranks;
mod rope;
mod rows;
mod sample;
