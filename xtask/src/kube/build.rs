//! The programs of a control plane and the definitions of other projects' resources, through the Go module proxy.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::tools;

const KUBERNETES: &str = "v1.37.2";
const KWOK: &str = "v0.8.0";

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
        let etcd = tools::on_path("etcd").context("etcd is not installed; `cargo xtask setup` does it")?;
        let module = Module { go: &go, place: place.join("kubernetes") };
        let names = ["kube-apiserver", "kube-controller-manager", "kube-scheduler"];
        let bin = place.join(KUBERNETES);
        let mut missing: Vec<&str> = names.into_iter().filter(|name| !bin.join(name).is_file()).collect();
        let kubectl = tools::on_path("kubectl").unwrap_or_else(|| bin.join("kubectl"));
        missing.extend((!kubectl.is_file()).then_some("kubectl"));
        if !missing.is_empty() {
            module.write_kubernetes()?;
            module.build(&bin, &missing)?;
        }
        let kwok_bin = place.join(format!("kwok-{KWOK}"));
        if !kwok_bin.join("kwok").is_file() {
            let package = format!("sigs.k8s.io/kwok/cmd/kwok@{KWOK}");
            run(command(&go).args(["install", "-p=1", "-ldflags=-s -w", &package]).env("GOBIN", &kwok_bin))?;
        }
        let kwok = download(&go, &format!("sigs.k8s.io/kwok@{KWOK}"))?.dir;
        let mut definitions = Vec::new();
        for (module, files) in DEFINITIONS {
            let dir = download(&go, module)?.dir;
            definitions.extend(files.iter().map(|file| dir.join(file)));
        }
        Ok(Programs {
            etcd,
            apiserver: bin.join(names[0]),
            controller_manager: bin.join(names[1]),
            scheduler: bin.join(names[2]),
            kwok: kwok_bin.join("kwok"),
            stages: STAGES.iter().map(|stage| kwok.join(stage)).collect(),
            kubectl,
            definitions,
        })
    }
}

impl fmt::Display for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kubernetes {KUBERNETES}, kwok {KWOK}, {}", self.etcd.display())
    }
}

/// A module that depends on Kubernetes. `go install` refuses Kubernetes' own module, as its `replace` lines name folders.
struct Module<'a> {
    go: &'a Path,
    place: PathBuf,
}

impl Module<'_> {
    fn write_kubernetes(&self) -> Result<()> {
        let kubernetes = download(self.go, &format!("k8s.io/kubernetes@{KUBERNETES}"))?;
        let text = std::fs::read_to_string(&kubernetes.go_mod).context("read Kubernetes' go.mod")?;
        std::fs::create_dir_all(&self.place)?;
        std::fs::write(self.place.join("go.mod"), wrapper(&text, KUBERNETES)?)?;
        Ok(())
    }

    /// Builds commands of Kubernetes into `bin`, one package at a time: the machine may have little memory.
    fn build(&self, bin: &Path, names: &[&str]) -> Result<()> {
        let (_, minor_and_patch) = KUBERNETES.split_once('.').context("a version")?;
        let minor = minor_and_patch.split('.').next().context("a version")?;
        let version = "k8s.io/component-base/version";
        let flags = format!(
            "-ldflags=-s -w -X {version}.gitVersion={KUBERNETES} -X {version}.gitMajor=1 -X {version}.gitMinor={minor}"
        );
        for name in names {
            println!("kube: building {name} {KUBERNETES}; this takes minutes, once");
            let package = format!("k8s.io/kubernetes/cmd/{name}");
            let mut go = command(self.go);
            go.current_dir(&self.place).args(["build", "-mod=mod", "-p=1", "-trimpath", &flags, "-o"]);
            run(go.arg(bin.join(name)).arg(package))?;
        }
        Ok(())
    }
}

/// The text of a `go.mod` with Kubernetes' own requirements, its folders replaced by the published modules.
fn wrapper(kubernetes: &str, version: &str) -> Result<String> {
    let published = version.strip_prefix("v1.").context("Kubernetes' version is v1.MINOR.PATCH")?;
    let go = kubernetes.lines().find(|line| line.starts_with("go ")).context("no go line in go.mod")?;
    let mut text =
        format!("module baton.invalid/kubernetes\n\n{go}\n\nrequire k8s.io/kubernetes {version}\n\n");
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
        let text = wrapper(kubernetes, "v1.35.3").unwrap();
        assert!(text.contains("\ngo 1.25.0\n"), "{text}");
        assert!(text.contains("require k8s.io/kubernetes v1.35.3\n"), "{text}");
        assert!(text.ends_with(
            "replace k8s.io/api => k8s.io/api v0.35.3\nreplace k8s.io/kms => k8s.io/kms v0.35.3\n"
        ));
        assert!(wrapper("module x\n\ngo 1.25.0\n", "v1.35.3").is_err());
        assert!(wrapper(kubernetes, "1.35").is_err());
    }
}
