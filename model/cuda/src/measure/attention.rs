//! Measures attention alone, for one layer.

use baton_cuda::CudaError;
use baton_cuda_kernels::attention::{
    AttentionArgs, AttentionRows, DecodeAttention, MIN_SPLIT, MergeSplits, PrefillAttention, WgmmaAttention,
    max_prefill_tiles, max_splits, prefill_tiles, split_scratch_bytes, takes_wgmma,
};
use baton_cuda_kernels::device::TimedDevice;
use baton_cuda_kernels::noise::Noise;
use baton_kv_cache::KvLayout;

use super::ceilings::Ceilings;
use super::figure::{Amount, Figure};
use super::sizes::{Sizes, attention_operations};
use super::timing::median;
use crate::error::StartError;

/// Attention of decoding sequences, and of a prompt.
pub fn measure<D: TimedDevice>(
    device: &mut D,
    sizes: &Sizes,
    ceilings: &Ceilings,
    report: &mut dyn FnMut(&Figure),
) -> Result<(), StartError> {
    let Sizes { spec, context, batch, prompt, repetitions, .. } = sizes;
    let (layout, noise) = (KvLayout { num_layers: 1, ..sizes.layout() }, Noise::new(device)?);
    let group = spec.num_heads / spec.num_kv_heads;
    let blocks_of = |num_tokens: usize| layout.num_blocks_for(num_tokens);
    let num_blocks = (batch * blocks_of(*context)).max(blocks_of(*prompt));
    let pool = noise.fill_new(device, num_blocks * layout.block_bytes())?;
    // Each decoding sequence has its own blocks.
    let tables: Vec<u32> = (0..num_blocks as u32).collect();
    let attention = |device: &mut D, num_sequences: usize, num_rows: usize, start_idx: usize| {
        let words = |value: usize| vec![value as u32; num_sequences];
        let first_rows: Vec<u32> = (0..num_sequences).map(|idx| (idx * num_rows) as u32).collect();
        let all_rows = num_sequences * num_rows;
        let rows = AttentionRows {
            q: noise.fill_new(device, all_rows * (group + 2) * spec.kv_width() * 2)?,
            out: device.allocate(all_rows * spec.query_width() * 2)?,
            block_tables: device.allocate_holding(bytemuck::cast_slice(&tables))?,
            first_row: device.allocate_holding(bytemuck::cast_slice(&first_rows))?,
            num_rows: device.allocate_holding(bytemuck::cast_slice(&words(num_rows)))?,
            start_idx: device.allocate_holding(bytemuck::cast_slice(&words(start_idx)))?,
            max_blocks: blocks_of(start_idx + num_rows) as u32,
            num_sequences: num_sequences as u32,
        };
        Ok::<_, CudaError>(AttentionArgs::new(&layout, pool, 0, group, spec.attention_scale, &rows))
    };

    let max_splits = max_splits(spec.num_kv_heads);
    let scratch = split_scratch_bytes(*batch, spec.num_heads, spec.head_dim, max_splits);
    let decode = DecodeAttention {
        attention: attention(device, *batch, 1, context - 1)?,
        sums: device.allocate(scratch[0])?,
        stats: device.allocate(scratch[1])?,
        max_splits,
        min_split: MIN_SPLIT,
        max_rows: 1,
        unused: 0,
    };
    // SAFETY: everything was just allocated with these shapes.
    let seconds = median(*repetitions, device, &mut |device| unsafe {
        device.launch(&decode)?;
        device.launch(&MergeSplits { decode })
    })?;
    let bytes = (batch * context * layout.token_bytes()) as f64;
    let what = format!("decode attention, {batch} x {context}");
    report(&ceilings.figure(what, seconds, Amount::Bytes(bytes), Some(0.85)));

    let a = attention(device, 1, *prompt, 0)?;
    let tiles = prefill_tiles([(*prompt as u32, 0)].into_iter(), group as u32, u32::MAX, spec.head_dim);
    assert!(tiles.len() <= max_prefill_tiles(*prompt, 1, group, spec.head_dim));
    let (num_tiles, tiles) =
        (tiles.len() as u64, device.allocate_holding(bytemuck::cast_slice(tiles.as_flattened()))?);
    let prefill = PrefillAttention { attention: a, tiles, num_tiles };
    let what = format!("prefill attention, {prompt}");
    let operations = || Amount::Operations(attention_operations(spec, *prompt));
    // SAFETY: as above.
    let seconds = median(*repetitions, device, &mut |device| unsafe { device.launch(&prefill) })?;
    if !(device.has_wgmma() && takes_wgmma(&layout)) {
        report(&ceilings.figure(what, seconds, operations(), Some(0.6)));
        return Ok(());
    }
    report(&ceilings.figure(format!("{what}, mma.sync"), seconds, operations(), None));
    let wgmma = WgmmaAttention(prefill);
    // SAFETY: as above.
    let seconds = median(*repetitions, device, &mut |device| unsafe { device.launch(&wgmma) })?;
    report(&ceilings.figure(format!("{what}, wgmma"), seconds, operations(), Some(0.6)));
    Ok(())
}
