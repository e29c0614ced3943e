//! Compiles the GPU kernels for the architecture of every card, with NVRTC and without a GPU.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use crate::{check::Outcome, tools, workspace::Workspace};

/// What is said where [`nvrtc`] finds none.
pub(crate) const NO_NVRTC: &str =
    "there is no NVRTC in target/: `cargo xtask setup` fetches it from PyPI; BATON_NVRTC can name another";

/// For `verify`, which does not install. It also writes the file that releases install.
pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(nvrtc) = nvrtc(workspace) else {
        return Ok(Outcome::Skipped("no NVRTC here: `cargo xtask setup` fetches it from PyPI".to_owned()));
    };
    let file = workspace.root.join("target/kernels.cubins");
    let mut program = program(workspace, nvrtc)?;
    program.arg("--write").arg(&file).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let output = program.output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    // The size of the file, and the counts.
    let last: Vec<&str> = said.lines().rev().take(2).collect();
    let last = last.join("; ");
    let findings =
        if output.status.success() { vec![] } else { vec![format!("cuda-check: {}", output.status)] };
    Ok(Outcome::of(findings, last))
}

/// `cargo xtask cuda-check`: the table; whether all kernels compile and keep their limits on instructions. Their code is
/// written into a file, if there is one.
pub(crate) fn run(workspace: &Workspace, file: Option<&Path>) -> Result<bool> {
    let nvrtc = nvrtc(workspace).context(NO_NVRTC)?;
    let mut program = program(workspace, nvrtc)?;
    if let Some(file) = file {
        program.arg("--write").arg(std::path::absolute(file)?);
    }
    Ok(program.status()?.success())
}

/// The NVRTC that the environment names, or that of `setup`.
pub(crate) fn nvrtc(workspace: &Workspace) -> Option<PathBuf> {
    let of_setup = || Some(tools::nvrtc(&workspace.root)).filter(|file| file.exists());
    std::env::var_os("BATON_NVRTC").map(PathBuf::from).or_else(of_setup)
}

/// Builds the program that compiles the kernels, with the features that the tests' build has, so that they share it.
fn program(workspace: &Workspace, nvrtc: PathBuf) -> Result<Command> {
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--quiet", "--locked", "--workspace", "--example", "cuda_check"]);
    ensure!(cargo.status()?.success(), "the example cuda_check does not compile");
    let mut program = Command::new(workspace.target_folder().join("debug/examples/cuda_check"));
    program.current_dir(&workspace.root).env("BATON_NVRTC", nvrtc);
    Ok(program)
}
