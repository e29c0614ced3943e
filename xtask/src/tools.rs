//! Paths of programs that are not part of the toolchain, and how to call one.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// The version of helm that `setup` builds.
pub(crate) const HELM_VERSION: &str = "v3.22.0";

/// The program of this name on PATH.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| is_program(file))
}

/// helm: the one that `setup` built, else the machine's.
pub(crate) fn helm(root: &Path) -> Option<PathBuf> {
    let own = own(root, "helm", HELM_VERSION).join("bin/helm");
    if own.is_file() { Some(own) } else { on_path("helm") }
}

/// Where a program is that is built for this checkout. Each version has a folder of its own, so a new version is built anew.
pub(crate) fn own(root: &Path, name: &str, version: &str) -> PathBuf {
    root.join(format!("target/tools/{name}-{version}"))
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

/// Prints a command of `setup`, then runs it.
pub(crate) fn run_shown(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    println!("setup: {shown}");
    let status = command.status().with_context(|| format!("run {shown}"))?;
    ensure!(status.success(), "`{shown}` failed with {status}");
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_helm_of_another_version_is_not_used() {
        let root = std::env::temp_dir().join(format!("baton-xtask-helm-{}", std::process::id()));
        let build = |version: &str| {
            let folder = own(&root, "helm", version).join("bin");
            std::fs::create_dir_all(&folder).expect("the folder of temporary files can be written");
            std::fs::write(folder.join("helm"), "").expect("the folder was made above");
            Some(folder.join("helm"))
        };
        let old = build("v3.0.0");
        assert_ne!(helm(&root), old);
        let wanted = build(HELM_VERSION);
        assert_eq!(helm(&root), wanted);
        std::fs::remove_dir_all(&root).expect("it was made above");
    }
}
