//! Compiles every kernel for every architecture and reports its registers, its memory and its loops, for `cargo xtask
//! cuda-check`.

use crate::compile::{Architecture, CompileError, NamedCubin, compile_all};
use crate::kernel::{KernelCode, KernelFiles};
use crate::loops::{MatrixLoop, WGMMA_ARCHITECTURE, matrix_loops, over_limits};
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
    /// Innermost loops with matrix products.
    pub loops: Vec<MatrixLoop>,
    /// What the assembler warns of: products that do not overlap, for example.
    pub warnings: Vec<String>,
}

/// Most bytes of registers that kernels spill: name, architecture, bytes. No other kernel may spill any. Kernels for few
/// rows leave room for a second block, and those for 32 rows have spills in their loops: up to six instructions of 549, with
/// zeros 50 of 585. With one block to a multiprocessor they would have none, and half of the warps to hide latency.
pub const SPILLS: &[(&str, &str, u32)] = &[
    ("decode_attention", "sm_120", 12),
    ("expert_product", "sm_120", 4),
    ("multiply_few32_int4", "sm_80", 16),
    ("multiply_few32_int4", "sm_89", 48),
    ("multiply_few32_int4", "sm_90a", 52),
    ("multiply_few32_int8", "sm_90a", 8),
    ("multiply_few32_zeros_int4", "sm_80", 44),
    ("multiply_few32_zeros_int4", "sm_89", 32),
    ("multiply_few32_zeros_int4", "sm_90a", 212),
    ("multiply_few32_zeros_int4", "sm_120", 12),
    ("multiply_few32_zeros_int8", "sm_80", 8),
    ("multiply_few32_zeros_int8", "sm_89", 12),
    ("multiply_few32_zeros_int8", "sm_90a", 44),
    ("multiply_few_zeros_int4", "sm_90a", 24),
    ("multiply_few_zeros_int8", "sm_90a", 24),
];

/// Registers that a thread of warpgroup kernels has at the launch: name, registers. Then the copying warpgroup gives
/// registers back, and `setmaxnreg.inc` of the others waits until there are as many as they ask for (PTX ISA). With
/// fewer than these at the launch they would wait for ever; of more, 384 threads have no room. The kernels assert the
/// same sum.
pub const LAUNCH_REGISTERS: &[(&str, u32)] =
    &[("wgmma_attention", 168), ("wgmma_expert_product", 168), ("wgmma_gated_expert_product", 168)];

/// How the assembler begins warnings. It calls some of them information.
const WARNINGS: [&str; 2] = ["warning", "Potential Performance Loss"];

impl KernelReport {
    /// What is wrong with the code: limits of loops and spills, registers at the launch, warnings.
    pub fn findings(&self) -> Vec<String> {
        let mut findings = over_limits(&self.name, &self.defines, &self.architecture, &self.loops);
        findings.extend(self.over_spills());
        findings.extend(self.wrong_registers());
        findings.extend(self.warnings.iter().cloned());
        findings
    }

    fn wrong_registers(&self) -> Option<String> {
        let limit = LAUNCH_REGISTERS.iter().find(|(name, _)| *name == self.name);
        let (_, wanted) = limit.filter(|_| self.architecture == WGMMA_ARCHITECTURE)?;
        (self.num_registers != *wanted).then(|| {
            format!("{} registers, its warpgroups share {wanted} for each thread", self.num_registers)
        })
    }

    /// What breaks the limits of [`SPILLS`]. A stack that holds no spilt registers holds an array, which no kernel may
    /// have.
    pub fn over_spills(&self) -> Option<String> {
        let is_it = |it: &&(&str, &str, u32)| (it.0, it.1) == (&*self.name, &*self.architecture);
        let most = SPILLS.iter().find(is_it).map_or(0, |it| it.2);
        if self.spill_bytes > most {
            return Some(format!(
                "{} bytes of registers are spilt, at most {most} are allowed",
                self.spill_bytes
            ));
        }
        (self.spill_bytes == 0 && self.stack_bytes > 0)
            .then(|| format!("a stack of {} bytes, which is not for spilt registers", self.stack_bytes))
    }
}

/// Compiles everything on all processors and calls `report` for each kernel. Returns the code.
///
/// # Errors
/// When NVRTC is missing, or a kernel does not compile.
pub fn check_kernels(
    files: KernelFiles,
    report: &mut dyn FnMut(KernelReport),
) -> Result<Vec<NamedCubin>, CompileError> {
    let code = KernelCode { files, cache_dir: None, shipped: None };
    let cubins = compile_all(&code, &all_sources(), &Architecture::CHECKED)?;
    let mut reports: Vec<KernelReport> = cubins.iter().flat_map(reports).collect();
    reports.sort_by(|a, b| (a.file, &a.name, &a.defines).cmp(&(b.file, &b.name, &b.defines)));
    reports.into_iter().for_each(report);
    Ok(cubins)
}

fn reports(compiled: &NamedCubin) -> impl Iterator<Item = KernelReport> {
    let NamedCubin { source, architecture, cubin, .. } = compiled;
    kernels(&cubin.log).into_iter().map(move |found| KernelReport {
        file: source.file,
        defines: source.constants(),
        architecture: architecture.to_string(),
        loops: matrix_loops(&cubin.code, &found.name, architecture.major()).unwrap_or_default(),
        ..found
    })
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
                loops: vec![],
                warnings: vec![],
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
    for warning in log.lines().filter(|line| WARNINGS.iter().any(|begin| line.contains(begin))) {
        // A warning that names no kernel counts for the first one.
        let named = kernels.iter().position(|it| warning.contains(&format!("'{}'", it.name)));
        if let Some(kernel) = kernels.get_mut(named.unwrap_or(0)) {
            kernel.warnings.push(warning.trim().to_owned());
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
        // It may not spill anything.
        assert!(kernel.over_spills().is_some_and(|why| why.starts_with("12 bytes")));
    }

    /// The texts of the warnings are examples: no kernel has had one yet.
    #[test]
    fn warpgroup_kernels_that_would_hang_or_not_overlap_are_found() {
        let log = |registers: u32, warning: &str| {
            format!(
                "{warning}ptxas info    : Compiling entry function 'norm' for 'sm_90a'\n\
                 ptxas info    : Used 20 registers\n\
                 ptxas info    : Compiling entry function 'wgmma_attention' for 'sm_90a'\n\
                 ptxas info    : Used {registers} registers, used 15 barriers\n"
            )
        };
        let serialised = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
                          due to non wgmma instructions defining accumulator registers of a wgmma between start and end of \
                          the pipeline stage in the function 'wgmma_attention'\n";
        let findings = |log: &str, architecture: &str| -> Vec<Vec<String>> {
            let of = |kernel: KernelReport| KernelReport { architecture: architecture.into(), ..kernel };
            kernels(log).into_iter().map(|kernel| of(kernel).findings()).collect()
        };
        assert_eq!(findings(&log(168, ""), "sm_90a"), [[""; 0]; 2]);
        assert_eq!(findings(&log(160, ""), "sm_80"), [[""; 0]; 2], "the code of other cards is empty");
        let [norm, attention] = &findings(&log(160, serialised), "sm_90a")[..] else { panic!("two kernels") };
        assert_eq!(norm, &[""; 0]);
        assert_eq!(attention[0], "160 registers, its warpgroups share 168 for each thread");
        assert!(attention[1].contains("serialized"), "{attention:?}");
        let unnamed = "warning: 'setmaxnreg' ignored to maintain minimum register requirements\n";
        assert_eq!(findings(&log(168, unnamed), "sm_90a")[0].len(), 1);
    }

    #[test]
    fn more_spills_than_before_break_the_limits() {
        let (name, architecture, most) = SPILLS[0];
        let of = |spill_bytes, stack_bytes| KernelReport {
            file: "",
            defines: String::new(),
            name: name.into(),
            architecture: architecture.into(),
            num_registers: 128,
            spill_bytes,
            stack_bytes,
            shared_bytes: 0,
            loops: vec![],
            warnings: vec![],
        };
        assert_eq!(of(most, 8).over_spills(), None);
        assert_eq!(of(0, 0).over_spills(), None);
        assert!(of(most + 4, 8).over_spills().is_some());
        assert!(of(0, 8).over_spills().is_some());
        assert!(KernelReport { architecture: "sm_80".into(), ..of(most, 8) }.over_spills().is_some());
    }
}
