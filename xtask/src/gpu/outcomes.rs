//! Reads what test programs and measurements printed.

use serde_json::{Value, json};

use super::group::Ended;
use crate::check::Outcome;

/// What a program of tests did, or a measurement.
pub(super) struct Tally {
    pub(super) outcome: Outcome,
    pub(super) num_passed: usize,
    pub(super) num_failed: usize,
    pub(super) num_skipped: usize,
    /// Objects as `gpu_check` prints them.
    pub(super) figures: Vec<Value>,
}

impl Tally {
    /// One step that is no test.
    pub(super) fn of(outcome: Outcome) -> Tally {
        let [num_passed, num_failed, num_skipped] = match outcome {
            Outcome::Passed(_) => [1, 0, 0],
            Outcome::Failed(_) => [0, 1, 0],
            Outcome::Skipped(_) => [0, 0, 1],
        };
        Tally { outcome, num_passed, num_failed, num_skipped, figures: vec![] }
    }
}

/// Counts the tests of a program that ran with `--show-output`. A test that says SKIPPED did not pass, even if it ended well.
pub(super) fn of_tests(ended: &Ended) -> Tally {
    let mut passed: Vec<&str> = named(&ended.output, " ... ok").collect();
    let failed: Vec<&str> = named(&ended.output, " ... FAILED").collect();
    let skipped = skipped(&ended.output);
    passed.retain(|name| skipped.iter().all(|(skipped, _)| skipped != name));
    let mut findings: Vec<String> = failed.iter().map(|name| (*name).to_owned()).collect();
    if ended.is_late {
        let seconds = ended.took.as_secs_f32();
        let mut finding = format!("not done in {seconds:.0} s, {} tests were", passed.len());
        let slow = named(&ended.output, " has been running for over 60 seconds");
        let slow: Vec<&str> = slow.filter(|name| !passed.contains(name) && !failed.contains(name)).collect();
        if !slow.is_empty() {
            finding += &format!("; slow: {}", slow.join(", "));
        }
        findings.push(finding);
    } else if ended.code != Some(0) && failed.is_empty() {
        findings.push(ended.why());
    } else if passed.is_empty() && skipped.is_empty() && failed.is_empty() {
        findings.push("it has no such test".to_owned());
    }
    let mut reasons: Vec<String> = skipped.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    reasons.dedup();
    let reasons = reasons.join("; ");
    let num_failed = findings.len();
    let outcome = match (num_failed, passed.len(), skipped.len()) {
        (1.., ..) => Outcome::Failed(findings),
        (_, 0, _) => Outcome::Skipped(reasons),
        (_, num_passed, 0) => Outcome::Passed(format!("{num_passed} tests")),
        (_, num_passed, num_skipped) => {
            Outcome::Passed(format!("{num_passed} tests, {num_skipped} SKIPPED: {reasons}"))
        }
    };
    Tally { outcome, num_passed: passed.len(), num_failed, num_skipped: skipped.len(), figures: vec![] }
}

/// Names of tests whose line ends so. What a test prints may come before the ending.
fn named<'a>(output: &'a str, end: &'a str) -> impl Iterator<Item = &'a str> {
    output.lines().filter_map(move |line| line.strip_prefix("test ")?.strip_suffix(end))
}

/// Tests that did not run, each once, with the reason: "SKIPPED: why" in the output of a test, "SKIPPED test: why" anywhere, and
/// tests that are ignored.
fn skipped(output: &str) -> Vec<(&str, &str)> {
    let mut skipped: Vec<(&str, &str)> = vec![];
    let mut test = "";
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            test = name;
        }
        let said = line.split_once("SKIPPED").map(|(_, rest)| rest);
        let found = match said.and_then(|rest| rest.split_once(": ")) {
            Some(("", why)) => Some((test, why)),
            Some((name, why)) if name.starts_with(' ') => Some((name.trim(), why)),
            _ => line.strip_prefix("test ").and_then(|rest| {
                let (name, why) = rest.split_once(" ... ignored")?;
                Some((name, why.trim_start_matches(", ")))
            }),
        };
        if let Some((name, why)) = found
            && skipped.iter().all(|(known, _)| *known != name)
        {
            skipped.push((name, why));
        }
    }
    skipped
}

/// The findings of `gpu_check`, also of one that did not end.
pub(super) fn of_figures(ended: &Ended) -> Tally {
    let found: Vec<Value> = ended.output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let left_out: Vec<String> = found
        .iter()
        .filter_map(|it| Some(format!("{}: {}", it["left_out"].as_str()?, it["why"].as_str()?)))
        .collect();
    let figures: Vec<Value> = found.into_iter().filter(|it| it["figure"].is_string()).collect();
    let missed = figures.iter().filter(|figure| figure["is_missed"] == true);
    let mut findings: Vec<String> = missed.map(|figure| format!("{}, MISSED", in_words(figure))).collect();
    if ended.is_late {
        findings.push(format!("not done in {:.0} s", ended.took.as_secs_f32()));
    } else if ended.code != Some(0) {
        findings.push(ended.why());
    } else if figures.is_empty() && left_out.is_empty() {
        findings.push("it measured nothing".to_owned());
    }
    let num_failed = findings.len();
    let outcome = match (num_failed, figures.len(), left_out.len()) {
        (1.., ..) => Outcome::Failed(findings),
        (_, 0, _) => Outcome::Skipped(left_out.join("; ")),
        (_, num, 0) => Outcome::Passed(format!("{num} figures")),
        (_, num, _) => Outcome::Passed(format!("{num} figures; left out {}", left_out.join("; "))),
    };
    let num_missed = figures.iter().filter(|figure| figure["is_missed"] == true).count();
    let num_passed = figures.len() - num_missed;
    Tally { outcome, num_passed, num_failed, num_skipped: left_out.len(), figures }
}

/// The rows of `baton bench overlap --json`, as figures. `None`: it is not such a report.
pub(super) fn exposed(report: &str, transport: &str) -> Option<Vec<Value>> {
    let report: Value = serde_json::from_str(report).ok()?;
    let rows = report["rows"].as_array()?;
    let figure = |row: &Value| {
        let (tokens, exposed) = (row["prompt_tokens"].as_u64()?, row["exposed_ms"].as_f64()?);
        let allowed = row["allowed_ms"].as_f64()?;
        Some(json!({
            "figure": format!("exposed handoff, {transport}, {tokens} tokens"), "ms": exposed, "at_most_ms": allowed,
            "is_missed": exposed > allowed,
        }))
    };
    rows.iter().map(figure).collect::<Option<Vec<Value>>>().filter(|figures| !figures.is_empty())
}

/// "decode step, 32 x 4096: 9.812 ms, 2,410 GB/s, 84.1 % of 85.0 %".
pub(super) fn in_words(figure: &Value) -> String {
    let number = |name: &str| figure[name].as_f64();
    let mut text = figure["figure"].as_str().unwrap_or("?").to_owned();
    text += &number("ms").map_or(String::new(), |ms| format!(": {ms:.3} ms"));
    if let Some(rate) = number("rate") {
        text += &format!(", {rate:.0} {}", figure["unit"].as_str().unwrap_or_default());
    }
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    if let Some(share) = number("share") {
        text += &format!(", {}", percent(share));
    }
    if let Some(target) = number("target") {
        text += &format!(" of {}", percent(target));
    }
    if let Some(most) = number("at_most_ms") {
        text += &format!(" of {most:.3} ms");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ended(output: &str, code: Option<i32>, is_late: bool) -> Ended {
        let signal = (code.is_none() && !is_late).then(|| "signal: 11".to_owned());
        Ended { code, is_late, signal, output: output.to_owned(), took: Duration::from_secs(7) }
    }

    fn words(tally: &Tally) -> String {
        let Tally { outcome, num_passed, num_failed, num_skipped, .. } = tally;
        let what = match outcome {
            Outcome::Passed(what) => format!("passed: {what}"),
            Outcome::Failed(findings) => format!("failed: {}", findings.join("; ")),
            Outcome::Skipped(why) => format!("skipped: {why}"),
        };
        format!("{num_passed}/{num_failed}/{num_skipped} {what}")
    }

    #[test]
    fn results_of_tests_are_counted() {
        let slow = "test a has been running for over 60 seconds\ntest a ... ok\ntest b has been running for over 60 seconds\n";
        let one = "test a ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        let failed = "test m::a ... FAILED\ntest b ... ok\n\ntest result: FAILED. 1 passed; 1 failed\n";
        let none = "running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 3 filtered out\n";
        let skipped = "test a ... ok\ntest b ... ok\ntest c ... ignored, by hand\n\nsuccesses:\n\n---- b stdout ----\n\
                       SKIPPED: no wgmma\nSKIPPED: no fp8\n\nsuccesses:\n    a\n    b\n";
        let loud = "test a ... SKIPPED a: no NCCL here\nok\ntest a ... ok\n";
        for (output, code, is_late, expected) in [
            (one, Some(0), false, "1/0/0 passed: 1 tests"),
            (failed, Some(101), false, "1/1/0 failed: m::a"),
            (failed, None, true, "1/2/0 failed: m::a; not done in 7 s, 1 tests were"),
            (slow, None, true, "1/1/0 failed: not done in 7 s, 1 tests were; slow: b"),
            (one, None, false, "1/1/0 failed: test result: ok. 1 passed; 0 failed; 0 ignored, signal: 11"),
            (none, Some(0), false, "0/1/0 failed: it has no such test"),
            (skipped, Some(0), false, "1/0/2 passed: 1 tests, 2 SKIPPED: c: by hand; b: no wgmma"),
            (loud, Some(0), false, "0/0/1 skipped: a: no NCCL here"),
            ("no library\n\n", Some(127), false, "0/1/0 failed: no library"),
            ("", Some(1), false, "0/1/0 failed: it said nothing"),
        ] {
            assert_eq!(words(&of_tests(&ended(output, code, is_late))), expected, "{output}");
        }
    }

    #[test]
    fn figures_are_read_line_by_line() {
        let copy = r#"{"figure": "copy", "ms": 1.5, "rate": 3000.0, "unit": "GB/s", "share": null, "target": null, "is_missed": false}"#;
        let step = r#"{"figure": "step", "ms": 2.0, "rate": 2100.0, "unit": "GB/s", "share": 0.7, "target": 0.85, "is_missed": true}"#;
        let left = r#"{"left_out": "128 x 4096", "why": "needs 69.2 GB"}"#;
        for (output, code, is_late, expected) in [
            (copy.to_owned(), Some(0), false, "1/0/0 passed: 1 figures"),
            (
                format!("{copy}\n{left}"),
                Some(0),
                false,
                "1/0/1 passed: 1 figures; left out 128 x 4096: needs 69.2 GB",
            ),
            (left.to_owned(), Some(0), false, "0/0/1 skipped: 128 x 4096: needs 69.2 GB"),
            (
                format!("{copy}\n{step}\n{{\"fig"),
                None,
                true,
                "1/2/0 failed: step: 2.000 ms, 2100 GB/s, 70.0 % of 85.0 %, MISSED; not done in 7 s",
            ),
            (format!("{copy}\nno memory"), Some(1), false, "1/1/0 failed: no memory"),
            (String::new(), Some(0), false, "0/1/0 failed: it measured nothing"),
        ] {
            assert_eq!(words(&of_figures(&ended(&output, code, is_late))), expected);
        }
    }

    #[test]
    fn an_exposed_handoff_is_compared_with_what_is_allowed() {
        let report = r#"{"threads": 1, "rows": [
            {"prompt_tokens": 256, "exposed_ms": 0.5, "allowed_ms": 1.25}, {"prompt_tokens": 512, "exposed_ms": 2.0, "allowed_ms": 1.5}]}"#;
        let figures = exposed(report, "shm").unwrap();
        let texts: Vec<String> = figures.iter().map(in_words).collect();
        assert_eq!(texts[0], "exposed handoff, shm, 256 tokens: 0.500 ms of 1.250 ms");
        assert_eq!((&figures[0]["is_missed"], &figures[1]["is_missed"]), (&json!(false), &json!(true)));
        for broken in ["", "{}", r#"{"rows": []}"#, r#"{"rows": [{"prompt_tokens": 1}]}"#] {
            assert!(exposed(broken, "shm").is_none(), "{broken}");
        }
    }
}
