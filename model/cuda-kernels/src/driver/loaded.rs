//! Kernels on an NVIDIA device: compiled, loaded and launched.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use baton_cuda::{CudaError, Device, failed};
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, sys};
use cudarc::nvrtc::Ptx;

use super::error::OpenError;
use crate::compile::{Architecture, CubinCache};
use crate::kernel::{Kernel, KernelCode, KernelSource};

/// The variable that keeps kernels from starting before the kernels before them have ended: "0". Otherwise they do, on Hopper
/// and later.
pub const OVERLAP: &str = "BATON_OVERLAP_LAUNCHES";

/// The kernels of some sources.
pub struct LoadedKernels {
    device: Device,
    modules: Vec<Arc<CudaModule>>,
    functions: HashMap<&'static str, Function>,
    /// Whether launches are programmatic: a kernel may start when all blocks of the kernel before have started. Kernels
    /// begin with a wait for the end of the kernels before (`KERNEL` of `kernels/common.cuh`), so the latency of the launch is
    /// saved; or have the wait after first reads of older memory (`EARLY_KERNEL`). Only Hopper and later architectures have that wait.
    are_overlapped: bool,
}

struct Function {
    function: CudaFunction,
    /// Dynamic shared memory that was requested so far. The default limit depends on the kernel's static shared
    /// memory.
    shared_bytes: u32,
}

impl LoadedKernels {
    /// Loads the kernels. Those that the cache does not hold are compiled and added to it.
    ///
    /// # Errors
    /// When the device is too old, or a kernel cannot be compiled or loaded.
    pub fn new(
        device: &Device,
        sources: &[KernelSource],
        code: KernelCode,
    ) -> Result<LoadedKernels, OpenError> {
        let capability = device.context().compute_capability();
        let (major, minor) = capability.map_err(|error| failed("cuDeviceGetAttribute", error))?;
        let (major, minor) = (major as u32, minor as u32);
        if major < 8 {
            return Err(OpenError::TooOld { device: device.ordinal(), major, minor });
        }
        let cache = CubinCache::new(code, Some(device.driver_version()?));
        let load = |source| {
            let cubin = cache.get(source, Architecture::new(major, minor))?;
            let module = device.context().load_module(Ptx::from_binary(cubin.code));
            Ok(module.map_err(|error| failed("cuModuleLoadData", error))?)
        };
        let modules = sources.iter().map(load).collect::<Result<_, OpenError>>()?;
        let are_overlapped = major >= 9 && std::env::var_os(OVERLAP).is_none_or(|value| value != "0");
        Ok(LoadedKernels { device: device.clone(), modules, functions: HashMap::new(), are_overlapped })
    }

    /// Launches a kernel on `stream`.
    ///
    /// # Safety
    /// The memory that the arguments point to is valid until the kernel has run.
    pub unsafe fn launch<K: Kernel>(&mut self, kernel: &K, stream: &CudaStream) -> Result<(), CudaError> {
        let shape = kernel.shape();
        let [x, y, z] = shape.grid;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        self.device.bind()?;
        let function = self.function(kernel.name(), shape.shared_bytes)?;
        let mut params = [(&raw const *kernel).cast_mut().cast::<c_void>()];
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: stream.cu_stream(),
            attrs: &mut overlap,
            numAttrs: self.are_overlapped.into(),
        };
        // SAFETY: the type guarantees that the one parameter is the kernel's own; the call copies it and the
        // configuration. The caller guarantees the memory that it points to.
        let launched =
            unsafe { sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), ptr::null_mut()) };
        launched.result().map_err(|error| CudaError::Failed {
            call: kernel.name(),
            why: format!("cuLaunchKernelEx: {error}"),
        })
    }

    /// The kernel of this name, with its limit of dynamic shared memory raised to `shared_bytes`.
    fn function(&mut self, name: &'static str, shared_bytes: u32) -> Result<sys::CUfunction, CudaError> {
        if !self.functions.contains_key(name) {
            let found = self.modules.iter().find_map(|module| module.load_function(name).ok());
            let function = found.ok_or_else(|| CudaError::Failed {
                call: "cuModuleGetFunction",
                why: format!("no kernel {name} in the sources"),
            })?;
            self.functions.insert(name, Function { function, shared_bytes: 0 });
        }
        let found = self.functions.get_mut(name).expect("just loaded");
        if shared_bytes > found.shared_bytes {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let set = found.function.set_attribute(attribute, shared_bytes as i32);
            set.map_err(|error| failed("cuFuncSetAttribute", error))?;
            found.shared_bytes = shared_bytes;
        }
        Ok(found.function.cu_function())
    }
}
