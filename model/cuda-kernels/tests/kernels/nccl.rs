//! Ranks that join, sum, leave and wait, with a fake NCCL; and graphs with NCCL's operations, on a device.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::thread;
use std::time::Duration;

use baton_cuda::nccl::Nccl;
use baton_cuda::{Allocation, CudaError, Device};
use baton_cuda_emulator::files::cpp_folder;
use baton_cuda_emulator::numbers::{bf16, widened};
use baton_cuda_emulator::test_device;
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::driver::DriverDevice;
use baton_cuda_kernels::driver::graphs::{Graphs, repeat};
use baton_cuda_kernels::driver::nccl::*;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::rows::{self, AddBias};
use baton_model_spec::Rank;
use cudarc::driver::result;
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(600);

/// A fake NCCL (`nccl.cpp` of the emulator).
struct FakeNccl {
    nccl: Nccl,
    path: PathBuf,
    _dir: TempDir,
}

impl FakeNccl {
    fn new() -> FakeNccl {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("libnccl.so.2");
        let source = cpp_folder().join("nccl.cpp");
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-O1", "-Wall", "-shared", "-fPIC"]).arg(source).arg("-o").arg(&path);
        let output = command.output().expect("g++ is there: `cargo xtask setup` installs it");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        FakeNccl { nccl: Nccl::load(Some(&path)).unwrap(), path, _dir: dir }
    }

    /// Communicators that were not aborted.
    fn num_alive(&self) -> i32 {
        // SAFETY: the library is loaded and has this function.
        unsafe {
            let path = std::ffi::CString::new(self.path.to_str().unwrap()).unwrap();
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            let symbol = libc::dlsym(library, c"fake_num_alive".as_ptr());
            assert!(!symbol.is_null());
            std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> i32>(symbol)()
        }
    }

    /// Runs `run` for each rank on a thread of its own, and returns the results.
    fn ranks<T: Send>(&self, num_ranks: usize, run: impl Fn(&NcclGroup, Rank) -> T + Sync) -> Vec<T> {
        let group = NcclGroup::new(self.nccl.clone()).unwrap();
        thread::scope(|scope| {
            let (group, run) = (&group, &run);
            let threads: Vec<_> =
                Rank::all(num_ranks).map(|rank| scope.spawn(move || run(group, rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

fn sum(member: &mut NcclMember, bytes: &mut [u8]) -> Result<(), CudaError> {
    let at = Address(bytes.as_mut_ptr() as u64);
    // SAFETY: the bytes outlive the sum. The fake library has computed it when the call returns.
    unsafe { member.sum(at, bytes.len() / 2, ptr::null_mut()) }
}

#[test]
fn ranks_join_sum_gather_and_broadcast() {
    let fake = FakeNccl::new();
    for num_ranks in [2, 3, 4] {
        // Ranks that are not done notice a rank that leaves early.
        let all_are_done = std::sync::Barrier::new(num_ranks);
        fake.ranks(num_ranks, |group, rank| {
            let mut member = group.join_within(rank, LONG).unwrap();
            for round in 1..5usize {
                let of = |idx: usize| (0..5).map(move |i| ((idx + 1) * round + i) as f32).collect::<Vec<_>>();
                let mut bytes = bf16(&of(rank.idx)).0;
                sum(&mut member, &mut bytes).unwrap();
                let all: Vec<Vec<f32>> = (0..num_ranks).map(of).collect();
                let sums: Vec<f32> = (0..5).map(|i| all.iter().map(|of| of[i]).sum()).collect();
                assert_eq!(widened(&bytes), sums);

                let mut parts = vec![0u64; if rank.is_first() { num_ranks } else { 1 }];
                parts[0] = (rank.idx * 100 + round) as u64;
                let at = Address(parts.as_mut_ptr() as u64);
                // SAFETY: as in `sum`.
                unsafe { member.gather(at, 8, ptr::null_mut()) }.unwrap();
                if rank.is_first() {
                    let expected = (0..num_ranks).map(|idx| (idx * 100 + round) as u64);
                    assert_eq!(parts, expected.collect::<Vec<_>>());
                }

                let mut words = vec![(rank.idx * 1000 + round) as u64; 3];
                let at = Address(words.as_mut_ptr() as u64);
                // SAFETY: as in `sum`.
                unsafe { member.broadcast(at, 24, ptr::null_mut()) }.unwrap();
                assert_eq!(words, [round as u64; 3]);
            }
            assert!(member.check().is_ok());
            all_are_done.wait();
        });
        assert_eq!(fake.num_alive(), 0, "a dropped rank has left");
    }
}

#[test]
fn waiting_for_a_missing_rank_times_out() {
    let fake = FakeNccl::new();
    let outcomes = fake.ranks(3, |group, rank| match rank.idx {
        1 => None,
        _ => group.join_within(rank, Duration::from_millis(20)).err(),
    });
    // One rank times out first. The other times out too, or notices that the first one left.
    let gave_up = |error: &CudaError| error.to_string().contains("the 3 ranks did not all join within 20ms");
    assert!(outcomes.iter().flatten().any(gave_up), "{outcomes:?}");
    let missed = |error: &CudaError| matches!(error, CudaError::RankGone { .. });
    assert!(outcomes.iter().flatten().all(|error| gave_up(error) || missed(error)), "{outcomes:?}");
    assert_eq!((outcomes.iter().flatten().count(), fake.num_alive()), (2, 0));
}

#[test]
fn a_rank_that_leaves_ends_all_waits() {
    let fake = FakeNccl::new();
    for leaving in 0..3 {
        // The rank leaves before it joins, or instead of the second sum.
        for joins in [false, true] {
            let outcomes = fake.ranks(3, |group, rank| {
                if rank.idx == leaving && !joins {
                    group.lose(rank);
                    return Ok(());
                }
                let mut member = group.join_within(rank, LONG)?;
                let mut bytes = bf16(&[1.0; 4]).0;
                sum(&mut member, &mut bytes)?;
                if rank.idx == leaving {
                    return Ok(());
                }
                sum(&mut member, &mut bytes)
            });
            for (idx, outcome) in outcomes.into_iter().enumerate() {
                match (idx == leaving, outcome) {
                    (true, outcome) => outcome.unwrap(),
                    (false, Err(CudaError::RankGone { rank })) => assert_eq!(rank, leaving),
                    (false, other) => panic!("{other:?}"),
                }
            }
            assert_eq!(fake.num_alive(), 0);
        }
    }
}

#[test]
fn a_rank_that_has_left_makes_no_calls() {
    let fake = FakeNccl::new();
    let outcomes = fake.ranks(1, |group, rank| {
        let mut member = group.join_within(rank, LONG).unwrap();
        member.leave();
        sum(&mut member, &mut bf16(&[1.0]).0)
    });
    assert_eq!(outcomes, [Err(CudaError::RankGone { rank: 0 })]);
}

/// Runs of repeated work: the first one queues, the second one captures, the others replay.
const NUM_RUNS: usize = 4;

/// NCCL, and the device that `BATON_KERNELS_ON` names.
fn on_a_device() -> Option<(Nccl, u32)> {
    let place = std::env::var_os("BATON_NCCL");
    let found = test_device::ordinal().map(|ordinal| (Nccl::load(place.as_deref().map(Path::new)), ordinal));
    match found {
        Some((Ok(nccl), ordinal)) => return Some((nccl, ordinal)),
        Some((Err(error), _)) => println!("SKIPPED: {error}"),
        None => println!("SKIPPED: BATON_KERNELS_ON names no device"),
    }
    None
}

/// One rank, which computes alone, and two ranks where there are two devices.
#[test]
fn sums_are_a_part_of_graphs() {
    let Some((nccl, first)) = on_a_device() else { return };
    let num_devices = baton_cuda::num_devices().unwrap() - first as usize;
    for num_ranks in 1..=num_devices.min(2) {
        let group = NcclGroup::new(nccl.clone()).unwrap();
        let all_are_done = std::sync::Barrier::new(num_ranks);
        let run = |rank: Rank| {
            let ordinal = first + rank.idx as u32;
            let sources = [rows::source()];
            let mut device =
                DriverDevice::without_products(ordinal, &sources, test_device::kernel_code()).unwrap();
            device.join(&group, rank).unwrap();
            let x = device.allocate_holding(&bf16(&[1.0; 8]).0).unwrap();
            let bias = device.allocate_holding(bytemuck::cast_slice(&[1.0f32; 8])).unwrap();
            for _ in 0..NUM_RUNS {
                let mut add_and_sum = |device: &mut DriverDevice| {
                    // SAFETY: the numbers and their biases live as long as the device.
                    unsafe {
                        device.launch(&AddBias { x, bias, width: 8, num_rows: 1 })?;
                        device.begin_sum(x, 8)?;
                    }
                    device.end_sums()
                };
                device.repeat(0, &mut add_and_sum).unwrap();
            }
            let mut bytes = [0; 16];
            // SAFETY: these are eight numbers.
            unsafe { device.download(x, &mut bytes) }.unwrap();
            all_are_done.wait();
            let expected = (0..NUM_RUNS).fold(1.0, |x, _| num_ranks as f32 * (x + 1.0));
            assert_eq!(widened(&bytes), [expected; 8], "{num_ranks} ranks");
        };
        let run = &run;
        thread::scope(|scope| {
            Rank::all(num_ranks).for_each(|rank| drop(scope.spawn(move || run(rank))));
        });
    }
}

/// A stream of work that is captured, and its rank.
struct Capturing {
    graphs: Graphs,
    member: NcclMember,
}

/// NCCL does nothing for the sum of one rank. For an exchange of a rank with itself it launches a kernel, from a
/// thread of its own, into the stream that this thread captures.
#[test]
fn what_another_thread_queues_is_a_part_of_a_graph() {
    let Some((nccl, ordinal)) = on_a_device() else { return };
    let device = Device::open(ordinal).unwrap();
    device.bind().unwrap();
    let stream = device.stream().unwrap();
    let [from, to] = [(); 2].map(|()| Allocation::new(&device, 4).unwrap());
    let member = NcclGroup::new(nccl).unwrap().join(Rank::ONLY).unwrap();
    let mut capturing = Capturing { graphs: Graphs::new(&stream), member };
    capturing.graphs.capture_all_threads();
    for run in 1..=NUM_RUNS as u32 {
        let sent = [run];
        // SAFETY: both sides have four bytes, which live until the stream is idle.
        unsafe { result::memcpy_htod_async(from.address(), &sent, stream.cu_stream()) }.unwrap();
        stream.synchronize().unwrap();
        let mut exchange = |capturing: &mut Capturing| {
            let operations = vec![(true, Address(from.address()), 0), (false, Address(to.address()), 0)];
            // SAFETY: as above.
            unsafe { capturing.member.post(operations, 4, stream.cu_stream().cast()) }
        };
        repeat(&mut capturing, |capturing| &mut capturing.graphs, 0, &mut exchange).unwrap();
        let mut received = [0];
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_async(&mut received, to.address(), stream.cu_stream()) }.unwrap();
        stream.synchronize().unwrap();
        assert_eq!(received, sent);
    }
    capturing.graphs.clear();
}
