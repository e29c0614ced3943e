//! Products of each expert's rows with its weights: `kernels/expert_products.cu`, and `kernels/expert_products_wgmma.cu`
//! for many rows on Hopper.

use baton_model_spec::Activation;

use crate::gate::number_of;
use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

/// The file of [`ExpertProduct`].
pub const FILE: &str = "expert_products.cu";
/// The file of [`WgmmaExpertProduct`].
pub const WGMMA_FILE: &str = "expert_products_wgmma.cu";

/// The depth of a pipeline stage in elements, as in the kernel files.
const DEPTH: u32 = 64;

/// Rows and weight rows of an output tile, as in the kernel files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertTile {
    pub rows: u32,
    pub weight_rows: u32,
}

impl ExpertTile {
    /// The tile of [`WgmmaExpertProduct`].
    pub const WGMMA: ExpertTile = ExpertTile { rows: 128, weight_rows: 256 };

    /// The tile of [`ExpertProduct`].
    pub const fn of_rows(rows: u32) -> ExpertTile {
        ExpertTile { rows, weight_rows: 128 }
    }

    /// The largest number of tiles, over all ways to divide `num_places` rows among the experts.
    pub fn most(self, num_places: u32, num_experts: u32, columns: u32, is_gated: bool) -> u64 {
        let row_tiles = num_places / self.rows + num_experts.min(num_places);
        let tile_columns = if is_gated { self.weight_rows / 2 } else { self.weight_rows };
        u64::from(row_tiles) * u64::from(columns.div_ceil(tile_columns))
    }
}

/// For tiles of `tile_rows` rows, with or without a gate. `tile_rows` is 16, 32, 64 or 128: about the number of rows
/// of one expert.
pub fn source(tile_rows: u32, gate: Option<Activation>) -> KernelSource {
    KernelSource {
        file: FILE,
        defines: vec![
            ("TILE_ROWS", tile_rows.into()),
            ("GATED", gate.is_some().into()),
            ("ACTIVATION", gate.map_or(0, number_of)),
        ],
    }
}

/// For all tile sizes, without a gate and with the most common one.
pub fn sources() -> Vec<KernelSource> {
    let gates = [None, Some(Activation::Silu)];
    let of_rows =
        [16, 32, 64, 128].into_iter().flat_map(|tile_rows| gates.map(|gate| source(tile_rows, gate)));
    of_rows.chain(gates.map(wgmma_source)).collect()
}

/// [`WgmmaExpertProduct`], or [`WgmmaGatedExpertProduct`].
pub fn wgmma_source(gate: Option<Activation>) -> KernelSource {
    KernelSource {
        file: WGMMA_FILE,
        defines: vec![("GATED", gate.is_some().into()), ("ACTIVATION", gate.map_or(0, number_of))],
    }
}

/// `out = a weights^T` for every expert, or `activation(a gates^T) * (a ups^T)` if gated.
///
/// Reads the weights once per `tile_rows` rows of an expert, 2 bytes per element, and takes 2 operations per row and
/// weight. Bound by memory bandwidth up to about 300 rows per expert, then by tensor cores.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ExpertProduct {
    /// `[..][depth]`, bf16.
    pub a: Address,
    /// `[places]`, u32: the row of `a` at each place. Null: `a` is `[places][depth]`.
    pub rows: Address,
    /// `[num_experts + 1]`, u32: each expert's first place ([`SortPairs`](crate::experts::SortPairs)).
    pub offsets: Address,
    /// `[num_experts][columns][depth]`, bf16. Gated: `[num_experts][2 columns][depth]`, first the gate rows, then the
    /// up rows.
    pub weights: Address,
    /// `[places][columns]`, bf16.
    pub out: Address,
    /// A multiple of 8.
    pub depth: u32,
    /// A multiple of 2.
    pub columns: u32,
    pub num_experts: u32,
    /// Blocks of threads that share the tiles: as many as the device runs at a time, or the number of tiles if that
    /// is smaller.
    pub num_blocks: u16,
    /// The `tile_rows` of its [`source`].
    pub tile_rows: u16,
}

// SAFETY: the fields are those of `ExpertProduct` in the kernel file.
unsafe impl Kernel for ExpertProduct {
    const NAME: &'static str = "expert_product";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.depth.is_multiple_of(8) && self.columns.is_multiple_of(2), "aligned rows");
        let tile_rows = u32::from(self.tile_rows);
        let (threads, stages) = if tile_rows > 64 { (256, 3) } else { (128, 4) };
        let ExpertTile { rows, weight_rows } = ExpertTile::of_rows(tile_rows);
        let shared_bytes = stages * (rows + weight_rows) * DEPTH * 2 + (self.num_experts + 1) * 4;
        LaunchShape { grid: [self.num_blocks.into(), 1, 1], threads, shared_bytes }
    }
}

/// [`ExpertProduct`] with gated weights.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct GatedExpertProduct(pub ExpertProduct);

// SAFETY: the fields are those of `ExpertProduct` in the kernel file.
unsafe impl Kernel for GatedExpertProduct {
    const NAME: &'static str = "gated_expert_product";

    fn shape(&self) -> LaunchShape {
        self.0.shape()
    }
}

/// [`ExpertProduct`] with warpgroup products. `columns` is a multiple of 8, and `tile_rows` is not used.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct WgmmaExpertProduct(pub ExpertProduct);

// SAFETY: the fields are those of `ExpertProduct` in the kernel file.
unsafe impl Kernel for WgmmaExpertProduct {
    const NAME: &'static str = "wgmma_expert_product";

    fn shape(&self) -> LaunchShape {
        let ExpertProduct { depth, columns, num_experts, num_blocks, .. } = self.0;
        debug_assert!(depth.is_multiple_of(8) && columns.is_multiple_of(8), "aligned rows");
        let ExpertTile { rows, weight_rows } = ExpertTile::WGMMA;
        // Four stages.
        let shared_bytes = 4 * (rows + weight_rows) * DEPTH * 2 + (num_experts + 1) * 4;
        LaunchShape { grid: [num_blocks.into(), 1, 1], threads: 384, shared_bytes }
    }
}

/// [`WgmmaExpertProduct`] with gated weights.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct WgmmaGatedExpertProduct(pub ExpertProduct);

// SAFETY: the fields are those of `ExpertProduct` in the kernel file.
unsafe impl Kernel for WgmmaGatedExpertProduct {
    const NAME: &'static str = "wgmma_gated_expert_product";

    fn shape(&self) -> LaunchShape {
        WgmmaExpertProduct(self.0).shape()
    }
}
