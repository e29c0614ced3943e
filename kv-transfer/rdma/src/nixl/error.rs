//! Why NIXL fails, and the kinds of memory that it registers.

use std::ffi::c_int;

use baton_kv_cache::Region;
use baton_transfer::cuda;
use thiserror::Error;

/// Name of the library that has the C API.
pub(super) const LIBRARY: &str = "libnixl_capi.so";

/// Why NIXL failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum NixlError {
    /// The library is missing, or lacks a function.
    #[error(
        "no rdma without NIXL: {0}; install it (the wheel nixl-cu12 has it), and let BATON_NIXL name {LIBRARY} \
         or its folder, in the wheel .nixl_cu12.mesonpy.libs"
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
    pub(super) fn of(self, memory: Memory) -> NixlError {
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
    pub(crate) fn of(region: &Region<'_>) -> Memory {
        match region.device().map(|memory| memory.device()) {
            #[cfg(test)]
            Some(baton_transfer_conformance::fake_devices::HOST) => Memory::Dram,
            Some(device) => Memory::Vram(device),
            None => Memory::Dram,
        }
    }

    /// NIXL's name of it: kind and device.
    pub(crate) fn code(self) -> (u32, u32) {
        match self {
            Memory::Dram => (0, 0),
            Memory::Vram(device) => (1, device),
        }
    }

    /// The inverse.
    pub(crate) fn from_code(kind: u32, device: u32) -> Option<Memory> {
        match kind {
            0 => Some(Memory::Dram),
            1 => Some(Memory::Vram(device)),
            _ => None,
        }
    }
}
