//! A release whose pods run: it answers, passes `helm test`, opens the ports that policies name, and is restarted under load.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{
    cluster::{Cluster, until_nothing},
    load::{self, Load},
    node::Node,
    nodes, ports,
    releases::Release,
    steps::Steps,
};

const NAMESPACE: &str = "serving";
/// Programs without optimisations load slowly on a busy machine.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(180);

/// Every component, with the kind of its workload.
const COMPONENTS: [(&str, &str); 4] =
    [("deployment", "router"), ("deployment", "prefill"), ("deployment", "decode"), ("deployment", "etcd")];

const INSTALL: &str = "serving";
const TESTS: &str = "serving tests";
const PORTS: &str = "serving ports";
const END: &str = "serving end";

/// Runs its steps that are wanted, after the installation without which none can run.
pub(super) fn run(steps: &mut Steps, cluster: &Cluster, node: &Node, baton: &Path) -> Result<()> {
    if !is_wanted(steps) {
        return Ok(());
    }
    let release = Release { cluster, namespace: NAMESPACE, name: "llm", settle_timeout: SETTLE_TIMEOUT };
    let (key, entry) = new_key(baton)?;
    steps.must(INSTALL, || install(&release, &key, &entry))?;
    steps.try_to(TESTS, || test(&release));
    steps.try_to(PORTS, || open_the_ports_of_policies(&release, node));
    for (kind, component) in COMPONENTS {
        steps.try_to(&restart(component), || restart_under_load(&release, node, &key, kind, component));
    }
    steps.try_to(END, || end(&release, node));
    Ok(())
}

/// Whether one of its steps is wanted.
fn is_wanted(steps: &Steps) -> bool {
    [INSTALL, TESTS, PORTS, END].iter().any(|name| steps.include(name))
        || COMPONENTS.iter().any(|(_, component)| steps.include(&restart(component)))
}

/// The name of the step that restarts a component.
fn restart(component: &str) -> String {
    format!("serving {component}")
}

/// An API key, and its entry in the file of keys.
fn new_key(baton: &Path) -> Result<(String, String)> {
    let output = Command::new(baton)
        .args(["keys", "new", "test", "--tenant", "test"])
        .output()
        .context("run baton")?;
    ensure!(output.status.success(), "baton keys new ended with {}", output.status);
    Ok((String::from_utf8(output.stderr)?.trim().to_owned(), String::from_utf8(output.stdout)?))
}

fn install(release: &Release<'_>, key: &str, entry: &str) -> Result<String> {
    nodes::add_namespace(release.cluster, NAMESPACE, "restricted")?;
    release.cluster.apply(&[json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys", "namespace": NAMESPACE},
        "stringData": {"keys.toml": entry, "test": key},
    })])?;
    release.helm(&["install"], &["--set", "apiKeys.secretName=keys", "--set", "apiKeys.testKey=test"])?;
    Ok(format!("{} run, each process in a network namespace of its own", release.settle()?))
}

fn test(release: &Release<'_>) -> Result<String> {
    let said = release.cluster.helm(&["test", release.name, "--namespace", NAMESPACE, "--timeout=180s"])?;
    let num_passed = said.matches("Phase:          Succeeded").count();
    ensure!(num_passed == 3, "helm test did not run 3 tests: {said}");
    let left = release.cluster.get(NAMESPACE, "pods", &["--selector=app.kubernetes.io/component=test"])?;
    ensure!(left.is_empty(), "{} pods of tests that succeeded are left", left.len());
    Ok("HTTP; a remote prefill moved bytes; KV moved between each two workers".to_owned())
}

fn open_the_ports_of_policies(release: &Release<'_>, node: &Node) -> Result<String> {
    let policies = release.cluster.get(NAMESPACE, "networkpolicies", &[])?;
    let mut seen = Vec::new();
    for pod in release.pods()? {
        let open: BTreeSet<u16> = node.open_ports(&pod)?.into_iter().collect();
        let admitted = ports::admitted(&pod, &policies);
        let component = pod["metadata"]["labels"]["app.kubernetes.io/component"].as_str().unwrap_or_default();
        ensure!(open == admitted, "{component} listens on {open:?}, and policies admit {admitted:?}");
        seen.push(format!("{component} {open:?}"));
    }
    Ok(seen.join(", "))
}

fn restart_under_load(
    release: &Release<'_>,
    node: &Node,
    key: &str,
    kind: &str,
    component: &str,
) -> Result<String> {
    node.complaints();
    let load = Load::start(router(release)?, key)?;
    let workload = format!("{kind}/{}-baton-{component}", release.name);
    let started = Instant::now();
    let restarted = (|| {
        std::thread::sleep(Duration::from_secs(3));
        release.cluster.kubectl(&["rollout", "restart", "--namespace", NAMESPACE, &workload])?;
        release.settle()?;
        // Those that leave have left.
        until_nothing(SETTLE_TIMEOUT, || {
            let pods = release.cluster.get(NAMESPACE, "pods", &[])?;
            let leaving = pods.iter().filter(|pod| !pod["metadata"]["deletionTimestamp"].is_null());
            Ok(leaving.map(|pod| format!("{} is leaving", pod["metadata"]["name"])).collect())
        })
    })();
    let took = started.elapsed();
    let report = load.finish()?;
    restarted?;
    let failures = report.failures.len();
    ensure!(
        failures == 0,
        "{failures} of {} requests failed, such as: {}",
        report.num_requests,
        report.failures[0]
    );
    ensure!(report.num_different == 0, "{} of {} answers differ", report.num_different, report.num_requests);
    let wanted = f64::from(load::REQUESTS_PER_SECOND);
    ensure!(report.per_second > wanted * 0.95, "only {:.1} requests/s were sent", report.per_second);
    let complaints = node.complaints();
    ensure!(complaints.is_empty(), "{}", complaints.join("; "));
    for pod in release.pods()? {
        let num_restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64();
        ensure!(num_restarts == Some(0), "{} ended by itself", pod["metadata"]["name"]);
    }
    Ok(format!(
        "{} requests at {:.0}/s in {:.0} s, none failed, none differs; slowest {:.2} s",
        report.num_requests,
        report.per_second,
        took.as_secs_f64(),
        report.slowest.as_secs_f64()
    ))
}

/// Where the routers' Service is.
fn router(release: &Release<'_>) -> Result<SocketAddr> {
    let services = release.cluster.get(NAMESPACE, "services", &[])?;
    let name = format!("{}-baton-router", release.name);
    let service = services.iter().find(|service| service["metadata"]["name"] == *name);
    let spec = &service.with_context(|| format!("no service {name}"))?["spec"];
    let address = spec["clusterIP"].as_str().context("a service without an address")?.parse()?;
    let port = spec["ports"][0]["port"].as_u64().context("a service without a port")?;
    Ok(SocketAddr::new(address, u16::try_from(port)?))
}

/// Uninstalls it; nothing is left on the node either.
fn end(release: &Release<'_>, node: &Node) -> Result<String> {
    node.complaints();
    release.uninstall()?;
    until_nothing(SETTLE_TIMEOUT, || {
        Ok(node.networks()?.lines().map(|name| format!("{name} is left")).collect())
    })?;
    let complaints = node.complaints();
    ensure!(complaints.is_empty(), "{}", complaints.join("; "));
    Ok("every process ended by itself; no network namespace is left".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_can_be_chosen_alone() {
        for only in ["", "serving", "serving tests", "ports", "serving decode", "etcd", "serving end"] {
            assert!(is_wanted(&Steps::new(only)), "{only}");
        }
        for only in ["two releases", "serving decoder"] {
            assert!(!is_wanted(&Steps::new(only)), "{only}");
        }
    }
}
