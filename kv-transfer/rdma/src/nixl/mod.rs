//! NIXL through its C API, loaded at run time. Only this folder of the crate calls foreign code.
//!
//! Its interface is small and safe: an [`Agent`] that has registered one rank's blocks, and [`Transfer`]s of pieces
//! from these blocks into those of another agent. When the drop of an agent returns, its endpoints are closed, its
//! memory key is revoked, and its progress thread has ended.
//!
//! GPU memory is registered like host memory, with its kind and its device number. UCX chooses how to reach it: by the
//! network device (GPUDirect, with nvidia-peermem or dma-buf), or by copies through the host.
//!
//! The library is never unloaded, and a process that has used it leaves without running its destructors
//! (see `engine.rs`).

mod agent;
pub(crate) mod api;
mod engine;
mod error;
mod library;

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use baton_kv_cache::BlockStorage;

pub(super) use agent::{Agent, RemoteAgent, Transfer};
use engine::Engine;
pub(crate) use error::{Memory, NixlError};
pub(crate) use library::Nixl;

/// Most bytes of a peer's metadata. It has an address and a key for every device of the peer's host.
pub(super) const MAX_METADATA_BYTES: usize = 1 << 20;

/// Loads the library and tries it: its plugins, UCX's networks, and, for blocks on a device, their registration.
/// That takes a second, or many seconds if its files are not in memory yet. So the first peer does not wait for it.
///
/// # Errors
/// As of `load`, and when UCX cannot be used.
pub(crate) fn start(place: Option<&Path>, storage: &Arc<BlockStorage>) -> Result<Nixl, NixlError> {
    // One trial for each process, as the library is loaded once.
    static TRIED: Mutex<bool> = Mutex::new(false);
    let nixl = Nixl::load(place)?;
    if storage.device().is_some() {
        for rank in 0..storage.num_ranks() {
            drop(Agent::new(&nixl, "trial", Arc::clone(storage), rank)?);
        }
        return Ok(nixl);
    }
    let mut is_tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*is_tried {
        drop(Engine::new(&nixl, "trial")?);
        *is_tried = true;
    }
    Ok(nixl)
}
