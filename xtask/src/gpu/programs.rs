//! The programs that a check runs.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
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
    /// `model/cuda-emulator/examples/tested_cubins.rs`, which makes the pack's kernels. `None`: they are packed.
    pub(super) tested_cubins: Option<PathBuf>,
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
    /// Few calls of cargo, because each compiles libraries with the features of its own packages.
    pub(super) fn build(workspace: &Workspace, profile: &str) -> Result<Programs> {
        let of_models = built(
            workspace,
            profile,
            "test --no-run --package baton-cuda-kernels --package baton-model-cuda --package baton-engine \
             --package baton-cuda-emulator --package baton-model --test kernels --test models --test device \
             --example tested_cubins --example gpu_check",
        )?;
        let of_transports = built(
            workspace,
            profile,
            "test --no-run --package baton-transport-shm --package baton-transport-rdma \
             --package baton-transport-nccl --lib",
        )?;
        let program = built(workspace, profile, "build --package baton-cli --bin baton")?;
        let find = |messages: &str, name: &str| {
            executable(messages, name).with_context(|| format!("cargo tells of no program {name}"))
        };
        Ok(Programs {
            kernels: find(&of_models, "kernels")?,
            models: find(&of_models, "models")?,
            engine: find(&of_models, "device")?,
            shm: find(&of_transports, "baton_transport_shm")?,
            rdma: find(&of_transports, "baton_transport_rdma")?,
            nccl: find(&of_transports, "baton_transport_nccl")?,
            figures: find(&of_models, "gpu_check")?,
            baton: find(&program, "baton")?,
            tested_cubins: Some(find(&of_models, "tested_cubins")?),
        })
    }

    /// As [`copy`](Self::copy) has left them.
    pub(super) fn packed(dir: &Path) -> Result<Programs> {
        let [kernels, models, engine, shm, rdma, nccl, figures, baton] = NAMES.map(|name| dir.join(name));
        for program in [&kernels, &models, &engine, &shm, &rdma, &nccl, &figures, &baton] {
            ensure!(
                program.is_file(),
                "{} is not there: `cargo xtask gpu-check --pack` makes an archive with it",
                program.display()
            );
        }
        let tested_cubins = None;
        Ok(Programs { kernels, models, engine, shm, rdma, nccl, figures, baton, tested_cubins })
    }

    /// The same program under all names.
    #[cfg(test)]
    pub(super) fn all_are(program: &Path) -> Programs {
        let path = || program.to_owned();
        Programs {
            kernels: path(),
            models: path(),
            engine: path(),
            shm: path(),
            rdma: path(),
            nccl: path(),
            figures: path(),
            baton: path(),
            tested_cubins: None,
        }
    }

    /// Copies them and this program into a new folder, without debug information.
    pub(super) fn copy(&self, dir: &Path) -> Result<()> {
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
            let stripped = Command::new("strip").arg("--strip-all").arg(&to).status().context("run strip")?;
            ensure!(stripped.success(), "strip {}: {stripped}", to.display());
        }
        Ok(())
    }
}

/// Has cargo build some programs. Returns its messages.
fn built(workspace: &Workspace, profile: &str, arguments: &str) -> Result<String> {
    let mut cargo = workspace.cargo();
    cargo.args(arguments.split_whitespace());
    cargo.args(["--locked", "--profile", profile, "--message-format", "json-render-diagnostics"]);
    let output = cargo.stderr(Stdio::inherit()).output().context("run cargo")?;
    ensure!(output.status.success(), "{}: {}", tools::shown(&cargo), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
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
