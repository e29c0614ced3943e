//! The profile of a worker's steps as a table.

use std::fmt;

use baton_cost::{StepLine, StepProfile};
use serde::Serialize;

/// What was learned, and how well it predicts.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Report(pub(super) StepProfile);

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StepProfile { model, device, num_steps, step, rows, .. } = &self.0;
        let StepLine { fixed, per_token, per_context_token, per_pair } = step;
        writeln!(f, "{model} on {device}, learned from {num_steps} steps\n")?;
        writeln!(f, "  fixed              {:>10.3} ms a step", fixed * 1e3)?;
        writeln!(f, "  per token          {:>10.3} us", per_token * 1e6)?;
        writeln!(f, "  per context token  {:>10.3} ns", per_context_token * 1e9)?;
        writeln!(f, "  per pair           {:>10.3} ns\n", per_pair * 1e9)?;
        writeln!(f, "{:<26}{:>12}{:>12}{:>8}", "", "predicted", "measured", "ratio")?;
        for row in rows {
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
    use baton_cost::ProfiledWork;

    use super::*;

    #[test]
    fn a_table_compares_predicted_with_measured() {
        let step = StepLine { fixed: 0.002, per_token: 40e-6, per_context_token: 60e-9, per_pair: 1.3e-9 };
        let rows = vec![ProfiledWork::new("prompt of 64 tokens".into(), 0.004, 0.005)];
        let (model, device) = ("tiny".into(), "cpu".into());
        let report =
            Report(StepProfile { model, device, tensor_parallel: Some(1), num_steps: 70, step, rows });
        let table = report.to_string();
        for text in ["tiny on cpu, learned from 70 steps", "2.000 ms a step", "40.000 us", "4.00 ms", "1.25"]
        {
            assert!(table.contains(text), "no {text}:\n{table}");
        }
        let json = serde_json::to_value(&report).expect("plain data");
        assert_eq!(json["step"]["per_token"], 40e-6);
        let read: StepProfile = serde_json::from_value(json).expect("what --step-profile reads");
        assert_eq!(read, report.0);
    }
}
