//! `kernels/ranks.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_emulator::numbers::floats;
use baton_cuda_kernels::ranks::*;
use baton_model_spec::Rank;
use baton_model_testing::noise;

#[test]
fn logits_of_ranks_are_joined() {
    for (vocab_size, num_ranks, num_rows) in [(256, 2, 3), (203, 4, 2), (5, 4, 1), (600, 3, 5), (7, 1, 2)] {
        let whole = noise(1, num_rows * vocab_size);
        let stride = logit_stride(vocab_size, num_ranks);
        // The padding after the rows is not read.
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
