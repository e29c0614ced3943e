//! A container as the chart asks for it: the image's user, a read-only root, no capability, a /tmp in memory.
//!
//! crun runs it without control groups: limits of memory and processors, and the default seccomp profile, are the kubelet's.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::buildah::{Buildah, Mounted};
use crate::tools;

/// The longest drain, and a margin.
const STOP_LIMIT: Duration = Duration::from_secs(45);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub(super) struct Container<'a> {
    files: Mounted<'a>,
    config: Value,
    bundle: PathBuf,
}

impl Container<'_> {
    pub(super) fn new<'a>(buildah: &'a Buildah, image: &str, place: &Path) -> Result<Container<'a>> {
        let bundle = place.join("bundle");
        fs::create_dir_all(&bundle)?;
        Ok(Container { files: buildah.mount(image)?, config: buildah.config(image)?, bundle })
    }

    /// Runs the image's program with these arguments; its output.
    pub(super) fn output(&self, args: &[&str]) -> Result<String> {
        self.write_bundle(Some(args))?;
        tools::output(self.crun(&["run"]).arg("--bundle").arg(&self.bundle).arg(self.id()))
    }

    /// Starts the image's own command.
    pub(super) fn start(&self) -> Result<Running<'_>> {
        self.write_bundle(None)?;
        let log = self.bundle.join("log");
        let file = fs::File::create(&log)?;
        let mut command = self.crun(&["run"]);
        command.arg("--bundle").arg(&self.bundle).arg(self.id());
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        Ok(Running { container: self, crun: command.spawn().context("run crun")?, log })
    }

    fn crun(&self, args: &[&str]) -> Command {
        // crun refuses hosts with control groups of both versions, even if it makes none. So it sees none, in its own mounts.
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "sh",
            "-ec",
            "mount -t tmpfs tmpfs /sys/fs/cgroup; exec \"$@\"",
            "sh",
            "crun",
        ]);
        command.arg("--root").arg(self.bundle.join("state")).arg("--cgroup-manager=disabled").args(args);
        command
    }

    fn id(&self) -> String {
        format!("baton-image-{}", std::process::id())
    }

    fn write_bundle(&self, args: Option<&[&str]>) -> Result<()> {
        let spec = spec(&self.config, &self.files.path, args)?;
        Ok(fs::write(self.bundle.join("config.json"), spec.to_string())?)
    }
}

/// The OCI runtime's configuration for an image's. Without `args` the image's own are run.
fn spec(image: &Value, root: &Path, args: Option<&[&str]>) -> Result<Value> {
    let words = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let mut command = words(&image["Entrypoint"]);
    command.extend(
        args.map_or_else(|| words(&image["Cmd"]), |args| args.iter().map(ToString::to_string).collect()),
    );
    let user = image["User"].as_str().context("the image names no user")?;
    let (uid, gid) = user.split_once(':').with_context(|| format!("{user:?} is no user and group"))?;
    let (uid, gid): (u32, u32) = (uid.parse().context("a number")?, gid.parse().context("a number")?);
    let memory = |path: &str| json!({"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777", "size=512m"]});
    let namespaces = ["pid", "mount", "ipc", "uts", "network"].map(|kind| json!({"type": kind}));
    Ok(json!({
        "ociVersion": "1.0.2",
        "root": {"path": root, "readonly": true},
        "process": {
            "user": {"uid": uid, "gid": gid},
            "args": command,
            "env": words(&image["Env"]),
            "cwd": "/",
            "noNewPrivileges": true,
            "capabilities": {"bounding": [], "effective": [], "inheritable": [], "permitted": [], "ambient": []},
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
            memory("/dev/shm"),
            memory("/tmp"),
        ],
        "linux": {"namespaces": namespaces},
    }))
}

/// A container that runs; it is killed when dropped.
pub(super) struct Running<'a> {
    container: &'a Container<'a>,
    crun: Child,
    log: PathBuf,
}

impl Running<'_> {
    /// Runs a command in the container; its output.
    pub(super) fn exec(&self, command: &[&str]) -> Result<String> {
        tools::output(self.container.crun(&["exec", &self.container.id()]).args(command))
    }

    /// Waits until a command succeeds in it.
    pub(super) fn wait_until(&mut self, limit: Duration, command: &[&str]) -> Result<()> {
        let started = Instant::now();
        while let Err(error) = self.exec(command) {
            if self.crun.try_wait()?.is_some() || started.elapsed() > limit {
                bail!("{error:#}; its log: {}", fs::read_to_string(&self.log)?);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Sends SIGTERM and waits for its end, which must be one without an error.
    pub(super) fn end(&mut self) -> Result<()> {
        tools::output(&mut self.container.crun(&["kill", &self.container.id(), "TERM"]))?;
        let started = Instant::now();
        while started.elapsed() < STOP_LIMIT {
            if let Some(status) = self.crun.try_wait()? {
                ensure!(status.success(), "{status}; its log: {}", fs::read_to_string(&self.log)?);
                return Ok(());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        bail!("it did not end within {} s of SIGTERM", STOP_LIMIT.as_secs())
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // crun ends with its container; if that has ended, there is nothing to delete.
        let _ = tools::output(&mut self.container.crun(&["delete", "--force", &self.container.id()]));
        let _ = self.crun.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_runs_what_the_image_says_and_refuses_names_of_users() {
        let image = json!({"User": "10001:10001", "Entrypoint": ["baton"], "Cmd": ["up"], "Env": ["A=b"]});
        let own = spec(&image, Path::new("/r"), None).unwrap();
        assert_eq!(
            (&own["process"]["args"], &own["process"]["user"]),
            (&json!(["baton", "up"]), &json!({"uid": 10001, "gid": 10001}))
        );
        assert_eq!(
            (&own["root"], &own["process"]["env"]),
            (&json!({"path": "/r", "readonly": true}), &json!(["A=b"]))
        );
        let other = spec(&image, Path::new("/r"), Some(&["--version"])).unwrap();
        assert_eq!(other["process"]["args"], json!(["baton", "--version"]));
        for user in ["", "root", "10001", "baton:baton"] {
            assert!(spec(&json!({"User": user}), Path::new("/r"), None).is_err(), "{user}");
        }
    }
}
