//! Products of each expert's rows with its weights: `kernels/expert_products.cu`.

use baton_model_spec::Activation;

use crate::gate::number_of;
use crate::kernel::{Address, Kernel, KernelSource, LaunchShape};

/// Weight rows of a tile, and the depth of a pipeline stage in elements, as in the kernel file.
const COLUMNS: u32 = 128;
const DEPTH: u32 = 64;

/// For tiles of `tile_rows` rows, with or without a gate. `tile_rows` is 16, 32, 64 or 128: about the number of rows
/// of one expert.
pub fn source(tile_rows: u32, gate: Option<Activation>) -> KernelSource {
    KernelSource {
        file: "expert_products.cu",
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
    [16, 32, 64, 128].into_iter().flat_map(|tile_rows| gates.map(|gate| source(tile_rows, gate))).collect()
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

impl ExpertProduct {
    /// The largest number of tiles, over all ways to divide `num_places` rows among the experts.
    pub fn most_tiles(
        num_places: u32,
        num_experts: u32,
        columns: u32,
        tile_rows: u32,
        is_gated: bool,
    ) -> u64 {
        let row_tiles = num_places / tile_rows + num_experts.min(num_places);
        u64::from(row_tiles) * u64::from(columns.div_ceil(if is_gated { COLUMNS / 2 } else { COLUMNS }))
    }
}

// SAFETY: the fields are those of `ExpertProduct` in the kernel file.
unsafe impl Kernel for ExpertProduct {
    const NAME: &'static str = "expert_product";

    fn shape(&self) -> LaunchShape {
        debug_assert!(self.depth.is_multiple_of(8) && self.columns.is_multiple_of(2), "aligned rows");
        let tile_rows = u32::from(self.tile_rows);
        let (threads, stages) = if tile_rows > 64 { (256, 3) } else { (128, 4) };
        let shared_bytes = stages * (tile_rows + COLUMNS) * DEPTH * 2 + (self.num_experts + 1) * 4;
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
