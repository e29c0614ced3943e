//! A node whose pods run: each container is a process of this machine, in a network namespace and under a root of its own.
//!
//! It is for the chart alone: what the chart does not use is refused. Images are not pulled: containers have the programs of
//! this machine, `baton` as cargo built it, and etcd. Nothing is measured or limited, and no policy is enforced.

mod api;
mod container;
mod pod;
mod probe;
mod services;
mod shared;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use self::{
    api::Api,
    pod::Pod,
    services::Services,
    shared::{GATEWAY, Shared, script},
};
use super::{build::Programs, cluster::Cluster, control_plane::ControlPlane, json::word, nodes};

const NODE: &str = include_str!("node.sh");
const NAME: &str = "real-0";
/// Between two looks at the API server.
const PERIOD: Duration = Duration::from_millis(200);

/// Gives this process's network namespace an address, and a route to services.
pub(super) fn set_up_network(services: &str) -> Result<()> {
    script(NODE, &[GATEWAY, services])
}

/// Runs the pods that are bound to it until it is dropped.
pub(super) struct Node {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Node {
    /// Joins the cluster.
    pub(super) fn start(
        cluster: &Cluster,
        control_plane: &mut ControlPlane,
        programs: &Programs,
        baton: &Path,
        place: &Path,
    ) -> Result<Node> {
        let bin = place.join("programs");
        for folder in [&bin, &place.join("logs")] {
            fs::create_dir_all(folder)?;
        }
        link(baton, &bin.join("baton")).context("link baton")?;
        fs::copy(&programs.etcd, bin.join("etcd")).context("copy etcd")?;
        let api = Api::new(control_plane.proxy(&programs.kubectl, place)?);
        cluster.apply(&[nodes::real(NAME)])?;
        let shared = Arc::new(Shared {
            api,
            place: place.to_owned(),
            programs: bin,
            ends: AtomicBool::new(false),
            complaints: Mutex::default(),
        });
        let of_thread = Arc::clone(&shared);
        Ok(Node { shared, thread: Some(std::thread::spawn(move || run(&of_thread))) })
    }

    /// What went wrong with pods since the last call.
    pub(super) fn complaints(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.complaints.lock().expect("no thread panics while it holds it"))
    }

    /// Ports on which processes of a pod listen to others.
    pub(super) fn open_ports(&self, pod: &Value) -> Result<Vec<u16>> {
        let address = word(&pod["status"]["podIP"]);
        let octets: Vec<u16> = address.split('.').filter_map(|octet| octet.parse().ok()).collect();
        ensure!(octets.len() == 4, "pod {} has no address", pod["metadata"]["name"]);
        let network = format!("pod-{}", octets[2] << 8 | octets[3]);
        let mut ss = Command::new("ip");
        let output = ss
            .args([
                "netns",
                "exec",
                &network,
                "ss",
                "--no-header",
                "--listening",
                "--tcp",
                "--udp",
                "--numeric",
            ])
            .output()?;
        ensure!(output.status.success(), "ss: {}", String::from_utf8_lossy(&output.stderr).trim());
        let listens = String::from_utf8_lossy(&output.stdout).into_owned();
        // Network, state, two queues, address and port.
        let addresses = listens.lines().filter_map(|line| line.split_whitespace().nth(4));
        let reachable = addresses.filter(|it| !it.starts_with("127.") && !it.starts_with("[::1]"));
        Ok(reachable.filter_map(|it| it.rsplit(':').next()?.parse().ok()).collect())
    }

    /// Network namespaces of pods that are there.
    pub(super) fn networks(&self) -> Result<String> {
        let output = Command::new("ip").args(["netns", "list"]).output().context("run ip")?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic was printed.
            let _ = thread.join();
        }
    }
}

/// Links a program, or copies it: cargo may build on another file system.
fn link(program: &Path, place: &Path) -> io::Result<()> {
    fs::hard_link(program, place).or_else(|_| fs::copy(program, place).map(drop))
}

/// Follows the API server: runs what is bound to the node, and knows services.
fn run(shared: &Shared) {
    std::thread::scope(|scope| {
        let mut services = Services::new(&shared.place);
        let mut leaving: BTreeMap<String, Arc<AtomicBool>> = BTreeMap::new();
        while !shared.ends.load(Ordering::Relaxed) {
            std::thread::sleep(PERIOD);
            shared.note("services", services.refresh(&shared.api));
            let bound = shared.api.list(&format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{NAME}"));
            let Ok(bound) = bound.map_err(|error| shared.note("pods", Err(error))) else { continue };
            let uids: BTreeSet<&str> = bound.iter().map(|object| word(&object["metadata"]["uid"])).collect();
            // A pod that has ended by itself is removed without asking the node.
            for (_, is_leaving) in leaving.iter().filter(|(uid, _)| !uids.contains(uid.as_str())) {
                is_leaving.store(true, Ordering::Relaxed);
            }
            for object in bound {
                let num_known = leaving.len();
                let is_leaving = leaving.entry(word(&object["metadata"]["uid"]).to_owned()).or_default();
                if !object["metadata"]["deletionTimestamp"].is_null() {
                    is_leaving.store(true, Ordering::Relaxed);
                }
                let is_leaving = Arc::clone(is_leaving);
                if leaving.len() > num_known {
                    // 0 is the network's own address.
                    let pod = Pod::new(object, u16::try_from(leaving.len()).expect("few pods"), shared);
                    scope.spawn(move || {
                        let is_over =
                            || is_leaving.load(Ordering::Relaxed) || shared.ends.load(Ordering::Relaxed);
                        shared.note(pod.name(), pod.live(is_over));
                    });
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_cannot_be_linked_is_copied() {
        let folder = std::env::temp_dir().join(format!("baton-xtask-link-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (program, place) = (folder.join("program"), folder.join("place"));
        fs::write(&program, "new").unwrap();
        // A link to a file that is there fails, as one to another file system does.
        fs::write(&place, "old").unwrap();
        link(&program, &place).unwrap();
        assert_eq!(fs::read_to_string(&place).unwrap(), "new");
        assert!(link(&folder.join("missing"), &folder.join("other")).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
