//! Lives of releases: installed, upgraded, rolled back, uninstalled.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{
    build::KUBERNETES,
    cluster::{Cluster, until_nothing},
    nodes, ports,
};
use crate::chart::{self, CHART};

/// kwok starts pods within a second; what takes longer waits for something that does not come.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// A capability that the Pod Security levels baseline and restricted refuse.
const REFUSED_CAPABILITY: &str = "IPC_LOCK";
/// A volume that they refuse, too: a tier of KV that the workers of a node share.
const HOST_PATH: &str = "hostPath:";
/// The network of a node, which they refuse, too.
const HOST_NETWORK: &str = "hostNetwork: true";

/// Values that change every pod.
const CHANGE: [&str; 4] = ["--set", "image.tag=other", "--set", "log.filter=debug"];

/// Installs a release with a values file, changes it, takes the change back, removes it. Returns what was seen.
pub(super) fn live(cluster: &Cluster, values: &str) -> Result<String> {
    let version = format!("--kube-version={KUBERNETES}");
    let manifests = cluster.helm(&["template", "release", CHART, &version, "--values", values])?;
    let is_refused =
        [REFUSED_CAPABILITY, HOST_PATH, HOST_NETWORK].iter().any(|part| manifests.contains(part));
    let level = if is_refused { "privileged" } else { "restricted" };
    let namespace = format!("baton-{}", chart::name_of(values));
    nodes::add_namespace(cluster, &namespace, level)?;
    let release = Release::simulated(cluster, &namespace, "llm");

    release.helm(&["install"], &["--values", values])?;
    let first = release.settle()?;
    release.policies_fit()?;
    release.helm(&["upgrade"], &[&["--values", values][..], &CHANGE].concat())?;
    release.settle()?;
    ensure!(
        release.images()?.iter().all(|image| image.ends_with(":other")),
        "the upgrade did not reach every pod"
    );
    release.rollback()?;
    release.settle()?;
    ensure!(
        !release.images()?.iter().any(|image| image.ends_with(":other")),
        "the rollback did not reach every pod"
    );
    release.uninstall()?;
    Ok(format!("{first}; upgraded, rolled back, uninstalled; {level}"))
}

/// Two releases side by side do not touch each other.
pub(super) fn share_a_namespace(cluster: &Cluster) -> Result<String> {
    let namespace = "baton-shared";
    nodes::add_namespace(cluster, namespace, "restricted")?;
    let [one, two] = ["one", "two"].map(|name| Release::simulated(cluster, namespace, name));
    for release in [&one, &two] {
        release.helm(&["install"], &[])?;
    }
    for release in [&one, &two] {
        release.settle()?;
        release.policies_fit()?;
    }
    one.uninstall()?;
    let left = two.settle()?;
    two.uninstall()?;
    Ok(format!("one was uninstalled beside two, which kept {left}"))
}

/// Workers whose number follows the load from an upgrade on are as many as before, after the next upgrade, too.
pub(super) fn keep_their_workers_when_they_scale(cluster: &Cluster) -> Result<String> {
    let namespace = "baton-scaled";
    nodes::add_namespace(cluster, namespace, "restricted")?;
    let release = Release::simulated(cluster, namespace, "llm");
    release.helm(&["install"], &["--set", "decode.replicas=3"])?;
    release.settle()?;
    // Without metrics the autoscaler changes nothing.
    let scaled = ["--set", "decode.autoscaling.mode=hpa"];
    for more in [&[][..], &CHANGE[..]] {
        release.helm(&["upgrade"], &[&scaled[..], more].concat())?;
        let decode =
            cluster.get(namespace, "deployments", &["--selector=app.kubernetes.io/component=decode"])?;
        let num = &decode.first().context("there is no deployment of decode workers")?["spec"]["replicas"];
        ensure!(*num == 3, "an upgrade left {num} of 3 decode workers");
    }
    release.settle()?;
    release.uninstall()?;
    Ok("autoscaling was turned on, and 3 decode workers stayed".to_owned())
}

/// A namespace of level restricted refuses workers that lock memory as root, as the chart's notes say.
pub(super) fn are_refused_where_restricted(cluster: &Cluster) -> Result<String> {
    let namespace = "baton-refused";
    nodes::add_namespace(cluster, namespace, "restricted")?;
    let release = Release::simulated(cluster, namespace, "llm");
    release.helm(&["install"], &["--set", "rdma.enabled=true"])?;
    let mut refusal = String::new();
    until_nothing(SETTLE_TIMEOUT, || {
        for set in
            cluster.get(namespace, "replicasets", &["--selector=app.kubernetes.io/component=decode"])?
        {
            for condition in set["status"]["conditions"].as_array().into_iter().flatten() {
                let message = condition["message"].as_str().unwrap_or_default();
                if condition["type"] == "ReplicaFailure" && message.contains(REFUSED_CAPABILITY) {
                    refusal =
                        message.rsplit("violates PodSecurity").next().unwrap_or(message).trim().to_owned();
                    return Ok(Vec::new());
                }
            }
        }
        Ok(vec!["no pod was refused".to_owned()])
    })?;
    release.uninstall()?;
    Ok(format!("rdma.lockMemory was refused: {refusal}"))
}

pub(super) struct Release<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) namespace: &'a str,
    pub(super) name: &'a str,
    /// How long its pods may take to be as many as they should be, and ready.
    pub(super) settle_timeout: Duration,
}

impl<'a> Release<'a> {
    /// On simulated nodes.
    fn simulated(cluster: &'a Cluster, namespace: &'a str, name: &'a str) -> Release<'a> {
        Release { cluster, namespace, name, settle_timeout: SETTLE_TIMEOUT }
    }

    pub(super) fn helm(&self, verb: &[&str], more: &[&str]) -> Result<()> {
        let args = [verb, &[self.name, CHART, "--namespace", self.namespace], more].concat();
        self.cluster.helm(&args).map(drop)
    }

    fn rollback(&self) -> Result<()> {
        self.cluster.helm(&["rollback", self.name, "1", "--namespace", self.namespace]).map(drop)
    }

    /// Waits until nothing of the release is left but claims, which hold data.
    pub(super) fn uninstall(&self) -> Result<()> {
        self.cluster.helm(&["uninstall", self.name, "--namespace", self.namespace])?;
        let kinds =
            self.cluster.kubectl(&["api-resources", "--namespaced", "--verbs=list", "--output=name"])?;
        let kinds: Vec<&str> = kinds
            .lines()
            .filter(|kind| !kind.starts_with("events") && *kind != "persistentvolumeclaims")
            .collect();
        let selector = self.selector();
        until_nothing(self.settle_timeout, || {
            let args = ["get", &kinds.join(","), "--namespace", self.namespace, "--output=name", &selector];
            Ok(self.cluster.kubectl(&args)?.lines().map(|name| format!("{name} is left")).collect())
        })
    }

    /// Waits until every workload has the pods that it wants. Returns their number.
    pub(super) fn settle(&self) -> Result<String> {
        until_nothing(self.settle_timeout, || {
            let kinds = "deployments,statefulsets,jobs";
            let workloads = self.cluster.get(self.namespace, kinds, &[&self.selector()])?;
            let unsettled: Vec<String> = workloads.iter().filter_map(unsettled).collect();
            let why = if unsettled.is_empty() { Vec::new() } else { self.pending()? };
            Ok([unsettled, why].concat())
        })?;
        let pods = self.pods()?;
        ensure!(!pods.is_empty(), "the release has no pod");
        Ok(format!("{} pods", pods.len()))
    }

    fn policies_fit(&self) -> Result<()> {
        let policies = self.cluster.get(self.namespace, "networkpolicies", &[])?;
        match ports::differences(&self.pods()?, &policies) {
            differences if differences.is_empty() => Ok(()),
            differences => bail!("{}", differences.join("; ")),
        }
    }

    /// Images of Baton's containers.
    fn images(&self) -> Result<Vec<String>> {
        let pods = self.pods()?;
        let of_baton = pods.iter().filter(|pod| {
            let component = pod["metadata"]["labels"]["app.kubernetes.io/component"].as_str();
            matches!(component, Some("router" | "prefill" | "decode"))
        });
        let containers = of_baton.flat_map(|pod| pod["spec"]["containers"].as_array().into_iter().flatten());
        Ok(containers.filter_map(|container| Some(container["image"].as_str()?.to_owned())).collect())
    }

    /// Pods that run and stay.
    pub(super) fn pods(&self) -> Result<Vec<Value>> {
        let mut pods = self.cluster.get(self.namespace, "pods", &[&self.selector()])?;
        pods.retain(|pod| {
            pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null()
        });
        Ok(pods)
    }

    /// Why pods do not run.
    fn pending(&self) -> Result<Vec<String>> {
        let pods = self.cluster.get(self.namespace, "pods", &["--field-selector=status.phase=Pending"])?;
        let reasons =
            pods.iter().flat_map(|pod| pod["status"]["conditions"].as_array().into_iter().flatten());
        Ok(reasons.filter_map(|condition| Some(condition["message"].as_str()?.to_owned())).collect())
    }

    fn selector(&self) -> String {
        format!("--selector=app.kubernetes.io/instance={}", self.name)
    }
}

/// What a Deployment, StatefulSet or Job still lacks.
fn unsettled(workload: &Value) -> Option<String> {
    let (spec, status) = (&workload["spec"], &workload["status"]);
    let count = |value: &Value, default| value.as_u64().unwrap_or(default);
    let name = format!("{} {}", workload["kind"].as_str()?, workload["metadata"]["name"].as_str()?);
    if workload["kind"] == "Job" {
        return (count(&status["succeeded"], 0) == 0).then(|| format!("{name} has not succeeded"));
    }
    let wanted = count(&spec["replicas"], 1);
    let [all, updated, ready] =
        ["replicas", "updatedReplicas", "readyReplicas"].map(|field| count(&status[field], 0));
    let is_seen = status["observedGeneration"] == workload["metadata"]["generation"];
    let is_settled = is_seen && [all, updated, ready] == [wanted; 3];
    (!is_settled).then(|| format!("{name} has {ready} ready and {updated} new of {wanted} pods"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_workload_is_settled_when_all_its_pods_are_new_and_ready() {
        let deployment = |generation: u64, all: u64, updated: u64, ready: u64| {
            json!({
                "kind": "Deployment",
                "metadata": {"name": "d", "generation": 2},
                "spec": {"replicas": 2},
                "status": {
                    "observedGeneration": generation,
                    "replicas": all,
                    "updatedReplicas": updated,
                    "readyReplicas": ready,
                },
            })
        };
        assert_eq!(unsettled(&deployment(2, 2, 2, 2)), None);
        for other in
            [deployment(1, 2, 2, 2), deployment(2, 3, 2, 2), deployment(2, 2, 1, 2), deployment(2, 2, 2, 1)]
        {
            assert!(unsettled(&other).is_some(), "{other}");
        }
        let none = json!({
            "kind": "Deployment",
            "metadata": {"name": "d", "generation": 1},
            "spec": {"replicas": 0},
            "status": {"observedGeneration": 1},
        });
        assert_eq!(unsettled(&none), None);
        let job = |status: Value| json!({"kind": "Job", "metadata": {"name": "j"}, "status": status});
        assert!(unsettled(&job(json!({"active": 1}))).is_some());
        assert_eq!(unsettled(&job(json!({"succeeded": 1}))), None);
    }
}
