//! NCCL, loaded at run time: its raw functions. This module does not know the ranks' protocol, nor how they wait.
//!
//! The types are cudarc's, but its lookup is not used. cudarc searches only for `libnccl.so`, which comes with the
//! headers, while hosts and Python wheels have `libnccl.so.2`; and it panics when something is missing. The functions
//! have not changed since 2.14.

use std::{
    ffi::{c_char, c_int, c_void},
    fmt,
    mem::ManuallyDrop,
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclConfig_t, ncclUniqueId};
use libloading::Library;
use thiserror::Error;

use crate::library::{api, text, words};

/// The id of a group. All ranks need it to connect.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct UniqueId(pub [u8; UniqueId::BYTES]);

impl UniqueId {
    /// Its length.
    pub const BYTES: usize = 128;
}

impl fmt::Debug for UniqueId {
    /// It contains an address, and gives the right to join.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(…)")
    }
}

/// Why an NCCL operation failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NcclError {
    /// The library is missing, or lacks a function.
    #[error(
        "no NCCL: {0}; install it (the wheel nvidia-nccl-cu12 or, for CUDA 13, nvidia-nccl-cu13 has it), and let BATON_NCCL name \
         libnccl.so.2 or its folder"
    )]
    Absent(String),
    /// A call failed. Its work may go on until the communicator is aborted.
    #[error("{call} failed: {why}")]
    Failed {
        /// The function.
        call: &'static str,
        /// NCCL's message.
        why: String,
    },
}

/// The file of NCCL 2, and the link to it that comes with its headers.
const LIBRARIES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The first version whose configuration has the fields of cudarc's type: 2.18.
const MIN_VERSION: c_int = 21_800;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const UINT8: c_int = 1;
/// ncclSum
const SUM: c_int = 0;

api! {
    struct Api {
        get_version: "ncclGetVersion" fn(*mut c_int) -> c_int;
        get_unique_id: "ncclGetUniqueId" fn(*mut ncclUniqueId) -> c_int;
        init: "ncclCommInitRankConfig"
            fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> c_int;
        async_error: "ncclCommGetAsyncError" fn(ncclComm_t, *mut c_int) -> c_int;
        abort: "ncclCommAbort" fn(ncclComm_t) -> c_int;
        group_start: "ncclGroupStart" fn() -> c_int;
        group_end: "ncclGroupEnd" fn() -> c_int;
        send: "ncclSend" fn(*const c_void, usize, c_int, c_int, ncclComm_t, cudaStream_t) -> c_int;
        recv: "ncclRecv" fn(*mut c_void, usize, c_int, c_int, ncclComm_t, cudaStream_t) -> c_int;
        all_reduce: "ncclAllReduce"
            fn(*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, cudaStream_t) -> c_int;
        error_string: "ncclGetErrorString" fn(c_int) -> *const c_char;
        last_error: "ncclGetLastError" fn(ncclComm_t) -> *const c_char;
    }
}

/// The library. Cheap to clone.
#[derive(Clone)]
pub struct Nccl(Arc<Loaded>);

struct Loaded {
    api: Api,
    path: PathBuf,
    version: c_int,
    // Threads of the library outlive every handle.
    _library: ManuallyDrop<Library>,
}

impl fmt::Debug for Nccl {
    /// "2.32.3 of libnccl.so.2".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.0.version;
        let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
        write!(f, "{major}.{minor}.{patch} of {}", self.0.path.display())
    }
}

/// The handle of a communicator, until it is aborted.
#[derive(Debug)]
pub struct Handle(ncclComm_t);

// SAFETY: NCCL allows calls from any thread, one at a time. `&mut` guarantees that.
unsafe impl Send for Handle {}

impl Nccl {
    /// Loads the library from `place` (the file or its folder), or from where the system's loader finds it.
    ///
    /// # Errors
    /// When it is absent, too old, or lacks a function.
    pub fn load(place: Option<&Path>) -> Result<Nccl, NcclError> {
        let candidates: Vec<PathBuf> = match place {
            Some(folder) if folder.is_dir() => LIBRARIES.map(|name| folder.join(name)).into(),
            Some(file) => vec![file.to_owned()],
            None => LIBRARIES.map(PathBuf::from).into(),
        };
        let absent = |error: libloading::Error| NcclError::Absent(words(&error));
        let mut first_error = None;
        for path in candidates {
            // SAFETY: NCCL's initialisers may run at any time in any thread. An operator who configures another
            // library trusts it, as with any program.
            match unsafe { Library::new(path.as_os_str()) } {
                Ok(library) => return Nccl::of(library, path, absent),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        Err(absent(first_error.expect("there is at least one candidate")))
    }

    fn of(
        library: Library,
        path: PathBuf,
        absent: impl Fn(libloading::Error) -> NcclError,
    ) -> Result<Nccl, NcclError> {
        let library = ManuallyDrop::new(library);
        let api = Api::find(&library).map_err(absent)?;
        let mut version = 0;
        // SAFETY: the out pointer is valid.
        let result = unsafe { (api.get_version)(&mut version) };
        let nccl = Nccl(Arc::new(Loaded { api, path, version, _library: library }));
        nccl.check("ncclGetVersion", result)?;
        match version >= MIN_VERSION {
            true => Ok(nccl),
            false => Err(NcclError::Absent(format!("{nccl:?} is older than 2.18"))),
        }
    }

    /// Creates an id. NCCL starts to listen for the other ranks on an address that NCCL_SOCKET_IFNAME can choose.
    ///
    /// # Errors
    /// When NCCL finds no such address.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = ncclUniqueId { internal: [0; UniqueId::BYTES] };
        // SAFETY: the out pointer is valid.
        self.check("ncclGetUniqueId", unsafe { (self.0.api.get_unique_id)(&mut id) })?;
        Ok(UniqueId(id.internal.map(|byte| byte as u8)))
    }

    /// Starts to join a group as one of `num_ranks` ranks, on the device of the thread's current CUDA context.
    /// Neither this call nor any other waits for the other ranks; see [`is_ready`](Self::is_ready).
    ///
    /// # Errors
    /// When NCCL rejects the call.
    pub fn join(&self, id: &UniqueId, num_ranks: c_int, rank: c_int) -> Result<Handle, NcclError> {
        let id = ncclUniqueId { internal: id.0.map(|byte| byte as c_char) };
        // The values of nccl.h's initialiser, with non-blocking calls. A newer library fills in its additional
        // fields.
        let mut config = ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: MIN_VERSION as u32,
            blocking: 0,
            cgaClusterSize: c_int::MIN,
            minCTAs: c_int::MIN,
            maxCTAs: c_int::MIN,
            netName: ptr::null(),
            splitShare: c_int::MIN,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the pointers are valid during the call.
        let result = unsafe { (self.0.api.init)(&mut handle, num_ranks, id, rank, &mut config) };
        self.check("ncclCommInitRankConfig", result)?;
        match handle.is_null() {
            true => Err(self.failed("ncclCommInitRankConfig", "no communicator".into())),
            false => Ok(Handle(handle)),
        }
    }

    /// Whether the last call is complete, so that the next call is allowed.
    ///
    /// # Errors
    /// When the communicator has failed and must be aborted.
    pub fn is_ready(&self, handle: &mut Handle) -> Result<bool, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: the handle is alive and the out pointer valid.
        let result = unsafe { (self.0.api.async_error)(handle.0, &mut state) };
        self.check_of(handle, "ncclCommGetAsyncError", result)?;
        match state {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            error => self.check_of(handle, "nccl's communicator", error).map(|()| false),
        }
    }

    /// Queues the operations as one group, on a stream of the communicator's device.
    ///
    /// # Errors
    /// When NCCL rejects a call.
    ///
    /// # Safety
    /// The stream is alive. The device can access the memory until the group is done or the communicator is aborted.
    pub unsafe fn post(
        &self,
        handle: &mut Handle,
        operations: impl Iterator<Item = Operation>,
        stream: cudaStream_t,
    ) -> Result<(), NcclError> {
        let api = &self.0.api;
        // SAFETY: no arguments.
        self.check_of(handle, "ncclGroupStart", unsafe { (api.group_start)() })?;
        let mut posted = Ok(());
        for Operation { is_send, address, len, peer } in operations {
            // SAFETY: the handle is alive. The caller guarantees the memory and the stream.
            posted = unsafe {
                match is_send {
                    true => {
                        let result = (api.send)(address as *const c_void, len, UINT8, peer, handle.0, stream);
                        self.check_of(handle, "ncclSend", result)
                    }
                    false => {
                        let result = (api.recv)(address as *mut c_void, len, UINT8, peer, handle.0, stream);
                        self.check_of(handle, "ncclRecv", result)
                    }
                }
            };
            if posted.is_err() {
                break;
            }
        }
        // Ends the group also after an error: the group belongs to the thread, not to the communicator.
        // SAFETY: no arguments.
        let ended = unsafe { (api.group_end)() };
        posted.and_then(|()| self.check_of(handle, "ncclGroupEnd", ended))
    }

    /// Queues the sum over all ranks of `[len]` numbers, in place, on a stream of the communicator's device.
    ///
    /// # Errors
    /// When NCCL rejects the call.
    ///
    /// # Safety
    /// As for [`post`](Self::post).
    pub unsafe fn all_reduce_sum(
        &self,
        handle: &mut Handle,
        numbers: u64,
        len: usize,
        of: SumType,
        stream: cudaStream_t,
    ) -> Result<(), NcclError> {
        let at = numbers as *mut c_void;
        // SAFETY: the handle is alive. The caller guarantees the memory and the stream.
        let result = unsafe { (self.0.api.all_reduce)(at, at, len, of as c_int, SUM, handle.0, stream) };
        self.check_of(handle, "ncclAllReduce", result)
    }

    /// Aborts a communicator.
    ///
    /// # Errors
    /// When NCCL fails to abort it.
    pub fn abort(&self, handle: Handle) -> Result<(), NcclError> {
        // SAFETY: the handle is alive, and this call consumes it.
        self.check("ncclCommAbort", unsafe { (self.0.api.abort)(handle.0) })
    }

    fn check(&self, call: &'static str, result: c_int) -> Result<(), NcclError> {
        match result {
            SUCCESS | IN_PROGRESS => Ok(()),
            // SAFETY: every number has a static text.
            error => Err(self.failed(call, unsafe { text((self.0.api.error_string)(error)) })),
        }
    }

    fn check_of(&self, handle: &Handle, call: &'static str, result: c_int) -> Result<(), NcclError> {
        self.check(call, result).map_err(|error| {
            // SAFETY: the handle is alive. The text is copied before the next call.
            let last = unsafe { text((self.0.api.last_error)(handle.0)) };
            match error {
                NcclError::Failed { call, why } if !last.is_empty() => {
                    NcclError::Failed { call, why: format!("{why}: {last}") }
                }
                error => error,
            }
        })
    }

    fn failed(&self, call: &'static str, why: String) -> NcclError {
        NcclError::Failed { call, why }
    }
}

/// A send or a receive of a group.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// Otherwise a receive.
    pub is_send: bool,
    /// Address of the first byte on the device.
    pub address: u64,
    /// Number of bytes.
    pub len: usize,
    /// The other rank.
    pub peer: c_int,
}

/// The type of the numbers in a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumType {
    /// Single precision.
    F32 = 7,
    /// bfloat16.
    Bf16 = 9,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_reported() {
        for place in ["/nowhere/libnccl.so.2", "/nowhere"] {
            let error = Nccl::load(Some(Path::new(place))).unwrap_err().to_string();
            assert!(error.contains("no NCCL"), "{error}");
            assert!(error.contains(place) && error.contains("BATON_NCCL"), "{error}");
        }
    }

    #[test]
    fn another_library_is_not_mistaken_for_nccl() {
        // Every host has the C library.
        let error = Nccl::load(Some(Path::new("libc.so.6"))).unwrap_err().to_string();
        assert!(error.contains("ncclGetVersion"), "{error}");
    }
}
