//! The programs that a check runs.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{tools, workspace::Workspace};

/// The paths of the programs.
pub(super) struct Programs {
    /// `model/cuda-kernels/tests/kernels/`
    pub(super) kernels: PathBuf,
    /// `model/cuda/tests/models/`
    pub(super) models: PathBuf,
    /// `engine/tests/device.rs`
    pub(super) engine: PathBuf,
    /// Tests of `baton-transport-shm`.
    pub(super) shm: PathBuf,
    /// Tests of `baton-transport-rdma`.
    pub(super) rdma: PathBuf,
    /// Tests of `baton-transport-nccl`.
    pub(super) nccl: PathBuf,
    /// `model/examples/gpu_check.rs`
    pub(super) figures: PathBuf,
    pub(super) baton: PathBuf,
}

/// The names of the packed programs, in the same order.
const NAMES: [&str; 8] = [
    "kernel_tests",
    "model_tests",
    "engine_tests",
    "shm_tests",
    "rdma_tests",
    "nccl_tests",
    "gpu_check",
    "baton",
];

impl Programs {
    pub(super) fn build(workspace: &Workspace, profile: &str) -> Result<Programs> {
        let of = |arguments: &[&str], name: &str| built(workspace, profile, arguments, name);
        Ok(Programs {
            kernels: of(
                &["test", "--no-run", "--package", "baton-cuda-kernels", "--test", "kernels"],
                "kernels",
            )?,
            models: of(&["test", "--no-run", "--package", "baton-model-cuda", "--test", "models"], "models")?,
            engine: of(&["test", "--no-run", "--package", "baton-engine", "--test", "device"], "device")?,
            shm: of(
                &["test", "--no-run", "--package", "baton-transport-shm", "--lib"],
                "baton_transport_shm",
            )?,
            rdma: of(
                &["test", "--no-run", "--package", "baton-transport-rdma", "--lib"],
                "baton_transport_rdma",
            )?,
            nccl: of(
                &["test", "--no-run", "--package", "baton-transport-nccl", "--lib"],
                "baton_transport_nccl",
            )?,
            figures: of(&["build", "--package", "baton-model", "--example", "gpu_check"], "gpu_check")?,
            baton: of(&["build", "--package", "baton-cli", "--bin", "baton"], "baton")?,
        })
    }

    /// As [`pack`](Self::pack) has left them.
    pub(super) fn packed(dir: &Path) -> Result<Programs> {
        let dir = dir.canonicalize().with_context(|| format!("look into {}", dir.display()))?;
        let [kernels, models, engine, shm, rdma, nccl, figures, baton] = NAMES.map(|name| dir.join(name));
        for program in [&kernels, &models, &engine, &shm, &rdma, &nccl, &figures, &baton] {
            ensure!(
                program.is_file(),
                "{} is not there: `cargo xtask gpu-check --pack` makes it",
                program.display()
            );
        }
        Ok(Programs { kernels, models, engine, shm, rdma, nccl, figures, baton })
    }

    /// Copies them and this program, without debug information.
    pub(super) fn pack(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        let this = std::env::current_exe().context("find this program")?;
        let programs = [
            &self.kernels,
            &self.models,
            &self.engine,
            &self.shm,
            &self.rdma,
            &self.nccl,
            &self.figures,
            &self.baton,
        ];
        for (from, name) in programs.into_iter().zip(NAMES).chain([(&this, "xtask")]) {
            let to = dir.join(name);
            std::fs::copy(from, &to).with_context(|| format!("copy {}", from.display()))?;
            // If stripping fails, the programs are only larger.
            let _ = Command::new("strip").arg(&to).status();
            println!("{}: {} MB", to.display(), std::fs::metadata(&to)?.len() / 1_000_000);
        }
        Ok(())
    }
}

/// Has cargo build one program, and finds it.
fn built(workspace: &Workspace, profile: &str, arguments: &[&str], name: &str) -> Result<PathBuf> {
    let mut cargo = workspace.cargo();
    let (first, rest) = arguments.split_first().context("a command")?;
    cargo.arg(first).args(["--locked", "--profile", profile, "--message-format", "json-render-diagnostics"]);
    let output = cargo.args(rest).stderr(Stdio::inherit()).output().context("run cargo")?;
    if !output.status.success() {
        bail!("{}: {}", tools::shown(&cargo), output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    executable(&text, name).with_context(|| format!("cargo tells of no program {name}"))
}

/// The program of that name among cargo's messages.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"baton"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"gpu_check"},"executable":"/t/gpu_check"}
not json
{"reason":"compiler-artifact","target":{"name":"baton"},"executable":"/t/baton"}"#;
        assert_eq!(executable(messages, "baton"), Some("/t/baton".into()));
        assert_eq!(executable(messages, "tests"), None);
    }
}
