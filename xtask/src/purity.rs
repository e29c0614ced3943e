//! Whether the crates that decide are pure: no runtime, no operating system, no clock, no chance, no unsafe code.
//!
//! A program can then check them with every order of events, and a simulator can run them.

use anyhow::Result;

use crate::{
    check::Outcome,
    edges,
    source::{self, Paths, SourceFile},
    workspace::Workspace,
};

/// Crates that only decide.
const PURE: [&str; 10] = [
    "baton-cost",
    "baton-drafting",
    "baton-handoff",
    "baton-keys",
    "baton-kv-events",
    "baton-kv-index",
    "baton-planner",
    "baton-request",
    "baton-scheduler",
    "baton-tier-policy",
];

/// Packages that a pure crate must not reach, directly or indirectly.
const NEVER: [&str; 5] = ["tokio", "libc", "rand", "getrandom", "memmap2"];

/// Ways to such a package that lead to no system: on some platforms blake3 asks with it which instructions the processor has, and the
/// scheduler and the policy of tiers take hashes of blocks from the crate that has the memory of blocks, too.
const HARMLESS: [(&str, &str); 3] =
    [("baton-keys", "libc"), ("baton-scheduler", "libc"), ("baton-tier-policy", "libc")];

/// Beginnings of paths that its code must not name.
const PATHS: [&str; 9] =
    ["tokio", "libc", "rand", "std::thread", "std::net", "std::fs", "std::process", "std::env", "std::os"];

/// Calls that read a clock, by the end of their path or by the method.
const CLOCKS: [&str; 2] = ["Instant::now", "SystemTime::now"];
const CLOCK_METHOD: &str = "elapsed";

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(packages) = source::of_packages(workspace)? else { return Ok(Outcome::without_files()) };
    let mut findings = Vec::new();
    let mut names = Vec::new();
    for (package, files) in packages {
        let name = package.name();
        if !PURE.contains(&name) {
            continue;
        }
        names.push(name);
        for file in files.iter().filter(|file| !file.for_tests) {
            findings.extend(impure(file).into_iter().map(|finding| format!("{name}: {finding}")));
        }
        for never in NEVER.into_iter().filter(|never| !HARMLESS.contains(&(name, never))) {
            if let Some(way) = edges::way_to(workspace, package.id(), never) {
                findings.push(format!("{name} must not reach {never}, but does: {way}"));
            }
        }
    }
    Ok(Outcome::of(
        findings,
        if names.is_empty() { "no such crate yet".to_owned() } else { names.join(", ") },
    ))
}

/// The impure parts of a file, each with its line.
fn impure(file: &SourceFile) -> Vec<String> {
    let paths = Paths::of(&file.code);
    let imported = paths.imports.iter().map(|import| (import.line, import.path.join("::")));
    let used = paths.used.iter().map(|(line, path)| (*line, path.join("::")));
    let mut findings: Vec<String> = imported
        .chain(used)
        .filter(|(_, path)| {
            PATHS.iter().any(|start| path == start || path.starts_with(&format!("{start}::")))
                || CLOCKS.iter().any(|clock| path == clock || path.ends_with(&format!("::{clock}")))
        })
        .map(|(line, path)| format!("{}:{line} names {path}", file.name))
        .collect();
    for (line_idx, line) in file.code.lines().enumerate() {
        let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        if words.any(|word| word == "unsafe") {
            findings.push(format!("{}:{} says unsafe", file.name, line_idx + 1));
        }
        if line.contains(&format!(".{CLOCK_METHOD}(")) {
            findings.push(format!("{}:{} reads a clock: {CLOCK_METHOD}()", file.name, line_idx + 1));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn num_findings(code: &str) -> usize {
        let file =
            SourceFile { name: "lib.rs".to_owned(), for_tests: false, code: code.to_owned(), num_lines: 1 };
        impure(&file).len()
    }

    #[test]
    fn what_a_pure_crate_must_not_name_is_found() {
        for code in [
            "use tokio::sync::mpsc;",
            "use std::{collections::BTreeMap, fs};",
            "use libc;",
            "fn f() { libc::getpid() }",
            "fn f() { Instant::now() }",
            "fn f() { std::time::SystemTime::now() }",
            "fn f(i: Instant) { i.elapsed() }",
            "fn f() { rand::random() }",
            "fn f() { std::thread::sleep(d) }",
            "fn f() { unsafe { g() } }",
        ] {
            assert_eq!(num_findings(code), 1, "{code}");
        }
    }

    #[test]
    fn times_that_are_passed_in_are_pure() {
        for code in [
            "use std::time::{Duration, Instant};",
            "fn f(now: Instant) -> Duration { now.duration_since(self.since) }",
            "#![forbid(unsafe_code)]",
            "use std::io;",
        ] {
            assert_eq!(num_findings(code), 0, "{code}");
        }
    }
}
