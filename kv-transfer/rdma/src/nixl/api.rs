//! The functions of NIXL's C API that are used, as its header declares them.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::error::NixlError;

macro_rules! api {
    ($($name:ident: fn($($arg:ty),*);)*) => {
        /// Entry points, looked up once.
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Api {
            pub(crate) fn find(library: &Library) -> Result<Api, libloading::Error> {
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
pub(crate) type Object = *mut c_void;

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
pub(crate) struct AgentConfig {
    pub(crate) enable_prog_thread: bool,
    pub(crate) enable_listen_thread: bool,
    pub(crate) listen_port: c_int,
    pub(crate) thread_sync: c_uint,
    pub(crate) num_workers: c_uint,
    pub(crate) pthr_delay_us: u64,
    pub(crate) lthr_delay_us: u64,
    pub(crate) capture_telemetry: bool,
}

pub(crate) const IN_PROGRESS: c_int = 1;
pub(crate) const WRITE: c_uint = 1;
/// NIXL locks its agent itself.
pub(crate) const THREAD_SYNC_STRICT: c_uint = 1;

/// The error of a call that returned `status`, if that is one.
pub(crate) fn check(call: &'static str, status: c_int) -> Result<(), NixlError> {
    if status == 0 { Ok(()) } else { Err(NixlError::Failed { call, status }) }
}
