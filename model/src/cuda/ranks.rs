//! What several ranks have computed, put together: `kernels/ranks.cu`.

use super::kernel::{Address, Kernel, LaunchShape, Source};

pub(crate) fn source() -> Source {
    Source { file: "ranks.cu", text: include_str!("kernels/ranks.cu"), defines: vec![] }
}

/// Numbers that a row of a rank's logits has room for: as many for each rank, aligned to 16 bytes.
pub(crate) fn logit_stride(vocab_size: usize, num_ranks: usize) -> usize {
    vocab_size.div_ceil(num_ranks).next_multiple_of(4)
}

/// `out[row][token] = parts[rank of token][row][token of rank]`
///
/// Moves 8 bytes a number: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct JoinLogits {
    /// Of each rank `rows * stride` numbers in f32, of which it has `[rows][its tokens]`; the last ranks may have fewer
    /// tokens than the others, or none.
    pub(crate) parts: Address,
    /// `[rows][vocab]`, f32.
    pub(crate) out: Address,
    /// Tokens of the first rank.
    pub(crate) part: u32,
    /// [`logit_stride`]
    pub(crate) stride: u32,
    pub(crate) vocab: u32,
    pub(crate) num_rows: u32,
}

// SAFETY: as `JoinLogits` in the file.
unsafe impl Kernel for JoinLogits {
    const NAME: &'static str = "join_logits";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.num_rows, self.vocab.div_ceil(256), 1], threads: 256, shared_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;
    use crate::cuda::testing::floats;
    use baton_model_spec::Rank;
    use baton_model_testing::noise;

    #[test]
    fn logits_of_ranks_lie_side_by_side() {
        for (vocab_size, num_ranks, num_rows) in [(256, 2, 3), (203, 4, 2), (5, 4, 1), (600, 3, 5), (7, 1, 2)]
        {
            let whole = noise(1, num_rows * vocab_size);
            let stride = logit_stride(vocab_size, num_ranks);
            // What lies behind the rows is of no account.
            let mut parts = vec![f32::NAN; num_ranks * num_rows * stride];
            for rank in Rank::all(num_ranks) {
                let tokens = rank.part_of(vocab_size);
                for (row_idx, row) in whole.chunks_exact(vocab_size).enumerate() {
                    let first = rank.idx * num_rows * stride + row_idx * tokens.len();
                    parts[first..first + tokens.len()].copy_from_slice(&row[tokens.clone()]);
                }
            }
            let mut emulator = Emulator::new(source());
            let kernel = JoinLogits {
                parts: emulator.buffer(bytemuck::cast_slice(&parts)),
                out: emulator.poisoned(whole.len() * 4),
                part: vocab_size.div_ceil(num_ranks) as u32,
                stride: stride as u32,
                vocab: vocab_size as u32,
                num_rows: num_rows as u32,
            };
            emulator.launch(&kernel);
            assert_eq!(floats(emulator.run().of(kernel.out)), whole, "{vocab_size} by {num_ranks}");
        }
    }
}
