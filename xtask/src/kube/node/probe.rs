//! Probes: whether a container has started, lives, and is ready.

use std::{
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::kube::http::Request;

/// A probe of the chart's kinds: over HTTP or TCP.
pub(super) struct Probe {
    port: u16,
    /// `None`: a connection is enough.
    path: Option<String>,
    period: Duration,
    timeout: Duration,
    failure_threshold: u64,
    due: Instant,
    num_failures: u64,
}

/// What a probe found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Succeeded,
    /// As often as its threshold says.
    Failed,
    /// Not due, or failed less often.
    Open,
}

impl Probe {
    /// The probe `name` of a container. `None`: it has none. Fails for kinds that the chart does not use.
    pub(super) fn of(container: &Value, name: &str) -> Result<Option<Probe>> {
        let spec = &container[name];
        if spec.is_null() {
            return Ok(None);
        }
        let (target, path) = match (&spec["httpGet"], &spec["tcpSocket"]) {
            (http, Value::Null) if http["scheme"].as_str().unwrap_or("HTTP") == "HTTP" => {
                (&http["port"], Some(http["path"].as_str().context("a probe without a path")?.to_owned()))
            }
            (Value::Null, tcp) => (&tcp["port"], None),
            _ => bail!("{name} is neither httpGet without TLS nor tcpSocket"),
        };
        let seconds = |field: &str, default| Duration::from_secs(spec[field].as_u64().unwrap_or(default));
        Ok(Some(Probe {
            port: port(container, target).with_context(|| format!("{name} names an unknown port"))?,
            path,
            period: seconds("periodSeconds", 10),
            timeout: seconds("timeoutSeconds", 1),
            failure_threshold: spec["failureThreshold"].as_u64().unwrap_or(3),
            due: Instant::now() + seconds("initialDelaySeconds", 0),
            num_failures: 0,
        }))
    }

    /// Probes if it is time.
    pub(super) fn ask(&mut self, address: IpAddr) -> Verdict {
        if Instant::now() < self.due {
            return Verdict::Open;
        }
        self.due = Instant::now() + self.period;
        let address = SocketAddr::new(address, self.port);
        let is_well = match &self.path {
            None => TcpStream::connect_timeout(&address, self.timeout).is_ok(),
            Some(path) => {
                let request = Request {
                    method: "GET",
                    path,
                    key: None,
                    content_type: "text/plain",
                    body: "",
                    timeout: self.timeout,
                };
                request.send(address).is_ok_and(|answer| (200..400).contains(&answer.status))
            }
        };
        self.num_failures = if is_well { 0 } else { self.num_failures + 1 };
        match self.num_failures {
            0 => Verdict::Succeeded,
            failures if failures >= self.failure_threshold => Verdict::Failed,
            _ => Verdict::Open,
        }
    }
}

/// A port by name or number.
fn port(container: &Value, target: &Value) -> Option<u16> {
    let number = match target.as_str() {
        Some(name) => {
            let ports = container["ports"].as_array()?;
            &ports.iter().find(|port| port["name"] == name)?["containerPort"]
        }
        None => target,
    };
    u16::try_from(number.as_u64()?).ok()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use serde_json::json;

    use super::*;

    #[test]
    fn a_probe_fails_at_its_threshold_and_other_kinds_are_refused() {
        // An address of its own, so that no other test's server gets the port when the listener is gone.
        let here = IpAddr::V4(Ipv4Addr::new(127, 7, 7, 7));
        let listener = TcpListener::bind((here, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let container = json!({
            "ports": [{"name": "grpc", "containerPort": port}],
            "livenessProbe": {"tcpSocket": {"port": "grpc"}, "periodSeconds": 0, "failureThreshold": 2},
            "readinessProbe": {"exec": {"command": ["true"]}},
            "startupProbe": {"httpGet": {"path": "/livez", "port": "http"}},
        });
        let mut probe = Probe::of(&container, "livenessProbe").unwrap().unwrap();
        assert!(probe.ask(here) == Verdict::Succeeded);
        drop(listener);
        assert!(probe.ask(here) == Verdict::Open);
        assert!(probe.ask(here) == Verdict::Failed);
        assert!(Probe::of(&container, "readinessProbe").is_err());
        assert!(Probe::of(&container, "startupProbe").is_err(), "no port has this name");
        assert!(Probe::of(&json!({}), "livenessProbe").unwrap().is_none());
    }
}
