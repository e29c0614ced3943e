//! Flaws that the emulator must find in kernels: `flaws.cu` has one kernel for each.

use std::panic::{AssertUnwindSafe, catch_unwind};

use baton_cuda_emulator::session::{Session, Threads};
use baton_cuda_kernels::kernel::{Address, Kernel, KernelSource, LaunchShape};

/// The arguments of every kernel of the file.
#[derive(Clone, Copy)]
#[repr(C)]
struct Flawed {
    memory: Address,
}

/// One kernel each, by name.
macro_rules! kernels {
    ($($kernel:ident = $name:literal,)*) => {$(
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        struct $kernel(Flawed);

        // SAFETY: the field is that of `Flawed` in the kernel file.
        unsafe impl Kernel for $kernel {
            const NAME: &'static str = $name;

            fn shape(&self) -> LaunchShape {
                LaunchShape { grid: [3, 1, 1], threads: 32, shared_bytes: 1024 }
            }
        }
    )*};
}

kernels! {
    WritesOverPendingCopies = "writes_over_pending_copies",
    ReadsPendingCopies = "reads_pending_copies",
    CopiesOverPendingCopies = "copies_over_pending_copies",
    LeavesCopiesPending = "leaves_copies_pending",
    LeavesSharedMemory = "leaves_shared_memory",
    MisalignsTiles = "misaligns_tiles",
    EndsInAPhase = "ends_in_a_phase",
    ComesTwiceToAPhase = "comes_twice_to_a_phase",
    DependsOnTheOrderOfBlocks = "depends_on_the_order_of_blocks",
    AddsWithFences = "adds_with_fences",
    AddsWithoutFences = "adds_without_fences",
    AddsWithoutFenceBeforeCount = "adds_without_fence_before_count",
    AddsWithoutFenceAfterCount = "adds_without_fence_after_count",
    AddsWithFenceBeforeBarrier = "adds_with_fence_before_barrier",
    EndsBeforeItsWait = "ends_before_its_wait",
}

/// The arguments of a kernel of a warpgroup.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct MultipliesWithoutBegin(Flawed);

// SAFETY: the field is that of `Flawed` in the kernel file.
unsafe impl Kernel for MultipliesWithoutBegin {
    const NAME: &'static str = "multiplies_without_begin";

    fn shape(&self) -> LaunchShape {
        LaunchShape { grid: [1, 1, 1], threads: 128, shared_bytes: 128 * 128 }
    }
}

/// Runs a kernel. The result is the message of the emulator if it finds a flaw.
fn run<K: Kernel>(kernel: impl FnOnce(Flawed) -> K) -> Result<(), String> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/flaws/flaws.cu");
    let mut session = Session::new(&[KernelSource { file, defines: vec![] }], Threads::Compared);
    let memory = session.allocate(1024);
    session.write(memory, &[0; 1024]);
    let done = catch_unwind(AssertUnwindSafe(|| {
        session.launch(&kernel(Flawed { memory }));
        session.read(memory, &mut [0; 1024]);
    }));
    done.map_err(|payload| *payload.downcast::<String>().expect("a message"))
}

/// The message names all of these.
fn check<K: Kernel>(kernel: impl FnOnce(Flawed) -> K, named: &[&str]) {
    let message = run(kernel).expect_err("a flaw");
    for name in [&[K::NAME], named].concat() {
        assert!(message.contains(name), "{name:?} is missing: {message}");
    }
}

#[test]
fn accesses_under_pending_copies_are_found() {
    // The place of the copy and the place of the access.
    check(WritesOverPendingCopies, &["the copy of flaws.cu:13 by thread", "is pending", "flaws.cu:18"]);
    check(ReadsPendingCopies, &["the copy of flaws.cu:23 by thread", "is pending", "flaws.cu:26"]);
    check(CopiesOverPendingCopies, &["flaws.cu:31", "the pending copy of flaws.cu:31"]);
    assert_eq!(run(LeavesCopiesPending), Ok(()));
}

#[test]
fn accesses_beyond_shared_memory_are_found() {
    check(LeavesSharedMemory, &["a thread leaves its memory", "flaws.cu:44"]);
}

#[test]
fn tiles_without_their_alignment_are_found() {
    check(MisalignsTiles, &["a matrix is not aligned to 1024 bytes"]);
}

#[test]
fn products_without_their_fence_are_found() {
    check(MultipliesWithoutBegin, &["a product begins without begin_products since the last wait"]);
}

/// Each fence of the merge in `attention_decode.cu` is needed, after the barrier.
#[test]
fn missing_fences_between_blocks_are_found() {
    assert_eq!(run(AddsWithFences), Ok(()));
    let message = "a block reads what another one stored, without fences between them";
    check(AddsWithoutFences, &[message]);
    check(AddsWithoutFenceBeforeCount, &[message]);
    check(AddsWithoutFenceAfterCount, &[message]);
    check(AddsWithFenceBeforeBarrier, &[message]);
}

#[test]
fn unbalanced_barriers_are_found() {
    check(EndsInAPhase, &["the block ends in the middle of a phase of a barrier"]);
    check(ComesTwiceToAPhase, &["a thread comes twice to a phase of barrier 1"]);
}

#[test]
fn a_kernel_that_never_waits_for_the_one_ahead_is_found() {
    check(EndsBeforeItsWait, &["a thread ends without a wait for the kernel ahead"]);
}

#[test]
fn results_that_depend_on_the_order_of_blocks_are_found() {
    check(DependsOnTheOrderOfBlocks, &["the result depends on the order of blocks or threads"]);
}
