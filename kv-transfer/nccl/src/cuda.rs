//! NCCL on a CUDA device.
//!
//! A group starts in two steps. The communicator does not block, so NCCL launches the kernels from a thread of its own.
//! When NCCL reports the launch, an event is recorded behind the kernels on the communicator's stream. The event tells
//! when they are done. Only [`NcclCommunicator::abort`] waits.

use std::{
    collections::VecDeque,
    io,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use baton_cuda::nccl::{Handle, Nccl, Operation};
use baton_kv_cache::{BlockId, BlockStorage};
use baton_transfer::cuda::{CudaError, Device, HostRegistration, failed};
use cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::fabric::{
    Fabric, FabricError, NcclCommunicator, NcclRank, Place, ReachableMemory, TransferDirection, UniqueId,
};

/// What NCCL needs: its library, and the device of `storage`, or the first one for blocks in host memory.
///
/// # Errors
/// What is missing.
pub(super) fn start(library: Option<&Path>, storage: &BlockStorage) -> io::Result<Arc<dyn Fabric>> {
    Ok(Arc::new(CudaFabric::start(library, storage).map_err(io::Error::other)?))
}

/// Refuses blocks on several devices: pieces do not go from rank to rank.
pub(super) fn refuse_divided(storage: &BlockStorage) -> io::Result<()> {
    if !storage.is_divided() {
        return Ok(());
    }
    let message = "blocks on several devices do not travel over nccl";
    Err(io::Error::new(io::ErrorKind::Unsupported, message))
}

/// How long the kernels of an aborted communicator may take to end.
const ABORT_PATIENCE: Duration = Duration::from_secs(10);

/// NCCL's library, and the device whose memory it moves.
#[derive(Debug)]
pub(crate) struct CudaFabric {
    nccl: Nccl,
    device: Device,
}

impl From<CudaError> for FabricError {
    fn from(error: CudaError) -> FabricError {
        match error {
            CudaError::Failed { call, why } => FabricError::Failed { call, why },
            missing => FabricError::NoDevice(missing.to_string()),
        }
    }
}

impl CudaFabric {
    /// For a pool on a device, that device. For a pool in host memory, the first device that this process sees.
    ///
    /// # Errors
    /// When the library or the device is missing.
    pub(crate) fn start(place: Option<&Path>, storage: &BlockStorage) -> Result<CudaFabric, FabricError> {
        let nccl = Nccl::load(place)?;
        let device = Device::open(storage.device().map_or(0, |memory| memory.device()))?;
        Ok(CudaFabric { nccl, device })
    }

    /// As [`Fabric::join`], for any number of ranks.
    pub(super) fn join_as(
        &self,
        id: &UniqueId,
        num_ranks: i32,
        rank: i32,
        peer: i32,
    ) -> Result<CudaCommunicator, FabricError> {
        self.device.bind()?;
        let stream = self.device.stream()?;
        let handle = self.nccl.join(id, num_ranks, rank)?;
        Ok(CudaCommunicator {
            nccl: self.nccl.clone(),
            device: self.device.clone(),
            stream,
            handle: Some(handle),
            peer,
            is_launching: false,
            events: VecDeque::new(),
            spare_events: Vec::new(),
            num_done: 0,
        })
    }
}

impl Fabric for CudaFabric {
    fn reach(&self, memory: &Arc<BlockStorage>) -> Result<ReachableMemory, FabricError> {
        if let Some(device) = memory.device() {
            let base = device.address().expect("refused where a sender or receiver starts");
            return Ok(ReachableMemory::new(memory, base, None));
        }
        let size_bytes = memory.size_bytes();
        // SAFETY: `ReachableMemory` keeps the memory, and ends the registration first.
        let registration =
            unsafe { HostRegistration::new(&self.device, memory.layer_ptr(BlockId(0), 0), size_bytes) }?;
        Ok(ReachableMemory::new(memory, registration.address, Some(Box::new(registration))))
    }

    fn unique_id(&self) -> Result<UniqueId, FabricError> {
        self.device.bind()?;
        Ok(self.nccl.unique_id()?)
    }

    fn join(&self, id: &UniqueId, rank: NcclRank) -> Result<Box<dyn NcclCommunicator>, FabricError> {
        let (rank, peer) = match rank {
            NcclRank::Receiver => (0, 1),
            NcclRank::Sender => (1, 0),
        };
        Ok(Box::new(self.join_as(id, 2, rank, peer)?))
    }
}

/// One rank, on a stream of its own.
pub(super) struct CudaCommunicator {
    nccl: Nccl,
    device: Device,
    stream: Arc<CudaStream>,
    /// Until it is aborted.
    handle: Option<Handle>,
    peer: i32,
    /// A group was posted whose kernels may not be on the stream yet.
    is_launching: bool,
    /// Behind each group that is under way.
    events: VecDeque<CudaEvent>,
    spare_events: Vec<CudaEvent>,
    num_done: u64,
}

impl CudaCommunicator {
    fn handle(&mut self) -> Result<&mut Handle, FabricError> {
        self.handle.as_mut().ok_or(FabricError::Failed { call: "nccl", why: "it was aborted".into() })
    }

    /// Posts sends and receives in one group.
    ///
    /// # Safety
    /// As [`NcclCommunicator::post`].
    pub(super) unsafe fn post_all(
        &mut self,
        operations: impl Iterator<Item = (TransferDirection, Place)>,
    ) -> Result<(), FabricError> {
        self.device.bind()?;
        let (nccl, stream, peer) = (self.nccl.clone(), Arc::clone(&self.stream), self.peer);
        let operations = operations.map(|(direction, place)| Operation {
            is_send: direction == TransferDirection::Send,
            address: place.address,
            len: place.len,
            peer,
        });
        // SAFETY: the stream lives as long as the communicator; the memory by the caller's word.
        unsafe { nccl.post(self.handle()?, operations, stream.cu_stream().cast()) }?;
        self.is_launching = true;
        Ok(())
    }
}

impl NcclCommunicator for CudaCommunicator {
    fn is_ready(&mut self) -> Result<bool, FabricError> {
        self.device.bind()?;
        let nccl = self.nccl.clone();
        if !nccl.is_ready(self.handle()?)? {
            return Ok(false);
        }
        if std::mem::take(&mut self.is_launching) {
            let event = match self.spare_events.pop() {
                Some(event) => event,
                None => {
                    self.device.context().new_event(None).map_err(|error| failed("cuEventCreate", error))?
                }
            };
            event.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
            self.events.push_back(event);
        }
        Ok(true)
    }

    unsafe fn post(&mut self, direction: TransferDirection, places: &[Place]) -> Result<(), FabricError> {
        // SAFETY: by the caller's word.
        unsafe { self.post_all(places.iter().map(|&place| (direction, place))) }
    }

    fn num_done(&mut self) -> Result<u64, FabricError> {
        // Also looks for errors of NCCL's, which no event tells.
        self.is_ready()?;
        while let Some(event) = self.events.front() {
            if !event.try_is_complete().map_err(|error| failed("cuEventQuery", error))? {
                break;
            }
            self.spare_events.extend(self.events.pop_front());
            self.num_done += 1;
        }
        Ok(self.num_done)
    }

    fn abort(&mut self) -> Result<(), FabricError> {
        let Some(handle) = self.handle.take() else { return Ok(()) };
        self.device.bind()?;
        self.nccl.abort(handle)?;
        let is_done = || -> Result<bool, DriverError> {
            let event = self.device.context().new_event(None)?;
            event.record(&self.stream)?;
            let start = Instant::now();
            while !event.try_is_complete()? {
                if start.elapsed() >= ABORT_PATIENCE {
                    return Ok(false);
                }
                thread::sleep(Duration::from_millis(1));
            }
            Ok(true)
        };
        match is_done() {
            Ok(true) => Ok(()),
            Ok(false) => Err(FabricError::Failed {
                call: "ncclCommAbort",
                why: format!("its kernels have not ended within {ABORT_PATIENCE:?}"),
            }),
            Err(error) => Err(failed("cuEventQuery", error).into()),
        }
    }
}

impl Drop for CudaCommunicator {
    fn drop(&mut self) {
        // A connection with groups in flight has aborted the communicator before.
        let _ = self.abort();
    }
}
