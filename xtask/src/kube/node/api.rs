//! The API server as a node sees it: objects read, statuses written. `kubectl proxy` adds keys and TLS.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::kube::http::{Answer, Request};

const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy)]
pub(super) struct Api {
    /// Of `kubectl proxy`.
    proxy: SocketAddr,
}

impl Api {
    pub(super) fn new(proxy: SocketAddr) -> Api {
        Api { proxy }
    }

    pub(super) fn get(&self, path: &str) -> Result<Value> {
        self.call("GET", path, "")
    }

    /// The items of a list.
    pub(super) fn list(&self, path: &str) -> Result<Vec<Value>> {
        let mut list = self.get(path)?;
        Ok(serde_json::from_value(list["items"].take()).unwrap_or_default())
    }

    pub(super) fn write_status(&self, pod: &Value, status: &Value) -> Result<()> {
        self.call("PATCH", &format!("{}/status", path_of(pod)), &json!({"status": status}).to_string())
            .map(drop)
    }

    /// Removes a pod whose processes have ended, if it is there.
    pub(super) fn forget(&self, pod: &Value) -> Result<()> {
        let options = json!({
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": pod["metadata"]["uid"]},
        });
        let answer = self.send("DELETE", &path_of(pod), &options.to_string())?;
        // 404: it is gone; 409: its successor has its name.
        ensure!(matches!(answer.status, 200..300 | 404 | 409), "remove a pod: status {}", answer.status);
        Ok(())
    }

    fn call(&self, method: &str, path: &str, body: &str) -> Result<Value> {
        let answer = self.send(method, path, body)?;
        ensure!(answer.status < 300, "{method} {path}: status {}: {}", answer.status, answer.body);
        serde_json::from_str(&answer.body).with_context(|| format!("read the answer to {method} {path}"))
    }

    fn send(&self, method: &str, path: &str, body: &str) -> Result<Answer> {
        let content_type =
            if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let request = Request { method, path, key: None, content_type, body, timeout: TIMEOUT };
        request.send(self.proxy).with_context(|| format!("{method} {path}"))
    }
}

fn path_of(pod: &Value) -> String {
    let word = |field: &str| pod["metadata"][field].as_str().unwrap_or_default();
    format!("/api/v1/namespaces/{}/pods/{}", word("namespace"), word("name"))
}
