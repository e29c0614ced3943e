//! Matrix products `C[M][N] = A[M][K] W[N][K]^T`: activations in f32, weights as they are stored.
//!
//! Every element of C is one dot product along K: sixteen lanes that step through K together, then a
//! fixed tree. Tiles share loads between elements but never change the order inside one, so a row of
//! C does not depend on how many rows there are, where it lies among them, or who computes it.
//!
//! ```text
//! items of work:  columns in blocks of W that fit a core's cache  x  rows in blocks, when columns are few
//! inside an item: tiles of rows x columns; when many rows use the block of W, it is widened to f32 once
//!                  and laid out as tiles read it: [columns / C][K / 16][C][16], zeroes at the edges
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

/// Rows from which on a block of W is packed once instead of widened in every tile.
const PACK_FROM_ROWS: usize = 25;
/// Elements of a block of W: 256 KiB when packed, which leaves room for A in a core's second cache.
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

    let pack = num_rows >= PACK_FROM_ROWS;
    let isa = cpu.isa;
    let scratch =
        cpu.scratch.reserve(num_threads, if pack { block_cols * k.next_multiple_of(LANES) } else { 0 });
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
                packed: if pack { scratch.of(thread_idx) } else { std::ptr::null_mut() },
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
    packed: *mut f32,
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
            Dtype::F32 => block_of::<S, F32>(args),
            Dtype::F16 => block_of::<S, F16>(args),
            Dtype::Bf16 => block_of::<S, Bf16>(args),
        }
        if !args.packed.is_null() {
            tiles::<S, F32, true>(args);
        }
    }
}

/// Multiplies at once, or packs.
#[inline(always)]
unsafe fn block_of<S: Simd, W: Stored>(args: &BlockArgs) {
    // SAFETY: passed on to the caller.
    unsafe {
        if args.packed.is_null() {
            tiles::<S, W, false>(args);
        } else if S::TILE_ROWS == 6 {
            pack::<S, W, 4>(args);
        } else if S::TILE_ROWS == 3 {
            pack::<S, W, 2>(args);
        } else {
            pack::<S, W, 1>(args);
        }
    }
}

/// Widens the block and lays it out in panels of `C` columns.
#[inline(always)]
unsafe fn pack<S: Simd, W: Stored, const C: usize>(args: &BlockArgs) {
    let k = args.k;
    let mut to = args.packed;
    let mut col = 0;
    while col < args.num_cols {
        let mut i = 0;
        while i < k {
            for c in 0..C {
                // SAFETY: columns and K stay below their numbers; the room is for whole panels.
                unsafe {
                    let from = args.w.add(((col + c) * k + i) * W::SIZE);
                    let v = if col + c >= args.num_cols {
                        S::splat(0.0)
                    } else if i + LANES <= k {
                        W::load::<S>(from)
                    } else {
                        W::load_part::<S>(from, k - i)
                    };
                    S::store(to, v);
                    to = to.add(LANES);
                }
            }
            i += LANES;
        }
        col += C;
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

/// All tiles. In place: those of a few columns one after the other, so that W, which comes from memory,
/// is read once and in order. Packed: those of a few rows, so that A stays while the block passes by.
#[inline(always)]
unsafe fn tiles<S: Simd, W: Stored, const PACKED: bool>(args: &BlockArgs) {
    // One row alone has registers for four columns everywhere; packed panels have their width.
    let max_cols = match S::TILE_ROWS {
        6 => 4,
        _ if !PACKED && args.num_rows == 1 => 4,
        3 => 2,
        _ => 1,
    };
    let w_base = if PACKED { args.packed.cast_const().cast() } else { args.w };
    let w_len = if PACKED { args.k.next_multiple_of(LANES) } else { args.k };
    let (mut row, mut col) = (0, 0);
    while row < args.num_rows && col < args.num_cols {
        let left = args.num_rows - row;
        // Few shapes: five rows are four and one.
        let rows = match S::TILE_ROWS {
            6 if left >= 6 => 6,
            6 if left >= 4 => 4,
            3 if left >= 3 => 3,
            6 | 3 if left >= 2 => 2,
            _ => 1,
        };
        let cols = max_cols.min(args.num_cols - col);
        // SAFETY: row and column lie in the block.
        unsafe {
            let a = args.a.add(row * args.k);
            let w = w_base.add(col * w_len * W::SIZE);
            let at = (row, col);
            match (rows, if PACKED { max_cols } else { cols }) {
                (6, 4) if S::TILE_ROWS == 6 => tile::<S, W, PACKED, 6, 4>(args, a, w, at),
                (4, 4) if S::TILE_ROWS == 6 => tile::<S, W, PACKED, 4, 4>(args, a, w, at),
                (2, 4) if S::TILE_ROWS == 6 => tile::<S, W, PACKED, 2, 4>(args, a, w, at),
                (1, 4) if S::TILE_ROWS == 6 || !PACKED => tile::<S, W, PACKED, 1, 4>(args, a, w, at),
                (3, 2) if S::TILE_ROWS == 3 => tile::<S, W, PACKED, 3, 2>(args, a, w, at),
                (2, 2) if S::TILE_ROWS == 3 => tile::<S, W, PACKED, 2, 2>(args, a, w, at),
                (1, 2) if S::TILE_ROWS == 3 => tile::<S, W, PACKED, 1, 2>(args, a, w, at),
                // Edges in place are rare: one element at a time.
                _ => {
                    for r in 0..rows {
                        for c in 0..cols {
                            let (a, w) = (a.add(r * args.k), w.add(c * args.k * W::SIZE));
                            tile::<S, W, PACKED, 1, 1>(args, a, w, (row + r, col + c));
                        }
                    }
                }
            }
        }
        if PACKED {
            col += cols;
            if col == args.num_cols {
                (row, col) = (row + rows, 0);
            }
        } else {
            row += rows;
            if row == args.num_rows {
                (row, col) = (0, col + cols);
            }
        }
    }
}

/// Computes and writes `R x C` elements, as far as there are so many columns.
#[inline(always)]
unsafe fn tile<S: Simd, W: Stored, const PACKED: bool, const R: usize, const C: usize>(
    args: &BlockArgs,
    a: *const f32,
    w: *const u8,
    (row, col): (usize, usize),
) {
    let cols = C.min(args.num_cols - col);
    // SAFETY: the tile lies in the block.
    unsafe {
        let dots = dot_tile::<S, W, PACKED, R, C>(a, args.k, w, args.k, args.k);
        for (r, dots) in dots.iter().enumerate() {
            let out = args.out.add((row + r) * args.out_stride + col);
            for (c, &dot) in dots.iter().take(cols).enumerate() {
                let value = if args.bias.is_null() { dot } else { dot + *args.bias.add(col + c) };
                let out = out.add(c);
                *out = if args.add { *out + value } else { value };
            }
        }
    }
}

/// The dot products of `R` rows of `a` with `C` rows of `w`, strides in elements; or with a packed panel.
///
/// # Safety
/// Both pointers are valid for their rows of `k` elements.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
pub(crate) unsafe fn dot_tile<S: Simd, W: Stored, const PACKED: bool, const R: usize, const C: usize>(
    a: *const f32,
    a_stride: usize,
    w: *const u8,
    w_stride: usize,
    k: usize,
) -> [[f32; C]; R] {
    // SAFETY: indices stay below `k`, in a packed panel below the next multiple of the lanes.
    unsafe {
        let mut acc = [[S::splat(0.0); C]; R];
        let mut ws = [S::splat(0.0); C];
        let whole = k - k % LANES;
        let mut i = 0;
        while i < whole {
            for c in 0..C {
                let at = if PACKED { i * C + c * LANES } else { c * w_stride + i };
                ws[c] = W::load::<S>(w.add(at * W::SIZE));
            }
            for r in 0..R {
                let x = S::load(a.add(r * a_stride + i));
                for c in 0..C {
                    acc[r][c] = S::fma(x, ws[c], acc[r][c]);
                }
            }
            i += LANES;
        }
        if i < k {
            let n = k - i;
            for c in 0..C {
                ws[c] = if PACKED {
                    W::load::<S>(w.add((i * C + c * LANES) * W::SIZE))
                } else {
                    W::load_part::<S>(w.add((c * w_stride + i) * W::SIZE), n)
                };
            }
            for r in 0..R {
                let x = S::load_part(a.add(r * a_stride + i), n);
                for c in 0..C {
                    acc[r][c] = S::fma(x, ws[c], acc[r][c]);
                }
            }
        }
        let mut dots = [[0.0; C]; R];
        for r in 0..R {
            dots[r] = S::sums(acc[r]);
        }
        dots
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
