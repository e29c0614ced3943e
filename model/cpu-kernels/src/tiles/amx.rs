//! The tiles of Intel's AMX.
//!
//! The compiler never uses tile registers, so no instruction names them as clobbered.
#![allow(clippy::undocumented_unsafe_blocks)] // the trait's contract, instruction by instruction

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, _xgetbv};
use std::sync::OnceLock;

use super::{TileShapes, Tiles};

/// The hardware's tiles, of the current thread.
pub(crate) struct Amx;

impl Amx {
    /// Whether this CPU has tiles of bf16 and of eight bits, and the system lets this process use them. Asks once.
    pub(crate) fn is_available() -> bool {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        *AVAILABLE.get_or_init(|| has_instructions() && is_permitted())
    }
}

fn has_instructions() -> bool {
    /// Bits of leaf 7: bf16, tiles, eight bits.
    const FEATURES: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    /// Bits of the state that the system saves: shapes and contents of tiles.
    const STATE: u64 = 3 << 17;
    if !is_x86_feature_detected!("avx512bf16") {
        return false;
    }
    // SAFETY: a CPU with AVX-512 has this leaf, and its system has enabled `xgetbv`.
    unsafe { __cpuid_count(7, 0).edx & FEATURES == FEATURES && xcr0() & STATE == STATE }
}

#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
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

impl Tiles for Amx {
    const KEEPS_SHAPES: bool = true;
    #[inline(always)]
    unsafe fn configure(&mut self, shapes: &TileShapes) {
        unsafe { asm!("ldtilecfg [{}]", in(reg) shapes, options(nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn release(&mut self) {
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn zero<const T: u8>(&mut self) {
        unsafe { asm!("tilezero tmm{}", const T, options(nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn load<const T: u8>(&mut self, p: *const u8, stride: usize) {
        unsafe {
            asm!("tileloadd tmm{t}, [{p} + {s}]", t = const T, p = in(reg) p, s = in(reg) stride, options(nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn store<const T: u8>(&mut self, p: *mut u8, stride: usize) {
        unsafe {
            asm!("tilestored [{p} + {s}], tmm{t}", t = const T, p = in(reg) p, s = in(reg) stride, options(nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16<const C: u8, const A: u8, const B: u8>(&mut self) {
        unsafe {
            asm!("tdpbf16ps tmm{}, tmm{}, tmm{}", const C, const A, const B, options(nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn dot_i8<const C: u8, const A: u8, const B: u8>(&mut self) {
        unsafe {
            asm!("tdpbssd tmm{}, tmm{}, tmm{}", const C, const A, const B, options(nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn dot_i8_u8<const C: u8, const A: u8, const B: u8>(&mut self) {
        unsafe {
            asm!("tdpbsud tmm{}, tmm{}, tmm{}", const C, const A, const B, options(nostack, preserves_flags));
        }
    }
}
