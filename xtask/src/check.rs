//! A check of `verify`, its outcome, and how the outcome is printed.

use std::time::Duration;

use crate::workspace::Workspace;

/// One check of `verify`.
pub(crate) struct Check {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// What holds when it passes, in one line.
    pub(crate) about: &'static str,
    pub(crate) run: fn(&Workspace) -> anyhow::Result<Outcome>,
}

/// What a check found.
pub(crate) enum Outcome {
    /// It passes. Says what was checked, such as "15 crates".
    Passed(String),
    /// It fails; one line per finding, each with its place.
    Failed(Vec<String>),
    /// It could not run, and why.
    Skipped(String),
}

impl Outcome {
    /// Passed with `looked_at` if there are no findings.
    pub(crate) fn of(findings: Vec<String>, looked_at: impl Into<String>) -> Outcome {
        if findings.is_empty() { Outcome::Passed(looked_at.into()) } else { Outcome::Failed(findings) }
    }

    /// Skipped, as only git knows which files there are.
    pub(crate) fn without_files() -> Outcome {
        Outcome::Skipped("files were not looked at: this is no git checkout, or there is no git".to_owned())
    }
}

/// Prints the summary line of one check, and its findings above it.
pub(crate) fn print(name: &str, outcome: &Outcome, took: Duration) {
    let (word, detail) = match outcome {
        Outcome::Passed(detail) => ("ok", detail.clone()),
        Outcome::Skipped(why) => ("SKIPPED", why.clone()),
        Outcome::Failed(findings) => {
            for finding in findings {
                println!("    {name}: {finding}");
            }
            ("FAILED", findings_counted(findings.len()))
        }
    };
    println!("verify {name:<13} {word:<8} {:>6.1} s  {detail}", took.as_secs_f32());
}

fn findings_counted(num_findings: usize) -> String {
    match num_findings {
        1 => "1 finding".to_owned(),
        n => format!("{n} findings"),
    }
}
