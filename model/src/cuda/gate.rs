//! What lies between the two products of an MLP: `kernels/gate.cu`.

use super::kernel::{Address, Kernel, LaunchShape, Source};
use baton_model_spec::Activation;

pub(crate) fn source(activation: Activation) -> Source {
    Source {
        file: "gate.cu",
        text: include_str!("kernels/gate.cu"),
        defines: vec![("ACTIVATION", number_of(activation))],
    }
}

/// What `activated` in `kernels/common.cuh` calls it.
pub(crate) fn number_of(activation: Activation) -> u64 {
    match activation {
        Activation::Silu => 0,
        Activation::Gelu => 1,
        Activation::GeluTanh => 2,
    }
}

/// `out = activation(gate) * up`. `width` is a multiple of 8.
///
/// Moves 6 bytes an element: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Gate {
    /// `[rows][2 width]`, bf16: gates, then what they let through.
    pub(crate) gate_up: Address,
    /// `[rows][width]`, bf16.
    pub(crate) out: Address,
    pub(crate) width: u32,
    pub(crate) num_rows: u32,
}

// SAFETY: as `Gate` in the file.
unsafe impl Kernel for Gate {
    const NAME: &'static str = "gate";

    fn shape(&self) -> LaunchShape {
        by_eights(self.num_rows, self.width)
    }
}

/// A thread for each eight elements of each row.
fn by_eights(num_rows: u32, width: u32) -> LaunchShape {
    debug_assert!(width.is_multiple_of(8), "16 bytes at a time");
    let chunks = width / 8;
    let threads = chunks.next_multiple_of(32).min(256);
    LaunchShape { grid: [num_rows, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;
    use crate::cuda::testing::{assert_close, bf16, widened};
    use baton_model_testing::noise;

    const ALL: [Activation; 3] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];

    /// What bf16 rounds, and where GELU is a difference of nearly equals, what f32 loses.
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

    /// By its series, which alternates: good to 1e-12 up to 4, where it is 1 to f32.
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

    /// In -12..12, with a few far out.
    fn gates(len: usize) -> Vec<f32> {
        let mut gates: Vec<f32> = noise(1, len).iter().map(|x| x * 12.0).collect();
        for (gate, far) in gates.iter_mut().zip([0.0, -0.0, 300.0, -300.0, 1e30, -1e30]) {
            *gate = far;
        }
        gates
    }

    #[test]
    fn gates_let_through_what_their_function_says() {
        for activation in ALL {
            for (num_rows, width) in [(1, 8), (3, 40), (2, 2056)] {
                let (gate_up, values) = bf16(&gates(num_rows * 2 * width));
                let mut emulator = Emulator::new(source(activation));
                let kernel = Gate {
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
}
