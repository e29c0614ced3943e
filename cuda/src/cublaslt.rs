//! cuBLASLt, loaded at run time: its raw functions. This module does not know the products that callers compute.
//!
//! The types are cudarc's. They are the same in CUDA 12 and 13.

use std::{
    ffi::{c_char, c_int, c_void},
    fmt,
    mem::ManuallyDrop,
    path::PathBuf,
};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cudaDataType, cudaStream_t,
};
use libloading::Library;

use crate::{
    CudaError,
    library::{CudaVersion, NoLibrary, Part, api, text, words},
};

const PART: Part = Part {
    name: "cuBLASLt",
    stem: "libcublasLt",
    variable: "BATON_CUBLASLT",
    packages: [
        "Debian, Ubuntu: libcublas-13-0; PyPI: nvidia-cublas",
        "Debian, Ubuntu: libcublas-12-8; PyPI: nvidia-cublas-cu12",
    ],
};

const SUCCESS: c_int = 0;

api! {
    pub struct Api {
        version: "cublasLtGetVersion" fn() -> usize;
        cuda_version: "cublasLtGetCudartVersion" fn() -> usize;
        status_name: "cublasLtGetStatusName" fn(c_int) -> *const c_char;
        create: "cublasLtCreate" fn(*mut cublasLtHandle_t) -> c_int;
        destroy: "cublasLtDestroy" fn(cublasLtHandle_t) -> c_int;
        create_product: "cublasLtMatmulDescCreate"
            fn(*mut cublasLtMatmulDesc_t, cublasComputeType_t, cudaDataType) -> c_int;
        destroy_product: "cublasLtMatmulDescDestroy" fn(cublasLtMatmulDesc_t) -> c_int;
        set_product: "cublasLtMatmulDescSetAttribute"
            fn(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, *const c_void, usize) -> c_int;
        create_layout: "cublasLtMatrixLayoutCreate"
            fn(*mut cublasLtMatrixLayout_t, cudaDataType, u64, u64, i64) -> c_int;
        destroy_layout: "cublasLtMatrixLayoutDestroy" fn(cublasLtMatrixLayout_t) -> c_int;
        create_preference: "cublasLtMatmulPreferenceCreate" fn(*mut cublasLtMatmulPreference_t) -> c_int;
        destroy_preference: "cublasLtMatmulPreferenceDestroy" fn(cublasLtMatmulPreference_t) -> c_int;
        set_preference: "cublasLtMatmulPreferenceSetAttribute"
            fn(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, *const c_void, usize) -> c_int;
        find_algorithms: "cublasLtMatmulAlgoGetHeuristic" fn(
            cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, c_int,
            *mut cublasLtMatmulHeuristicResult_t, *mut c_int
        ) -> c_int;
        check_algorithm: "cublasLtMatmulAlgoCheck" fn(
            cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, *const cublasLtMatmulAlgo_t,
            *mut cublasLtMatmulHeuristicResult_t
        ) -> c_int;
        multiply: "cublasLtMatmul" fn(
            cublasLtHandle_t, cublasLtMatmulDesc_t, *const c_void, *const c_void, cublasLtMatrixLayout_t,
            *const c_void, cublasLtMatrixLayout_t, *const c_void, *const c_void, cublasLtMatrixLayout_t,
            *mut c_void, cublasLtMatrixLayout_t, *const cublasLtMatmulAlgo_t, *mut c_void, usize, cudaStream_t
        ) -> c_int;
    }
}

/// The library.
pub struct CublasLt {
    /// Raw functions of `cublasLt.h`. [`check`](Self::check) converts their status.
    pub api: Api,
    path: PathBuf,
    _library: ManuallyDrop<Library>,
}

impl fmt::Debug for CublasLt {
    /// "12.9.1 of libcublasLt.so.12".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.version();
        let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
        write!(f, "{major}.{minor}.{patch} of {}", self.path.display())
    }
}

impl CublasLt {
    /// Loads the newest version that the driver supports: from `BATON_CUBLASLT`, from the system's loader, or from a
    /// toolkit.
    ///
    /// # Errors
    /// When no version is found.
    pub fn load(driver: Option<CudaVersion>) -> Result<CublasLt, NoLibrary> {
        let (library, path) = PART.load(None, driver)?;
        let api = Api::find(&library).map_err(|error| PART.absent(driver, words(&error)))?;
        // SAFETY: no arguments.
        let version = CudaVersion::of_number(unsafe { (api.cuda_version)() } as u32);
        PART.check(&path, version, driver)?;
        Ok(CublasLt { api, path, _library: library })
    }

    /// The number of its version: 120901 is 12.9.1.
    pub fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.api.version)() }
    }

    /// Converts a status to a result.
    ///
    /// # Errors
    /// When the status is not success.
    pub fn check(&self, call: &'static str, status: c_int) -> Result<(), CudaError> {
        match status {
            SUCCESS => Ok(()),
            // SAFETY: every number has a name, and names are static.
            status => Err(CudaError::Failed { call, why: unsafe { text((self.api.status_name)(status)) } }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs no device. Where the linker finds the library, all its functions must exist.
    #[test]
    fn either_version_is_found_or_reported_missing() {
        match CublasLt::load(None) {
            Ok(library) => {
                let text = format!("{library:?}");
                let major = text.split('.').next().unwrap();
                assert!(text.ends_with(&format!("libcublasLt.so.{major}")), "{text}");
                let error = library.check("cublasLtCreate", 7).unwrap_err().to_string();
                assert_eq!(error, "cublasLtCreate failed: CUBLAS_STATUS_INVALID_VALUE");
            }
            Err(error) => {
                let text = error.to_string();
                for word in [
                    "libcublasLt.so.13",
                    "libcublasLt.so.12",
                    "nvidia-cublas)",
                    "nvidia-cublas-cu12)",
                    "BATON_CUBLASLT",
                ] {
                    assert!(text.contains(word), "{text}");
                }
            }
        }
    }
}
