//! `cargo xtask soak`: the long form of the test in tests/system/soak.rs.

use anyhow::{Context, Result};

use crate::workspace::Workspace;

/// Whether the test passed: no wrong answer, no leak, no growth.
pub(crate) fn run(workspace: &Workspace, minutes: u64, rate: u32, seed: u64) -> Result<bool> {
    let mut command = workspace.cargo();
    command
        .args(["test", "-p", "baton-tests", "--test", "system", "--"])
        .args(["--ignored", "--exact", "--nocapture", "soak::soak"])
        .env("BATON_SOAK_MINUTES", minutes.to_string())
        .env("BATON_SOAK_RATE", rate.to_string())
        .env("BATON_SOAK_SEED", seed.to_string());
    Ok(command.status().context("run cargo test")?.success())
}
