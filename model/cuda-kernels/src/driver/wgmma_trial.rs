//! Tests [`WgmmaAttention`] on the device when it is opened. The kernel addresses its matrices through descriptors
//! that no compiler checks.

use baton_cuda::CudaError;
use baton_kv_cache::{KvDtype, KvLayout};

use crate::attention::{AttentionArgs, AttentionRows, PrefillAttention, WgmmaAttention, prefill_tiles};
use crate::device::KernelDevice;
use crate::kernel::Address;
use crate::noise;

/// Earlier positions in the cache, and rows: several tiles of both.
const START_IDX: u32 = 200;
const NUM_ROWS: u32 = 90;
const GROUP: u32 = 3;

/// Whether [`WgmmaAttention`] and [`PrefillAttention`] agree. The device has both kernels for bf16 and `head_dim`.
/// Takes little memory.
///
/// # Errors
/// When the device fails.
pub fn wgmma_works<D: KernelDevice>(device: &mut D, head_dim: usize) -> Result<bool, CudaError> {
    let layout = KvLayout { block_size: 16, num_layers: 1, num_kv_heads: 2, head_dim, dtype: KvDtype::Bf16 };
    let num_blocks = layout.num_blocks_for((START_IDX + NUM_ROWS) as usize);
    let num_heads = layout.num_kv_heads * GROUP as usize;
    let num_rows = NUM_ROWS as usize;
    let pool = device.allocate_holding(&noise::bf16(num_blocks * layout.block_bytes() / 2, 1.0))?;
    // The order of the blocks differs from the order of the positions.
    let blocks: Vec<u32> = (0..num_blocks as u32).rev().collect();
    // Large queries, so that each row attends to a few positions, and different rows to different ones.
    let queries = noise::bf16(num_rows * (num_heads + 2 * layout.num_kv_heads) * head_dim, 8.0);
    let rows = AttentionRows {
        q: device.allocate_holding(&queries)?,
        out: Address::NULL,
        block_tables: device.allocate_holding(bytemuck::cast_slice(&blocks))?,
        first_row: device.allocate_holding(&[0; 4])?,
        num_rows: device.allocate_holding(&NUM_ROWS.to_le_bytes())?,
        start_idx: device.allocate_holding(&START_IDX.to_le_bytes())?,
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

/// Compares means of numbers below one, rounded to bf16.
fn are_close(left: &[u8], right: &[u8]) -> bool {
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(2).map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32()).collect()
    };
    // NaN fails the comparison.
    numbers(left).iter().zip(numbers(right)).all(|(left, right)| (left - right).abs() <= 1.0 / 64.0)
}
