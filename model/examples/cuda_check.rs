//! Compiles every kernel for every architecture and prints the resources of its code. Fails if a loop has more
//! instructions than its limit, a kernel spills more registers than its own, a warpgroup kernel has other registers than its
//! warpgroups share, or the assembler warns of something. Needs no GPU.
//!
//! `cargo xtask cuda-check` runs it with NVRTC's library. `--write FILE` also writes the code into a file. Installed beside
//! `baton` under the name `kernels.cubins`, it makes NVRTC optional.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use baton_cuda_kernels::check::{KernelReport, check_kernels};
use baton_cuda_kernels::compile::{Architecture, NamedCubin};
use baton_cuda_kernels::shipped;
use baton_model::KERNEL_FILES;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let file = match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => None,
        (Some("--write"), Some(file)) => Some(PathBuf::from(file)),
        _ => {
            eprintln!("expected --write FILE, or nothing");
            return ExitCode::FAILURE;
        }
    };
    let (mut num_spilt, mut num_stacked) = (0, 0);
    let mut num_kernels = 0;
    let mut findings = Vec::new();
    let result = check_kernels(KERNEL_FILES, &mut |kernel: KernelReport| {
        if num_kernels == 0 {
            let titles = ["file", "kernel", "for", "card", "registers", "spilt", "stack", "shared"];
            let [file, kernel, shape, card, registers, spilt, stack, shared] = titles;
            println!("Loops are innermost ones with matrix products: instructions/products.");
            println!(
                "{file:<20} {kernel:<25} {shape:<32} {card:<7} {registers:>9} {spilt:>6} {stack:>6} {shared:>7}  loops"
            );
        }
        num_kernels += 1;
        num_spilt += usize::from(kernel.spill_bytes > 0);
        num_stacked += usize::from(kernel.stack_bytes > 0);
        let broken = kernel.findings();
        findings
            .extend(broken.iter().map(|why| format!("{} for {}: {why}", kernel.name, kernel.architecture)));
        let loops = kernel.loops.iter().map(|it| format!("{}/{}", it.num_instructions, it.num_products));
        println!(
            "{:<20} {:<25} {:<32} {:<7} {:>9} {:>6} {:>6} {:>7}  {}",
            kernel.file,
            kernel.name,
            kernel.defines,
            kernel.architecture,
            kernel.num_registers,
            kernel.spill_bytes,
            kernel.stack_bytes,
            kernel.shared_bytes,
            loops.collect::<Vec<_>>().join(" ")
        );
    });
    let written = match result {
        Ok(cubins) => file.map_or(Ok(()), |file| write(&file, &cubins)).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match written {
        Ok(()) => {
            findings.iter().for_each(|finding| eprintln!("{finding}"));
            println!(
                "{num_kernels} kernels compiled, {num_spilt} of them with spilt registers, {num_stacked} with a stack"
            );
            if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes the file, and prints its size.
fn write(file: &Path, cubins: &[NamedCubin]) -> io::Result<()> {
    let named = cubins.iter().map(|cubin| (cubin.name.as_str(), cubin.cubin.code.as_slice()));
    let (size_bytes, num_architectures) = (shipped::write(file, named)?, Architecture::CHECKED.len());
    println!(
        "{}: {} files of kernels, each for {num_architectures} architectures, {:.1} MB",
        file.display(),
        cubins.len() / num_architectures,
        size_bytes as f64 / 1e6
    );
    Ok(())
}
