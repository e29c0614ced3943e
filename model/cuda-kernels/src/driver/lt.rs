//! Products by cuBLASLt: how each shape is multiplied best is asked once.
//!
//! cuBLASLt counts in columns: a row-major `[rows][columns]` is its matrix of so many columns of `columns` elements. So
//! `out = left right^T` is asked for as `out^T = right left^T`.

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

/// What algorithms may use; NVIDIA's advice for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Shapes whose plans are kept. A prompt has any number of rows.
const MAX_PLANS: usize = 4096;

/// Of each row and matrix: what device.rs asks for.
const ALIGNMENT_BYTES: u32 = 16;

pub struct Products {
    plans: HashMap<Shape, Plan>,
    library: Arc<CublasLt>,
    handle: sys::cublasLtHandle_t,
    workspace: Allocation,
    stream: Arc<CudaStream>,
}

/// What a plan depends on.
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

/// What both sides are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Numbers {
    Bf16,
    /// E4M3. Scales of rows and of blocks are since CUDA 12.9, on Hopper.
    Fp8(Fp8Scaling),
}

/// Values of `cublasLtMatmulMatrixScale_t` that are newer than the bindings: a scale for each row (`OUTER_VEC_32F`), for 128
/// numbers of a row (`VEC128_32F`), for 128 of 128 rows (`BLK128x128_32F`).
const OUTER_VECTOR: i32 = 3;
const VECTORS_OF_128: i32 = 4;
const BLOCKS_OF_128: i32 = 5;

/// CUBLAS_STATUS_NOT_SUPPORTED: no algorithm is found.
const NOT_SUPPORTED: c_int = 15;

/// What is multiplied once.
struct Operands {
    left: Address,
    right: Address,
    out: Address,
    beta: f32,
    left_scales: Address,
    right_scales: Address,
}

/// How one shape is multiplied.
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
    /// The three matrices are there until the stream has done it.
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
        // SAFETY: by the caller's word.
        unsafe { self.run(shape, &operands) }
    }

    /// Sums are those of the matrix units, promoted to f32 on the way: fast accumulation, which Hopper has besides, keeps
    /// fewer bits.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply), for the scales, too.
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
        // SAFETY: by the caller's word.
        unsafe { self.run(shape, &operands) }
    }

    /// # Safety
    /// The matrices, and the scales of a shape that has some, are there until the stream has done it.
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
        // SAFETY: the plan is for this shape, the matrices are there by the caller's word; the factors are read by the call.
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
        // SAFETY: made by `new`, and not used after this.
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
        // Each is destroyed with the plan, also when a later one fails.
        let (sums, scales) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F);
        // SAFETY: the out pointer is valid.
        let created = unsafe { (library.api.create_product)(&mut plan.product, sums, scales) };
        library.check("cublasLtMatmulDescCreate", created)?;
        // CUBLAS_OP_T
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, 1i32)?;
        // What is on the right here is cuBLASLt's A.
        let modes = match shape.numbers {
            Numbers::Bf16 | Numbers::Fp8(Fp8Scaling::None) => None,
            Numbers::Fp8(Fp8Scaling::Rows) => Some([OUTER_VECTOR; 2]),
            Numbers::Fp8(Fp8Scaling::Blocks) => Some([BLOCKS_OF_128, VECTORS_OF_128]),
        };
        if let Some([a, b]) = modes {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a)?;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b)?;
        }
        // Algorithms may depend on whether there are scales.
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
        // SAFETY: all were just made, and there is room for the one result that is asked for.
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
        // SAFETY: zeroes, or what was found. The state is read as the number that it is: a newer library may have others.
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
        // SAFETY: the description is there, and the attribute is of this type.
        let set = unsafe { (self.library.api.set_product)(self.product, attribute, value, size_of::<T>()) };
        self.library.check("cublasLtMatmulDescSetAttribute", set)
    }

    /// Scales that the next product of this shape reads.
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
        // SAFETY: each was made by `new`, if it is there. Nothing can be done about a failure.
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

/// What is asked of an algorithm.
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
        // SAFETY: the preferences are there, and the attribute is of this type.
        let set =
            unsafe { (self.library.api.set_preference)(self.preference, attribute, value, size_of::<T>()) };
        self.library.check("cublasLtMatmulPreferenceSetAttribute", set)
    }
}

impl Drop for Preferences<'_> {
    fn drop(&mut self) {
        // SAFETY: made with it, and not used after this.
        unsafe { (self.library.api.destroy_preference)(self.preference) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asking for an algorithm is the first that takes a device: what comes before it is right for this library.
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
