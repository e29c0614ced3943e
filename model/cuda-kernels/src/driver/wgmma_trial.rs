//! Tests [`WgmmaAttention`] and [`WgmmaExpertProduct`] on the device when it is opened. They address their matrices
//! through descriptors that no compiler checks.

use baton_cuda::CudaError;
use baton_kv_cache::{KvDtype, KvLayout, VectorCodec};
use baton_model_spec::Activation;

use crate::attention::{AttentionArgs, AttentionRows, PrefillAttention, WgmmaAttention, prefill_tiles};
use crate::device::KernelDevice;
use crate::expert_products::{
    ExpertProduct, ExpertTile, GatedExpertProduct, WgmmaExpertProduct, WgmmaGatedExpertProduct, source,
    wgmma_source,
};
use crate::kernel::{Address, KernelSource};
use crate::noise;

/// Earlier positions in the cache, and rows: several tiles of both.
const START_IDX: u32 = 200;
const NUM_ROWS: u32 = 90;
const GROUP: u32 = 3;

/// Whether [`WgmmaAttention`] and [`PrefillAttention`] agree. The device has both kernels for `dtype` and `head_dim`.
/// Takes little memory.
///
/// # Errors
/// When the device fails.
pub fn wgmma_works<D: KernelDevice>(
    device: &mut D,
    dtype: KvDtype,
    head_dim: usize,
) -> Result<bool, CudaError> {
    let layout = KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 2, head_dim, dtype };
    let num_blocks = layout.num_blocks_for((START_IDX + NUM_ROWS) as usize);
    let num_heads = layout.num_kv_heads * GROUP as usize;
    let num_rows = NUM_ROWS as usize;
    let pool = device.allocate_holding(&pool_of_noise(&layout, num_blocks))?;
    // The order of the blocks differs from the order of the positions.
    let blocks: Vec<u32> = (0..num_blocks as u32).rev().collect();
    let positions: Vec<u32> = (START_IDX..START_IDX + NUM_ROWS).collect();
    // Large queries, so that each row attends to a few positions, and different rows to different ones.
    let queries = noise::bf16(num_rows * (num_heads + 2 * layout.num_kv_heads) * head_dim, 8.0);
    let rows = AttentionRows {
        q: device.allocate_holding(&queries)?,
        out: Address::NULL,
        block_tables: device.allocate_holding(bytemuck::cast_slice(&blocks))?,
        first_row: device.allocate_holding(&[0; 4])?,
        num_rows: device.allocate_holding(&NUM_ROWS.to_le_bytes())?,
        start_idx: Address::NULL,
        positions: device.allocate_holding(bytemuck::cast_slice(&positions))?,
        max_blocks: num_blocks as u32,
        num_sequences: 1,
    };
    let tiles = prefill_tiles([(NUM_ROWS, START_IDX)].into_iter(), GROUP, u32::MAX, head_dim);
    let (num_tiles, tiles) =
        (tiles.len() as u64, device.allocate_holding(bytemuck::cast_slice(tiles.as_flattened()))?);
    let mut outs = [vec![], vec![]];
    for (idx, out) in outs.iter_mut().enumerate() {
        out.resize(num_rows * num_heads * head_dim * 2, 0xff);
        let rows = AttentionRows { out: device.allocate_holding(out)?, ..rows };
        let scale = 1.0 / (head_dim as f32).sqrt();
        let attention = AttentionArgs::new(&layout, pool, 0, GROUP as usize, scale, &rows);
        let prefill = PrefillAttention { attention, tiles, num_tiles };
        // SAFETY: everything was allocated above with these shapes.
        unsafe {
            match idx {
                0 => device.launch(&prefill)?,
                _ => device.launch(&WgmmaAttention(prefill))?,
            }
            device.download(attention.out, out)?;
        }
    }
    Ok(are_close(&outs[0], &outs[1]))
}

/// The rows of each expert: a tile and a row more, none, and a part of a tile.
const EXPERT_ROWS: [u32; 3] = [129, 0, 5];
/// Several stages, and no multiple of their depth.
const DEPTH: u32 = 328;
/// More than a tile.
const COLUMNS: u32 = 264;

/// The sources that [`wgmma_experts_work`] runs, for experts with this gate.
pub fn sources_of_trial(tile_rows: u32, gate: Option<Activation>) -> [KernelSource; 2] {
    [source(tile_rows, gate), wgmma_source(gate)]
}

/// Whether [`WgmmaExpertProduct`] and [`ExpertProduct`] agree, or their gated variants. The device has the kernels of
/// [`sources_of_trial`]. Takes little memory.
///
/// # Errors
/// When the device fails.
pub fn wgmma_experts_work<D: KernelDevice>(
    device: &mut D,
    tile_rows: u32,
    is_gated: bool,
) -> Result<bool, CudaError> {
    let num_experts = EXPERT_ROWS.len() as u32;
    let mut offsets = vec![0];
    EXPERT_ROWS.iter().for_each(|num_rows| offsets.push(offsets[offsets.len() - 1] + num_rows));
    let num_places: u32 = EXPERT_ROWS.iter().sum();
    let rows: Vec<u32> = (0..num_places).map(|place| place * 7 % num_places).collect();
    let (num_a, num_weights) = ((num_places * DEPTH) as usize, (num_experts * 2 * COLUMNS * DEPTH) as usize);
    let a = noise::bf16(num_a, 1.0);
    // Sums of about 1/4. The same numbers as in `a` would have larger ones.
    let weights = noise::bf16(num_a + num_weights, 1.0 / 24.0).split_off(num_a * 2);
    let product = ExpertProduct {
        a: device.allocate_holding(&a)?,
        rows: device.allocate_holding(bytemuck::cast_slice(&rows))?,
        offsets: device.allocate_holding(bytemuck::cast_slice(&offsets))?,
        weights: device.allocate_holding(&weights)?,
        out: Address::NULL,
        depth: DEPTH,
        columns: COLUMNS,
        num_experts,
        num_blocks: 0,
        tile_rows: tile_rows as u16,
    };
    let mut outs = [vec![], vec![]];
    for (out, tile) in outs.iter_mut().zip([ExpertTile::of_rows(tile_rows), ExpertTile::WGMMA]) {
        out.resize((num_places * COLUMNS * 2) as usize, 0xff);
        // Some blocks compute several tiles.
        let num_blocks = tile.most(num_places, num_experts, COLUMNS, is_gated).div_ceil(3) as u16;
        let product = ExpertProduct { out: device.allocate_holding(out)?, num_blocks, ..product };
        // SAFETY: everything was allocated above with these shapes.
        unsafe {
            match (tile == ExpertTile::WGMMA, is_gated) {
                (false, false) => device.launch(&product)?,
                (false, true) => device.launch(&GatedExpertProduct(product))?,
                (true, false) => device.launch(&WgmmaExpertProduct(product))?,
                (true, true) => device.launch(&WgmmaGatedExpertProduct(product))?,
            }
            device.download(product.out, out)?;
        }
    }
    Ok(are_close(&outs[0], &outs[1]))
}

/// Blocks of vectors below one, with different scales.
fn pool_of_noise(layout: &KvLayout, num_blocks: usize) -> Vec<u8> {
    let mut pool = vec![0; num_blocks * layout.block_bytes()];
    let mut vectors: Vec<f32> = noise::numbers(layout.block_size * layout.head_dim).collect();
    for (idx, vector) in vectors.chunks_exact_mut(layout.head_dim).enumerate() {
        vector.iter_mut().for_each(|number| *number *= 1.0 / (idx % 5 + 1) as f32);
    }
    for head in pool.chunks_exact_mut(layout.head_bytes()) {
        // Each head has other vectors.
        vectors.rotate_left(layout.head_dim + 1);
        let (elements, scales) = head.split_at_mut(layout.scale_offset(0));
        layout.dtype.store_vectors(&vectors, layout.head_dim, elements, scales);
    }
    pool
}

/// Compares numbers that are rarely above one, rounded to bf16.
fn are_close(left: &[u8], right: &[u8]) -> bool {
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(2).map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32()).collect()
    };
    // NaN fails the comparison.
    numbers(left).iter().zip(numbers(right)).all(|(left, right)| (left - right).abs() <= 1.0 / 64.0)
}
