//! Products of rows with a matrix. The method depends on the format of the matrix and on the number of rows.
//!
//! | weights | few rows | many rows |
//! |---|---|---|
//! | bf16 | cuBLASLt; one row: [`MultiplyRow`] | cuBLASLt |
//! | integers; fp8 in other blocks | [`MultiplyFew`] | widened in parts, cuBLASLt for each part |
//! | fp8 with a scale for each row, or for 128 x 128 | [`MultiplyFew`] | activations quantised, cuBLASLt in fp8; as fp8 in other blocks where the device has no such product |
//!
//! A product in fp8 that the device refuses for some number of rows is made as fp8 in other blocks, too.
//!
//! Products of experts cover all experts in one launch. Only the device knows how many rows an expert has, so the
//! choice between few and many rows, and of warpgroup products on Hopper, uses the average.

use baton_cuda::CudaError;
use baton_cuda_kernels::device::{FP8_BLOCK, Fp8Product, Fp8Products, Fp8Scaling, KernelDevice, Product};
use baton_cuda_kernels::expert_products::{
    ExpertProduct, ExpertTile, GatedExpertProduct, WgmmaExpertProduct, WgmmaGatedExpertProduct,
};
use baton_cuda_kernels::gate::ApplyGate;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::one_row::MultiplyRow;
use baton_cuda_kernels::products::{
    Dequantise, KParts, MultiplyFew, QuantiseGroups, QuantiseRows, ScaleProduct, WeightKind,
};
use baton_cuda_kernels::rows::AddBias;
use baton_model_spec::{DecoderSpec, MlpSpec};

use crate::form::MAX_SCALE_ROWS;
use crate::inputs::{BatchLimits, padded};
use crate::weights::{DeviceLinear, DeviceMatrix, DeviceMlp, DeviceWeights};

/// Quantised weights are multiplied directly up to this number of rows, as an H100 measured it: with 128 rows of 4-bit weights
/// widening takes 1.46 and 1.35 times as long, of FP8 1.39 and 1.15 times (docs/benchmarks/gpu.md, "few rows").
pub const FEW_ROWS: usize = 128;

/// The same for FP8 that the library multiplies, whose time hardly depends on the rows. On an H100 it is 1.07 and 1.41 times
/// that of [`MultiplyFew`] with 32 rows and 0.61 and 0.73 times with 64.
pub const FEW_FP8_ROWS: usize = 32;

/// Weights are widened in pieces of this size, so that the product reads them from the L2 cache (40 MB on A100, 50 MB
/// on H100: "NVIDIA Hopper Architecture In-Depth").
pub(crate) const WIDENED_BYTES: usize = 32 << 20;

/// Weights of experts are widened in larger pieces: each expert has few rows, and it takes several experts to fill a
/// device.
const WIDENED_EXPERT_BYTES: usize = 256 << 20;

/// Rows of a tile of experts' products. An expert has few rows; more rows take more tiles.
pub const EXPERT_TILE_ROWS: u32 = 64;

/// Products of experts use warpgroup products from this number of rows of an expert on, the average.
///
/// Up to a tile of [`EXPERT_TILE_ROWS`] rows, both kernels read each weight once and multiply 64 rows: 64 operations for each
/// byte of HBM, where an H100 has 295 (989 TFLOP/s, 3.35 TB/s by its data sheet), and half as many with `mma.sync` would still do. So
/// neither is faster, and the smaller tiles fill more multiprocessors. From there on `mma.sync` reads each weight once
/// per 64 rows and warpgroup products once per 128: with 128 rows, 3 bytes against 1.5 from the L2 cache for each byte
/// of HBM. NVIDIA publishes no rate of the cache. If it is less than three times that of HBM, the former take longer
/// than HBM. An H100 agrees: with 64 rows both take the same within 2 %, with 128 the latter 0.89 times as long.
const WGMMA_EXPERT_ROWS: usize = EXPERT_TILE_ROWS as usize;

/// Blocks of threads of experts' products. No device runs more at a time; each block computes several tiles.
const MAX_EXPERT_BLOCKS: u64 = 1024;

/// What products of many rows may do to be fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductRule {
    /// Activations may be quantised to eight bits. cuBLASLt uses the fastest algorithm for the number of rows.
    Fast,
    /// Activations stay in bf16.
    Bf16,
    /// Activations stay in bf16, and the bits of a row do not depend on the number of rows: [`MultiplyFew`] multiplies
    /// any number of rows, and cuBLASLt has one algorithm for each matrix.
    Fixed,
}

/// Device memory for converted weights and activations. Addresses are null where no product needs them.
#[derive(Debug)]
pub struct ProductScratch {
    /// Weights in bf16.
    pub widened: Address,
    pub widened_bytes: usize,
    /// `[rows][in]`, E4M3: quantised activations.
    pub quantised: Address,
    /// `[rows]` or `[in / 128][rows]`, f32: the scales of the activations.
    pub row_scales: Address,
    pub fp8: Fp8Products,
    /// Sums of parts of K of [`MultiplyFew`], for [`FEW_ROWS`] rows. Null: K has one part.
    pub part_sums: Address,
    /// Zeros between products.
    pub parts_done: Address,
    /// Quantised weights are multiplied directly up to this number of rows.
    pub few_rows: usize,
    /// Experts with this many rows or more, on average, have warpgroup products.
    pub wgmma_expert_rows: usize,
    /// One row of bf16 is multiplied by [`MultiplyRow`].
    pub has_one_row: bool,
}

impl ProductScratch {
    /// None, which suffices for weights in bf16.
    pub const fn of_bf16() -> ProductScratch {
        ProductScratch {
            widened: Address::NULL,
            widened_bytes: 0,
            quantised: Address::NULL,
            row_scales: Address::NULL,
            fp8: Fp8Products::None,
            part_sums: Address::NULL,
            parts_done: Address::NULL,
            few_rows: 0,
            wgmma_expert_rows: usize::MAX,
            has_one_row: true,
        }
    }

    /// Allocates scratch memory for the largest batch.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn new<D: KernelDevice>(
        device: &mut D,
        spec: &DecoderSpec,
        weights: &DeviceWeights,
        limits: &BatchLimits,
        rule: ProductRule,
    ) -> Result<ProductScratch, CudaError> {
        let fp8 = if rule == ProductRule::Fast { device.fp8_products() } else { Fp8Products::None };
        let few_rows = if rule == ProductRule::Fixed { usize::MAX } else { FEW_ROWS };
        // The two kernels may differ in their bits.
        let has_wgmma = device.wgmma().experts && rule != ProductRule::Fixed;
        let wgmma_expert_rows = if has_wgmma { WGMMA_EXPERT_ROWS } else { usize::MAX };
        let has_one_row = rule != ProductRule::Fixed;
        let mut scratch =
            ProductScratch { fp8, few_rows, wgmma_expert_rows, has_one_row, ..ProductScratch::of_bf16() };
        let rows = padded(limits.num_rows);
        let (mut quantised_width, mut num_row_scales) = (0, 0);
        let mut divided = vec![];
        let mut room_for = |matrix: &DeviceMatrix, most: usize, is_exact: bool| {
            divided.push(*matrix);
            // Products in fp8 may be refused for some numbers of rows.
            if matrix.kind != WeightKind::Bf16 && rows > few_rows {
                scratch.widened_bytes = scratch.widened_bytes.max(most);
            }
            if let Some(scaling) = scratch.fp8_scaling(*matrix, rows).filter(|_| !is_exact) {
                let num_groups = if scaling == Fp8Scaling::Blocks { matrix.num_in / FP8_BLOCK } else { 1 };
                quantised_width = quantised_width.max(matrix.num_in);
                num_row_scales = num_row_scales.max(num_groups);
            }
        };
        let some_rows = |matrix: &DeviceMatrix| {
            matrix.bf16_bytes().min(WIDENED_BYTES.max(matrix.num_in * 2 * MAX_SCALE_ROWS))
        };
        room_for(&weights.head, some_rows(&weights.head), true);
        for (layer, layer_spec) in weights.layers.iter().zip(&spec.layers) {
            let mut dense = vec![layer.qkv.weight, layer.output.weight];
            match (&layer.mlp, &layer_spec.mlp) {
                (DeviceMlp::Dense { gate_up, down }, _) => dense.extend([gate_up.weight, down.weight]),
                (
                    DeviceMlp::Experts { gate_up, down, .. },
                    &MlpSpec::Experts { num_experts, num_active, .. },
                ) if rows * num_active > few_rows.saturating_mul(num_experts) => {
                    for matrix in [gate_up, down] {
                        let some = (matrix.bf16_bytes() * num_experts).min(WIDENED_EXPERT_BYTES);
                        room_for(matrix, some.max(matrix.bf16_bytes()), true);
                    }
                }
                (DeviceMlp::Experts { .. }, _) => {}
            }
            dense.iter().for_each(|matrix| room_for(matrix, some_rows(matrix), false));
        }
        scratch.make_room_for_parts(device, &divided)?;
        if scratch.widened_bytes > 0 {
            scratch.widened = device.allocate(scratch.widened_bytes)?;
        }
        if quantised_width > 0 {
            scratch.quantised = device.allocate(rows * quantised_width)?;
            scratch.row_scales = device.allocate(rows * num_row_scales * 4)?;
        }
        Ok(scratch)
    }

    /// Allocates memory for parts of K of these matrices. Without it, K has one part.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn make_room_for_parts<D: KernelDevice>(
        &mut self,
        device: &mut D,
        matrices: &[DeviceMatrix],
    ) -> Result<(), CudaError> {
        let of_matrix = |matrix: &DeviceMatrix| {
            KParts::of(matrix.kind, matrix.num_out, matrix.num_in).scratch_bytes(matrix.num_out, FEW_ROWS)
        };
        let quantised = matrices.iter().filter(|matrix| matrix.kind != WeightKind::Bf16).map(of_matrix);
        let (sums, done) = quantised.fold((0, 0), |most, room| (most.0.max(room.0), most.1.max(room.1)));
        if sums > 0 {
            self.part_sums = device.allocate(sums)?;
            self.parts_done = device.allocate_holding(&vec![0; done])?;
        }
        Ok(())
    }

    /// Launches [`MultiplyFew`] for rows of one matrix.
    unsafe fn multiply_few<D: KernelDevice>(
        &self,
        device: &mut D,
        few: MultiplyFew,
    ) -> Result<(), CudaError> {
        if self.part_sums == Address::NULL {
            // SAFETY: the caller guarantees it.
            return unsafe { device.launch(&few) };
        }
        let (k, n) = (few.k as usize, few.n as usize);
        let parts = KParts::of(few.kind, n, k);
        let of_parts = MultiplyFew { parts, part_sums: self.part_sums, parts_done: self.parts_done, ..few };
        let out_bytes = if few.is_f32 == 1 { 4 } else { 2 };
        for first in (0..few.num_rows as usize).step_by(FEW_ROWS) {
            let some = MultiplyFew {
                x: few.x.offset_by(first * k * 2),
                out: few.out.offset_by(first * n * out_bytes),
                num_rows: few.num_rows.min((first + FEW_ROWS) as u32) - first as u32,
                ..of_parts
            };
            // SAFETY: the caller guarantees it; the scratch memory has room for parts of these rows.
            unsafe { device.launch(&some) }?;
        }
        Ok(())
    }

    /// Where the kernel before a product of these rows can put them in E4M3. `None`: the product takes bf16.
    pub fn quantised_rows(&self, matrix: DeviceMatrix, num_rows: usize) -> Option<QuantisedRows> {
        let scaling = self.fp8_scaling(matrix, num_rows)?;
        Some(QuantisedRows {
            at: self.quantised,
            scales: self.row_scales,
            stride: if scaling == Fp8Scaling::Blocks { num_rows.next_multiple_of(4) as u32 } else { 0 },
        })
    }

    /// `out = from weight^T + bias`, in bf16.
    ///
    /// # Safety
    /// `from` has `num_rows` rows, `out` has room for as many, and the scratch memory was allocated for at least as
    /// many.
    pub unsafe fn apply<D: KernelDevice>(
        &self,
        device: &mut D,
        linear: &DeviceLinear,
        from: Address,
        out: Address,
        num_rows: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe { self.apply_to(device, linear, Rows { at: from, are_quantised: false }, out, num_rows) }
    }

    /// Like [`apply`](Self::apply). The rows may be in [`quantised_rows`](Self::quantised_rows) as well.
    ///
    /// # Safety
    /// As for [`apply`](Self::apply).
    pub unsafe fn apply_to<D: KernelDevice>(
        &self,
        device: &mut D,
        linear: &DeviceLinear,
        Rows { at: from, are_quantised }: Rows,
        out: Address,
        num_rows: usize,
    ) -> Result<(), CudaError> {
        let matrix = linear.weight;
        // SAFETY: the caller guarantees it.
        unsafe {
            if self.is_one_row(matrix, num_rows) {
                return device.launch(&one_row(matrix, from, out, linear.bias));
            }
            let is_done = match self.fp8_scaling(matrix, num_rows) {
                Some(scaling) => {
                    if !are_quantised {
                        self.quantise(device, matrix, scaling, from, num_rows)?;
                    }
                    self.multiply_fp8(device, matrix, scaling, out, num_rows)?
                }
                None => false,
            };
            if !is_done && self.is_direct(matrix, num_rows) {
                return self.multiply_few(device, few(matrix, from, out, num_rows, linear.bias));
            }
            if !is_done {
                self.multiply_widened(device, &product(matrix, from, out, num_rows), matrix)?;
            }
            if linear.bias == Address::NULL {
                return Ok(());
            }
            let width = matrix.num_out as u32;
            device.launch(&AddBias { x: out, bias: linear.bias, width, num_rows: num_rows as u32 })
        }
    }

    /// `out = from matrix^T`, in f32. Activations are not quantised.
    ///
    /// # Safety
    /// As for [`apply`](Self::apply).
    pub unsafe fn multiply_exactly<D: KernelDevice>(
        &self,
        device: &mut D,
        matrix: DeviceMatrix,
        from: Address,
        out: Address,
        num_rows: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees it.
        unsafe {
            if self.is_direct(matrix, num_rows) {
                let few = few(matrix, from, out, num_rows, Address::NULL);
                return self.multiply_few(device, MultiplyFew { is_f32: 1, ..few });
            }
            if self.is_one_row(matrix, num_rows) {
                let row = one_row(matrix, from, out, Address::NULL);
                return device.launch(&MultiplyRow { is_f32: 1, ..row });
            }
            let product = Product { is_out_f32: 1, ..product(matrix, from, out, num_rows) };
            self.multiply_widened(device, &product, matrix)
        }
    }

    /// How so many rows are multiplied in fp8; `None`: they are not.
    fn fp8_scaling(&self, matrix: DeviceMatrix, num_rows: usize) -> Option<Fp8Scaling> {
        matrix.fp8_scaling(self.fp8).filter(|_| num_rows > FEW_FP8_ROWS.min(self.few_rows))
    }

    fn is_one_row(&self, matrix: DeviceMatrix, num_rows: usize) -> bool {
        let is_known = matrix.kind == WeightKind::Bf16 && matrix.num_in.is_multiple_of(8);
        is_known && num_rows == 1 && self.has_one_row
    }

    fn is_direct(&self, matrix: DeviceMatrix, num_rows: usize) -> bool {
        matrix.kind != WeightKind::Bf16 && num_rows <= self.few_rows
    }

    /// Quantises the rows of a product.
    unsafe fn quantise<D: KernelDevice>(
        &self,
        device: &mut D,
        matrix: DeviceMatrix,
        scaling: Fp8Scaling,
        x: Address,
        num_rows: usize,
    ) -> Result<(), CudaError> {
        let (k, out, scales) = (matrix.num_in as u32, self.quantised, self.row_scales);
        // SAFETY: the caller guarantees it.
        unsafe {
            match scaling {
                Fp8Scaling::None | Fp8Scaling::Rows => {
                    device.launch(&QuantiseRows { x, out, scales, k, num_rows: num_rows as u32 })
                }
                Fp8Scaling::Blocks => {
                    let (stride, num_rows) = (num_rows.next_multiple_of(4) as u32, num_rows as u64);
                    device.launch(&QuantiseGroups { x, out, scales, k, stride, num_rows })
                }
            }
        }
    }

    /// A product of the quantised rows. Returns `false` if the device refuses it.
    unsafe fn multiply_fp8<D: KernelDevice>(
        &self,
        device: &mut D,
        matrix: DeviceMatrix,
        scaling: Fp8Scaling,
        out: Address,
        num_rows: usize,
    ) -> Result<bool, CudaError> {
        let (rows, quantised, scales) = (num_rows as u32, self.quantised, self.row_scales);
        let given = |scales: Address| if scaling == Fp8Scaling::None { Address::NULL } else { scales };
        // All buffers have rows up to a multiple of 4. The results of the extra rows are not read.
        let num_multiplied = if scaling == Fp8Scaling::Blocks { rows.next_multiple_of(4) } else { rows };
        // SAFETY: the caller guarantees it.
        unsafe {
            let is_done = device.multiply_fp8(&Fp8Product {
                left: quantised,
                right: matrix.at,
                out,
                left_scales: given(scales),
                right_scales: given(matrix.scales.scales),
                num_rows: num_multiplied.into(),
                num_out: matrix.num_out as u64,
                num_in: matrix.num_in as u64,
                scaling,
            })?;
            if !is_done || scaling != Fp8Scaling::None {
                return Ok(is_done);
            }
            device.launch(&ScaleProduct {
                x: out,
                row_scales: self.row_scales,
                column_scales: matrix.scales.scales,
                n: matrix.num_out as u32,
                num_rows: rows,
            })?;
            Ok(true)
        }
    }

    /// A product with widened weights, a range of outputs at a time.
    unsafe fn multiply_widened<D: KernelDevice>(
        &self,
        device: &mut D,
        product: &Product,
        matrix: DeviceMatrix,
    ) -> Result<(), CudaError> {
        if matrix.kind == WeightKind::Bf16 {
            // SAFETY: the caller guarantees it.
            return unsafe { device.multiply(product) };
        }
        let fitting = self.widened_bytes / (matrix.num_in * 2);
        let at_a_time =
            if fitting < matrix.num_out { fitting / MAX_SCALE_ROWS * MAX_SCALE_ROWS } else { matrix.num_out };
        let out_bytes = if product.is_out_f32 != 0 { 4 } else { 2 };
        for first in (0..matrix.num_out).step_by(at_a_time) {
            let num_out = at_a_time.min(matrix.num_out - first);
            // SAFETY: the caller guarantees the rows. The scratch memory holds this many outputs.
            unsafe {
                device.launch(&self.widen(matrix.rows_at(first, num_out)))?;
                let out = product.out.offset_by(first * out_bytes);
                let num_out = num_out as u64;
                device.multiply(&Product { right: self.widened, out, num_out, ..*product })?;
            }
        }
        Ok(())
    }

    fn widen(&self, matrix: DeviceMatrix) -> Dequantise {
        debug_assert!(matrix.bf16_bytes() <= self.widened_bytes, "room for it");
        dequantise_rows(matrix, Address::NULL, self.widened, matrix.num_out, 1.0)
    }

    /// Multiplies each expert's rows with its weights. If gated, also applies the gate.
    ///
    /// # Safety
    /// As for [`apply`](Self::apply).
    pub unsafe fn apply_experts<D: KernelDevice>(
        &self,
        device: &mut D,
        matrix: DeviceMatrix,
        places: &ExpertPlaces,
        from: Address,
        out: Address,
        is_gated: bool,
    ) -> Result<(), CudaError> {
        let ExpertPlaces { offsets, rows, gate_up, num_pairs, num_experts } = *places;
        let columns = if is_gated { matrix.num_out / 2 } else { matrix.num_out } as u32;
        let has_wgmma = num_pairs as usize >= self.wgmma_expert_rows.saturating_mul(num_experts as usize);
        let tile = if has_wgmma { ExpertTile::WGMMA } else { ExpertTile::of_rows(EXPERT_TILE_ROWS) };
        let product = |weights: Address, first: usize, num_experts: u32| {
            let tiles = tile.most(num_pairs, num_experts, columns, is_gated);
            ExpertProduct {
                a: from,
                rows,
                offsets: offsets.offset_by(first * 4),
                weights,
                out,
                depth: matrix.num_in as u32,
                columns,
                num_experts,
                num_blocks: tiles.min(MAX_EXPERT_BLOCKS) as u16,
                tile_rows: tile.rows as u16,
            }
        };
        let launch = |device: &mut D, product: ExpertProduct| {
            // SAFETY: the caller guarantees it.
            unsafe {
                match (has_wgmma, is_gated) {
                    (true, true) => device.launch(&WgmmaGatedExpertProduct(product)),
                    (true, false) => device.launch(&WgmmaExpertProduct(product)),
                    (false, true) => device.launch(&GatedExpertProduct(product)),
                    (false, false) => device.launch(&product),
                }
            }
        };
        if matrix.kind == WeightKind::Bf16 {
            return launch(device, product(matrix.at, 0, num_experts));
        }
        if num_pairs as usize <= self.few_rows.saturating_mul(num_experts as usize) {
            let multiplied = if is_gated { gate_up } else { out };
            let few = few(matrix, from, multiplied, num_pairs as usize, Address::NULL);
            // SAFETY: the caller guarantees it.
            unsafe {
                device.launch(&MultiplyFew { rows, offsets, num_experts, ..few })?;
                if is_gated {
                    device.launch(&ApplyGate { gate_up, out, width: columns, num_rows: num_pairs })?;
                }
            }
            return Ok(());
        }
        let at_a_time = (self.widened_bytes / matrix.bf16_bytes()).min(num_experts as usize);
        for first in (0..num_experts as usize).step_by(at_a_time) {
            let num = at_a_time.min(num_experts as usize - first);
            let widened = matrix.rows_at(first * matrix.num_out, num * matrix.num_out);
            // SAFETY: the caller guarantees the rows. The scratch memory holds this many experts.
            unsafe { device.launch(&self.widen(widened)) }?;
            launch(device, product(self.widened, first, num as u32))?;
        }
        Ok(())
    }
}

/// The left side of a product: rows in bf16, and whether [`QuantisedRows`] holds them too.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub at: Address,
    pub are_quantised: bool,
}

/// Room for the rows of a product in E4M3.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedRows {
    /// `[rows][in]`
    pub at: Address,
    /// `[rows]`, or `[in / 128][stride]`, f32.
    pub scales: Address,
    /// 0: a scale for each row.
    pub stride: u32,
}

/// Places of rows that are routed through experts. A pair is a row and one of its experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertPlaces {
    /// `[num_experts + 1]`, u32: each expert's first place.
    pub offsets: Address,
    /// `[pairs]`, u32: the row at each place. Null: the place is the row.
    pub rows: Address,
    /// Room for `[pairs][2 n]`, bf16: the results of gated experts before the gate.
    pub gate_up: Address,
    pub num_pairs: u32,
    pub num_experts: u32,
}

impl DeviceMatrix {
    fn bf16_bytes(&self) -> usize {
        self.num_out * self.num_in * 2
    }

    /// The scaling of a product of many rows with both sides in fp8. `None`: there is no such product.
    pub fn fp8_scaling(&self, products: Fp8Products) -> Option<Fp8Scaling> {
        let (rows, group) = (self.scales.rows_per_scale as usize, self.scales.group as usize);
        let is_aligned = self.num_out.is_multiple_of(16) && self.num_in.is_multiple_of(16);
        if self.kind != WeightKind::Fp8 || !is_aligned {
            return None;
        }
        match products {
            Fp8Products::Blocks
                if (rows, group) == (FP8_BLOCK, FP8_BLOCK) && self.num_in.is_multiple_of(FP8_BLOCK) =>
            {
                Some(Fp8Scaling::Blocks)
            }
            Fp8Products::None => None,
            _ if rows > 1 || group < self.num_in => None,
            Fp8Products::Plain => Some(Fp8Scaling::None),
            Fp8Products::Scaled | Fp8Products::Blocks => Some(Fp8Scaling::Rows),
        }
    }
}

/// Dequantises rows of a matrix and multiplies them by `factor`: the rows in the list `rows`, or all rows if it is
/// null.
pub fn dequantise_rows(
    matrix: DeviceMatrix,
    rows: Address,
    out: Address,
    num_rows: usize,
    factor: f32,
) -> Dequantise {
    Dequantise {
        weights: matrix.at,
        scales: matrix.scales,
        rows,
        out,
        k: matrix.num_in as u32,
        n: num_rows as u32,
        num_held: matrix.num_out as u32,
        factor,
        kind: matrix.kind,
        first_row: 0,
    }
}

fn few(matrix: DeviceMatrix, from: Address, out: Address, num_rows: usize, bias: Address) -> MultiplyFew {
    MultiplyFew {
        x: from,
        rows: Address::NULL,
        offsets: Address::NULL,
        weights: matrix.at,
        scales: matrix.scales,
        bias,
        out,
        k: matrix.num_in as u32,
        n: matrix.num_out as u32,
        num_rows: num_rows as u32,
        num_experts: 1,
        is_f32: 0,
        kind: matrix.kind,
        parts: KParts::ONE,
        part_sums: Address::NULL,
        parts_done: Address::NULL,
    }
}

fn one_row(matrix: DeviceMatrix, from: Address, out: Address, bias: Address) -> MultiplyRow {
    let (k, n) = (matrix.num_in as u32, matrix.num_out as u32);
    MultiplyRow { x: from, weights: matrix.at, bias, out, k, n, is_f32: 0, unused: 0 }
}

/// `out = from right^T`, in bf16.
fn product(right: DeviceMatrix, from: Address, out: Address, num_rows: usize) -> Product {
    Product {
        left: from,
        right: right.at,
        out,
        num_rows: num_rows as u64,
        num_out: right.num_out as u64,
        num_in: right.num_in as u64,
        left_stride: right.num_in as u64,
        out_stride: right.num_out as u64,
        is_out_f32: 0,
        beta: 0.0,
    }
}
