//! A cluster as its clients see it: calls of kubectl and helm.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

pub(super) struct Cluster {
    root: PathBuf,
    helm: PathBuf,
    kubectl: PathBuf,
    kubeconfig: PathBuf,
}

impl Cluster {
    pub(super) fn new(root: &Path, helm: &Path, kubectl: &Path, kubeconfig: &Path) -> Cluster {
        let owned = Path::to_path_buf;
        Cluster {
            root: owned(root),
            helm: owned(helm),
            kubectl: owned(kubectl),
            kubeconfig: owned(kubeconfig),
        }
    }

    /// What kubectl prints.
    pub(super) fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.run(&self.kubectl, args, None)
    }

    /// The objects that kubectl finds: `items` of a list.
    pub(super) fn get(&self, namespace: &str, kinds: &str, more: &[&str]) -> Result<Vec<Value>> {
        let args = [&["get", kinds, "--namespace", namespace, "--output=json"][..], more].concat();
        let list: Value = serde_json::from_str(&self.kubectl(&args)?).context("read kubectl's answer")?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// Creates or changes objects. Large definitions do not fit the annotation of a client-side apply.
    pub(super) fn apply(&self, objects: &[Value]) -> Result<()> {
        let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": objects});
        self.run(&self.kubectl, &["apply", "--server-side", "--filename=-"], Some(&list.to_string()))
            .map(drop)
    }

    /// What helm prints.
    pub(super) fn helm(&self, args: &[&str]) -> Result<String> {
        self.run(&self.helm, args, None)
    }

    fn run(&self, program: &Path, args: &[&str], input: Option<&str>) -> Result<String> {
        let mut command = Command::new(program);
        command.args(args).current_dir(&self.root).env("KUBECONFIG", &self.kubeconfig);
        command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        if let Some(input) = input {
            let mut stdin = child.stdin.take().expect("piped");
            stdin.write_all(input.as_bytes()).context("write to kubectl")?;
        }
        let output = child.wait_with_output()?;
        if !output.status.success() {
            let name = program.file_name().unwrap_or_default().to_string_lossy();
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{name} {}: {}", args.first().unwrap_or(&""), said.trim().replace('\n', " | "));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Asks until there is nothing to complain of; fails with the last complaints.
pub(super) fn until_nothing(
    within: Duration,
    mut complaints: impl FnMut() -> Result<Vec<String>>,
) -> Result<()> {
    let started = Instant::now();
    loop {
        let left = complaints()?;
        if left.is_empty() {
            return Ok(());
        }
        if started.elapsed() > within {
            bail!("after {} s: {}", within.as_secs(), left.join("; "));
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}
