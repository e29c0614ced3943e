//! The forward pass on processors: kernels, the threads that run them, and the executor.

mod affinity;
mod attention;
pub mod benchmark;
mod experts;
mod fastest;
mod forward;
mod kv;
mod memory;
mod model;
mod parallel;
mod peaks;
mod pool;
mod products;
mod rope;
mod rows;
mod simd;

pub use affinity::{CpuList, CpuListError};
use fastest::multiplies_bf16;
pub use forward::CpuExecutor;
pub use model::{CpuModel, load, load_ranks};
pub use parallel::ParallelCpuExecutor;
pub use pool::ThreadPool;
pub(crate) use products::{PANEL, PanelFormat, PanelsRef, RowOrder, pack_floats, pack_integers};

use memory::Aligned;
use simd::Isa;
use std::sync::Arc;

/// What every operation needs: the instruction set, threads, and memory for each thread.
pub(crate) struct Cpu {
    isa: Isa,
    pool: Arc<ThreadPool>,
    scratch: Scratch,
    /// Rows of a product's left side, as its kernel reads them.
    packed: Aligned,
    /// What several threads found about the same rows.
    partials: Aligned,
}

impl Cpu {
    /// With threads of its own.
    fn new(isa: Isa, num_threads: usize) -> std::io::Result<Cpu> {
        Ok(Cpu::on(Arc::new(ThreadPool::new(num_threads)?), isa))
    }

    fn on(pool: Arc<ThreadPool>, isa: Isa) -> Cpu {
        Cpu {
            isa,
            pool,
            scratch: Scratch::default(),
            packed: Aligned::default(),
            partials: Aligned::default(),
        }
    }

    /// Calls `work` for every row, on several threads when there is enough to do.
    fn for_rows(&mut self, num_rows: usize, elements_per_row: usize, work: impl Fn(usize) + Sync) {
        const ELEMENTS_PER_ITEM: usize = 16 * 1024;
        let rows_per_item = (ELEMENTS_PER_ITEM / elements_per_row.max(1)).max(1);
        let num_items = num_rows.div_ceil(rows_per_item);
        self.pool.for_each(num_items, |_, item_idx| {
            let first = item_idx * rows_per_item;
            (first..num_rows.min(first + rows_per_item)).for_each(&work);
        });
    }
}

/// A pointer that items of work write disjoint parts through.
#[derive(Clone, Copy)]
struct SharedMut<T>(*mut T);

// SAFETY: whoever makes one sees to it that its users' parts are disjoint.
unsafe impl<T> Sync for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T> Send for SharedMut<T> {}

impl<T> SharedMut<T> {
    fn new(slice: &mut [T]) -> SharedMut<T> {
        SharedMut(slice.as_mut_ptr())
    }

    fn ptr(&self) -> *mut T {
        self.0
    }
}

/// Memory of the threads, used by one operation at a time.
#[derive(Default)]
struct Scratch {
    memory: Aligned,
}

/// One operation's view of it.
#[derive(Clone, Copy)]
struct ThreadScratch {
    memory: SharedMut<f32>,
    stride: usize,
}

impl Scratch {
    /// At least `len` elements, with any contents, for each of `num_threads`.
    fn reserve(&mut self, num_threads: usize, len: usize) -> ThreadScratch {
        let stride = len.next_multiple_of(16);
        let memory = SharedMut::new(self.memory.grown(stride * num_threads));
        ThreadScratch { memory, stride }
    }
}

impl ThreadScratch {
    /// The part of one thread.
    fn of(&self, thread_idx: usize) -> *mut f32 {
        // SAFETY: `reserve` made room for every thread.
        unsafe { self.memory.ptr().add(thread_idx * self.stride) }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::simd::Dtype;

    /// The bytes that hold `values` in `dtype`, and what they widen to.
    pub(crate) fn store(dtype: Dtype, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = Vec::new();
        let mut widened = Vec::new();
        for &value in values {
            match dtype {
                Dtype::F32 => {
                    bytes.extend(value.to_le_bytes());
                    widened.push(value);
                }
                Dtype::F16 => {
                    let value = half::f16::from_f32(value);
                    bytes.extend(value.to_le_bytes());
                    widened.push(value.to_f32());
                }
                Dtype::Bf16 => {
                    let value = half::bf16::from_f32(value);
                    bytes.extend(value.to_le_bytes());
                    widened.push(value.to_f32());
                }
            }
        }
        (bytes, widened)
    }
}
