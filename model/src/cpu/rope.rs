//! Cosines and sines of a batch's positions, and the places of keys and values in blocks.

use baton_kv_cache::{BlockId, BlockStorage, KvDtype};

use super::Aligned;
use super::rows::rotate;
use super::simd::{Bf16, F16, F32, Stored};
use crate::RopeSpec;

/// Computed once per batch and used by every layer.
pub(super) struct RopeTables {
    tables: Vec<RopeTable>,
}

struct RopeTable {
    frequencies: Vec<f32>,
    factor: f32,
    /// `[rows][2][frequencies]`: cosines, then sines.
    cos_sin: Aligned,
}

impl RopeTables {
    pub(super) fn new(specs: &[RopeSpec]) -> RopeTables {
        let table = |spec: &RopeSpec| RopeTable {
            frequencies: spec.inverse_frequencies(),
            factor: spec.attention_factor(),
            cos_sin: Aligned::default(),
        };
        RopeTables { tables: specs.iter().map(table).collect() }
    }

    /// Fills the tables for rows at these positions.
    pub(super) fn prepare(&mut self, positions: &[usize]) {
        for table in &mut self.tables {
            let half = table.frequencies.len();
            let cos_sin = table.cos_sin.grown(positions.len() * 2 * half);
            for (row, &position) in cos_sin.chunks_exact_mut(2 * half).zip(positions) {
                let (cos, sin) = row.split_at_mut(half);
                for i in 0..half {
                    // The angle is rounded to f32 as the models' training code does.
                    let angle = f64::from(position as f32 * table.frequencies[i]);
                    let (s, c) = angle.sin_cos();
                    cos[i] = c as f32 * table.factor;
                    sin[i] = s as f32 * table.factor;
                }
            }
        }
    }

    /// Rotates one head of a row.
    pub(super) fn rotate(&self, rope_idx: usize, row_idx: usize, head: &mut [f32]) {
        let table = &self.tables[rope_idx];
        let half = table.frequencies.len();
        let (cos, sin) = table.cos_sin[row_idx * 2 * half..(row_idx + 1) * 2 * half].split_at(half);
        rotate(head, cos, sin);
    }
}

/// Rounds a row's keys and values to the type of KV and writes them to their place.
///
/// # Safety
/// Nobody else reads or writes that place of the layer.
pub(super) unsafe fn store_rows(
    storage: &BlockStorage,
    layer_idx: usize,
    blocks: &[BlockId],
    position: usize,
    keys: &[f32],
    values: &[f32],
) {
    // SAFETY: passed on to the caller.
    unsafe {
        match storage.layout().dtype {
            KvDtype::F32 => store_as::<F32>(storage, layer_idx, blocks, position, keys, values),
            KvDtype::F16 => store_as::<F16>(storage, layer_idx, blocks, position, keys, values),
            KvDtype::Bf16 => store_as::<Bf16>(storage, layer_idx, blocks, position, keys, values),
        }
    }
}

unsafe fn store_as<T: Stored>(
    storage: &BlockStorage,
    layer_idx: usize,
    blocks: &[BlockId],
    position: usize,
    keys: &[f32],
    values: &[f32],
) {
    let layout = storage.layout();
    let (block_idx, slot) = (position / layout.block_size, position % layout.block_size);
    let piece = storage.layer_ptr(blocks[block_idx], layer_idx).as_ptr();
    for (half, row) in [keys, values].into_iter().enumerate() {
        assert_eq!(row.len(), layout.num_kv_heads * layout.head_dim);
        for (head_idx, head) in row.chunks_exact(layout.head_dim).enumerate() {
            let offset =
                half * layout.half_bytes() + layout.head_offset(head_idx) + slot * layout.head_dim * T::SIZE;
            for (i, &x) in head.iter().enumerate() {
                // SAFETY: head and slot lie in the piece; the caller vouches for the place.
                unsafe { T::store_one(piece.add(offset + i * T::SIZE), x) };
            }
        }
    }
}
