//! The report of a check: report.md for a page, report.json for `--compare`. Both are written after each stage, so that a machine
//! that goes away leaves what was found.

use std::{fmt::Write as _, path::Path, time::Duration};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::outcomes::{self, Tally};
use crate::check::Outcome;

/// Everything that was found so far.
pub(super) struct Report {
    pub(super) date: String,
    pub(super) commit: String,
    /// The command that the report is of.
    pub(super) command: String,
    /// What `gpu_check` says of the device.
    pub(super) card: Value,
    pub(super) driver: String,
    /// Names of libraries and where they are.
    pub(super) libraries: Vec<(&'static str, String)>,
    pub(super) stages: Vec<StageReport>,
    /// Whether all stages have run.
    pub(super) is_complete: bool,
}

/// One stage.
pub(super) struct StageReport {
    pub(super) name: &'static str,
    pub(super) budget: Duration,
    pub(super) took: Duration,
    pub(super) checks: Vec<Check>,
}

/// One program, or one step, of a stage.
pub(super) struct Check {
    pub(super) name: String,
    pub(super) took: Duration,
    pub(super) tally: Tally,
}

impl Check {
    /// "passed", "failed" or "skipped", and what is said about it.
    fn outcome(&self) -> (&'static str, String) {
        match &self.tally.outcome {
            Outcome::Passed(detail) => ("passed", detail.clone()),
            Outcome::Skipped(why) => ("skipped", why.clone()),
            Outcome::Failed(findings) => ("failed", findings.join("; ")),
        }
    }

    pub(super) fn in_words(&self) -> String {
        let (word, detail) = self.outcome();
        format!("{:<20} {} {:>4.0} s  {detail}", self.name, shown(word), self.took.as_secs_f32())
    }

    fn json(&self) -> Value {
        let (outcome, what) = self.outcome();
        let Tally { num_passed, num_failed, num_skipped, figures, .. } = &self.tally;
        json!({
            "check": self.name, "outcome": outcome, "what": what, "took_s": rounded(self.took),
            "passed": num_passed, "failed": num_failed, "skipped": num_skipped, "figures": figures,
        })
    }
}

fn shown(outcome: &str) -> &'static str {
    match outcome {
        "passed" => "ok     ",
        "failed" => "FAILED ",
        _ => "SKIPPED",
    }
}

fn rounded(took: Duration) -> f64 {
    (took.as_secs_f64() * 10.0).round() / 10.0
}

impl Report {
    pub(super) fn has_failed(&self) -> bool {
        self.checks().any(|check| matches!(check.tally.outcome, Outcome::Failed(_)))
    }

    fn checks(&self) -> impl Iterator<Item = &Check> {
        self.stages.iter().flat_map(|stage| &stage.checks)
    }

    /// "214 passed, 0 failed, 12 skipped in 312 s".
    pub(super) fn counts(&self) -> String {
        let sum = |count: fn(&Tally) -> usize| self.checks().map(|check| count(&check.tally)).sum::<usize>();
        let took: Duration = self.stages.iter().map(|stage| stage.took).sum();
        format!(
            "{} passed, {} failed, {} skipped in {:.0} s",
            sum(|tally| tally.num_passed),
            sum(|tally| tally.num_failed),
            sum(|tally| tally.num_skipped),
            took.as_secs_f32()
        )
    }

    /// Writes both files into a folder. Each appears complete or not at all.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        for (name, text) in [("report.json", format!("{:#}\n", self.json())), ("report.md", self.markdown())]
        {
            let (path, new) = (folder.join(name), folder.join(format!("{name}.new")));
            std::fs::write(&new, text)
                .and_then(|()| std::fs::rename(&new, &path))
                .context("write the report")?;
        }
        Ok(())
    }

    pub(super) fn json(&self) -> Value {
        let stage = |stage: &StageReport| {
            let checks: Vec<Value> = stage.checks.iter().map(Check::json).collect();
            let seconds = [stage.budget, stage.took].map(rounded);
            json!({"stage": stage.name, "budget_s": seconds[0], "took_s": seconds[1], "checks": checks})
        };
        let stages: Vec<Value> = self.stages.iter().map(stage).collect();
        let libraries: serde_json::Map<String, Value> =
            self.libraries.iter().map(|(name, place)| ((*name).to_owned(), json!(place))).collect();
        json!({
            "date": self.date, "commit": self.commit, "command": self.command, "card": self.card, "driver": self.driver,
            "libraries": libraries, "is_complete": self.is_complete, "stages": stages,
        })
    }

    fn markdown(&self) -> String {
        let card = &self.card;
        let mut text = format!(
            "## {}, commit {}\n\n{}, compute capability {}, {:.1} GiB, {}",
            self.date,
            self.commit,
            card["card"].as_str().unwrap_or("an unknown card"),
            card["capability"].as_str().unwrap_or("?"),
            card["memory_bytes"].as_f64().unwrap_or(0.0) / f64::from(1 << 30),
            self.driver,
        );
        for (name, place) in &self.libraries {
            let _ = write!(text, "; {name}: {place}");
        }
        let complete = if self.is_complete { "" } else { ". It has not come to its end" };
        let _ = write!(text, "\n\n`{}`: {}{complete}\n\n", self.command, self.counts());
        text += "| stage | check | outcome | s | what |\n|---|---|---|---|---|\n";
        for (stage, check) in self.stages.iter().flat_map(|it| it.checks.iter().map(move |check| (it, check)))
        {
            let (word, detail) = check.outcome();
            let (word, detail) = (shown(word).trim(), detail.replace('|', "/").replace('\n', " "));
            let seconds = check.took.as_secs_f32();
            let _ = writeln!(text, "| {} | {} | {word} | {seconds:.0} | {detail} |", stage.name, check.name);
        }
        text += &self.figures();
        text
    }

    fn figures(&self) -> String {
        let figures: Vec<&Value> = self.checks().flat_map(|check| &check.tally.figures).collect();
        if figures.is_empty() {
            return String::new();
        }
        let mut text = String::from("\n| figure | ms | reached | target |\n|---|---|---|---|\n");
        for figure in figures {
            let all = outcomes::in_words(figure);
            let (what, numbers) = all.split_once(": ").unwrap_or((&all, ""));
            let (ms, reached) = numbers.split_once(" ms").unwrap_or((numbers, ""));
            let (reached, target) = reached.split_once(" of ").unwrap_or((reached, "–"));
            let missed = if figure["is_missed"] == true { ", MISSED" } else { "" };
            let reached = reached.trim_start_matches(", ");
            let _ = writeln!(text, "| {what} | {ms} | {reached} | {target}{missed} |");
        }
        text
    }
}
