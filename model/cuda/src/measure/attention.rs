//! Measures attention alone, in a pool of all layers: the pieces of a layer are as far apart as in a model, and the blocks of a
//! sequence are all over the pool.

use baton_cuda::CudaError;
use baton_cuda_kernels::attention::{
    AttentionArgs, AttentionRows, DecodeAttention, MIN_SPLIT, PrefillAttention, SplitScratch, WgmmaAttention,
    max_prefill_tiles, max_splits, prefill_tiles, takes_wgmma,
};
use baton_cuda_kernels::device::TimedDevice;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::noise::Noise;
use baton_kv_cache::KvLayout;

use super::ceilings::Ceilings;
use super::figure::{Amount, Finding, fits};
use super::sizes::{Sizes, attention_operations};
use super::timing::median;
use crate::error::StartError;

/// Memory for all but the pool.
const REST_BYTES: usize = 512 << 20;

/// Attention of all layers of decoding sequences, one layer after the other.
pub fn measure_decode<D: TimedDevice>(
    device: &mut D,
    sizes: &Sizes,
    num_sequences: usize,
    ceilings: &Ceilings,
    report: &mut dyn FnMut(&Finding),
) -> Result<(), StartError> {
    let Sizes { spec, context, repetitions, .. } = sizes;
    let layout = sizes.layout();
    let what = format!("decode attention, {} layers, {num_sequences} x {context}", layout.num_layers);
    let num_blocks = num_sequences * layout.num_blocks_for(*context);
    if !fits(device, &what, num_blocks * layout.block_bytes() + REST_BYTES, report)? {
        return Ok(());
    }
    let measured = Measured::new(device, sizes, num_sequences, 1, context - 1)?;
    let max_splits = max_splits(spec.num_kv_heads);
    let scratch = SplitScratch::new(device, num_sequences, spec.num_heads, spec.head_dim, max_splits)?;
    let mut all_layers = |device: &mut D| {
        (0..layout.num_layers).try_for_each(|layer_idx| {
            let decode = DecodeAttention {
                attention: measured.arguments(sizes, layer_idx),
                scratch,
                max_splits,
                min_split: MIN_SPLIT,
                max_rows: 1,
                unused: 0,
            };
            // SAFETY: everything was just allocated with these shapes.
            unsafe { device.launch(&decode) }
        })
    };
    let seconds =
        median(*repetitions, device, &mut |device| device.repeat(num_sequences as u64, &mut all_layers))?;
    let bytes = (num_sequences * context * layout.token_bytes()) as f64;
    // Smaller batches are bound by their launches.
    let target = (num_sequences >= sizes.batch).then_some(0.85);
    report(&ceilings.figure(what, seconds, Amount::Bytes(bytes), target));
    Ok(())
}

/// Attention of one layer of a prompt.
pub fn measure_prefill<D: TimedDevice>(
    device: &mut D,
    sizes: &Sizes,
    ceilings: &Ceilings,
    report: &mut dyn FnMut(&Finding),
) -> Result<(), StartError> {
    let Sizes { spec, prompt, repetitions, .. } = sizes;
    let layout = sizes.layout();
    let what = format!("prefill attention, {prompt}");
    let pool_bytes = layout.num_blocks_for(*prompt) * layout.block_bytes();
    if !fits(device, &what, pool_bytes + REST_BYTES, report)? {
        return Ok(());
    }
    let attention = Measured::new(device, sizes, 1, *prompt, 0)?.arguments(sizes, 0);
    let group = spec.num_heads / spec.num_kv_heads;
    let tiles = prefill_tiles([(*prompt as u32, 0)].into_iter(), group as u32, u32::MAX, spec.head_dim);
    assert!(tiles.len() <= max_prefill_tiles(*prompt, 1, group, spec.head_dim));
    let (num_tiles, tiles) =
        (tiles.len() as u64, device.allocate_holding(bytemuck::cast_slice(tiles.as_flattened()))?);
    let prefill = PrefillAttention { attention, tiles, num_tiles };
    let operations = || Amount::Operations(attention_operations(spec, *prompt));
    // SAFETY: as above.
    let seconds = median(*repetitions, device, &mut |device| unsafe { device.launch(&prefill) })?;
    if !(device.wgmma().attention && takes_wgmma(&layout)) {
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

/// Rows of some sequences, and a pool of noise with their KV.
struct Measured {
    rows: AttentionRows,
    pool: Address,
    layout: KvLayout,
}

impl Measured {
    fn new<D: TimedDevice>(
        device: &mut D,
        sizes: &Sizes,
        num_sequences: usize,
        num_rows: usize,
        start_idx: usize,
    ) -> Result<Measured, CudaError> {
        let (spec, layout, noise) = (&sizes.spec, sizes.layout(), Noise::new(device)?);
        let max_blocks = layout.num_blocks_for(start_idx + num_rows);
        // Each sequence has its own blocks.
        let num_blocks = num_sequences * max_blocks;
        let pool = noise.fill_new(device, num_blocks * layout.block_bytes())?;
        let words = |value: usize| vec![value as u32; num_sequences];
        let first_rows: Vec<u32> = (0..num_sequences).map(|idx| (idx * num_rows) as u32).collect();
        let all_rows = num_sequences * num_rows;
        let positions: Vec<u32> =
            (0..all_rows).map(|row_idx| (start_idx + row_idx % num_rows) as u32).collect();
        let rows = AttentionRows {
            q: noise.fill_new(device, all_rows * (spec.query_width() + 2 * spec.kv_width()) * 2)?,
            out: device.allocate(all_rows * spec.query_width() * 2)?,
            block_tables: device.allocate_holding(bytemuck::cast_slice(&shuffled(num_blocks)))?,
            first_row: device.allocate_holding(bytemuck::cast_slice(&first_rows))?,
            num_rows: device.allocate_holding(bytemuck::cast_slice(&words(num_rows)))?,
            start_idx: device.allocate_holding(bytemuck::cast_slice(&words(start_idx)))?,
            positions: device.allocate_holding(bytemuck::cast_slice(&positions))?,
            max_blocks: max_blocks as u32,
            num_sequences: num_sequences as u32,
        };
        Ok(Measured { rows, pool, layout })
    }

    fn arguments(&self, sizes: &Sizes, layer_idx: usize) -> AttentionArgs {
        let spec = &sizes.spec;
        let group = spec.num_heads / spec.num_kv_heads;
        AttentionArgs::new(&self.layout, self.pool, layer_idx, group, spec.attention_scale, &self.rows)
    }
}

/// The numbers below `len` in an order that looks random, always the same (Fisher and Yates; Knuth's MMIX generator).
fn shuffled(len: usize) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..len as u32).collect();
    let mut state = 1u64;
    for idx in (1..len).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        numbers.swap(idx, (state >> 33) as usize % (idx + 1));
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffled_blocks_are_all_there_and_far_apart() {
        let numbers = shuffled(256);
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..256));
        let num_neighbours = numbers.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(num_neighbours < 8, "{num_neighbours} blocks follow their predecessor");
    }
}
