//! The compiled form of etcd-client's .proto files that tools/protoc/protoc hands to its build script.
//!
//! It must be what protox makes of the very version in Cargo.lock: `verify` compares, `fix` writes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::{check::Outcome, workspace::Workspace};

/// Relative to the crate's proto folder; the ones its build script asks for.
const PROTOS: [&str; 5] = [
    "etcd/api/authpb/auth.proto",
    "etcd/api/etcdserverpb/rpc.proto",
    "etcd/api/mvccpb/kv.proto",
    "etcd/server/etcdserver/api/v3election/v3electionpb/v3election.proto",
    "etcd/server/etcdserver/api/v3lock/v3lockpb/v3lock.proto",
];

const FOLDER: &str = "tools/protoc";

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let (name, expected) = compile(workspace)?;
    let mut findings = Vec::new();
    match std::fs::read(workspace.root.join(FOLDER).join(&name)) {
        Ok(found) if found == expected => {}
        Ok(_) => findings.push(format!("{FOLDER}/{name} is not what the locked etcd-client compiles to")),
        Err(_) => {
            findings.push(format!("{FOLDER}/{name} is missing: the locked etcd-client is another version"))
        }
    }
    for stale in others(&workspace.root.join(FOLDER), &name)? {
        findings.push(format!("{} belongs to no locked version", stale.display()));
    }
    let script = std::fs::read_to_string(workspace.root.join(FOLDER).join("protoc"))?;
    if !script.contains(&name) {
        findings.push(format!("{FOLDER}/protoc does not hand out {name}"));
    }
    if !findings.is_empty() {
        findings.push("`cargo xtask fix` makes the file anew".to_owned());
    }
    Ok(Outcome::of(findings, name))
}

/// Writes the file that `check` expects. Returns whether it changed.
pub(crate) fn write(workspace: &Workspace) -> Result<bool> {
    let (name, bytes) = compile(workspace)?;
    let folder = workspace.root.join(FOLDER);
    let path = folder.join(&name);
    let mut changed = std::fs::read(&path).ok().as_deref() != Some(&bytes);
    if changed {
        std::fs::write(&path, bytes).with_context(|| format!("write {}", path.display()))?;
    }
    let script = folder.join("protoc");
    let mut text = std::fs::read_to_string(&script)?;
    for stale in others(&folder, &name)? {
        let stale_name = stale.file_name().unwrap_or_default().to_string_lossy().into_owned();
        text = text.replace(&stale_name, &name);
        std::fs::write(&script, &text)?;
        std::fs::remove_file(&stale)?;
        changed = true;
    }
    Ok(changed)
}

/// The file's name and its content.
fn compile(workspace: &Workspace) -> Result<(String, Vec<u8>)> {
    let package = workspace
        .packages()
        .find(|package| package.name() == "etcd-client")
        .context("etcd-client is not in Cargo.lock")?;
    let mut compiler = protox::Compiler::new([package.folder().join("proto")])?;
    compiler.include_imports(true).include_source_info(true);
    compiler.open_files(PROTOS).context("compile etcd-client's .proto files")?;
    let name = format!("etcd-client-{}.descriptors", package.version());
    Ok((name, compiler.encode_file_descriptor_set()))
}

/// Descriptors of other versions.
fn others(folder: &Path, name: &str) -> Result<Vec<PathBuf>> {
    let mut others = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_descriptors = path.extension().is_some_and(|extension| extension == "descriptors");
        if is_descriptors && path.file_name().is_none_or(|file| file != name) {
            others.push(path);
        }
    }
    Ok(others)
}
