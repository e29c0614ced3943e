//! How stages add checks to the report.

use std::time::Instant;

use anyhow::Result;

use super::{
    bench::Bench,
    outcomes::Tally,
    report::{Check, StageReport},
};
use crate::check::Outcome;

/// Adds checks to a stage's report.
pub(super) struct Checks<'a> {
    report: &'a mut StageReport,
}

impl<'a> Checks<'a> {
    pub(super) fn of(report: &'a mut StageReport) -> Checks<'a> {
        Checks { report }
    }

    pub(super) fn add(&mut self, name: impl Into<String>, run: impl FnOnce() -> Result<Tally>) {
        let (name, start) = (name.into(), Instant::now());
        let tally = run().unwrap_or_else(|error| Tally::of(Outcome::Failed(vec![format!("{error:#}")])));
        let check = Check { name, took: start.elapsed(), tally };
        println!("    {}", check.in_words());
        self.report.checks.push(check);
    }
}

/// Below this memory, figures of an 8B model mean nothing: no card that is supported has so little.
const LEAST_MEMORY: u64 = 16_000_000_000;

/// What is said instead of figures of a device that no one would buy.
pub(super) fn too_small(bench: &Bench) -> Option<Tally> {
    let memory_bytes = bench.memory_bytes.get();
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let why = format!(
        "figures are for cards of {:.0} GB or more, this device has {:.1} GB",
        gigabytes(LEAST_MEMORY),
        gigabytes(memory_bytes)
    );
    (memory_bytes < LEAST_MEMORY).then(|| Tally::of(Outcome::Skipped(why)))
}
