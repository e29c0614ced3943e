//! The place of pairs on processors that have no instruction for them. None of this is called.

use super::super::tile::TileArgs;

pub(in super::super) const TILE_ROWS: usize = 2;

/// # Safety
/// Never called: only the software model of tiles [multiplies pairs](super::has_pairs) there.
pub(in super::super) unsafe fn tile_kernel(_args: &TileArgs) {
    unreachable!("weights are only packed in pairs where there is a kernel for them")
}

/// # Safety
/// Never called.
pub unsafe fn pairs_loop(_rounds: usize) -> f32 {
    unreachable!("only where there is an instruction for pairs")
}
