//! A process that holds the emulated memory and runs kernels in it.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use baton_cuda_kernels::device::{Fp8Product, Product};
use baton_cuda_kernels::kernel::{Address, Kernel, KernelSource, LaunchShape};

use crate::program::program;

/// A process that holds the emulated memory and runs kernels in it, one after the other.
///
/// # Panics
/// Its methods panic when a kernel leaves its buffers, waits for a thread that never arrives, or depends on the order
/// of its threads. The panic may come as late as the next method that waits for an answer.
pub struct Session {
    child: Child,
    input: Option<ChildStdin>,
    output: ChildStdout,
    /// Its standard error.
    messages: File,
}

/// The order in which the threads of a kernel run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// Random order.
    Shuffled,
    /// Random order and index order, with the results compared.
    Compared,
}

/// Commands, with the numbers of `cpp/run.h`.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Order {
    Allocate,
    Write,
    Read,
    Launch,
    Multiply,
    MultiplyFp8,
    Count,
}

/// What kernels have done in a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelWork {
    /// Bytes of weights that were loaded: those of `load_once`.
    pub loaded_bytes: u64,
    /// Instructions of a warp that multiply: `mma_bf16`.
    pub num_products: u64,
}

impl Session {
    /// Compiles `sources`, unless the program is cached, and starts the process.
    pub fn new(sources: &[KernelSource], threads: Threads) -> Session {
        let messages = tempfile::tempfile().expect("a temporary file");
        let mut child = Command::new(program(sources))
            // Fibers have stacks of their own. This check of the sanitizer does not support them.
            .env("ASAN_OPTIONS", "detect_stack_use_after_return=0:detect_leaks=0:quarantine_size_mb=16")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(messages.try_clone().expect("a descriptor"))
            .spawn()
            .expect("the emulator starts");
        let (input, output) = (child.stdin.take(), child.stdout.take().expect("piped"));
        let mut session = Session { child, input, output, messages };
        let seed = 1u32;
        session.send(&[&seed.to_le_bytes(), &u32::from(threads == Threads::Compared).to_le_bytes()]);
        session
    }

    /// Allocates memory full of NaN.
    pub fn allocate(&mut self, num_bytes: usize) -> Address {
        self.order(Order::Allocate, &[&(num_bytes as u64).to_le_bytes()]);
        let mut address = [0; 8];
        self.receive(&mut address);
        Address(u64::from_le_bytes(address))
    }

    pub fn write(&mut self, to: Address, bytes: &[u8]) {
        self.order(Order::Write, &[&to.0.to_le_bytes(), &(bytes.len() as u64).to_le_bytes(), bytes]);
    }

    pub fn read(&mut self, from: Address, bytes: &mut [u8]) {
        self.order(Order::Read, &[&from.0.to_le_bytes(), &(bytes.len() as u64).to_le_bytes()]);
        self.receive(bytes);
    }

    pub fn launch<K: Kernel>(&mut self, kernel: &K) {
        let (shape, params): (LaunchShape, &[u8]) = (kernel.shape(), bytes_of(kernel));
        let name = kernel.name();
        let name = [&(name.len() as u32).to_le_bytes()[..], name.as_bytes()].concat();
        let num_bytes = (params.len() as u32).to_le_bytes();
        self.order(Order::Launch, &[&name, bytes_of(&shape), &num_bytes, params]);
    }

    pub fn multiply(&mut self, product: &Product) {
        self.order(Order::Multiply, &[bytes_of(product)]);
    }

    pub fn multiply_fp8(&mut self, product: &Fp8Product) {
        self.order(Order::MultiplyFp8, &[bytes_of(product)]);
    }

    /// What kernels have done so far.
    pub fn work(&mut self) -> KernelWork {
        self.order(Order::Count, &[]);
        let mut counts = [0; 2];
        for count in &mut counts {
            let mut bytes = [0; 8];
            self.receive(&mut bytes);
            *count = u64::from_le_bytes(bytes);
        }
        let [loaded_bytes, num_products] = counts;
        KernelWork { loaded_bytes, num_products }
    }

    fn order(&mut self, order: Order, parts: &[&[u8]]) {
        self.send(&[&(order as u32).to_le_bytes(), &parts.concat()]);
    }

    fn send(&mut self, parts: &[&[u8]]) {
        let mut input = self.input.as_ref().expect("open until the drop");
        if parts.iter().try_for_each(|part| input.write_all(part)).is_err() {
            self.fail();
        }
    }

    fn receive(&mut self, bytes: &mut [u8]) {
        if self.output.read_exact(bytes).is_err() {
            self.fail();
        }
    }

    /// The process ended too early.
    fn fail(&mut self) -> ! {
        let status = self.child.wait().expect("the emulator ends");
        let mut text = Vec::new();
        let said = self.messages.rewind().and_then(|()| self.messages.read_to_end(&mut text));
        said.expect("a file can be read");
        panic!("the emulator: {status}\n{}", String::from_utf8_lossy(&text));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Closing the input ends the process.
        self.input = None;
        let _ = self.child.wait();
    }
}

/// The bytes of plain data.
fn bytes_of<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: arguments of kernels, shapes and products are plain data without padding.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::{assert_close, bf16, floats, widened};
    use baton_model_testing::noise;

    /// `left right^T + beta out`
    fn expected(left: &[f32], right: &[f32], out: &[f32], beta: f32, num_in: usize) -> Vec<f32> {
        let rows = left.chunks_exact(num_in);
        let sums = rows.flat_map(|row| {
            let dot = move |other: &[f32]| -> f64 {
                row.iter().zip(other).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            right.chunks_exact(num_in).map(dot)
        });
        sums.zip(out).map(|(sum, out)| (sum + f64::from(beta * out)) as f32).collect()
    }

    #[test]
    fn products_are_what_they_are_said_to_be() {
        for (num_rows, num_out, num_in) in [(1, 8, 8), (3, 24, 40), (7, 256, 72)] {
            for (is_out_f32, beta) in [(false, 0.0), (false, 1.0), (true, 0.0), (true, 1.0)] {
                let mut session = Session::new(&[], Threads::Compared);
                let (left, left_values) = bf16(&noise(1, num_rows * num_in));
                let (right, right_values) = bf16(&noise(2, num_out * num_in));
                let (out_bytes, out_values) = bf16(&noise(3, num_rows * num_out));
                let out_bytes =
                    if is_out_f32 { bytemuck::cast_slice(&out_values).to_vec() } else { out_bytes };
                let [left, right, out] = [left, right, out_bytes].map(|bytes| {
                    let at = session.allocate(bytes.len());
                    session.write(at, &bytes);
                    (at, bytes.len())
                });
                session.multiply(&Product {
                    left: left.0,
                    right: right.0,
                    out: out.0,
                    num_rows: num_rows as u64,
                    num_out: num_out as u64,
                    num_in: num_in as u64,
                    left_stride: num_in as u64,
                    out_stride: num_out as u64,
                    is_out_f32: is_out_f32.into(),
                    beta,
                });
                let mut bytes = vec![0; out.1];
                session.read(out.0, &mut bytes);
                let found = if is_out_f32 { floats(&bytes) } else { widened(&bytes) };
                let expected = expected(&left_values, &right_values, &out_values, beta, num_in);
                // Half a unit in the last place of bf16, and the error of f32 sums.
                let relative = if is_out_f32 { 1e-5 } else { 1.0 / 256.0 };
                assert_close(&found, &expected, relative, 1e-5);
            }
        }
    }

    #[test]
    #[should_panic(expected = "a product leaves its buffers")]
    fn a_product_that_leaves_its_buffers_is_seen() {
        let mut session = Session::new(&[], Threads::Shuffled);
        let [left, right, out] = [16, 8 * 16, 4 * 16].map(|num_bytes| session.allocate(num_bytes));
        let (num_rows, num_out, num_in) = (4, 9, 8);
        let [left_stride, out_stride] = [0, 8];
        let (is_out_f32, beta) = (0, 0.0);
        session.multiply(&Product {
            left,
            right,
            out,
            num_rows,
            num_out,
            num_in,
            left_stride,
            out_stride,
            is_out_f32,
            beta,
        });
        session.read(out, &mut [0]);
    }
}
