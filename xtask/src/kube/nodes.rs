//! What the chart's objects refer to: definitions of other projects' resources, nodes with devices, classes.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;
use serde_json::{Value, json};

use super::cluster::{Cluster, until_nothing};

/// The annotation of nodes whose pods do not run, as a selector.
pub(super) const SIMULATED: &str = "kwok.x-k8s.io/node=fake";

/// Creates definitions and waits until the API server serves them. Returns what was added, for the report.
pub(super) fn add_definitions(cluster: &Cluster, files: &[PathBuf]) -> Result<String> {
    for file in files {
        cluster.kubectl(&["apply", "--server-side", "--filename", &shown(file)])?;
    }
    cluster.kubectl(&[
        "wait",
        "--for=condition=Established",
        "customresourcedefinitions",
        "--all",
        "--timeout=60s",
    ])?;
    let names = cluster.kubectl(&["get", "customresourcedefinitions", "--output=name"])?;
    let kinds: Vec<&str> =
        names.lines().filter_map(|name| name.rsplit('/').next()?.split('.').next()).collect();
    Ok(kinds.join(", "))
}

/// Two nodes with processors, one of them for this work alone, and three with 8 GPUs, two of them tainted.
pub(super) fn add(cluster: &Cluster) -> Result<String> {
    let gpus = json!({"nvidia.com/gpu": "8", "rdma/hca": "8", "rdma/hca_shared_devices_a": "8"});
    let gpu_labels = json!({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"});
    let gpu_taint = json!([{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]);
    let own_taint = json!([{"key": "dedicated", "value": "llm", "effect": "NoSchedule"}]);
    let nodes = [
        node(
            "cpu-0",
            json!({"pool": "storage"}),
            json!([]),
            json!({"rdma/hca": "8", "rdma/hca_shared_devices_a": "8"}),
        ),
        node("cpu-1", json!({"pool": "compute"}), own_taint, json!({})),
        node("gpu-0", gpu_labels.clone(), gpu_taint.clone(), gpus.clone()),
        node("gpu-1", gpu_labels.clone(), gpu_taint, gpus.clone()),
        node("gpu-2", gpu_labels, json!([]), gpus),
    ];
    cluster.apply(&nodes)?;
    cluster.apply(&[
        json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"}),
        json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "serving"}, "value": 1000}),
        json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": "standard",
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "kubernetes.io/host-path",
        }),
    ])?;
    until_nothing(Duration::from_secs(60), || {
        let nodes = cluster.get("default", "nodes", &[])?;
        Ok(nodes
            .iter()
            .filter(|node| !is_ready(node))
            .map(|node| format!("{} is not ready", node["metadata"]["name"]))
            .collect())
    })?;
    Ok("2 with processors, 3 with 8 GPUs and 8 RDMA devices".to_owned())
}

/// A namespace of a Pod Security level, with the claims and the service account that values files name.
pub(super) fn add_namespace(cluster: &Cluster, name: &str, level: &str) -> Result<()> {
    let labels = json!({"pod-security.kubernetes.io/enforce": level});
    let claim = |claim: &str, mode: &str, size: &str| {
        json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": name},
            "spec": {"accessModes": [mode], "resources": {"requests": {"storage": size}}},
        })
    };
    cluster.apply(&[
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}),
    ])?;
    cluster.apply(&[
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "serving", "namespace": name}}),
        claim("models", "ReadWriteMany", "500Gi"),
        claim("journal", "ReadWriteOnce", "10Gi"),
    ])
}

/// No pod is bound to a simulated node any more.
pub(super) fn close_simulated(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["cordon", "--selector=kubernetes.io/os=linux"]).map(drop)
}

/// A node whose pods run.
pub(super) fn real(name: &str) -> Value {
    let mut node = node(name, json!({}), json!([]), json!({}));
    node["metadata"]["annotations"] = json!({});
    node["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    node
}

/// kwok keeps what a node's status says, and its heartbeat.
fn node(name: &str, labels: Value, taints: Value, devices: Value) -> Value {
    let (key, value) = SIMULATED.split_once('=').expect("a selector");
    let annotations = json!({key: value});
    let mut room = json!({"cpu": "512", "memory": "4Ti", "ephemeral-storage": "4Ti", "pods": "250"});
    merge(&mut room, devices);
    let mut all_labels =
        json!({"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"});
    merge(&mut all_labels, labels);
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": all_labels, "annotations": annotations},
        "spec": {"taints": taints},
        "status": {"capacity": room, "allocatable": room},
    })
}

fn merge(into: &mut Value, from: Value) {
    if let (Some(into), Value::Object(from)) = (into.as_object_mut(), from) {
        into.extend(from);
    }
}

fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

fn shown(file: &Path) -> String {
    file.display().to_string()
}
