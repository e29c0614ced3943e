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
//! (see [`leave_before_destructors`]).

mod agent;
pub(crate) mod api;

use std::{
    error::Error,
    ffi::{CStr, CString, c_int, c_void},
    fmt,
    mem::ManuallyDrop,
    path::{Path, PathBuf},
    ptr,
    sync::{Arc, Mutex, Once, PoisonError},
};

use baton_kv_cache::{BlockStorage, Region};
use libloading::Library;
use thiserror::Error;

pub(super) use agent::{Agent, RemoteAgent, Transfer};
use api::{AgentConfig, Api, Object, THREAD_SYNC_STRICT, check};

use baton_transfer::cuda;

/// Name of the library that has the C API.
const LIBRARY: &str = "libnixl_capi.so";

/// NIXL's backend. UCX chooses among the networks of the hosts.
const BACKEND: &CStr = c"UCX";

/// How often the progress thread polls when no event wakes it, in microseconds. 0 would make it spin.
const PROGRESS_DELAY_US: u64 = 10_000;

/// Most bytes of a peer's metadata. It has an address and a key for every device of the peer's host.
pub(super) const MAX_METADATA_BYTES: usize = 1 << 20;

/// Why NIXL failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum NixlError {
    /// The library is missing, or lacks a function.
    #[error(
        "no rdma without NIXL: {0}; install it (the wheel nixl-cu12 has it), and let BATON_NIXL name {LIBRARY} \
         or its folder"
    )]
    Absent(String),
    /// UCX would use shared memory, which cannot be fenced.
    #[error(
        "UCX_SHM_DEVICES is set to {0:?}: rdma writes through UCX's shared memory could not be fenced; unset it"
    )]
    SharedMemory(String),
    /// A call failed. NIXL has logged the reason.
    #[error("NIXL: {call} failed with {status}")]
    Failed { call: &'static str, status: c_int },
    /// NIXL cannot use the memory of a GPU.
    #[error("rdma cannot use the memory of device {device}: {why}")]
    Device { device: u32, why: String },
}

impl NixlError {
    /// The error of a registration, with the reason if the memory is a GPU's.
    fn of(self, memory: Memory) -> NixlError {
        let Memory::Vram(device) = memory else { return self };
        let why = match cuda::num_devices() {
            Err(missing) => format!("{self}; {missing}"),
            Ok(_) => format!("{self}; UCX needs its modules for CUDA here"),
        };
        NixlError::Device { device, why }
    }
}

/// The memory that holds bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Dram,
    /// Of the GPU with this CUDA ordinal.
    Vram(u32),
}

impl Memory {
    /// The memory of these blocks.
    pub(super) fn of(region: &Region<'_>) -> Memory {
        match region.device().map(|memory| memory.device()) {
            #[cfg(test)]
            Some(baton_transfer_conformance::fake_devices::HOST) => Memory::Dram,
            Some(device) => Memory::Vram(device),
            None => Memory::Dram,
        }
    }

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
    fn api(&self) -> &Api {
        &self.0.api
    }

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

    /// Loads the library from `place` (the file or its folder), or from where the system's loader finds it.
    ///
    /// # Errors
    /// When it is absent, or lacks a function.
    pub(crate) fn load(place: Option<&Path>) -> Result<Nixl, NixlError> {
        #[cfg(test)]
        if place == Some(Path::new(crate::tests::fake_nixl::PLACE)) {
            return Ok(crate::tests::fake_nixl::nixl());
        }
        let path = match place {
            Some(folder) if folder.is_dir() => folder.join(LIBRARY),
            Some(file) => file.to_owned(),
            None => PathBuf::from(LIBRARY),
        };
        // On one host UCX would choose shared memory, where no revoked key stops a writer.
        if let Some(devices) = std::env::var_os("UCX_SHM_DEVICES").filter(|value| !value.is_empty()) {
            return Err(NixlError::SharedMemory(devices.to_string_lossy().into_owned()));
        }
        let absent = |error: libloading::Error| {
            // The cause names the file.
            NixlError::Absent(error.source().map_or_else(|| error.to_string(), ToString::to_string))
        };
        // SAFETY: NIXL's initialisers may run at any time in any thread; the operator who names another library by
        // configuration trusts it, as with any program that is run.
        let library = unsafe { Library::new(path.as_os_str()) }.map_err(absent)?;
        let api = Api::find(&library).map_err(absent)?;
        Ok(Nixl::over(api, path, library))
    }

    /// Wraps the functions of a loaded library.
    pub(crate) fn over(api: Api, path: PathBuf, library: Library) -> Nixl {
        Nixl(Arc::new(Loaded { api, path, _library: ManuallyDrop::new(library) }))
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
        let api = nixl.api();
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
            // Switch off UCX's transports that map a peer's memory or copy between GPUs of one host.
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
        let api = self.nixl.api();
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

/// UCX's destructors crash at the end of a process, even if all calls succeeded. So this registers an exit handler. It
/// is registered last and runs first, and it leaves the process with the requested status.
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
