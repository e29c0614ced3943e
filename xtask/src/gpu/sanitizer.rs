//! Tests under NVIDIA's compute-sanitizer, which slows them down by a factor of tens.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{
    bench::Bench,
    checks::Checks,
    outcomes::{self, Tally},
};
use crate::{check::Outcome, tools};

/// A few tests of each file of kernels.
pub(super) const SOME_OF_EACH: [&str; 11] = [
    "attention::chunks",
    "attention::windows",
    "rope::",
    "rows::",
    "experts::",
    "expert_products::",
    "products::few",
    "blocks::",
    "checksum::",
    "codes::",
    "sample::the_end",
];

/// How the sanitizer begins what it found.
const FINDINGS: [&str; 4] = ["Race reported", "Invalid ", "Program hit", "Error:"];

/// Findings in the report. The log has them all.
const MAX_SHOWN: usize = 5;

/// Runs each filter's tests in a process of their own.
pub(super) fn run(bench: &Bench, checks: &mut Checks<'_>, tool: &str, filters: &[&str]) {
    let toolkit = PathBuf::from("/usr/local/cuda/bin/compute-sanitizer");
    let found = tools::on_path("compute-sanitizer").or_else(|| toolkit.is_file().then_some(toolkit));
    let Some(sanitizer) = found else {
        let skipped = || Ok(Tally::of(Outcome::Skipped("no compute-sanitizer here".to_owned())));
        return checks.add(tool, skipped);
    };
    for filter in filters {
        checks.add(filter.trim_end_matches(':'), || sanitized(bench, &sanitizer, tool, filter));
    }
}

fn sanitized(bench: &Bench, sanitizer: &Path, tool: &str, filter: &str) -> Result<Tally> {
    let mut command = bench.command(sanitizer);
    command.args(["--tool", tool, "--error-exitcode", "9"]).arg(&bench.programs.kernels);
    // One test after the other, so that what was done in time is whole. Long contexts alone would take all of it.
    command.args([filter, "--skip", "long_contexts", "--test-threads", "1", "--show-output"]);
    let ended = bench.finish(&format!("{tool}-{filter}"), &mut command)?;
    let is_error =
        |line: &&str| line.starts_with("====") && FINDINGS.iter().any(|finding| line.contains(finding));
    let errors: Vec<String> = ended
        .output
        .lines()
        .filter(is_error)
        .map(|line| line.trim_start_matches(['=', ' ']).to_owned())
        .take(MAX_SHOWN)
        .collect();
    let mut tally = outcomes::of_tests(&ended);
    if !errors.is_empty() {
        tally = Tally::of(Outcome::Failed(errors));
    } else if ended.is_late {
        let passed = tally.num_passed;
        tally =
            Tally::of(Outcome::Skipped(format!("not done in time; {passed} tests ended without a finding")));
    }
    Ok(tally)
}
