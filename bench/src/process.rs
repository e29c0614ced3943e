//! A worker that is measured: a process of this program, which ends with the benchmark.

use std::{
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use baton_command::{embedded_model, model_path};
use baton_proto::worker::{InfoRequest, WorkerRecord, worker_client::WorkerClient};

/// How long a worker may take to load its model and serve.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// A worker's process.
pub(crate) struct WorkerProcess {
    child: Child,
    log: tempfile::NamedTempFile,
    /// "host:port"
    pub(crate) address: String,
    /// What it says of itself, once it is ready.
    pub(crate) record: WorkerRecord,
}

impl WorkerProcess {
    /// Starts a worker of this role, `prefill-worker` or `decode-worker`, with a model or the embedded one.
    pub(crate) fn spawn(role: &str, model: Option<&Path>, flags: &[String]) -> anyhow::Result<WorkerProcess> {
        let model = match model {
            Some(model) => model_path(model)?,
            None => embedded_model::directory()?,
        };
        // Another process may take the port first; then the worker reports that and ends.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let log = tempfile::NamedTempFile::with_prefix("baton-bench")?;
        let child = Command::new(std::env::current_exe().context("this program's file")?)
            .arg(role)
            .args([format!("--listen={address}"), format!("--id={role}")])
            .args(["--discovery=static".to_owned(), format!("--model={}", model.display())])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(log.reopen()?)
            .stderr(log.reopen()?)
            .spawn()
            .with_context(|| format!("cannot start a {role}"))?;
        Ok(WorkerProcess {
            child,
            log,
            address,
            record: WorkerRecord { id: role.to_owned(), ..WorkerRecord::default() },
        })
    }

    /// Waits until it serves.
    pub(crate) async fn ready(mut self) -> anyhow::Result<WorkerProcess> {
        let role = self.record.id.clone();
        let start = Instant::now();
        loop {
            if let Ok(mut client) = WorkerClient::connect(format!("http://{}", self.address)).await
                && let Ok(record) = client.info(InfoRequest {}).await
            {
                self.record = record.into_inner();
                return Ok(self);
            }
            if let Some(status) = self.child.try_wait()? {
                let log = std::fs::read_to_string(self.log.path()).unwrap_or_default();
                bail!("the {role} ended ({status}):\n{log}");
            }
            if start.elapsed() > START_TIMEOUT {
                bail!("the {role} did not start within {} s", START_TIMEOUT.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // No request is left to drain.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
