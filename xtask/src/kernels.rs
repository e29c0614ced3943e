//! Compiles the GPU kernels for the architecture of every card, with NVRTC and without a GPU.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use crate::{check::Outcome, tools, workspace::Workspace};

/// For `verify`, which does not install.
pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(nvrtc) = nvrtc(workspace) else {
        return Ok(Outcome::Skipped("no NVRTC here: `cargo xtask setup` fetches it from PyPI".to_owned()));
    };
    let output = command(workspace, nvrtc).stdout(Stdio::piped()).stderr(Stdio::inherit()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let last = said.lines().last().unwrap_or_default().to_owned();
    let findings =
        if output.status.success() { vec![] } else { vec![format!("cuda-check: {}", output.status)] };
    Ok(Outcome::of(findings, last))
}

/// `cargo xtask cuda-check`: the table; whether all kernels compile.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    let nvrtc = nvrtc(workspace)
        .context("there is no NVRTC in target/: `cargo xtask setup` fetches it from PyPI; BATON_NVRTC can name another")?;
    Ok(command(workspace, nvrtc).status()?.success())
}

/// The NVRTC that the environment names, or that of `setup`.
fn nvrtc(workspace: &Workspace) -> Option<PathBuf> {
    let of_setup = || Some(tools::nvrtc(&workspace.root)).filter(|file| file.exists());
    std::env::var_os("BATON_NVRTC").map(PathBuf::from).or_else(of_setup)
}

fn command(workspace: &Workspace, nvrtc: PathBuf) -> Command {
    let mut cargo = workspace.cargo();
    cargo.args(["run", "--quiet", "--locked", "--package", "baton-model", "--example", "cuda_check"]);
    cargo.env("BATON_NVRTC", nvrtc);
    cargo
}
