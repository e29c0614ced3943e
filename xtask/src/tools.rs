//! Paths of programs that are not part of the toolchain, and how to call one.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// The program of this name on PATH.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| is_program(file))
}

/// helm: the one that `setup` built, else the machine's.
pub(crate) fn helm(root: &Path) -> Option<PathBuf> {
    let own = own_bin(root).join("helm");
    if own.is_file() { Some(own) } else { on_path("helm") }
}

/// Programs that `setup` builds for this checkout.
pub(crate) fn own_bin(root: &Path) -> PathBuf {
    root.join("target/tools/bin")
}

/// Python with the packages that the client tests import.
pub(crate) fn venv(root: &Path) -> PathBuf {
    root.join("target/venv")
}

/// Where `setup` puts aiperf, with a Python of its own: it wants other versions than the clients.
pub(crate) fn aiperf(root: &Path) -> PathBuf {
    root.join("target/aiperf")
}

/// Where `setup` puts the packages that the JavaScript client tests import.
pub(crate) fn node(root: &Path) -> PathBuf {
    root.join("target/node")
}

/// Where `setup` puts NIXL's libraries.
pub(crate) fn nixl(root: &Path) -> PathBuf {
    root.join("target/nixl")
}

/// Where `setup` puts NCCL's library.
pub(crate) fn nccl(root: &Path) -> PathBuf {
    root.join("target/nccl")
}

/// NCCL's library in there.
pub(crate) fn nccl_library(root: &Path) -> PathBuf {
    nccl(root).join("nvidia/nccl/lib/libnccl.so.2")
}

/// NVRTC's library, where `setup` puts it.
pub(crate) fn nvrtc(root: &Path) -> PathBuf {
    root.join("target/nvrtc/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
}

/// The command line as a user types it.
pub(crate) fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy().into_owned()));
    words.join(" ")
}

/// What a program says, without the space around it. `None`: it failed.
pub(crate) fn said(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// What a program says, or the error that it ended with.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("run `{}`", shown(command)))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{}`: {}", shown(command), error.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(unix)]
fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(not(unix))]
fn is_program(file: &Path) -> bool {
    file.is_file()
}
