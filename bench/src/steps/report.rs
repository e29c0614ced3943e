//! The line and how well it predicts, as JSON and as a table.

use std::fmt;

use baton_cost::StepLine;
use serde::Serialize;

/// What was learned, and compared with new measurements. `--step-profile` reads `step` of its JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) model: String,
    pub(super) device: String,
    /// Steps that the worker has measured.
    pub(super) num_steps: u64,
    /// In seconds.
    pub(super) step: StepLine,
    pub(super) rows: Vec<Row>,
}

/// One kind of work.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    work: String,
    predicted_ms: f64,
    /// The median.
    measured_ms: f64,
    /// Measured by predicted.
    ratio: f64,
}

impl Row {
    /// From seconds.
    pub(super) fn of(work: String, predicted: f64, measured: f64) -> Row {
        Row { work, predicted_ms: predicted * 1e3, measured_ms: measured * 1e3, ratio: measured / predicted }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StepLine { fixed, per_token, per_context_token, per_pair } = self.step;
        writeln!(f, "{} on {}, learned from {} steps\n", self.model, self.device, self.num_steps)?;
        writeln!(f, "  fixed              {:>10.3} ms a step", fixed * 1e3)?;
        writeln!(f, "  per token          {:>10.3} us", per_token * 1e6)?;
        writeln!(f, "  per context token  {:>10.3} ns", per_context_token * 1e9)?;
        writeln!(f, "  per pair           {:>10.3} ns\n", per_pair * 1e9)?;
        writeln!(f, "{:<26}{:>12}{:>12}{:>8}", "", "predicted", "measured", "ratio")?;
        for row in &self.rows {
            writeln!(
                f,
                "{:<26}{:>9.2} ms{:>9.2} ms{:>8.2}",
                row.work, row.predicted_ms, row.measured_ms, row.ratio
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_compares_predicted_with_measured() {
        let step = StepLine { fixed: 0.002, per_token: 40e-6, per_context_token: 60e-9, per_pair: 1.3e-9 };
        let rows = vec![Row::of("prompt of 64 tokens".into(), 0.004, 0.005)];
        let report = Report { model: "tiny".into(), device: "cpu".into(), num_steps: 70, step, rows };
        let table = report.to_string();
        for text in ["tiny on cpu, learned from 70 steps", "2.000 ms a step", "40.000 us", "4.00 ms", "1.25"]
        {
            assert!(table.contains(text), "no {text}:\n{table}");
        }
        let json = serde_json::to_value(&report).expect("plain data");
        assert_eq!(json["step"]["per_token"], 40e-6);
    }
}
