//! The programs of a control plane and the definitions of other projects' resources, through the Go module proxy.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::tools;

/// Of the minor version whose libraries kwok uses, so that both take one build.
pub(super) const KUBERNETES: &str = "v1.36.3";
const KWOK: &str = "v0.8.0";

/// The programs and the packages that they are built from. etcd has the version whose client Kubernetes uses: with Debian's 3.4
/// the API server ends some watches at once ("the required storage feature RequestWatchProgress is disabled"), kwok's among
/// them, which then sees pods minutes late.
const PACKAGES: [(&str, &str); 6] = [
    ("etcd", "go.etcd.io/etcd/server/v3"),
    ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    ("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    ("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    ("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    ("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
];

/// What kwok does with nodes and pods, in its module: nodes are ready, pods run at once, those of Jobs complete.
const STAGES: [&str; 5] = [
    "kustomize/stage/node/fast/node-initialize.yaml",
    "kustomize/stage/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "kustomize/stage/pod/fast/pod-ready.yaml",
    "kustomize/stage/pod/fast/pod-complete.yaml",
    "kustomize/stage/pod/fast/pod-delete.yaml",
];

/// Modules with definitions of resources that the chart may make, and the files in each.
const DEFINITIONS: [(&str, &[&str]); 5] = [
    (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        &[
            "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
            "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        ],
    ),
    (
        "sigs.k8s.io/gateway-api@v1.6.3",
        &[
            "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
            "config/crd/standard/gateway.networking.k8s.io_grpcroutes.yaml",
        ],
    ),
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.2.1",
        &["config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"],
    ),
    ("github.com/kedacore/keda/v2@v2.21.0", &["config/crd/bases/keda.sh_scaledobjects.yaml"]),
    ("sigs.k8s.io/lws@v0.7.0", &["config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"]),
];

/// Paths of what was built.
pub(super) struct Programs {
    pub(super) etcd: PathBuf,
    pub(super) apiserver: PathBuf,
    pub(super) controller_manager: PathBuf,
    pub(super) scheduler: PathBuf,
    pub(super) kwok: PathBuf,
    /// Files of kwok's stages.
    pub(super) stages: Vec<PathBuf>,
    pub(super) kubectl: PathBuf,
    /// Files of CustomResourceDefinitions.
    pub(super) definitions: Vec<PathBuf>,
}

impl Programs {
    /// Builds what is missing under `place`. Takes long the first time, and needs Go.
    pub(super) fn build(place: &Path) -> Result<Programs> {
        let go = tools::on_path("go").context("Go is not installed (https://go.dev/dl, 1.26 or newer)")?;
        let bin = place.join(format!("{KUBERNETES}-kwok-{KWOK}"));
        let missing: Vec<_> = PACKAGES.into_iter().filter(|(name, _)| !bin.join(name).is_file()).collect();
        if !missing.is_empty() {
            let module = Module { go: &go, place: place.join("kubernetes") };
            module.write()?;
            module.build(&bin, &missing)?;
        }
        let kwok = download(&go, &format!("sigs.k8s.io/kwok@{KWOK}"))?.dir;
        let mut definitions = Vec::new();
        for (module, files) in DEFINITIONS {
            let dir = download(&go, module)?.dir;
            definitions.extend(files.iter().map(|file| dir.join(file)));
        }
        Ok(Programs {
            etcd: bin.join("etcd"),
            apiserver: bin.join("kube-apiserver"),
            controller_manager: bin.join("kube-controller-manager"),
            scheduler: bin.join("kube-scheduler"),
            kwok: bin.join("kwok"),
            stages: STAGES.iter().map(|stage| kwok.join(stage)).collect(),
            kubectl: bin.join("kubectl"),
            definitions,
        })
    }
}

impl fmt::Display for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kubernetes {KUBERNETES}, kwok {KWOK} in {}", self.etcd.with_file_name("").display())
    }
}

/// A module that depends on Kubernetes and kwok, so that all have the same libraries, compiled once. `go install` refuses
/// Kubernetes' own module, as its `replace` lines name folders.
struct Module<'a> {
    go: &'a Path,
    place: PathBuf,
}

impl Module<'_> {
    fn write(&self) -> Result<()> {
        let kubernetes = download(self.go, &format!("k8s.io/kubernetes@{KUBERNETES}"))?;
        let text = std::fs::read_to_string(&kubernetes.go_mod).context("read Kubernetes' go.mod")?;
        std::fs::create_dir_all(&self.place)?;
        std::fs::write(self.place.join("go.mod"), wrapper(&text, KUBERNETES, KWOK)?)?;
        Ok(())
    }

    /// Builds programs into `bin`, one package at a time: the machine may have little memory.
    fn build(&self, bin: &Path, programs: &[(&str, &str)]) -> Result<()> {
        let (_, minor_and_patch) = KUBERNETES.split_once('.').context("a version")?;
        let minor = minor_and_patch.split('.').next().context("a version")?;
        let version = "k8s.io/component-base/version";
        let flags = format!(
            "-ldflags=-s -w -X {version}.gitVersion={KUBERNETES} -X {version}.gitMajor=1 -X {version}.gitMinor={minor}"
        );
        for (name, package) in programs {
            println!("kube: building {name}; this takes minutes, once");
            let mut go = command(self.go);
            go.current_dir(&self.place).args(["build", "-mod=mod", "-p=1", "-trimpath", &flags, "-o"]);
            run(go.arg(bin.join(name)).arg(package))?;
        }
        Ok(())
    }
}

/// The text of a `go.mod` with Kubernetes' own requirements, its folders replaced by the published modules, and kwok.
fn wrapper(kubernetes: &str, version: &str, kwok: &str) -> Result<String> {
    let published = version.strip_prefix("v1.").context("Kubernetes' version is v1.MINOR.PATCH")?;
    let go = kubernetes.lines().find(|line| line.starts_with("go ")).context("no go line in go.mod")?;
    let mut text = format!(
        "module baton.invalid/kubernetes\n\n{go}\n\nrequire k8s.io/kubernetes {version}\nrequire sigs.k8s.io/kwok {kwok}\n\n"
    );
    let mut num_replaced = 0;
    for line in kubernetes.lines() {
        let Some((module, _)) = line.trim().split_once(" => ./staging/") else { continue };
        let module = module.trim_start_matches("replace ").trim();
        text += &format!("replace {module} => {module} v0.{published}\n");
        num_replaced += 1;
    }
    ensure!(num_replaced > 0, "Kubernetes' go.mod replaces no module by a folder");
    Ok(text)
}

/// A module in Go's cache.
struct Downloaded {
    dir: PathBuf,
    go_mod: PathBuf,
}

fn download(go: &Path, module: &str) -> Result<Downloaded> {
    let output = command(go).args(["mod", "download", "-json", module]).output().context("run go")?;
    let said: Value = serde_json::from_slice(&output.stdout).with_context(|| format!("download {module}"))?;
    let path = |name: &str| match said[name].as_str() {
        Some(path) => Ok(PathBuf::from(path)),
        None => bail!("download {module}: {}", said["Error"].as_str().unwrap_or("no path")),
    };
    Ok(Downloaded { dir: path("Dir")?, go_mod: path("GoMod")? })
}

/// go, at low priority.
fn command(go: &Path) -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "15"]).arg(go).env("GOFLAGS", "-buildvcs=false").env("CGO_ENABLED", "0");
    command
}

fn run(command: &mut Command) -> Result<()> {
    let shown = tools::shown(command);
    let status = command.status().with_context(|| format!("run {shown}"))?;
    ensure!(status.success(), "`{shown}` failed with {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_become_published_modules() {
        let kubernetes = "module k8s.io/kubernetes\n\ngo 1.25.0\n\nrequire (\n\tk8s.io/api v0.0.0\n)\n\nreplace (\n\t\
                          k8s.io/api => ./staging/src/k8s.io/api\n\tk8s.io/kms => ./staging/src/k8s.io/kms\n)\n";
        let text = wrapper(kubernetes, "v1.35.3", "v0.8.0").unwrap();
        assert!(text.contains("\ngo 1.25.0\n"), "{text}");
        assert!(
            text.contains("require k8s.io/kubernetes v1.35.3\nrequire sigs.k8s.io/kwok v0.8.0\n"),
            "{text}"
        );
        assert!(text.ends_with(
            "replace k8s.io/api => k8s.io/api v0.35.3\nreplace k8s.io/kms => k8s.io/kms v0.35.3\n"
        ));
        assert!(wrapper("module x\n\ngo 1.25.0\n", "v1.35.3", "v0.8.0").is_err());
        assert!(wrapper(kubernetes, "1.35", "v0.8.0").is_err());
    }
}
