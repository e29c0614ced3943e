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

/// The version of objects of dynamic resource allocation.
const CLAIMS: &str = "resource.k8s.io/v1";
/// The driver of devices that pods claim, and the classes of these.
const DRIVER: &str = "devices.example.com";
const CLASSES: [&str; 2] = ["gpu", "nic"];

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
    cluster.apply(&CLASSES.map(class))?;
    cluster.apply(&["gpu-0", "gpu-1", "gpu-2"].map(devices))?;
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
    Ok("2 with processors, 3 with 8 GPUs and 8 RDMA devices, and 8 of each for claims".to_owned())
}

/// A namespace of a Pod Security level, with the claims, templates of claims and the service account that values files name.
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
        claim_template(name, "one-gpu", "gpu", 1),
        claim_template(name, "two-gpus", "gpu", 2),
        claim_template(name, "one-nic", "nic", 1),
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

/// Devices that pods claim by the class's name.
fn class(name: &str) -> Value {
    let expression = format!("device.attributes['{DRIVER}'].kind == '{name}'");
    json!({
        "apiVersion": CLAIMS,
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    })
}

/// Eight devices of each class on a node.
fn devices(node: &str) -> Value {
    let mut devices = Vec::new();
    for class in CLASSES {
        for idx in 0..8 {
            let attributes = json!({"kind": {"string": class}});
            devices.push(json!({"name": format!("{class}-{idx}"), "attributes": attributes}));
        }
    }
    json!({
        "apiVersion": CLAIMS,
        "kind": "ResourceSlice",
        "metadata": {"name": node},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    })
}

fn claim_template(namespace: &str, name: &str, class: &str, count: u32) -> Value {
    let request = json!({"name": "devices", "exactly": {"deviceClassName": class, "count": count}});
    json!({
        "apiVersion": CLAIMS,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    })
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
