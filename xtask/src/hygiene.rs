//! Small rules that every crate and every file keeps.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{
    check::Outcome,
    fuzz,
    workspace::{Package, Workspace},
};

const LICENSE: &str = "Apache-2.0";
const EDITION: &str = "2024";
const MAX_FILE_BYTES: u64 = 20 << 20;

/// Packages that are workspaces of their own: fuzz targets are built with other instrumentation, and what the index is compared
/// with brings other versions of our dependencies.
const OWN_WORKSPACES: [&str; 3] = [fuzz::FOLDER, "kv-store/peers", "router/index/peers"];

/// Crates that talk to devices, SIMD, shared memory or the operating system, and may say `unsafe`; and the
/// engine, which calls the model's executor under a contract that no type can state.
const MAY_BE_UNSAFE: [&str; 27] = [
    "baton-bench",
    "baton-cuda",
    "baton-cuda-kernels",
    "baton-cuda-emulator",
    "baton-model",
    "baton-model-cuda",
    "baton-model-sim",
    "baton-model-spec",
    "baton-checkpoint",
    "baton-cpu-attention",
    "baton-cpu-kernels",
    "baton-cpu-simd",
    "baton-cpu-threads",
    "baton-model-cpu",
    "baton-gguf",
    "baton-kv-cache",
    "baton-kv-store",
    "baton-transfer",
    "baton-transfer-conformance",
    "baton-transport-nccl",
    "baton-transport-rdma",
    "baton-transport-shm",
    "baton-transport-tcp",
    "baton-engine",
    "baton-engine-testing",
    "baton-worker",
    "baton-cli",
];

/// Markers of unfinished work, split so that this file does not match itself.
const MARKERS: [&str; 7] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X:"),
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("dbg", "!("),
    concat!("<<<<", "<<< "),
];

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let members = workspace.members();
    let mut findings: Vec<String> = Vec::new();
    for member in &members {
        findings.extend(of_member(*member)?);
    }
    let Some(files) = workspace.files()? else {
        let is_good = findings.is_empty();
        return Ok(if is_good { Outcome::without_files() } else { Outcome::Failed(findings) });
    };
    findings.extend(of_lock_file(workspace, ""));
    for folder in OWN_WORKSPACES {
        findings.extend(of_lock_file(workspace, &format!("{folder}/")));
        let text = std::fs::read_to_string(workspace.root.join(folder).join("Cargo.lock"))?;
        findings.extend(of_own_lock_file(folder, &text, |name| {
            let member = members.iter().find(|member| member.name() == name)?;
            let all = member.dependencies().filter(|(_, is_test)| !is_test).map(|(name, _)| name);
            Some((member.needed().collect(), all.collect()))
        })?);
    }
    for file in &files {
        findings.extend(of_file(workspace, file, &members)?);
    }
    Ok(Outcome::of(findings, format!("{} crates, {} files", members.len(), files.len())))
}

fn of_member(member: Package<'_>) -> Result<Vec<String>> {
    let name = member.name();
    let mut findings = Vec::new();
    let mut want = |holds: bool, what: &str| {
        if !holds {
            findings.push(format!("{name}: {what}"));
        }
    };
    want(member.license() == Some(LICENSE), "license.workspace = true is missing");
    want(member.edition() == Some(EDITION), "edition.workspace = true is missing");
    want(member.rust_version().is_some(), "rust-version.workspace = true is missing");
    want(member.description().is_some(), "description is missing");
    let manifest = std::fs::read_to_string(member.manifest())?;
    let inherits_lints = manifest
        .lines()
        .map(str::trim)
        .skip_while(|line| *line != "[lints]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .any(|line| line.replace(' ', "") == "workspace=true");
    want(inherits_lints, "[lints] workspace = true is missing");
    if !MAY_BE_UNSAFE.contains(&name) {
        for root in ["src/lib.rs", "src/main.rs"] {
            let path = member.folder().join(root);
            if path.exists() {
                let forbids = std::fs::read_to_string(path)?.contains("#![forbid(unsafe_code)]");
                want(forbids, &format!("{root} does not say #![forbid(unsafe_code)]"));
            }
        }
    }
    Ok(findings)
}

/// `folder` is that of the workspace, with a slash at its end.
fn of_lock_file(workspace: &Workspace, folder: &str) -> Option<String> {
    let lock_file = format!("{folder}Cargo.lock");
    if !workspace.git(&["ls-files", "--error-unmatch", &lock_file]) {
        return Some(format!("{lock_file} is not committed"));
    }
    // Cargo updates the lock file by itself, so an outdated one appears as a change.
    let lock_changed = !workspace.git(&["diff", "--quiet", "HEAD", "--", &lock_file]);
    let manifests_unchanged = workspace.git(&["diff", "--quiet", "HEAD", "--", "*Cargo.toml"]);
    (lock_changed && manifests_unchanged)
        .then(|| format!("{lock_file} was out of date with the committed manifests: commit the new one"))
}

#[derive(Deserialize)]
struct LockFile {
    package: Vec<LockedPackage>,
}

#[derive(Deserialize)]
struct LockedPackage {
    name: String,
    /// None: it is a folder here.
    source: Option<String>,
    /// Names, some with their versions.
    #[serde(default)]
    dependencies: Vec<String>,
}

/// Whether the lock file of a workspace of its own has the dependencies of our crates as their manifests do. Most runs never build
/// these workspaces, and to ask cargo would download what they alone need. `manifest`: of a crate, the dependencies that it needs
/// and all that it may have.
fn of_own_lock_file<'a>(
    folder: &str,
    text: &str,
    manifest: impl Fn(&str) -> Option<(BTreeSet<&'a str>, BTreeSet<&'a str>)>,
) -> Result<Vec<String>> {
    let file: LockFile = toml::from_str(text).with_context(|| format!("read {folder}/Cargo.lock"))?;
    let ours = file.package.iter().filter(|package| package.source.is_none());
    let mut findings = Vec::new();
    for LockedPackage { name, dependencies, .. } in ours {
        let Some((needed, all)) = manifest(name) else { continue };
        let names = dependencies.iter().filter_map(|dependency| dependency.split(' ').next());
        let locked: BTreeSet<&str> = names.collect();
        let differs = needed.difference(&locked).chain(locked.difference(&all));
        findings.extend(differs.map(|other| {
            format!("{folder}/Cargo.lock is older than what {name} says of {other}: run cargo metadata --manifest-path {folder}/Cargo.toml")
        }));
    }
    Ok(findings)
}

fn of_file(workspace: &Workspace, file: &str, members: &[Package<'_>]) -> Result<Vec<String>> {
    let path = workspace.root.join(file);
    let mut findings = Vec::new();
    let size_bytes = std::fs::metadata(&path)?.len();
    if size_bytes > MAX_FILE_BYTES {
        findings.push(format!(
            "{file} has {} MB; at most {} are wanted",
            size_bytes >> 20,
            MAX_FILE_BYTES >> 20
        ));
        return Ok(findings);
    }
    if file.ends_with("Cargo.toml") && file != "Cargo.toml" {
        let is_member = members.iter().any(|member| member.manifest() == path);
        if !is_member && !is_own_workspace(file) {
            findings.push(format!("{file} is no member of the workspace"));
        }
    }
    if file.ends_with(".rs") {
        let text = std::fs::read_to_string(&path)?;
        // A file of nothing but tests needs no header: their names say what it holds.
        let only_tests = file.ends_with("tests.rs") || file.contains("/tests/");
        if !text.starts_with("//!") && !only_tests {
            findings.push(format!("{file} does not open with a //! line that says what it holds"));
        }
        for (line_idx, line) in text.lines().enumerate() {
            if let Some(marker) = MARKERS.iter().find(|marker| line.contains(**marker)) {
                findings.push(format!("{file}:{} still says {marker}", line_idx + 1));
            }
        }
    }
    Ok(findings)
}

fn is_own_workspace(manifest: &str) -> bool {
    OWN_WORKSPACES.iter().any(|folder| manifest.strip_prefix(folder) == Some("/Cargo.toml"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_file_of_another_workspace_follows_our_manifests() {
        let text = r#"
            [[package]]
            name = "peers"
            version = "0.1.0"
            dependencies = ["ours"]

            [[package]]
            name = "ours"
            version = "0.1.0"
            dependencies = ["old", "tokio 1.2.3"]

            [[package]]
            name = "tokio"
            version = "1.2.3"
            source = "registry"
        "#;
        let manifest = |name: &str| {
            (name == "ours").then(|| (["new", "tokio"].into(), ["maybe", "new", "tokio"].into()))
        };
        let findings = of_own_lock_file("peers", text, manifest).unwrap();
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings[0].contains("what ours says of new"), "{findings:?}");
        assert!(findings[1].contains("what ours says of old"), "{findings:?}");
        let kept = |name: &str| (name == "ours").then(|| (["old"].into(), ["old", "tokio"].into()));
        assert_eq!(of_own_lock_file("peers", text, kept).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn only_packages_that_are_known_may_be_outside_of_the_workspace() {
        assert!(is_own_workspace("fuzz/Cargo.toml"));
        for manifest in ["Cargo.toml", "fuzz/other/Cargo.toml", "fuzzy/Cargo.toml", "tools/fuzz/Cargo.toml"] {
            assert!(!is_own_workspace(manifest), "{manifest}");
        }
    }
}
