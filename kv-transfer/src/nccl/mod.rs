//! KV through NCCL, from device to device: over NVLink, PCIe or the network, whichever NCCL finds. Both sides take
//! part: the decode worker receives into granted blocks what the prefill worker sends. NCCL's library and the CUDA
//! driver are loaded at run time.
//!
//! ```text
//! P: NcclPeer, one per pool            control connection (TCP)         D: NcclServer, one per pool
//!   Hello{pool, layout, access_key} ------------------------------->  such a grant? a slot free?
//!                         <-----------------------------------  Welcome + unique id
//!   joins as rank 1       ==== communicator of two ranks =====  joins as rank 0
//!   Announce{n, access_key, pieces}        ------------------------>  granted to it? not announced before?
//!                         <-----------------------------------  Go{n}: posts one group of receives into the blocks
//!   posts one group of sends ================================>
//!                         <-----------------------------------  Landed{n}: the group is done
//! ```
//!
//! A frame of up to 256 pieces is one group. Up to 16 are announced ahead, so that the answer is there when the one
//! before is done. `Landed` is what completes a push: that the sends are done says only that the bytes are on their way.
//!
//! # No deadlock
//!
//! NCCL matches sends and receives by order alone. Both sides have one thread for a communicator, and post in the
//! order of announcements on one connection; see `lane.rs`. What was announced and answered with `Go` is always sent,
//! also when its route is closed meanwhile: source blocks are kept until then. So no chunk can overtake another.
//!
//! # Fence
//!
//! Nothing is written into a pool but by receives that this side has posted itself. A grant that is revoked gets no
//! new ones, and its blocks are released when the last group that has pieces in them is done, or the communicator is
//! **aborted**, which is the fence: its kernels have ended, and the buffers that the network writes to are gone
//! (blocks are never registered with NCCL, so that nobody else writes to them). That happens when
//!
//! - the control connection ends, carries nonsense, or an answer out of order;
//! - nothing has become of the oldest group for `io_timeout`;
//! - NCCL reports an error.
//!
//! The peer's word is not needed, and not enough: `Stopped` on the handoff's stream does not release blocks that a
//! group of this side may still write. Should an abort fail, the blocks stay in quarantine for good, and it is logged.
//! The sender fences its source blocks in the same way. A communicator serves all grants between two pools; so an
//! abort costs those that are under way, never data, as what was not verified is not decoded.
//!
//! # Memory
//!
//! A pool in device memory is read and written where it is. One in host memory is registered with the driver, once,
//! and NCCL's kernels reach it over PCIe. Checksums are of what lies in the blocks, and are taken by the device that has
//! them, or by processors. Verification is never left out. Pieces that are not the same on both sides are put together in
//! host memory, which blocks on a device do not take part in.
//!
//! # What was not run
//!
//! Anything with a device: what is not NCCL's or the driver's is tested with `memory.rs` in their place, and the
//! library is loaded, asked for its version and for a unique id where it is. See `cuda_tests.rs` for what one GPU can
//! show. What a communicator costs in device memory was not measured; [`communicators`] bounds their number.

mod client;
mod communicators;
mod connection;
mod cuda;
#[cfg(test)]
mod cuda_tests;
mod fabric;
#[cfg(test)]
mod faults;
mod lane;
#[cfg(test)]
mod matrix;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod memory;
mod server;
mod session;
#[cfg(test)]
mod strangers;
mod wire;

use std::{fmt, path::Path, sync::Arc};

use baton_cuda::nccl::Nccl;
use baton_kv_cache::BlockStorage;

pub(crate) use client::{NcclPeer, NcclSender};
pub(crate) use fabric::{Fabric, FabricError};
pub(crate) use server::NcclServer;

/// What NCCL needs: its library, and the device of `storage`, or the first one for blocks in host memory.
///
/// # Errors
/// What is missing.
pub(crate) fn start(library: Option<&Path>, storage: &BlockStorage) -> Result<Arc<dyn Fabric>, FabricError> {
    Ok(Arc::new(cuda::CudaFabric::start(library, storage)?))
}

/// What of NCCL there is on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclFindings {
    /// Its version and where it is, or why there is none.
    pub library: Result<String, String>,
    /// Whether it gives ids under which two ranks could meet, if there is one.
    pub unique_id: Option<Result<(), String>>,
    /// How many CUDA devices this process can use, or what is missing.
    pub num_devices: Result<usize, String>,
}

impl NcclFindings {
    /// Looks for the library at `library` (the file or its folder), or where the system's loader finds it.
    pub fn look(library: Option<&Path>) -> NcclFindings {
        let loaded = Nccl::load(library).map_err(|error| FabricError::from(error).to_string());
        let id = |nccl: &Nccl| nccl.unique_id().map(drop).map_err(|error| error.to_string());
        NcclFindings {
            unique_id: loaded.as_ref().ok().map(id),
            library: loaded.map(|nccl| format!("{nccl:?}")),
            num_devices: crate::cuda::num_devices().map_err(|error| error.to_string()),
        }
    }
}

impl fmt::Display for NcclFindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.library {
            Ok(library) => write!(f, "NCCL {library}")?,
            Err(why) => write!(f, "{why}")?,
        }
        match &self.unique_id {
            Some(Ok(())) => f.write_str(", gives unique ids")?,
            Some(Err(why)) => write!(f, ", gives no unique id: {why}")?,
            None => {}
        }
        match &self.num_devices {
            Ok(1) => f.write_str("; 1 device"),
            Ok(num_devices) => write!(f, "; {num_devices} devices"),
            Err(why) => write!(f, "; {why}"),
        }
    }
}

#[cfg(any(test, feature = "testing"))]
/// What tests have in the place of NCCL and its devices.
#[derive(Clone, Debug)]
pub struct TestFabric(pub(crate) Arc<dyn Fabric>);

#[cfg(any(test, feature = "testing"))]
impl TestFabric {
    /// Communicators that join at once, alone, and through which nothing ever comes.
    pub fn alone() -> TestFabric {
        TestFabric(Arc::new(memory::MemoryFabric { joins_alone: true, ..memory::MemoryFabric::default() }))
    }
}

/// Groups that are announced, and not landed, at a time.
const MAX_GROUPS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::nccl_library;

    #[test]
    fn the_library_tells_its_version_and_gives_unique_ids_without_a_device() {
        let Some(place) = nccl_library() else { return };
        let nccl = Nccl::load(Some(&place)).unwrap();
        let findings = NcclFindings::look(Some(&place));
        let (text, device) = (findings.to_string(), findings.num_devices);
        assert!(text.starts_with(&format!("NCCL {nccl:?}, gives unique ids; ")), "{text}");
        assert!(device.is_ok_and(|num_devices| num_devices > 0) || text.contains("; no "), "{text}");
        let ids = [nccl.unique_id().unwrap(), nccl.unique_id().unwrap()];
        assert!(ids[0] != ids[1] && ids[0].0 != [0; baton_cuda::nccl::UniqueId::BYTES]);
    }
}
