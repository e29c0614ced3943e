//! A network partition: in each state, every packet between the prefill worker's namespace and all others is dropped until
//! both sides have noticed. Then packets pass again.
//!
//! That takes root, `ip`, `unshare` and `iptables`. Without them the tests say SKIPPED and why.

use std::{
    net::Ipv4Addr,
    process::Command,
    sync::atomic::{AtomicU8, Ordering},
};

use baton_handoff::TransportKind;

use super::{cells, table::Fault};
use crate::harness::{skipped, transports};

/// The environment variable that tells the child process which transport to test.
const KIND: &str = "BATON_MATRIX_PARTITION";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_packets_over_tcp() {
    in_a_network_of_its_own(TransportKind::Tcp);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_packets_over_rdma() {
    in_a_network_of_its_own(TransportKind::Rdma);
}

/// Runs the row in a network namespace, whose addresses end with it.
fn in_a_network_of_its_own(kind: TransportKind) {
    if !transports().any(|here| here == kind) {
        return;
    }
    let try_out = "ip link set lo up && iptables -w -L INPUT -n && ip netns list";
    let tried = Command::new("unshare").args(["--net", "--", "sh", "-c", try_out]).output();
    match tried {
        Ok(output) if output.status.success() => {}
        Ok(output) => return skipped("dropped packets", String::from_utf8_lossy(&output.stderr).trim()),
        Err(error) => return skipped("dropped packets", &format!("unshare: {error}")),
    }
    let this = std::env::current_exe().expect("this is a program");
    let status = Command::new("unshare")
        .args(["--net", "--"])
        .arg(this)
        .args(["matrix::partition::inside", "--exact", "--ignored", "--nocapture"])
        .env(KIND, kind.name())
        .status();
    assert!(status.expect("it can be started").success(), "see above");
}

/// Not a test: runs every state inside the network namespace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by the fault matrix, as a process of its own"]
async fn inside() {
    let Ok(kind) = std::env::var(KIND) else { return };
    sh("ip link set lo up && echo 1 > /proc/sys/net/ipv4/ip_forward");
    cells(Fault::DroppedPackets, TransportKind::from_name(&kind).expect("a transport")).await;
}

/// A namespace for each worker. All other processes run in a third one between them.
///
/// ```text
///  decode worker .2 --- .1 here: router, tap .1 --- .2 prefill worker
///                  ^^^ packets of one port        ^^^ all packets
/// ```
pub(super) struct Network {
    names: [String; 2],
    subnet: u8,
}

impl Network {
    pub(super) fn new() -> Network {
        // A device exists a little longer than its namespace, so names are not reused.
        static NUM: AtomicU8 = AtomicU8::new(0);
        let subnet = NUM.fetch_add(1, Ordering::Relaxed);
        let names = ["decode", "prefill"].map(|role| format!("baton-{}-{subnet}-{role}", std::process::id()));
        let network = Network { names, subnet };
        for (idx, name) in network.names.iter().enumerate() {
            let device = format!("{}{subnet}", if idx == 0 { "d" } else { "p" });
            let [gateway, host] = [1, 2].map(|host| network.address(idx, host));
            sh(&format!(
                "ip netns add {name} && ip link add {device} type veth peer name eth netns {name} \
                 && ip addr add {gateway}/30 dev {device} && ip link set {device} up \
                 && ip -n {name} link set lo up && ip -n {name} link set eth up \
                 && ip -n {name} addr add {host}/30 dev eth && ip -n {name} route add default via {gateway}"
            ));
        }
        network
    }

    fn address(&self, idx: usize, host: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, self.subnet, 4 * idx as u8 + host)
    }

    /// The namespace of a worker, and its address there.
    pub(super) fn of(&self, is_prefill: bool) -> (&str, Ipv4Addr) {
        let idx = usize::from(is_prefill);
        (&self.names[idx], self.address(idx, 2))
    }

    /// The address at which the decode worker reaches the proxies of its peers.
    pub(super) fn gateway(&self) -> Ipv4Addr {
        self.address(0, 1)
    }

    /// Drops packets in both directions: all of the prefill worker, and those between the decode worker and
    /// `peer_port`. The router still reaches the decode worker.
    pub(super) fn cut(&self, peer_port: u16) {
        let [decode, prefill] = &self.names;
        for rule in [
            format!("{prefill} iptables -w -A INPUT -i eth -j DROP"),
            format!("{prefill} iptables -w -A OUTPUT -o eth -j DROP"),
            format!("{decode} iptables -w -A INPUT -p tcp --sport {peer_port} -j DROP"),
            format!("{decode} iptables -w -A OUTPUT -p tcp --dport {peer_port} -j DROP"),
        ] {
            sh(&format!("ip netns exec {rule}"));
        }
    }

    /// Lets packets pass again.
    pub(super) fn heal(&self) {
        self.names.iter().for_each(|name| sh(&format!("ip netns exec {name} iptables -w -F")));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            // The device ends with its namespace, and the namespace with its last process.
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

fn sh(commands: &str) {
    let output = Command::new("sh").args(["-c", commands]).output().expect("there is a shell");
    assert!(output.status.success(), "{commands}: {}", String::from_utf8_lossy(&output.stderr));
}
