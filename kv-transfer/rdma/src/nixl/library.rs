//! NIXL's library, loaded at run time.

use std::{
    error::Error,
    fmt,
    mem::ManuallyDrop,
    path::{Path, PathBuf},
    sync::Arc,
};

use libloading::Library;

use super::{
    api::Api,
    error::{LIBRARY, NixlError},
};

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
    pub(super) fn api(&self) -> &Api {
        &self.0.api
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
