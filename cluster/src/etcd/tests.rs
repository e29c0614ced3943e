//! Workers and a router that share a real etcd.

#[path = "../../../tests/ports.rs"]
mod ports;

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use etcd_client::{Client, ConnectOptions, GetOptions};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::{Connector, in_time, reach};
use crate::{
    DiscoveryConfig, DiscoveryError, EtcdAuth, EtcdConfig, EtcdTls, RegistrationState, Role, WorkerRecord,
    register,
    testing::{PATIENCE, other_format, record, until, until_state},
    watch,
};

/// An etcd of its own, killed when dropped.
struct Etcd {
    child: Option<Child>,
    dir: TempDir,
    client_url: String,
    /// Its certificate is of the authority `ca.pem` of the test data.
    tls_url: String,
    peer_url: String,
}

impl Etcd {
    async fn start() -> Etcd {
        let mut etcd = Etcd {
            child: None,
            dir: TempDir::new().expect("a temporary directory can be made"),
            client_url: free_url(),
            tls_url: free_url().replacen("http", "https", 1),
            peer_url: free_url(),
        };
        etcd.run().await;
        etcd
    }

    fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Starts the process and waits until it answers.
    async fn run(&mut self) {
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(self.data_dir())
            .args(["--listen-client-urls", &format!("{},{}", self.client_url, self.tls_url)])
            .args(["--advertise-client-urls", &self.client_url])
            .arg("--cert-file")
            .arg(testdata("a.pem"))
            .arg("--key-file")
            .arg(testdata("a.key"))
            .args(["--listen-peer-urls", &self.peer_url, "--initial-advertise-peer-urls", &self.peer_url])
            .args(["--initial-cluster", &format!("default={}", self.peer_url)])
            .arg("--unsafe-no-fsync")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("these tests need the program `etcd`; `cargo xtask setup` installs it");
        self.child = Some(child);
        let answers = async {
            // It needs the processors that a loop without pauses would take from it.
            while self.get("/").await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, answers).await.expect("etcd answers soon after its start");
    }

    async fn get(&self, prefix: &str) -> Result<Vec<String>, etcd_client::Error> {
        let mut client = Client::connect([&self.client_url], None).await?;
        let found = client.get(prefix, Some(GetOptions::new().with_prefix())).await?;
        found.kvs().iter().map(|kv| Ok(kv.key_str()?.to_owned())).collect()
    }

    async fn kill(&mut self) {
        let mut child = self.child.take().expect("etcd runs");
        child.kill().await.expect("etcd dies");
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.as_ref().and_then(Child::id).expect("etcd runs");
        let status = std::process::Command::new("kill").args([signal, &pid.to_string()]).status();
        assert!(status.expect("`kill` runs").success());
    }

    fn config(&self) -> DiscoveryConfig {
        DiscoveryConfig::Etcd(EtcdConfig {
            endpoints: vec![self.client_url.clone()],
            lease_ttl: Duration::from_secs(2),
            ..EtcdConfig::default()
        })
    }
}

/// etcd cannot be given a listening socket.
fn free_url() -> String {
    format!("http://127.0.0.1:{}", ports::free_port())
}

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tls/testdata").join(name)
}

fn empty(dir: &Path) {
    std::fs::remove_dir_all(dir).expect("etcd's directory can be removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_known_from_registration_to_withdrawal() {
    let etcd = Etcd::start().await;
    let DiscoveryConfig::Etcd(config) = etcd.config() else { unreachable!("its own kind") };
    assert!(reach(&config).await.unwrap().starts_with("3."), "an etcd that runs tells its version");
    let nowhere = EtcdConfig { endpoints: vec![free_url()], ..config };
    assert!(matches!(reach(&nowhere).await, Err(DiscoveryError::Etcd(_))));
    let discovery = watch(&etcd.config()).unwrap();
    let mut members = discovery.members();
    let registration = register(&etcd.config(), record("p0", Role::Prefill)).unwrap();
    until(&mut members, |members| members.get(&"p0".into()).is_some()).await;
    assert_eq!(etcd.get("/baton/").await.unwrap(), ["/baton/workers/p0"]);

    // A router that starts later finds the worker in the list.
    let late = watch(&etcd.config()).unwrap();
    until(&mut late.members(), |members| members.len() == 1).await;

    registration.withdraw().await;
    until(&mut members, |members| members.is_empty()).await;
    assert!(etcd.get("/baton/").await.unwrap().is_empty());
    late.stop().await;
    discovery.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_worker_is_removed_when_its_lease_expires() {
    let etcd = Etcd::start().await;
    let discovery = watch(&etcd.config()).unwrap();
    let mut members = discovery.members();
    // A runtime of its own: dropping it ends the worker like a kill.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let registration = {
        let _guard = runtime.enter();
        register(&etcd.config(), record("p0", Role::Prefill)).unwrap()
    };
    until(&mut members, |members| members.len() == 1).await;
    runtime.shutdown_background();
    std::mem::forget(registration);
    until(&mut members, |members| members.is_empty()).await;
    discovery.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_starts_again_elsewhere_waits_for_the_lease_of_its_earlier_process() {
    let etcd = Etcd::start().await;
    // A runtime of its own: dropping it ends the worker like a kill.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let killed = {
        let _guard = runtime.enter();
        register(&etcd.config(), record("p0", Role::Prefill)).unwrap()
    };
    until_state(&killed, |state| *state == RegistrationState::Registered).await;
    runtime.shutdown_background();
    std::mem::forget(killed);
    let again =
        WorkerRecord { incarnation: 2, address: "http://127.0.0.1:10".into(), ..record("p0", Role::Prefill) };
    let again = register(&etcd.config(), again).unwrap();
    let state = until_state(&again, |state| matches!(state, RegistrationState::Held(_))).await;
    let RegistrationState::Held(reason) = state else { unreachable!("just matched") };
    for part in ["http://127.0.0.1:9 ", "within 2 s", "--id (BATON_ID)"] {
        assert!(reason.contains(part), "{reason}");
    }
    until_state(&again, |state| {
        assert!(!matches!(state, RegistrationState::Refused(_)), "the lease has ended: {state:?}");
        *state == RegistrationState::Registered
    })
    .await;
    again.withdraw().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_stopped_and_started_again_changes_nothing() {
    let mut etcd = Etcd::start().await;
    let discovery = watch(&etcd.config()).unwrap();
    let mut members = discovery.members();
    let registration = register(&etcd.config(), record("p0", Role::Prefill)).unwrap();
    until(&mut members, |members| members.len() == 1).await;
    members.mark_unchanged();
    let mut is_connected = discovery.is_connected();
    assert!(*is_connected.borrow());

    etcd.kill().await;
    until_state(&registration, |state| matches!(state, RegistrationState::Searching { .. })).await;
    is_connected.wait_for(|is_connected| !is_connected).await.unwrap();
    assert_eq!(members.borrow().len(), 1);
    etcd.run().await;
    is_connected.wait_for(|is_connected| *is_connected).await.unwrap();
    until_state(&registration, |state| *state == RegistrationState::Registered).await;
    // The watcher follows again: it sees a worker that registered after the restart.
    let later = register(&etcd.config(), record("d0", Role::Decode)).unwrap();
    until(&mut members, |members| members.get(&"d0".into()).is_some()).await;
    assert!(members.borrow().get(&"p0".into()).is_some());
    registration.withdraw().await;
    later.withdraw().await;
    until(&mut members, |members| members.is_empty()).await;
    discovery.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_lost_its_data_is_filled_again() {
    let mut etcd = Etcd::start().await;
    let discovery = watch(&etcd.config()).unwrap();
    let mut members = discovery.members();
    let stays = register(&etcd.config(), record("p0", Role::Prefill)).unwrap();
    let leaves = register(&etcd.config(), record("p1", Role::Prefill)).unwrap();
    until(&mut members, |members| members.len() == 2).await;
    // Revisions before the loss are far ahead of those after it.
    let mut client = Client::connect([&etcd.client_url], None).await.unwrap();
    for _ in 0..50 {
        client.put("/elsewhere", "", None).await.unwrap();
    }
    drop(client);

    etcd.kill().await;
    empty(&etcd.data_dir());
    leaves.withdraw().await; // etcd cannot be reached
    etcd.run().await;
    until(&mut members, |members| {
        assert!(members.get(&"p0".into()).is_some(), "a live worker was never absent");
        members.len() == 1
    })
    .await;
    assert_eq!(etcd.get("/baton/").await.unwrap(), ["/baton/workers/p0"]);
    stays.withdraw().await;
    until(&mut members, |members| members.is_empty()).await;
    discovery.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_lease_of_a_live_worker_is_renewed_without_a_membership_change() {
    let etcd = Etcd::start().await;
    let discovery = watch(&etcd.config()).unwrap();
    let mut members = discovery.members();
    let registration = register(&etcd.config(), record("p0", Role::Prefill)).unwrap();
    until_state(&registration, |state| *state == RegistrationState::Registered).await;
    until(&mut members, |members| members.len() == 1).await;

    // The test revokes the lease of the live worker, as an etcd does that was frozen for too long.
    let mut client = Client::connect([&etcd.client_url], None).await.unwrap();
    let lease = client.leases().await.unwrap().leases()[0].id();
    client.lease_revoke(lease).await.unwrap();
    until_state(&registration, |state| matches!(state, RegistrationState::Searching { .. })).await;
    until_state(&registration, |state| *state == RegistrationState::Registered).await;
    assert_eq!(etcd.get("/baton/").await.unwrap(), ["/baton/workers/p0"]);
    let other = register(&etcd.config(), record("p1", Role::Prefill)).unwrap();
    until(&mut members, |members| {
        assert!(members.get(&"p0".into()).is_some(), "a live worker was never absent");
        members.len() == 2
    })
    .await;
    registration.withdraw().await;
    other.withdraw().await;
    discovery.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_etcd_is_noticed_and_used_again_later() {
    let etcd = Etcd::start().await;
    let discovery = watch(&etcd.config()).unwrap();
    let mut members = discovery.members();
    let registration = register(&etcd.config(), record("p0", Role::Prefill)).unwrap();
    until_state(&registration, |state| *state == RegistrationState::Registered).await;
    until(&mut members, |members| members.len() == 1).await;

    etcd.signal("-STOP");
    until_state(&registration, |state| matches!(state, RegistrationState::Searching { .. })).await;
    assert_eq!(members.borrow().len(), 1);
    etcd.signal("-CONT");
    until_state(&registration, |state| *state == RegistrationState::Registered).await;
    let other = register(&etcd.config(), record("p1", Role::Prefill)).unwrap();
    until(&mut members, |members| members.len() == 2).await;
    registration.withdraw().await;
    other.withdraw().await;
    discovery.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_id_is_refused_and_another_kv_format_is_not() {
    let etcd = Etcd::start().await;
    let first = register(&etcd.config(), record("p0", Role::Prefill)).unwrap();
    until_state(&first, |state| *state == RegistrationState::Registered).await;
    let second = register(&etcd.config(), other_format(record("d0", Role::Decode))).unwrap();
    until_state(&second, |state| *state == RegistrationState::Registered).await;
    let taken =
        WorkerRecord { incarnation: 2, address: "http://127.0.0.1:10".into(), ..record("p0", Role::Prefill) };
    let third = register(&etcd.config(), taken).unwrap();
    let state = until_state(&third, |state| matches!(state, RegistrationState::Refused(_))).await;
    assert!(format!("{state:?}").contains("taken by a running worker"), "{state:?}");
    third.withdraw().await;
    first.withdraw().await;
    second.withdraw().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_behind_a_compaction_reads_the_list_again() {
    let etcd = Etcd::start().await;
    let DiscoveryConfig::Etcd(config) = etcd.config() else { unreachable!("it is etcd") };
    let mut client = Client::connect([&etcd.client_url], None).await.unwrap();
    for _ in 0..20 {
        client.put("/elsewhere", "", None).await.unwrap();
    }
    let revision = client.get("/elsewhere", None).await.unwrap().header().unwrap().revision();
    client.compact(revision, None).await.unwrap();
    let mut watcher = super::Watcher::new(&config).unwrap();
    let followed = tokio::time::timeout(PATIENCE, watcher.follow(&mut client, 2)).await;
    followed.expect("etcd tells of the compaction").expect("the watch ends in order to list again");
}

async fn answers(connector: &mut Connector) -> bool {
    match connector.connect().await {
        Ok(mut client) => in_time(client.get("/", None)).await.is_ok(),
        Err(_) => false,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replaced_certificates_are_read_by_the_next_connection() {
    let etcd = Etcd::start().await;
    let dir = TempDir::new().unwrap();
    let [ca, cert, key] = ["ca.pem", "own.pem", "own.key"].map(|name| dir.path().join(name));
    let replace = |file: &Path, name: &str| {
        std::fs::copy(testdata(name), file).expect("test data can be copied");
    };
    replace(&ca, "other-ca.pem");
    replace(&cert, "b.pem");
    replace(&key, "a.key");
    let tls = EtcdTls { ca: Some(ca.clone()), cert: Some(cert), key: Some(key.clone()), domain: None };
    let config =
        EtcdConfig { endpoints: vec![etcd.tls_url.clone()], tls: Some(tls), ..EtcdConfig::default() };
    let error = Connector::new(&config).err().expect("the key is of another certificate").to_string();
    assert!(error.contains("--etcd-key (BATON_ETCD_KEY) cannot be used"), "{error}");

    replace(&key, "b.key");
    let mut connector = Connector::new(&config).unwrap();
    assert!(!answers(&mut connector).await, "the authority is another");
    replace(&ca, "ca.pem");
    assert!(answers(&mut connector).await);
    // Half of a rotation: what was read before is used.
    replace(&key, "a.key");
    assert!(answers(&mut connector).await);
    std::fs::remove_file(&ca).unwrap();
    assert!(answers(&mut connector).await);
    replace(&key, "b.key");
    replace(&ca, "other-ca.pem");
    assert!(!answers(&mut connector).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_registers_again_with_a_changed_password() {
    let etcd = Etcd::start().await;
    let mut client = Client::connect([&etcd.client_url], None).await.unwrap();
    client.user_add("root", "old", None).await.unwrap();
    client.role_add("root").await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.auth_enable().await.unwrap();
    let password_file = etcd.dir.path().join("password");
    std::fs::write(&password_file, "old\n").unwrap();
    let DiscoveryConfig::Etcd(mut config) = etcd.config() else { unreachable!("it is etcd") };
    config.auth = Some(EtcdAuth { user: "root".into(), password_file: password_file.clone() });
    let registration = register(&DiscoveryConfig::Etcd(config), record("p0", Role::Prefill)).unwrap();
    until_state(&registration, |state| *state == RegistrationState::Registered).await;

    let options = ConnectOptions::new().with_user("root", "old");
    let mut client = Client::connect([&etcd.client_url], Some(options)).await.unwrap();
    // etcd forgets the tokens of a user whose password changes.
    client.user_change_password("root", "new").await.unwrap();
    until_state(&registration, |state| matches!(state, RegistrationState::Searching { .. })).await;
    std::fs::write(&password_file, "new\n").unwrap();
    until_state(&registration, |state| *state == RegistrationState::Registered).await;
    registration.withdraw().await;
}
