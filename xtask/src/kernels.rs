//! GPU kernels compiled for every card's architecture, by NVRTC and without a GPU.

use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use crate::{check::Outcome, tools, workspace::Workspace};

/// For `verify`, which does not install.
pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    if !tools::nvrtc(&workspace.root).exists() {
        return Ok(Outcome::Skipped("no NVRTC here: `cargo xtask setup` fetches it from PyPI".to_owned()));
    }
    let output = command(workspace).stdout(Stdio::piped()).stderr(Stdio::inherit()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let last = said.lines().last().unwrap_or_default().to_owned();
    let findings =
        if output.status.success() { vec![] } else { vec![format!("cuda-check: {}", output.status)] };
    Ok(Outcome::of(findings, last))
}

/// `cargo xtask cuda-check`: the table; whether all kernels compile.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    if !tools::nvrtc(&workspace.root).exists() {
        bail!("there is no NVRTC in target/: `cargo xtask setup` fetches it from PyPI");
    }
    Ok(command(workspace).status()?.success())
}

fn command(workspace: &Workspace) -> Command {
    let mut cargo = workspace.cargo();
    cargo.args(["run", "--quiet", "--locked", "--package", "baton-model", "--example", "cuda_check"]);
    cargo.env("BATON_NVRTC", tools::nvrtc(&workspace.root));
    cargo
}
