//! A real etcd for one test. It can be stopped and started again with the same data.

use std::{path::Path, time::Duration};

use super::process::Process;
use crate::ports::free_port;

pub(crate) struct Etcd {
    pub(crate) endpoint: String,
    /// The same etcd, with a certificate of the authority `ca.pem` of the test data.
    pub(crate) tls_endpoint: String,
    args: Vec<String>,
    dir: std::path::PathBuf,
    process: Option<Process>,
}

impl Etcd {
    pub(crate) fn start(dir: &Path) -> Etcd {
        let [client, tls_client, peer] = [free_port(), free_port(), free_port()];
        let endpoint = format!("http://127.0.0.1:{client}");
        let tls_endpoint = format!("https://127.0.0.1:{tls_client}");
        let testdata = concat!(env!("CARGO_MANIFEST_DIR"), "/../tls/testdata");
        let peers = format!("http://127.0.0.1:{peer}");
        let data = dir.join("etcd");
        let args = [
            ("--data-dir", data.display().to_string()),
            ("--listen-client-urls", format!("{endpoint},{tls_endpoint}")),
            ("--advertise-client-urls", endpoint.clone()),
            ("--listen-peer-urls", peers.clone()),
            ("--initial-advertise-peer-urls", peers.clone()),
            ("--initial-cluster", format!("default={peers}")),
            ("--cert-file", format!("{testdata}/a.pem")),
            ("--key-file", format!("{testdata}/a.key")),
        ];
        let args = args.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
        let mut etcd = Etcd { endpoint, tls_endpoint, args, dir: dir.to_owned(), process: None };
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

const POLL: Duration = Duration::from_millis(20);

/// Calls `check` until it returns a value. Panics with `what` after `limit`, in which a pause of the machine counts as one poll.
pub(crate) async fn eventually<T>(
    what: &str,
    limit: Duration,
    mut check: impl AsyncFnMut() -> Option<T>,
) -> T {
    for _ in 0..limit.as_millis() / POLL.as_millis() {
        if let Some(value) = check().await {
            return value;
        }
        // The interval of polls, not a guess of a duration.
        tokio::time::sleep(POLL).await;
    }
    panic!("not within {limit:?}: {what}");
}
