//! Matrix products `C[M][N] = A[M][K] W[N][K]^T`: activations in f32, weights as they are stored.
//!
//! Every element of C is one dot product along K: sixteen lanes that step through K together, then a
//! fixed tree. Tiles share loads between elements but never change the order inside one, so a row of
//! C does not depend on how many rows there are, where it lies among them, or who computes it.
//!
//! ```text
//! items of work:  columns in blocks of W that fit a core's cache  x  rows in blocks, when columns are few
//! inside an item: W widened to f32 once when many rows use it, then tiles of rows x columns
//! ```

use super::Cpu;
use super::simd::{Bf16, Dtype, F16, F32, LANES, Simd, Stored, kernel};

/// A weight matrix `[rows][cols]`, row-major and without gaps; one output per row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixRef<'a> {
    data: &'a [u8],
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl<'a> MatrixRef<'a> {
    /// # Panics
    /// When `data` has not the size that the shape needs.
    pub(crate) fn new(data: &'a [u8], dtype: Dtype, rows: usize, cols: usize) -> MatrixRef<'a> {
        assert_eq!(data.len(), rows * cols * dtype.size_bytes(), "matrix {rows} x {cols}");
        MatrixRef { data, dtype, rows, cols }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Writes row `row_idx`, widened and scaled, to `out`.
    pub(crate) fn read_row(&self, row_idx: usize, scale: f32, out: &mut [f32]) {
        let size = self.dtype.size_bytes();
        let row = &self.data[row_idx * self.cols * size..][..self.cols * size];
        for (out, bytes) in out.iter_mut().zip(row.chunks_exact(size)) {
            // SAFETY: a chunk is one element.
            let value = unsafe {
                match self.dtype {
                    Dtype::F32 => F32::load_one(bytes.as_ptr()),
                    Dtype::F16 => F16::load_one(bytes.as_ptr()),
                    Dtype::Bf16 => Bf16::load_one(bytes.as_ptr()),
                }
            };
            *out = value * scale;
        }
    }
}

/// What becomes of the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// `C = A W^T + bias`
    Store,
    /// `C = C + (A W^T + bias)`
    Add,
}

/// Rows from which on a block of W is widened once instead of in every tile.
const WIDEN_FROM_ROWS: usize = 13;
/// Elements of a block of W: 256 KiB when widened, which leaves room for A in a core's second cache.
const BLOCK_ELEMENTS: usize = 64 * 1024;
/// Rows in an item where rows are divided: a multiple of every tile height.
const BLOCK_ROWS: usize = 96;
/// Multiplications below which waking the helpers costs more than it brings.
const MIN_SHARED_WORK: usize = 128 * 1024;

/// A pointer that items of work write disjoint parts through.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<T>(*mut T);

// SAFETY: whoever makes one sees to it that its users' parts are disjoint.
unsafe impl<T> Sync for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T> Send for SharedMut<T> {}

impl<T> SharedMut<T> {
    pub(crate) fn new(slice: &mut [T]) -> SharedMut<T> {
        SharedMut(slice.as_mut_ptr())
    }

    pub(crate) fn ptr(&self) -> *mut T {
        self.0
    }
}

/// Multiplies `num_rows` rows of `a` with the `weights`, whose outputs lie one after the other in each
/// row of `out`.
///
/// # Panics
/// When sizes do not fit together.
pub(crate) fn gemm(
    cpu: &mut Cpu,
    num_rows: usize,
    a: &[f32],
    weights: &[MatrixRef<'_>],
    bias: Option<&[f32]>,
    out: &mut [f32],
    output: Output,
) {
    let k = weights[0].cols;
    let n: usize = weights.iter().map(|w| w.rows).sum();
    assert!(weights.iter().all(|w| w.cols == k));
    assert!(a.len() >= num_rows * k && out.len() >= num_rows * n);
    assert!(bias.is_none_or(|bias| bias.len() == n));
    if num_rows == 0 {
        return;
    }

    let num_threads = cpu.pool.num_threads();
    let shared = num_threads > 1 && num_rows * n * k >= MIN_SHARED_WORK;
    let mut block_cols = (BLOCK_ELEMENTS / k.max(1)).clamp(4, 128) & !3;
    if shared {
        // At least four items for each thread, if columns allow.
        block_cols = block_cols.min((n / (4 * num_threads)).max(4) & !3);
    }
    let num_col_blocks: usize = weights.iter().map(|w| w.rows.div_ceil(block_cols)).sum();
    let divide_rows = shared && num_col_blocks < 2 * num_threads;
    let block_rows = if divide_rows { BLOCK_ROWS } else { num_rows };
    let num_row_blocks = num_rows.div_ceil(block_rows);

    let widen = num_rows >= WIDEN_FROM_ROWS;
    let isa = cpu.isa;
    let scratch = cpu.scratch.reserve(num_threads, block_cols * k);
    let out = SharedMut::new(out);
    let item = |thread_idx: usize, item_idx: usize| {
        let (mut block, row_block) = (item_idx / num_row_blocks, item_idx % num_row_blocks);
        let mut first_out = 0;
        let mut weights = weights.iter();
        let weight = loop {
            let weight = weights.next().expect("items are counted from the same weights");
            let blocks = weight.rows.div_ceil(block_cols);
            if block < blocks {
                break weight;
            }
            block -= blocks;
            first_out += weight.rows;
        };
        let first_col = block * block_cols;
        let num_cols = block_cols.min(weight.rows - first_col);
        let first_row = row_block * block_rows;
        let num_rows = block_rows.min(num_rows - first_row);
        let size = weight.dtype.size_bytes();
        let w = weight.data[first_col * k * size..][..num_cols * k * size].as_ptr();
        // SAFETY: rows, columns and K were checked above; an item's elements of `out` and its
        // thread's scratch are its own.
        unsafe {
            let args = BlockArgs {
                a: a.as_ptr().add(first_row * k),
                w,
                dtype: weight.dtype,
                k,
                num_rows,
                num_cols,
                bias: bias.map_or(std::ptr::null(), |bias| bias.as_ptr().add(first_out + first_col)),
                out: out.ptr().add(first_row * n + first_out + first_col),
                out_stride: n,
                add: output == Output::Add,
                widened: if widen { scratch.of(thread_idx) } else { std::ptr::null_mut() },
            };
            block_kernel(isa, &args);
        }
    };
    let num_items = num_col_blocks * num_row_blocks;
    if shared { cpu.pool.for_each(num_items, item) } else { (0..num_items).for_each(|idx| item(0, idx)) }
}

/// One item of work.
struct BlockArgs {
    a: *const f32,
    w: *const u8,
    dtype: Dtype,
    k: usize,
    num_rows: usize,
    num_cols: usize,
    bias: *const f32,
    out: *mut f32,
    out_stride: usize,
    add: bool,
    /// Room for the block in f32, or null when widening in the tiles is better.
    widened: *mut f32,
}

kernel! {
    /// # Safety
    /// The pointers are valid for the sizes beside them.
    fn block_kernel / block (args: &BlockArgs)
}

#[inline(always)]
unsafe fn block<S: Simd>(args: &BlockArgs) {
    // SAFETY: passed on to the caller.
    unsafe {
        match args.dtype {
            Dtype::F32 => tiles::<S, F32>(args, args.w),
            Dtype::F16 => block_of::<S, F16>(args),
            Dtype::Bf16 => block_of::<S, Bf16>(args),
        }
    }
}

#[inline(always)]
unsafe fn block_of<S: Simd, W: Stored>(args: &BlockArgs) {
    // SAFETY: passed on to the caller.
    unsafe {
        if args.widened.is_null() {
            tiles::<S, W>(args, args.w);
        } else {
            widen::<S, W>(args.w, args.widened, args.num_cols * args.k);
            tiles::<S, F32>(args, args.widened.cast());
        }
    }
}

/// Widens `n` stored numbers.
///
/// # Safety
/// Both pointers are valid for `n` elements.
#[inline(always)]
pub(crate) unsafe fn widen<S: Simd, W: Stored>(from: *const u8, to: *mut f32, n: usize) {
    // SAFETY: indices stay below `n`.
    unsafe {
        let mut i = 0;
        while i + LANES <= n {
            S::store(to.add(i), W::load::<S>(from.add(i * W::SIZE)));
            i += LANES;
        }
        for i in i..n {
            *to.add(i) = W::load_one(from.add(i * W::SIZE));
        }
    }
}

#[inline(always)]
unsafe fn tiles<S: Simd, W: Stored>(args: &BlockArgs, w: *const u8) {
    let max_rows = if S::WIDE { 6 } else { 3 };
    let row_tiles = args.num_rows.div_ceil(max_rows);
    let tile_cols = if S::WIDE || args.num_rows == 1 { 4 } else { 2 };
    let col_tiles = args.num_cols.div_ceil(tile_cols);
    // Many rows: a tile of A stays while the block of W passes by. Few rows: the other way round, so
    // that W, which comes from memory, is read once and in order.
    let rows_outside = args.num_rows >= WIDEN_FROM_ROWS;
    let (outer, inner) = if rows_outside { (row_tiles, col_tiles) } else { (col_tiles, row_tiles) };
    for o in 0..outer {
        for i in 0..inner {
            let (row_tile, col_tile) = if rows_outside { (o, i) } else { (i, o) };
            let (row, col) = (row_tile * max_rows, col_tile * tile_cols);
            let rows = max_rows.min(args.num_rows - row);
            let cols = tile_cols.min(args.num_cols - col);
            // SAFETY: row and column lie in the block.
            unsafe {
                let a = args.a.add(row * args.k);
                let w = w.add(col * args.k * W::SIZE);
                let at = (row, col);
                match (rows, cols) {
                    (1, 4) => tile::<S, W, 1, 4>(args, a, w, at),
                    (6, 4) if S::WIDE => tile::<S, W, 6, 4>(args, a, w, at),
                    (5, 4) if S::WIDE => tile::<S, W, 5, 4>(args, a, w, at),
                    (4, 4) if S::WIDE => tile::<S, W, 4, 4>(args, a, w, at),
                    (3, 4) if S::WIDE => tile::<S, W, 3, 4>(args, a, w, at),
                    (2, 4) if S::WIDE => tile::<S, W, 2, 4>(args, a, w, at),
                    (3, 2) => tile::<S, W, 3, 2>(args, a, w, at),
                    (2, 2) => tile::<S, W, 2, 2>(args, a, w, at),
                    // Edges are rare: one element at a time.
                    _ => {
                        for r in 0..rows {
                            for c in 0..cols {
                                let at = (row + r, col + c);
                                let (a, w) = (a.add(r * args.k), w.add(c * args.k * W::SIZE));
                                tile::<S, W, 1, 1>(args, a, w, at);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Computes and writes `R x C` elements.
#[inline(always)]
unsafe fn tile<S: Simd, W: Stored, const R: usize, const C: usize>(
    args: &BlockArgs,
    a: *const f32,
    w: *const u8,
    (row, col): (usize, usize),
) {
    // SAFETY: the tile lies in the block.
    unsafe {
        let dots = dot_tile::<S, W, R, C>(a, args.k, w, args.k, args.k);
        for (r, dots) in dots.iter().enumerate() {
            let out = args.out.add((row + r) * args.out_stride + col);
            for (c, &dot) in dots.iter().enumerate() {
                let value = if args.bias.is_null() { dot } else { dot + *args.bias.add(col + c) };
                let out = out.add(c);
                *out = if args.add { *out + value } else { value };
            }
        }
    }
}

/// The dot products of `R` rows of `a` with `C` rows of `w`, strides in elements.
///
/// # Safety
/// Both pointers are valid for their rows of `k` elements.
#[inline(always)]
pub(crate) unsafe fn dot_tile<S: Simd, W: Stored, const R: usize, const C: usize>(
    a: *const f32,
    a_stride: usize,
    w: *const u8,
    w_stride: usize,
    k: usize,
) -> [[f32; C]; R] {
    // SAFETY: indices stay below `k`.
    unsafe {
        let mut acc = [[S::splat(0.0); C]; R];
        let whole = k - k % LANES;
        let mut i = 0;
        while i < whole {
            let ws: [S::V; C] = std::array::from_fn(|c| W::load::<S>(w.add((c * w_stride + i) * W::SIZE)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = S::load(a.add(r * a_stride + i));
                for (acc, &w) in acc.iter_mut().zip(&ws) {
                    *acc = S::fma(x, w, *acc);
                }
            }
            i += LANES;
        }
        if i < k {
            let n = k - i;
            let ws: [S::V; C] =
                std::array::from_fn(|c| W::load_part::<S>(w.add((c * w_stride + i) * W::SIZE), n));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = S::load_part(a.add(r * a_stride + i), n);
                for (acc, &w) in acc.iter_mut().zip(&ws) {
                    *acc = S::fma(x, w, *acc);
                }
            }
        }
        acc.map(|acc| S::sums(acc))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::Isa;
    use crate::cpu::testing::{noise, store};

    /// The plain sum, in f64.
    fn reference(a: &[f32], w: &[f32], k: usize, bias: f32) -> f32 {
        let sum: f64 = a[..k].iter().zip(&w[..k]).map(|(a, w)| f64::from(*a) * f64::from(*w)).sum();
        (sum + f64::from(bias)) as f32
    }

    /// Tolerance 2e-6 times the sum of magnitudes: what f32 sums of these lengths lose.
    fn check(isa: Isa, threads: usize, dtype: Dtype, m: usize, n: usize, k: usize) {
        let mut cpu = Cpu::new(isa, threads).unwrap();
        let a = noise(1, m * k);
        let (bytes, w) = store(dtype, &noise(2, n * k));
        let bias = noise(3, n);
        let mut out = vec![f32::NAN; m * n];
        let split = n / 3;
        let size = dtype.size_bytes();
        let parts = [
            MatrixRef::new(&bytes[..split * k * size], dtype, split, k),
            MatrixRef::new(&bytes[split * k * size..], dtype, n - split, k),
        ];
        gemm(&mut cpu, m, &a, &parts, Some(&bias), &mut out, Output::Store);
        let tolerance = 2e-6 * k as f32;
        for row in 0..m {
            for col in 0..n {
                let expected = reference(&a[row * k..], &w[col * k..], k, bias[col]);
                let got = out[row * n + col];
                assert!(
                    (got - expected).abs() <= tolerance,
                    "{isa:?} {dtype:?} {m}x{n}x{k} at {row},{col}: {got} not {expected}"
                );
            }
        }

        // Each row alone, on one thread, gives the same bits; and adding adds.
        let mut single = Cpu::new(isa, 1).unwrap();
        for row in 0..m {
            let mut alone = vec![1.0; n];
            gemm(&mut single, 1, &a[row * k..], &parts, Some(&bias), &mut alone, Output::Add);
            for col in 0..n {
                assert_eq!(alone[col].to_bits(), (1.0 + out[row * n + col]).to_bits(), "row {row} col {col}");
            }
        }
    }

    #[test]
    fn products_match_the_reference_and_do_not_depend_on_the_batch() {
        for isa in Isa::available() {
            for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                for (m, n, k) in
                    [(1, 7, 5), (2, 9, 16), (3, 33, 31), (6, 12, 64), (13, 40, 70), (29, 75, 129)]
                {
                    check(isa, 1, dtype, m, n, k);
                }
                check(isa, 3, dtype, 210, 24, 96);
                check(isa, 3, dtype, 17, 300, 200);
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn avx512_and_avx2_agree_bit_for_bit() {
        let both = [Isa::Avx512, Isa::Avx2];
        if !both.iter().all(|isa| Isa::available().contains(isa)) {
            return;
        }
        let (m, n, k) = (19, 50, 133);
        let a = noise(1, m * k);
        let (bytes, _) = store(Dtype::Bf16, &noise(2, n * k));
        let outs = both.map(|isa| {
            let mut out = vec![0.0; m * n];
            let weights = [MatrixRef::new(&bytes, Dtype::Bf16, n, k)];
            gemm(&mut Cpu::new(isa, 1).unwrap(), m, &a, &weights, None, &mut out, Output::Store);
            out
        });
        assert_eq!(outs[0], outs[1]);
    }
}
