//! A fake of NIXL for tests without a GPU: its C API over memory of this process. Like NIXL, it checks that each write is inside
//! registered memory of the same kind and device, on both sides.

use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    ops::Range,
    path::PathBuf,
    ptr,
    sync::{Mutex, PoisonError},
};

use libloading::Library;

use crate::nixl::{
    Nixl,
    api::{AgentConfig, Api, Object},
};

/// The path that selects this fake.
pub(crate) const PLACE: &str = "/fake/libnixl_capi.so";

/// A device that refuses all writes.
pub(crate) const REFUSING: u32 = 13;

/// NIXL's status code for an invalid argument.
const INVALID: c_int = -1;

/// A descriptor: kind of memory, device number, address and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) kind: c_uint,
    pub(crate) device: u64,
    pub(crate) address: usize,
    pub(crate) len: usize,
}

impl Described {
    fn holds(&self, run: &Described) -> bool {
        (self.kind, self.device) == (run.kind, run.device)
            && self.address <= run.address
            && run.address + run.len <= self.address + self.len
    }
}

/// Source and target of each write that no test has taken yet.
static WRITTEN: Mutex<Vec<(Described, Described)>> = Mutex::new(Vec::new());

/// Takes the writes to these addresses since the last call. The first call may return writes to an earlier pool at the same
/// addresses.
pub(crate) fn take_written(addresses: &Range<u64>) -> Vec<(Described, Described)> {
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    written.extract_if(.., |(_, target)| addresses.contains(&(target.address as u64))).collect()
}

#[derive(Default)]
struct Agent {
    name: CString,
    registered: Vec<Described>,
    peers: HashMap<CString, Vec<Described>>,
}

/// A list of descriptors, for registration or for a transfer.
struct List {
    kind: c_uint,
    runs: Vec<Described>,
}

type Request = Vec<(Described, Described)>;

pub(crate) fn nixl() -> Nixl {
    let api = Api {
        create_configured_agent,
        destroy_agent: destroy::<Mutex<Agent>>,
        get_local_md,
        load_remote_md,
        agent_make_connection,
        create_params: create_nothing,
        params_add,
        destroy_params: destroy_nothing,
        create_backend,
        destroy_backend: destroy_nothing,
        create_reg_dlist: create_list,
        reg_dlist_add_desc,
        destroy_reg_dlist: destroy::<List>,
        register_mem,
        deregister_mem,
        create_xfer_dlist: create_list,
        xfer_dlist_add_desc,
        destroy_xfer_dlist: destroy::<List>,
        create_xfer_req,
        post_xfer_req,
        get_xfer_status,
        release_xfer_req,
        destroy_xfer_req: destroy::<Request>,
    };
    let library = Library::from(libloading::os::unix::Library::this());
    Nixl::over(api, PathBuf::from(PLACE), library)
}

fn new<T>(object: T, place: *mut Object) -> c_int {
    // SAFETY: the callers of the functions below pass a valid place for the new object.
    unsafe { *place = Box::into_raw(Box::new(object)).cast() };
    0
}

/// # Safety
/// The object must have been created by `new::<T>`, and must not be destroyed yet.
unsafe fn of<'a, T>(object: Object) -> &'a mut T {
    // SAFETY: guaranteed by the caller; only one thread uses the object at a time.
    unsafe { &mut *object.cast() }
}

unsafe extern "C" fn destroy<T>(object: Object) -> c_int {
    // SAFETY: created by `new`, and not used afterwards.
    drop(unsafe { Box::from_raw(object.cast::<T>()) });
    0
}

/// # Safety
/// As for [`of`].
unsafe fn agent<'a>(object: Object) -> std::sync::MutexGuard<'a, Agent> {
    // SAFETY: guaranteed by the caller.
    let agent: &Mutex<Agent> = unsafe { &*object.cast() };
    agent.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn create_configured_agent(
    name: *const c_char,
    _: *const AgentConfig,
    place: *mut Object,
) -> c_int {
    // SAFETY: the API requires a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_owned();
    new(Mutex::new(Agent { name, ..Agent::default() }), place)
}

unsafe extern "C" fn create_nothing(place: *mut Object) -> c_int {
    // SAFETY: as in `new`.
    unsafe { *place = ptr::dangling_mut::<u8>().cast() };
    0
}

unsafe extern "C" fn destroy_nothing(_: Object) -> c_int {
    0
}

unsafe extern "C" fn params_add(_: Object, _: *const c_char, _: *const c_char) -> c_int {
    0
}

unsafe extern "C" fn create_backend(_: Object, _: *const c_char, _: Object, place: *mut Object) -> c_int {
    // SAFETY: as in `new`.
    unsafe { create_nothing(place) }
}

/// The metadata: the agent's name, and the memory that it has registered.
unsafe extern "C" fn get_local_md(object: Object, data: *mut *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: the API requires valid objects and pointers.
    let agent = unsafe { agent(object) };
    let mut bytes = agent.name.as_bytes_with_nul().to_vec();
    for run in &agent.registered {
        for number in [run.kind.into(), run.device, run.address as u64, run.len as u64] {
            bytes.extend(u64::to_le_bytes(number));
        }
    }
    // SAFETY: the memory is new and has that size; the API requires valid places.
    unsafe {
        let copy = libc::malloc(bytes.len());
        ptr::copy_nonoverlapping(bytes.as_ptr(), copy.cast(), bytes.len());
        (*data, *len) = (copy, bytes.len());
    }
    0
}

unsafe extern "C" fn load_remote_md(
    object: Object,
    data: *const c_void,
    len: usize,
    name: *mut *mut c_char,
) -> c_int {
    // SAFETY: the API requires valid objects and pointers.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) };
    let Ok(peer) = CStr::from_bytes_until_nul(bytes) else { return INVALID };
    let numbers: Vec<u64> = bytes[peer.to_bytes_with_nul().len()..]
        .chunks_exact(8)
        .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
        .collect();
    let runs = numbers.chunks_exact(4).map(|run| Described {
        kind: run[0] as c_uint,
        device: run[1],
        address: run[2] as usize,
        len: run[3] as usize,
    });
    // SAFETY: the API requires valid objects and pointers.
    unsafe {
        agent(object).peers.insert(peer.to_owned(), runs.collect());
        *name = libc::strdup(peer.as_ptr());
    }
    0
}

unsafe extern "C" fn agent_make_connection(object: Object, name: *const c_char, _: Object) -> c_int {
    // SAFETY: the API requires valid objects and pointers.
    match unsafe { agent(object).peers.contains_key(CStr::from_ptr(name)) } {
        true => 0,
        false => INVALID,
    }
}

unsafe extern "C" fn create_list(kind: c_uint, place: *mut Object) -> c_int {
    new(List { kind, runs: Vec::new() }, place)
}

unsafe extern "C" fn reg_dlist_add_desc(
    list: Object,
    address: usize,
    len: usize,
    device: u64,
    _: *const c_void,
    _: usize,
) -> c_int {
    // SAFETY: the API requires valid objects and pointers.
    unsafe { xfer_dlist_add_desc(list, address, len, device) }
}

unsafe extern "C" fn xfer_dlist_add_desc(list: Object, address: usize, len: usize, device: u64) -> c_int {
    // SAFETY: the API requires valid objects and pointers.
    let list = unsafe { of::<List>(list) };
    list.runs.push(Described { kind: list.kind, device, address, len });
    0
}

unsafe extern "C" fn register_mem(object: Object, list: Object, _: Object) -> c_int {
    // SAFETY: the API requires valid objects and pointers.
    unsafe { agent(object).registered.extend(&of::<List>(list).runs) };
    0
}

unsafe extern "C" fn deregister_mem(object: Object, list: Object, _: Object) -> c_int {
    // SAFETY: the API requires valid objects and pointers.
    unsafe { agent(object).registered.retain(|run| !of::<List>(list).runs.contains(run)) };
    0
}

unsafe extern "C" fn create_xfer_req(
    object: Object,
    _: c_uint,
    sources: Object,
    targets: Object,
    peer: *const c_char,
    place: *mut Object,
    _: Object,
) -> c_int {
    // SAFETY: the API requires valid objects and pointers.
    let (agent, sources, targets, peer) = unsafe {
        (agent(object), &of::<List>(sources).runs, &of::<List>(targets).runs, CStr::from_ptr(peer))
    };
    let Some(remote) = agent.peers.get(peer) else { return INVALID };
    let are_inside = |runs: &[Described], registered: &[Described]| {
        runs.iter().all(|run| registered.iter().any(|whole| whole.holds(run)))
    };
    let is_refused = targets.iter().any(|target| target.device == u64::from(REFUSING));
    if !are_inside(sources, &agent.registered)
        || !are_inside(targets, remote)
        || sources.len() != targets.len()
        || is_refused
    {
        return INVALID;
    }
    new::<Request>(sources.iter().copied().zip(targets.iter().copied()).collect(), place)
}

unsafe extern "C" fn post_xfer_req(_: Object, request: Object, _: Object) -> c_int {
    // SAFETY: the API requires valid objects and pointers.
    let request = unsafe { of::<Request>(request) };
    for (source, target) in &*request {
        // SAFETY: both are in registered memory of this process, and the writer holds a grant.
        unsafe {
            ptr::copy_nonoverlapping(source.address as *const u8, target.address as *mut u8, source.len);
        }
    }
    WRITTEN.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(request);
    0
}

unsafe extern "C" fn get_xfer_status(_: Object, _: Object) -> c_int {
    0
}

unsafe extern "C" fn release_xfer_req(_: Object, _: Object) -> c_int {
    0
}
