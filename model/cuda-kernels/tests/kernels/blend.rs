//! `kernels/blend.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_emulator::numbers::{assert_close, bf16, floats};
use baton_cuda_kernels::blend::*;
use baton_cuda_kernels::kernel::Address;
use baton_model_testing::noise;

const NUM_HEADS: usize = 3;
const NUM_KV_HEADS: usize = 2;
const EPS: f32 = 1e-6;

#[test]
fn keys_and_values_are_kept() {
    for (num_rows, kv_width, query_width) in [(1, 8, 16), (13, 40, 24), (70, 512, 8)] {
        let width = query_width + kv_width;
        let (qkv, _) = bf16(&noise(1, num_rows * width));
        let mut emulator = Emulator::new(source());
        let kernel = KeepKv {
            qkv: emulator.buffer(&qkv),
            to: emulator.poisoned(num_rows * kv_width * 2),
            width: width as u32,
            kv_width: kv_width as u32,
            num_rows: num_rows as u64,
        };
        emulator.launch(&kernel);
        let expected: Vec<u8> =
            qkv.chunks_exact(width * 2).flat_map(|row| &row[query_width * 2..]).copied().collect();
        assert_eq!(emulator.run().of(kernel.to), expected);
    }
}

/// The head with its bias and its norm.
fn normed(head: &[f32], bias: Option<&[f32]>, norm: Option<&[f32]>) -> Vec<f64> {
    let biased = |(i, x): (usize, &f32)| f64::from(x + bias.map_or(0.0, |bias| bias[i]));
    let head: Vec<f64> = head.iter().enumerate().map(biased).collect();
    let Some(norm) = norm else { return head };
    let mean = head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    head.iter().zip(norm).map(|(x, weight)| x * scale * f64::from(*weight)).collect()
}

#[test]
fn keys_deviate_by_their_squared_distance() {
    for (num_rows, head_dim, has_norm, has_bias) in
        [(1, 8, false, false), (5, 20, true, false), (9, 128, true, true), (4, 64, false, true)]
    {
        let (width, kept_width) = ((NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim, 2 * NUM_KV_HEADS * head_dim);
        let (qkv, rows) = bf16(&noise(1, num_rows * width));
        let (kept, kept_rows) = bf16(&noise(2, num_rows * kept_width));
        let (bias, norm) = (noise(3, NUM_KV_HEADS * head_dim), noise(4, head_dim));
        let mut emulator = Emulator::new(source());
        let mut or_null = |is_there: bool, numbers: &[f32]| match is_there {
            true => emulator.buffer(bytemuck::cast_slice(numbers)),
            false => Address::NULL,
        };
        let [bias_at, norm_at] = [or_null(has_bias, &bias), or_null(has_norm, &norm)];
        let kernel = DeviateKeys {
            qkv: emulator.buffer(&qkv),
            kept: emulator.buffer(&kept),
            bias: bias_at,
            key_norm: norm_at,
            deviations: emulator.poisoned(num_rows * 4),
            width: width as u32,
            num_heads: NUM_HEADS as u32,
            num_kv_heads: NUM_KV_HEADS as u32,
            head_dim: head_dim as u32,
            eps: EPS,
            num_rows: num_rows as u32,
        };
        emulator.launch(&kernel);
        let distance = |(row, kept): (&[f32], &[f32])| {
            let keys = row[NUM_HEADS * head_dim..].chunks_exact(head_dim).zip(kept.chunks_exact(head_dim));
            let apart = keys.take(NUM_KV_HEADS).enumerate().map(|(head, (a, b))| {
                let bias = has_bias.then(|| &bias[head * head_dim..][..head_dim]);
                let [a, b] = [a, b].map(|head| normed(head, bias, has_norm.then_some(&norm)));
                a.iter().zip(&b).map(|(a, b)| (a - b) * (a - b)).sum::<f64>()
            });
            apart.sum::<f64>() as f32
        };
        let expected: Vec<f32> =
            rows.chunks_exact(width).zip(kept_rows.chunks_exact(kept_width)).map(distance).collect();
        assert_close(&floats(emulator.run().of(kernel.deviations)), &expected, 1e-4, 1e-6);
    }
}
