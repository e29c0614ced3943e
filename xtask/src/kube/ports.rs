//! Whether NetworkPolicies name exactly the ports that pods open.

use std::collections::BTreeSet;

use serde_json::Value;

use super::json::items;

/// Differences, one per line: a port of a pod that no policy names, or a policy's port that the pod does not have.
pub(super) fn differences(pods: &[Value], policies: &[Value]) -> Vec<String> {
    pods.iter().flat_map(|pod| of_pod(pod, policies)).collect()
}

/// Ports that policies let others reach, by number.
pub(super) fn admitted(pod: &Value, policies: &[Value]) -> BTreeSet<u16> {
    let names = named(pod, policies);
    let all = items(&pod["spec"]["containers"]).flat_map(|container| items(&container["ports"]));
    all.filter(|port| names.contains(&word(&port["name"])))
        .filter_map(|port| port["containerPort"].as_u64()?.try_into().ok())
        .collect()
}

fn of_pod(pod: &Value, policies: &[Value]) -> Vec<String> {
    let name = &pod["metadata"]["name"].as_str().unwrap_or_default();
    let opened: BTreeSet<String> = items(&pod["spec"]["containers"])
        .flat_map(|container| items(&container["ports"]))
        .map(|port| word(&port["name"]))
        .collect();
    let named = named(pod, policies);
    let unnamed = opened.difference(&named).map(|port| format!("no policy names port {port} of pod {name}"));
    let unopened =
        named.difference(&opened).map(|port| format!("a policy names port {port}, which pod {name} lacks"));
    unnamed.chain(unopened).collect()
}

/// Ports as policies that select the pod name them.
fn named(pod: &Value, policies: &[Value]) -> BTreeSet<String> {
    let selecting =
        policies.iter().filter(|policy| selects(&policy["spec"]["podSelector"]["matchLabels"], pod));
    selecting
        .flat_map(|policy| items(&policy["spec"]["ingress"]))
        .flat_map(|rule| items(&rule["ports"]))
        .map(|port| word(&port["port"]))
        .collect()
}

fn selects(labels: &Value, pod: &Value) -> bool {
    let labels = labels.as_object();
    labels
        .is_some_and(|labels| labels.iter().all(|(label, value)| pod["metadata"]["labels"][label] == *value))
}

/// A name or a number.
fn word(port: &Value) -> String {
    port.as_str().map_or_else(|| port.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(app: &str, ports: &[&str]) -> Value {
        let ports: Vec<Value> = ports.iter().map(|name| json!({"name": name, "containerPort": 1})).collect();
        json!({"metadata": {"name": app, "labels": {"app": app}}, "spec": {"containers": [{"ports": ports}]}})
    }

    fn policy(app: &str, ports: &[&str]) -> Value {
        let ports: Vec<Value> = ports.iter().map(|name| json!({"port": name})).collect();
        json!({"spec": {"podSelector": {"matchLabels": {"app": app}}, "ingress": [{"ports": ports}]}})
    }

    #[test]
    fn ports_and_policies_that_fit_have_no_differences() {
        let pods = [pod("router", &["http"]), pod("decode", &["grpc", "data"]), pod("job", &[])];
        let policies =
            [policy("router", &["http"]), policy("decode", &["grpc"]), policy("decode", &["data"])];
        assert!(differences(&pods, &policies).is_empty());
        assert_eq!(admitted(&pods[1], &policies), BTreeSet::from([1]));
        assert!(admitted(&pods[2], &policies).is_empty());
    }

    #[test]
    fn each_side_of_a_difference_is_named() {
        let found = differences(&[pod("decode", &["grpc", "rdma"])], &[policy("decode", &["grpc", "data"])]);
        assert_eq!(
            found,
            ["no policy names port rdma of pod decode", "a policy names port data, which pod decode lacks",]
        );
        let found = differences(&[pod("decode", &["grpc"])], &[policy("prefill", &["grpc"])]);
        assert_eq!(found, ["no policy names port grpc of pod decode"]);
    }
}
