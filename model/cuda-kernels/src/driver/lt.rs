//! Matrix products with cuBLASLt. The algorithm for each shape is looked up once.
//!
//! cuBLASLt is column-major: a row-major `[rows][columns]` is its matrix of `columns` rows and `rows` columns. `out =
//! left right^T` is therefore computed as `out^T = right left^T`.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use baton_cuda::cublaslt::CublasLt;
use baton_cuda::{Allocation, CudaError, Device};
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;

use crate::device::{Fp8Product, Fp8Scaling, Product};
use crate::kernel::Address;

/// Workspace of algorithms, of the size that NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Shapes whose plans are kept. Prompts have any number of rows, so there is a limit.
const MAX_PLANS: usize = 4096;

/// Alignment of each row and matrix, as `device.rs` requires it.
const ALIGNMENT_BYTES: u32 = 16;

pub struct Products {
    plans: HashMap<Shape, Plan>,
    library: Arc<CublasLt>,
    handle: sys::cublasLtHandle_t,
    workspace: Allocation,
    stream: Arc<CudaStream>,
}

/// Everything that a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    num_rows: u64,
    num_out: u64,
    num_in: u64,
    left_stride: u64,
    out_stride: u64,
    is_out_f32: bool,
    is_added: bool,
    numbers: Numbers,
}

/// Number format of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Numbers {
    Bf16,
    /// E4M3. Scales of rows and of blocks need CUDA 12.9 and Hopper.
    Fp8(Fp8Scaling),
}

/// Values of `cublasLtMatmulMatrixScale_t` that the bindings lack: a scale for each row (`OUTER_VEC_32F`), for each
/// 128 numbers of a row (`VEC128_32F`), and for each block of 128 x 128 (`BLK128x128_32F`).
const OUTER_VECTOR: i32 = 3;
const VECTORS_OF_128: i32 = 4;
const BLOCKS_OF_128: i32 = 5;

/// CUBLAS_STATUS_NOT_SUPPORTED: there is no algorithm.
const NOT_SUPPORTED: c_int = 15;

/// Addresses of one product.
struct Operands {
    left: Address,
    right: Address,
    out: Address,
    beta: f32,
    left_scales: Address,
    right_scales: Address,
}

/// Descriptors and algorithm for one shape.
struct Plan {
    library: Arc<CublasLt>,
    product: sys::cublasLtMatmulDesc_t,
    right: sys::cublasLtMatrixLayout_t,
    left: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Products {
    pub fn new(device: &Device, stream: &Arc<CudaStream>) -> Result<Products, CudaError> {
        let library = Arc::new(CublasLt::load(Some(device.driver_version()?))?);
        tracing::info!(?library, "cuBLASLt was loaded");
        device.bind()?;
        let workspace = Allocation::new(device, WORKSPACE_BYTES)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the out pointer is valid.
        library.check("cublasLtCreate", unsafe { (library.api.create)(&mut handle) })?;
        Ok(Products { plans: HashMap::new(), library, handle, workspace, stream: Arc::clone(stream) })
    }

    /// # Safety
    /// The three matrices are valid until the stream has computed the product.
    pub unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError> {
        let shape = Shape {
            num_rows: product.num_rows,
            num_out: product.num_out,
            num_in: product.num_in,
            left_stride: product.left_stride,
            out_stride: product.out_stride,
            is_out_f32: product.is_out_f32 != 0,
            is_added: product.beta != 0.0,
            numbers: Numbers::Bf16,
        };
        let operands = Operands {
            left: product.left,
            right: product.right,
            out: product.out,
            beta: product.beta,
            left_scales: Address::NULL,
            right_scales: Address::NULL,
        };
        // SAFETY: the caller guarantees it.
        unsafe { self.run(shape, &operands) }
    }

    /// Accumulates in f32: Hopper's fast accumulation would keep fewer bits.
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply), and the scales are valid too.
    pub unsafe fn multiply_fp8(&mut self, product: &Fp8Product) -> Result<(), CudaError> {
        let shape = Shape {
            num_rows: product.num_rows,
            num_out: product.num_out,
            num_in: product.num_in,
            left_stride: product.num_in,
            out_stride: product.num_out,
            is_out_f32: false,
            is_added: false,
            numbers: Numbers::Fp8(product.scaling),
        };
        let Fp8Product { left, right, out, left_scales, right_scales, .. } = *product;
        let operands = Operands { left, right, out, beta: 0.0, left_scales, right_scales };
        // SAFETY: the caller guarantees it.
        unsafe { self.run(shape, &operands) }
    }

    /// # Safety
    /// The matrices, and the scales of a shape that has scales, are valid until the stream has computed the product.
    unsafe fn run(&mut self, shape: Shape, operands: &Operands) -> Result<(), CudaError> {
        if !self.plans.contains_key(&shape) {
            if self.plans.len() == MAX_PLANS {
                self.plans.clear();
            }
            let plan = Plan::new(&self.library, self.handle, &shape, operands)?;
            self.plans.insert(shape, plan);
        }
        let plan = &self.plans[&shape];
        plan.set_scales(&shape, operands)?;
        let (alpha, beta) = (1.0f32, operands.beta);
        let out = operands.out.0 as *mut c_void;
        // SAFETY: the plan is for this shape. The caller guarantees the matrices. The call reads the factors.
        let multiplied = unsafe {
            (self.library.api.multiply)(
                self.handle,
                plan.product,
                (&raw const alpha).cast(),
                operands.right.0 as *const c_void,
                plan.right,
                operands.left.0 as *const c_void,
                plan.left,
                (&raw const beta).cast(),
                out,
                plan.out,
                out,
                plan.out,
                &plan.algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.size_bytes(),
                self.stream.cu_stream().cast(),
            )
        };
        self.library.check("cublasLtMatmul", multiplied)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: `new` created it, and nothing uses it after this.
        unsafe { (self.library.api.destroy)(self.handle) };
    }
}

impl Plan {
    fn new(
        library: &Arc<CublasLt>,
        handle: sys::cublasLtHandle_t,
        shape: &Shape,
        operands: &Operands,
    ) -> Result<Plan, CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;

        let out_type =
            if shape.is_out_f32 { sys::cudaDataType::CUDA_R_32F } else { sys::cudaDataType::CUDA_R_16BF };
        let in_type = match shape.numbers {
            Numbers::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            Numbers::Fp8(_) => sys::cudaDataType::CUDA_R_8F_E4M3,
        };
        let mut plan = Plan {
            library: Arc::clone(library),
            product: ptr::null_mut(),
            right: ptr::null_mut(),
            left: ptr::null_mut(),
            out: ptr::null_mut(),
            // SAFETY: plain data; the library fills it in below.
            algorithm: unsafe { std::mem::zeroed() },
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
        if let Some([a, b]) = modes {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a)?;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b)?;
        }
        // The choice of algorithm may depend on whether there are scales.
        plan.set_scales(shape, operands)?;
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

        let preference = Preferences::new(library)?;
        preference.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES)?;
        for matrix in [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(matrix, ALIGNMENT_BYTES)?;
        }
        let (mut found, mut num_found) = (MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed(), 0);
        // SAFETY: all descriptors were created above, and there is room for the one requested result.
        let asked = unsafe {
            (library.api.find_algorithms)(
                handle,
                plan.product,
                plan.right,
                plan.left,
                plan.out,
                plan.out,
                preference.preference,
                1,
                found.as_mut_ptr(),
                &mut num_found,
            )
        };
        library.check("cublasLtMatmulAlgoGetHeuristic", asked)?;
        // SAFETY: the memory holds zeros or a result. The state is read as an integer because a newer library may
        // have new values.
        let (algorithm, state) = unsafe {
            let found = found.as_ptr();
            ((*found).algo, (&raw const (*found).state).cast::<c_int>().read())
        };
        let state = if num_found == 0 { NOT_SUPPORTED } else { state };
        library.check("cublasLtMatmulAlgoGetHeuristic", state)?;
        plan.algorithm = algorithm;
        Ok(plan)
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> Result<(), CudaError> {
        let value: *const c_void = (&raw const value).cast();
        // SAFETY: the descriptor is valid, and the attribute has this type.
        let set = unsafe { (self.library.api.set_product)(self.product, attribute, value, size_of::<T>()) };
        self.library.check("cublasLtMatmulDescSetAttribute", set)
    }

    /// Sets the scales of the next product of this shape.
    fn set_scales(&self, shape: &Shape, operands: &Operands) -> Result<(), CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;

        if let Numbers::Bf16 | Numbers::Fp8(Fp8Scaling::None) = shape.numbers {
            return Ok(());
        }
        self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.right_scales.0)?;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.left_scales.0)
    }
}

impl Drop for Plan {
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
        let scalings = [Fp8Scaling::None, Fp8Scaling::Rows, Fp8Scaling::Blocks];
        for numbers in [Numbers::Bf16].into_iter().chain(scalings.map(Numbers::Fp8)) {
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
            let error = Plan::new(&library, ptr::null_mut(), &shape, &operands).err().unwrap();
            let expected = "cublasLtMatmulAlgoGetHeuristic failed: CUBLAS_STATUS_NOT_INITIALIZED";
            assert_eq!(error.to_string(), expected, "{numbers:?}, {library:?}");
        }
    }
}
