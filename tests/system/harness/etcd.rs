//! A real etcd for one test, which can be stopped and started again over the same data.

use std::{net::TcpListener, path::Path, time::Duration};

use super::process::Process;

pub(crate) struct Etcd {
    pub(crate) endpoint: String,
    args: Vec<String>,
    dir: std::path::PathBuf,
    process: Option<Process>,
}

impl Etcd {
    pub(crate) fn start(dir: &Path) -> Etcd {
        let [client, peer] = free_ports();
        let endpoint = format!("http://127.0.0.1:{client}");
        let peers = format!("http://127.0.0.1:{peer}");
        let data = dir.join("etcd");
        let args = [
            ("--data-dir", data.display().to_string()),
            ("--listen-client-urls", endpoint.clone()),
            ("--advertise-client-urls", endpoint.clone()),
            ("--listen-peer-urls", peers.clone()),
            ("--initial-advertise-peer-urls", peers.clone()),
            ("--initial-cluster", format!("default={peers}")),
        ];
        let args = args.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
        let mut etcd = Etcd { endpoint, args, dir: dir.to_owned(), process: None };
        etcd.start_again();
        etcd
    }

    pub(crate) fn stop(&mut self) {
        self.process.take().expect("etcd runs").kill();
    }

    pub(crate) fn start_again(&mut self) {
        assert!(self.process.is_none(), "etcd runs already");
        self.process = Some(Process::start("etcd", "etcd", &self.args, &self.dir));
    }
}

/// Ports that were free a moment ago.
pub(crate) fn free_ports<const N: usize>() -> [u16; N] {
    let listeners: [TcpListener; N] =
        std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").expect("a port is free"));
    listeners.map(|listener| listener.local_addr().expect("a bound socket has an address").port())
}

const POLL: Duration = Duration::from_millis(20);

/// Calls `check` until it gives a value; panics with `what` after `limit`, of which a pause of the whole machine is one poll.
pub(crate) async fn eventually<T>(
    what: &str,
    limit: Duration,
    mut check: impl AsyncFnMut() -> Option<T>,
) -> T {
    for _ in 0..limit.as_millis() / POLL.as_millis() {
        if let Some(value) = check().await {
            return value;
        }
        // The interval of a poll, not a guess at how long something takes.
        tokio::time::sleep(POLL).await;
    }
    panic!("not within {limit:?}: {what}");
}
