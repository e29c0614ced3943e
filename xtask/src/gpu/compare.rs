//! What changed between two reports.

use std::collections::BTreeMap;

use serde_json::Value;

/// Smaller changes of a time are noise.
const LEAST_CHANGE: f64 = 0.01;

/// One line for each outcome and each figure that changed, was added, or is gone. Only stages that both reports have are compared.
pub(super) fn changes(old: &Value, new: &Value) -> Vec<String> {
    let names = |report: &Value| -> Vec<String> {
        stages(report).filter_map(|stage| stage["stage"].as_str().map(str::to_owned)).collect()
    };
    let (old_names, new_names) = (names(old), names(new));
    let is_in_both = |stage: &Value| {
        let name = stage["stage"].as_str().unwrap_or_default().to_owned();
        old_names.contains(&name) && new_names.contains(&name)
    };
    let of = |report: &Value| Found::of(stages(report).filter(|stage| is_in_both(stage)));
    let (old, new) = (of(old), of(new));
    let mut lines = Vec::new();
    for (name, outcome) in &new.outcomes {
        match old.outcomes.get(name) {
            None => lines.push(format!("{name}: new, {outcome}")),
            Some(before) if before != outcome => lines.push(format!("{name}: {before} -> {outcome}")),
            Some(_) => {}
        }
    }
    lines.extend(gone(&old.outcomes, &new.outcomes));
    for (name, ms) in &new.figures {
        match old.figures.get(name) {
            None => lines.push(format!("{name}: new, {ms:.3} ms")),
            Some(before) => {
                let change = ms / before - 1.0;
                if change.abs() >= LEAST_CHANGE || change.is_nan() {
                    lines.push(format!("{name}: {before:.3} -> {ms:.3} ms ({:+.1} %)", 100.0 * change));
                }
            }
        }
    }
    lines.extend(gone(&old.figures, &new.figures));
    lines
}

fn gone<'a, T>(
    old: &'a BTreeMap<String, T>,
    new: &'a BTreeMap<String, T>,
) -> impl Iterator<Item = String> + use<'a, T> {
    old.keys().filter(|name| !new.contains_key(*name)).map(|name| format!("{name}: gone"))
}

fn stages(report: &Value) -> impl Iterator<Item = &Value> {
    report["stages"].as_array().into_iter().flatten()
}

/// Outcomes by stage and check, and the milliseconds of figures.
#[derive(Default)]
struct Found {
    outcomes: BTreeMap<String, String>,
    figures: BTreeMap<String, f64>,
}

impl Found {
    fn of<'a>(stages: impl Iterator<Item = &'a Value>) -> Found {
        let mut found = Found::default();
        for stage in stages {
            for check in stage["checks"].as_array().into_iter().flatten() {
                let text = |name: &str| check[name].as_str().unwrap_or("?");
                let name = format!("{}, {}", stage["stage"].as_str().unwrap_or("?"), text("check"));
                let count = |name: &str| check[name].as_u64().unwrap_or(0);
                let counts = format!(
                    "{} passed, {} failed, {} skipped",
                    count("passed"),
                    count("failed"),
                    count("skipped")
                );
                let why = if text("outcome") == "passed" { "" } else { text("what") };
                let why = if why.is_empty() { String::new() } else { format!(": {why}") };
                found.outcomes.insert(name, format!("{} ({counts}){why}", text("outcome")));
                for figure in check["figures"].as_array().into_iter().flatten() {
                    if let (Some(name), Some(ms)) = (figure["figure"].as_str(), figure["ms"].as_f64()) {
                        found.figures.insert(name.to_owned(), ms);
                    }
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(stage: &str, outcome: &str, figures: &[(&str, f64)]) -> Value {
        let figures: Vec<Value> =
            figures.iter().map(|(name, ms)| json!({"figure": name, "ms": ms})).collect();
        let counts = if outcome == "passed" { [3, 0] } else { [2, 1] };
        json!({"stages": [{"stage": stage, "checks": [{
            "check": "rope", "outcome": outcome, "what": "3 tests", "passed": counts[0], "failed": counts[1], "skipped": 0,
            "figures": figures,
        }]}]})
    }

    #[test]
    fn changed_outcomes_and_figures_are_told() {
        let old = report("kernels", "passed", &[("step", 10.0), ("copy", 2.0), ("old", 1.0)]);
        let new = report("kernels", "failed", &[("step", 9.0), ("copy", 2.01), ("new", 5.0)]);
        let expected = [
            "kernels, rope: passed (3 passed, 0 failed, 0 skipped) -> failed (2 passed, 1 failed, 0 skipped): 3 tests",
            "new: new, 5.000 ms",
            "step: 10.000 -> 9.000 ms (-10.0 %)",
            "old: gone",
        ];
        assert_eq!(changes(&old, &new), expected);
        assert!(changes(&new, &new).is_empty());
    }

    #[test]
    fn stages_of_one_report_alone_are_not_compared() {
        let (old, new) = (report("kernels", "passed", &[("step", 1.0)]), report("models", "failed", &[]));
        assert!(changes(&old, &new).is_empty());
    }
}
