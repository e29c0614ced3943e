//! The inputs of a step: the tokens of a batch, their positions, and the blocks of their KV. They are one piece of
//! memory and one copy.
//!
//! Sequences of few rows come before sequences of many rows, because attention has a kernel for each kind. Logits
//! keep the order of the batch.

use baton_cuda_kernels::attention::{max_prefill_tiles, prefill_tiles};
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::rows::NONE;
use baton_model_spec::{Batch, BatchSequence};

/// Limits of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Tokens of all sequences of a step.
    pub num_rows: usize,
    /// Sequences of a step.
    pub num_sequences: usize,
    /// Tokens of one sequence, including those in the cache.
    pub context_length: usize,
}

/// Sequences of at most this many rows use the decode kernel, whose time depends on the context. Enough for one token
/// and the default number of drafts of a worker.
pub const MAX_DECODE_ROWS: usize = 9;

/// Alignment of the parts in words: 16 bytes.
const ALIGNED_WORDS: usize = 4;

/// The batch of one step in the device's format.
#[derive(Debug, Default)]
pub struct Inputs {
    words: Vec<u32>,
    /// The first word of each part.
    parts: Parts,
    pub num_rows: usize,
    pub num_sequences: usize,
    /// The number of decoded sequences. They come first.
    pub num_decoded: usize,
    /// The largest number of rows of a decoded sequence, and of another sequence.
    pub max_rows: [usize; 2],
    pub num_tiles: usize,
    pub num_wanted: usize,
    /// Blocks in a row of the block tables.
    pub max_blocks: usize,
    /// The key of repeated work. Set when every batch of this size has the same launches: all sequences decode one
    /// token, and the batch is padded with empty sequences to a round size.
    pub key: Option<u64>,
    order: Vec<usize>,
    first_rows: Vec<usize>,
}

/// Offsets in words.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    tokens: usize,
    positions: usize,
    row_sequences: usize,
    first_row: usize,
    num_rows: usize,
    start_idx: usize,
    wanted: usize,
    tiles: usize,
    block_tables: usize,
}

/// Addresses of the parts on the device. All numbers are u32.
#[derive(Clone, Copy, Debug)]
pub struct InputAddresses {
    /// `[rows]`. [`NONE`] for padding.
    pub tokens: Address,
    /// `[rows]`. [`NONE`] for padding.
    pub positions: Address,
    /// `[rows]`: the sequence of each row. [`NONE`] for padding.
    pub row_sequences: Address,
    /// `[sequences]`
    pub first_row: Address,
    /// `[sequences]`. 0 for padding.
    pub num_rows: Address,
    /// `[sequences]`
    pub start_idx: Address,
    /// `[wanted]`: rows whose logits are wanted. [`NONE`] for padding.
    pub wanted: Address,
    /// `[tiles][2]`
    pub tiles: Address,
    /// `[sequences][max_blocks]`
    pub block_tables: Address,
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
        let (rows, sequences) = (padded(limits.num_rows), padded(limits.num_sequences));
        let max_blocks = limits.context_length.div_ceil(shape.block_size).next_power_of_two();
        let tiles = max_prefill_tiles(rows, sequences, shape.group, shape.head_dim);
        let words = 4 * rows + 3 * sequences + 2 * tiles + sequences * max_blocks;
        (words + 16 * ALIGNED_WORDS) * 4
    }

    /// Fills the inputs with `batch`.
    ///
    /// # Panics
    /// When a sequence has no tokens or too few blocks.
    pub fn fill(&mut self, batch: &Batch<'_>, shape: &InputShape) {
        let sequences = &batch.sequences;
        let is_repeated = sequences.iter().all(|it| it.tokens.len() == 1 && it.num_logits == 1);
        self.arrange(batch, shape);
        let fill_up = |count: usize| if is_repeated { padded(count) } else { count };
        self.num_rows = fill_up(sequences.iter().map(|it| it.tokens.len()).sum());
        self.num_sequences = fill_up(sequences.len());
        self.num_decoded = if is_repeated { self.num_sequences } else { self.num_decoded };
        self.num_wanted = fill_up(sequences.iter().map(|it| it.num_logits).sum());
        let used = |end: usize| end.div_ceil(shape.block_size);
        let ends = sequences.iter().map(|it| it.start_idx + it.tokens.len());
        self.max_blocks = ends.map(used).max().unwrap_or(1).next_power_of_two();
        self.key = is_repeated.then_some((self.max_blocks as u64) << 32 | self.num_rows as u64);

        let Inputs { words, order, first_rows, .. } = self;
        words.clear();
        let ordered = order.iter().map(|&idx| &sequences[idx]);
        let num_rows_of = |it: &BatchSequence<'_>| it.tokens.len() as u32;
        let start_of = |it: &BatchSequence<'_>| it.start_idx as u32;
        let tokens = ordered.clone().flat_map(|it| it.tokens).copied();
        self.parts.tokens = part(words, self.num_rows, NONE, tokens);
        let positions = ordered.clone().flat_map(|it| start_of(it)..start_of(it) + num_rows_of(it));
        self.parts.positions = part(words, self.num_rows, NONE, positions);
        let of_rows = ordered.clone().enumerate();
        let of_rows = of_rows.flat_map(|(nth, it)| std::iter::repeat_n(nth as u32, it.tokens.len()));
        self.parts.row_sequences = part(words, self.num_rows, NONE, of_rows);
        let first = order.iter().map(|&idx| first_rows[idx] as u32);
        self.parts.first_row = part(words, self.num_sequences, 0, first);
        self.parts.num_rows = part(words, self.num_sequences, 0, ordered.clone().map(num_rows_of));
        self.parts.start_idx = part(words, self.num_sequences, 0, ordered.clone().map(start_of));
        // In the order of the batch.
        let wanted = sequences.iter().zip(&*first_rows).flat_map(|(it, first_row)| {
            let end = first_row + it.tokens.len();
            end - it.num_logits..end
        });
        self.parts.wanted = part(words, self.num_wanted, NONE, wanted.map(|row| row as u32));
        let prefilled = ordered.clone().skip(self.num_decoded).map(|it| (num_rows_of(it), start_of(it)));
        let tiles = prefill_tiles(prefilled, shape.group as u32, u32::MAX, shape.head_dim);
        self.num_tiles = tiles.len();
        self.parts.tiles = part(words, 2 * tiles.len(), 0, tiles.as_flattened().iter().copied());
        let max_blocks = self.max_blocks;
        let tables = ordered.flat_map(|it| {
            let blocks = &it.blocks[..used(it.start_idx + it.tokens.len())];
            let rest = std::iter::repeat_n(0, max_blocks - blocks.len());
            blocks.iter().map(|block| block.0).chain(rest)
        });
        self.parts.block_tables = part(words, self.num_sequences * max_blocks, 0, tables);
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
        self.max_blocks = 1;
        self.key = None;
        let Inputs { words, parts, num_tiles, .. } = self;
        words.clear();
        for rows in [&mut parts.tokens, &mut parts.positions, &mut parts.row_sequences] {
            *rows = part(words, num_rows, NONE, std::iter::empty());
        }
        for sequences in [&mut parts.first_row, &mut parts.num_rows, &mut parts.start_idx] {
            *sequences = part(words, num_sequences, 0, std::iter::empty());
        }
        parts.wanted = part(words, num_sequences, NONE, std::iter::empty());
        parts.tiles = part(words, 2 * *num_tiles, u32::MAX, std::iter::empty());
        parts.block_tables = part(words, num_sequences, 0, std::iter::empty());
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
            row_sequences: at(self.parts.row_sequences),
            first_row: at(self.parts.first_row),
            num_rows: at(self.parts.num_rows),
            start_idx: at(self.parts.start_idx),
            wanted: at(self.parts.wanted),
            tiles: at(self.parts.tiles),
            block_tables: at(self.parts.block_tables),
        }
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

/// Appends `values`, padded to `len` and to the alignment of the next part. Returns the part's first word.
fn part(words: &mut Vec<u32>, len: usize, filling: u32, values: impl Iterator<Item = u32>) -> usize {
    let start = words.len();
    words.extend(values);
    assert!(words.len() <= start + len, "a part of {len} words has {}", words.len() - start);
    words.resize((start + len).next_multiple_of(ALIGNED_WORDS), filling);
    start
}

/// The next size to which batches are padded.
pub fn padded(count: usize) -> usize {
    match count {
        0..=8 => count.next_power_of_two(),
        9..=64 => count.next_multiple_of(8),
        _ => count.next_multiple_of(32),
    }
}
