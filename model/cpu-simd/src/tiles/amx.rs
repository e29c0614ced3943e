//! The tiles of Intel's AMX.
//!
//! The compiler never uses tile registers, so no instruction names them as clobbered.
#![allow(clippy::undocumented_unsafe_blocks)] // the trait's contract, instruction by instruction

use std::arch::asm;

use super::registers::{TileShapes, Tiles};

/// The hardware's tiles, of the current thread.
pub struct Amx;

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
    unsafe fn load_once<const T: u8>(&mut self, p: *const u8, stride: usize) {
        unsafe {
            asm!("tileloaddt1 tmm{t}, [{p} + {s}]", t = const T, p = in(reg) p, s = in(reg) stride, options(nostack, preserves_flags));
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
    unsafe fn dot_i8_u8<const C: u8, const A: u8, const B: u8>(&mut self) {
        unsafe {
            asm!("tdpbsud tmm{}, tmm{}, tmm{}", const C, const A, const B, options(nostack, preserves_flags));
        }
    }
}
