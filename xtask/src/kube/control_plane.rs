//! etcd, API server, controller manager, scheduler and kwok as processes on loopback, under one folder.

use std::{
    fmt,
    fs::File,
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{build::Programs, nodes::SIMULATED};
use crate::tools;

/// Addresses of services.
pub(super) const SERVICES: &str = "10.96.0.0/16";

const START_TIMEOUT: Duration = Duration::from_secs(90);

/// The processes; they end with it.
pub(super) struct ControlPlane {
    /// In the order of their start.
    processes: Vec<Process>,
    kubeconfig: PathBuf,
    address: String,
}

impl ControlPlane {
    /// Starts with no state. Logs are in `place`.
    pub(super) fn start(programs: &Programs, place: &Path) -> Result<ControlPlane> {
        if place.exists() {
            std::fs::remove_dir_all(place).with_context(|| format!("remove {}", place.display()))?;
        }
        std::fs::create_dir_all(place)?;
        let [etcd, peers, apiserver] = free_ports()?;
        let etcd = format!("http://127.0.0.1:{etcd}");
        let peers = format!("http://127.0.0.1:{peers}");
        let address = format!("https://127.0.0.1:{apiserver}");
        let kubeconfig = place.join("kubeconfig");
        let mut this = ControlPlane { processes: Vec::new(), kubeconfig: kubeconfig.clone(), address };
        this.spawn(place, &programs.etcd, |command| {
            command.arg(format!("--data-dir={}", place.join("etcd").display()));
            command.args([format!("--listen-client-urls={etcd}"), format!("--advertise-client-urls={etcd}")]);
            command.args([
                format!("--listen-peer-urls={peers}"),
                format!("--initial-advertise-peer-urls={peers}"),
                format!("--initial-cluster=default={peers}"),
                "--unsafe-no-fsync".to_owned(),
            ]);
        })?;

        // Tokens of service accounts are signed with a key; the certificate for TLS is the API server's own work.
        let (key, tokens, certs) =
            (place.join("accounts.key"), place.join("tokens.csv"), place.join("certs"));
        openssl(&["genrsa", "-out", &key.display().to_string(), "2048"])?;
        let token = openssl(&["rand", "-hex", "24"])?;
        std::fs::write(&tokens, format!("{token},admin,admin,system:masters\n"))?;
        this.spawn(place, &programs.apiserver, |command| {
            command.args([
                format!("--etcd-servers={etcd}"),
                "--bind-address=127.0.0.1".to_owned(),
                format!("--secure-port={apiserver}"),
                format!("--cert-dir={}", certs.display()),
                format!("--token-auth-file={}", tokens.display()),
                "--authorization-mode=RBAC".to_owned(),
                format!("--service-cluster-ip-range={SERVICES}"),
                // Of the API server's own service, which nothing uses.
                "--advertise-address=192.0.2.1".to_owned(),
                "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
                format!("--service-account-key-file={}", key.display()),
                format!("--service-account-signing-key-file={}", key.display()),
            ]);
        })?;
        let certificate = certs.join("apiserver.crt");
        this.wait_for("certificate of the API server", || certificate.is_file())?;
        std::fs::write(&kubeconfig, kubeconfig_text(&this.address, &certificate, &token))?;
        this.wait_for("answer of the API server", || {
            let ready = ["get", "--raw", "/readyz", "--request-timeout=2s"];
            let mut kubectl = Command::new(&programs.kubectl);
            tools::said(kubectl.arg("--kubeconfig").arg(&kubeconfig).args(ready)).is_some()
        })?;

        let config = format!("--kubeconfig={}", kubeconfig.display());
        this.spawn(place, &programs.controller_manager, |command| {
            command.args([&config, "--secure-port=0", "--leader-elect=false"]);
            // Nodes of this machine need not say that they live.
            command.arg("--node-monitor-grace-period=24h");
            // Volumes for claims; they are folders of this machine that stay empty.
            command.args(["--enable-hostpath-provisioner", "--concurrent-deployment-syncs=5"]);
            command.arg(format!("--service-account-private-key-file={}", key.display()));
        })?;
        this.spawn(place, &programs.scheduler, |command| {
            command.args([&config, "--secure-port=0", "--leader-elect=false"]);
        })?;
        this.spawn(place, &programs.kwok, |command| {
            command.args(programs.stages.iter().map(|stage| format!("--config={}", stage.display())));
            command.args([
                config.clone(),
                format!("--manage-nodes-with-annotation-selector={SIMULATED}"),
                "--cidr=10.64.0.0/16".to_owned(),
                "--node-lease-duration-seconds=40".to_owned(),
            ]);
        })?;
        Ok(this)
    }

    /// Starts a proxy to the API server without keys and TLS. Returns its address.
    pub(super) fn proxy(&mut self, kubectl: &Path, place: &Path) -> Result<SocketAddr> {
        let [port] = free_ports()?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let kubeconfig = format!("--kubeconfig={}", self.kubeconfig.display());
        self.spawn(place, kubectl, |command| {
            command.args([kubeconfig, "proxy".to_owned(), format!("--port={port}")]);
        })?;
        self.wait_for("answer of the proxy", || TcpStream::connect(address).is_ok())?;
        Ok(address)
    }

    /// For clients with all rights.
    pub(super) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    fn spawn(&mut self, place: &Path, program: &Path, set_up: impl FnOnce(&mut Command)) -> Result<()> {
        let name = program.file_name().context("a program has a name")?.to_string_lossy().into_owned();
        let log = place.join(format!("{name}.log"));
        let file = File::create(&log)?;
        let mut command = Command::new(program);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        set_up(&mut command);
        let child = command.spawn().with_context(|| format!("start {name}"))?;
        self.processes.push(Process { name, log, child });
        Ok(())
    }

    /// Fails if a process ends, or after [`START_TIMEOUT`].
    fn wait_for(&mut self, what: &str, is_there: impl Fn() -> bool) -> Result<()> {
        let started = Instant::now();
        while !is_there() {
            for process in &mut self.processes {
                if let Some(status) = process.child.try_wait()? {
                    bail!("{} ended with {status}; see {}", process.name, process.log.display());
                }
            }
            ensure!(started.elapsed() < START_TIMEOUT, "no {what} within {START_TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }
}

impl fmt::Display for ControlPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.processes.iter().map(|process| process.name.as_str()).collect();
        write!(f, "{} at {}", names.join(", "), self.address)
    }
}

struct Process {
    name: String,
    log: PathBuf,
    child: Child,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ports of loopback that nothing listens on now.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    // All are open at once, so that they differ.
    let listeners: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<std::io::Result<_>>()?;
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

/// What it prints.
fn openssl(args: &[&str]) -> Result<String> {
    tools::said(Command::new("openssl").args(args))
        .with_context(|| format!("openssl {} failed", args.join(" ")))
}

fn kubeconfig_text(address: &str, certificate: &Path, token: &str) -> String {
    serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kube", "cluster": {"server": address, "certificate-authority": certificate}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "kube", "context": {"cluster": "kube", "user": "admin"}}],
        "current-context": "kube",
    })
    .to_string()
}
