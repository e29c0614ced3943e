//! Compiles every kernel for every architecture and prints the resources of its code. Needs no GPU.
//!
//! `cargo xtask cuda-check` runs it with NVRTC's library.

use std::process::ExitCode;

use baton_cuda_kernels::check::{KernelReport, check_kernels};
use baton_model::KERNEL_FILES;

fn main() -> ExitCode {
    let (mut num_spilt, mut num_stacked) = (0, 0);
    let mut num_kernels = 0;
    let result = check_kernels(KERNEL_FILES, &mut |kernel: KernelReport| {
        if num_kernels == 0 {
            let titles = ["file", "kernel", "for", "card", "registers", "spilt", "stack", "shared"];
            let [file, kernel, shape, card, registers, spilt, stack, shared] = titles;
            println!(
                "{file:<20} {kernel:<24} {shape:<32} {card:<7} {registers:>9} {spilt:>6} {stack:>6} {shared:>7}"
            );
        }
        num_kernels += 1;
        num_spilt += usize::from(kernel.spill_bytes > 0);
        num_stacked += usize::from(kernel.stack_bytes > 0);
        println!(
            "{:<20} {:<24} {:<32} {:<7} {:>9} {:>6} {:>6} {:>7}",
            kernel.file,
            kernel.name,
            kernel.defines,
            kernel.architecture,
            kernel.num_registers,
            kernel.spill_bytes,
            kernel.stack_bytes,
            kernel.shared_bytes
        );
    });
    match result {
        Ok(()) => {
            println!(
                "{num_kernels} kernels compiled, {num_spilt} of them with spilt registers, {num_stacked} with a stack"
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
