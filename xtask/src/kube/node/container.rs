//! A container: one process in the network of its pod and a root of its own, with its probes, its hook and its end.

use std::{
    collections::BTreeMap,
    fs::File,
    net::Ipv4Addr,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::probe::{Probe, Verdict};
use crate::kube::json::{items, word};

/// What deploy/Dockerfile sets, and PATH.
const IMAGE: [(&str, &str); 3] = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("XDG_CACHE_HOME", "/tmp"),
    ("BATON_WEIGHT_CACHE", "none"),
];
/// What Baton's image runs, unless a container names a command.
const ENTRYPOINT: &str = "baton";

/// Between two starts of a container.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// Where and as whom the processes of a container run.
pub(super) struct Setting {
    /// Of the network namespace.
    pub(super) network: String,
    pub(super) root: PathBuf,
    pub(super) variables: BTreeMap<String, String>,
    pub(super) user: u64,
    pub(super) group: u64,
    /// Of both outputs.
    pub(super) log: PathBuf,
}

pub(super) struct Container {
    spec: Value,
    setting: Setting,
    arguments: Vec<String>,
    startup: Option<Probe>,
    liveness: Option<Probe>,
    readiness: Option<Probe>,
    state: State,
    num_starts: u64,
    is_started: bool,
    is_ready: bool,
}

enum State {
    Runs(Child),
    /// The exit code, and when it was seen.
    Ended(i32, Instant),
}

impl Container {
    /// Starts it.
    pub(super) fn start(spec: &Value, setting: Setting) -> Result<Container> {
        let given = |field: &str| -> Vec<String> {
            items(&spec[field]).map(|item| expanded(word(item), &setting.variables)).collect()
        };
        let mut arguments = given("command");
        if arguments.is_empty() {
            arguments.push(ENTRYPOINT.to_owned());
        }
        arguments.extend(given("args"));
        let state = State::Runs(setting.command(&arguments)?.spawn().context("run ip")?);
        let mut this = Container {
            spec: spec.clone(),
            setting,
            arguments,
            startup: None,
            liveness: None,
            readiness: None,
            state,
            num_starts: 1,
            is_started: false,
            is_ready: false,
        };
        this.arm()?;
        Ok(this)
    }

    /// Probes it, and starts it again if it has ended and should not have.
    pub(super) fn look_after(
        &mut self,
        address: Ipv4Addr,
        is_restarted: bool,
        grace: Duration,
    ) -> Result<()> {
        if let State::Runs(child) = &mut self.state
            && let Some(status) = child.try_wait()?
        {
            self.ended(status);
        }
        if let State::Ended(_, since) = self.state {
            if is_restarted && since.elapsed() > RESTART_PAUSE {
                self.state = State::Runs(self.setting.command(&self.arguments)?.spawn()?);
                self.num_starts += 1;
                self.arm()?;
            }
            return Ok(());
        }
        let ask = |probe: &mut Option<Probe>| probe.as_mut().map(|probe| probe.ask(address.into()));
        if !self.is_started {
            match ask(&mut self.startup) {
                None | Some(Verdict::Succeeded) => self.is_started = true,
                Some(Verdict::Failed) => drop(self.stop(grace)?),
                Some(Verdict::Open) => {}
            }
            return Ok(());
        }
        if ask(&mut self.liveness) == Some(Verdict::Failed) {
            self.stop(grace)?;
            return Ok(());
        }
        match ask(&mut self.readiness) {
            None | Some(Verdict::Succeeded) => self.is_ready = true,
            Some(Verdict::Failed) => self.is_ready = false,
            Some(Verdict::Open) => {}
        }
        Ok(())
    }

    /// Runs its hook, sends SIGTERM, and kills it after the grace period. Fails if it had to, or if the exit code is not 0.
    pub(super) fn stop(&mut self, grace: Duration) -> Result<()> {
        let State::Runs(child) = &mut self.state else { return Ok(()) };
        let deadline = Instant::now() + grace;
        let hook = &self.spec["lifecycle"]["preStop"];
        if !hook.is_null() {
            let hook: Vec<String> = items(&hook["exec"]["command"]).map(|it| word(it).to_owned()).collect();
            ensure!(!hook.is_empty(), "preStop is not exec");
            let mut hook = self.setting.command(&hook)?.spawn()?;
            if ended_before(&mut hook, deadline)?.is_none() {
                hook.kill()?;
                hook.wait()?;
            }
        }
        // It may have ended meanwhile.
        let _ = kill_process(Pid::from_child(child), Signal::TERM);
        let in_time = ended_before(child, deadline)?;
        let status = match in_time {
            Some(status) => status,
            None => {
                child.kill()?;
                child.wait()?
            }
        };
        self.ended(status);
        ensure!(in_time.is_some(), "it was killed after {} s", grace.as_secs());
        // etcd ends itself by the signal when it has handled it, unless it is process 1 as in a container.
        let is_etcd = self.arguments[0] != ENTRYPOINT && status.signal() == Some(Signal::TERM.as_raw());
        ensure!(status.success() || is_etcd, "it ended with {status}");
        Ok(())
    }

    /// `None`: it runs.
    pub(super) fn exit_code(&self) -> Option<i32> {
        match self.state {
            State::Runs(_) => None,
            State::Ended(code, _) => Some(code),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Its part of the pod's status.
    pub(super) fn status(&self) -> Value {
        let state = match self.exit_code() {
            None => json!({"running": {}}),
            Some(code) => {
                json!({"terminated": {"exitCode": code, "reason": if code == 0 { "Completed" } else { "Error" }}})
            }
        };
        json!({
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": "",
            "ready": self.is_ready,
            "started": self.is_started,
            "restartCount": self.num_starts - 1,
            "state": state,
        })
    }

    /// Sets probes up for a process that has just started.
    fn arm(&mut self) -> Result<()> {
        self.startup = Probe::of(&self.spec, "startupProbe")?;
        self.liveness = Probe::of(&self.spec, "livenessProbe")?;
        self.readiness = Probe::of(&self.spec, "readinessProbe")?;
        (self.is_started, self.is_ready) = (false, false);
        Ok(())
    }

    fn ended(&mut self, status: ExitStatus) {
        (self.is_started, self.is_ready) = (false, false);
        self.state = State::Ended(status.code().unwrap_or(137), Instant::now());
    }
}

impl Setting {
    /// The process becomes the program: each of these replaces itself by the next.
    fn command(&self, arguments: &[String]) -> Result<Command> {
        let log = File::options().create(true).append(true).open(&self.log).context("open a log")?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.network, "chroot"]).arg(&self.root);
        command.args([
            "setpriv",
            "--clear-groups",
            "--no-new-privs",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ]);
        command.args([format!("--reuid={}", self.user), format!("--regid={}", self.group)]).arg("--");
        command.args(arguments).env_clear().envs(IMAGE).envs(&self.variables);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(command)
    }
}

fn ended_before(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>> {
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            ended => return Ok(ended),
        }
    }
}

/// With `$(NAME)` replaced where NAME is a variable of the container.
pub(super) fn expanded(text: &str, variables: &BTreeMap<String, String>) -> String {
    variables.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("$({name})"), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_replaced_and_unknown_ones_kept() {
        let variables = BTreeMap::from([("POD_IP".to_owned(), "10.65.0.2".to_owned())]);
        assert_eq!(expanded("http://$(POD_IP):1/$(HOME)", &variables), "http://10.65.0.2:1/$(HOME)");
    }

    #[test]
    fn containers_get_what_the_image_sets() {
        let dockerfile = include_str!("../../../../deploy/Dockerfile");
        for (name, value) in &IMAGE[1..] {
            assert!(dockerfile.contains(&format!("ENV {name}={value}\n")), "{name}");
        }
        assert!(dockerfile.contains(&format!("ENTRYPOINT [\"{ENTRYPOINT}\"]")));
    }
}
