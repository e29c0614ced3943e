//! Services: their names in a hosts file for each namespace, their addresses as rules that choose a pod for each connection.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::api::Api;
use crate::kube::json::{items, word};

/// What names and addresses of services mean on the node.
pub(super) struct Services {
    /// A folder for each namespace, with its file `hosts`.
    names: PathBuf,
    /// What was written last.
    hosts: BTreeMap<String, String>,
    rules: String,
}

impl Services {
    pub(super) fn new(place: &Path) -> Services {
        Services { names: place.join("names"), hosts: BTreeMap::new(), rules: String::new() }
    }

    /// The folder with a namespace's hosts file.
    pub(super) fn names_of(&self, namespace: &str) -> Result<PathBuf> {
        let folder = self.names.join(namespace);
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// Follows what the API server says.
    pub(super) fn refresh(&mut self, api: &Api) -> Result<()> {
        let services = api.list("/api/v1/services")?;
        let slices = api.list("/apis/discovery.k8s.io/v1/endpointslices")?;
        let hosts = hosts(&services, &slices);
        for (namespace, text) in &hosts {
            if self.hosts.get(namespace) != Some(text) {
                // Renamed, so that no resolver reads half of it.
                let folder = self.names_of(namespace)?;
                std::fs::write(folder.join("new"), text)?;
                std::fs::rename(folder.join("new"), folder.join("hosts"))?;
            }
        }
        self.hosts = hosts;
        let rules = rules(&services, &slices);
        if self.rules != rules {
            replace_rules(&rules)?;
            self.rules = rules;
        }
        Ok(())
    }
}

/// For each namespace the text of its hosts file.
fn hosts(services: &[Value], slices: &[Value]) -> BTreeMap<String, String> {
    let mut hosts: BTreeMap<String, String> = BTreeMap::new();
    for service in services {
        let (name, namespace) = names(service);
        let text = hosts.entry(namespace.clone()).or_insert_with(|| "127.0.0.1 localhost\n".to_owned());
        let full = format!("{name}.{namespace} {name}.{namespace}.svc.cluster.local");
        let address = word(&service["spec"]["clusterIP"]);
        if address != "None" {
            let _ = writeln!(text, "{address} {name} {full}");
            continue;
        }
        for endpoint in endpoints(service, slices) {
            let address = word(&endpoint["addresses"][0]);
            let _ = writeln!(text, "{address} {name} {full}");
            if let Some(host) = endpoint["hostname"].as_str() {
                let _ = writeln!(text, "{address} {host}.{name} {host}.{name}.{namespace}.svc.cluster.local");
            }
        }
    }
    hosts
}

/// Input of `iptables-restore`: each connection to a service goes to one of its pods, all equally likely.
fn rules(services: &[Value], slices: &[Value]) -> String {
    let mut rules = "*nat\n:PREROUTING ACCEPT\n:OUTPUT ACCEPT\n:SERVICES -\n-A PREROUTING -j SERVICES\n-A OUTPUT -j SERVICES\n".to_owned();
    for service in services.iter().filter(|service| service["spec"]["clusterIP"] != "None") {
        let address = word(&service["spec"]["clusterIP"]);
        for port in items(&service["spec"]["ports"]) {
            let mut pods = Vec::new();
            for slice in of_service(service, slices) {
                let to = items(&slice["ports"]).find(|to| to["name"] == port["name"]);
                let Some(to) = to.and_then(|to| to["port"].as_u64()) else { continue };
                pods.extend(
                    serving(slice).into_iter().map(|pod| format!("{}:{to}", word(&pod["addresses"][0]))),
                );
            }
            for (idx, pod) in pods.iter().enumerate() {
                let probability = 1.0 / (pods.len() - idx) as f64;
                let _ = writeln!(
                    rules,
                    "-A SERVICES -d {address}/32 -p tcp --dport {} -m statistic --mode random --probability {probability:.6} -j DNAT --to-destination {pod}",
                    port["port"]
                );
            }
        }
    }
    rules + "COMMIT\n"
}

fn of_service<'a>(service: &'a Value, slices: &'a [Value]) -> impl Iterator<Item = &'a Value> {
    slices.iter().filter(|slice| {
        let metadata = &slice["metadata"];
        metadata["namespace"] == service["metadata"]["namespace"]
            && metadata["labels"]["kubernetes.io/service-name"] == service["metadata"]["name"]
    })
}

fn endpoints<'a>(service: &'a Value, slices: &'a [Value]) -> impl Iterator<Item = &'a Value> {
    of_service(service, slices).flat_map(serving)
}

/// Ready endpoints; if none is, those that leave and still serve.
fn serving(slice: &Value) -> Vec<&Value> {
    let ready: Vec<&Value> =
        items(&slice["endpoints"]).filter(|it| it["conditions"]["ready"] == true).collect();
    if !ready.is_empty() {
        return ready;
    }
    items(&slice["endpoints"]).filter(|it| it["conditions"]["serving"] == true).collect()
}

/// Name and namespace.
fn names(object: &Value) -> (String, String) {
    (word(&object["metadata"]["name"]).to_owned(), word(&object["metadata"]["namespace"]).to_owned())
}

/// All at once: connections that exist stay where they are.
fn replace_rules(rules: &str) -> Result<()> {
    let mut restore = Command::new("iptables-restore");
    let mut child = restore.stdin(Stdio::piped()).spawn().context("run iptables-restore (iptables)")?;
    child.stdin.take().expect("piped").write_all(rules.as_bytes())?;
    ensure!(child.wait()?.success(), "iptables-restore refused\n{rules}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_and_rules_follow_endpoints_that_are_ready_or_else_still_serve() {
        let service = |name: &str, address: &str| {
            json!({
                "metadata": {"name": name, "namespace": "n"},
                "spec": {"clusterIP": address, "ports": [{"name": "http", "port": 80}]},
            })
        };
        let slice = |name: &str, endpoints: Value| {
            json!({
                "metadata": {"namespace": "n", "labels": {"kubernetes.io/service-name": name}},
                "ports": [{"name": "http", "port": 8080}],
                "endpoints": endpoints,
            })
        };
        let endpoint = |address: &str, ready: bool, serving: bool| json!({"addresses": [address], "conditions": {"ready": ready, "serving": serving}, "hostname": "h"});
        let services = [service("one", "10.96.0.1"), service("none", "None")];
        let slices = [
            slice("one", json!([endpoint("10.0.0.1", true, true), endpoint("10.0.0.2", false, true)])),
            slice("none", json!([endpoint("10.0.0.3", false, true), endpoint("10.0.0.4", false, false)])),
        ];
        assert_eq!(
            hosts(&services, &slices)["n"],
            "127.0.0.1 localhost\n10.96.0.1 one one.n one.n.svc.cluster.local\n\
             10.0.0.3 none none.n none.n.svc.cluster.local\n10.0.0.3 h.none h.none.n.svc.cluster.local\n"
        );
        let rules = rules(&services, &slices);
        let rules: Vec<&str> = rules.lines().filter(|line| line.contains("DNAT")).collect();
        assert_eq!(
            rules,
            [
                "-A SERVICES -d 10.96.0.1/32 -p tcp --dport 80 -m statistic --mode random --probability 1.000000 -j DNAT --to-destination 10.0.0.1:8080"
            ]
        );
    }
}
