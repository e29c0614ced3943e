//! `kernels/norm.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_emulator::numbers::{assert_close, bf16, widened};
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::norm::*;
use baton_cuda_kernels::products::{self, QuantiseGroups, QuantiseRows, WeightKind};
use baton_model_testing::noise;

/// The expected output, row by row.
fn add_norm(x: &mut [f32], added: Option<&[f32]>, weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for (row_idx, row) in x.chunks_exact_mut(weight.len()).enumerate() {
        if let Some(added) = added {
            let added = &added[row_idx * weight.len()..][..weight.len()];
            row.iter_mut().zip(added).for_each(|(x, added)| *x = half::bf16::from_f32(*x + added).to_f32());
        }
        let mean = row.iter().map(|x| f64::from(x * x)).sum::<f64>() / weight.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        out.extend(row.iter().zip(weight).map(|(x, weight)| (f64::from(x * weight) * scale) as f32));
    }
    out
}

#[test]
fn rows_are_added_and_normalised() {
    for (num_rows, hidden) in [(1, 8), (3, 40), (2, 256), (5, 2048), (2, 8200)] {
        for is_added in [false, true] {
            let (x, mut x_expected) = bf16(&noise(1, num_rows * hidden));
            let (added, added_values) = bf16(&noise(2, num_rows * hidden));
            let weight = noise(3, hidden);
            let mut emulator = Emulator::new(source());
            let [x, added] = [x, added].map(|bytes| emulator.buffer(&bytes));
            let kernel = AddNorm {
                x,
                added: if is_added { added } else { Address::NULL },
                weight: emulator.buffer(bytemuck::cast_slice(&weight)),
                out: emulator.poisoned(num_rows * hidden * 2),
                hidden: hidden as u32,
                eps: 1e-5,
                num_rows: num_rows as u64,
            };
            emulator.launch(&kernel);
            let memory = emulator.run();
            let expected = add_norm(&mut x_expected, is_added.then_some(&added_values), &weight, kernel.eps);
            assert_eq!(widened(memory.of(kernel.x)), x_expected, "the stream, {num_rows} x {hidden}");
            // Half a unit in the last place of bf16, and the error of f32 sums.
            assert_close(&widened(memory.of(kernel.out)), &expected, 1.0 / 256.0, 1e-6);
        }
    }
}

/// Sizes, and the stride of scales of groups; 0 stands for scales of rows.
pub const QUANTISED: [(usize, usize, u32); 7] =
    [(1, 40, 0), (3, 384, 0), (5, 2048, 0), (2, 8320, 0), (3, 384, 4), (5, 2048, 8), (2, 8320, 4)];

#[test]
fn normed_rows_are_quantised_with_the_same_bits() {
    for (num_rows, hidden, stride) in QUANTISED {
        let mut values = noise(1, num_rows * hidden);
        // Zeros, a number far from the others, and numbers too small to scale.
        values[..16].fill(0.0);
        values[20] = 1e4;
        if num_rows > 1 {
            values[hidden..hidden + 128].iter_mut().for_each(|x| *x *= 1e-38);
        }
        let (x, added) = (bf16(&values).0, bf16(&vec![0.0; num_rows * hidden]).0);
        let mut emulator = Emulator::of(&[source(), products::source(WeightKind::Fp8)]);
        let weight = emulator.buffer(bytemuck::cast_slice(&noise(3, hidden)));
        let num_scales = if stride == 0 { num_rows } else { hidden / 128 * stride as usize };
        let found = [false, true].map(|is_fused| {
            let norm = AddNorm {
                x: emulator.buffer(&x),
                added: emulator.buffer(&added),
                weight,
                out: emulator.poisoned(num_rows * hidden * 2),
                hidden: hidden as u32,
                eps: 1e-5,
                num_rows: num_rows as u64,
            };
            let quantised = emulator.poisoned(num_rows * hidden);
            let scales = emulator.poisoned(num_scales * 4);
            let (x, k) = (norm.out, norm.hidden);
            if is_fused {
                emulator.launch(&AddNormQuantise { norm, quantised, scales, stride, unused: 0 });
            } else {
                emulator.launch(&norm);
                match stride {
                    0 => emulator.launch(&QuantiseRows {
                        x,
                        out: quantised,
                        scales,
                        k,
                        num_rows: num_rows as u32,
                    }),
                    _ => emulator.launch(&QuantiseGroups {
                        x,
                        out: quantised,
                        scales,
                        k,
                        stride,
                        num_rows: norm.num_rows,
                    }),
                }
            }
            [norm.x, norm.out, quantised, scales]
        });
        let memory = emulator.run();
        for (what, (apart, fused)) in
            ["stream", "rows", "codes", "scales"].iter().zip(found[0].into_iter().zip(found[1]))
        {
            assert_eq!(memory.of(apart), memory.of(fused), "{what}, {num_rows} x {hidden}, stride {stride}");
        }
    }
}
