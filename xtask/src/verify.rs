//! `cargo xtask verify`: every check, one summary line each, the tests last.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::{
    architecture, chart,
    check::{self, Check, Outcome},
    descriptors, edges, hygiene, settings,
    workspace::Workspace,
};

/// Cheap ones first, so that a slip is seen at once.
const CHECKS: &[Check] = &[
    Check { name: "format", about: "cargo fmt changes nothing", run: format },
    Check { name: "edges", about: "crates depend on each other as designed", run: edges::check },
    Check { name: "architecture", about: "files that the documents name exist", run: architecture::check },
    Check { name: "hygiene", about: "lints, licence, lock file, file sizes, leftovers", run: hygiene::check },
    Check { name: "descriptors", about: "tools/protoc fits the locked etcd-client", run: descriptors::check },
    Check { name: "settings", about: "deploy/ and helm/ use flags that exist", run: settings::check },
    Check { name: "chart", about: "the Helm chart lints, renders, and refuses mistakes", run: chart::check },
    Check { name: "clippy", about: "clippy has nothing to say", run: clippy },
    Check { name: "tests", about: "cargo test --workspace passes", run: tests },
];

pub(crate) fn list() {
    for check in CHECKS {
        println!("{:<13} {}", check.name, check.about);
    }
}

/// Runs the named checks, or all; whether they hold.
pub(crate) fn run(workspace: &Workspace, names: &[String]) -> Result<bool> {
    if let Some(unknown) = names.iter().find(|name| CHECKS.iter().all(|check| check.name != **name)) {
        bail!("no check is called {unknown}; `cargo xtask verify --list` names them");
    }
    let mut failed = Vec::new();
    for check in CHECKS.iter().filter(|check| names.is_empty() || names.iter().any(|name| name == check.name))
    {
        if check.name == "tests" && !failed.is_empty() {
            println!("verify: failed so far: {}", failed.join(", "));
        }
        let started = Instant::now();
        let outcome =
            (check.run)(workspace).unwrap_or_else(|error| Outcome::Failed(vec![format!("{error:#}")]));
        // After the tests nothing is said unless something is wrong: cargo's own summary ends the output.
        let last_word = check.name == "tests" && matches!(outcome, Outcome::Passed(_));
        if !last_word {
            check::print(check.name, &outcome, started.elapsed());
        }
        if matches!(outcome, Outcome::Failed(_)) {
            failed.push(check.name);
        }
    }
    if !failed.is_empty() {
        println!("verify: FAILED: {}", failed.join(", "));
    }
    Ok(failed.is_empty())
}

fn format(workspace: &Workspace) -> Result<Outcome> {
    let output = workspace.cargo().args(["fmt", "--all", "--check", "--", "--files-with-diff"]).output()?;
    let mut findings: Vec<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|file| file.trim_start_matches(&format!("{}/", workspace.root.display())).to_owned())
        .map(|file| format!("{file} is not formatted; `cargo xtask fix` does it"))
        .collect();
    findings.sort();
    findings.dedup();
    if !output.status.success() && findings.is_empty() {
        findings.push(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    Ok(Outcome::of(findings, "every crate"))
}

/// Clippy checks what the tests compile again: cargo shares nothing but build scripts and procedural macros
/// between the two. Tests could be compiled by clippy-driver instead, but it leaves optimisations out, and
/// then another program would be tested than the one that is released.
fn clippy(workspace: &Workspace) -> Result<Outcome> {
    stream(
        workspace,
        &["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"],
    )
}

fn tests(workspace: &Workspace) -> Result<Outcome> {
    stream(workspace, &["test", "--workspace", "--locked", "--no-fail-fast"])
}

/// Runs cargo with its output passed through as it comes.
fn stream(workspace: &Workspace, args: &[&str]) -> Result<Outcome> {
    println!("verify: cargo {} …", args.join(" "));
    let status = workspace.cargo().args(args).status()?;
    let findings = if status.success() { Vec::new() } else { vec![format!("cargo {}: {status}", args[0])] };
    Ok(Outcome::of(findings, "every crate, every target"))
}
