//! What a node and its pods share.

use std::{
    path::PathBuf,
    process::Command,
    sync::{Mutex, atomic::AtomicBool},
};

use anyhow::{Context, Result, ensure};

use super::api::Api;

/// The node's address for its pods.
pub(super) const GATEWAY: &str = "169.254.1.1";

pub(super) struct Shared {
    pub(super) api: Api,
    pub(super) place: PathBuf,
    /// Folder with baton and etcd.
    pub(super) programs: PathBuf,
    pub(super) ends: AtomicBool,
    pub(super) complaints: Mutex<Vec<String>>,
}

impl Shared {
    /// Keeps an error as a complaint.
    pub(super) fn note(&self, of: &str, outcome: Result<()>) {
        if let Err(error) = outcome {
            let mut complaints = self.complaints.lock().expect("no thread panics while it holds it");
            complaints.push(format!("{of}: {error:#}"));
        }
    }
}

/// Runs a script of the shell with arguments.
pub(super) fn script(text: &str, arguments: &[&str]) -> Result<()> {
    let mut sh = Command::new("sh");
    let output = sh.args(["-euc", text, "sh"]).args(arguments).output().context("run sh")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}", arguments.first().unwrap_or(&""), said.trim());
    Ok(())
}
