use half::bf16;

use baton_cpu_kernels::testing::{SLAB, UNCUT, cut};
use baton_cpu_kernels::{
    Cpu, GateFunction, Isa, Output, PANEL, PanelFormat, PanelsRef, RowOrder, has_pairs, level_tiles_multiply,
    multiply, pack_floats, pack_integers,
};
use baton_cpu_simd::tiles::tested_isas;
use baton_model_spec::{FloatDtype as Dtype, IntegerFormat, IntegerRow, IntegerWidth};
use baton_model_testing::noise;

use crate::pairs::add_pair;

/// The bytes of `values` in `dtype`, and the f32 that they widen to.
fn store(dtype: Dtype, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = Vec::new();
    let mut widened = Vec::new();
    for &value in values {
        match dtype {
            Dtype::F32 => {
                bytes.extend(value.to_le_bytes());
                widened.push(value);
            }
            Dtype::F16 => {
                let value = half::f16::from_f32(value);
                bytes.extend(value.to_le_bytes());
                widened.push(value.to_f32());
            }
            Dtype::Bf16 => {
                let value = half::bf16::from_f32(value);
                bytes.extend(value.to_le_bytes());
                widened.push(value.to_f32());
            }
        }
    }
    (bytes, widened)
}

/// Bytes after which the process must not read, as after those of a mapped file.
struct AtEnd {
    map: *mut u8,
    map_bytes: usize,
    first: usize,
    len: usize,
}

impl AtEnd {
    fn of(bytes: &[u8]) -> AtEnd {
        // SAFETY: the mapping is new; its last page, which is not written, loses its permissions.
        unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let size = bytes.len().next_multiple_of(page);
            let (protection, kind) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let map = libc::mmap(std::ptr::null_mut(), size + page, protection, kind, -1, 0).cast::<u8>();
            assert_ne!(map.cast(), libc::MAP_FAILED);
            assert_eq!(libc::mprotect(map.add(size).cast(), page, libc::PROT_NONE), 0);
            let first = size - bytes.len();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), map.add(first), bytes.len());
            AtEnd { map, map_bytes: size + page, first, len: bytes.len() }
        }
    }
}

impl std::ops::Deref for AtEnd {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: these bytes were written, and live as long as the mapping.
        unsafe { std::slice::from_raw_parts(self.map.add(self.first), self.len) }
    }
}

impl Drop for AtEnd {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nothing borrows it any more.
        unsafe { libc::munmap(self.map.cast(), self.map_bytes) };
    }
}

/// A product to check.
struct Case {
    format: PanelFormat,
    m: usize,
    n: usize,
    k: usize,
}

/// Packed weights, and the numbers that they represent.
struct Packed {
    bytes: AtEnd,
    values: Vec<f32>,
    rows: Vec<IntegerRow>,
}

fn pack(case: &Case, order: RowOrder) -> Packed {
    let Case { format, n, k, .. } = *case;
    let noise = noise(2, n * k);
    let mut bytes = vec![0xff; format.matrix_bytes(n, k)];
    let panels = bytes.chunks_mut(format.panel_bytes(k)).enumerate();
    let rows_of = |panel_idx| (0..PANEL).map(move |output| order.row(n, panel_idx, output));
    let (mut rows, mut values) = (vec![], vec![]);
    match format {
        PanelFormat::Integers(integers) => {
            for values in noise.chunks(k) {
                rows.push(integer_row(values, integers));
            }
            for (panel_idx, panel) in panels {
                let row = |at: Option<usize>| {
                    at.map_or_else(|| IntegerRow::zeroes(k, integers), |at| rows[at].clone())
                };
                pack_integers(&rows_of(panel_idx).map(row).collect::<Vec<_>>(), integers, k, panel);
            }
            rows.iter().for_each(|row| values.extend(row.values(integers)));
        }
        PanelFormat::Floats(_) | PanelFormat::Bf16Pairs => {
            let dtype = if let PanelFormat::Floats(dtype) = format { dtype } else { Dtype::Bf16 };
            let stored;
            (stored, values) = store(dtype, &noise);
            let rows: Vec<_> = stored.chunks(k * dtype.size_bytes()).collect();
            let zeroes = vec![0; k * dtype.size_bytes()];
            for (panel_idx, panel) in panels {
                let row = |at: Option<usize>| at.map_or(&zeroes[..], |at| rows[at]);
                pack_floats(&rows_of(panel_idx).map(row).collect::<Vec<_>>(), format, panel);
            }
        }
    }
    Packed { bytes: AtEnd::of(&bytes), values, rows }
}

/// Scales and zero points that f16 represents exactly, as in files.
fn integer_row(values: &[f32], format: IntegerFormat) -> IntegerRow {
    let mut row = IntegerRow::quantise(values, IntegerFormat { has_zeros: false, ..format });
    row.scales.iter_mut().for_each(|scale| *scale = half::f16::from_f32(*scale).to_f32());
    if format.has_zeros {
        row.zeros = (0..row.scales.len()).map(|group| group as f32 * 0.5 - 1.0).collect();
    }
    row
}

/// The scale of a row that panels store apart from those of groups.
fn row_scale(row: &IntegerRow) -> f32 {
    let uniform = row.scales.iter().all(|scale| *scale == row.scales[0]);
    let largest = row.scales.iter().fold(0.0f32, |max, scale| max.max(scale.abs()));
    let scale = if uniform { row.scales[0] } else { 2f32.powi(largest.log2().floor() as i32) };
    if largest == 0.0 { 1.0 } else { scale }
}

/// The sum of products of bf16, as tiles add it.
fn in_tiles(a: &[f32], w: &[f32]) -> f32 {
    let of_slab = |a: &[f32], w: &[f32]| {
        a.chunks(32).zip(w.chunks(32)).fold(0.0f32, |sum, (a, w)| {
            let chain = |first: usize| {
                let (a, w) = (a.iter().skip(first).step_by(2), w.iter().skip(first).step_by(2));
                a.zip(w).fold(0.0f32, |sum, (a, w)| a.mul_add(*w, sum))
            };
            sum + (chain(0) + chain(1))
        })
    };
    let slabs = a.chunks(SLAB).zip(w.chunks(SLAB));
    slabs.map(|(a, w)| of_slab(a, w)).reduce(|sum, slab| sum + slab).unwrap_or(0.0)
}

/// The exact result that the kernel of `case` approximates for one element, before the bias.
fn reference(isa: Isa, case: &Case, packed: &Packed, a: &[f32], col: usize) -> f32 {
    let w = &packed.values[col * case.k..][..case.k];
    match case.format {
        PanelFormat::Floats(_) => a.iter().zip(w).fold(0.0f32, |sum, (a, w)| a.mul_add(*w, sum)),
        PanelFormat::Bf16Pairs if isa.has_tiles() => {
            let a: Vec<f32> = a.iter().map(|a| bf16::from_f32(*a).to_f32()).collect();
            in_tiles(&a, w)
        }
        PanelFormat::Bf16Pairs => {
            let a: Vec<f32> = a.iter().map(|a| bf16::from_f32(*a).to_f32()).collect();
            let pair = |x: &[f32]| [x[0], x.get(1).copied().unwrap_or(0.0)];
            a.chunks(2).zip(w.chunks(2)).fold(0.0f32, |sum, (a, w)| add_pair(sum, pair(a), pair(w)))
        }
        PanelFormat::Integers(format) if isa.has_tiles() && !level_tiles_multiply(format) => {
            let row = &packed.rows[col];
            let row_scale = row_scale(row);
            let a: Vec<f32> = a.iter().map(|a| bf16::from_f32(*a).to_f32()).collect();
            let w: Vec<f32> = (row.levels.iter().enumerate())
                .map(|(k, level)| {
                    let group = k / format.group;
                    let zero =
                        if format.has_zeros { row.zeros[group] } else { f32::from(format.width.middle()) };
                    cut(format.width, k, *level, zero, row.scales[group] / row_scale)
                })
                .collect();
            in_tiles(&a, &w) * UNCUT * row_scale
        }
        PanelFormat::Integers(format) => {
            let row = &packed.rows[col];
            let row_scale = row_scale(row);
            let mut sum = 0.0f32;
            let mut groups = (0..row.scales.len()).zip(row.levels.chunks(format.group));
            for a in a.chunks(format.activation_group()) {
                let scale = a.iter().fold(0.0f32, |max, a| max.max(a.abs())) * (1.0 / 127.0);
                let mut shared = 0.0f32;
                for a in a.chunks(format.group) {
                    let (idx, weights) = groups.next().expect("as many groups");
                    let levels: Vec<i32> =
                        a.iter().map(|a| (a * (1.0 / scale)).round_ties_even() as i32).collect();
                    let products: i32 = levels.iter().zip(weights).map(|(a, w)| a * i32::from(*w)).sum();
                    let total: i32 = levels.iter().sum();
                    let zero =
                        if format.has_zeros { row.zeros[idx] } else { f32::from(format.width.middle()) };
                    let products = (-zero).mul_add(total as f32, products as f32);
                    shared = products.mul_add(row.scales[idx] / row_scale, shared);
                }
                sum = shared.mul_add(scale, sum);
            }
            sum * row_scale
        }
    }
}

fn check(isa: Isa, threads: usize, case: &Case) {
    let Case { format, m, n, k } = *case;
    let mut cpu = Cpu::new(isa, threads).unwrap();
    let a = noise(1, m * k);
    let packed = pack(case, RowOrder::Plain);
    let bias = noise(3, n);
    let panels = PanelsRef::new(&packed.bytes, format, n, k);
    let mut out = vec![f32::NAN; m * n];
    multiply(&mut cpu, m, &a, panels, Some(&bias), &mut out, Output::Store);
    // Without a fused instruction, products are rounded before they are added.
    let tolerance = if isa == Isa::Portable { 1e-6 * k as f32 } else { 0.0 };
    for row in 0..m {
        for col in 0..n {
            let expected = reference(isa, case, &packed, &a[row * k..][..k], col) + bias[col];
            let got = out[row * n + col];
            assert!(
                (got - expected).abs() <= tolerance,
                "{isa:?} {format:?} {m}x{n}x{k} at {row},{col}: {got} not {expected}"
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
        for (got, w) in row.iter().zip(&packed.values[col * k..]) {
            assert!((got - 2.0 * w).abs() <= 1e-6 * w.abs(), "row {col} of {format:?}: {got} not twice {w}");
        }
    }
}

/// Checks gated outputs against those of [`check`].
fn check_gated(isa: Isa, threads: usize, case: &Case) {
    let Case { format, m, n, k } = *case;
    let mut cpu = Cpu::new(isa, threads).unwrap();
    let (a, bias) = (noise(1, m * k), noise(3, 2 * n));
    let both_halves = Case { n: 2 * n, ..*case };
    let [plain, beside] = [RowOrder::Plain, RowOrder::Gated].map(|order| pack(&both_halves, order).bytes);
    let mut both = vec![0.0; m * 2 * n];
    let panels = PanelsRef::new(&plain, format, 2 * n, k);
    multiply(&mut cpu, m, &a, panels, Some(&bias), &mut both, Output::Store);

    let mut out = vec![f32::NAN; m * n];
    let panels = PanelsRef::new(&beside, format, 2 * n, k).in_order(RowOrder::Gated);
    multiply(&mut cpu, m, &a, panels, Some(&bias), &mut out, Output::Gated(GateFunction::Silu));
    for (row, (out, both)) in out.chunks(n).zip(both.chunks(2 * n)).enumerate() {
        for (col, out) in out.iter().enumerate() {
            let (gate, up) = (f64::from(both[col]), f64::from(both[n + col]));
            let expected = gate / (1.0 + (-gate).exp()) * up;
            let error = (f64::from(*out) - expected).abs();
            assert!(error <= 1e-5 * expected.abs().max(1.0), "{isa:?} {format:?} {m}x{n}x{k} at {row},{col}");
        }
    }
}

fn formats(isa: Isa) -> Vec<PanelFormat> {
    let mut all: Vec<_> = [Dtype::F32, Dtype::F16, Dtype::Bf16].map(PanelFormat::Floats).to_vec();
    if has_pairs(isa) {
        all.push(PanelFormat::Bf16Pairs);
    }
    for width in [IntegerWidth::Four, IntegerWidth::Eight] {
        for (group, has_zeros) in [(32, false), (96, true), (128, false), (128, true), (288, false)] {
            all.push(PanelFormat::Integers(IntegerFormat { width, group, has_zeros }));
        }
    }
    all
}

#[test]
fn products_do_not_depend_on_tiles_or_threads() {
    for isa in tested_isas() {
        for format in formats(isa) {
            for m in [1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 14, 15, 16, 27, 29, 33, 45] {
                check(isa, 1, &Case { format, m, n: 1 + m * 7 % 150, k: 1 + m * 13 % 90 });
            }
            for (m, n, k) in [(1, 16, 40), (3, 37, 64), (20, 150, 100), (1, 1500, 90)] {
                check_gated(isa, 2, &Case { format, m, n, k });
            }
            check(isa, 3, &Case { format, m: 210, n: 24, k: 96 });
            check(isa, 1, &Case { format, m: 131, n: 70, k: 301 });
            check(isa, 3, &Case { format, m: 17, n: 300, k: 200 });
            check(isa, 2, &Case { format, m: 1, n: 1000, k: 1100 });
            check(isa, 2, &Case { format, m: 3, n: 100, k: 1500 });
            check(isa, 2, &Case { format, m: 33, n: 70, k: 2600 });
            if isa.has_tiles() {
                // More tiles of rows than pass a panel at a time, and several blocks of K.
                check(isa, 1, &Case { format, m: 530, n: 40, k: 1100 });
            }
        }
    }
}

#[test]
fn sums_of_many_panels_wait_for_the_next_block() {
    for isa in tested_isas() {
        if isa.has_tiles() {
            check(isa, 1, &Case { format: PanelFormat::Bf16Pairs, m: 260, n: 1100, k: 520 });
        }
        let levels = IntegerFormat { width: IntegerWidth::Four, group: 32, has_zeros: true };
        for format in [PanelFormat::Floats(Dtype::Bf16), PanelFormat::Integers(levels)] {
            check(isa, 1, &Case { format, m: 200, n: 560, k: 520 });
            check_gated(isa, 1, &Case { format, m: 70, n: 280, k: 520 });
        }
    }
}

#[test]
#[should_panic(expected = "portable has no kernel that multiplies pairs of bf16")]
fn pairs_without_a_kernel_are_refused() {
    check(Isa::Portable, 1, &Case { format: PanelFormat::Bf16Pairs, m: 2, n: 40, k: 70 });
}

#[test]
fn nan_activations_give_nan() {
    for group in [32, 128] {
        let format = IntegerFormat { width: IntegerWidth::Eight, group, has_zeros: false };
        let case = Case { format: PanelFormat::Integers(format), m: 3, n: 40, k: 70 };
        let packed = pack(&case, RowOrder::Plain);
        for isa in tested_isas() {
            let mut cpu = Cpu::new(isa, 1).unwrap();
            let mut a = noise(1, case.m * case.k);
            a[5] = f32::NAN;
            a[case.k + 69] = f32::INFINITY;
            let mut out = vec![0.0; case.m * case.n];
            let panels = PanelsRef::new(&packed.bytes, case.format, case.n, case.k);
            multiply(&mut cpu, case.m, &a, panels, None, &mut out, Output::Store);
            // Activations that stay floats may keep an infinity.
            let stays = isa.has_tiles() && !level_tiles_multiply(format);
            let [nan, infinity, good] = [0, 1, 2].map(|row| &out[row * case.n..(row + 1) * case.n]);
            assert!(nan.iter().all(|x| x.is_nan()), "{isa:?}: the row with a NaN");
            assert!(infinity.iter().all(|x| x.is_nan() || stays && x.is_infinite()), "{isa:?}: an infinity");
            assert!(good.iter().all(|x| x.is_finite()), "{isa:?}: the good row");
        }
    }
}
