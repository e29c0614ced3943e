//! The environment of a GPU check: folder, programs, device and time limit.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use super::{
    libraries,
    programs::Programs,
    steps::{self, Ended},
};

/// What every step of the check needs.
pub(super) struct Bench {
    pub(super) root: PathBuf,
    pub(super) programs: Programs,
    /// "cuda:0"
    pub(super) device: String,
    pub(super) logs: PathBuf,
    pub(super) library_path: std::ffi::OsString,
    /// The end of the time limit.
    pub(super) end: Instant,
}

impl Bench {
    pub(super) fn new(root: PathBuf, programs: Programs, device: u32, end: Instant) -> Result<Bench> {
        let logs = root.join("target/gpu-check");
        std::fs::create_dir_all(&logs).context("make target/gpu-check")?;
        let library_path = libraries::path(&root)?;
        let device = format!("cuda:{device}");
        Ok(Bench { root, programs, device, logs, library_path, end })
    }

    /// A command with the environment for libraries, the device and the tests' files.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(&self.root)
            .env("BATON_REPOSITORY", &self.root)
            .env("BATON_KERNELS_ON", &self.device)
            .env("LD_LIBRARY_PATH", &self.library_path);
        command
    }

    /// Runs a command to its end, at most this many seconds, and at most to the time limit.
    pub(super) fn finish(&self, name: &str, seconds: u64, command: &mut Command) -> Result<Ended> {
        let left = self.end.saturating_duration_since(Instant::now());
        let limit = left.min(Duration::from_secs(seconds));
        steps::finish(command, &self.logs.join(format!("{name}.log")), limit)
    }
}
