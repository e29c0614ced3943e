//! `cargo xtask verify`: every check, one summary line each, the tests last.

use std::{
    io::{BufRead, BufReader},
    process::{ExitStatus, Stdio},
    time::Instant,
};

use anyhow::{Result, bail};

use crate::{
    architecture, chart,
    check::{self, Check, Outcome},
    circles, deny, descriptors, edges, events, hygiene, kernels, names, pages, pictures, purity, rooms,
    settings, words,
    workspace::Workspace,
};

/// Cheap checks first, so that a mistake is reported at once.
const CHECKS: &[Check] = &[
    Check { name: "format", about: "cargo fmt changes nothing", run: format },
    Check { name: "edges", about: "crates depend on each other as designed", run: edges::check },
    Check {
        name: "purity",
        about: "crates that decide reach no runtime, clock or system",
        run: purity::check,
    },
    Check { name: "rooms", about: "no crate is above 6,000 production lines", run: rooms::check },
    Check { name: "circles", about: "no files of a crate use each other in a circle", run: circles::check },
    Check { name: "names", about: "no two public types share a name", run: names::check },
    Check {
        name: "events",
        about: "no field of a log event has a name of the line itself",
        run: events::check,
    },
    Check { name: "words", about: "no banned word is used", run: words::check },
    Check { name: "pages", about: "no page is longer than its limit", run: pages::check },
    Check {
        name: "architecture",
        about: "files that the documents name exist, every invariant is cited",
        run: architecture::check,
    },
    Check { name: "pictures", about: "docs/images/*.svg fit their sources", run: pictures::check },
    Check { name: "hygiene", about: "lints, licence, lock file, file sizes, leftovers", run: hygiene::check },
    Check { name: "deny", about: "dependencies have licences and sources of deny.toml", run: deny::check },
    Check { name: "descriptors", about: "tools/protoc fits the locked etcd-client", run: descriptors::check },
    Check { name: "settings", about: "deploy/ and helm/ use flags that exist", run: settings::check },
    Check { name: "chart", about: "the Helm chart lints, renders, and refuses mistakes", run: chart::check },
    Check { name: "clippy", about: "clippy has nothing to say", run: clippy },
    Check {
        name: "kernels",
        about: "GPU kernels compile for every card, within limits on instructions",
        run: kernels::check,
    },
    Check { name: "tests", about: "cargo test --workspace passes", run: tests },
];

pub(crate) fn list() {
    for check in CHECKS {
        println!("{:<13} {}", check.name, check.about);
    }
}

/// Runs the named checks, or all. Returns whether they pass.
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
        // If the tests pass, their total is the last line of the output.
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
    let mut findings = unformatted(workspace, &["--all"])?;
    findings.extend(unformatted(workspace, &["--manifest-path", "fuzz/Cargo.toml"])?);
    findings.sort();
    findings.dedup();
    Ok(Outcome::of(findings, "every crate"))
}

/// The unformatted files of these packages.
fn unformatted(workspace: &Workspace, packages: &[&str]) -> Result<Vec<String>> {
    let mut cargo = workspace.cargo();
    let output = cargo.arg("fmt").args(packages).args(["--check", "--", "--files-with-diff"]).output()?;
    let mut findings: Vec<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|file| file.trim_start_matches(&format!("{}/", workspace.root.display())).to_owned())
        .map(|file| format!("{file} is not formatted; `cargo xtask fix` does it"))
        .collect();
    if !output.status.success() && findings.is_empty() {
        findings.push(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    Ok(findings)
}

/// Clippy compiles the code once more than the tests: cargo shares only build scripts and procedural macros between the
/// two. clippy-driver could compile the tests, but without optimisations: then another program than the released one
/// would be tested.
///
/// The fuzz targets are checked here and not built, as building them takes minutes.
fn clippy(workspace: &Workspace) -> Result<Outcome> {
    let mut findings = Vec::new();
    for packages in [&["--workspace"][..], &["--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target"]]
    {
        let args = ["--all-targets", "--locked", "--quiet", "--", "-D", "warnings"];
        println!("verify: cargo clippy {} {} …", packages.join(" "), args.join(" "));
        let status = workspace.cargo().arg("clippy").args(packages).args(args).status()?;
        findings.extend(finding("clippy", status));
    }
    Ok(Outcome::of(findings, "every crate, every target, fuzz targets"))
}

/// Every test binary reports its own result; the total is counted here. Half as many tests again as processors run at once,
/// because many wait: for a deadline, for a process.
fn tests(workspace: &Workspace) -> Result<Outcome> {
    let args = ["test", "--workspace", "--locked", "--no-fail-fast"];
    println!("verify: cargo {} …", args.join(" "));
    let mut cargo = workspace.cargo();
    if std::env::var_os(TEST_THREADS).is_none() {
        let num_processors = std::thread::available_parallelism().map_or(1, usize::from);
        cargo.env(TEST_THREADS, (num_processors + num_processors.div_ceil(2)).to_string());
    }
    let mut cargo = cargo.args(args).stdout(Stdio::piped()).spawn()?;
    let mut total = Total::default();
    for line in BufReader::new(cargo.stdout.take().expect("piped")).lines() {
        let line = line?;
        println!("{line}");
        total.add(&line);
    }
    let status = cargo.wait()?;
    println!("tests: {} passed, {} failed, {} skipped", total.passed, total.failed, total.ignored);
    Ok(Outcome::of(finding(args[0], status).into_iter().collect(), "every crate, every target"))
}

/// Read by the test harness.
const TEST_THREADS: &str = "RUST_TEST_THREADS";

fn finding(command: &str, status: ExitStatus) -> Option<String> {
    (!status.success()).then(|| format!("cargo {command}: {status}"))
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Total {
    passed: usize,
    failed: usize,
    ignored: usize,
}

impl Total {
    /// Adds a line such as "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; …".
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        for count in result.split(['.', ';']) {
            let Some((number, what)) = count.trim().split_once(' ') else { continue };
            let Ok(number) = number.parse::<usize>() else { continue };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_results_add_up() {
        let mut total = Total::default();
        for line in [
            "running 3 tests",
            "test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: FAILED. 7 passed; 2 failed; 0 ignored; 0 measured; 4 filtered out; finished in 12.00s",
            "9 passed; of something else",
        ] {
            total.add(line);
        }
        assert_eq!(total, Total { passed: 9, failed: 2, ignored: 1 });
    }
}
