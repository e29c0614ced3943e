//! Decoding does not allocate: the first step allocates all memory that it needs.
//!
//! Runs without the test harness, whose thread allocates at any time and would be counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_kv_cache::{BlockId, BlockStorage};
use baton_model::{
    Backend, Batch, BatchSequence, Executor, LoadOptions, ParallelCpuExecutor, ThreadPool, load, load_ranks,
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NUM_THREADS: usize = 2;
const NUM_STEPS: usize = 40;

fn main() {
    decode_steps_do_not_allocate();
    println!("decode_steps_do_not_allocate ... ok");
}

fn decode_steps_do_not_allocate() {
    for name in ["llama", "gemma3", "qwen3-moe"] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures").join(name);
        let options = LoadOptions { threads: Some(NUM_THREADS), ..LoadOptions::default() };
        let model = load(&dir, Backend::Cpu, &options, &mut |_| {}).unwrap();
        let ranks = load_ranks(&dir, Backend::Cpu, NUM_THREADS, &options, &mut |_| {}).unwrap();
        let pool = || Arc::new(ThreadPool::new(1).unwrap());
        let ranks = ranks.into_iter().map(|rank| (rank.into_cpu(), pool())).collect();
        count(name, &mut model.cpu_executor().unwrap());
        count(name, &mut ParallelCpuExecutor::new(ranks).unwrap());
    }
}

fn count(name: &str, executor: &mut dyn Executor) {
    let storage = BlockStorage::new(executor.kv_layout(), 16).unwrap();
    let blocks: Vec<BlockId> = (0..16).map(BlockId).collect();
    let mut num_later = 0;
    for step in 0..NUM_STEPS {
        // The token selects the experts: the first step uses the largest buffers.
        let tokens = if step == 0 { vec![7; 64] } else { vec![step as u32 + 10] };
        let sequences = [0, 8].map(|first| BatchSequence {
            tokens: &tokens,
            start_idx: if step == 0 { 0 } else { 63 + step },
            blocks: &blocks[first..],
            num_logits: 1,
        });
        let batch = Batch { sequences: sequences[..if step == 0 { 1 } else { 2 }].to_vec() };
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        // SAFETY: no other code uses the storage.
        unsafe { executor.execute(&batch, &storage, &mut |_| {}).unwrap() };
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        if step > 1 {
            num_later += allocations;
        }
    }
    // The standard library may allocate once at a thread's first sleep, whenever that is.
    assert!(num_later <= NUM_THREADS, "{name}: {num_later} allocations in {NUM_STEPS} steps");
}
