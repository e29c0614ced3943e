//! `cargo xtask arm`: builds what computes on processors for aarch64 and runs its tests in an emulator, as processors with
//! and without the instructions for integers and bf16. Installs the tools for that.
//!
//! An emulator says nothing about speed.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{setup, tools, workspace::Workspace};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const EMULATOR: &str = "qemu-aarch64";
/// Debian's compiler for aarch64, which links, and where it keeps the C library for the emulator.
const COMPILER: &str = "aarch64-linux-gnu-gcc";
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// Programs, and Debian's packages that contain them.
const NEEDS: [(&str, &str); 3] = [
    (EMULATOR, "qemu-user"),
    (COMPILER, "gcc-aarch64-linux-gnu"),
    ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"),
];

/// The kernels: unit tests, and the integration tests of crates whose libraries have none. `--lib` would compile such a library
/// once more, as a test.
const KERNELS: &str = "--tests -p baton-cpu-simd -p baton-cpu-kernels -p baton-cpu-attention";
/// Threads, quantised KV and the forward pass: unit tests. And whole models beside `transformers`.
const MODELS: &str = "--lib -p baton-cpu-threads -p baton-kv-cache -p baton-model-cpu -p baton-model \
    --test parity --test quantised --test tensor_parallel";

/// It compares times of instructions, which an emulator makes alike.
const SKIPPED: &str = "every_start_measures_the_same_winner";

/// Kinds of processor, by the emulator's names. Without the newest instructions, kernels take other paths.
const PROCESSORS: [(&str, &str, &[&str]); 3] = [
    ("max", "bf16, and integers in matrices", &[KERNELS, MODELS]),
    ("neoverse-n1", "dot products of integers", &[KERNELS]),
    ("cortex-a72", "neither", &[KERNELS]),
];

/// Whether all tests passed, on every kind of processor.
pub(crate) fn run(workspace: &Workspace, processor: Option<&str>) -> Result<bool> {
    let chosen: Vec<_> =
        PROCESSORS.into_iter().filter(|(name, ..)| processor.is_none_or(|chosen| chosen == *name)).collect();
    if chosen.is_empty() {
        bail!("there is no such processor; there are {}", PROCESSORS.map(|(name, ..)| name).join(", "));
    }
    install()?;
    let mut failed = Vec::new();
    for (name, abilities, tests) in chosen {
        println!("arm: as {name} ({abilities})");
        for tests in tests {
            if !test(workspace, name, tests)? {
                failed.push(name);
            }
        }
    }
    match failed.is_empty() {
        true => println!("arm: all tests passed"),
        false => println!("arm: FAILED on {}", failed.join(", ")),
    }
    Ok(failed.is_empty())
}

fn install() -> Result<()> {
    for (program, package) in NEEDS {
        if tools::on_path(program).is_none() {
            println!("arm: {program} is not on PATH: installing Debian's {package}");
            setup::apt_install(package)?;
        }
    }
    let status = Command::new("rustup").args(["target", "add", TARGET]).status().context("run rustup")?;
    if status.success() { Ok(()) } else { bail!("rustup has no standard library for {TARGET}") }
}

/// Whether these tests pass.
fn test(workspace: &Workspace, processor: &str, tests: &str) -> Result<bool> {
    let mut command = workspace.cargo();
    command.args(["test", "--target", TARGET, "--no-fail-fast"]).args(tests.split_whitespace());
    command.args(["--", "--skip", SKIPPED]);
    command
        .env("CC_aarch64_unknown_linux_gnu", COMPILER)
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", COMPILER)
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
            format!("{EMULATOR} -cpu {processor} -L {LIBRARIES}"),
        );
    Ok(command.status().context("run cargo test")?.success())
}
