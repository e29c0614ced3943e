//! The Helm chart: lint, render with every values file, and refuse what the schema forbids.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{check::Outcome, manifests, tools, workspace::Workspace};

pub(crate) const CHART: &str = "helm/baton";
/// One YAML document per supported way to install.
const VALUES: &str = "helm/baton/ci";
/// The file there that changes no value.
const DEFAULT: &str = "default";
/// What holds of the manifests of a file there, and what is wrong otherwise.
type Extension = (&'static str, fn(&str) -> bool, &'static str);
/// Files there of what others add to objects, or of what objects take from their nodes.
const EXTENSIONS: [Extension; 4] = [
    (
        "host-network",
        uses_host_network,
        "workers in the network of their nodes share a port there, or are not admitted to others",
    ),
    (
        "kueue",
        |manifests| manifests::have_label(manifests, "LeaderWorkerSet", "kueue.x-k8s.io/queue-name: serving"),
        "Kueue finds no label of its own on the LeaderWorkerSet",
    ),
    (
        "openshift",
        |manifests| !manifests.contains("runAsUser"),
        "podSecurityContext.runAsUser: null leaves a user",
    ),
    (
        "resource-claims",
        claims_devices,
        "a worker does not use the claims of its pod, or asks for devices in another way, too",
    ),
];
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
    let newer = Newer::new(&workspace.root)?;
    let mut findings = Vec::new();
    for values in &accepted {
        if let Err(message) = helm(&["lint", "--strict", "--quiet", CHART, KUBERNETES, "--values", values]) {
            findings.push(format!("helm lint with {values}: {message}"));
        }
        let manifests = match helm(&["template", "release", CHART, KUBERNETES, "--values", values]) {
            Ok(manifests) => manifests,
            Err(message) => {
                findings.push(format!("helm template with {values}: {message}"));
                continue;
            }
        };
        findings.extend(manifests::findings(&manifests).iter().map(|finding| format!("{finding}: {values}")));
        if name_of(values) == DEFAULT {
            match manifests::router_memory(&manifests) {
                Some((limit, needed)) if limit >= needed => {}
                found => findings.push(format!("{values}: router.resources is too little memory: {found:?}")),
            }
        }
        if let Some((_, holds, finding)) = EXTENSIONS.iter().find(|(name, ..)| *name == name_of(values))
            && !holds(&manifests)
        {
            findings.push(format!("{finding}: {values}"));
        }
        if manifests.matches("kind: Job\n").count() == 1 {
            match fetches_ahead(&helm, values, &manifests) {
                Ok(true) => {}
                Ok(false) => {
                    findings.push(format!("model.fetch.next is not a Job and nothing else: {values}"))
                }
                Err(message) => findings.push(format!("model.fetch.next with {values}: {message}")),
            }
        }
        match helm(&["template", "release", newer.path(), KUBERNETES, "--values", values]) {
            Ok(newer) if manifests::pod_templates(&newer) == manifests::pod_templates(&manifests) => {}
            Ok(_) => findings.push(format!("a release of the chart alone restarts pods: {values}")),
            Err(message) => findings.push(format!("helm template of a newer chart with {values}: {message}")),
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

/// Whether `model.fetch.next` adds a Job and changes no pod, and the Job is the same when its model is the one that is served.
fn fetches_ahead(
    helm: &impl Fn(&[&str]) -> Result<String, String>,
    values: &str,
    manifests: &str,
) -> Result<bool, String> {
    const AHEAD: &str = "model.fetch.next.source=s3://models/next,model.fetch.next.path=/models/next";
    const SERVED: &str = "model.fetch.source=s3://models/next,model.path=/models/next";
    let with = |set| helm(&["template", "release", CHART, KUBERNETES, "--values", values, "--set", set]);
    let before = manifests::pod_templates(manifests);
    let ahead = manifests::pod_templates(&with(AHEAD)?);
    let served = manifests::pod_templates(&with(SERVED)?);
    let added: Vec<&String> = ahead.iter().filter(|template| !before.contains(template)).collect();
    let keeps_all = before.iter().all(|template| ahead.contains(template));
    Ok(keeps_all && ahead.len() == before.len() + 1 && added.len() == 1 && served.contains(added[0]))
}

/// Whether a worker of each role has ports of its own in the network of its node, and policies of other pods admit nodes.
fn uses_host_network(manifests: &str) -> bool {
    let num = |line: &str| manifests.lines().filter(|other| other.trim() == line).count();
    let has_own_ports = |first: u16| {
        num(&format!("- --listen=$(POD_IP):{first}")) == 1
            && (first..first + 3).all(|port| num(&format!("hostPort: {port}")) == 1)
    };
    num("hostNetwork: true") == 2
        && num("dnsPolicy: ClusterFirstWithHostNet") == 2
        && [8090, 8190].into_iter().all(has_own_ports)
        && num("cidr: 10.0.0.0/16") == 3
}

/// Whether pods have claims, their containers use these, and no device is a resource.
fn claims_devices(manifests: &str) -> bool {
    let num = |text: &str| manifests.matches(text).count();
    let names: Vec<&str> = manifests
        .split("            claims:\n")
        .skip(1)
        .flat_map(|claims| claims.lines().map_while(|line| line.strip_prefix("            - name: ")))
        .collect();
    num("      resourceClaims:\n") == 2
        && num("resourceClaimTemplateName: ") == 4
        && names == ["gpus", "nic", "gpu", "nic"]
        && ["nvidia.com/gpu", "rdma/hca", "\"\": "].into_iter().all(|device| num(device) == 0)
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

/// A copy of the chart with another version and nothing else. It is removed with this.
struct Newer {
    folder: PathBuf,
}

impl Newer {
    fn new(root: &Path) -> Result<Newer> {
        let newer =
            Newer { folder: std::env::temp_dir().join(format!("baton-newer-chart-{}", std::process::id())) };
        copy(&root.join(CHART), &newer.folder)?;
        let about = newer.folder.join("Chart.yaml");
        let text = std::fs::read_to_string(&about).context("read Chart.yaml")?;
        let lines = text.lines().map(|line| match line.starts_with("version:") {
            true => "version: 99.0.0",
            false => line,
        });
        std::fs::write(&about, lines.collect::<Vec<_>>().join("\n")).context("write another Chart.yaml")?;
        Ok(newer)
    }

    fn path(&self) -> &str {
        self.folder.to_str().expect("a folder for temporary files has a name in UTF-8")
    }
}

impl Drop for Newer {
    fn drop(&mut self) {
        // It is a copy among temporary files.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("make {}", to.display()))?;
    for entry in std::fs::read_dir(from).with_context(|| format!("list {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target).with_context(|| format!("copy to {}", target.display()))?;
        }
    }
    Ok(())
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
