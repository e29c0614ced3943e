//! The workspace as cargo and git see it.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The root folder and what `cargo metadata` says about it.
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    metadata: Value,
}

impl Workspace {
    pub(crate) fn load() -> Result<Workspace> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask/ is in the root")?;
        // Cargo has just built this program from the lock file, so --locked holds unless it changed since.
        Workspace::load_with(root, &["--all-features"])
    }

    /// The same with the features that are built, and without what other platforms need.
    pub(crate) fn for_this_platform(&self) -> Result<Workspace> {
        let version = Command::new("rustc").arg("-vV").output().context("run rustc")?;
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let host =
            version.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names its host")?;
        Workspace::load_with(&self.root, &["--filter-platform", host])
    }

    fn load_with(root: &Path, further: &[&str]) -> Result<Workspace> {
        let args = ["metadata", "--format-version", "1", "--locked"];
        let output = cargo(root).args(args).args(further).output().context("run cargo metadata")?;
        if !output.status.success() {
            bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let metadata = serde_json::from_slice(&output.stdout).context("read cargo metadata")?;
        Ok(Workspace { root: root.to_owned(), metadata })
    }

    /// A cargo command that runs in the root.
    pub(crate) fn cargo(&self) -> Command {
        cargo(&self.root)
    }

    /// Where cargo puts what it builds.
    pub(crate) fn target_folder(&self) -> PathBuf {
        PathBuf::from(self.metadata["target_directory"].as_str().unwrap_or("target"))
    }

    /// The workspace's own packages, in the order of their names.
    pub(crate) fn members(&self) -> Vec<Package<'_>> {
        let ids: Vec<&str> = array(&self.metadata["workspace_members"]).filter_map(Value::as_str).collect();
        let mut members: Vec<_> = self.packages().filter(|package| ids.contains(&package.id())).collect();
        members.sort_by_key(|package| package.name());
        members
    }

    /// Every package of the lock file that some member uses.
    pub(crate) fn packages(&self) -> impl Iterator<Item = Package<'_>> {
        array(&self.metadata["packages"]).map(Package)
    }

    /// The packages that this package depends on when it is built, without those of its tests.
    pub(crate) fn build_dependencies(&self, id: &str) -> Vec<&str> {
        let Some(node) = array(&self.metadata["resolve"]["nodes"]).find(|node| node["id"] == id) else {
            return Vec::new();
        };
        array(&node["deps"])
            .filter(|dep| array(&dep["dep_kinds"]).any(|kind| kind["kind"] != "dev"))
            .filter_map(|dep| dep["pkg"].as_str())
            .collect()
    }

    /// Files that git tracks, or would track: relative to the root, sorted.
    /// `None` where there is no git checkout, as in an unpacked archive, or no git. An error where git cannot read the checkout.
    pub(crate) fn files(&self) -> Result<Option<Vec<String>>> {
        let args = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
        let output = match Command::new("git").args(args).current_dir(&self.root).output() {
            Ok(output) => output,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).context("run git"),
        };
        if !output.status.success() {
            // Such as a checkout that another user owns.
            let error = String::from_utf8_lossy(&output.stderr);
            ensure!(!self.root.join(".git").exists(), "git ls-files: {}", error.trim());
            return Ok(None);
        }
        let text = String::from_utf8(output.stdout).context("a file name that is not UTF-8")?;
        let mut files: Vec<String> = text
            .split_terminator('\0')
            .map(str::to_owned)
            // A tracked file may have been deleted and not yet committed.
            .filter(|file| self.root.join(file).exists())
            .collect();
        files.sort();
        files.dedup();
        ensure!(!files.is_empty(), "git lists no files in {}", self.root.display());
        Ok(Some(files))
    }

    /// Whether git exits with success.
    pub(crate) fn git(&self, args: &[&str]) -> bool {
        let output = Command::new("git").args(args).current_dir(&self.root).output();
        output.is_ok_and(|output| output.status.success())
    }
}

/// One package of `cargo metadata`.
#[derive(Clone, Copy)]
pub(crate) struct Package<'a>(&'a Value);

impl<'a> Package<'a> {
    pub(crate) fn id(self) -> &'a str {
        self.0["id"].as_str().expect("cargo gives every package an id")
    }

    pub(crate) fn name(self) -> &'a str {
        self.0["name"].as_str().expect("cargo gives every package a name")
    }

    pub(crate) fn version(self) -> &'a str {
        self.0["version"].as_str().expect("cargo gives every package a version")
    }

    pub(crate) fn license(self) -> Option<&'a str> {
        self.0["license"].as_str()
    }

    /// Where it comes from; `None` for those of the workspace.
    pub(crate) fn source(self) -> Option<&'a str> {
        self.0["source"].as_str()
    }

    pub(crate) fn edition(self) -> Option<&'a str> {
        self.0["edition"].as_str()
    }

    pub(crate) fn rust_version(self) -> Option<&'a str> {
        self.0["rust_version"].as_str()
    }

    pub(crate) fn description(self) -> Option<&'a str> {
        self.0["description"].as_str()
    }

    pub(crate) fn manifest(self) -> PathBuf {
        PathBuf::from(self.0["manifest_path"].as_str().expect("cargo gives every package a manifest"))
    }

    pub(crate) fn folder(self) -> PathBuf {
        self.manifest().parent().expect("a manifest is in a folder").to_owned()
    }

    /// Names of direct dependencies, each with whether only tests use it.
    pub(crate) fn dependencies(self) -> impl Iterator<Item = (&'a str, bool)> {
        array(&self.0["dependencies"]).filter_map(|dep| Some((dep["name"].as_str()?, dep["kind"] == "dev")))
    }

    /// Names of direct dependencies that every build has.
    pub(crate) fn needed(self) -> impl Iterator<Item = &'a str> {
        let is_needed = |dep: &&Value| dep["kind"] != "dev" && dep["optional"] != true;
        array(&self.0["dependencies"]).filter(is_needed).filter_map(|dep| dep["name"].as_str())
    }
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        architecture, check::Outcome, circles, events, hygiene, names, pages, purity, rooms, settings, tools,
        words,
    };

    /// A workspace without packages in a new folder.
    fn workspace(name: &str) -> Workspace {
        let root = std::env::temp_dir().join(format!("baton-xtask-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(&root).expect("the folder of temporary files can be written");
        Workspace { root, metadata: Value::Null }
    }

    #[test]
    fn checks_of_files_are_skipped_without_a_checkout() {
        let archive = workspace("archive");
        let outcomes = [
            ("architecture", architecture::check(&archive)),
            ("circles", circles::check(&archive)),
            ("events", events::check(&archive)),
            ("hygiene", hygiene::check(&archive)),
            ("names", names::check(&archive)),
            ("pages", pages::check(&archive)),
            ("purity", purity::check(&archive)),
            ("rooms", rooms::check(&archive)),
            ("settings", settings::check(&archive)),
            ("words", words::check(&archive)),
        ];
        for (name, outcome) in outcomes {
            assert!(matches!(outcome, Ok(Outcome::Skipped(_))), "{name}");
        }
        std::fs::remove_dir_all(&archive.root).expect("it was made above");
    }

    #[test]
    fn a_checkout_that_git_cannot_read_is_an_error() {
        if tools::on_path("git").is_none() {
            println!("SKIPPED: no git here");
            return;
        }
        let broken = workspace("broken");
        std::fs::write(broken.root.join(".git"), "gitdir: missing\n").expect("the folder was made above");
        let error = broken.files().expect_err("git reads no checkout").to_string();
        assert!(error.contains("git ls-files: "), "{error}");
        assert!(pages::check(&broken).is_err() && rooms::check(&broken).is_err());
        std::fs::remove_dir_all(&broken.root).expect("it was made above");
    }
}
