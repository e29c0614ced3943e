//! Counts the instructions in the loops of compiled kernels, so that a limit can hold them.
//!
//! It knows only what counting needs: a cubin is an ELF file with a section for each kernel, an instruction has 16
//! bytes, and a loop ends with a branch backwards. No disassembler is needed. The encodings of the branch and of the
//! product were compared with nvdisasm 13.5, for code of NVRTC 12.9 for every architecture of
//! [`Architecture::CHECKED`](crate::compile::Architecture::CHECKED).

/// An innermost loop with matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixLoop {
    pub num_instructions: u32,
    /// Of them `mma.sync` and `wgmma.mma_async`.
    pub num_products: u32,
}

/// Most instructions in the loops of a kernel, by their products. The slowest loop of an architecture has about 4 %
/// less. Weights arrive at the rate of HBM while a warp of an H100 takes fewer than 590 instructions for 2 KiB of them:
/// 3.35 TB/s against 132 multiprocessors with four instructions a cycle. An H200, with 4.8 TB/s, leaves 412. That is
/// the work of one loop of int8 and int4, and of fp8.
///
/// A step of decode attention takes 16 positions of a head: 8 KiB of bf16, half of that in eight bits, so an H200 leaves 1,648
/// instructions, or 824. A product takes a tensor core of an A100 eight cycles, in which its scheduler issues eight
/// instructions: 128 products of prefill attention leave 1,024, 64 of experts 512. The counts of attention contain masks and
/// caps, which most steps skip. Prefill attention of eight bits has an inner loop, which widens, so its products are not in an
/// innermost one.
///
/// The rates are those of NVIDIA's data sheets of the SXM modules, which give dense BF16 as 989.4 TFLOP/s. With 4,096
/// operations of a multiprocessor in a cycle (glennklockwood.com/garden/peak-FLOPS) that is 1.83 GHz.
///
/// A name alone is that of all variants of a kernel. Constants after it name one of them, as the table of `cuda-check` does.
pub const LIMITS: &[(&str, &[MatrixLoop])] = &[
    ("multiply_few_fp8", &[most(262, 8), most(278, 16)]),
    ("multiply_few32_fp8", &[most(334, 32)]),
    ("multiply_few_int8", &[most(248, 8), most(282, 16)]),
    ("multiply_few32_int8", &[most(350, 32)]),
    ("multiply_few_zeros_int8", &[most(287, 12), most(349, 24)]),
    ("multiply_few32_zeros_int8", &[most(467, 48)]),
    ("multiply_few_int4", &[most(351, 16), most(426, 32)]),
    ("multiply_few32_int4", &[most(571, 64)]),
    ("multiply_few_zeros_int4", &[most(420, 24), most(568, 48)]),
    ("multiply_few32_zeros_int4", &[most(811, 96)]),
    ("decode_attention HEAD_DIM=128 KV_TYPE=2", &[most(569, 32)]),
    ("decode_attention HEAD_DIM=128 KV_TYPE=3", &[most(916, 32)]),
    ("decode_attention HEAD_DIM=128 KV_TYPE=4", &[most(850, 32)]),
    ("prefill_attention HEAD_DIM=128 KV_TYPE=2", &[most(1407, 128)]),
    ("expert_product TILE_ROWS=64 GATED=0 ACTIVATION=0", &[most(316, 64)]),
    ("gated_expert_product TILE_ROWS=64 GATED=1 ACTIVATION=0", &[most(298, 64)]),
];

/// The same for kernels that only [`WGMMA_ARCHITECTURE`] has code of. Four stages of experts' products keep the tensor
/// cores busy for 4,096 cycles, in which each warp that starts them has that many instructions.
pub const WGMMA_LIMITS: &[(&str, &[MatrixLoop])] = &[
    ("wgmma_expert_product", &[most(184, 16)]),
    ("wgmma_gated_expert_product", &[most(184, 16)]),
    ("wgmma_attention HEAD_DIM=128 KV_TYPE=2", &[most(1482, 16)]),
    ("wgmma_attention HEAD_DIM=128 KV_TYPE=3", &[most(1746, 16)]),
    ("wgmma_attention HEAD_DIM=128 KV_TYPE=4", &[most(1746, 16)]),
];

/// As [`Architecture`](crate::compile::Architecture) shows it.
pub const WGMMA_ARCHITECTURE: &str = "sm_90a";

const fn most(num_instructions: u32, num_products: u32) -> MatrixLoop {
    MatrixLoop { num_instructions, num_products }
}

const INSTRUCTION_BYTES: usize = 16;

/// The lowest 12 bits of an instruction: `BRA` and `BRA.U`.
const BRANCHES: [u64; 2] = [0x947, 0x547];
/// `HMMA`, and `HGMMA` with its left side in shared memory or in registers.
const PRODUCTS: [u64; 3] = [0x23c, 0x9f0, 0xdf0];

/// What breaks the limits of this kernel for an architecture. Empty if it has none.
pub fn over_limits(kernel: &str, constants: &str, architecture: &str, loops: &[MatrixLoop]) -> Vec<String> {
    let wgmma = if architecture == WGMMA_ARCHITECTURE { WGMMA_LIMITS } else { &[] };
    let is_it = |(named, _): &&(&str, _)| {
        named.split_once(' ').map_or(*named == kernel, |variant| variant == (kernel, constants))
    };
    let Some((_, limits)) = LIMITS.iter().chain(wgmma).find(is_it) else { return vec![] };
    let check = |limit: &MatrixLoop| {
        let alike = loops.iter().filter(|it| it.num_products == limit.num_products);
        match alike.map(|it| it.num_instructions).max() {
            None => Some(format!("no loop with {} products, which a limit expects", limit.num_products)),
            Some(num) if num > limit.num_instructions => Some(format!(
                "a loop with {} products has {num} instructions, at most {} are allowed",
                limit.num_products, limit.num_instructions
            )),
            Some(_) => None,
        }
    };
    limits.iter().filter_map(check).collect()
}

/// The innermost loops with products of a kernel, in the order of the code. `major` is the major number of the compute
/// capability. `None`: the file is not a cubin with this kernel.
pub fn matrix_loops(cubin: &[u8], kernel: &str, major: u32) -> Option<Vec<MatrixLoop>> {
    let instructions: Vec<u128> = section(cubin, &format!(".text.{kernel}"))?
        .as_chunks::<INSTRUCTION_BYTES>()
        .0
        .iter()
        .map(|bytes| u128::from_le_bytes(*bytes))
        .collect();
    let loops: Vec<(usize, usize)> = instructions
        .iter()
        .enumerate()
        .filter_map(|(at, instruction)| {
            let target = branch_target(*instruction, at, major)?;
            // The code ends with a branch to itself.
            (target < at).then_some((target, at))
        })
        .collect();
    let contains = |outer: &(usize, usize), inner: &(usize, usize)| {
        outer != inner && outer.0 <= inner.0 && inner.1 <= outer.1
    };
    let innermost = loops.iter().filter(|it| !loops.iter().any(|other| contains(it, other)));
    let counted = innermost.map(|&(first, last)| MatrixLoop {
        num_instructions: (last - first + 1) as u32,
        num_products: instructions[first..=last].iter().filter(|it| PRODUCTS.contains(&opcode(**it))).count()
            as u32,
    });
    Some(counted.filter(|it| it.num_products > 0).collect())
}

fn opcode(instruction: u128) -> u64 {
    instruction as u64 & 0xfff
}

/// The instruction that a branch goes to. `None`: it is another instruction, or leaves the code.
fn branch_target(instruction: u128, at: usize, major: u32) -> Option<usize> {
    if !BRANCHES.contains(&opcode(instruction)) {
        return None;
    }
    // 48 signed bits, in units of 4 bytes. Since Hopper their lowest eight are somewhere else.
    let high = (instruction >> 34 & ((1 << 48) - 1)) as i64;
    let high = high << 16 >> 16;
    let units = if major >= 9 { high << 8 | (instruction >> 16 & 0xff) as i64 } else { high };
    usize::try_from(at as i64 + 1 + units * 4 / INSTRUCTION_BYTES as i64).ok()
}

/// The bytes of a section of a 64-bit ELF file.
fn section<'a>(file: &'a [u8], wanted: &str) -> Option<&'a [u8]> {
    let number = |at: usize, len: usize| -> Option<usize> {
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(file.get(at..at.checked_add(len)?)?);
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    if !file.starts_with(b"\x7fELF\x02") {
        return None;
    }
    let (table, entry_len) = (number(0x28, 8)?, number(0x3a, 2)?);
    let (num_sections, names_idx) = (number(0x3c, 2)?, number(0x3e, 2)?);
    let entry = |idx: usize| table.checked_add(idx.checked_mul(entry_len)?);
    let contents = |at: usize| {
        let (offset, len) = (number(at + 0x18, 8)?, number(at + 0x20, 8)?);
        file.get(offset..offset.checked_add(len)?)
    };
    let names = contents(entry(names_idx)?)?;
    (0..num_sections).find_map(|idx| {
        let at = entry(idx)?;
        let name = names.get(number(at, 4)?..)?;
        let name = &name[..name.iter().position(|byte| *byte == 0)?];
        if name == wanted.as_bytes() { contents(at) } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::KernelSource;

    /// A cubin with one kernel.
    fn cubin(kernel: &str, instructions: &[u128]) -> Vec<u8> {
        let names = format!("\0.text.{kernel}\0");
        let code: Vec<u8> = instructions.iter().flat_map(|it| it.to_le_bytes()).collect();
        let mut file = b"\x7fELF\x02".to_vec();
        file.resize(64, 0);
        let mut put = |bytes: &[u8]| {
            let at = file.len();
            file.extend(bytes);
            (at as u64, bytes.len() as u64)
        };
        let (names, code) = (put(names.as_bytes()), put(&code));
        let table = file.len() as u64;
        for (name, (offset, len)) in [(0u32, names), (1, code)] {
            let mut entry = [0; 64];
            entry[..4].copy_from_slice(&name.to_le_bytes());
            entry[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
            entry[0x20..0x28].copy_from_slice(&len.to_le_bytes());
            file.extend(entry);
        }
        file[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        // The length of an entry, two entries, names in the first.
        file[0x3a..0x40].copy_from_slice(&[64, 0, 2, 0, 0, 0]);
        file
    }

    /// Instructions of real code: nvdisasm shows them as a comment.
    #[test]
    fn branches_are_decoded_as_the_disassembler_does() {
        let instruction = |low: u64, high: u64| u128::from(low) | u128::from(high) << 64;
        for (major, low, high, skipped) in [
            // sm_80: BRA to itself
            (8, 0xffff_fff0_0000_7947, 0xf_c000_0383_ffff, -1),
            // sm_80: @!P0 BRA, 320 bytes forwards
            (8, 0x0140_0000_8947, 0xf_ea00_0380_0000, 20),
            // sm_80: @!P0 BRA, 1712 bytes backwards
            (8, 0xffff_f940_0000_8947, 0xf_ea00_0383_ffff, -108),
            // sm_90a: BRA to itself
            (9, 0xffff_fffc_00fc_7947, 0xf_c000_0383_ffff, -1),
            // sm_90a: BRA, 80 bytes forwards
            (9, 0x0014_7947, 0xf_ec00_0380_0000, 5),
            // sm_90a: @P1 BRA, 17504 bytes forwards
            (9, 0x0044_0018_1947, 0xf_ea00_0380_0000, 1094),
            // sm_100: BRA.U, 3600 bytes backwards
            (10, 0xffff_fff1_087c_7547, 0xf_ec00_0b83_ffff, -225),
        ] {
            let found = branch_target(instruction(low, high), 5000, major);
            assert_eq!(found, Some((5001 + skipped) as usize), "{low:#x} of {major}");
        }
        assert_eq!(branch_target(instruction(PRODUCTS[0], 0), 5, 9), None);
    }

    #[test]
    fn innermost_loops_with_products_are_counted() {
        let back = |by: i64| {
            let units = (-by - 1) * 4;
            0x947 | u128::from((units as u64) & ((1 << 48) - 1)) << 34
        };
        let (other, product) = (0x221, u128::from(PRODUCTS[0]));
        // An outer loop of everything. Its first inner loop has two products, the second has none.
        let code = [other, other, product, product, back(2), other, back(1), back(7), back(0)];
        let file = cubin("k", &code);
        let expected = [MatrixLoop { num_instructions: 3, num_products: 2 }];
        assert_eq!(matrix_loops(&file, "k", 8).as_deref(), Some(&expected[..]));
        assert_eq!(matrix_loops(&file, "other", 8), None);
        // The last bytes of the table are not read.
        for len in 0..file.len() - 24 {
            assert_eq!(matrix_loops(&file[..len], "k", 8), None, "{len} bytes");
        }
    }

    #[test]
    fn long_and_missing_loops_break_the_limits() {
        assert_eq!(over_limits("norm", "", "sm_80", &[]), [""; 0]);
        let of_wgmma = WGMMA_LIMITS.iter().map(|limit| (limit, WGMMA_ARCHITECTURE));
        for ((named, limits), architecture) in LIMITS.iter().map(|limit| (limit, "sm_80")).chain(of_wgmma) {
            let (name, constants) = named.split_once(' ').unwrap_or((named, "ANY=1"));
            let over = |loops: &[MatrixLoop]| over_limits(name, constants, architecture, loops);
            assert_eq!(over(limits), [""; 0]);
            let longer =
                limits.iter().map(|it| MatrixLoop { num_instructions: it.num_instructions + 1, ..*it });
            assert_eq!(over(&longer.collect::<Vec<_>>()).len(), limits.len());
            assert_eq!(over(&[]).len(), limits.len());
        }
        assert_eq!(over_limits(WGMMA_LIMITS[0].0, "", "sm_80", &[]), [""; 0]);
        assert_eq!(over_limits("decode_attention", "HEAD_DIM=256 KV_TYPE=2", "sm_80", &[]), [""; 0]);
    }

    #[test]
    fn limits_are_of_variants_that_are_compiled() {
        let sources = crate::sources::all_sources();
        let compiled: Vec<String> = sources.iter().map(KernelSource::constants).collect();
        for (named, _) in LIMITS.iter().chain(WGMMA_LIMITS) {
            if let Some((_, constants)) = named.split_once(' ') {
                assert!(compiled.iter().any(|it| it == constants), "{named}");
            }
        }
    }
}
