//! Linear equations, for fits.

/// Solves a small system of linear equations by Gaussian elimination with pivots.
pub(crate) fn solve<const N: usize>(mut rows: [[f64; N]; N], mut right: [f64; N]) -> [f64; N] {
    for idx in 0..N {
        let pivot = (idx..N).max_by(|&a, &b| rows[a][idx].abs().total_cmp(&rows[b][idx].abs()));
        let pivot = pivot.expect("there is a row left");
        rows.swap(idx, pivot);
        right.swap(idx, pivot);
        for other in (0..N).filter(|&other| other != idx) {
            let factor = rows[other][idx] / rows[idx][idx];
            let row = rows[idx];
            rows[other].iter_mut().zip(row).for_each(|(value, above)| *value -= factor * above);
            right[other] -= factor * right[idx];
        }
    }
    std::array::from_fn(|idx| right[idx] / rows[idx][idx])
}
