//! `cargo xtask fuzz`: runs every fuzz target for some time each. Installs the tools for that.
//!
//! Inputs that reached new code stay in target/fuzz/corpus, and the next run starts with them. An input that fails is kept
//! in target/fuzz/artifacts, and its name is in the output.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{tools, workspace::Workspace};

/// Where the targets are.
pub(crate) const FOLDER: &str = "fuzz";
/// The tool that builds and runs them.
const NAME: &str = "cargo-fuzz";
const VERSION: &str = "0.13.2";

/// A hostile size must be rejected before it is allocated, and no input may take long. Inputs have no length limit at the
/// start: some targets are too slow for libFuzzer to lengthen inputs step by step. Leaks are not detected: the memory of a
/// thread that is ending would count as one.
const LIMITS: [&str; 5] =
    ["-rss_limit_mb=2048", "-malloc_limit_mb=512", "-timeout=30", "-len_control=0", "-detect_leaks=0"];

/// Whether no target found anything. Runs one target, or all, each for `seconds`.
pub(crate) fn run(workspace: &Workspace, target: Option<&str>, seconds: u64) -> Result<bool> {
    let root = &workspace.root;
    install(workspace)?;
    let output = cargo_fuzz(root, "list").output().context("run cargo fuzz")?;
    let all = String::from_utf8(output.stdout).context("names of targets")?;
    let targets: Vec<&str> = all.lines().filter(|name| target.is_none_or(|target| target == *name)).collect();
    if targets.is_empty() {
        bail!(
            "no fuzz target is called {}; there are {}",
            target.unwrap_or("so"),
            all.lines().collect::<Vec<_>>().join(", ")
        );
    }
    let mut failed = Vec::new();
    for name in targets {
        println!("fuzz: {name}, {seconds} seconds …");
        if !fuzz(root, name, seconds)? {
            failed.push(name);
        }
    }
    match failed.is_empty() {
        true => println!("fuzz: nothing found"),
        false => println!("fuzz: FAILED: {}", failed.join(", ")),
    }
    Ok(failed.is_empty())
}

fn install(workspace: &Workspace) -> Result<()> {
    if program(&workspace.root).is_file() {
        return Ok(());
    }
    println!("fuzz: building cargo-fuzz into target/tools; takes a minute once");
    let mut command = workspace.cargo();
    command.args(["install", NAME, "--version", VERSION, "--locked", "--root"]);
    command.arg(tools::own(&workspace.root, NAME, VERSION));
    let status = command.status().context("run cargo install")?;
    if status.success() { Ok(()) } else { bail!("`{}` failed with {status}", tools::shown(&command)) }
}

/// Whether the target found nothing.
fn fuzz(root: &Path, name: &str, seconds: u64) -> Result<bool> {
    let corpus = root.join("target/fuzz/corpus").join(name);
    fs::create_dir_all(&corpus)?;
    let artifacts = root.join("target/fuzz/artifacts").join(name);
    fs::create_dir_all(&artifacts)?;
    let mut command = cargo_fuzz(root, "run");
    // The released code is fuzzed: some dependencies leave code out under `cfg(fuzzing)`.
    command
        .args(["--target-dir", "target/fuzz", "--no-cfg-fuzzing", "--codegen-units", "16", name])
        .arg(&corpus);
    let seeds = root.join(FOLDER).join("seeds").join(name);
    if seeds.is_dir() {
        command.arg(seeds);
    }
    command.arg("--").args(LIMITS).arg(format!("-max_total_time={seconds}"));
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    // Otherwise the sanitizer searches for leaks again when the process ends.
    command.env("ASAN_OPTIONS", "detect_leaks=0");
    Ok(command.status().context("run cargo fuzz")?.success())
}

/// Where cargo-fuzz of this version is installed.
fn program(root: &Path) -> PathBuf {
    tools::own(root, NAME, VERSION).join("bin").join(NAME)
}

/// RUSTC_BOOTSTRAP lets the pinned stable compiler accept the unstable options of sanitizers.
fn cargo_fuzz(root: &Path, what: &str) -> Command {
    let mut command = Command::new(program(root));
    command.args(["fuzz", what, "--fuzz-dir", FOLDER]).current_dir(root).env("RUSTC_BOOTSTRAP", "1");
    command
}
