//! Norms of rows: `kernels/norm.cu`.

use super::kernel::{Address, Kernel, LaunchShape, Source};

pub(crate) fn source() -> Source {
    Source { file: "norm.cu", text: include_str!("kernels/norm.cu"), defines: vec![] }
}

/// `out = norm(x + added) * weight`, and x keeps the sum. Rows are `[hidden]`, a multiple of 8.
///
/// Moves 6 bytes an element, 10 with something added; a few operations each: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AddNorm {
    /// `[rows][hidden]`, bf16.
    pub(crate) x: Address,
    /// `[rows][hidden]`, bf16, or null.
    pub(crate) added: Address,
    /// `[hidden]`, f32.
    pub(crate) weight: Address,
    /// `[rows][hidden]`, bf16.
    pub(crate) out: Address,
    pub(crate) hidden: u32,
    pub(crate) eps: f32,
    pub(crate) num_rows: u64,
}

// SAFETY: as `AddNorm` in the file.
unsafe impl Kernel for AddNorm {
    const NAME: &'static str = "add_norm";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.hidden.is_multiple_of(8), "16 bytes at a time");
        let threads = (self.hidden / 8).next_multiple_of(32).min(1024);
        LaunchShape { grid: [self.num_rows as u32, 1, 1], threads, shared_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;
    use crate::cuda::testing::{assert_close, bf16, widened};
    use baton_model_testing::noise;

    /// What the kernel is to compute, one row after the other.
    fn add_norm(x: &mut [f32], added: Option<&[f32]>, weight: &[f32], eps: f32) -> Vec<f32> {
        let mut out = Vec::with_capacity(x.len());
        for (row_idx, row) in x.chunks_exact_mut(weight.len()).enumerate() {
            if let Some(added) = added {
                let added = &added[row_idx * weight.len()..][..weight.len()];
                row.iter_mut()
                    .zip(added)
                    .for_each(|(x, added)| *x = half::bf16::from_f32(*x + added).to_f32());
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
                let expected =
                    add_norm(&mut x_expected, is_added.then_some(&added_values), &weight, kernel.eps);
                assert_eq!(widened(memory.of(kernel.x)), x_expected, "the stream, {num_rows} x {hidden}");
                // Half a unit in the last place of bf16, and what f32 sums lose.
                assert_close(&widened(memory.of(kernel.out)), &expected, 1.0 / 256.0, 1e-6);
            }
        }
    }
}
