//! Whether a host can use NCCL, for `baton doctor`.

use std::{fmt, path::Path};

use baton_cuda::nccl::Nccl;

use crate::fabric::FabricError;

/// Whether this host can use NCCL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclFindings {
    /// The library's version and path, or why it cannot be loaded.
    pub library: Result<String, String>,
    /// Whether the library creates unique ids, if it was loaded.
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
            num_devices: baton_transfer::cuda::num_devices().map_err(|error| error.to_string()),
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
