//! The Helm chart: lint, render with every values file, and refuse what the schema forbids.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{check::Outcome, tools, workspace::Workspace};

pub(crate) const CHART: &str = "helm/baton";
/// One YAML document per supported way to install.
const VALUES: &str = "helm/baton/ci";
/// Values that users start from.
const PRESETS: &str = "helm/baton/presets";
/// Rendered for this Kubernetes: without a cluster to ask, helm assumes an ancient one.
const KUBERNETES: &str = "--kube-version=1.31.0";
/// Mistakes that the schema must catch.
const REFUSED: &str = "helm/baton/ci/refused";
/// Values that do not work together: a template says what to do.
const CONTRADICTORY: &str = "helm/baton/ci/refused-by-templates";

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(helm) = tools::helm(&workspace.root) else {
        return Ok(Outcome::Skipped(
            "no helm here: the chart was not checked; `cargo xtask setup` builds it where Go is installed"
                .to_owned(),
        ));
    };
    let helm = |args: &[&str]| run(&helm, args, &workspace.root);
    let accepted = accepted(&workspace.root)?;
    let refused = yaml_files(&workspace.root, REFUSED)?;
    let contradictory = yaml_files(&workspace.root, CONTRADICTORY)?;
    let mut findings = Vec::new();
    for values in &accepted {
        if let Err(message) = helm(&["lint", "--strict", "--quiet", CHART, KUBERNETES, "--values", values]) {
            findings.push(format!("helm lint with {values}: {message}"));
        }
        match helm(&["template", "release", CHART, KUBERNETES, "--values", values]) {
            Ok(manifests) if !deletes_its_tests(&manifests) => {
                findings.push(format!("with {values} a pod of `helm test` stays when it has succeeded"))
            }
            Ok(manifests) if !keeps_replicas_without_metrics(&manifests) => {
                findings.push(format!("with {values} KEDA takes missing metrics for no load"))
            }
            Ok(manifests) if manifests.contains("restartPolicy: OnFailure") => {
                findings.push(format!("with {values} a pod that failed goes with its log: restartPolicy"))
            }
            Ok(manifests) if has_float(&manifests) => {
                findings.push(format!("with {values} a flag has an integer as 1e+06: use int64"))
            }
            Ok(manifests) if manifests.contains("kind: ") => {}
            Ok(_) => findings.push(format!("helm template with {values} renders nothing")),
            Err(message) => findings.push(format!("helm template with {values}: {message}")),
        }
    }
    for values in &refused {
        match helm(&["template", "release", CHART, KUBERNETES, "--values", values]) {
            Ok(_) => findings.push(format!("the schema lets {values} through")),
            Err(message) if message.contains("schema") => {}
            Err(message) => {
                findings.push(format!("{values} is refused by a template, not the schema: {message}"))
            }
        }
    }
    for values in &contradictory {
        match helm(&["template", "release", CHART, KUBERNETES, "--values", values]) {
            Ok(_) => findings.push(format!("the templates let {values} through")),
            // What `fail` says.
            Err(message) if message.contains("execution error at") => {}
            Err(message) => findings.push(format!("{values} is not refused by a reason: {message}")),
        }
    }
    let num_refused = refused.len() + contradictory.len();
    let looked_at = format!("{} values files rendered, {num_refused} refused", accepted.len());
    Ok(Outcome::of(findings, looked_at))
}

/// Whether a flag has an integer as helm reads it from a values file.
fn has_float(manifests: &str) -> bool {
    manifests.lines().any(|line| line.trim_start().starts_with("- --") && line.contains("e+0"))
}

/// Whether each test has the policy to delete its pod. What a hook makes is no part of the release: uninstalling leaves it.
fn deletes_its_tests(manifests: &str) -> bool {
    let num = |annotation| manifests.matches(annotation).count();
    num("helm.sh/hook: test") == num("helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded")
}

/// Whether each trigger of KEDA fails where Prometheus has no series, and each ScaledObject then keeps its number of replicas.
fn keeps_replicas_without_metrics(manifests: &str) -> bool {
    let num = |text| manifests.matches(text).count();
    num("type: prometheus") == num("ignoreNullValues: \"false\"")
        && num("kind: ScaledObject") == num("behavior: currentReplicas")
}

/// The values files that the chart is installed with, relative to the root.
pub(crate) fn accepted(root: &Path) -> Result<Vec<String>> {
    Ok([yaml_files(root, VALUES)?, yaml_files(root, PRESETS)?].concat())
}

/// The name of a values file, such as "production" for `…/production-values.yaml`.
pub(crate) fn name_of(values: &str) -> &str {
    let file = values.rsplit('/').next().unwrap_or(values);
    file.trim_end_matches(".yaml").trim_end_matches("-values")
}

/// Its output, or its error message in one line.
fn run(helm: &Path, args: &[&str], root: &Path) -> Result<String, String> {
    let output =
        Command::new(helm).args(args).current_dir(root).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let all = [output.stdout, output.stderr].concat();
    let lines: Vec<String> = String::from_utf8_lossy(&all)
        .lines()
        .map(|line| line.trim().to_owned())
        .filter(|line| !line.is_empty())
        .collect();
    Err(lines.join(" | "))
}

/// Relative to the root, sorted.
fn yaml_files(root: &Path, folder: &str) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(root.join(folder)).with_context(|| format!("list {folder}"))?;
    let mut files: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    Ok(files
        .iter()
        .filter_map(|file| Some(format!("{folder}/{}", file.file_name()?.to_string_lossy())))
        .collect())
}
