//! Compiles the kernels of all tests for every architecture, for `cargo xtask gpu-check --pack`:
//!
//! ```text
//! tested_cubins FILE CACHE
//! ```
//!
//! It writes the compiled kernels into FILE. CACHE is a folder that keeps them for the next time. An architecture that NVRTC is
//! too old for is left out.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use baton_cuda_emulator::files::kernel_files;
use baton_cuda_emulator::tested::tested_sources;
use baton_cuda_kernels::compile::{Architecture, CompileError, compile_all};
use baton_cuda_kernels::kernel::KernelCode;
use baton_cuda_kernels::shipped;

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [file, cache] = &arguments[..] else {
        eprintln!("expected FILE CACHE");
        return ExitCode::FAILURE;
    };
    match write(file, cache) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn write(file: &Path, cache: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let code = KernelCode { files: kernel_files(), cache_dir: Some(cache.to_owned()), shipped: None };
    let sources = tested_sources();
    let (mut cubins, mut left_out) = (Vec::new(), String::new());
    for architecture in Architecture::CHECKED {
        match compile_all(&code, &sources, &[architecture]) {
            Ok(compiled) => cubins.extend(compiled),
            Err(error @ CompileError::UnknownArchitecture { .. }) => {
                left_out += &format!("; left out: {error}")
            }
            Err(error) => return Err(error.into()),
        }
    }
    if cubins.is_empty() {
        return Err(format!("nothing was compiled{left_out}").into());
    }
    let named = cubins.iter().map(|cubin| (cubin.name.as_str(), cubin.cubin.code.as_slice()));
    let size_bytes = shipped::write(file, named)?;
    let num_cubins = cubins.len();
    println!("{}: {num_cubins} cubins, {:.1} MB{left_out}", file.display(), size_bytes as f64 / 1e6);
    Ok(())
}
