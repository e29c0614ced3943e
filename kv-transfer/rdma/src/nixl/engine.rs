//! An agent of NIXL's with its backend.

use std::{
    ffi::{CStr, CString, c_int, c_void},
    ptr,
    sync::Once,
};

use super::{
    api::{AgentConfig, Object, THREAD_SYNC_STRICT, check},
    error::NixlError,
    library::Nixl,
};

/// NIXL's backend. UCX chooses among the networks of the hosts.
const BACKEND: &CStr = c"UCX";

/// How often the progress thread polls when no event wakes it, in microseconds. 0 would make it spin.
const PROGRESS_DELAY_US: u64 = 10_000;

/// An agent of NIXL's with its backend: endpoints, and a thread that drives them.
pub(super) struct Engine {
    pub(super) nixl: Nixl,
    pub(super) agent: Object,
    pub(super) backend: Object,
}

impl Engine {
    pub(super) fn new(nixl: &Nixl, name: &str) -> Result<Engine, NixlError> {
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
