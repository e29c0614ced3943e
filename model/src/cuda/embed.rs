//! Rows of the embedding: `kernels/embed.cu`.

use super::kernel::{Address, Kernel, LaunchShape, Source};

pub(crate) fn source() -> Source {
    Source { file: "embed.cu", text: include_str!("kernels/embed.cu"), defines: vec![] }
}

/// `x = table[token] * scale`. Rows are `[hidden]`, a multiple of 8.
///
/// The table holds all tokens, or those of one rank; the rows of others become zero, so that the sum over ranks is whole.
///
/// Moves 4 bytes an element: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Embed {
    /// `[num_held][hidden]`, bf16.
    pub(crate) table: Address,
    /// `[rows]`, u32.
    pub(crate) tokens: Address,
    /// `[rows][hidden]`, bf16.
    pub(crate) x: Address,
    pub(crate) hidden: u32,
    /// The table's first row is this token's.
    pub(crate) first_token: u32,
    /// Rows of the table.
    pub(crate) num_held: u32,
    pub(crate) scale: f32,
    pub(crate) num_rows: u64,
}

// SAFETY: as `Embed` in the file.
unsafe impl Kernel for Embed {
    const NAME: &'static str = "embed";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.hidden.is_multiple_of(8), "16 bytes at a time");
        let chunks = self.hidden / 8;
        let threads = chunks.next_multiple_of(32).min(256);
        LaunchShape { grid: [self.num_rows as u32, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;
    use crate::cuda::testing::{bf16, widened};
    use baton_model_testing::noise;

    fn check(hidden: usize, first_token: u32, num_held: u32, tokens: &[u32], scale: f32) {
        let (table, values) = bf16(&noise(1, num_held as usize * hidden));
        let mut emulator = Emulator::new(source());
        let kernel = Embed {
            table: emulator.buffer(&table),
            tokens: emulator.buffer(bytemuck::cast_slice(tokens)),
            x: emulator.poisoned(tokens.len() * hidden * 2),
            hidden: hidden as u32,
            first_token,
            num_held,
            scale,
            num_rows: tokens.len() as u64,
        };
        emulator.launch(&kernel);
        let expected: Vec<f32> = tokens
            .iter()
            .flat_map(|token| match token.checked_sub(first_token).filter(|&row| row < num_held) {
                Some(row) => values[row as usize * hidden..][..hidden].to_vec(),
                None => vec![0.0; hidden],
            })
            .map(|x| half::bf16::from_f32(x * scale).to_f32())
            .collect();
        assert_eq!(widened(emulator.run().of(kernel.x)), expected, "{hidden}, {first_token}");
    }

    #[test]
    fn tokens_become_their_rows_times_the_scale() {
        check(8, 0, 3, &[2], 1.0);
        check(72, 0, 11, &[10, 0, 3, 3], 8.485_281);
        check(2568, 0, 5, &[4, 1, 2], 50.675_44);
    }

    #[test]
    fn tokens_of_other_ranks_become_zeroes() {
        check(16, 7, 4, &[6, 7, 10, 11, 0, u32::MAX], 2.0);
    }
}
