//! One product as cuBLASLt describes it, and its algorithms.
//!
//! cuBLASLt is column-major: a row-major `[rows][columns]` is its matrix of `columns` rows and `rows` columns. `out =
//! left right^T` is therefore computed as `out^T = right left^T`.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use baton_cuda::CudaError;
use baton_cuda::cublaslt::CublasLt;
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;

use super::choices::Algorithm;
use super::shape::{Numbers, Shape};
use crate::device::Fp8Scaling;
use crate::kernel::Address;

/// Workspace of algorithms, of the size that NVIDIA recommends for Hopper.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// Alignment of each row and matrix, as `device.rs` requires it.
const ALIGNMENT_BYTES: u32 = 16;

/// Values of `cublasLtMatmulMatrixScale_t` that the bindings lack: a scale for each row (`OUTER_VEC_32F`), for each
/// 128 numbers of a row (`VEC128_32F`), and for each block of 128 x 128 (`BLK128x128_32F`).
const OUTER_VECTOR: i32 = 3;
const VECTORS_OF_128: i32 = 4;
const BLOCKS_OF_128: i32 = 5;

/// CUBLASLT_REDUCTION_SCHEME_NONE
const NO_REDUCTION: u32 = 0;

const SUCCESS: c_int = 0;
/// CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_ARCH_MISMATCH and CUBLAS_STATUS_NOT_SUPPORTED: there is no such product.
const REFUSALS: [c_int; 3] = [7, 8, 15];

/// Addresses of one product.
pub struct Operands {
    pub left: Address,
    pub right: Address,
    pub out: Address,
    pub beta: f32,
    pub left_scales: Address,
    pub right_scales: Address,
}

/// How an algorithm may add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    Any,
    /// No output is the sum of parts that several blocks of threads computed.
    Whole,
}

/// Descriptors and algorithm for one shape.
pub struct ProductPlan {
    library: Arc<CublasLt>,
    product: sys::cublasLtMatmulDesc_t,
    right: sys::cublasLtMatrixLayout_t,
    left: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    numbers: Numbers,
    pub algorithm: Algorithm,
}

impl ProductPlan {
    /// Describes a product. It has no algorithm yet. `None`: the library does not know its scales.
    pub fn new(
        library: &Arc<CublasLt>,
        shape: &Shape,
        operands: &Operands,
    ) -> Result<Option<ProductPlan>, CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;

        let out_type =
            if shape.is_out_f32 { sys::cudaDataType::CUDA_R_32F } else { sys::cudaDataType::CUDA_R_16BF };
        let in_type = match shape.numbers {
            Numbers::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            Numbers::Fp8(_) => sys::cudaDataType::CUDA_R_8F_E4M3,
        };
        let mut plan = ProductPlan {
            library: Arc::clone(library),
            product: ptr::null_mut(),
            right: ptr::null_mut(),
            left: ptr::null_mut(),
            out: ptr::null_mut(),
            numbers: shape.numbers,
            algorithm: [0; 8],
        };
        // The plan destroys each descriptor, also when creating a later one fails.
        let (sums, scales) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F);
        // SAFETY: the out pointer is valid.
        let created = unsafe { (library.api.create_product)(&mut plan.product, sums, scales) };
        library.check("cublasLtMatmulDescCreate", created)?;
        // CUBLAS_OP_T
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, 1i32)?;
        // The right side here is cuBLASLt's A.
        let modes = match shape.numbers {
            Numbers::Bf16 | Numbers::Fp8(Fp8Scaling::None) => None,
            Numbers::Fp8(Fp8Scaling::Rows) => Some([OUTER_VECTOR; 2]),
            Numbers::Fp8(Fp8Scaling::Blocks) => Some([BLOCKS_OF_128, VECTORS_OF_128]),
        };
        if let Some([a, b]) = modes
            && !(plan.takes_mode(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a)?
                && plan.takes_mode(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b)?)
        {
            return Ok(None);
        }
        // The choice of algorithm may depend on whether there are scales.
        plan.set_scales(operands)?;
        for (layout, number_type, num_rows, num_columns, stride) in [
            (&mut plan.right, in_type, shape.num_in, shape.num_out, shape.num_in),
            (&mut plan.left, in_type, shape.num_in, shape.num_rows, shape.left_stride),
            (&mut plan.out, out_type, shape.num_out, shape.num_rows, shape.out_stride),
        ] {
            // SAFETY: the out pointer is valid.
            let created = unsafe {
                (library.api.create_layout)(layout, number_type, num_rows, num_columns, stride as i64)
            };
            library.check("cublasLtMatrixLayoutCreate", created)?;
        }
        Ok(Some(plan))
    }

    /// The library's algorithms for this product, the most promising ones first: at most `most`. Empty if there is no
    /// such product.
    pub fn find(
        &self,
        handle: sys::cublasLtHandle_t,
        most: usize,
        sums: Sums,
    ) -> Result<Vec<Algorithm>, CudaError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;

        let preference = Preferences::new(&self.library)?;
        preference.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES)?;
        if sums == Sums::Whole {
            preference.set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, NO_REDUCTION)?;
        }
        for matrix in [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(matrix, ALIGNMENT_BYTES)?;
        }
        // SAFETY: plain data.
        let empty: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let (mut found, mut num_found) = (vec![empty; most], 0);
        // SAFETY: `new` created all descriptors, and there is room for the requested results.
        let asked = unsafe {
            (self.library.api.find_algorithms)(
                handle,
                self.product,
                self.right,
                self.left,
                self.out,
                self.out,
                preference.preference,
                most as c_int,
                found.as_mut_ptr(),
                &mut num_found,
            )
        };
        if REFUSALS.contains(&asked) {
            return Ok(vec![]);
        }
        self.library.check("cublasLtMatmulAlgoGetHeuristic", asked)?;
        found.truncate(num_found.max(0) as usize);
        Ok(found.iter().filter(|found| state_of(found) == SUCCESS).map(|found| found.algo.data).collect())
    }

    /// Whether an algorithm, which may have been found for another number of rows, computes this product.
    pub fn takes(&self, handle: sys::cublasLtHandle_t, algorithm: Algorithm) -> bool {
        // SAFETY: plain data.
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let algorithm = sys::cublasLtMatmulAlgo_t { data: algorithm };
        // SAFETY: `new` created all descriptors. The out pointer is valid.
        let checked = unsafe {
            (self.library.api.check_algorithm)(
                handle,
                self.product,
                self.right,
                self.left,
                self.out,
                self.out,
                &algorithm,
                &mut found,
            )
        };
        checked == SUCCESS && state_of(&found) == SUCCESS && found.workspaceSize <= WORKSPACE_BYTES
    }

    /// Queues the product. Returns `false` if the library refuses it; then nothing was queued.
    ///
    /// # Safety
    /// The matrices, and the scales of a shape that has scales, are valid until the stream has computed the product.
    /// The workspace has [`WORKSPACE_BYTES`], and no other stream uses it.
    pub unsafe fn launch(
        &self,
        handle: sys::cublasLtHandle_t,
        operands: &Operands,
        workspace: u64,
        stream: &CudaStream,
    ) -> Result<bool, CudaError> {
        self.set_scales(operands)?;
        let (alpha, beta) = (1.0f32, operands.beta);
        let out = operands.out.0 as *mut c_void;
        let algorithm = sys::cublasLtMatmulAlgo_t { data: self.algorithm };
        // SAFETY: the plan is for this shape. The caller guarantees the matrices. The call reads the factors.
        let multiplied = unsafe {
            (self.library.api.multiply)(
                handle,
                self.product,
                (&raw const alpha).cast(),
                operands.right.0 as *const c_void,
                self.right,
                operands.left.0 as *const c_void,
                self.left,
                (&raw const beta).cast(),
                out,
                self.out,
                out,
                self.out,
                &algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.cu_stream().cast(),
            )
        };
        if REFUSALS.contains(&multiplied) {
            return Ok(false);
        }
        self.library.check("cublasLtMatmul", multiplied)?;
        Ok(true)
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> Result<(), CudaError> {
        self.library.check("cublasLtMatmulDescSetAttribute", self.status_of_set(attribute, value))
    }

    /// Sets a mode of scales. Returns `false` if the library does not know it: the attribute is of CUDA 12.8, its values
    /// are of 12.9.
    fn takes_mode(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        mode: i32,
    ) -> Result<bool, CudaError> {
        let status = self.status_of_set(attribute, mode);
        if REFUSALS.contains(&status) {
            return Ok(false);
        }
        self.library.check("cublasLtMatmulDescSetAttribute", status).map(|()| true)
    }

    fn status_of_set<T: Copy>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: T) -> c_int {
        let value: *const c_void = (&raw const value).cast();
        // SAFETY: the descriptor is valid, and the attribute has this type.
        unsafe { (self.library.api.set_product)(self.product, attribute, value, size_of::<T>()) }
    }

    /// Sets the scales of the next product.
    fn set_scales(&self, operands: &Operands) -> Result<(), CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;

        if let Numbers::Bf16 | Numbers::Fp8(Fp8Scaling::None) = self.numbers {
            return Ok(());
        }
        self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.right_scales.0)?;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.left_scales.0)
    }
}

impl Drop for ProductPlan {
    fn drop(&mut self) {
        // SAFETY: `new` created each descriptor that is not null. A failure has no remedy.
        unsafe {
            if !self.product.is_null() {
                (self.library.api.destroy_product)(self.product);
            }
            for layout in [self.right, self.left, self.out] {
                if !layout.is_null() {
                    (self.library.api.destroy_layout)(layout);
                }
            }
        }
    }
}

/// Requirements on an algorithm.
struct Preferences<'a> {
    library: &'a CublasLt,
    preference: sys::cublasLtMatmulPreference_t,
}

impl Preferences<'_> {
    fn new(library: &CublasLt) -> Result<Preferences<'_>, CudaError> {
        let mut preference = ptr::null_mut();
        // SAFETY: the out pointer is valid.
        let created = unsafe { (library.api.create_preference)(&mut preference) };
        library.check("cublasLtMatmulPreferenceCreate", created)?;
        Ok(Preferences { library, preference })
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: T,
    ) -> Result<(), CudaError> {
        let value: *const c_void = (&raw const value).cast();
        // SAFETY: the preferences are valid, and the attribute has this type.
        let set =
            unsafe { (self.library.api.set_preference)(self.preference, attribute, value, size_of::<T>()) };
        self.library.check("cublasLtMatmulPreferenceSetAttribute", set)
    }
}

impl Drop for Preferences<'_> {
    fn drop(&mut self) {
        // SAFETY: `new` created it, and nothing uses it after this.
        unsafe { (self.library.api.destroy_preference)(self.preference) };
    }
}

/// The state of a found algorithm, as an integer: a newer library may have new values.
fn state_of(found: &sys::cublasLtMatmulHeuristicResult_t) -> c_int {
    // SAFETY: the field is valid, and as large as an integer.
    unsafe { (&raw const found.state).cast::<c_int>().read() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The search for an algorithm is the first call that needs a device. The calls before it must succeed without
    /// one.
    #[test]
    fn products_are_described_without_a_device() {
        let library = match CublasLt::load(None) {
            Ok(library) => Arc::new(library),
            Err(error) => return println!("SKIPPED: {error}"),
        };
        let [left, right, out, left_scales, right_scales] = [1, 2, 3, 4, 5].map(|nth| Address(nth << 20));
        let operands = Operands { left, right, out, beta: 0.0, left_scales, right_scales };
        for numbers in Numbers::ALL {
            let shape = Shape {
                num_rows: 32,
                num_out: 64,
                num_in: 128,
                left_stride: 256,
                out_stride: 64,
                is_out_f32: false,
                is_added: false,
                numbers,
            };
            let Some(plan) = ProductPlan::new(&library, &shape, &operands).unwrap() else {
                println!("{library:?} does not know the scales of {numbers:?}");
                continue;
            };
            let error = plan.find(ptr::null_mut(), 1, Sums::Any).err().unwrap();
            let expected = "cublasLtMatmulAlgoGetHeuristic failed: CUBLAS_STATUS_NOT_INITIALIZED";
            assert_eq!(error.to_string(), expected, "{numbers:?}, {library:?}");
        }
    }
}
