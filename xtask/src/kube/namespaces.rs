//! Namespaces of Linux for everything that a run starts: processes, interfaces and mounts end with this process, however it ends.

use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Fails if namespaces cannot be made.
pub(super) fn can_be_made() -> Result<()> {
    ensure!(rustix::process::getuid().is_root(), "it makes network namespaces, which takes root");
    Ok(())
}

/// Runs this program again, with the same arguments and `flag`, as the first process of its own namespaces. Returns whether it
/// succeeded.
pub(super) fn run_again(flag: &str) -> Result<bool> {
    let program = std::env::current_exe().context("find this program")?;
    // If this process dies, setpriv's signal ends unshare, and its --kill-child the first process of the namespaces, with which
    // the kernel ends all others.
    let mut command = Command::new("setpriv");
    command.args([
        "--pdeathsig=KILL",
        "unshare",
        "--kill-child",
        "--fork",
        "--pid",
        "--mount-proc",
        "--mount",
        "--net",
    ]);
    command.arg(program).args(std::env::args_os().skip(1)).arg(flag);
    Ok(command.status().context("run setpriv and unshare (util-linux)")?.success())
}
