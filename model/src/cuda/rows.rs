//! What else is done to rows by themselves: `kernels/rows.cu`. Widths are multiples of 8.

use super::kernel::{Address, Kernel, LaunchShape, Source};

pub(crate) fn source() -> Source {
    Source { file: "rows.cu", text: include_str!("kernels/rows.cu"), defines: vec![] }
}

/// A row, a sequence, a slot, an expert or a place that stands for none: what is made of it is zero. Graphs of a fixed number
/// of rows are filled up with it.
pub(crate) const NONE: u32 = u32::MAX;

/// `out[i] = norm(x[j] + added[j]) * weight`, where j is `indices[i]`: the norm before the head, of the rows whose logits
/// are wanted alone. What is normed is rounded as [`AddNorm`](super::norm::AddNorm) keeps it; x stays as it is.
///
/// Moves 4 bytes an element, 6 with something added: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct NormWanted {
    /// `[..][hidden]`, bf16.
    pub(crate) x: Address,
    /// `[..][hidden]`, bf16, or null.
    pub(crate) added: Address,
    /// `[hidden]`, f32.
    pub(crate) weight: Address,
    /// `[rows]`, u32; may be [`NONE`].
    pub(crate) indices: Address,
    /// `[rows][hidden]`, bf16.
    pub(crate) out: Address,
    pub(crate) hidden: u32,
    pub(crate) eps: f32,
    pub(crate) num_rows: u64,
}

// SAFETY: as `NormWanted` in the file.
unsafe impl Kernel for NormWanted {
    const NAME: &'static str = "norm_wanted";

    fn shape(&self) -> LaunchShape {
        by_rows(self.num_rows, self.hidden)
    }
}

/// `x += norm(added) * post_weight; out = norm(x) * weight`: what follows a part of a layer that has a norm behind it as
/// well as before (Gemma 2 and 3).
///
/// Moves 8 bytes an element: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct PostNorm {
    /// `[rows][hidden]`, bf16: the residual stream.
    pub(crate) x: Address,
    /// `[rows][hidden]`, bf16: what the part made.
    pub(crate) added: Address,
    /// `[hidden]`, f32.
    pub(crate) post_weight: Address,
    /// `[hidden]`, f32; null when the next norm is of other rows ([`NormWanted`]).
    pub(crate) weight: Address,
    /// `[rows][hidden]`, bf16; null with `weight`.
    pub(crate) out: Address,
    pub(crate) hidden: u32,
    pub(crate) eps: f32,
    pub(crate) num_rows: u64,
}

// SAFETY: as `PostNorm` in the file.
unsafe impl Kernel for PostNorm {
    const NAME: &'static str = "post_norm";

    fn shape(&self) -> LaunchShape {
        by_rows(self.num_rows, self.hidden)
    }
}

/// `x += bias`, for products whose library does not add it.
///
/// Moves 4 bytes an element: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AddBias {
    /// `[rows][width]`, bf16.
    pub(crate) x: Address,
    /// `[width]`, f32.
    pub(crate) bias: Address,
    pub(crate) width: u32,
    pub(crate) num_rows: u32,
}

// SAFETY: as `AddBias` in the file.
unsafe impl Kernel for AddBias {
    const NAME: &'static str = "add_bias";

    fn shape(&self) -> LaunchShape {
        by_eights(self.num_rows, self.width)
    }
}

/// `x = cap * tanh(x / cap)` of logits, in place.
///
/// Moves 8 bytes a number: bound by memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SoftCap {
    /// `[len]`, f32, aligned to 16 bytes.
    pub(crate) x: Address,
    pub(crate) len: u64,
    pub(crate) cap: f32,
    pub(crate) unused: u32,
}

// SAFETY: as `SoftCap` in the file.
unsafe impl Kernel for SoftCap {
    const NAME: &'static str = "soft_cap";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [self.len.div_ceil(4 * 256) as u32, 1, 1], threads: 256, shared_bytes: 0 }
    }
}

/// A thread for each eight elements of each row.
pub(super) fn by_eights(num_rows: u32, width: u32) -> LaunchShape {
    debug_assert!(width.is_multiple_of(8), "16 bytes at a time");
    let chunks = width / 8;
    let threads = chunks.next_multiple_of(32).min(256);
    LaunchShape { grid: [num_rows, chunks.div_ceil(threads), 1], threads, shared_bytes: 0 }
}

/// A block for each row.
fn by_rows(num_rows: u64, hidden: u32) -> LaunchShape {
    debug_assert!(hidden.is_multiple_of(8), "16 bytes at a time");
    let threads = (hidden / 8).next_multiple_of(32).min(1024);
    LaunchShape { grid: [num_rows as u32, 1, 1], threads, shared_bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::Emulator;
    use crate::cuda::testing::{assert_close, bf16, floats, widened};
    use baton_model_testing::noise;

    /// Half a unit in the last place of bf16, and what f32 sums lose.
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
    fn norms_behind_a_part_are_added_and_normed_again() {
        for (num_rows, hidden) in [(1, 8), (3, 40), (2, 2304), (1, 8200)] {
            for is_last in [false, true] {
                let (x, x_values) = bf16(&noise(1, num_rows * hidden));
                let (added, added_values) =
                    bf16(&noise(2, num_rows * hidden).iter().map(|x| x * 20.0).collect::<Vec<_>>());
                let [post_weight, weight] = [3, 4].map(|seed| noise(seed, hidden));
                let mut emulator = Emulator::new(source());
                let [x, added] = [x, added].map(|bytes| emulator.buffer(&bytes));
                let weights =
                    [&post_weight, &weight].map(|weight| emulator.buffer(bytemuck::cast_slice(weight)));
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
                let expected: Vec<f32> =
                    found.chunks_exact(hidden).flat_map(|row| norm(row, &weight)).collect();
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
            let kernel = SoftCap {
                x: emulator.buffer(bytemuck::cast_slice(&x)),
                len: len as u64,
                cap: 30.0,
                unused: 0,
            };
            emulator.launch(&kernel);
            let memory = emulator.run();
            let found = floats(memory.of(kernel.x));
            let expected: Vec<f32> =
                x.iter().map(|x| (30.0 * (f64::from(*x) / 30.0).tanh()) as f32).collect();
            // Two units in the last place of tanh, and the rounding of what goes in and comes out.
            assert_close(&found, &expected, 1e-6, 0.0);
        }
    }
}
