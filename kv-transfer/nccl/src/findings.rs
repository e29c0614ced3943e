//! What of NCCL there is on a host, for `baton doctor`.

use std::{fmt, path::Path};

use baton_cuda::nccl::Nccl;

use crate::fabric::FabricError;

/// What of NCCL there is on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclFindings {
    /// Its version and where it is, or why there is none.
    pub library: Result<String, String>,
    /// Whether it gives ids under which two ranks could meet, if there is one.
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
