//! One rank of an NCCL group. No call here waits forever for a rank that is gone.
//!
//! Ranks are threads of one process. The communicator is non-blocking, so NCCL's calls return at once. A waiting rank
//! polls NCCL's state and the shared record of lost ranks, and, while the group forms, the clock. A rank that leaves
//! sets the shared record and aborts its communicator, which ends its kernels. The other ranks notice, fail, and
//! abort theirs. Each communicator is used by one thread.
//!
//! Groups of one rank have run on a GPU, several have not. The tests use a fake NCCL and check the error of each rank, and that no rank waits
//! forever.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_cuda::CudaError;
use baton_cuda::nccl::{Handle, Nccl, NcclError, Operation, SumType, UniqueId};
use baton_model_spec::Rank;
use cudarc::nccl::sys::cudaStream_t;

use crate::kernel::Address;

/// Time limit for all ranks to join. NCCL discovers and connects the links between devices meanwhile.
const JOIN_PATIENCE: Duration = Duration::from_secs(120);

/// Time between two polls of a slow operation.
const PAUSE: Duration = Duration::from_millis(1);

/// Value of `lost` while all ranks are there.
const NO_RANK: usize = usize::MAX;

/// The state that the ranks of a group share.
#[derive(Clone)]
pub struct NcclGroup {
    nccl: Nccl,
    id: UniqueId,
    /// The first rank that left.
    lost: Arc<AtomicUsize>,
}

impl NcclGroup {
    /// Creates a group. Each rank joins it on a thread of its own.
    ///
    /// # Errors
    /// When NCCL finds no address to listen on.
    pub fn new(nccl: Nccl) -> Result<NcclGroup, NcclError> {
        Ok(NcclGroup { id: nccl.unique_id()?, nccl, lost: Arc::new(AtomicUsize::new(NO_RANK)) })
    }

    /// Joins the other ranks, which call this concurrently. Uses the device that is bound to the thread.
    ///
    /// # Errors
    /// When NCCL fails, a rank leaves, or the ranks do not all join within two minutes.
    pub fn join(&self, rank: Rank) -> Result<NcclMember, CudaError> {
        self.join_within(rank, JOIN_PATIENCE)
    }

    /// Records that a rank is lost. Only the first lost rank is kept.
    pub fn lose(&self, rank: Rank) {
        let _ = self.lost.compare_exchange(NO_RANK, rank.idx, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Like [`join`](Self::join), with another time limit.
    ///
    /// # Errors
    /// As for [`join`](Self::join).
    pub fn join_within(&self, rank: Rank, patience: Duration) -> Result<NcclMember, CudaError> {
        // From here on, dropping the member leaves the group.
        let mut member = NcclMember { group: self.clone(), rank, handle: None };
        let (num_ranks, idx) = (rank.num_ranks as i32, rank.idx as i32);
        member.handle = Some(self.nccl.join(&self.id, num_ranks, idx).map_err(failed)?);
        let begun = Instant::now();
        while !member.is_ready()? {
            if begun.elapsed() >= patience {
                let why = format!("the {num_ranks} ranks did not all join within {patience:?}");
                return Err(CudaError::Failed { call: "ncclCommInitRankConfig", why });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(member)
    }
}

fn failed(error: NcclError) -> CudaError {
    match error {
        NcclError::Failed { call, why } => CudaError::Failed { call, why },
        NcclError::Absent(why) => CudaError::Failed { call: "dlopen", why },
    }
}

/// One rank of a group. Dropping it leaves the group.
pub struct NcclMember {
    group: NcclGroup,
    rank: Rank,
    /// `None` once the communicator is aborted.
    handle: Option<Handle>,
}

impl NcclMember {
    /// Queues the sum of `len` bf16 numbers over the ranks.
    ///
    /// # Errors
    /// When NCCL fails, or another rank is gone.
    ///
    /// # Safety
    /// The stream is alive. The numbers are valid until the sum is done or the member has left.
    pub unsafe fn sum(
        &mut self,
        numbers: Address,
        len: usize,
        stream: cudaStream_t,
    ) -> Result<(), CudaError> {
        self.check()?;
        let nccl = self.group.nccl.clone();
        // SAFETY: the caller guarantees it.
        unsafe { nccl.all_reduce_sum(self.handle()?, numbers.0, len, SumType::Bf16, stream) }
            .map_err(failed)?;
        self.settle()
    }

    /// Queues copies of `len_bytes` bytes of each rank to the first rank, in the order of the ranks. The first rank's
    /// bytes are already in place.
    ///
    /// # Errors
    /// As for [`sum`](Self::sum).
    ///
    /// # Safety
    /// As for [`sum`](Self::sum).
    pub unsafe fn gather(
        &mut self,
        at: Address,
        len_bytes: usize,
        stream: cudaStream_t,
    ) -> Result<(), CudaError> {
        let others = 1..self.rank.num_ranks;
        let operations = match self.rank.is_first() {
            true => others.map(|idx| (false, at.offset_by(idx * len_bytes), idx)).collect(),
            false => vec![(true, at, 0)],
        };
        // SAFETY: the caller guarantees it.
        unsafe { self.post(operations, len_bytes, stream) }
    }

    /// Queues copies of `len_bytes` bytes of the first rank to all others.
    ///
    /// # Errors
    /// As for [`sum`](Self::sum).
    ///
    /// # Safety
    /// As for [`sum`](Self::sum).
    pub unsafe fn broadcast(
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
        // SAFETY: the caller guarantees it.
        unsafe { self.post(operations, len_bytes, stream) }
    }

    /// Queues sends and receives of `len` bytes as one NCCL group. Each operation is (is it a send, address, peer
    /// rank).
    ///
    /// # Errors
    /// As for [`sum`](Self::sum).
    ///
    /// # Safety
    /// As for [`sum`](Self::sum).
    pub unsafe fn post(
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
        // SAFETY: the caller guarantees it.
        unsafe { nccl.post(self.handle()?, operations, stream) }.map_err(failed)?;
        self.settle()
    }

    /// Checks that waiting still makes sense. For a caller that waits for a device which waits for other ranks.
    ///
    /// # Errors
    /// When NCCL fails, or another rank is gone.
    pub fn check(&mut self) -> Result<(), CudaError> {
        self.is_ready().map(drop)
    }

    /// Like [`check`](Self::check), but only for the other ranks and without a call to NCCL.
    pub fn check_others(&self) -> Result<(), CudaError> {
        match self.group.lost.load(Ordering::Acquire) {
            NO_RANK => Ok(()),
            rank => Err(CudaError::RankGone { rank }),
        }
    }

    /// Leaves the group: kernels that wait for other ranks end, and the other ranks notice. Graphs with the
    /// communicator's operations must be destroyed before.
    pub fn leave(&mut self) {
        self.group.lose(self.rank);
        let Some(handle) = self.handle.take() else { return };
        if let Err(error) = self.group.nccl.abort(handle) {
            tracing::warn!(%error, rank = self.rank.idx, "the NCCL communicator of a rank could not be aborted");
        }
    }

    /// Waits until NCCL has queued the last operation. A thread of NCCL does that, so what this thread queues next
    /// would come before it, and a capture would end without it. The first operation on a link connects it, which
    /// needs the other ranks.
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
