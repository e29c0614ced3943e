//! Matrix products with cuBLASLt, and the choice of their algorithms.
//!
//! While a device starts, the library's most promising algorithms for each shape are timed on the products of the first
//! steps. The fastest one serves all numbers of rows up to the next power of two, and is kept in a file.

use std::collections::HashMap;
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_cuda::cublaslt::CublasLt;
use baton_cuda::{Allocation, CudaError, Device, failed};
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUevent_flags;

use super::choices::{Algorithm, Choices};
use super::plan::{Operands, ProductPlan, Sums, WORKSPACE_BYTES};
use super::shape::{Numbers, Shape};
use crate::device::{Fp8Product, Product};
use crate::kernel::Address;

/// Shapes whose plans are kept. Prompts have any number of rows, so there is a limit.
const MAX_PLANS: usize = 4096;

/// Algorithms that are timed for a shape.
const NUM_CANDIDATES: usize = 8;

/// Timed runs of an algorithm, after one that loads its code.
const NUM_RUNS: u32 = 3;

/// Time for choosing at a start. Later shapes get the library's first algorithm.
const CHOOSING_TIME: Duration = Duration::from_secs(20);

/// Time between two reports of progress.
const REPORT_PERIOD: Duration = Duration::from_secs(2);

/// The rows of the shape whose algorithm is used for any number of rows, if bits must not depend on it.
const FIXED_ROWS: u64 = 256;
/// Few and many rows, which that algorithm must serve too.
const SERVED_ROWS: [u64; 2] = [1, 8192];

pub struct Products {
    /// `None`: the library refused the product.
    plans: HashMap<Shape, Option<ProductPlan>>,
    rule: AlgorithmRule,
    choices: Choices,
    /// `None`: the device has started.
    choosing: Option<Choosing>,
    library: Arc<CublasLt>,
    handle: sys::cublasLtHandle_t,
    workspace: Allocation,
    stream: Arc<CudaStream>,
}

/// Which algorithm computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AlgorithmRule {
    /// The fastest for its number of rows.
    Fastest,
    /// One for any number of rows, in which no output is a sum of several blocks' sums. So each output is added in the
    /// same order.
    OnePerMatrix,
}

/// Progress of choosing.
struct Choosing {
    since: Instant,
    reported: Instant,
    num_chosen: usize,
    is_late: bool,
}

impl Products {
    /// Choices are kept in a file in `cache_dir`.
    pub fn new(
        device: &Device,
        stream: &Arc<CudaStream>,
        cache_dir: Option<&Path>,
    ) -> Result<Products, CudaError> {
        let driver = device.driver_version()?;
        let library = Arc::new(CublasLt::load(Some(driver))?);
        tracing::info!(?library, "cuBLASLt was loaded");
        device.bind()?;
        let context = device.context();
        let card = context.name().map_err(|error| failed("cuDeviceGetName", error))?;
        let (major, minor) =
            context.compute_capability().map_err(|error| failed("cuDeviceGetAttribute", error))?;
        let machine = format!("{card}, {major}.{minor}, driver {driver}, cuBLASLt {}", library.version());
        let workspace = Allocation::new(device, WORKSPACE_BYTES)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the out pointer is valid.
        library.check("cublasLtCreate", unsafe { (library.api.create)(&mut handle) })?;
        Ok(Products {
            plans: HashMap::new(),
            rule: AlgorithmRule::Fastest,
            choices: Choices::load(cache_dir, machine),
            choosing: None,
            library,
            handle,
            workspace,
            stream: Arc::clone(stream),
        })
    }

    /// From now on the bits of a row of a product do not depend on the number of rows.
    pub fn fix(&mut self) {
        self.rule = AlgorithmRule::OnePerMatrix;
        self.plans.clear();
    }

    /// From now on algorithms are timed.
    pub fn begin_choice(&mut self) {
        let now = Instant::now();
        self.choosing = Some(Choosing { since: now, reported: now, num_chosen: 0, is_late: false });
        // Plans of trials are from before.
        self.plans.clear();
    }

    /// Keeps the choices.
    pub fn end_choice(&mut self) {
        let Some(Choosing { since, num_chosen, .. }) = self.choosing.take() else { return };
        self.choices.keep();
        // Another process may have chosen otherwise.
        self.plans.clear();
        if self.rule == AlgorithmRule::Fastest {
            let (num_known, seconds) = (self.choices.len(), since.elapsed().as_secs_f32());
            tracing::info!(num_chosen, num_known, seconds, "the algorithms of products are chosen");
        }
    }

    /// # Safety
    /// The three matrices are valid until the stream has computed the product.
    pub unsafe fn multiply(&mut self, product: &Product) -> Result<(), CudaError> {
        let operands = Operands {
            left: product.left,
            right: product.right,
            out: product.out,
            beta: product.beta,
            left_scales: Address::NULL,
            right_scales: Address::NULL,
        };
        let shape = Shape::of(product);
        // SAFETY: the caller guarantees it.
        match unsafe { self.run(shape, &operands) }? {
            true => Ok(()),
            false => {
                Err(CudaError::Failed { call: "cublasLtMatmul", why: format!("no algorithm for {shape:?}") })
            }
        }
    }

    /// Accumulates in f32: Hopper's fast accumulation would keep fewer bits. Returns `false` if the library refuses the
    /// product; then nothing was queued.
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply), and the scales are valid too.
    pub unsafe fn multiply_fp8(&mut self, product: &Fp8Product) -> Result<bool, CudaError> {
        let Fp8Product { left, right, out, left_scales, right_scales, .. } = *product;
        let operands = Operands { left, right, out, beta: 0.0, left_scales, right_scales };
        // SAFETY: the caller guarantees it.
        unsafe { self.run(Shape::of_fp8(product), &operands) }
    }

    /// Returns `false` if the library refuses the product.
    ///
    /// # Safety
    /// The matrices, and the scales of a shape that has scales, are valid until the stream has computed the product.
    unsafe fn run(&mut self, shape: Shape, operands: &Operands) -> Result<bool, CudaError> {
        if !self.plans.contains_key(&shape) {
            if self.plans.len() == MAX_PLANS {
                self.plans.clear();
            }
            // SAFETY: the caller guarantees it.
            let plan = unsafe { self.plan(&shape, operands) }?;
            self.remember(shape, plan);
        }
        let Some(plan) = &self.plans[&shape] else { return Ok(false) };
        // SAFETY: the caller guarantees it.
        if unsafe { plan.launch(self.handle, operands, self.workspace.address(), &self.stream) }? {
            return Ok(true);
        }
        self.remember(shape, None);
        Ok(false)
    }

    fn remember(&mut self, shape: Shape, plan: Option<ProductPlan>) {
        if let (None, Numbers::Fp8(_)) = (&plan, shape.numbers) {
            tracing::warn!(?shape, "cuBLASLt refuses this product in fp8: its weights are widened instead");
        }
        self.plans.insert(shape, plan);
    }

    /// The plan of a new shape. `None`: there is no such product.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    unsafe fn plan(&mut self, shape: &Shape, operands: &Operands) -> Result<Option<ProductPlan>, CudaError> {
        let Some(mut plan) = ProductPlan::new(&self.library, shape, operands)? else { return Ok(None) };
        let algorithm = match self.rule {
            AlgorithmRule::OnePerMatrix => self.fixed(&plan, shape, operands)?,
            AlgorithmRule::Fastest => {
                let chosen = self.choices.get(&shape.padded());
                match chosen.filter(|algorithm| plan.takes(self.handle, *algorithm)) {
                    Some(algorithm) => Some(algorithm),
                    // SAFETY: the caller guarantees it.
                    None => unsafe { self.choose(&mut plan, shape, operands) }?,
                }
            }
        };
        let Some(algorithm) = algorithm else { return Ok(None) };
        plan.algorithm = algorithm;
        Ok(Some(plan))
    }

    /// The algorithm that serves any number of rows.
    fn fixed(
        &self,
        plan: &ProductPlan,
        shape: &Shape,
        operands: &Operands,
    ) -> Result<Option<Algorithm>, CudaError> {
        let plan_of = |num_rows| ProductPlan::new(&self.library, &Shape { num_rows, ..*shape }, operands);
        let Some(of_all) = plan_of(FIXED_ROWS)? else { return Ok(None) };
        let mut served = Vec::new();
        for num_rows in SERVED_ROWS {
            served.extend(plan_of(num_rows)?);
        }
        let serves = |algorithm: &Algorithm| served.iter().all(|plan| plan.takes(self.handle, *algorithm));
        let found = of_all.find(self.handle, NUM_CANDIDATES, Sums::Whole)?.into_iter().find(serves);
        // The choice must not depend on these rows: if it does not serve them, there is none.
        Ok(found.filter(|algorithm| plan.takes(self.handle, *algorithm)))
    }

    /// The fastest algorithm while the device starts, later the library's first one. `None`: there is none.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    unsafe fn choose(
        &mut self,
        plan: &mut ProductPlan,
        shape: &Shape,
        operands: &Operands,
    ) -> Result<Option<Algorithm>, CudaError> {
        // A product that is added to its output cannot be repeated.
        let is_timed = !shape.is_added
            && self.choosing.as_mut().is_some_and(|choosing| choosing.has_time(CHOOSING_TIME));
        let found = plan.find(self.handle, if is_timed { NUM_CANDIDATES } else { 1 }, Sums::Any)?;
        let mut fastest = found.first().copied();
        if is_timed {
            let mut least = f32::INFINITY;
            for algorithm in found {
                plan.algorithm = algorithm;
                // SAFETY: the caller guarantees it.
                if let Some(time) = unsafe { self.time(plan, operands) }?
                    && time < least
                {
                    (fastest, least) = (Some(algorithm), time);
                }
            }
            fastest = fastest.filter(|_| least < f32::INFINITY);
        }
        if let (Some(choosing), Some(algorithm)) = (&mut self.choosing, fastest) {
            choosing.num_chosen += 1;
            choosing.report();
            if is_timed || shape.is_added {
                self.choices.insert(shape.padded(), algorithm);
            } else {
                self.choices.insert_untimed(shape.padded(), algorithm);
            }
        }
        Ok(fastest)
    }

    /// Milliseconds of a product. `None`: the library refuses the algorithm after all.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    unsafe fn time(&self, plan: &ProductPlan, operands: &Operands) -> Result<Option<f32>, CudaError> {
        // SAFETY: the caller guarantees it.
        let launch = || unsafe { plan.launch(self.handle, operands, self.workspace.address(), &self.stream) };
        if !launch()? {
            return Ok(None);
        }
        let stamp = || {
            let event = self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
            let event = event.map_err(|error| failed("cuEventCreate", error))?;
            event.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
            Ok::<_, CudaError>(event)
        };
        let begin = stamp()?;
        for _ in 0..NUM_RUNS {
            if !launch()? {
                return Ok(None);
            }
        }
        let end = stamp()?;
        end.synchronize().map_err(|error| failed("cuEventSynchronize", error))?;
        let elapsed = begin.elapsed_ms(&end).map_err(|error| failed("cuEventElapsedTime", error))?;
        Ok(Some(elapsed / NUM_RUNS as f32))
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: `new` created it, and nothing uses it after this.
        unsafe { (self.library.api.destroy)(self.handle) };
    }
}

impl Choosing {
    fn has_time(&mut self, limit: Duration) -> bool {
        let is_over = self.since.elapsed() > limit;
        if is_over && !self.is_late {
            tracing::warn!(
                num_chosen = self.num_chosen,
                ?limit,
                "choosing the algorithms of products takes too long: the library's first ones serve the rest, and the next start goes on"
            );
        }
        self.is_late = is_over;
        !is_over
    }

    fn report(&mut self) {
        if self.reported.elapsed() >= REPORT_PERIOD {
            self.reported = Instant::now();
            tracing::info!(num_chosen = self.num_chosen, "choosing the algorithms of products");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choosing_ends_after_its_time() {
        let now = Instant::now();
        let mut choosing = Choosing { since: now, reported: now, num_chosen: 0, is_late: false };
        assert!(choosing.has_time(Duration::from_secs(3600)));
        assert!(!choosing.has_time(Duration::ZERO));
        assert!(choosing.is_late);
    }
}
