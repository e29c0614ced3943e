//! Summaries of samples, and the difference of two.

use baton_random::Random;
use serde::Serialize;

/// The shape of a sample. Percentiles interpolate linearly between the two nearest ranks, as numpy's do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Values in the sample.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 95th percentile.
    pub p95: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The largest value.
    pub max: f64,
}

impl Summary {
    /// `None` for an empty sample.
    pub fn of(mut sample: Vec<f64>) -> Option<Self> {
        sample.sort_by(f64::total_cmp);
        Some(Self {
            count: sample.len(),
            max: *sample.last()?,
            mean: sample.iter().sum::<f64>() / sample.len() as f64,
            p50: percentile(&sample, 0.5),
            p90: percentile(&sample, 0.9),
            p95: percentile(&sample, 0.95),
            p99: percentile(&sample, 0.99),
        })
    }
}

/// A percentile of a sorted sample that is not empty.
fn percentile(sorted: &[f64], fraction: f64) -> f64 {
    let rank = fraction * (sorted.len() - 1) as f64;
    let (below, above) = (rank.floor() as usize, rank.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * rank.fract()
}

/// How two samples differ.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Difference {
    pub(crate) median_a: f64,
    pub(crate) median_b: f64,
    /// `median_a / median_b`; `None` when that is no number.
    pub(crate) ratio: Option<f64>,
    /// `median_a - median_b`.
    pub(crate) difference: f64,
    /// The 95 % confidence interval of the difference, by bootstrap: both samples are resampled with
    /// replacement, and the middle 95 % of the differences of their medians are kept.
    pub(crate) low: f64,
    pub(crate) high: f64,
}

const RESAMPLES: usize = 1000;

impl Difference {
    /// `None` if either is empty.
    pub(crate) fn of(a: &[f64], b: &[f64], random: &mut Random) -> Option<Self> {
        if a.is_empty() || b.is_empty() {
            return None;
        }
        let median = |mut sample: Vec<f64>| {
            sample.sort_by(f64::total_cmp);
            percentile(&sample, 0.5)
        };
        let (median_a, median_b) = (median(a.to_vec()), median(b.to_vec()));
        let mut resample = |sample: &[f64]| {
            let draw = |_| sample[random.below(sample.len() as u64) as usize];
            (0..sample.len()).map(draw).collect::<Vec<_>>()
        };
        let mut differences: Vec<f64> =
            (0..RESAMPLES).map(|_| median(resample(a)) - median(resample(b))).collect();
        differences.sort_by(f64::total_cmp);
        Some(Self {
            median_a,
            median_b,
            ratio: Some(median_a / median_b).filter(|ratio| ratio.is_finite()),
            difference: median_a - median_b,
            low: percentile(&differences, 0.025),
            high: percentile(&differences, 0.975),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate() {
        // numpy.percentile(range(1, 101), [50, 90, 95, 99])
        let summary = Summary::of((1..=100).rev().map(f64::from).collect()).unwrap();
        let expected =
            Summary { count: 100, mean: 50.5, p50: 50.5, p90: 90.1, p95: 95.05, p99: 99.01, max: 100.0 };
        for (got, wanted) in [
            (summary.mean, expected.mean),
            (summary.p50, expected.p50),
            (summary.p90, expected.p90),
            (summary.p95, expected.p95),
            (summary.p99, expected.p99),
            (summary.max, expected.max),
        ] {
            assert!((got - wanted).abs() < 1e-9, "{summary:?}");
        }
        let one = Summary::of(vec![3.0]).unwrap();
        assert_eq!((one.p50, one.p99, one.max, one.count), (3.0, 3.0, 3.0, 1));
        assert_eq!(Summary::of(Vec::new()), None);
    }

    #[test]
    fn difference_of_medians_has_an_interval() {
        let mut random = Random::new(5);
        let noise: Vec<f64> = (0..400).map(|_| random.normal()).collect();
        let a: Vec<f64> = noise[..200].iter().map(|x| 10.5 + 0.1 * x).collect();
        let b: Vec<f64> = noise[200..].iter().map(|x| 10.0 + 0.1 * x).collect();
        let difference = Difference::of(&a, &b, &mut random).unwrap();
        assert!((difference.difference - 0.5).abs() < 0.05, "{difference:?}");
        assert!(difference.low < difference.difference && difference.difference < difference.high);
        assert!(difference.low > 0.4 && difference.high < 0.6, "{difference:?}");
        assert!((difference.ratio.unwrap() - 1.05).abs() < 0.01, "{difference:?}");
        assert_eq!(Difference::of(&a, &[], &mut random), None);
        assert_eq!(Difference::of(&[1.0], &[0.0], &mut random).unwrap().ratio, None);
    }
}
