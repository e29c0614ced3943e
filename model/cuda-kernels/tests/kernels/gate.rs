//! `kernels/gate.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_emulator::numbers::{assert_close, bf16, widened};
use baton_cuda_kernels::gate::*;
use baton_cuda_kernels::products::{self, QuantiseGroups, QuantiseRows, WeightKind};
use baton_model_spec::Activation;
use baton_model_testing::noise;

use super::norm::QUANTISED;

const ALL: [Activation; 3] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];

/// The rounding to bf16, and the error of f32 where GELU subtracts nearly equal numbers.
const RELATIVE: f32 = 1.0 / 256.0;
const ABSOLUTE: f32 = 3e-6;

fn formula(activation: Activation, x: f32) -> f32 {
    let x = f64::from(x);
    let y = match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x.powi(3))).tanh())
        }
    };
    y as f32
}

/// The error function by its alternating series. It is exact to 1e-12 up to 4, where the result is 1 in f32.
fn erf(x: f64) -> f64 {
    if x.abs() > 4.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..100 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

/// In -12..12, with a few outliers.
fn gates(len: usize) -> Vec<f32> {
    let mut gates: Vec<f32> = noise(1, len).iter().map(|x| x * 12.0).collect();
    for (gate, far) in gates.iter_mut().zip([0.0, -0.0, 300.0, -300.0, 1e30, -1e30]) {
        *gate = far;
    }
    gates
}

#[test]
fn gates_apply_their_activation() {
    for activation in ALL {
        for (num_rows, width) in [(1, 8), (3, 40), (2, 2056)] {
            let (gate_up, values) = bf16(&gates(num_rows * 2 * width));
            let mut emulator = Emulator::new(source(activation));
            let kernel = ApplyGate {
                gate_up: emulator.buffer(&gate_up),
                out: emulator.poisoned(num_rows * width * 2),
                width: width as u32,
                num_rows: num_rows as u32,
            };
            emulator.launch(&kernel);
            let expected: Vec<f32> = values
                .chunks_exact(2 * width)
                .flat_map(|row| (0..width).map(|i| formula(activation, row[i]) * row[width + i]))
                .collect();
            assert_close(&widened(emulator.run().of(kernel.out)), &expected, RELATIVE, ABSOLUTE * 12.0);
        }
    }
}

#[test]
fn gated_rows_are_quantised_with_the_same_bits() {
    for (num_rows, width, stride) in QUANTISED {
        let gate_up = bf16(&noise(1, num_rows * 2 * width).iter().map(|x| x * 12.0).collect::<Vec<_>>()).0;
        let mut emulator = Emulator::of(&[source(Activation::Silu), products::source(WeightKind::Fp8)]);
        let gate_up = emulator.buffer(&gate_up);
        let num_scales = if stride == 0 { num_rows } else { width / 128 * stride as usize };
        let found = [false, true].map(|is_fused| {
            let out = emulator.poisoned(num_rows * width * 2);
            let gate = ApplyGate { gate_up, out, width: width as u32, num_rows: num_rows as u32 };
            let quantised = emulator.poisoned(num_rows * width);
            let scales = emulator.poisoned(num_scales * 4);
            let (x, k, num_rows) = (gate.out, gate.width, gate.num_rows);
            if is_fused {
                emulator.launch(&GateQuantise { gate, quantised, scales, stride, unused: 0 });
            } else {
                emulator.launch(&gate);
                match stride {
                    0 => emulator.launch(&QuantiseRows { x, out: quantised, scales, k, num_rows }),
                    _ => {
                        let num_rows = u64::from(num_rows);
                        emulator.launch(&QuantiseGroups { x, out: quantised, scales, k, stride, num_rows });
                    }
                }
            }
            [gate.out, quantised, scales]
        });
        let memory = emulator.run();
        for (what, (apart, fused)) in
            ["rows", "codes", "scales"].iter().zip(found[0].into_iter().zip(found[1]))
        {
            assert_eq!(memory.of(apart), memory.of(fused), "{what}, {num_rows} x {width}, stride {stride}");
        }
    }
}
