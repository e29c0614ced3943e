//! The context of every operation: the instruction set, the threads, and memory for each thread.

use std::sync::Arc;

use baton_cpu_threads::{Aligned, ComputeScratch, ThreadPool};

use baton_cpu_simd::Isa;

/// The context of every operation: an instruction set that this CPU has, the threads, and memory for each thread.
pub struct Cpu {
    pub(crate) isa: Isa,
    pub(crate) pool: Arc<ThreadPool>,
    pub(crate) scratch: ComputeScratch,
    /// Left-side rows of a product, packed for its kernel.
    pub(crate) packed: Aligned,
    /// Partial results of several threads for the same rows.
    partials: Aligned,
}

impl Cpu {
    /// A context with its own threads.
    ///
    /// # Errors
    /// When threads cannot be started.
    ///
    /// # Panics
    /// As [`on`](Self::on).
    pub fn new(isa: Isa, num_threads: usize) -> std::io::Result<Cpu> {
        Ok(Cpu::on(Arc::new(ThreadPool::new(num_threads)?), isa))
    }

    /// A context on a shared thread pool.
    ///
    /// # Panics
    /// When this CPU does not have `isa`. Kernels rely on it.
    pub fn on(pool: Arc<ThreadPool>, isa: Isa) -> Cpu {
        assert!(isa.is_available(), "this CPU does not have {}", isa.name());
        Cpu {
            isa,
            pool,
            scratch: ComputeScratch::default(),
            packed: Aligned::default(),
            partials: Aligned::default(),
        }
    }

    /// The instruction set of the kernels.
    #[inline]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The threads.
    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    /// What an operation uses: the instruction set, the threads, their memory, and memory for partial results of several
    /// threads.
    pub fn parts(&mut self) -> (Isa, &ThreadPool, &mut ComputeScratch, &mut Aligned) {
        (self.isa, &self.pool, &mut self.scratch, &mut self.partials)
    }

    /// Calls `work` for every row, on several threads if there is enough work.
    pub fn for_rows(&self, num_rows: usize, elements_per_row: usize, work: impl Fn(usize) + Sync) {
        const ELEMENTS_PER_ITEM: usize = 16 * 1024;
        let rows_per_item = (ELEMENTS_PER_ITEM / elements_per_row.max(1)).max(1);
        let num_items = num_rows.div_ceil(rows_per_item);
        self.pool.for_each(num_items, |_, item_idx| {
            let first = item_idx * rows_per_item;
            (first..num_rows.min(first + rows_per_item)).for_each(&work);
        });
    }
}
