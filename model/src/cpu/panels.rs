//! Matrix products `C[M][N] = A[M][K] W[N][K]^T` with weights that were packed once.
//!
//! ```text
//! W packed:  panels of 32 outputs   [N / 32][K][32]    zeroes where N is no multiple
//! A packed:  tiles of R rows        [M / R][K][R]      zeroes where M is no multiple; one row is packed as it is
//! tile of C: R rows x 32 outputs, in registers over all of K
//! ```
//!
//! The kernel walks down K: one line of weights, widened in registers, times one number of each row. So weights
//! are read once, in order, and a tile of few rows (decode) and one of many (prefill) run the same code.
//!
//! Every element of C is one chain of fused multiply-adds in the order of K, whatever the tile, the number of
//! threads or the instruction set: a row of C does not depend on how many rows there are or where it lies.

#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Bf16, Dtype, F16, F32, Isa, LANES, Portable, Simd, Stored, kernel};
use super::{Cpu, SharedMut};

/// Outputs of a panel.
pub(crate) const PANEL: usize = 2 * LANES;
/// Panels that some kernel takes at once.
const MAX_PANELS: usize = 4;
/// Bytes of weights that stay in a core's second cache while all rows pass by.
const GROUP_BYTES: usize = 1 << 20;
/// Bytes ahead of the kernel that are asked for.
const PREFETCH: usize = 2048;
/// Multiplications below which waking the helpers costs more than it brings.
const MIN_SHARED_WORK: usize = 128 * 1024;

/// What becomes of the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// `C = A W^T + bias`
    Store,
    /// `C = C + (A W^T + bias)`
    Add,
}

/// A packed weight matrix `[rows][cols]`; one output per row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PanelsRef<'a> {
    data: &'a [u8],
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl<'a> PanelsRef<'a> {
    /// # Panics
    /// When `data` has not the size that the shape needs.
    pub(crate) fn new(data: &'a [u8], dtype: Dtype, rows: usize, cols: usize) -> PanelsRef<'a> {
        assert_eq!(data.len(), packed_bytes(dtype, rows, cols), "panels of {rows} x {cols}");
        PanelsRef { data, dtype, rows, cols }
    }

    /// Writes row `row_idx`, widened and scaled, to `out`.
    pub(crate) fn read_row(&self, row_idx: usize, scale: f32, out: &mut [f32]) {
        assert!(row_idx < self.rows && out.len() == self.cols);
        let size = self.dtype.size_bytes();
        let panel = &self.data[row_idx / PANEL * PANEL * self.cols * size..][..PANEL * self.cols * size];
        let at = place(self.dtype, row_idx % PANEL) * size;
        for (out, line) in out.iter_mut().zip(panel.chunks_exact(PANEL * size)) {
            // SAFETY: `at` is the place of an element in the line.
            let value = unsafe {
                match self.dtype {
                    Dtype::F32 => F32::load_one(line.as_ptr().add(at)),
                    Dtype::F16 => F16::load_one(line.as_ptr().add(at)),
                    Dtype::Bf16 => Bf16::load_one(line.as_ptr().add(at)),
                }
            };
            *out = value * scale;
        }
    }
}

/// Bytes of a packed matrix.
pub(crate) fn packed_bytes(dtype: Dtype, rows: usize, cols: usize) -> usize {
    rows.div_ceil(PANEL) * PANEL * cols * dtype.size_bytes()
}

/// Where a panel's output lies in a line: bf16 pairs output i with i + 16, so that one shift and one mask widen
/// a whole line.
fn place(dtype: Dtype, output: usize) -> usize {
    match dtype {
        Dtype::Bf16 => output % LANES * 2 + output / LANES,
        Dtype::F16 | Dtype::F32 => output,
    }
}

/// Packs at most [`PANEL`] rows of equal length into the panel `to`.
pub(crate) fn pack_panel<R: AsRef<[u8]>>(rows: &[R], dtype: Dtype, to: &mut [u8]) {
    match dtype.size_bytes() {
        2 => pack_elements::<2, R>(rows, dtype, to),
        _ => pack_elements::<4, R>(rows, dtype, to),
    }
}

fn pack_elements<const SIZE: usize, R: AsRef<[u8]>>(rows: &[R], dtype: Dtype, to: &mut [u8]) {
    /// Lines written at a time: they stay in the cache while all rows pass.
    const LINES: usize = 64;
    let (lines, _) = to.as_chunks_mut::<SIZE>();
    for (block_idx, lines) in lines.chunks_mut(LINES * PANEL).enumerate() {
        for output in 0..PANEL {
            let elements = lines.iter_mut().skip(place(dtype, output)).step_by(PANEL);
            match rows.get(output) {
                Some(row) => {
                    let (row, _) = row.as_ref().as_chunks::<SIZE>();
                    elements.zip(&row[block_idx * LINES..]).for_each(|(to, from)| *to = *from);
                }
                None => elements.for_each(|to| *to = [0; SIZE]),
            }
        }
    }
}

/// Multiplies `num_rows` rows of `a` with the weights.
///
/// # Panics
/// When sizes do not fit together.
pub(crate) fn multiply(
    cpu: &mut Cpu,
    num_rows: usize,
    a: &[f32],
    weights: PanelsRef<'_>,
    bias: Option<&[f32]>,
    out: &mut [f32],
    output: Output,
) {
    let (n, k) = (weights.rows, weights.cols);
    assert!(a.len() >= num_rows * k && out.len() >= num_rows * n);
    assert!(bias.is_none_or(|bias| bias.len() == n));
    if num_rows == 0 || n == 0 {
        return;
    }
    let num_threads = cpu.pool.num_threads();
    let shared = num_threads > 1 && num_rows * n * k >= MIN_SHARED_WORK;
    let isa = cpu.isa;
    let tiles = Tiles::new(num_rows, isa.tile_rows());
    if num_rows > 1 {
        pack_rows(cpu, &tiles, a, k, shared);
    }
    let Cpu { packed, pool, .. } = cpu;
    let packed: &[f32] = if num_rows > 1 { packed } else { a };

    let num_panels = n.div_ceil(PANEL);
    let panel_bytes = PANEL * k * weights.dtype.size_bytes();
    // As many panels as stay in the cache; fewer where threads would have nothing to do.
    let fair = if shared { num_panels.div_ceil(4 * num_threads) } else { num_panels };
    let group = (GROUP_BYTES / panel_bytes.max(1)).min(fair).max(1);
    let group = if tiles.len() == 1 { group.next_multiple_of(MAX_PANELS) } else { group };
    let num_groups = num_panels.div_ceil(group);
    // Where there are few panels, rows are divided as well.
    let wanted = if shared { (4 * num_threads).div_ceil(num_groups) } else { 1 };
    let tiles_per_item = tiles.len().div_ceil(wanted.min(tiles.len()));
    let num_row_items = tiles.len().div_ceil(tiles_per_item);

    let out = SharedMut::new(out);
    let tiles = &tiles;
    let item = |_: usize, item_idx: usize| {
        let (group_idx, row_item) = (item_idx / num_row_items, item_idx % num_row_items);
        let first_panel = group_idx * group;
        let panels = group.min(num_panels - first_panel);
        for tile_idx in row_item * tiles_per_item..tiles.len().min((row_item + 1) * tiles_per_item) {
            let first_row = tiles.first_row(tile_idx);
            let tile = TileArgs {
                a: packed[first_row * k..].as_ptr(),
                rows: tiles.rows_of(tile_idx),
                real_rows: tiles.rows_of(tile_idx).min(num_rows - first_row),
                w: weights.data[first_panel * panel_bytes..][..panels * panel_bytes].as_ptr(),
                dtype: weights.dtype,
                k,
                panels,
                bias: bias.map_or(std::ptr::null(), |bias| bias[first_panel * PANEL..].as_ptr()),
                // SAFETY: rows and columns were checked above.
                out: unsafe { out.ptr().add(first_row * n + first_panel * PANEL) },
                out_stride: n,
                num_cols: n - first_panel * PANEL,
                add: output == Output::Add,
            };
            // SAFETY: the sizes fit; an item's elements of `out` are its own.
            unsafe { tile_kernel(isa, &tile) };
        }
    };
    let num_items = num_groups * num_row_items;
    if shared { pool.for_each(num_items, item) } else { (0..num_items).for_each(|idx| item(0, idx)) }
}

/// How rows are divided: tiles of nearly equal heights, all of them heights that a kernel exists for.
struct Tiles {
    num_rows: usize,
    /// Of the first tiles, and how many they are.
    high: (usize, usize),
    /// Of the rest.
    low: (usize, usize),
}

impl Tiles {
    fn new(num_rows: usize, max_rows: usize) -> Tiles {
        let num_tiles = num_rows.div_ceil(max_rows);
        let even = |rows: usize| if rows == 1 { 1 } else { rows.next_multiple_of(2) };
        let high = even(num_rows.div_ceil(num_tiles));
        let low = if high > 2 { high - 2 } else { high };
        // As many low ones as still hold all rows.
        let spare = num_tiles * high - num_rows;
        let num_low = if high > low { (spare / (high - low)).min(num_tiles) } else { 0 };
        Tiles { num_rows, high: (high, num_tiles - num_low), low: (low, num_low) }
    }

    fn len(&self) -> usize {
        self.high.1 + self.low.1
    }

    fn rows_of(&self, tile_idx: usize) -> usize {
        if tile_idx < self.high.1 { self.high.0 } else { self.low.0 }
    }

    /// Also the number of packed rows before the tile.
    fn first_row(&self, tile_idx: usize) -> usize {
        let high = tile_idx.min(self.high.1);
        high * self.high.0 + (tile_idx - high) * self.low.0
    }
}

/// Packs the rows of `a` as the tiles read them, into `cpu.packed`.
fn pack_rows(cpu: &mut Cpu, tiles: &Tiles, a: &[f32], k: usize, shared: bool) {
    /// Numbers of each row in an item.
    const CHUNK: usize = 512;
    let Cpu { packed, pool, .. } = cpu;
    let num_rows = tiles.first_row(tiles.len());
    let packed = SharedMut::new(packed.grown(num_rows * k));
    let num_chunks = k.div_ceil(CHUNK);
    let item = |_: usize, item_idx: usize| {
        let (tile_idx, chunk_idx) = (item_idx / num_chunks, item_idx % num_chunks);
        let (rows, first_row) = (tiles.rows_of(tile_idx), tiles.first_row(tile_idx));
        let columns = chunk_idx * CHUNK..k.min((chunk_idx + 1) * CHUNK);
        // SAFETY: an item's lines of the packed rows are its own.
        let to = unsafe {
            let to = packed.ptr().add(first_row * k + columns.start * rows);
            std::slice::from_raw_parts_mut(to, columns.len() * rows)
        };
        for row in 0..rows {
            let to = to.iter_mut().skip(row).step_by(rows);
            if first_row + row < tiles.num_rows {
                let from = &a[(first_row + row) * k..][columns.clone()];
                to.zip(from).for_each(|(to, from)| *to = *from);
            } else {
                to.for_each(|to| *to = 0.0);
            }
        }
    };
    let num_items = tiles.len() * num_chunks;
    if shared && num_items > 1 {
        pool.for_each(num_items, item);
    } else {
        (0..num_items).for_each(|idx| item(0, idx));
    }
}

/// Some panels for one tile of rows.
struct TileArgs {
    a: *const f32,
    rows: usize,
    /// Those that are not padding.
    real_rows: usize,
    w: *const u8,
    dtype: Dtype,
    k: usize,
    panels: usize,
    bias: *const f32,
    out: *mut f32,
    out_stride: usize,
    /// From the first of the panels to the end of the matrix.
    num_cols: usize,
    add: bool,
}

kernel! {
    /// # Safety
    /// The pointers are valid for the sizes beside them.
    fn tile_kernel / tile (args: &TileArgs)
}

#[inline(always)]
unsafe fn tile<S: Simd>(args: &TileArgs) {
    // SAFETY: passed on to the caller.
    unsafe {
        match args.dtype {
            Dtype::F32 => tile_of::<S, F32>(args),
            Dtype::F16 => tile_of::<S, F16>(args),
            Dtype::Bf16 => tile_of::<S, Bf16>(args),
        }
    }
}

/// Chooses the kernel. Few rows take several panels at once: one alone would wait for its own sums. Where registers
/// are short, a panel is taken in two halves.
#[inline(always)]
unsafe fn tile_of<S: Simd, W: Panel>(args: &TileArgs) {
    // SAFETY: passed on to the caller.
    unsafe {
        if S::PANEL_ROWS == 14 {
            match args.rows {
                1 => panels::<S, W, 1, 4, 2>(args),
                2 => panels::<S, W, 2, 4, 2>(args),
                4 => panels::<S, W, 4, 2, 2>(args),
                6 => panels::<S, W, 6, 2, 2>(args),
                8 => panels::<S, W, 8, 1, 2>(args),
                10 => panels::<S, W, 10, 1, 2>(args),
                12 => panels::<S, W, 12, 1, 2>(args),
                _ => panels::<S, W, 14, 1, 2>(args),
            }
        } else {
            match args.rows {
                1 => panels::<S, W, 1, 2, 2>(args),
                2 => panels::<S, W, 2, 1, 2>(args),
                4 => panels::<S, W, 4, 1, 1>(args),
                _ => panels::<S, W, 6, 1, 1>(args),
            }
        }
    }
}

impl Isa {
    /// Rows of the largest tile; all even numbers below it are heights, too, and one.
    fn tile_rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::PANEL_ROWS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::PANEL_ROWS,
            Isa::Portable => Portable::PANEL_ROWS,
        }
    }
}

/// All panels, `P` at a time, the last ones one by one.
#[inline(always)]
unsafe fn panels<S: Simd, W: Panel, const R: usize, const P: usize, const H: usize>(args: &TileArgs) {
    let mut panel = 0;
    // SAFETY: panels stay below their number.
    unsafe {
        while panel + P <= args.panels {
            one_tile::<S, W, R, P, H, 0>(args, panel);
            if H == 1 {
                one_tile::<S, W, R, P, H, 1>(args, panel);
            }
            panel += P;
        }
        while panel < args.panels {
            one_tile::<S, W, R, 1, H, 0>(args, panel);
            if H == 1 {
                one_tile::<S, W, R, 1, H, 1>(args, panel);
            }
            panel += 1;
        }
    }
}

/// `R` rows and `H` halves, from `FIRST` on, of each of `P` panels.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn one_tile<S, W, const R: usize, const P: usize, const H: usize, const FIRST: usize>(
    args: &TileArgs,
    first_panel: usize,
) where
    S: Simd,
    W: Panel,
{
    let line = PANEL * W::SIZE;
    let stride = args.k * line;
    // SAFETY: K and the panels stay below their numbers; what is asked for ahead need not exist.
    unsafe {
        let mut acc = [[[S::splat(0.0); H]; P]; R];
        let mut ws = [[S::splat(0.0); 2]; P];
        let mut w = args.w.add(first_panel * stride);
        let mut a = args.a;
        for _ in 0..args.k {
            for p in 0..P {
                S::prefetch(w.wrapping_add(p * stride + PREFETCH));
                ws[p] = W::load_pair::<S>(w.add(p * stride));
            }
            for r in 0..R {
                let x = S::splat(*a.add(r));
                for p in 0..P {
                    for h in 0..H {
                        acc[r][p][h] = S::fma(x, ws[p][FIRST + h], acc[r][p][h]);
                    }
                }
            }
            w = w.add(line);
            a = a.add(R);
        }
        for r in 0..R {
            if r >= args.real_rows {
                break;
            }
            for p in 0..P {
                for h in 0..H {
                    let col = (first_panel + p) * PANEL + (FIRST + h) * LANES;
                    if col < args.num_cols {
                        finish::<S>(args, r, col, acc[r][p][h]);
                    }
                }
            }
        }
    }
}

/// Adds what is to be added, and writes.
#[inline(always)]
unsafe fn finish<S: Simd>(args: &TileArgs, row: usize, col: usize, sums: S::V) {
    let num = args.num_cols - col;
    // SAFETY: row and column lie in the matrix.
    unsafe {
        let out = args.out.add(row * args.out_stride + col);
        let mut sums = sums;
        if num >= LANES {
            if !args.bias.is_null() {
                sums = S::add(sums, S::load(args.bias.add(col)));
            }
            if args.add {
                sums = S::add(S::load(out), sums);
            }
            S::store(out, sums);
        } else {
            if !args.bias.is_null() {
                sums = S::add(sums, S::load_part(args.bias.add(col), num));
            }
            if args.add {
                sums = S::add(S::load_part(out, num), sums);
            }
            S::store_part(out, sums, num);
        }
    }
}

/// Stored numbers whose panels' lines widen to two vectors.
trait Panel: Stored {
    /// A line: outputs 0 to 15 and 16 to 31.
    ///
    /// # Safety
    /// As [`Simd`], for thirty-two elements.
    unsafe fn load_pair<S: Simd>(p: *const u8) -> [S::V; 2];
}

impl Panel for F32 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(p: *const u8) -> [S::V; 2] {
        // SAFETY: passed on to the caller.
        unsafe { [S::load(p.cast()), S::load(p.cast::<f32>().add(LANES))] }
    }
}

impl Panel for F16 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(p: *const u8) -> [S::V; 2] {
        // SAFETY: passed on to the caller.
        unsafe { [S::load_f16(p.cast()), S::load_f16(p.cast::<u16>().add(LANES))] }
    }
}

impl Panel for Bf16 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(p: *const u8) -> [S::V; 2] {
        // SAFETY: passed on to the caller.
        unsafe { S::load_bf16_pair(p.cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{noise, store};

    /// The chain of fused multiply-adds that every kernel promises.
    fn reference(a: &[f32], w: &[f32]) -> f32 {
        a.iter().zip(w).fold(0.0f32, |sum, (a, w)| a.mul_add(*w, sum))
    }

    fn pack(bytes: &[u8], dtype: Dtype, rows: usize, cols: usize) -> Vec<u8> {
        let mut packed = vec![0xff; packed_bytes(dtype, rows, cols)];
        let rows: Vec<_> = bytes.chunks(cols * dtype.size_bytes()).collect();
        let panels = packed.chunks_mut(packed_bytes(dtype, 1, cols));
        rows.chunks(PANEL).zip(panels).for_each(|(rows, panel)| pack_panel(rows, dtype, panel));
        packed
    }

    fn check(isa: Isa, threads: usize, dtype: Dtype, m: usize, n: usize, k: usize) {
        let mut cpu = Cpu::new(isa, threads).unwrap();
        let a = noise(1, m * k);
        let (bytes, w) = store(dtype, &noise(2, n * k));
        let bias = noise(3, n);
        let packed = pack(&bytes, dtype, n, k);
        let panels = PanelsRef::new(&packed, dtype, n, k);
        let mut out = vec![f32::NAN; m * n];
        multiply(&mut cpu, m, &a, panels, Some(&bias), &mut out, Output::Store);
        // Without the instruction, products are rounded before they are added.
        let tolerance = if isa == Isa::Portable { 1e-6 * k as f32 } else { 0.0 };
        for row in 0..m {
            for col in 0..n {
                let expected = reference(&a[row * k..][..k], &w[col * k..][..k]) + bias[col];
                let got = out[row * n + col];
                assert!(
                    (got - expected).abs() <= tolerance,
                    "{isa:?} {dtype:?} {m}x{n}x{k} at {row},{col}: {got} not {expected}"
                );
            }
        }
        let before = noise(4, m * n);
        let mut sums = before.clone();
        multiply(&mut cpu, m, &a, panels, Some(&bias), &mut sums, Output::Add);
        assert!(sums.iter().zip(before.iter().zip(&out)).all(|(sum, (a, b))| *sum == a + b));
        let mut row = vec![0.0; k];
        for col in 0..n {
            panels.read_row(col, 2.0, &mut row);
            assert!(row.iter().zip(&w[col * k..]).all(|(got, w)| *got == 2.0 * w), "row {col}");
        }
    }

    #[test]
    fn products_are_the_same_chain_of_sums_everywhere() {
        for isa in Isa::available() {
            for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                for m in [1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 14, 15, 16, 27, 29, 33, 45] {
                    let (n, k) = (1 + m * 7 % 150, 1 + m * 13 % 90);
                    check(isa, 1, dtype, m, n, k);
                }
                check(isa, 3, dtype, 210, 24, 96);
                check(isa, 3, dtype, 17, 300, 200);
                check(isa, 2, dtype, 1, 1000, 1100);
            }
        }
    }

    #[test]
    fn tiles_hold_all_rows_and_few_more() {
        for max_rows in [6, 14] {
            for num_rows in 1..200 {
                let tiles = Tiles::new(num_rows, max_rows);
                let total = tiles.first_row(tiles.len());
                assert!(total >= num_rows && total < num_rows + 2, "{num_rows} rows in {total}");
                for tile_idx in 0..tiles.len() {
                    let rows = tiles.rows_of(tile_idx);
                    assert!(
                        rows <= max_rows && (rows == 1 || rows.is_multiple_of(2)),
                        "{num_rows}: a tile of {rows}"
                    );
                    assert!(tiles.first_row(tile_idx) < num_rows, "an empty tile");
                }
            }
        }
    }
}
