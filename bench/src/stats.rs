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
    /// `None` with fewer than [`MIN_CLUSTERS`] in either sample.
    #[serde(flatten)]
    pub(crate) interval: Option<Interval>,
}

/// The 95 % confidence interval of a difference, by bootstrap: the clusters of both samples are resampled with
/// replacement, each with all its values, and the middle 95 % of the differences of their medians are kept. Values
/// resampled one by one would be taken for independent: gaps of one request are not, nor requests of one turn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Interval {
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// With fewer clusters an interval says little.
pub(crate) const MIN_CLUSTERS: usize = 8;

const RESAMPLES: usize = 1000;

/// Values of one sample that are resampled. 1,000 times as many take a tenth of a second.
const MAX_VALUES: usize = 50_000;

impl Difference {
    /// Of samples in clusters that are independent of each other and not empty. `None` if either sample is empty.
    pub(crate) fn of(a: &[Vec<f64>], b: &[Vec<f64>], random: &mut Random) -> Option<Self> {
        let median = |clusters: &[Vec<f64>]| Summary::of(clusters.concat()).map(|summary| summary.p50);
        let (median_a, median_b) = (median(a)?, median(b)?);
        let difference = median_a - median_b;
        let num_clusters = a.len().min(b.len());
        Some(Self {
            median_a,
            median_b,
            ratio: Some(median_a / median_b).filter(|ratio| ratio.is_finite()),
            difference,
            interval: (num_clusters >= MIN_CLUSTERS).then(|| {
                let (a, b) = (Clustered::of(a), Clustered::of(b));
                let mut differences: Vec<f64> =
                    (0..RESAMPLES).map(|_| a.resample(random) - b.resample(random)).collect();
                differences.sort_by(f64::total_cmp);
                let factor = widening(num_clusters);
                let below = (difference - percentile(&differences, 0.025)).max(0.0);
                let above = (percentile(&differences, 0.975) - difference).max(0.0);
                Interval { low: difference - factor * below, high: difference + factor * above }
            }),
        })
    }
}

/// By how much a bootstrap of `n` clusters makes an interval too narrow: sqrt(n / (n - 1)), times the ratio of the 97.5th
/// percentiles of Student's t and of a normal distribution, of which these are the first terms of an expansion in
/// 1 / (n - 1) (Cornish and Fisher). Hesterberg, What Teachers Should Know About the Bootstrap, 2015.
fn widening(num_clusters: usize) -> f64 {
    let freedom = (num_clusters - 1) as f64;
    (1.0 + 1.0 / freedom).sqrt() * (1.0 + 1.21 / freedom + 1.44 / freedom.powi(2))
}

/// A sample in clusters, ready to be resampled: its values are sorted once, not for each median.
struct Clustered {
    /// In ascending order.
    values: Vec<Weighted>,
    /// The values of each cluster, counted.
    sizes: Vec<u64>,
}

struct Weighted {
    value: f64,
    /// Values of the cluster that it stands for.
    num_values: u64,
    cluster_idx: usize,
}

impl Clustered {
    fn of(clusters: &[Vec<f64>]) -> Self {
        let sizes: Vec<u64> = clusters.iter().map(|cluster| cluster.len() as u64).collect();
        // Of a large sample a value stands for its neighbours of the same cluster.
        let num_for_each = (sizes.iter().sum::<u64>() as usize).div_ceil(MAX_VALUES).max(1);
        let mut values = Vec::new();
        for (cluster_idx, cluster) in clusters.iter().enumerate() {
            let mut sorted = cluster.clone();
            sorted.sort_by(f64::total_cmp);
            values.extend(sorted.chunks(num_for_each).map(|chunk| Weighted {
                value: chunk[chunk.len() / 2],
                num_values: chunk.len() as u64,
                cluster_idx,
            }));
        }
        values.sort_by(|a, b| a.value.total_cmp(&b.value));
        Self { values, sizes }
    }

    /// The median of as many clusters, sampled with replacement.
    fn resample(&self, random: &mut Random) -> f64 {
        let mut counts = vec![0; self.sizes.len()];
        for _ in 0..counts.len() {
            counts[random.below(self.sizes.len() as u64) as usize] += 1;
        }
        self.median(&counts)
    }

    /// The median where each cluster is contained so many times.
    fn median(&self, counts: &[u64]) -> f64 {
        let total: u64 = self.sizes.iter().zip(counts).map(|(size, count)| size * count).sum();
        let mut lower = None;
        let mut num_passed = 0;
        for value in &self.values {
            num_passed += value.num_values * counts[value.cluster_idx];
            if num_passed > (total - 1) / 2 {
                let lower = *lower.get_or_insert(value.value);
                if num_passed > total / 2 {
                    return (lower + value.value) / 2.0;
                }
            }
        }
        unreachable!("all values are more than half of them");
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

    /// Each value a cluster of its own.
    fn alone(sample: &[f64]) -> Vec<Vec<f64>> {
        sample.iter().map(|&value| vec![value]).collect()
    }

    #[test]
    fn difference_of_medians_has_an_interval() {
        let mut random = Random::new(5);
        let noise: Vec<f64> = (0..400).map(|_| random.normal()).collect();
        let a: Vec<f64> = noise[..200].iter().map(|x| 10.5 + 0.1 * x).collect();
        let b: Vec<f64> = noise[200..].iter().map(|x| 10.0 + 0.1 * x).collect();
        let difference = Difference::of(&alone(&a), &alone(&b), &mut random).unwrap();
        let Interval { low, high } = difference.interval.unwrap();
        assert!((difference.difference - 0.5).abs() < 0.05, "{difference:?}");
        assert!(low < difference.difference && difference.difference < high);
        assert!(low > 0.4 && high < 0.6, "{difference:?}");
        assert!((difference.ratio.unwrap() - 1.05).abs() < 0.01, "{difference:?}");
        assert_eq!(Difference::of(&alone(&a), &[], &mut random), None);
        assert_eq!(Difference::of(&[vec![1.0]], &[vec![0.0]], &mut random).unwrap().ratio, None);
        let json = serde_json::to_value(difference).unwrap();
        assert_eq!((json["low"].as_f64(), json["high"].as_f64()), (Some(low), Some(high)));
    }

    /// Twelve turns of four requests with six gaps each; turns and requests differ.
    fn correlated(random: &mut Random) -> Vec<Vec<f64>> {
        let mut turn = || {
            let turn = 10.0 + random.normal();
            let mut gaps = Vec::new();
            for _ in 0..4 {
                let request = turn + 0.3 * random.normal();
                gaps.extend((0..6).map(|_| request + random.normal()));
            }
            gaps
        };
        (0..12).map(|_| turn()).collect()
    }

    #[test]
    fn two_samples_of_one_distribution_do_not_differ_in_95_percent() {
        const NUM_RUNS: usize = 200;
        let mut random = Random::new(1);
        let (mut num_right, mut num_right_alone) = (0, 0);
        for _ in 0..NUM_RUNS {
            let (a, b) = (correlated(&mut random), correlated(&mut random));
            let mut covers = |a: &[Vec<f64>], b: &[Vec<f64>]| {
                let interval = Difference::of(a, b, &mut random).unwrap().interval.unwrap();
                usize::from(interval.low <= 0.0 && 0.0 <= interval.high)
            };
            num_right += covers(&a, &b);
            num_right_alone += covers(&alone(&a.concat()), &alone(&b.concat()));
        }
        assert!((184..=198).contains(&num_right), "{num_right} of {NUM_RUNS}");
        assert!(num_right_alone < 150, "resampled one by one: {num_right_alone} of {NUM_RUNS}");
    }

    #[test]
    fn few_clusters_have_no_interval() {
        let clusters = vec![vec![1.0, 2.0, 3.0]; MIN_CLUSTERS];
        let interval =
            |a: &[Vec<f64>], b: &[Vec<f64>]| Difference::of(a, b, &mut Random::new(1)).unwrap().interval;
        assert_eq!(interval(&clusters, &clusters[1..]), None);
        assert_eq!(interval(&clusters, &clusters), Some(Interval { low: 0.0, high: 0.0 }));
    }

    #[test]
    fn a_resampled_median_is_that_of_its_values() {
        let clusters = [vec![5.0, 1.0, 4.0], vec![2.0], vec![3.0, 9.0]];
        let clustered = Clustered::of(&clusters);
        for counts in [[1, 1, 1], [2, 0, 0], [0, 1, 1], [0, 0, 3], [1, 2, 0], [0, 3, 1]] {
            let repeated = clusters.iter().zip(counts).flat_map(|(cluster, count)| cluster.repeat(count));
            let expected = Summary::of(repeated.collect()).unwrap().p50;
            assert_eq!(clustered.median(&counts.map(|count| count as u64)), expected, "{counts:?}");
        }
    }

    #[test]
    fn a_large_sample_is_thinned_and_keeps_its_median() {
        let mut random = Random::new(2);
        let clusters: Vec<Vec<f64>> =
            (0..20).map(|_| (0..30_000).map(|_| random.normal()).collect()).collect();
        let clustered = Clustered::of(&clusters);
        assert!(clustered.values.len() <= MAX_VALUES + clusters.len(), "{}", clustered.values.len());
        let exact = Summary::of(clusters.concat()).unwrap().p50;
        assert!((clustered.median(&[1; 20]) - exact).abs() < 1e-3);
    }
}
