//! Converts tiles of KV to factors: values by rows as stored; keys by columns, so that a vector holds consecutive
//! positions. Factors are numbers widened to f32, or pairs of bf16.

use baton_kv_cache::KvDtype;

use baton_cpu_simd::{Bf16, E4m3, F16, F32, I8, LANES, Stored, kernel};
use baton_cpu_simd::{Bf16Pair, Factor, Pair, Words};

/// The addresses of K or V of a tile's positions.
#[derive(Clone, Copy)]
pub(super) struct Positions<'a> {
    /// At least one.
    pub(super) rows: &'a [*const u8],
    pub(super) dtype: KvDtype,
    /// Numbers of a position.
    pub(super) n: usize,
}

impl Positions<'_> {
    /// The address of position `t`; after the last position, that of another valid position.
    #[inline(always)]
    pub(super) fn row(&self, t: usize) -> *const u8 {
        self.rows[t.min(self.rows.len() - 1)]
    }
}

kernel! {
    /// Writes number `d` of position `t` to `to[d * stride + t]`. `stride` is at least the number of positions,
    /// rounded up to the lanes. The contents after the last position are unspecified.
    ///
    /// # Safety
    /// Positions are valid for `n` numbers; `to` for as many columns as [`padded`] says.
    pub(super) fn widen_columns / columns (positions: &Positions<'_>, to: *mut f32, stride: usize)
}

kernel! {
    /// Writes number `d` of position `t` to `to[t * stride + d]`, and zeros after the last number. `stride` is `n`
    /// rounded up to the lanes.
    ///
    /// # Safety
    /// Positions are valid for `n` numbers, `to` for `stride` times their number.
    pub(super) fn widen_rows / rows (positions: &Positions<'_>, to: *mut f32, stride: usize)
}

kernel! {
    /// Writes numbers 2 d and 2 d + 1 of position `t` to `to[d * stride + t]`, otherwise as [`widen_columns`]. If `n`
    /// is odd, the second number of the last column is zero.
    ///
    /// # Safety
    /// As for [`widen_columns`]; positions [are multiplied in pairs](has_pairs_of).
    pub(super) fn pair_columns / columns_of_pairs (positions: &Positions<'_>, to: *mut f32, stride: usize)
}

kernel! {
    /// Writes numbers `d` of positions 2 t and 2 t + 1 to `to[t * stride + d]`, otherwise as [`widen_rows`]. If the
    /// number of positions is odd, another position takes the place of the missing one.
    ///
    /// # Safety
    /// As for [`widen_rows`]; positions [are multiplied in pairs](has_pairs_of).
    pub(super) fn pair_rows / rows_of_pairs (positions: &Positions<'_>, to: *mut f32, stride: usize)
}

/// Whether numbers of this type are multiplied in pairs of bf16, which has to hold each exactly.
pub(super) fn has_pairs_of(dtype: KvDtype) -> bool {
    matches!(dtype, KvDtype::Bf16 | KvDtype::Fp8 | KvDtype::Int8)
}

/// Columns that [`widen_columns`] writes for `n` numbers; those from `n` on have unspecified contents.
pub(super) fn padded(n: usize) -> usize {
    n.next_multiple_of(LANES * 4)
}

/// Generates two functions that call a generic one with the factor of the positions' type: single numbers, and
/// [pairs](has_pairs_of).
macro_rules! by_type {
    ($single:ident, $pairs:ident: $generic:ident[$positions:ident]($($arg:ident: $ty:ty),* $(,)?)) => {
        #[inline(always)]
        unsafe fn $single<S: Words>($($arg: $ty),*) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match $positions.dtype {
                    KvDtype::F32 => $generic::<S, F32>($($arg),*),
                    KvDtype::F16 => $generic::<S, F16>($($arg),*),
                    KvDtype::Bf16 => $generic::<S, Bf16>($($arg),*),
                    KvDtype::Fp8 => $generic::<S, E4m3>($($arg),*),
                    KvDtype::Int8 => $generic::<S, I8>($($arg),*),
                }
            }
        }
        #[inline(always)]
        unsafe fn $pairs<S: Words>($($arg: $ty),*) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match $positions.dtype {
                    KvDtype::Bf16 => $generic::<S, Bf16Pair>($($arg),*),
                    KvDtype::Fp8 => $generic::<S, Pair<E4m3>>($($arg),*),
                    KvDtype::Int8 => $generic::<S, Pair<I8>>($($arg),*),
                    KvDtype::F32 | KvDtype::F16 => unreachable!("has_pairs_of was asked"),
                }
            }
        }
    };
}
pub(super) use by_type;

by_type! { columns, columns_of_pairs: columns_of[positions](positions: &Positions<'_>, to: *mut f32, stride: usize) }
by_type! { rows, rows_of_pairs: rows_of[positions](positions: &Positions<'_>, to: *mut f32, stride: usize) }

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn columns_of<S: Words, W: Factor>(positions: &Positions<'_>, to: *mut f32, stride: usize) {
    let Positions { rows, n, .. } = *positions;
    let num_bytes = n * W::Number::SIZE;
    let mut t = 0;
    while t < rows.len() {
        let mut done = 0;
        while done < num_bytes {
            // SAFETY: byte and column indices are in range.
            unsafe {
                let mut words = [S::splat(0.0); LANES];
                for r in 0..LANES {
                    let row = positions.row(t + r).add(done);
                    words[r] = if done + LANES * 4 <= num_bytes {
                        S::load(row.cast())
                    } else {
                        let mut bytes = [0u8; LANES * 4];
                        std::ptr::copy_nonoverlapping(row, bytes.as_mut_ptr(), num_bytes - done);
                        S::load(bytes.as_ptr().cast())
                    };
                }
                let columns = S::transpose(words);
                let to = to.add(done / 4 * W::PER_WORD * stride + t);
                for c in 0..LANES {
                    for i in 0..W::PER_WORD {
                        S::store(to.add((c * W::PER_WORD + i) * stride), W::unpack::<S>(columns[c], i));
                    }
                }
            }
            done += LANES * 4;
        }
        t += LANES;
    }
}

#[inline(always)]
unsafe fn rows_of<S: Words, W: Factor>(positions: &Positions<'_>, to: *mut f32, stride: usize) {
    let n = positions.n;
    for line in 0..positions.rows.len().div_ceil(W::NUM) {
        let rows = [positions.row(line * W::NUM), positions.row((line + 1) * W::NUM - 1)];
        // SAFETY: indices are below `n` and `stride`.
        unsafe {
            let to = to.add(line * stride);
            let mut i = 0;
            while i + LANES <= n {
                S::store(to.add(i), W::line::<S>(rows, i * W::Number::SIZE));
                i += LANES;
            }
            if i < stride {
                let mut rest = [[0u8; LANES * 4]; 2];
                for (rest, row) in rest.iter_mut().zip(rows) {
                    let from = row.add(i * W::Number::SIZE);
                    std::ptr::copy_nonoverlapping(from, rest.as_mut_ptr(), (n - i) * W::Number::SIZE);
                }
                S::store(to.add(i), W::line::<S>([rest[0].as_ptr(), rest[1].as_ptr()], 0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_cpu_simd::Isa;

    /// Compares both conversions with single numbers, for every bit pattern of the type.
    fn check<W: Stored>(isa: Isa, dtype: KvDtype, num_rows: usize, n: usize) {
        let row_bytes = n * W::SIZE;
        let mut bytes: Vec<u8> = (0..num_rows * row_bytes).map(|i| (i * 37 + i / 256) as u8).collect();
        if dtype == KvDtype::Fp8 {
            bytes.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code = 0x7e);
        }
        let rows: Vec<*const u8> = bytes.chunks(row_bytes).map(<[u8]>::as_ptr).collect();
        let positions = Positions { rows: &rows, dtype, n };
        let (stride, dim) = (num_rows.next_multiple_of(LANES), n.next_multiple_of(LANES));
        let mut by_columns = vec![0.0; padded(n) * stride];
        let mut by_rows = vec![f32::NAN; num_rows * dim];
        // SAFETY: the buffers have the required sizes.
        unsafe {
            widen_columns(isa, &positions, by_columns.as_mut_ptr(), stride);
            widen_rows(isa, &positions, by_rows.as_mut_ptr(), dim);
        }
        for (t, row) in rows.iter().enumerate() {
            for d in 0..n {
                // SAFETY: the row holds `n` numbers.
                let expected = unsafe { W::load_one(row.add(d * W::SIZE)) };
                for got in [by_columns[d * stride + t], by_rows[t * dim + d]] {
                    let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                    assert!(same, "{isa:?} {dtype:?}: {got} not {expected} at {t},{d} of {n}");
                }
            }
            assert!(by_rows[t * dim + n..(t + 1) * dim].iter().all(|&x| x == 0.0), "{n} padded to {dim}");
        }
    }

    #[test]
    fn tiles_contain_the_stored_numbers() {
        for isa in Isa::available() {
            for n in [1, 5, 16, 24, 64, 80, 130] {
                for num_rows in [1, 16, 40] {
                    check::<F32>(isa, KvDtype::F32, num_rows, n);
                    check::<F16>(isa, KvDtype::F16, num_rows, n);
                    check::<Bf16>(isa, KvDtype::Bf16, num_rows, n);
                    check::<E4m3>(isa, KvDtype::Fp8, num_rows, n);
                    check::<I8>(isa, KvDtype::Int8, num_rows, n);
                }
            }
        }
    }
}
