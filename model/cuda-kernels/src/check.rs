//! Compiles every kernel for every architecture and reports its registers and memory, for `cargo xtask cuda-check`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::compile::{Architecture, CompileError, CubinCache};
use crate::kernel::{KernelCode, KernelFiles, KernelSource};
use crate::sources::all_sources;

/// Resources of one kernel, as the assembler reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// "norm.cu"
    pub file: &'static str,
    /// The constants it was compiled with: "HEAD_DIM=64 KV=2".
    pub defines: String,
    /// The kernel's name.
    pub name: String,
    /// "sm_90a"
    pub architecture: String,
    /// Registers of a thread.
    pub num_registers: u32,
    /// Bytes of registers that a thread spills to memory.
    pub spill_bytes: u32,
    /// Bytes of stack memory of a thread, for arrays that do not fit registers.
    pub stack_bytes: u32,
    /// Static shared memory of a block.
    pub shared_bytes: u32,
}

/// Compiles everything on all processors and calls `report` for each kernel.
///
/// # Errors
/// When NVRTC is missing, or a kernel does not compile.
pub fn check_kernels(files: KernelFiles, report: &mut dyn FnMut(KernelReport)) -> Result<(), CompileError> {
    let jobs: Vec<(KernelSource, Architecture)> = all_sources()
        .into_iter()
        .flat_map(|source| Architecture::CHECKED.map(|architecture| (source.clone(), architecture)))
        .collect();
    let next = AtomicUsize::new(0);
    let compile = || {
        let take = || jobs.get(next.fetch_add(1, Ordering::Relaxed));
        let mut compiled = Vec::new();
        while let Some((source, architecture)) = take() {
            compiled.extend(reports(files, source, *architecture)?);
        }
        Ok::<_, CompileError>(compiled)
    };
    let compiled = thread::scope(|scope| {
        let num_threads = thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(compile)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
    })?;
    let mut compiled = compiled.concat();
    compiled.sort_by(|a, b| (a.file, &a.name, &a.defines).cmp(&(b.file, &b.name, &b.defines)));
    compiled.into_iter().for_each(report);
    Ok(())
}

fn reports(
    files: KernelFiles,
    source: &KernelSource,
    architecture: Architecture,
) -> Result<Vec<KernelReport>, CompileError> {
    let log = CubinCache::new(KernelCode { files, cache_dir: None }, None).get(source, architecture)?.log;
    let defines: Vec<String> = source.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let named = kernels(&log).into_iter().map(|found| KernelReport {
        file: source.file,
        defines: defines.join(" "),
        architecture: architecture.to_string(),
        ..found
    });
    Ok(named.collect())
}

/// Reads the kernels from a log of the assembler.
fn kernels(log: &str) -> Vec<KernelReport> {
    let mut kernels: Vec<KernelReport> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(KernelReport {
                file: "",
                defines: String::new(),
                name,
                architecture: String::new(),
                num_registers: 0,
                spill_bytes: 0,
                stack_bytes: 0,
                shared_bytes: 0,
            });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        for part in line.split([',', ':']).map(str::trim) {
            let number = |text: &str| text.split(' ').find_map(|word| word.parse().ok()).unwrap_or(0);
            if part.ends_with("spill stores") {
                kernel.spill_bytes = number(part);
            } else if part.ends_with("stack frame") {
                kernel.stack_bytes = number(part);
            } else if part.ends_with("registers") {
                kernel.num_registers = number(part);
            } else if part.ends_with("bytes smem") {
                kernel.shared_bytes = number(part);
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_report_is_parsed() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'add_norm' for 'sm_80'\n\
                   ptxas info    : Function properties for add_norm\n    \
                   8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n\
                   ptxas info    : Used 29 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]\n";
        let [kernel] = &kernels(log)[..] else { panic!("one kernel") };
        assert_eq!(
            (kernel.name.as_str(), kernel.num_registers, kernel.spill_bytes, kernel.shared_bytes),
            ("add_norm", 29, 12, 128)
        );
        assert_eq!(kernel.stack_bytes, 8);
    }
}
