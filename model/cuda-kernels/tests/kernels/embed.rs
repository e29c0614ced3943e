//! `kernels/embed.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_emulator::numbers::{bf16, widened};
use baton_cuda_kernels::embed::*;
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
