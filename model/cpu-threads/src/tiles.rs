//! Whether threads may use the tile registers of Intel's AMX: the CPU has them, and the system saves them.

use std::arch::x86_64::{__cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Whether this CPU has tiles of bf16 and of eight bits and vectors that multiply both, and the system lets this process use
/// the tiles. Asks once.
pub fn has_tiles() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && is_permitted())
}

fn has_instructions() -> bool {
    /// Bits of leaf 7: bf16, tiles, eight bits.
    const FEATURES: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    /// Bits of the state that the system saves: shapes and contents of tiles.
    const STATE: u64 = 3 << 17;
    // Few rows are multiplied by vectors. A virtual machine may hide these instructions and show tiles.
    if !is_x86_feature_detected!("avx512bf16") || !is_x86_feature_detected!("avx512vnni") {
        return false;
    }
    // SAFETY: a CPU with AVX-512 has this leaf, and its system has enabled `xgetbv`.
    unsafe { __cpuid_count(7, 0).edx & FEATURES == FEATURES && xcr0() & STATE == STATE }
}

#[target_feature(enable = "xsave")]
fn xcr0() -> u64 {
    // SAFETY: the register exists where the instruction does.
    unsafe { _xgetbv(0) }
}

/// Linux gives a process tiles when it asks for them, because a signal's frame becomes 8 KiB larger.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: this call reads and writes no memory of the process.
    let outcome = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    if outcome != 0 {
        let error = std::io::Error::last_os_error();
        eprintln!("warning: the system refuses AMX tiles ({error}): products use AVX-512, which is slower");
    }
    outcome == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}
