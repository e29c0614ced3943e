//! What is found in a whole row of logits, several of them at a time: the largest ones, how many are larger than one, and sums
//! of exponentials. It does not know what is sampled from the row.

use baton_model_spec::InvalidLogits;

/// Scaled logits this far below the largest are ignored: together they have less than `vocab_size * e^-40` of the
/// largest one's probability.
pub(crate) const NEGLIGIBLE: f32 = -40.0;

/// Logits that are compared, or whose exponentials are added, at a time.
const NUM_LANES: usize = 16;

/// Exponentials of a lane that are added in f32. All else is added in f64.
const NUM_ADDED: usize = 32;

/// Logits of which one look says whether the list of the likeliest changes.
const NUM_LISTED: usize = 64;

/// The largest logit.
///
/// # Errors
/// When the row is invalid.
pub(crate) fn check(logits: &[f32]) -> Result<f32, InvalidLogits> {
    // In lanes: the compiler may not change the order of float comparisons itself.
    let mut maxima = [f32::NEG_INFINITY; NUM_LANES];
    let mut has_nan = [false; NUM_LANES];
    let (chunks, rest) = logits.as_chunks::<NUM_LANES>();
    let mut look_at = |lane: usize, logit: f32| {
        has_nan[lane] |= logit.is_nan();
        maxima[lane] = if logit > maxima[lane] { logit } else { maxima[lane] };
    };
    for chunk in chunks {
        chunk.iter().enumerate().for_each(|(lane, &logit)| look_at(lane, logit));
    }
    rest.iter().enumerate().for_each(|(lane, &logit)| look_at(lane, logit));
    let has_nan = has_nan.contains(&true);
    let max = maxima.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if has_nan || !max.is_finite() {
        return Err(InvalidLogits);
    }
    Ok(max)
}

/// Id and value of the largest logit; the smallest id of equals.
///
/// # Errors
/// As [`check`].
pub(crate) fn largest(logits: &[f32]) -> Result<(u32, f32), InvalidLogits> {
    let max = check(logits)?;
    let id = logits.iter().position(|&logit| logit == max).expect("the maximum is one of them");
    Ok((id as u32, max))
}

/// The number of logits above `bar`.
pub(crate) fn num_above(logits: &[f32], bar: f32) -> u32 {
    logits.iter().map(|&logit| u32::from(logit > bar)).sum()
}

/// Ids and values of the `num_top` largest logits of a valid row, in descending order; the smallest id of equals comes first.
pub(crate) fn likeliest(logits: &[f32], num_top: usize) -> Vec<(u32, f32)> {
    // At most 20: insertion into a sorted list is faster than selection over the vocabulary.
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(num_top + 1);
    if num_top == 0 {
        return top;
    }
    for (chunk, first_id) in logits.chunks(NUM_LISTED).zip((0..).step_by(NUM_LISTED)) {
        // Most chunks change nothing.
        if let Some(&(_, least)) = top.get(num_top - 1)
            && num_above(chunk, least) == 0
        {
            continue;
        }
        for (id, &logit) in (first_id..).zip(chunk) {
            if top.get(num_top - 1).is_some_and(|&(_, least)| logit <= least) {
                continue;
            }
            let place = top.partition_point(|&(_, other)| other >= logit);
            top.insert(place, (id, logit));
            top.truncate(num_top);
        }
    }
    top
}

/// The sum of what `weigh` makes of the logits: [`weight`]s of scaled ones. To 0.00001 of it, if the largest logit has the weight
/// 1. It is a function of the row alone. Invariant 8: the order is fixed.
pub(crate) fn sum_of(logits: &[f32], weigh: impl Fn(f32) -> f32) -> f64 {
    // In lanes. 32 numbers that are added in f32 are off by 0.000002 at most; the scaled logits are rounded, too.
    let part = |logits: &[f32]| -> f64 {
        let (chunks, rest) = logits.as_chunks::<NUM_LANES>();
        let mut sums = [0.0_f32; NUM_LANES];
        for chunk in chunks {
            sums.iter_mut().zip(chunk).for_each(|(sum, &logit)| *sum += weigh(logit));
        }
        let rest = rest.iter().map(|&logit| f64::from(weigh(logit)));
        sums.into_iter().map(f64::from).chain(rest).sum()
    };
    logits.chunks(NUM_ADDED * NUM_LANES).map(part).sum()
}

/// The exponential of a scaled logit; 0 below `lowest`, which is not below [`NEGLIGIBLE`].
#[inline]
pub(crate) fn weight(scaled: f32, lowest: f32) -> f32 {
    if scaled >= lowest { exp(scaled) } else { 0.0 }
}

/// The exponential of a scaled logit, from [`NEGLIGIBLE`] to 0, to 2 ulp; that of 0 is 1. Without branches and calls, so that it is
/// computed for several at a time, and the same on every processor.
///
/// 2^n times the Taylor series of e^x with |x| <= ln(2) / 2 (Cody and Waite, Software Manual for the Elementary Functions, 1980).
#[inline]
pub(crate) fn exp(scaled: f32) -> f32 {
    /// Added to a small number, its bits from the lowest on are the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let y = scaled * std::f32::consts::LOG2_E;
    let rounded = y + ROUND;
    // In two parts: the product above is not exact.
    let n = rounded - ROUND;
    let x = (scaled - n * 0.693_359_4) + n * 2.121_944_4e-4;
    let mut p = 1.0 / 5040.0;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * x + factor;
    }
    p * f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0_f32.to_bits()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_right_to_two_ulp() {
        assert_eq!(exp(0.0), 1.0);
        for step in 0..=400_000 {
            let scaled = step as f32 * (NEGLIGIBLE / 400_000.0);
            let (found, expected) = (exp(scaled), f64::from(scaled).exp());
            let ulp = f64::from(f32::from_bits(found.to_bits() + 1) - found);
            assert!((f64::from(found) - expected).abs() <= 2.0 * ulp, "{scaled}: {found}, not {expected}");
        }
    }

    #[test]
    fn the_likeliest_are_in_order_and_the_first_of_equals_comes_first() {
        assert_eq!(likeliest(&[1.0, 3.0, 2.0, 3.0], 3), [(1, 3.0), (3, 3.0), (2, 2.0)]);
        assert_eq!(likeliest(&[1.0, f32::NEG_INFINITY], 5), [(0, 1.0), (1, f32::NEG_INFINITY)]);
        // Each value many times, in an order without a pattern of chunks.
        for num_logits in [1, 63, 64, 65, 1000] {
            let logits: Vec<f32> = (0..num_logits).map(|id| (id * 7919 % 101) as f32 - 50.0).collect();
            let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
            for num_top in [0, 1, 5, 20] {
                let expected = &sorted[..num_top.min(sorted.len())];
                assert_eq!(likeliest(&logits, num_top), expected, "{num_top} of {num_logits}");
            }
        }
    }
}
