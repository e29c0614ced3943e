//! One rank's membership in what NCCL connects: nothing here waits for ever for a rank that is gone.
//!
//! Ranks are threads of one process. NCCL's own calls never wait (the communicator does not block), and who waits looks
//! at three things in turn: NCCL's state, whether another rank has left, and, while all join, the time. A rank that leaves
//! says so in memory that all share, and aborts its communicator, which ends its kernels; the others find out, fail, and
//! abort theirs. No communicator is used by two threads.
//!
//! Not run on a GPU yet. What is checked: against a fake NCCL, which rank is told what, and that none
//! is left waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_cuda::CudaError;
use baton_cuda::nccl::{Handle, Nccl, NcclError, Operation, SumType, UniqueId};
use baton_model_spec::Rank;
use cudarc::nccl::sys::cudaStream_t;

use crate::kernel::Address;

/// How long all ranks may take to join: NCCL looks for ways between devices, and connects them.
const JOIN_PATIENCE: Duration = Duration::from_secs(120);

/// Between two looks at what takes long.
const PAUSE: Duration = Duration::from_millis(1);

/// `lost` while none is.
const NO_RANK: usize = usize::MAX;

/// What ranks share to join each other.
#[derive(Clone)]
pub struct NcclGroup {
    nccl: Nccl,
    id: UniqueId,
    /// Who left first.
    lost: Arc<AtomicUsize>,
}

impl NcclGroup {
    /// A new one; the ranks join it each on a thread of its own.
    ///
    /// # Errors
    /// When NCCL finds no address to listen on.
    pub fn new(nccl: Nccl) -> Result<NcclGroup, NcclError> {
        Ok(NcclGroup { id: nccl.unique_id()?, nccl, lost: Arc::new(AtomicUsize::new(NO_RANK)) })
    }

    /// Joins the others, which do the same meanwhile, on the device that the thread is bound to.
    ///
    /// # Errors
    /// When NCCL fails, a rank leaves, or they do not come within two minutes.
    pub fn join(&self, rank: Rank) -> Result<NcclMember, CudaError> {
        self.join_within(rank, JOIN_PATIENCE)
    }

    /// Says that a rank will not come, or not any more. The first is remembered.
    pub fn lose(&self, rank: Rank) {
        let _ = self.lost.compare_exchange(NO_RANK, rank.idx, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The same, with less patience.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_within(&self, rank: Rank, patience: Duration) -> Result<NcclMember, CudaError> {
        // From here on it leaves when it is dropped.
        let mut membership = NcclMember { group: self.clone(), rank, handle: None };
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
pub struct NcclMember {
    group: NcclGroup,
    rank: Rank,
    /// Until it is aborted.
    handle: Option<Handle>,
}

impl NcclMember {
    /// Posts the sum over ranks of `len` numbers in bf16.
    ///
    /// # Errors
    /// When NCCL fails, or another rank is gone.
    ///
    /// # Safety
    /// The stream is alive, and the numbers are there until the sum is done or the membership ended.
    pub unsafe fn sum(
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
    pub unsafe fn gather(
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
    pub unsafe fn hand_on(
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
    pub fn check(&mut self) -> Result<(), CudaError> {
        self.is_ready().map(drop)
    }

    /// The same, of the other ranks alone, which takes no call of NCCL's.
    pub fn check_others(&self) -> Result<(), CudaError> {
        match self.group.lost.load(Ordering::Acquire) {
            NO_RANK => Ok(()),
            rank => Err(CudaError::RankGone { rank }),
        }
    }

    /// Ends it: kernels that wait for other ranks end, and the other ranks are told. Graphs that have its operations are
    /// gone before.
    pub fn leave(&mut self) {
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

impl Drop for NcclMember {
    fn drop(&mut self) {
        self.leave();
    }
}
