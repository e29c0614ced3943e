//! `kernels/one_row.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_emulator::numbers::{assert_close, bf16, floats, widened};
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::one_row::*;
use baton_model_testing::noise;

fn check(k: usize, n: usize, has_bias: bool, is_f32: bool) {
    let (x, x_values) = bf16(&noise(1, k));
    let (weights, weight_values) = bf16(&noise(2, n * k));
    let bias = noise(3, n);
    let mut emulator = Emulator::new(source());
    let kernel = MultiplyRow {
        x: emulator.buffer(&x),
        weights: emulator.buffer(&weights),
        bias: if has_bias { emulator.buffer(bytemuck::cast_slice(&bias)) } else { Address::NULL },
        out: emulator.poisoned(n * if is_f32 { 4 } else { 2 }),
        k: k as u32,
        n: n as u32,
        is_f32: is_f32.into(),
        unused: 0,
    };
    emulator.launch(&kernel);
    let sum = |(row, bias): (&[f32], &f32)| {
        let products = row.iter().zip(&x_values).map(|(w, x)| f64::from(w * x));
        (products.sum::<f64>() + if has_bias { f64::from(*bias) } else { 0.0 }) as f32
    };
    let expected: Vec<f32> = weight_values.chunks_exact(k).zip(&bias).map(sum).collect();
    let memory = emulator.run();
    // Sums in f32, and half a unit in the last place of bf16.
    match is_f32 {
        true => assert_close(&floats(memory.of(kernel.out)), &expected, 1e-5, 1e-5),
        false => assert_close(&widened(memory.of(kernel.out)), &expected, 1.0 / 256.0, 1e-5),
    }
}

#[test]
fn a_row_is_multiplied_with_matrices_of_every_shape() {
    // Fewer numbers than a warp reads at once, an odd number of them, and several rounds of loads.
    check(8, 1, false, false);
    check(264, 15, true, false);
    check(2056, 17, false, true);
    check(3000, 33, true, true);
}
