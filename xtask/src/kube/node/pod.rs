//! A pod: its network, its volumes, its containers, from the moment it is bound to the node until nothing of it is left.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{
    container::{Container, Setting, expanded},
    shared::{GATEWAY, Shared, script},
};
use crate::kube::json::{items, word};

const NETWORK: &str = include_str!("network.sh");
const ROOT: &str = include_str!("root.sh");

/// Between two looks at the containers.
const PERIOD: Duration = Duration::from_millis(100);

pub(super) struct Pod<'a> {
    /// As the API server had it when it was bound.
    object: Value,
    /// Of the network namespace and of its interface.
    network: String,
    address: Ipv4Addr,
    shared: &'a Shared,
}

impl<'a> Pod<'a> {
    pub(super) fn new(object: Value, idx: u16, shared: &'a Shared) -> Pod<'a> {
        let [high, low] = idx.to_be_bytes();
        Pod { object, network: format!("pod-{idx}"), address: Ipv4Addr::new(10, 65, high, low), shared }
    }

    /// Runs until `is_leaving`. What went wrong is for the shared list of complaints.
    pub(super) fn live(&self, is_leaving: impl Fn() -> bool) -> Result<()> {
        let mut containers = Vec::new();
        let lived = self.start(&mut containers).and_then(|()| {
            let mut written = Value::Null;
            while !is_leaving() {
                for container in &mut containers {
                    container.look_after(self.address, self.is_restarted(), self.grace())?;
                }
                let status = self.status(&containers);
                if status != written {
                    self.shared.api.write_status(&self.object, &status)?;
                    written = status;
                }
                std::thread::sleep(PERIOD);
            }
            Ok(())
        });
        if let Err(error) = &lived {
            let status = json!({"phase": "Failed", "message": format!("{error:#}")});
            self.shared.api.write_status(&self.object, &status)?;
            while !is_leaving() {
                std::thread::sleep(PERIOD);
            }
        }
        let mut stopped = Ok(());
        for container in &mut containers {
            stopped = stopped.and(container.stop(self.grace()));
        }
        drop(containers);
        let removed = self.remove();
        self.shared.api.forget(&self.object)?;
        lived.and(stopped).and(removed)
    }

    pub(super) fn name(&self) -> &str {
        word(&self.object["metadata"]["name"])
    }

    fn start(&self, containers: &mut Vec<Container>) -> Result<()> {
        let spec = &self.object["spec"];
        ensure!(spec["initContainers"].is_null(), "init containers are not supported");
        let volumes = self.volumes().context("volumes")?;
        script(NETWORK, &[&self.network, &self.address.to_string(), GATEWAY])?;
        for container in items(&spec["containers"]) {
            let mut arguments = vec![
                self.root(container).display().to_string(),
                self.shared.programs.display().to_string(),
                self.shared.place.join("names").join(self.namespace()).display().to_string(),
            ];
            for mount in items(&container["volumeMounts"]) {
                let volume = volumes.get(word(&mount["name"])).context("a mount without its volume")?;
                arguments.push(volume.display().to_string());
                arguments.push(word(&mount["mountPath"]).to_owned());
                arguments.push(if mount["readOnly"] == true { "ro" } else { "rw" }.to_owned());
            }
            script(ROOT, &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
            let name = word(&container["name"]);
            let log = format!("{}_{}_{name}.log", self.namespace(), self.name());
            containers.push(Container::start(
                container,
                Setting {
                    network: self.network.clone(),
                    root: self.root(container),
                    variables: self.variables(container)?,
                    user: self.security(container, "runAsUser"),
                    group: self.security(container, "runAsGroup"),
                    log: self.shared.place.join("logs").join(log),
                },
            )?);
        }
        Ok(())
    }

    /// Takes its roots and its network away. Processes in them have ended.
    fn remove(&self) -> Result<()> {
        for container in items(&self.object["spec"]["containers"]) {
            script("umount --recursive --lazy \"$1\"", &[&self.root(container).display().to_string()])?;
        }
        script("ip netns delete \"$1\"", &[&self.network])
    }

    /// A folder for each volume, filled. What changes later in a secret does not reach it.
    fn volumes(&self) -> Result<BTreeMap<&str, PathBuf>> {
        let mut folders = BTreeMap::new();
        for volume in items(&self.object["spec"]["volumes"]) {
            let name = word(&volume["name"]);
            let folder = self.folder().join("volumes").join(name);
            std::fs::create_dir_all(&folder)?;
            if !volume["emptyDir"].is_null() {
                std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777))?;
            } else if let Some(secret) = volume["secret"]["secretName"].as_str() {
                self.fill(&folder, &volume["secret"]["items"], &self.secret(secret)?)?;
            } else {
                bail!("volume {name} is neither emptyDir nor secret");
            }
            folders.insert(name, folder);
        }
        Ok(folders)
    }

    /// Writes all entries, or those that `items` names.
    fn fill(&self, folder: &Path, chosen: &Value, data: &BTreeMap<String, Vec<u8>>) -> Result<()> {
        let all: Vec<(&str, &str)> = data.keys().map(|key| (key.as_str(), key.as_str())).collect();
        let chosen: Vec<(&str, &str)> =
            items(chosen).map(|it| (word(&it["key"]), word(&it["path"]))).collect();
        for (key, path) in if chosen.is_empty() { all } else { chosen } {
            let file = folder.join(path);
            std::fs::write(&file, data.get(key).with_context(|| format!("there is no entry {key}"))?)?;
            let group =
                self.object["spec"]["securityContext"]["fsGroup"].as_u64().and_then(|id| id.try_into().ok());
            chown(&file, None, group)?;
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o440))?;
        }
        Ok(())
    }

    fn secret(&self, name: &str) -> Result<BTreeMap<String, Vec<u8>>> {
        let object =
            self.shared.api.get(&format!("/api/v1/namespaces/{}/secrets/{name}", self.namespace()))?;
        let data: BTreeMap<String, String> = serde_json::from_value(object["data"].clone())?;
        data.into_iter().map(|(key, value)| Ok((key, from_base64(&value)?))).collect()
    }

    fn variables(&self, container: &Value) -> Result<BTreeMap<String, String>> {
        let mut variables = BTreeMap::from([("HOSTNAME".to_owned(), self.name().to_owned())]);
        for variable in items(&container["env"]) {
            let from = &variable["valueFrom"];
            let value = match (from["fieldRef"]["fieldPath"].as_str(), from["secretKeyRef"]["name"].as_str())
            {
                (Some("metadata.name"), _) => self.name().to_owned(),
                (Some("metadata.namespace"), _) => self.namespace().to_owned(),
                (Some("status.podIP"), _) => self.address.to_string(),
                (Some(other), _) => bail!("variables from {other} are not supported"),
                (None, Some(secret)) => {
                    let value = self.secret(secret)?.remove(word(&from["secretKeyRef"]["key"]));
                    String::from_utf8(value.with_context(|| format!("no such entry of secret {secret}"))?)?
                }
                (None, None) if from.is_null() => expanded(word(&variable["value"]), &variables),
                (None, None) => bail!("a variable from {from} is not supported"),
            };
            variables.insert(word(&variable["name"]).to_owned(), value);
        }
        Ok(variables)
    }

    fn status(&self, containers: &[Container]) -> Value {
        let codes: Option<Vec<i32>> = containers.iter().map(Container::exit_code).collect();
        let phase = match codes {
            Some(codes) if !self.is_restarted() => {
                if codes.iter().all(|code| *code == 0) {
                    "Succeeded"
                } else {
                    "Failed"
                }
            }
            _ => "Running",
        };
        let is_ready = if containers.iter().all(Container::is_ready) { "True" } else { "False" };
        let mut conditions = self.object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        for (kind, status) in [
            ("PodReadyToStartContainers", "True"),
            ("Initialized", "True"),
            ("ContainersReady", is_ready),
            ("Ready", is_ready),
        ] {
            conditions.push(json!({"type": kind, "status": status}));
        }
        json!({
            "phase": phase,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "conditions": conditions,
            "containerStatuses": containers.iter().map(Container::status).collect::<Vec<_>>(),
        })
    }

    fn is_restarted(&self) -> bool {
        self.object["spec"]["restartPolicy"] == "Always"
    }

    fn grace(&self) -> Duration {
        Duration::from_secs(self.object["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap_or(30))
    }

    /// An id of its security context; the container's, if it has one.
    fn security(&self, container: &Value, field: &str) -> u64 {
        let of_pod = &self.object["spec"]["securityContext"][field];
        container["securityContext"][field].as_u64().or(of_pod.as_u64()).unwrap_or(0)
    }

    fn namespace(&self) -> &str {
        word(&self.object["metadata"]["namespace"])
    }

    fn folder(&self) -> PathBuf {
        self.shared.place.join("pods").join(&self.network)
    }

    fn root(&self, container: &Value) -> PathBuf {
        self.folder().join("roots").join(word(&container["name"]))
    }
}

fn from_base64(text: &str) -> Result<Vec<u8>> {
    let mut command = Command::new("sh");
    command.args(["-c", "printf %s \"$1\" | base64 --decode", "base64", text]);
    let output = command.stdin(Stdio::null()).output().context("run base64")?;
    ensure!(output.status.success(), "base64: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_secrets_are_decoded() {
        assert_eq!(from_base64("YSBrZXkK").unwrap(), b"a key\n");
        assert!(from_base64("*").is_err());
    }
}
