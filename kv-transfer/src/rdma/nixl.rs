//! NIXL through its C API, loaded at run time: the only file here that calls foreign code.
//!
//! What callers see is small and safe: an [`Agent`] that has registered one pool, and [`Transfer`]s of
//! pieces from it into a pool of another agent. Dropping the agent is final: its endpoints are closed, its
//! memory key is revoked, and its progress thread has ended when the drop returns.
//!
//! The library is never unloaded, and a process that has used it leaves without running its destructors
//! (see [`leave_before_destructors`]).

use std::{
    error::Error,
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    fmt,
    mem::ManuallyDrop,
    path::{Path, PathBuf},
    ptr::{self, NonNull},
    sync::{Arc, Mutex, Once, PoisonError},
};

use baton_kv_cache::{BlockId, BlockStorage};
use libloading::Library;
use thiserror::Error;

/// Name of the library that has the C API.
const LIBRARY: &str = "libnixl_capi.so";

/// Which fabric carries the bytes: UCX chooses among what the hosts have.
const BACKEND: &CStr = c"UCX";

/// How often the progress thread looks though nothing woke it, in microseconds. 0 would make it spin.
const PROGRESS_DELAY_US: u64 = 10_000;

/// Bytes of metadata that are taken from a peer: an address and a key for every device of a host.
pub(super) const MAX_METADATA_BYTES: usize = 1 << 20;

/// Why NIXL did not do something.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum NixlError {
    /// The library is not here, or is another one.
    #[error(
        "no rdma without NIXL: {0}; install it (the wheel nixl-cu12 has it), and let BATON_NIXL name {LIBRARY} \
         or its folder"
    )]
    Absent(String),
    /// UCX would use what cannot be fenced.
    #[error(
        "UCX_SHM_DEVICES is set to {0:?}: rdma writes through UCX's shared memory could not be fenced; unset it"
    )]
    SharedMemory(String),
    /// A call failed; NIXL has logged why.
    #[error("NIXL: {call} failed with {status}")]
    Failed { call: &'static str, status: c_int },
}

/// Where bytes lie. Host memory is what runs today; GPU memory is described the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Dram,
    /// Of the GPU with this CUDA ordinal.
    Vram(u32),
}

impl Memory {
    /// NIXL's name of it: kind and device.
    pub(super) fn code(self) -> (u32, u32) {
        match self {
            Memory::Dram => (0, 0),
            Memory::Vram(device) => (1, device),
        }
    }

    /// The inverse.
    pub(super) fn from_code(kind: u32, device: u32) -> Option<Memory> {
        match kind {
            0 => Some(Memory::Dram),
            1 => Some(Memory::Vram(device)),
            _ => None,
        }
    }
}

/// A piece, to be copied into a peer's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    /// First byte of it here.
    pub(super) source: NonNull<u8>,
    /// Address in the peer's memory.
    pub(super) target: u64,
}

macro_rules! api {
    ($($name:ident: fn($($arg:ty),*);)*) => {
        /// Entry points, looked up once.
        struct Api {
            $($name: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Api {
            fn find(library: &Library) -> Result<Api, libloading::Error> {
                Ok(Api {
                    // SAFETY: the types are those of NIXL's header for C (src/bindings/rust/wrapper.h, unchanged
                    // in these functions from 1.0 to 1.5); the library is never unloaded.
                    $($name: *unsafe { library.get(concat!("nixl_capi_", stringify!($name)).as_bytes()) }?,)*
                })
            }
        }
    };
}

/// Any of NIXL's objects. Each is an opaque pointer that its own function destroys.
type Object = *mut c_void;

api! {
    create_configured_agent: fn(*const c_char, *const AgentConfig, *mut Object);
    destroy_agent: fn(Object);
    get_local_md: fn(Object, *mut *mut c_void, *mut usize);
    load_remote_md: fn(Object, *const c_void, usize, *mut *mut c_char);
    agent_make_connection: fn(Object, *const c_char, Object);
    create_params: fn(*mut Object);
    params_add: fn(Object, *const c_char, *const c_char);
    destroy_params: fn(Object);
    create_backend: fn(Object, *const c_char, Object, *mut Object);
    destroy_backend: fn(Object);
    create_reg_dlist: fn(c_uint, *mut Object);
    reg_dlist_add_desc: fn(Object, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist: fn(Object);
    register_mem: fn(Object, Object, Object);
    deregister_mem: fn(Object, Object, Object);
    create_xfer_dlist: fn(c_uint, *mut Object);
    xfer_dlist_add_desc: fn(Object, usize, usize, u64);
    destroy_xfer_dlist: fn(Object);
    create_xfer_req: fn(Object, c_uint, Object, Object, *const c_char, *mut Object, Object);
    post_xfer_req: fn(Object, Object, Object);
    get_xfer_status: fn(Object, Object);
    release_xfer_req: fn(Object, Object);
    destroy_xfer_req: fn(Object);
}

/// NIXL's `nixl_capi_agent_config_t`.
#[repr(C)]
struct AgentConfig {
    enable_prog_thread: bool,
    enable_listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_uint,
    num_workers: c_uint,
    pthr_delay_us: u64,
    lthr_delay_us: u64,
    capture_telemetry: bool,
}

const IN_PROGRESS: c_int = 1;
const WRITE: c_uint = 1;
/// NIXL locks its agent itself.
const THREAD_SYNC_STRICT: c_uint = 1;

/// The library. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Nixl(Arc<Loaded>);

struct Loaded {
    api: Api,
    path: PathBuf,
    // Threads and exit handlers of the library outlive every handle.
    _library: ManuallyDrop<Library>,
}

impl fmt::Debug for Nixl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nixl({})", self.0.path.display())
    }
}

impl Nixl {
    /// Loads the library, and tries whether it works here: its plugins, and what UCX finds. That takes a
    /// second, or many where nothing of it is in memory yet, which the first peer then need not wait for.
    ///
    /// # Errors
    /// As of `load`, and when UCX cannot be used.
    pub(crate) fn start(place: Option<&Path>) -> Result<Nixl, NixlError> {
        // Of the process, as what is loaded.
        static TRIED: Mutex<bool> = Mutex::new(false);
        let nixl = Nixl::load(place)?;
        let mut is_tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_tried {
            drop(Engine::new(&nixl, "trial")?);
            *is_tried = true;
        }
        Ok(nixl)
    }

    /// Loads the library from `place` (the file or its folder), or from where the system's loader finds it.
    ///
    /// # Errors
    /// When it is absent, or lacks a function.
    pub(crate) fn load(place: Option<&Path>) -> Result<Nixl, NixlError> {
        let path = match place {
            Some(folder) if folder.is_dir() => folder.join(LIBRARY),
            Some(file) => file.to_owned(),
            None => PathBuf::from(LIBRARY),
        };
        // Among the ways on one host, UCX would choose shared memory, where no revoked key stops a writer.
        if let Some(devices) = std::env::var_os("UCX_SHM_DEVICES").filter(|value| !value.is_empty()) {
            return Err(NixlError::SharedMemory(devices.to_string_lossy().into_owned()));
        }
        let absent = |error: libloading::Error| {
            // The cause names the file.
            NixlError::Absent(error.source().map_or_else(|| error.to_string(), ToString::to_string))
        };
        // SAFETY: NIXL's initialisers may run at any time in any thread; whoever names another library by
        // configuration vouches for it, as with any program that is run.
        let library = unsafe { Library::new(path.as_os_str()) }.map_err(absent)?;
        let api = Api::find(&library).map_err(absent)?;
        Ok(Nixl(Arc::new(Loaded { api, path, _library: ManuallyDrop::new(library) })))
    }
}

/// An agent of NIXL's with its backend: endpoints, and a thread that drives them.
struct Engine {
    nixl: Nixl,
    agent: Object,
    backend: Object,
}

impl Engine {
    fn new(nixl: &Nixl, name: &str) -> Result<Engine, NixlError> {
        let api = &nixl.0.api;
        let config = AgentConfig {
            enable_prog_thread: true,
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: THREAD_SYNC_STRICT,
            num_workers: 1,
            pthr_delay_us: PROGRESS_DELAY_US,
            lthr_delay_us: 100_000,
            capture_telemetry: false,
        };
        let name = CString::new(name).expect("names of agents are made here, without zeroes");
        let mut engine = Engine { nixl: nixl.clone(), agent: ptr::null_mut(), backend: ptr::null_mut() };
        // SAFETY: every pointer is valid during its call, and every object was made by the call before.
        unsafe {
            check("create_agent", (api.create_configured_agent)(name.as_ptr(), &config, &mut engine.agent))?;
            let mut params = ptr::null_mut();
            check("create_params", (api.create_params)(&mut params))?;
            // Nothing of UCX that maps a peer's memory, or copies between GPUs of one host.
            let added = (api.params_add)(params, c"engine_config".as_ptr(), c"SHM_DEVICES=".as_ptr());
            let made = check("params_add", added).and_then(|()| {
                let made = (api.create_backend)(engine.agent, BACKEND.as_ptr(), params, &mut engine.backend);
                check("create_backend", made)
            });
            (api.destroy_params)(params);
            made?;
        }
        leave_before_destructors();
        Ok(engine)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let api = &self.nixl.0.api;
        // SAFETY: the objects were made by `new` and are not used after this. Nothing can be done about a
        // failure, which NIXL logs.
        unsafe {
            if !self.agent.is_null() {
                (api.destroy_agent)(self.agent);
            }
            // Only the handle: the backend went with its agent.
            if !self.backend.is_null() {
                (api.destroy_backend)(self.backend);
            }
        }
    }
}

/// Memory that is registered with the host's network devices, a pool or what is read besides, and the endpoints
/// to one peer. Exclusive to that peer, so that dropping it ends what the peer may do and nothing else.
pub(super) struct Agent {
    registered: Object,
    // After the registration, and before the memory.
    engine: Engine,
    memories: Vec<Arc<BlockStorage>>,
    memory: Memory,
}

// SAFETY: the agent was made with NIXL's strict locking, so that any thread may call it, also at once; the
// other objects are only used by `drop`.
unsafe impl Send for Agent {}
// SAFETY: as above.
unsafe impl Sync for Agent {}

/// A peer's agent, as this side's knows it.
#[derive(Clone, Debug)]
pub(super) struct RemoteAgent(CString);

impl Agent {
    /// Registers all of `memories` under a name that no other agent has which the peer will ever meet.
    pub(super) fn new(nixl: &Nixl, name: &str, memories: Vec<Arc<BlockStorage>>) -> Result<Agent, NixlError> {
        let api = &nixl.0.api;
        let engine = Engine::new(nixl, name)?;
        let mut agent = Agent { registered: ptr::null_mut(), engine, memories, memory: Memory::Dram };
        let (kind, device) = agent.memory.code();
        // SAFETY: every pointer is valid during its call, every object was made by the call before, and the
        // memory lives as long as its registration.
        unsafe {
            check("create_reg_dlist", (api.create_reg_dlist)(kind, &mut agent.registered))?;
            let list = agent.registered;
            for memory in &agent.memories {
                let size_bytes = memory.num_blocks() * memory.layout().block_bytes();
                let base = base(memory) as usize;
                let added =
                    (api.reg_dlist_add_desc)(list, base, size_bytes, u64::from(device), ptr::null(), 0);
                check("reg_dlist_add_desc", added)?;
            }
            check("register_mem", (api.register_mem)(agent.engine.agent, list, ptr::null_mut()))?;
        }
        Ok(agent)
    }

    pub(super) fn memory(&self) -> Memory {
        self.memory
    }

    /// What a peer needs to reach this agent and write into its pool: addresses and the memory's key.
    pub(super) fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        let mut data = ptr::null_mut();
        let mut num_bytes = 0;
        // SAFETY: the out pointers are valid; on success `data` is `num_bytes` of malloc's, ours to free.
        unsafe {
            check(
                "get_local_md",
                (self.engine.nixl.0.api.get_local_md)(self.engine.agent, &mut data, &mut num_bytes),
            )?;
            let metadata = std::slice::from_raw_parts(data.cast::<u8>(), num_bytes).to_vec();
            libc::free(data);
            Ok(metadata)
        }
    }

    /// Takes a peer's metadata and connects to it. NIXL parses the bytes; they come from a peer that
    /// knows the pool's incarnation, and are trusted as far as that.
    pub(super) fn connect(&self, metadata: &[u8]) -> Result<RemoteAgent, NixlError> {
        let api = &self.engine.nixl.0.api;
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

    /// Begins to write pieces of `len` bytes into the peer's pool, all in one request. NIXL refuses those that
    /// do not lie in what this agent, or the peer's, has registered.
    ///
    /// # Safety
    /// Nobody writes the pieces before the transfer has ended, or the agent is dropped; and the peer has
    /// granted the targets.
    pub(super) unsafe fn write(
        self: &Arc<Self>,
        remote: &RemoteAgent,
        memory: Memory,
        copies: &[Copy],
        len: usize,
    ) -> Result<Transfer, NixlError> {
        let local = copies.iter().map(|copy| copy.source.as_ptr() as usize);
        let local = Descriptors::new(&self.engine.nixl, self.memory, local, len)?;
        let targets = copies.iter().map(|copy| copy.target as usize);
        let target = Descriptors::new(&self.engine.nixl, memory, targets, len)?;
        let api = &self.engine.nixl.0.api;
        let mut transfer = Transfer { agent: Arc::clone(self), request: ptr::null_mut() };
        // SAFETY: all objects are alive; NIXL copies the descriptors, and refuses those that lie outside of
        // what either agent registered.
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

impl Drop for Agent {
    fn drop(&mut self) {
        if self.registered.is_null() {
            return;
        }
        let api = &self.engine.nixl.0.api;
        // SAFETY: the list was made by `new` and is not used after this. A failure is logged by NIXL, and means
        // that nothing was registered; whatever was goes with the engine.
        unsafe {
            (api.deregister_mem)(self.engine.agent, self.registered, ptr::null_mut());
            (api.destroy_reg_dlist)(self.registered);
        }
    }
}

/// Address of a pool's first byte.
pub(super) fn base(storage: &BlockStorage) -> u64 {
    storage.layer_ptr(BlockId(0), 0).as_ptr() as u64
}

/// Pieces that are being written.
pub(super) struct Transfer {
    agent: Arc<Agent>,
    request: Object,
}

// SAFETY: as of the agent; the request is used by one owner at a time.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Whether the peer's memory holds the pieces.
    ///
    /// # Errors
    /// When it never will: the peer or the network is gone. Some of the pieces may have been written.
    pub(super) fn is_done(&self) -> Result<bool, NixlError> {
        // SAFETY: agent and request are alive.
        match unsafe { (self.agent.engine.nixl.0.api.get_xfer_status)(self.agent.engine.agent, self.request) }
        {
            IN_PROGRESS => Ok(false),
            status => check("transfer", status).map(|()| true),
        }
    }
}

impl Drop for Transfer {
    /// Forgets the transfer. One that has not ended may go on until the agent is dropped.
    fn drop(&mut self) {
        if self.request.is_null() {
            return;
        }
        let api = &self.agent.engine.nixl.0.api;
        // SAFETY: the request is alive and not used after this. One that NIXL cannot release is leaked.
        unsafe {
            if (api.release_xfer_req)(self.agent.engine.agent, self.request) == 0 {
                (api.destroy_xfer_req)(self.request);
            }
        }
    }
}

/// A list of runs of equal length, in one kind of memory.
struct Descriptors<'a> {
    nixl: &'a Nixl,
    list: Object,
}

impl Descriptors<'_> {
    fn new(
        nixl: &Nixl,
        memory: Memory,
        addresses: impl Iterator<Item = usize>,
        len: usize,
    ) -> Result<Descriptors<'_>, NixlError> {
        let (kind, device) = memory.code();
        let mut descriptors = Descriptors { nixl, list: ptr::null_mut() };
        // SAFETY: the out pointer is valid.
        check("create_xfer_dlist", unsafe { (nixl.0.api.create_xfer_dlist)(kind, &mut descriptors.list) })?;
        for address in addresses {
            // SAFETY: the list was just made; addresses are not followed here.
            let added = unsafe {
                (nixl.0.api.xfer_dlist_add_desc)(descriptors.list, address, len, u64::from(device))
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
            unsafe { (self.nixl.0.api.destroy_xfer_dlist)(self.list) };
        }
    }
}

fn check(call: &'static str, status: c_int) -> Result<(), NixlError> {
    if status == 0 { Ok(()) } else { Err(NixlError::Failed { call, status }) }
}

/// UCX's destructors crash at the end of a process in which everything went well. So the first exit
/// handler that runs, as it is the last that was registered, leaves with the status that was asked for.
fn leave_before_destructors() {
    unsafe extern "C" {
        // glibc's: unlike that of `atexit`, this handler learns the status.
        fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    }
    extern "C" fn leave(status: c_int, _: *mut c_void) {
        // SAFETY: both may be called at any time. Rust has flushed its own output; this does C's.
        unsafe {
            libc::fflush(ptr::null_mut());
            libc::_exit(status);
        }
    }
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler is a function of this program, which is never unloaded.
        let status = unsafe { on_exit(leave, ptr::null_mut()) };
        debug_assert_eq!(status, 0, "there is room for a handler");
    });
}
