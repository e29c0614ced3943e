//! Every attention kernel against a plain softmax over the contents of the cache.

use baton_cuda_emulator::emulator::{Emulator, Memory};
use baton_cuda_emulator::fake_libraries::are_fake;
use baton_cuda_emulator::numbers::{bf16, floats, widened};
use baton_cuda_emulator::test_device::{self, TestDevice};
use baton_cuda_kernels::attention::*;
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::driver::wgmma_trial::wgmma_works;
use baton_cuda_kernels::kernel::Address;
use baton_kv_cache::{KvDtype, KvLayout, VectorCodec};
use baton_model_testing::noise;

/// One layer's attention of a batch.
#[derive(Clone)]
struct Case {
    layout: KvLayout,
    group: usize,
    /// Earlier positions in the cache, and rows, of each sequence.
    sequences: Vec<(usize, usize)>,
    /// From the position of a row to that of the next.
    gap: usize,
    window: Option<usize>,
    soft_cap: f32,
    /// Magnitude of queries and keys.
    magnitude: f32,
    max_splits: u32,
}

const LAYER: usize = 1;

fn case(dtype: KvDtype, head_dim: usize, sequences: &[(usize, usize)]) -> Case {
    Case {
        layout: KvLayout { block_size: 16, num_layers: 2, num_kv_heads: 1, head_dim, dtype },
        group: 2,
        sequences: sequences.to_vec(),
        gap: 1,
        window: None,
        soft_cap: 0.0,
        magnitude: 1.0,
        max_splits: 4,
    }
}

/// Memory of a case, and its expected results.
struct Batch {
    pool: Vec<u8>,
    max_blocks: usize,
    block_tables: Vec<u32>,
    first_row: Vec<u32>,
    num_rows: Vec<u32>,
    start_idx: Vec<u32>,
    positions: Vec<u32>,
    q: Vec<u8>,
    /// For each row and head: the expected values and their tolerance.
    expected: Vec<(f64, f64)>,
}

impl Case {
    fn scale(&self) -> f32 {
        1.0 / (self.layout.head_dim as f32).sqrt()
    }

    /// Memory that must not be read holds NaN, or invalid block indices.
    fn batch(&self) -> Batch {
        let layout = &self.layout;
        let (n, num_kv_heads) = (layout.head_dim, layout.num_kv_heads);
        let num_rows: usize = self.sequences.iter().map(|sequence| sequence.1).sum();
        let lens: Vec<usize> = self.sequences.iter().map(|&(start, rows)| start + self.span(rows)).collect();
        let max_blocks = lens.iter().map(|&len| layout.num_blocks_for(len)).max().unwrap_or(0) + 1;
        // Blocks of different sequences alternate, in descending order.
        let num_blocks = max_blocks * lens.len();
        let block_of = |sequence: usize, block: usize| num_blocks - 1 - (block * lens.len() + sequence);
        let mut pool = vec![0xff; num_blocks * layout.block_bytes()];
        let mut block_tables = vec![u32::MAX; num_blocks];
        let mut kv = Vec::new();
        for (sequence_idx, &(start, rows)) in self.sequences.iter().enumerate() {
            let first_seen = if rows == 0 { usize::MAX } else { self.first_seen(start) };
            let mut vectors = Vec::new();
            for head in 0..num_kv_heads {
                let seed = (sequence_idx * num_kv_heads + head) as u64;
                let [mut keys, mut values] =
                    [2 * seed, 2 * seed + 1].map(|s| noise(s + 10, lens[sequence_idx] * n));
                keys.iter_mut().for_each(|x| *x *= self.magnitude);
                for position in first_seen..lens[sequence_idx] {
                    let block = block_of(sequence_idx, position / layout.block_size);
                    block_tables[sequence_idx * max_blocks + position / layout.block_size] = block as u32;
                    for (half, vectors) in [&mut keys, &mut values].into_iter().enumerate() {
                        let vector = &mut vectors[position * n..][..n];
                        let at = block * layout.block_bytes()
                            + layout.layer_offset(LAYER)
                            + half * layout.half_bytes()
                            + layout.head_offset(head);
                        let (token, dtype) = (position % layout.block_size, layout.dtype);
                        let elements = at + layout.token_offset(token)
                            ..at + layout.token_offset(token) + n * dtype.size_bytes();
                        let scale = at + layout.scale_offset(token)
                            ..at + layout.scale_offset(token) + dtype.scale_bytes();
                        let mut bytes = (vec![0; elements.len()], vec![0; scale.len()]);
                        dtype.store_vector(vector, &mut bytes.0, &mut bytes.1);
                        dtype.load_vector(&bytes.0, &bytes.1, vector);
                        pool[elements].copy_from_slice(&bytes.0);
                        pool[scale].copy_from_slice(&bytes.1);
                    }
                }
                vectors.push((keys, values));
            }
            kv.push(vectors);
        }

        let num_heads = num_kv_heads * self.group;
        let width = (num_heads + 2 * num_kv_heads) * n;
        let queries: Vec<f32> = noise(5, num_rows * width).into_iter().map(|x| x * self.magnitude).collect();
        let (mut q, queries) = bf16(&queries);
        // Keys and values of a row follow its queries.
        q.chunks_exact_mut(2 * width).for_each(|row| row[2 * num_heads * n..].fill(0xff));
        let (mut first_row, mut expected) = (Vec::new(), Vec::new());
        let mut row_idx = 0;
        for (sequence_idx, &(start, rows)) in self.sequences.iter().enumerate() {
            first_row.push(if rows == 0 { u32::MAX } else { row_idx as u32 });
            for row in 0..rows {
                for head in 0..num_heads {
                    let query = &queries[row_idx * width + head * n..][..n];
                    let (keys, values) = &kv[sequence_idx][head / self.group];
                    expected.extend(self.found(query, keys, values, start + row * self.gap));
                }
                row_idx += 1;
            }
        }
        Batch {
            pool,
            max_blocks,
            block_tables,
            first_row,
            num_rows: self.sequences.iter().map(|sequence| sequence.1 as u32).collect(),
            start_idx: self.sequences.iter().map(|sequence| sequence.0 as u32).collect(),
            positions: self.positions(),
            q,
            expected,
        }
    }

    /// Positions from the first to the last of this many rows.
    fn span(&self, num_rows: usize) -> usize {
        num_rows.saturating_sub(1) * self.gap + usize::from(num_rows > 0)
    }

    fn positions(&self) -> Vec<u32> {
        let of_sequence =
            |&(start, rows): &(usize, usize)| (0..rows).map(move |row| (start + row * self.gap) as u32);
        self.sequences.iter().flat_map(of_sequence).collect()
    }

    fn first_seen(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window.unwrap_or(usize::MAX))
    }

    /// The reference: softmax of one row and head in f64. The tolerance covers the rounding of weights and results to
    /// bf16, half a unit in the last place each, and the exponentials of f32 scores.
    fn found(&self, query: &[f32], keys: &[f32], values: &[f32], position: usize) -> Vec<(f64, f64)> {
        let n = query.len();
        let seen = self.first_seen(position)..position + 1;
        let cap = f64::from(self.soft_cap);
        let scores: Vec<f64> = seen
            .clone()
            .map(|t| {
                let dot: f64 =
                    query.iter().zip(&keys[t * n..]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let score = dot * f64::from(self.scale());
                if cap == 0.0 { score } else { cap * (score / cap).tanh() }
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let greatest = scores.iter().fold(0.0, |greatest, score| score.abs().max(greatest));
        let allowed = 1.0 / 128.0 + (greatest + cap) * 2f64.powi(-20) + 1e-5;
        let mut sums = vec![(0.0, 0.0); n];
        for (t, weight) in seen.zip(&weights) {
            for ((found, total), value) in sums.iter_mut().zip(&values[t * n..]) {
                *found += weight * f64::from(*value);
                *total += weight * f64::from(value.abs());
            }
        }
        sums.into_iter().map(|(found, total)| (found / sum, allowed * total / sum)).collect()
    }

    /// Runs the kernels that support this case. Returns the results of the decode and prefill kernels, or of the
    /// plain kernel.
    fn check(&self) -> Vec<Vec<u8>> {
        let batch = self.batch();
        let mut emulator = Emulator::of(&sources(&self.layout));
        let words = |words: &[u32]| -> Vec<u8> { bytemuck::cast_slice(words).to_vec() };
        let num_rows = self.sequences.iter().map(|sequence| sequence.1).sum::<usize>();
        let num_heads = self.group * self.layout.num_kv_heads;
        let rows = AttentionRows {
            q: emulator.buffer(&batch.q),
            out: Address::NULL,
            block_tables: emulator.buffer(&words(&batch.block_tables)),
            first_row: emulator.buffer(&words(&batch.first_row)),
            num_rows: emulator.buffer(&words(&batch.num_rows)),
            start_idx: emulator.buffer(&words(&batch.start_idx)),
            positions: emulator.buffer(&words(&batch.positions)),
            max_blocks: batch.max_blocks as u32,
            num_sequences: self.sequences.len() as u32,
        };
        let pool = emulator.buffer(&batch.pool);
        let out_bytes = num_rows * num_heads * self.layout.head_dim * 2;
        let attention = |emulator: &mut Emulator| {
            let rows = AttentionRows { out: emulator.poisoned(out_bytes), ..rows };
            let mut attention =
                AttentionArgs::new(&self.layout, pool, LAYER, self.group, self.scale(), &rows);
            attention.window = self.window.map_or(u32::MAX, |window| window as u32);
            attention.soft_cap = self.soft_cap;
            attention
        };
        let max_rows = batch.num_rows.iter().copied().max().unwrap_or(0);
        let (mut outs, mut decoded) = (Vec::new(), None);
        if !has_tensor_cores(&self.layout) {
            let plain = PlainAttention { attention: attention(&mut emulator), max_rows: max_rows.into() };
            emulator.launch(&plain);
            outs.push(plain.attention.out);
        }
        // Each kernel gets its typical cases and a few more. The emulator is slow.
        if has_tensor_cores(&self.layout) && self.gap == 1 && max_rows as usize * self.group <= 64 {
            let [sums, stats, num_done] =
                split_scratch_bytes(num_rows, num_heads, self.layout.head_dim, self.max_splits);
            let scratch = SplitScratch {
                sums: emulator.poisoned(sums),
                stats: emulator.poisoned(stats),
                num_done: emulator.buffer(&vec![0; num_done]),
            };
            let decode = DecodeAttention {
                attention: attention(&mut emulator),
                scratch,
                max_splits: self.max_splits,
                min_split: 64,
                max_rows,
                unused: 0,
            };
            emulator.launch(&decode);
            outs.push(decode.attention.out);
            decoded = Some(decode);
        }
        if has_tensor_cores(&self.layout) && max_rows > 1 {
            let a = attention(&mut emulator);
            let sequences = batch.num_rows.iter().copied().zip(batch.start_idx.iter().copied());
            let mut tiles = prefill_tiles(sequences, a.group, a.window, self.layout.head_dim);
            assert!(
                tiles.len()
                    <= max_prefill_tiles(num_rows, self.sequences.len(), self.group, self.layout.head_dim)
            );
            tiles.push([u32::MAX, 0]);
            let prefill = PrefillAttention {
                attention: a,
                tiles: emulator.buffer(bytemuck::cast_slice(&tiles)),
                num_tiles: tiles.len() as u64,
            };
            emulator.launch(&prefill);
            outs.push(a.out);
            if takes_wgmma(&self.layout) && emulator.wgmma().attention {
                let a = attention(&mut emulator);
                emulator.launch(&WgmmaAttention(PrefillAttention { attention: a, ..prefill }));
                outs.push(a.out);
            }
        }
        let memory = emulator.run();
        if let Some(decode) = decoded {
            self.check_merge(&decode, &memory);
        }
        for (kernel, out) in outs.iter().enumerate() {
            let found = widened(memory.of(*out));
            assert_eq!(found.len(), batch.expected.len());
            for (i, (found, (expected, allowed))) in found.iter().zip(&batch.expected).enumerate() {
                let (head, column) = (i / self.layout.head_dim, i % self.layout.head_dim);
                let place =
                    format!("kernel {kernel}, row {}, head {}, {column}", head / num_heads, head % num_heads);
                // NaN fails the comparison.
                let is_close = (f64::from(*found) - expected).abs() <= *allowed;
                assert!(is_close, "{place}: {found}, expected {expected} within {allowed}");
            }
        }
        outs.into_iter().map(|out| memory.of(out).to_vec()).collect()
    }

    /// The results of several splits are those of a merge in the order of the splits, to the bit, and the counters are
    /// zeros again.
    fn check_merge(&self, decode: &DecodeAttention, memory: &Memory) {
        let num_heads = self.group * self.layout.num_kv_heads;
        let (n, max_splits) = (self.layout.head_dim, self.max_splits as usize);
        assert!(memory.of(decode.scratch.num_done).iter().all(|&byte| byte == 0));
        let [sums, stats] = [decode.scratch.sums, decode.scratch.stats].map(|at| floats(memory.of(at)));
        let out = memory.of(decode.attention.out);
        let mut first_pair = 0;
        for &(start, rows) in &self.sequences {
            let window = decode.attention.window;
            let num_splits =
                splits(start as u32, rows as u32, window, self.max_splits, decode.min_split).1 as usize;
            let pairs = first_pair..first_pair + rows * num_heads;
            first_pair = pairs.end;
            for pair in pairs {
                // A device has other exponentials.
                if num_splits == 1 || test_device::ordinal().is_some() {
                    continue;
                }
                let merged = merge(
                    &sums[pair * max_splits * n..][..num_splits * n],
                    &stats[pair * max_splits * 2..][..num_splits * 2],
                );
                assert!(
                    out[pair * n * 2..][..n * 2] == bf16(&merged).0,
                    "pair {pair} of {num_splits} splits"
                );
            }
        }
    }
}

/// Merges the splits of one pair as a warp does, in f32.
fn merge(sums: &[f32], stats: &[f32]) -> Vec<f32> {
    let max = stats.chunks_exact(2).map(|split| split[0]).fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = stats.chunks_exact(2).map(|split| (split[0] - max).exp2()).collect();
    let n = sums.len() / weights.len();
    let (mut out, mut lanes) = (vec![0.0; n], [0.0; 32]);
    for (split, weight) in weights.iter().enumerate() {
        lanes[split % 32] += weight * stats[2 * split + 1];
        out.iter_mut().zip(&sums[split * n..]).for_each(|(out, sum)| *out += weight * sum);
    }
    for mask in [16, 8, 4, 2, 1] {
        lanes = std::array::from_fn(|lane| lanes[lane] + lanes[lane ^ mask]);
    }
    let whole = 1.0 / lanes[0];
    out.into_iter().map(|sum| sum * whole).collect()
}

/// Contexts around the edges of tiles and splits, and padding.
const EDGES: [(usize, usize); 9] =
    [(0, 1), (14, 1), (15, 1), (16, 1), (0, 0), (62, 1), (63, 1), (64, 1), (299, 1)];

#[test]
fn contexts_of_every_length_are_attended_to() {
    case(KvDtype::Bf16, 64, &EDGES).check();
    case(KvDtype::Fp8, 64, &EDGES).check();
}

/// More splits than a warp has lanes, and more pairs than a tile has.
#[test]
fn many_splits_are_merged_in_order() {
    let layout = KvLayout { num_kv_heads: 2, ..case(KvDtype::Bf16, 64, &[]).layout };
    let few = Case { layout, group: 9, ..case(KvDtype::Bf16, 64, &[(140, 2), (20, 1), (300, 2)]) };
    few.check();
    Case { max_splits: 64, ..case(KvDtype::Fp8, 64, &[(2200, 1)]) }.check();
}

#[test]
fn chunks_attend_to_the_cache_and_themselves() {
    let chunks = [(0, 1), (0, 33), (7, 0), (31, 17), (60, 70), (290, 3)];
    case(KvDtype::Bf16, 64, &chunks).check();
    Case { group: 7, ..case(KvDtype::Bf16, 64, &chunks[3..5]) }.check();
    Case { group: 1, ..case(KvDtype::Bf16, 64, &[(5, 130), (0, 65)]) }.check();
}

#[test]
fn heads_of_every_size_and_type() {
    let batch = [(40, 1), (0, 0), (5, 20), (81, 2)];
    for (dtype, head_dim) in [
        (KvDtype::Bf16, 128),
        (KvDtype::Bf16, 256),
        (KvDtype::Fp8, 80),
        (KvDtype::Fp8, 128),
        (KvDtype::Int8, 96),
    ] {
        case(dtype, head_dim, &batch).check();
    }
}

/// The rows of a blended prompt: other tokens of it are not computed.
#[test]
fn rows_that_are_no_neighbours_attend_up_to_their_positions() {
    let batch = [(3, 1), (0, 12), (5, 70)];
    for (dtype, head_dim) in [(KvDtype::Bf16, 64), (KvDtype::Fp8, 64), (KvDtype::F32, 64)] {
        Case { gap: 3, ..case(dtype, head_dim, &batch) }.check();
    }
    Case { gap: 7, window: Some(20), group: 3, ..case(KvDtype::Bf16, 64, &[(5, 40)]) }.check();
}

#[test]
fn warpgroups_compute_several_tiles() {
    for dtype in [KvDtype::Bf16, KvDtype::Int8] {
        let layout = KvLayout { num_kv_heads: 2, ..case(dtype, 128, &[]).layout };
        Case { layout, group: 3, ..case(dtype, 128, &[(450, 50)]) }.check();
    }
}

#[test]
fn warpgroup_attention_is_tested_on_the_device() {
    for (dtype, head_dim) in [(KvDtype::Bf16, 64), (KvDtype::Bf16, 128), (KvDtype::Fp8, 64)] {
        let mut device = TestDevice::of_kernels(&sources(&case(dtype, head_dim, &[]).layout));
        if device.wgmma().attention {
            assert!(wgmma_works(&mut device, dtype, head_dim).unwrap());
        }
    }
}

#[test]
fn plain_attention_supports_any_kv() {
    let batch = [(40, 1), (0, 0), (5, 9), (99, 2)];
    let with_blocks = |block_size: usize, case: Case| {
        assert!(!has_tensor_cores(&KvLayout { block_size, ..case.layout }));
        Case { layout: KvLayout { block_size, ..case.layout }, ..case }.check();
    };
    with_blocks(16, case(KvDtype::F32, 64, &batch));
    with_blocks(16, case(KvDtype::F16, 72, &batch));
    with_blocks(5, Case { window: Some(13), ..case(KvDtype::Fp8, 64, &batch) });
    with_blocks(1, Case { soft_cap: 0.3, ..case(KvDtype::Int8, 96, &batch) });
}

#[test]
fn groups_and_blocks_of_every_size() {
    for (group, block_size) in [(1, 1), (4, 5), (7, 32), (8, 16), (20, 5)] {
        let case = Case { group, ..case(KvDtype::Bf16, 64, &[(70, 1), (30, 3)]) };
        let num_kv_heads = if group == 4 { 3 } else { 1 };
        Case { layout: KvLayout { block_size, num_kv_heads, ..case.layout }, ..case }.check();
    }
}

#[test]
fn windows_and_caps_hold() {
    let batch = [(0, 5), (100, 3), (130, 20)];
    for dtype in [KvDtype::Bf16, KvDtype::Fp8] {
        for window in [1, 5, 33, 100] {
            let soft_cap = if window == 33 { 0.5 } else { 0.0 };
            Case { window: Some(window), soft_cap, ..case(dtype, 64, &batch) }.check();
        }
    }
}

#[test]
fn large_scores_stay_within_the_tolerance() {
    // Products of magnitude up to a hundred thousand, of both signs.
    Case { magnitude: 300.0, ..case(KvDtype::Bf16, 64, &[(100, 1), (40, 30)]) }.check();
    Case { magnitude: 300.0, soft_cap: 50.0, ..case(KvDtype::Bf16, 64, &[(100, 1), (40, 30)]) }.check();
}

#[test]
fn a_sequence_does_not_depend_on_the_batch() {
    let alone = case(KvDtype::Bf16, 64, &[(150, 3)]).check();
    // Both batches have the same numbers for the first sequence, whose rows come first.
    let among = case(KvDtype::Bf16, 64, &[(150, 3), (400, 1), (0, 20)]).check();
    for (alone, among) in alone.iter().zip(&among) {
        assert!(*alone == among[..alone.len()]);
    }
}

/// Sizes of real models: the longest splits, many tiles, many sums. Only a device is fast enough.
#[test]
fn long_contexts_are_attended_to_on_a_device() {
    if test_device::ordinal().is_none() {
        println!("SKIPPED: BATON_KERNELS_ON names no device");
        return;
    }
    if are_fake() {
        println!("SKIPPED: fake libraries run kernels on processors, which takes minutes for these sizes");
        return;
    }
    for dtype in [KvDtype::Bf16, KvDtype::Fp8, KvDtype::Int8] {
        let decoded =
            Case { group: 4, max_splits: 64, ..case(dtype, 128, &[(32_000, 1), (4095, 3), (0, 1)]) };
        decoded.check();
        Case { window: Some(4096), soft_cap: 30.0, ..decoded }.check();
        Case { group: 4, ..case(dtype, 128, &[(3000, 60), (0, 400)]) }.check();
    }
    Case { group: 2, max_splits: 64, ..case(KvDtype::Bf16, 256, &[(20_000, 2)]) }.check();
}

/// The kernel's rule: positions per split and number of splits. It depends on the sequence and on constants only, so
/// that the result does not depend on the batch.
fn splits(start_idx: u32, num_rows: u32, window: u32, max_splits: u32, min_split: u32) -> (u32, u32) {
    let first = (start_idx + 1).saturating_sub(window) / 16 * 16;
    let span = start_idx + num_rows - first;
    let split = span.div_ceil(max_splits).next_multiple_of(64).max(min_split);
    (split, span.div_ceil(split))
}

#[test]
fn splits_cover_the_window() {
    for (start, rows, window) in
        [(0, 1, u32::MAX), (1000, 4, u32::MAX), (5000, 1, 300), (255, 1, u32::MAX), (100_000, 2, u32::MAX)]
    {
        let (split, num) = splits(start, rows, window, 16, MIN_SPLIT);
        let first = (start + 1).saturating_sub(window);
        assert!(split >= MIN_SPLIT && split % 64 == 0 && (1..=16).contains(&num));
        assert!(split * num >= start + rows - first && split * (num - 1) < start + rows - first + 15);
    }
    assert_eq!(splits(4095, 1, u32::MAX, 16, MIN_SPLIT), (256, 16));
    assert_eq!([1, 2, 8, 32, 128].map(max_splits), [64, 64, 16, 4, 4]);
}

#[test]
fn tiles_hold_every_pair_once_the_longest_first() {
    let sequences = [(1, 0), (0, 9), (300, 50), (40, 3000)];
    let tiles = prefill_tiles(sequences.into_iter(), 7, u32::MAX, 128);
    let mut expected = vec![[3, 256], [3, 128], [3, 0]];
    expected.extend((0..2100).step_by(128).rev().map(|pair| [2, pair]));
    expected.push([0, 0]);
    assert_eq!(tiles, expected);
}
