//! Steps of a worker as `baton bench steps` measured them.

use serde::{Deserialize, Serialize};

use crate::StepLine;

/// What was learned of a worker's steps, and compared with new measurements: the JSON of `baton bench steps`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepProfile {
    /// The model's name.
    #[serde(default)]
    pub model: String,
    /// What it was computed on.
    #[serde(default)]
    pub device: String,
    /// Devices that computed it together. `None` in files of older versions.
    #[serde(default)]
    pub tensor_parallel: Option<usize>,
    /// Steps that the worker had measured.
    #[serde(default)]
    pub num_steps: u64,
    /// In seconds. From a file it may be impossible: see [`StepLine::checked`].
    pub step: StepLine,
    /// The comparison.
    #[serde(default)]
    pub rows: Vec<ProfiledWork>,
}

/// One kind of work, predicted by the line and measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfiledWork {
    /// In words.
    pub work: String,
    /// By the line.
    pub predicted_ms: f64,
    /// The median.
    pub measured_ms: f64,
    /// Measured by predicted.
    pub ratio: f64,
}

impl ProfiledWork {
    /// From seconds.
    pub fn new(work: String, predicted: f64, measured: f64) -> ProfiledWork {
        ProfiledWork {
            work,
            predicted_ms: predicted * 1e3,
            measured_ms: measured * 1e3,
            ratio: measured / predicted,
        }
    }
}

impl StepProfile {
    /// The steps of the same model on another number of these devices: `prior` with each coefficient as far from what was
    /// measured as `measured_prior` is, the prior where it was measured. Equal priors give what was measured.
    pub fn applied_to(&self, prior: &StepLine, measured_prior: &StepLine) -> StepLine {
        let part = |coefficient: fn(&StepLine) -> f64| {
            let (measured, there) = (coefficient(&self.step), coefficient(measured_prior));
            if there > 0.0 { coefficient(prior) * (measured / there) } else { measured }
        };
        StepLine {
            fixed: part(|line| line.fixed),
            per_token: part(|line| line.per_token),
            per_context_token: part(|line| line.per_context_token),
            per_pair: part(|line| line.per_pair),
        }
    }

    /// The mean and the largest error of the line's predictions, as parts of what was measured. `None` if nothing was compared.
    pub fn errors(&self) -> Option<(f64, f64)> {
        let errors = self.rows.iter().map(|row| (row.predicted_ms / row.measured_ms - 1.0).abs());
        let (sum, largest) =
            errors.fold((0.0, 0.0_f64), |(sum, largest), error| (sum + error, largest.max(error)));
        (!self.rows.is_empty()).then(|| (sum / self.rows.len() as f64, largest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: StepLine =
        StepLine { fixed: 0.03, per_token: 8e-5, per_context_token: 3e-8, per_pair: 1e-9 };

    fn profile(rows: Vec<ProfiledWork>) -> StepProfile {
        let (model, device) = ("tiny".to_owned(), "cpu".to_owned());
        StepProfile { model, device, tensor_parallel: Some(2), num_steps: 70, step: MEASURED, rows }
    }

    #[test]
    fn a_prior_of_other_devices_is_corrected_as_far_as_the_measured_one_was_wrong() {
        let there = StepLine { fixed: 0.02, per_token: 4e-5, per_context_token: 0.0, per_pair: 1e-9 };
        let prior = StepLine { fixed: 0.01, per_token: 2e-5, per_context_token: 1e-8, per_pair: 5e-10 };
        let step = profile(Vec::new()).applied_to(&prior, &there);
        let expected = StepLine { fixed: 0.015, per_token: 4e-5, per_context_token: 3e-8, per_pair: 5e-10 };
        assert_eq!(step, expected);
        assert_eq!(profile(Vec::new()).applied_to(&there, &there), MEASURED);
    }

    #[test]
    fn errors_are_parts_of_what_was_measured() {
        assert_eq!(profile(Vec::new()).errors(), None);
        let rows = [(0.004, 0.005), (0.002, 0.002)];
        let rows = rows.map(|(predicted, measured)| ProfiledWork::new("a step".into(), predicted, measured));
        let (mean, largest) = profile(rows.into()).errors().expect("two rows");
        assert!((mean - 0.1).abs() < 1e-9 && (largest - 0.2).abs() < 1e-9, "{mean} {largest}");
    }
}
