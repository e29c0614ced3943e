//! Block tables that stay on the device: what a step uploads, and that steps find their blocks.

use baton_kv_cache::BlockId;
use baton_model_cuda::block_tables::{BlockTables, Placed};
use baton_model_cuda::inputs::{BatchLimits, InputShape, Inputs};
use baton_model_spec::{Batch, BatchSequence};

const BLOCK_SIZE: usize = 16;
const LIMITS: BatchLimits =
    BatchLimits { num_rows: 8192, num_sequences: 256, context_length: 128 << 10, num_blended: 0 };
const SHAPE: InputShape =
    InputShape { block_size: BLOCK_SIZE, group: 4, head_dim: 128, max_decode_rows: 512 };

/// A sequence with blocks of its own.
struct Decoded {
    blocks: Vec<BlockId>,
    num_tokens: usize,
}

/// Inputs of steps, and the tables as a device would have them.
struct Uploads {
    inputs: Inputs,
    tables: BlockTables,
}

impl Uploads {
    /// The bytes of a step in which each sequence decodes a token.
    fn decode<'a>(&mut self, sequences: &'a mut [Decoded]) -> usize {
        sequences.iter_mut().for_each(|it| it.num_tokens += 1);
        let of = |Decoded { blocks, num_tokens }: &'a Decoded| BatchSequence {
            tokens: &[7],
            start_idx: num_tokens - 1,
            blocks,
            num_logits: 1,
        };
        let batch = Batch { sequences: (*sequences).iter().map(of).collect() };
        self.inputs.fill(&batch, &SHAPE, &mut self.tables);
        self.inputs.bytes().len()
    }
}

/// 256 sequences, one of them with 128 k tokens: with tables of one length, a step would upload 8.4 MB.
#[test]
fn a_step_uploads_what_has_changed() {
    let mut next = 0..;
    let lens = std::iter::once((128 << 10) - 80).chain((1..256).map(|idx| 2000 + 3 * idx));
    let mut sequences: Vec<Decoded> = lens
        .map(|num_tokens: usize| {
            let num_blocks = (num_tokens + 80).div_ceil(BLOCK_SIZE);
            Decoded { blocks: next.by_ref().take(num_blocks).map(BlockId).collect(), num_tokens }
        })
        .collect();
    let tables = BlockTables::new(&LIMITS, BLOCK_SIZE);
    let mut uploads = Uploads { inputs: Inputs::default(), tables };
    let all = uploads.decode(&mut sequences);
    // Each block once, and some words for each sequence.
    assert!(all <= 4 * next.start as usize + 64 * 256, "{all}");
    let mut steps: Vec<usize> = (0..40).map(|_| uploads.decode(&mut sequences)).collect();
    let key = uploads.inputs.key;
    // The long one ends. The places of all others in the batch change.
    sequences.remove(0);
    steps.extend((0..20).map(|_| uploads.decode(&mut sequences)));
    let (most, mean) = (*steps.iter().max().unwrap(), steps.iter().sum::<usize>() / steps.len());
    println!("the first step uploads {all} bytes, the others {mean}, {most} at most");
    assert!(most <= 12 << 10, "{most}");
    assert_eq!(uploads.inputs.key, key, "a graph for this number of sequences");
}

/// Numbers of a linear congruential generator (Knuth, MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }

    fn happens(&mut self, per_cent: usize) -> bool {
        self.below(100) < per_cent
    }
}

/// Sequences that come, grow, shrink, share blocks, pause and go, in any order.
#[test]
fn the_device_has_the_blocks_of_every_sequence() {
    let limits = BatchLimits { num_rows: 64, num_sequences: 12, context_length: 320, num_blended: 0 };
    let mut tables = BlockTables::new(&limits, BLOCK_SIZE);
    let (max_blocks, num_slots) = (tables.max_blocks, BlockTables::num_slots(&limits));
    let mut device = vec![[0; 4]; num_slots * max_blocks];
    let mut random = Random(1);
    let mut sequences: Vec<(Vec<BlockId>, usize)> = vec![];
    let (mut next, mut num_steps_without_change) = (0, 0);
    for _ in 0..3000 {
        sequences.retain(|_| random.happens(97));
        if sequences.len() < 10 && random.happens(20) {
            let shared = sequences.first().map_or(vec![], |first| first.0[..first.0.len().min(2)].to_vec());
            let own = (0..20 - shared.len()).map(|nth| BlockId(next + nth as u32));
            sequences.push((shared.into_iter().chain(own).collect(), 2 + random.below(10)));
            next += 20;
        }
        for (_, used) in &mut sequences {
            *used = (*used + usize::from(random.happens(20))).min(20);
            *used -= usize::from(*used > 2 && random.happens(2));
        }
        if random.happens(20) {
            sequences.reverse();
        }
        let is_there: Vec<bool> = sequences.iter().map(|_| random.happens(95)).collect();
        let there = sequences.iter().zip(is_there).filter(|(_, is_there)| *is_there).map(|(it, _)| it);
        let placed: Vec<Placed<'_>> = there
            .map(|(blocks, used)| Placed { blocks: &blocks[..*used], first_written: used - 1 })
            .collect();
        let num_decoded = placed.len() - random.below(placed.len().min(2) + 1);
        let (slots, changes) = tables.place(&placed, num_decoded);
        num_steps_without_change += usize::from(changes.runs.is_empty());
        for run in &changes.runs {
            let [from, to, len] = [run.from, run.to, run.num_bytes].map(|bytes| bytes as usize / 4);
            for nth in 0..len {
                device[to + nth] = changes.entries[from + nth].to_le_bytes();
            }
        }
        for (nth, (sequence, &slot)) in placed.iter().zip(&slots).enumerate() {
            assert_eq!(slot < BlockTables::num_decode_slots(num_decoded), nth < num_decoded);
            let found = device[slot * max_blocks..].iter().map(|entry| BlockId(u32::from_le_bytes(*entry)));
            assert!(found.take(sequence.blocks.len()).eq(sequence.blocks.iter().copied()));
        }
        let mut distinct = slots.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), slots.len());
    }
    assert!(num_steps_without_change > 100, "{num_steps_without_change}");
}
