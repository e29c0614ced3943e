//! `kernels/rows.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_emulator::numbers::{assert_close, bf16, floats, widened};
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::rows::*;
use baton_model_testing::noise;

/// Half a unit in the last place of bf16, and the error of f32 sums.
const RELATIVE: f32 = 1.0 / 256.0;
const ABSOLUTE: f32 = 1e-6;
const EPS: f32 = 1e-5;

fn rounded(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

fn norm(row: &[f32], weight: &[f32]) -> Vec<f32> {
    let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    row.iter().zip(weight).map(|(x, weight)| (f64::from(x * weight) * scale) as f32).collect()
}

#[test]
fn wanted_rows_are_normed_and_the_stream_stays() {
    for hidden in [8, 40, 2048, 8200] {
        for is_added in [false, true] {
            let (x, x_values) = bf16(&noise(1, 4 * hidden));
            let (added, added_values) = bf16(&noise(2, 4 * hidden));
            let weight = noise(3, hidden);
            let indices = [3, NONE, 1];
            let mut emulator = Emulator::new(source());
            let x_bytes = x.clone();
            let [x, added] = [x, added].map(|bytes| emulator.buffer(&bytes));
            let kernel = NormWanted {
                x,
                added: if is_added { added } else { Address::NULL },
                weight: emulator.buffer(bytemuck::cast_slice(&weight)),
                indices: emulator.buffer(bytemuck::cast_slice(&indices)),
                out: emulator.poisoned(indices.len() * hidden * 2),
                hidden: hidden as u32,
                eps: EPS,
                num_rows: indices.len() as u64,
            };
            emulator.launch(&kernel);
            let memory = emulator.run();
            let sum = |i: usize| match is_added {
                true => rounded(x_values[i] + added_values[i]),
                false => x_values[i],
            };
            let expected: Vec<f32> = indices
                .iter()
                .flat_map(|&idx| match idx {
                    NONE => vec![0.0; hidden],
                    idx => {
                        let first = idx as usize * hidden;
                        norm(&(first..first + hidden).map(sum).collect::<Vec<_>>(), &weight)
                    }
                })
                .collect();
            assert_close(&widened(memory.of(kernel.out)), &expected, RELATIVE, ABSOLUTE);
            assert_eq!(memory.of(x), x_bytes);
        }
    }
}

#[test]
fn post_norms_are_added_and_normed_again() {
    for (num_rows, hidden) in [(1, 8), (3, 40), (2, 2304), (1, 8200)] {
        for is_last in [false, true] {
            let (x, x_values) = bf16(&noise(1, num_rows * hidden));
            let (added, added_values) =
                bf16(&noise(2, num_rows * hidden).iter().map(|x| x * 20.0).collect::<Vec<_>>());
            let [post_weight, weight] = [3, 4].map(|seed| noise(seed, hidden));
            let mut emulator = Emulator::new(source());
            let [x, added] = [x, added].map(|bytes| emulator.buffer(&bytes));
            let weights = [&post_weight, &weight].map(|weight| emulator.buffer(bytemuck::cast_slice(weight)));
            let out = emulator.poisoned(num_rows * hidden * 2);
            let kernel = PostNorm {
                x,
                added,
                post_weight: weights[0],
                weight: if is_last { Address::NULL } else { weights[1] },
                out: if is_last { Address::NULL } else { out },
                hidden: hidden as u32,
                eps: EPS,
                num_rows: num_rows as u64,
            };
            emulator.launch(&kernel);
            let memory = emulator.run();
            let mut sums = Vec::new();
            for (x, added) in x_values.chunks_exact(hidden).zip(added_values.chunks_exact(hidden)) {
                sums.extend(x.iter().zip(norm(added, &post_weight)).map(|(x, added)| x + added));
            }
            let found = widened(memory.of(x));
            // Sums of numbers up to 4 that may cancel.
            assert_close(&found, &sums, RELATIVE, 2e-6);
            if is_last {
                assert!(memory.of(out).iter().all(|&byte| byte == 0xff));
                continue;
            }
            let expected: Vec<f32> = found.chunks_exact(hidden).flat_map(|row| norm(row, &weight)).collect();
            assert_close(&widened(memory.of(out)), &expected, RELATIVE, ABSOLUTE);
        }
    }
}

#[test]
fn biases_are_added_to_each_row() {
    for (num_rows, width) in [(1, 8), (3, 264), (2, 2056)] {
        let (x, values) = bf16(&noise(1, num_rows * width));
        let bias = noise(2, width);
        let mut emulator = Emulator::new(source());
        let kernel = AddBias {
            x: emulator.buffer(&x),
            bias: emulator.buffer(bytemuck::cast_slice(&bias)),
            width: width as u32,
            num_rows: num_rows as u32,
        };
        emulator.launch(&kernel);
        let expected: Vec<f32> =
            values.iter().enumerate().map(|(i, x)| rounded(x + bias[i % width])).collect();
        assert_eq!(widened(emulator.run().of(kernel.x)), expected, "{num_rows} x {width}");
    }
}

#[test]
fn logits_stay_below_their_cap() {
    for len in [1, 3, 4, 1023, 2050] {
        let x: Vec<f32> = noise(1, len).iter().map(|x| x * 100.0).collect();
        let mut emulator = Emulator::new(source());
        let kernel =
            SoftCap { x: emulator.buffer(bytemuck::cast_slice(&x)), len: len as u64, cap: 30.0, unused: 0 };
        emulator.launch(&kernel);
        let memory = emulator.run();
        let found = floats(memory.of(kernel.x));
        let expected: Vec<f32> = x.iter().map(|x| (30.0 * (f64::from(*x) / 30.0).tanh()) as f32).collect();
        // Two units in the last place of tanh, and the rounding of input and output.
        assert_close(&found, &expected, 1e-6, 0.0);
    }
}
