//! Whether each picture in `docs/images` is what its text source gives.
//!
//! `draw.py` compares them; this file only runs it. It needs Python and its standard library.

use std::{
    io::ErrorKind,
    path::Path,
    process::{Command, Output},
};

use anyhow::{Context, Result};

use crate::{check::Outcome, workspace::Workspace};

const PYTHON: &str = "python3";
const DRAW: &str = "docs/images/draw.py";

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    compare(PYTHON, &workspace.root.join(DRAW), &workspace.root)
}

fn compare(python: &str, draw: &Path, root: &Path) -> Result<Outcome> {
    match Command::new(python).arg(draw).arg("--check").current_dir(root).output() {
        Ok(output) => Ok(Outcome::of(findings(&output), "docs/images")),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Ok(Outcome::Skipped(format!("no {python} here: pictures were not compared with their sources")))
        }
        Err(error) => Err(error).with_context(|| format!("cannot run {python} {DRAW} --check")),
    }
}

/// The lines that it printed, if it failed.
fn findings(output: &Output) -> Vec<String> {
    if output.status.success() {
        return Vec::new();
    }
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let mut findings: Vec<String> = String::from_utf8_lossy(&text).lines().map(str::to_owned).collect();
    if findings.is_empty() {
        findings.push(format!("{DRAW} --check: {}", output.status));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(python: &str, draw: &str) -> Outcome {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is in the root");
        let script =
            std::env::temp_dir().join(format!("baton-pictures-{}-{}", std::process::id(), draw.len()));
        std::fs::write(&script, draw).expect("the folder of temporary files can be written");
        let outcome = compare(python, &script, root).expect("it runs");
        std::fs::remove_file(&script).expect("it was written above");
        outcome
    }

    #[test]
    fn a_picture_that_differs_from_its_source_fails() {
        // `sh` runs these in place of the script.
        let Outcome::Failed(findings) = run("sh", "echo rooms.svg differs; exit 1") else { panic!("passed") };
        assert_eq!(findings, ["rooms.svg differs"]);
        let Outcome::Failed(findings) = run("sh", "exit 3") else { panic!("passed") };
        assert_eq!(findings.len(), 1, "{findings:?}");
    }

    #[test]
    fn equal_pictures_pass() {
        assert!(matches!(run("sh", "test \"$1\" = --check"), Outcome::Passed(_)));
    }

    #[test]
    fn without_python_it_says_so() {
        let Outcome::Skipped(why) = run("no-python-of-this-name", "") else { panic!("ran") };
        assert!(why.contains("no-python-of-this-name"), "{why}");
    }
}
