//! One rank's membership in what NCCL connects: nothing here waits for ever for a rank that is gone.
//!
//! Ranks are threads of one process. NCCL's own calls never wait (the communicator does not block), and who waits looks
//! at three things in turn: NCCL's state, whether another rank has left, and, while all join, the time. Whoever leaves
//! says so in memory that all share, and aborts its communicator, which ends its kernels; the others find out, fail, and
//! abort theirs. No communicator is used by two threads.
//!
//! Not run on a GPU yet. What is checked: against a library that pretends to be NCCL, who is told what, and that nobody
//! is left waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_cuda::CudaError;
use baton_cuda::nccl::{Handle, Nccl, NcclError, Operation, SumType, UniqueId};
use cudarc::nccl::sys::cudaStream_t;

use super::kernel::Address;
use baton_model_spec::Rank;

/// How long all ranks may take to join: NCCL looks for ways between devices, and connects them.
const JOIN_PATIENCE: Duration = Duration::from_secs(120);

/// Between two looks at what takes long.
const PAUSE: Duration = Duration::from_millis(1);

/// `lost` while nobody is.
const NOBODY: usize = usize::MAX;

/// What ranks share to join each other.
#[derive(Clone)]
pub(crate) struct Group {
    nccl: Nccl,
    id: UniqueId,
    /// Who left first.
    lost: Arc<AtomicUsize>,
}

impl Group {
    /// A new one; the ranks join it each on a thread of its own.
    ///
    /// # Errors
    /// When NCCL finds no address to listen on.
    pub(crate) fn new(nccl: Nccl) -> Result<Group, NcclError> {
        Ok(Group { id: nccl.unique_id()?, nccl, lost: Arc::new(AtomicUsize::new(NOBODY)) })
    }

    /// Joins the others, which do the same meanwhile, on the device that the thread is bound to.
    ///
    /// # Errors
    /// When NCCL fails, a rank leaves, or they do not come within two minutes.
    pub(crate) fn join(&self, rank: Rank) -> Result<Membership, CudaError> {
        self.join_within(rank, JOIN_PATIENCE)
    }

    /// Says that a rank will not come, or not any more. The first is remembered.
    pub(crate) fn lose(&self, rank: Rank) {
        let _ = self.lost.compare_exchange(NOBODY, rank.idx, Ordering::AcqRel, Ordering::Acquire);
    }

    fn join_within(&self, rank: Rank, patience: Duration) -> Result<Membership, CudaError> {
        // From here on it leaves when it is dropped.
        let mut membership = Membership { group: self.clone(), rank, handle: None };
        let (num_ranks, idx) = (rank.num_ranks as i32, rank.idx as i32);
        membership.handle = Some(self.nccl.join(&self.id, num_ranks, idx).map_err(failed)?);
        let begun = Instant::now();
        while !membership.is_ready()? {
            if begun.elapsed() >= patience {
                let why = format!("the {num_ranks} ranks have not met within {patience:?}");
                return Err(CudaError::Failed { call: "ncclCommInitRankConfig", why });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(membership)
    }
}

fn failed(error: NcclError) -> CudaError {
    match error {
        NcclError::Failed { call, why } => CudaError::Failed { call, why },
        NcclError::Absent(why) => CudaError::Failed { call: "dlopen", why },
    }
}

/// One rank's, until it leaves; dropped, it does.
pub(crate) struct Membership {
    group: Group,
    rank: Rank,
    /// Until it is aborted.
    handle: Option<Handle>,
}

impl Membership {
    /// Posts the sum over ranks of `len` numbers in bf16.
    ///
    /// # Errors
    /// When NCCL fails, or another rank is gone.
    ///
    /// # Safety
    /// The stream is alive, and the numbers are there until the sum is done or the membership ended.
    pub(crate) unsafe fn sum(
        &mut self,
        numbers: Address,
        len: usize,
        stream: cudaStream_t,
    ) -> Result<(), CudaError> {
        self.check()?;
        let nccl = self.group.nccl.clone();
        // SAFETY: by the caller's word.
        unsafe { nccl.all_reduce_sum(self.handle()?, numbers.0, len, SumType::Bf16, stream) }
            .map_err(failed)?;
        self.settle()
    }

    /// Posts that the first rank gets `len_bytes` of each, behind its own, which are there.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    ///
    /// # Safety
    /// Likewise.
    pub(crate) unsafe fn gather(
        &mut self,
        at: Address,
        len_bytes: usize,
        stream: cudaStream_t,
    ) -> Result<(), CudaError> {
        let others = 1..self.rank.num_ranks;
        let operations = match self.rank.is_first() {
            true => others.map(|idx| (false, at.add(idx * len_bytes), idx)).collect(),
            false => vec![(true, at, 0)],
        };
        // SAFETY: by the caller's word.
        unsafe { self.post(operations, len_bytes, stream) }
    }

    /// Posts that the others get `len_bytes` of the first rank.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    ///
    /// # Safety
    /// Likewise.
    pub(crate) unsafe fn hand_on(
        &mut self,
        at: Address,
        len_bytes: usize,
        stream: cudaStream_t,
    ) -> Result<(), CudaError> {
        let others = 1..self.rank.num_ranks;
        let operations = match self.rank.is_first() {
            true => others.map(|idx| (true, at, idx)).collect(),
            false => vec![(false, at, 0)],
        };
        // SAFETY: by the caller's word.
        unsafe { self.post(operations, len_bytes, stream) }
    }

    /// Sends, or else receives, as many bytes each, from or to where they are, to or from a rank; at once.
    unsafe fn post(
        &mut self,
        operations: Vec<(bool, Address, usize)>,
        len: usize,
        stream: cudaStream_t,
    ) -> Result<(), CudaError> {
        self.check()?;
        let operations = operations.into_iter().map(|(is_send, at, peer)| {
            let (address, peer) = (at.0, peer as i32);
            Operation { is_send, address, len, peer }
        });
        let nccl = self.group.nccl.clone();
        // SAFETY: by the caller's word.
        unsafe { nccl.post(self.handle()?, operations, stream) }.map_err(failed)?;
        self.settle()
    }

    /// Whether nothing speaks against waiting on: for who waits for a device that waits for the other ranks.
    ///
    /// # Errors
    /// When NCCL fails, or another rank is gone.
    pub(crate) fn check(&mut self) -> Result<(), CudaError> {
        self.is_ready().map(drop)
    }

    /// The same, of the other ranks alone, which takes no call of NCCL's.
    pub(crate) fn check_others(&self) -> Result<(), CudaError> {
        match self.group.lost.load(Ordering::Acquire) {
            NOBODY => Ok(()),
            rank => Err(CudaError::RankGone { rank }),
        }
    }

    /// Ends it: kernels that wait for other ranks end, and the other ranks are told. Graphs that have its operations are
    /// gone before.
    pub(crate) fn leave(&mut self) {
        self.group.lose(self.rank);
        let Some(handle) = self.handle.take() else { return };
        if let Err(error) = self.group.nccl.abort(handle) {
            tracing::warn!(%error, rank = self.rank.idx, "a rank does not leave the others");
        }
    }

    /// Waits until NCCL has taken what was posted: while ways between devices are connected at their first use, that takes
    /// the other ranks.
    fn settle(&mut self) -> Result<(), CudaError> {
        while !self.is_ready()? {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn is_ready(&mut self) -> Result<bool, CudaError> {
        self.check_others()?;
        let nccl = self.group.nccl.clone();
        nccl.is_ready(self.handle()?).map_err(failed)
    }

    fn handle(&mut self) -> Result<&mut Handle, CudaError> {
        let left = || CudaError::Failed { call: "nccl", why: "this rank has left".to_owned() };
        self.handle.as_mut().ok_or_else(left)
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;
    use std::ptr;
    use std::thread;

    use tempfile::TempDir;

    use super::*;
    use crate::cuda::testing::{bf16, widened};

    const LONG: Duration = Duration::from_secs(600);

    /// A library that pretends to be NCCL (`emulator/nccl.cpp`).
    struct Pretended {
        nccl: Nccl,
        path: PathBuf,
        _dir: TempDir,
    }

    impl Pretended {
        fn new() -> Pretended {
            let dir = TempDir::new().unwrap();
            let path = dir.path().join("libnccl.so.2");
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/emulator/nccl.cpp");
            let mut command = Command::new("g++");
            command.args(["-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", source, "-o"]).arg(&path);
            let output = command.output().expect("g++ is there: `cargo xtask setup` installs it");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Pretended { nccl: Nccl::load(Some(&path)).unwrap(), path, _dir: dir }
        }

        /// Communicators that were not aborted.
        fn num_alive(&self) -> i32 {
            // SAFETY: the library is loaded, and has this function.
            unsafe {
                let path = std::ffi::CString::new(self.path.to_str().unwrap()).unwrap();
                let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
                let symbol = libc::dlsym(library, c"pretended_num_alive".as_ptr());
                assert!(!symbol.is_null());
                std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> i32>(symbol)()
            }
        }

        /// What each of so many ranks, on a thread of its own, makes of the group.
        fn ranks<T: Send>(&self, num_ranks: usize, run: impl Fn(&Group, Rank) -> T + Sync) -> Vec<T> {
            let group = Group::new(self.nccl.clone()).unwrap();
            thread::scope(|scope| {
                let (group, run) = (&group, &run);
                let threads: Vec<_> =
                    Rank::all(num_ranks).map(|rank| scope.spawn(move || run(group, rank))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            })
        }
    }

    fn sum(membership: &mut Membership, bytes: &mut [u8]) -> Result<(), CudaError> {
        let at = Address(bytes.as_mut_ptr() as u64);
        // SAFETY: there until the sum is done, which the pretended library is when it is settled.
        unsafe { membership.sum(at, bytes.len() / 2, ptr::null_mut()) }
    }

    #[test]
    fn ranks_join_sum_up_gather_and_hand_on() {
        let pretended = Pretended::new();
        for num_ranks in [2, 3, 4] {
            // Whoever leaves first would be missed by who is not done.
            let all_are_done = std::sync::Barrier::new(num_ranks);
            pretended.ranks(num_ranks, |group, rank| {
                let mut membership = group.join_within(rank, LONG).unwrap();
                for round in 1..5usize {
                    let of =
                        |idx: usize| (0..5).map(move |i| ((idx + 1) * round + i) as f32).collect::<Vec<_>>();
                    let mut bytes = bf16(&of(rank.idx)).0;
                    sum(&mut membership, &mut bytes).unwrap();
                    let all: Vec<Vec<f32>> = (0..num_ranks).map(of).collect();
                    let sums: Vec<f32> = (0..5).map(|i| all.iter().map(|of| of[i]).sum()).collect();
                    assert_eq!(widened(&bytes), sums);

                    let mut parts = vec![0u64; if rank.is_first() { num_ranks } else { 1 }];
                    parts[0] = (rank.idx * 100 + round) as u64;
                    let at = Address(parts.as_mut_ptr() as u64);
                    // SAFETY: as in `sum`.
                    unsafe { membership.gather(at, 8, ptr::null_mut()) }.unwrap();
                    if rank.is_first() {
                        let expected = (0..num_ranks).map(|idx| (idx * 100 + round) as u64);
                        assert_eq!(parts, expected.collect::<Vec<_>>());
                    }

                    let mut words = vec![(rank.idx * 1000 + round) as u64; 3];
                    let at = Address(words.as_mut_ptr() as u64);
                    // SAFETY: as in `sum`.
                    unsafe { membership.hand_on(at, 24, ptr::null_mut()) }.unwrap();
                    assert_eq!(words, [round as u64; 3]);
                }
                assert!(membership.check().is_ok());
                all_are_done.wait();
            });
            assert_eq!(pretended.num_alive(), 0, "whoever is dropped has left");
        }
    }

    #[test]
    fn who_waits_for_a_rank_that_does_not_join_waits_so_long() {
        let pretended = Pretended::new();
        let outcomes = pretended.ranks(3, |group, rank| match rank.idx {
            1 => None,
            _ => group.join_within(rank, Duration::from_millis(20)).err(),
        });
        // One gives up first, and the other misses it, or gives up, too.
        let gave_up = |error: &CudaError| error.to_string().contains("the 3 ranks have not met within 20ms");
        assert!(outcomes.iter().flatten().any(gave_up), "{outcomes:?}");
        let missed = |error: &CudaError| matches!(error, CudaError::RankGone { .. });
        assert!(outcomes.iter().flatten().all(|error| gave_up(error) || missed(error)), "{outcomes:?}");
        assert_eq!((outcomes.iter().flatten().count(), pretended.num_alive()), (2, 0));
    }

    #[test]
    fn whoever_leaves_ends_the_waiting_of_all() {
        let pretended = Pretended::new();
        for leaving in 0..3 {
            // Before it joins, and instead of the second sum.
            for joins in [false, true] {
                let outcomes = pretended.ranks(3, |group, rank| {
                    if rank.idx == leaving && !joins {
                        group.lose(rank);
                        return Ok(());
                    }
                    let mut membership = group.join_within(rank, LONG)?;
                    let mut bytes = bf16(&[1.0; 4]).0;
                    sum(&mut membership, &mut bytes)?;
                    if rank.idx == leaving {
                        return Ok(());
                    }
                    sum(&mut membership, &mut bytes)
                });
                for (idx, outcome) in outcomes.into_iter().enumerate() {
                    match (idx == leaving, outcome) {
                        (true, outcome) => outcome.unwrap(),
                        (false, Err(CudaError::RankGone { rank })) => assert_eq!(rank, leaving),
                        (false, other) => panic!("{other:?}"),
                    }
                }
                assert_eq!(pretended.num_alive(), 0);
            }
        }
    }

    #[test]
    fn a_rank_that_has_left_asks_for_nothing() {
        let pretended = Pretended::new();
        let outcomes = pretended.ranks(1, |group, rank| {
            let mut membership = group.join_within(rank, LONG).unwrap();
            membership.leave();
            sum(&mut membership, &mut bf16(&[1.0]).0)
        });
        assert_eq!(outcomes, [Err(CudaError::RankGone { rank: 0 })]);
    }
}
