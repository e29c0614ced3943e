//! An agent with registered memory, and its writes into a peer's memory.

use std::{
    ffi::{CStr, CString},
    ptr,
    sync::Arc,
};

use baton_kv_cache::{BlockStorage, DeviceCopy};
use tracing::debug;

use super::{
    api::{IN_PROGRESS, Object, WRITE, check},
    engine::Engine,
    error::{Memory, NixlError},
    library::Nixl,
};

/// One rank's blocks, registered with the host's network devices, and the endpoints to one peer. Each peer has agents
/// of its own, so that dropping one ends the access of this peer only.
pub(crate) struct Agent {
    registered: Object,
    // Dropped after the registration and before the memory.
    engine: Engine,
    storage: Arc<BlockStorage>,
    rank: usize,
}

// SAFETY: the agent was made with NIXL's strict locking, so that several threads may call it at once. Only `drop` uses
// the other objects.
unsafe impl Send for Agent {}
// SAFETY: as above.
unsafe impl Sync for Agent {}

/// A peer's agent, as this side's knows it.
#[derive(Clone, Debug)]
pub(crate) struct RemoteAgent(CString);

impl Agent {
    /// Registers the memory of `rank`. `name` must differ from the names of all other agents that the peer meets.
    pub(crate) fn new(
        nixl: &Nixl,
        name: &str,
        storage: Arc<BlockStorage>,
        rank: usize,
    ) -> Result<Agent, NixlError> {
        let api = nixl.api();
        let engine = Engine::new(nixl, name)?;
        let mut agent = Agent { registered: ptr::null_mut(), engine, storage, rank };
        agent.bind()?;
        supply(&agent.storage);
        let region = agent.storage.region(rank);
        let (address, size_bytes) = (region.address() as usize, region.size_bytes());
        let memory = Memory::of(&region);
        let (kind, device) = memory.code();
        // SAFETY: every pointer is valid during its call, every object was made by the call before, and the
        // memory lives as long as its registration.
        unsafe {
            check("create_reg_dlist", (api.create_reg_dlist)(kind, &mut agent.registered))?;
            let (list, device) = (agent.registered, u64::from(device));
            let added = (api.reg_dlist_add_desc)(list, address, size_bytes, device, ptr::null(), 0);
            check("reg_dlist_add_desc", added)?;
            let registered = (api.register_mem)(agent.engine.agent, list, ptr::null_mut());
            check("register_mem", registered).map_err(|error| error.of(memory))?;
        }
        Ok(agent)
    }

    /// The memory that holds the rank's blocks.
    pub(crate) fn memory(&self) -> Memory {
        Memory::of(&self.storage.region(self.rank))
    }

    /// Binds the calling thread to the rank's device. UCX asks the CUDA driver for the location of memory, and lets it
    /// copy what the network device cannot reach.
    fn bind(&self) -> Result<(), NixlError> {
        let Some(memory) = self.storage.region(self.rank).device() else { return Ok(()) };
        memory.bind().map_err(|error| NixlError::Device { device: memory.device(), why: error.to_string() })
    }

    /// What a peer needs to reach this agent and write into its pool: addresses and the memory's key.
    pub(crate) fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        let mut data = ptr::null_mut();
        let mut num_bytes = 0;
        // SAFETY: the out pointers are valid; on success `data` is `num_bytes` of malloc's, ours to free.
        unsafe {
            check(
                "get_local_md",
                (self.engine.nixl.api().get_local_md)(self.engine.agent, &mut data, &mut num_bytes),
            )?;
            let metadata = std::slice::from_raw_parts(data.cast::<u8>(), num_bytes).to_vec();
            libc::free(data);
            Ok(metadata)
        }
    }

    /// Loads a peer's metadata and connects to the peer. NIXL parses the bytes. They are trusted because the peer knows
    /// the pool's incarnation.
    pub(crate) fn connect(&self, metadata: &[u8]) -> Result<RemoteAgent, NixlError> {
        let api = self.engine.nixl.api();
        let mut name = ptr::null_mut();
        // SAFETY: the pointers are valid; on success `name` is a C string of malloc's, ours to free.
        let remote = unsafe {
            let loaded =
                (api.load_remote_md)(self.engine.agent, metadata.as_ptr().cast(), metadata.len(), &mut name);
            check("load_remote_md", loaded)?;
            let remote = RemoteAgent(CStr::from_ptr(name).to_owned());
            libc::free(name.cast());
            remote
        };
        // SAFETY: as above; no options.
        let connected =
            unsafe { (api.agent_make_connection)(self.engine.agent, remote.0.as_ptr(), ptr::null_mut()) };
        check("make_connection", connected)?;
        Ok(remote)
    }

    /// Begins to copy from the rank's memory into `target`, a rank of the peer, in one request. NIXL refuses addresses
    /// outside of the registered memory of either agent.
    ///
    /// # Safety
    /// The sources are not written before the transfer has ended or the agent is dropped, and the peer has
    /// granted the targets.
    pub(crate) unsafe fn write(
        self: &Arc<Self>,
        remote: &RemoteAgent,
        target: Memory,
        copies: &[DeviceCopy],
    ) -> Result<Transfer, NixlError> {
        self.bind()?;
        let sources = copies.iter().map(|copy| (copy.source, copy.len));
        let local = Descriptors::new(&self.engine.nixl, self.memory(), sources)?;
        let targets = copies.iter().map(|copy| (copy.target, copy.len));
        let target = Descriptors::new(&self.engine.nixl, target, targets)?;
        let api = self.engine.nixl.api();
        let mut transfer = Transfer { agent: Arc::clone(self), request: ptr::null_mut() };
        // SAFETY: all objects are alive. NIXL copies the descriptors, and refuses addresses outside of the registered
        // memory of either agent.
        unsafe {
            let made = (api.create_xfer_req)(
                self.engine.agent,
                WRITE,
                local.list,
                target.list,
                remote.0.as_ptr(),
                &mut transfer.request,
                ptr::null_mut(),
            );
            check("create_xfer_req", made)?;
            match (api.post_xfer_req)(self.engine.agent, transfer.request, ptr::null_mut()) {
                IN_PROGRESS => {}
                status => check("post_xfer_req", status)?,
            }
        }
        Ok(transfer)
    }
}

/// Makes the kernel allocate a pool in huge pages before it is pinned: pinned pages cannot become huge afterwards.
/// Without a network device, nothing is pinned, and pages are allocated when they are touched.
fn supply(storage: &BlockStorage) {
    if crate::network::num_network_devices() == 0 {
        return;
    }
    if let Err(error) = storage.populate_all() {
        // The registration allocates them then.
        debug!(%error, "pages of a pool are not supplied ahead");
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.registered.is_null() {
            return;
        }
        let api = self.engine.nixl.api();
        // This thread may have used another rank's device last. If the device fails, its registration is gone anyway.
        let _ = self.bind();
        // SAFETY: the list was made by `new` and is not used after this. NIXL logs a failure. It means that nothing was
        // registered; the engine's drop removes everything else.
        unsafe {
            (api.deregister_mem)(self.engine.agent, self.registered, ptr::null_mut());
            (api.destroy_reg_dlist)(self.registered);
        }
    }
}

/// A transfer: pieces that are being written.
pub(crate) struct Transfer {
    agent: Arc<Agent>,
    request: Object,
}

// SAFETY: as of the agent; the request is used by one owner at a time.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Whether the peer's memory holds the pieces.
    ///
    /// # Errors
    /// When the transfer failed: the peer or the network is gone. Some of the pieces may have been written.
    pub(crate) fn is_done(&self) -> Result<bool, NixlError> {
        // SAFETY: agent and request are alive.
        match unsafe { (self.agent.engine.nixl.api().get_xfer_status)(self.agent.engine.agent, self.request) }
        {
            IN_PROGRESS => Ok(false),
            status => check("transfer", status).map(|()| true),
        }
    }
}

impl Drop for Transfer {
    /// Releases the transfer. A transfer that has not ended may go on until the agent is dropped.
    fn drop(&mut self) {
        if self.request.is_null() {
            return;
        }
        let api = self.agent.engine.nixl.api();
        // SAFETY: the request is alive and not used after this. One that NIXL cannot release is leaked.
        unsafe {
            if (api.release_xfer_req)(self.agent.engine.agent, self.request) == 0 {
                (api.destroy_xfer_req)(self.request);
            }
        }
    }
}

/// A list of runs of bytes, in one kind of memory.
struct Descriptors<'a> {
    nixl: &'a Nixl,
    list: Object,
}

impl Descriptors<'_> {
    fn new(
        nixl: &Nixl,
        memory: Memory,
        runs: impl Iterator<Item = (u64, usize)>,
    ) -> Result<Descriptors<'_>, NixlError> {
        let (kind, device) = memory.code();
        let mut descriptors = Descriptors { nixl, list: ptr::null_mut() };
        // SAFETY: the out pointer is valid.
        check("create_xfer_dlist", unsafe { (nixl.api().create_xfer_dlist)(kind, &mut descriptors.list) })?;
        for (address, len) in runs {
            // SAFETY: the list was just made; addresses are not followed here.
            let added = unsafe {
                (nixl.api().xfer_dlist_add_desc)(descriptors.list, address as usize, len, u64::from(device))
            };
            check("xfer_dlist_add_desc", added)?;
        }
        Ok(descriptors)
    }
}

impl Drop for Descriptors<'_> {
    fn drop(&mut self) {
        if !self.list.is_null() {
            // SAFETY: made by `new`, used no more.
            unsafe { (self.nixl.api().destroy_xfer_dlist)(self.list) };
        }
    }
}
