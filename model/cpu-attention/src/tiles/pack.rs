//! Copies queries, keys and values to tiles of bf16.

use std::ops::Range;

use super::item::{STEP, WORDS};
use crate::kv::HeadKv;
use crate::method::{ItemArgs, Queries};
use baton_cpu_kernels::bf16_bits;
use baton_cpu_simd::{Bf16Pair, E4m3, Factor, I8, LANES, Pair, Stored, Words, kernel};
use baton_kv_cache::KvDtype;

/// Positions that are prefetched ahead of the one that is read.
pub(super) const AHEAD: usize = 64;

kernel! {
    /// Scales the queries and writes them to `[sets][steps]` tiles, with zeros where there are none.
    ///
    /// # Safety
    /// The queries are valid, and `to` for the tiles.
    pub(super) fn queries / queries_of (args: &ItemArgs<'_>, steps: usize, to: *mut f32)
}

kernel! {
    /// Writes the keys of `positions`, which start with those of a tile, to `[16 positions][steps]` tiles. Rows after the
    /// last position are unspecified. Positions before `read_ahead_to`, which is at least the end, are prefetched.
    ///
    /// # Safety
    /// Positions are valid, and `to` for their tiles.
    pub(super) fn keys / keys_any (
        queries: &Queries<'_>,
        positions: Range<usize>,
        read_ahead_to: usize,
        steps: usize,
        to: *mut f32,
    )
}

kernel! {
    /// Writes the values of `positions`, which start with those of a tile, to `[32 positions][tiles]` tiles. After
    /// the last position it is repeated.
    ///
    /// # Safety
    /// As for [`keys`].
    pub(super) fn values / values_any (
        queries: &Queries<'_>,
        positions: Range<usize>,
        read_ahead_to: usize,
        tiles: usize,
        to: *mut f32,
    )
}

/// Calls a generic function with the factor of the KV's type.
macro_rules! by_pairs {
    ($name:ident / $generic:ident) => {
        #[inline(always)]
        unsafe fn $name<S: Words>(
            queries: &Queries<'_>,
            positions: Range<usize>,
            read_ahead_to: usize,
            num: usize,
            to: *mut f32,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match queries.kv.layout().dtype {
                    KvDtype::Bf16 => $generic::<S, Bf16Pair>(queries, positions, read_ahead_to, num, to),
                    KvDtype::Fp8 => $generic::<S, Pair<E4m3>>(queries, positions, read_ahead_to, num, to),
                    KvDtype::Int8 => $generic::<S, Pair<I8>>(queries, positions, read_ahead_to, num, to),
                    KvDtype::F32 | KvDtype::F16 => unreachable!("has_pairs_of was asked"),
                }
            }
        }
    };
}
by_pairs! { keys_any / keys_of }
by_pairs! { values_any / values_of }

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn queries_of<S: Words>(args: &ItemArgs<'_>, steps: usize, mut to: *mut f32) {
    let (num, head_dim, scale) = (args.queries.len(), args.queries.head_dim, args.scale);
    let mut first = 0;
    while first < num {
        for step in 0..steps {
            let left = head_dim - step * STEP;
            let left = if left < STEP { left } else { STEP };
            // SAFETY: no pointers.
            let mut rows = [unsafe { S::splat(0.0) }; LANES];
            for lane in 0..LANES {
                if first + lane < num {
                    let mut numbers = [0f32; STEP];
                    let mut bits = [0u16; STEP];
                    // SAFETY: the query has these numbers; sixteen words hold 32 of bf16.
                    unsafe {
                        let from = args.query(first + lane).add(step * STEP);
                        if left == STEP {
                            numbers = from.cast::<[f32; STEP]>().read();
                        } else {
                            std::ptr::copy_nonoverlapping(from, numbers.as_mut_ptr(), left);
                        }
                        for i in 0..STEP {
                            bits[i] = bf16_bits(numbers[i] * scale);
                        }
                        rows[lane] = S::load(bits.as_ptr().cast());
                    }
                }
            }
            // SAFETY: `to` has room for all tiles.
            unsafe {
                let columns = S::transpose(rows);
                for line in 0..LANES {
                    S::store(to.add(line * LANES), columns[line]);
                }
            }
            to = to.wrapping_add(WORDS);
        }
        first += LANES;
    }
}

/// Consecutive positions, in runs that are contiguous in memory.
struct Runs<'a> {
    kv: &'a HeadKv<'a>,
    next: usize,
    end: usize,
    /// Positions before this are prefetched; at least the end.
    read_ahead_to: usize,
    /// Keys (0) or values (1).
    half: usize,
}

/// The addresses of consecutive positions: of the first, and of the first to prefetch; and how many there are.
struct Run {
    first: *const u8,
    ahead: *const u8,
    len: usize,
}

impl Runs<'_> {
    #[inline(always)]
    fn next(&mut self) -> Option<Run> {
        if self.next >= self.end {
            return None;
        }
        let (at, len) = self.kv.run(self.next, self.end - self.next);
        let (ahead, _) = self.kv.run((self.read_ahead_to - 1).min(self.next + AHEAD), 1);
        self.next += len;
        Some(Run { first: at[self.half], ahead: ahead[self.half], len })
    }
}

impl Run {
    /// The address of a position, whose successor by [`AHEAD`] is prefetched.
    #[inline(always)]
    unsafe fn row<S: Words>(&self, idx: usize, row_bytes: usize) -> *const u8 {
        let ahead = self.ahead.wrapping_add(idx * row_bytes);
        let mut line = 0;
        while line < row_bytes {
            // SAFETY: a prefetched address need not be valid.
            unsafe { S::prefetch_for_later(ahead.wrapping_add(line)) };
            line += 64;
        }
        self.first.wrapping_add(idx * row_bytes)
    }
}

#[inline(always)]
unsafe fn keys_of<S: Words, W: Factor>(
    queries: &Queries<'_>,
    positions: Range<usize>,
    read_ahead_to: usize,
    steps: usize,
    mut to: *mut f32,
) {
    let (head_dim, row_bytes) = (queries.head_dim, queries.head_dim * W::Number::SIZE);
    let mut position = positions.start;
    let mut runs = Runs { kv: &queries.kv, next: position, end: positions.end, read_ahead_to, half: 0 };
    while let Some(run) = runs.next() {
        for idx in 0..run.len {
            // SAFETY: dimensions are in range, and a tile has room for 32.
            unsafe {
                let row = run.row::<S>(idx, row_bytes);
                let mut first = 0;
                while first < steps * STEP {
                    let to = to.add(first / STEP * WORDS + first % STEP / 2).cast::<[u16; LANES]>();
                    let mut bits = [0u16; LANES];
                    if first < head_dim {
                        bits = sixteen::<S, W>(row, first, head_dim);
                    }
                    to.write_unaligned(bits);
                    first += LANES;
                }
            }
            position += 1;
            let rows = if position.is_multiple_of(LANES) { (steps - 1) * LANES + 1 } else { 1 };
            to = to.wrapping_add(rows * LANES);
        }
    }
}

/// Sixteen numbers of a row in bf16, from `first` on, with zeros after the last.
#[inline(always)]
unsafe fn sixteen<S: Words, W: Factor>(row: *const u8, first: usize, n: usize) -> [u16; LANES] {
    let size = W::Number::SIZE;
    let mut bytes = [0u8; LANES * 2];
    let mut bits = [0u16; LANES];
    // SAFETY: numbers before `n` are valid.
    unsafe {
        let mut from = row.add(first * size);
        if first + LANES > n {
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), (n - first) * size);
            from = bytes.as_ptr();
        }
        if size == 2 {
            return from.cast::<[u16; LANES]>().read_unaligned();
        }
        let mut numbers = [0f32; LANES];
        S::store(numbers.as_mut_ptr(), W::Number::load::<S>(from));
        for i in 0..LANES {
            bits[i] = (numbers[i].to_bits() >> 16) as u16;
        }
    }
    bits
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn values_of<S: Words, W: Factor>(
    queries: &Queries<'_>,
    positions: Range<usize>,
    read_ahead_to: usize,
    tiles: usize,
    mut to: *mut f32,
) {
    let (head_dim, size) = (queries.head_dim, W::Number::SIZE);
    let Range { start: mut first, end } = positions;
    while first < end {
        let last = if first + STEP < end { first + STEP } else { end };
        let mut runs = Runs { kv: &queries.kv, next: first, end: last, read_ahead_to, half: 1 };
        let mut rows = [std::ptr::null(); STEP];
        let mut len = 0;
        while let Some(run) = runs.next() {
            for idx in 0..run.len {
                // SAFETY: no pointers.
                rows[len] = unsafe { run.row::<S>(idx, head_dim * size) };
                len += 1;
            }
        }
        while len < STEP {
            rows[len] = rows[len - 1];
            len += 1;
        }
        for tile in 0..tiles {
            let at = tile * LANES;
            // SAFETY: dimensions are in range, and a tile has room for sixteen rows.
            unsafe {
                let mut pairs = [S::splat(0.0); LANES];
                for i in 0..LANES {
                    let both = [rows[2 * i], rows[2 * i + 1]];
                    if at + LANES <= head_dim {
                        pairs[i] = W::line::<S>(both, at * size);
                    } else {
                        let mut bytes = [[0u8; LANES * 2]; 2];
                        for half in 0..2 {
                            let (from, to) = (both[half].add(at * size), bytes[half].as_mut_ptr());
                            std::ptr::copy_nonoverlapping(from, to, (head_dim - at) * size);
                        }
                        pairs[i] = W::line::<S>([bytes[0].as_ptr(), bytes[1].as_ptr()], 0);
                    }
                }
                let columns = S::transpose(pairs);
                for row in 0..LANES {
                    S::store(to.add(row * LANES), columns[row]);
                }
            }
            to = to.wrapping_add(WORDS);
        }
        first += STEP;
    }
}
