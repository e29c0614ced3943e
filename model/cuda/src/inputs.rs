//! The inputs of a step: the tokens of a batch, their positions, and changes of block tables. They are one piece of
//! memory and one copy.
//!
//! Rows of sequences with few rows come before rows of sequences with many, because attention has a kernel for each
//! kind. Logits keep the order of the batch. What is said of a sequence is at its slot ([`BlockTables`]); a slot
//! without a sequence has no rows.

use baton_cuda_kernels::attention::{max_prefill_tiles, prefill_tiles};
use baton_cuda_kernels::blocks::{ByteRun, CopyRuns};
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::rows::NONE;
use baton_kv_cache::BlockId;
use baton_model_spec::{Batch, BatchSequence};

use crate::block_tables::{BlockTables, Placed, TableChanges};

pub use crate::limits::{BatchLimits, padded};

/// Sequences of at most this many rows use the decode kernel, whose time depends on the context. Enough for one token
/// and the default number of drafts of a worker.
pub const MAX_DECODE_ROWS: usize = 9;

/// The largest number of rows of a repeated step with drafts. Below it the launches of a step take about as long as
/// its work; above it there would be many sizes, each with a graph that few steps use.
const MAX_VERIFIED_ROWS: usize = 64;

/// Rows of a step with drafts are padded to a multiple of this. Products of few rows compute as many at a time, so
/// the padding costs little.
const VERIFIED_ROWS: usize = 16;

/// Alignment of the parts in words: 16 bytes.
const ALIGNED_WORDS: usize = 4;

/// Bytes of a changed part of a table that one block of threads copies.
const PART_BYTES: usize = 4 << 10;

/// The batch of one step in the device's format.
#[derive(Debug, Default)]
pub struct Inputs {
    words: Vec<u32>,
    /// The first word of each part.
    parts: Parts,
    pub num_rows: usize,
    /// The number of slots.
    pub num_sequences: usize,
    /// The number of slots of decoded sequences. They come first.
    pub num_decoded: usize,
    /// The largest number of rows of a decoded sequence, and of another sequence.
    pub max_rows: [usize; 2],
    pub num_tiles: usize,
    pub num_wanted: usize,
    /// The number of changed parts of block tables, and the bytes of the longest.
    num_changes: usize,
    longest_change: usize,
    /// The key of repeated work. Set when every batch of this size has the same launches: all sequences decode one
    /// token, or verify drafts, and the batch is padded with rows and sequences to a round size.
    pub key: Option<u64>,
    order: Vec<usize>,
    first_rows: Vec<usize>,
}

/// Offsets in words.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    tokens: usize,
    positions: usize,
    row_slots: usize,
    first_row: usize,
    num_rows: usize,
    start_idx: usize,
    wanted: usize,
    tiles: usize,
    changed_runs: usize,
    changed_entries: usize,
}

/// Addresses of the parts on the device. All numbers are u32.
#[derive(Clone, Copy, Debug)]
pub struct InputAddresses {
    /// `[rows]`. [`NONE`] for padding.
    pub tokens: Address,
    /// `[rows]`. [`NONE`] for padding.
    pub positions: Address,
    /// `[rows]`: the slot of each row's sequence. [`NONE`] for padding.
    pub row_slots: Address,
    /// `[slots]`
    pub first_row: Address,
    /// `[slots]`. 0 for padding.
    pub num_rows: Address,
    /// `[slots]`
    pub start_idx: Address,
    /// `[wanted]`: rows whose logits are wanted. [`NONE`] for padding.
    pub wanted: Address,
    /// `[tiles][2]`
    pub tiles: Address,
}

/// Properties of the model that attention and the stores of KV depend on.
#[derive(Clone, Copy, Debug)]
pub struct InputShape {
    pub block_size: usize,
    /// Query heads per kv head.
    pub group: usize,
    pub head_dim: usize,
    /// The largest number of decoded rows of a step.
    pub max_decode_rows: usize,
}

impl Inputs {
    /// Bytes of the largest inputs.
    pub fn max_bytes(limits: &BatchLimits, shape: &InputShape) -> usize {
        let (rows, slots) = (padded(limits.num_rows), BlockTables::num_slots(limits));
        let tiles = max_prefill_tiles(rows, slots, shape.group, shape.head_dim);
        let table_words = size_of::<ByteRun>() / 4 + limits.context_length.div_ceil(shape.block_size);
        let words = 4 * rows + 3 * slots + 2 * tiles + limits.num_sequences * table_words;
        (words + 16 * ALIGNED_WORDS) * 4
    }

    /// Fills the inputs with `batch`, and `tables` with its blocks: the step must also
    /// [change](Self::change_tables) the tables on the device.
    ///
    /// # Panics
    /// When a sequence has no tokens or too few blocks.
    pub fn fill(&mut self, batch: &Batch<'_>, shape: &InputShape, tables: &mut BlockTables) {
        let sequences = &batch.sequences;
        self.arrange(batch, shape);
        self.num_rows = sequences.iter().map(|it| it.tokens.len()).sum();
        self.num_wanted = sequences.iter().map(|it| it.num_logits).sum();
        let repeated = repeated_rows(sequences, self.num_rows, shape);
        if let Some([num_rows, max_rows]) = repeated {
            (self.num_rows, self.num_wanted, self.max_rows) = (num_rows, num_rows, [max_rows, 0]);
        }
        let Inputs { words, order, first_rows, .. } = self;
        let ordered = order.iter().map(|&idx| &sequences[idx]);
        let placed: Vec<Placed<'_>> = ordered.clone().map(|it| placed(it, shape.block_size)).collect();
        let (slots, changes) = tables.place(&placed, self.num_decoded);
        let num_prefilled = sequences.len() - self.num_decoded;
        let prefilled = ordered.clone().skip(self.num_decoded);
        self.num_decoded = BlockTables::num_decode_slots(self.num_decoded);
        self.num_sequences = self.num_decoded + num_prefilled;
        let key = |[num_rows, max_rows]: [usize; 2]| {
            (max_rows as u64) << 48 | (self.num_sequences as u64) << 32 | num_rows as u64
        };
        self.key = repeated.map(key);
        words.clear();
        let num_rows_of = |it: &BatchSequence<'_>| it.tokens.len() as u32;
        let start_of = |it: &BatchSequence<'_>| it.start_idx as u32;
        let tokens = ordered.clone().flat_map(|it| it.tokens).copied();
        self.parts.tokens = part(words, self.num_rows, NONE, tokens);
        let positions = ordered.clone().flat_map(|it| start_of(it)..start_of(it) + num_rows_of(it));
        self.parts.positions = part(words, self.num_rows, NONE, positions);
        let of_rows = slots.iter().zip(ordered.clone());
        let of_rows = of_rows.flat_map(|(&slot, it)| std::iter::repeat_n(slot as u32, it.tokens.len()));
        self.parts.row_slots = part(words, self.num_rows, NONE, of_rows);
        let mut of_slots = |values: &mut dyn Iterator<Item = u32>| {
            let start = part(words, self.num_sequences, 0, std::iter::empty());
            slots.iter().zip(values).for_each(|(slot, value)| words[start + slot] = value);
            start
        };
        self.parts.first_row = of_slots(&mut order.iter().map(|&idx| first_rows[idx] as u32));
        self.parts.num_rows = of_slots(&mut ordered.clone().map(num_rows_of));
        self.parts.start_idx = of_slots(&mut ordered.map(start_of));
        // In the order of the batch.
        let wanted = sequences.iter().zip(&*first_rows).flat_map(|(it, first_row)| {
            let end = first_row + it.tokens.len();
            end - it.num_logits..end
        });
        self.parts.wanted = part(words, self.num_wanted, NONE, wanted.map(|row| row as u32));
        let prefilled = prefilled.map(|it| (num_rows_of(it), start_of(it)));
        let tiles = prefill_tiles(prefilled, shape.group as u32, u32::MAX, shape.head_dim);
        self.num_tiles = tiles.len();
        self.parts.tiles = part(words, 2 * tiles.len(), 0, tiles.as_flattened().iter().copied());
        self.append_changes(changes);
    }

    /// Fills the inputs with rows of one sequence at these positions, in ascending order. The caller has their residual stream; perhaps
    /// it wants the logits of the last one. The sequence is in the first slot, and all its `blocks` are in its table.
    pub fn fill_rows(
        &mut self,
        positions: &[u32],
        wants_last: bool,
        blocks: &[BlockId],
        shape: &InputShape,
        tables: &mut BlockTables,
    ) {
        let (slots, changes) = tables.place(&[Placed { blocks, first_written: 0 }], 0);
        assert_eq!(slots, [0], "the only sequence");
        let num_rows = positions.len();
        (self.num_rows, self.num_sequences, self.num_decoded) = (num_rows, 1, 0);
        (self.max_rows, self.num_wanted, self.key) = ([0, num_rows], usize::from(wants_last), None);
        let Inputs { words, parts, .. } = self;
        words.clear();
        parts.tokens = part(words, num_rows, NONE, std::iter::empty());
        parts.positions = part(words, num_rows, NONE, positions.iter().copied());
        parts.row_slots = part(words, num_rows, 0, std::iter::empty());
        parts.first_row = part(words, 1, 0, std::iter::empty());
        parts.num_rows = part(words, 1, 0, [num_rows as u32].into_iter());
        parts.start_idx = part(words, 1, 0, std::iter::empty());
        let wanted = wants_last.then(|| num_rows as u32 - 1);
        parts.wanted = part(words, 1, NONE, wanted.into_iter());
        // Later rows attend to more positions, wherever they are.
        let sequences = [(num_rows as u32, 0)].into_iter();
        let tiles = prefill_tiles(sequences, shape.group as u32, u32::MAX, shape.head_dim);
        self.num_tiles = tiles.len();
        parts.tiles = part(words, 2 * tiles.len(), 0, tiles.as_flattened().iter().copied());
        self.append_changes(changes);
    }

    /// Appends what changes in the block tables.
    fn append_changes(&mut self, changes: &TableChanges) {
        let Inputs { words, parts, .. } = self;
        let runs: &[u32] = bytemuck::cast_slice(&changes.runs);
        self.num_changes = changes.runs.len();
        self.longest_change = changes.runs.iter().map(|run| run.num_bytes as usize).max().unwrap_or(0);
        parts.changed_runs = part(words, runs.len(), 0, runs.iter().copied());
        parts.changed_entries = part(words, changes.entries.len(), 0, changes.entries.iter().copied());
    }

    /// Fills the inputs with padding only: `num_rows` rows and `num_sequences` empty sequences, decoded or not. Such
    /// a step needs the resources of a real step of this size, but touches no block.
    pub fn fill_up(&mut self, num_rows: usize, num_sequences: usize, are_decoded: bool) {
        self.num_rows = num_rows;
        self.num_sequences = num_sequences;
        self.num_decoded = if are_decoded { num_sequences } else { 0 };
        self.max_rows = if are_decoded { [1, 0] } else { [0, num_rows] };
        self.num_tiles = usize::from(!are_decoded);
        self.num_wanted = num_sequences;
        self.num_changes = 0;
        self.key = None;
        let Inputs { words, parts, num_tiles, .. } = self;
        words.clear();
        for rows in [&mut parts.tokens, &mut parts.positions, &mut parts.row_slots] {
            *rows = part(words, num_rows, NONE, std::iter::empty());
        }
        for sequences in [&mut parts.first_row, &mut parts.num_rows, &mut parts.start_idx] {
            *sequences = part(words, num_sequences, 0, std::iter::empty());
        }
        parts.wanted = part(words, num_sequences, NONE, std::iter::empty());
        parts.tiles = part(words, 2 * *num_tiles, u32::MAX, std::iter::empty());
    }

    /// The bytes to copy to the device.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// Appends data for the device. Returns its offset from the first word in bytes.
    pub fn append(&mut self, more: &[u32]) -> usize {
        4 * part(&mut self.words, more.len(), 0, more.iter().copied())
    }

    /// Appends the row of the previous step from which each row takes its token. Every sequence has one token.
    ///
    /// # Panics
    /// When a sequence has another number of tokens.
    pub fn append_sources(&mut self, follows: &[usize]) -> usize {
        // The rows are then in the order of the batch, like the samplings.
        assert!(self.first_rows.iter().copied().eq(0..follows.len()), "one token of each sequence");
        let sources: Vec<u32> = follows.iter().map(|&row_idx| row_idx as u32).collect();
        self.append(&sources)
    }

    /// The addresses of the parts if the inputs start at `base`.
    pub fn at(&self, base: Address) -> InputAddresses {
        let at = |first_word: usize| base.offset_by(first_word * 4);
        InputAddresses {
            tokens: at(self.parts.tokens),
            positions: at(self.parts.positions),
            row_slots: at(self.parts.row_slots),
            first_row: at(self.parts.first_row),
            num_rows: at(self.parts.num_rows),
            start_idx: at(self.parts.start_idx),
            wanted: at(self.parts.wanted),
            tiles: at(self.parts.tiles),
        }
    }

    /// The kernel that changes the block tables at `tables` for this step. The inputs start at `base`. `None`: the
    /// tables do not change.
    pub fn change_tables(&self, base: Address, tables: Address) -> Option<CopyRuns> {
        let kernel = CopyRuns {
            from: base.offset_by(self.parts.changed_entries * 4),
            to: tables,
            runs: base.offset_by(self.parts.changed_runs * 4),
            num_runs: self.num_changes as u32,
            num_parts: self.longest_change.div_ceil(PART_BYTES) as u32,
        };
        (self.num_changes > 0).then_some(kernel)
    }

    /// Computes the order of the sequences and the first row of each.
    fn arrange(&mut self, batch: &Batch<'_>, shape: &InputShape) {
        self.order.clear();
        let mut num_decoded_rows = 0;
        let mut max_rows = [0, 0];
        for (idx, sequence) in batch.sequences.iter().enumerate() {
            let num_rows = sequence.tokens.len();
            assert!(num_rows > 0, "a sequence without tokens");
            assert!(sequence.num_logits <= num_rows, "more logits than tokens");
            if num_rows <= MAX_DECODE_ROWS && num_decoded_rows + num_rows <= shape.max_decode_rows {
                num_decoded_rows += num_rows;
                max_rows[0] = max_rows[0].max(num_rows);
                self.order.push(idx);
            }
        }
        self.num_decoded = self.order.len();
        // The decoded sequences are in the order of the batch.
        let mut decoded = self.order.clone().into_iter().peekable();
        for (idx, sequence) in batch.sequences.iter().enumerate() {
            if decoded.next_if_eq(&idx).is_none() {
                max_rows[1] = max_rows[1].max(sequence.tokens.len());
                self.order.push(idx);
            }
        }
        self.max_rows = max_rows;
        self.first_rows.clear();
        self.first_rows.resize(batch.sequences.len(), 0);
        let mut next_row = 0;
        for &idx in &self.order {
            self.first_rows[idx] = next_row;
            next_row += batch.sequences[idx].tokens.len();
        }
    }
}

/// The padded rows of a repeated step, and the largest number of rows of a sequence. `None`: it is not repeated. With
/// 16 to 64 rows of 1 to 64 sequences there are 26 sizes with drafts.
fn repeated_rows(sequences: &[BatchSequence<'_>], num_rows: usize, shape: &InputShape) -> Option<[usize; 2]> {
    if !sequences.iter().all(|it| it.num_logits == it.tokens.len() && it.tokens.len() <= MAX_DECODE_ROWS) {
        return None;
    }
    if num_rows == sequences.len() {
        return Some([padded(num_rows), 1]);
    }
    let num_padded = num_rows.next_multiple_of(VERIFIED_ROWS);
    let fits = num_padded <= MAX_VERIFIED_ROWS.min(shape.max_decode_rows);
    fits.then_some([num_padded, MAX_DECODE_ROWS])
}

/// The blocks that a sequence of a step uses.
fn placed<'a>(sequence: &BatchSequence<'a>, block_size: usize) -> Placed<'a> {
    let end = sequence.start_idx + sequence.tokens.len();
    Placed {
        blocks: &sequence.blocks[..end.div_ceil(block_size)],
        first_written: sequence.start_idx / block_size,
    }
}

/// Appends `values`, padded to `len` and to the alignment of the next part. Returns the part's first word.
fn part(words: &mut Vec<u32>, len: usize, filling: u32, values: impl Iterator<Item = u32>) -> usize {
    let start = words.len();
    words.extend(values);
    assert!(words.len() <= start + len, "a part of {len} words has {}", words.len() - start);
    words.resize((start + len).next_multiple_of(ALIGNED_WORDS), filling);
    start
}
