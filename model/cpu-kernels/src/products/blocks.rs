//! Blocks of two rows by two outputs, the sums of aarch64's matrix instructions.
//!
//! Such an instruction multiplies sixteen bytes of two rows with sixteen bytes of two outputs: two words of each along K.
//! Activations and panels are stored word by word, so two lines of a panel and two words of the rows are interleaved
//! first. Sums begin and end as rows of sixteen lanes.
#![allow(clippy::undocumented_unsafe_blocks)] // the contracts below, instruction by instruction

use std::arch::aarch64::*;

use baton_cpu_simd::{CHAINS, quarters};

/// Rows of the largest tile. Sixteen of the 32 registers hold its sums; with six rows the compiler moves registers around.
pub(super) const ROWS: usize = 4;

/// Adds to the four words of register `$sums` the products that `$instruction` makes of two registers of `$elements`. The standard
/// library's functions for these instructions are not stable yet.
macro_rules! add_products {
    ($instruction:literal, $elements:literal, $sums:ident, $a:ident, $b:ident) => {
        std::arch::asm!(
            concat!($instruction, " {sums:v}.4s, {a:v}.", $elements, ", {b:v}.", $elements),
            sums = inout(vreg) $sums,
            a = in(vreg) $a,
            b = in(vreg) $b,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
}
pub(super) use add_products;

/// Sixteen words of 32 bits.
pub(super) type Words = [int32x4_t; 4];

/// An instruction that adds to the block `sums` the products of two words of two rows with two words of two outputs.
///
/// # Safety (of all methods)
/// The CPU has the instruction.
pub(super) trait BlockSimd {
    unsafe fn multiply(sums: int32x4_t, rows: int32x4_t, outputs: int32x4_t) -> int32x4_t;
}

/// Independent blocks that hide the latency of an instruction: as many as [`CHAINS`] vectors have registers.
const NUM_CHAINS: usize = 4 * CHAINS;

/// A loop of products alone, for measuring the peak rate. A round has as many as one row with [`CHAINS`] vectors. Returns
/// the sums.
///
/// # Safety
/// As for [`BlockSimd`].
#[inline(always)]
pub(super) unsafe fn products<B: BlockSimd>(rounds: usize) -> [int32x4_t; NUM_CHAINS] {
    unsafe {
        let x = vdupq_n_s32(std::hint::black_box(0));
        let mut sums = [vdupq_n_s32(0); NUM_CHAINS];
        // A block has the products of two registers of one row.
        for _ in 0..rounds.div_ceil(2) {
            for sum in &mut sums {
                *sum = B::multiply(*sum, x, x);
            }
        }
        sums
    }
}

/// The sums of `R` rows, an even number, and sixteen outputs.
#[derive(Clone, Copy)]
pub(super) struct Blocks<const R: usize> {
    /// Of each pair of rows, the blocks of outputs 0 and 1, 2 and 3, and so on. The second half is unused.
    pairs: [[int32x4_t; 8]; R],
}

impl<const R: usize> Blocks<R> {
    #[inline(always)]
    pub(super) unsafe fn of_rows(rows: &[Words; R]) -> Blocks<R> {
        unsafe {
            let mut blocks = Blocks { pairs: [[vdupq_n_s32(0); 8]; R] };
            for pair in 0..R / 2 {
                let (a, b) = (rows[2 * pair], rows[2 * pair + 1]);
                for q in 0..4 {
                    blocks.pairs[pair][2 * q] = low_halves(a[q], b[q]);
                    blocks.pairs[pair][2 * q + 1] = high_halves(a[q], b[q]);
                }
            }
            blocks
        }
    }

    #[inline(always)]
    pub(super) unsafe fn to_rows(self) -> [Words; R] {
        unsafe {
            let mut rows = [[vdupq_n_s32(0); 4]; R];
            for pair in 0..R / 2 {
                let blocks = self.pairs[pair];
                for q in 0..4 {
                    rows[2 * pair][q] = low_halves(blocks[2 * q], blocks[2 * q + 1]);
                    rows[2 * pair + 1][q] = high_halves(blocks[2 * q], blocks[2 * q + 1]);
                }
            }
            rows
        }
    }

    /// Adds the products of two lines of sixteen outputs with two words of each row; `words` are valid for `R` words each.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
    pub(super) unsafe fn add<B: BlockSimd>(&mut self, lines: [Words; 2], words: [*const i32; 2]) {
        unsafe {
            let mut rows = [vdupq_n_s32(0); R];
            for pair in 0..R / 2 {
                let [first, second] = [vld1_s32(words[0].add(2 * pair)), vld1_s32(words[1].add(2 * pair))];
                rows[pair] = vcombine_s32(vzip1_s32(first, second), vzip2_s32(first, second));
            }
            for q in 0..4 {
                let outputs = [vzip1q_s32(lines[0][q], lines[1][q]), vzip2q_s32(lines[0][q], lines[1][q])];
                for pair in 0..R / 2 {
                    for half in 0..2 {
                        let sums = &mut self.pairs[pair][2 * q + half];
                        *sums = B::multiply(*sums, rows[pair], outputs[half]);
                    }
                }
            }
        }
    }
}

/// Loads sixteen words.
///
/// # Safety
/// `p` is valid for them.
#[inline(always)]
pub(super) unsafe fn load(p: *const u8) -> Words {
    unsafe { quarters!(Q => vld1q_s32(p.cast::<i32>().add(4 * Q))) }
}

#[inline(always)]
unsafe fn low_halves(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    unsafe { vreinterpretq_s32_s64(vtrn1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b))) }
}

#[inline(always)]
unsafe fn high_halves(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    unsafe { vreinterpretq_s32_s64(vtrn2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b))) }
}
