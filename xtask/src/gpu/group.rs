//! Runs a program, with everything that it starts, to its end or its time limit.

use std::{
    fs::File,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::tools;

/// A program that has ended, or was killed.
pub(super) struct Ended {
    /// Its exit code; `None` after the time limit or a signal.
    pub(super) code: Option<i32>,
    pub(super) is_late: bool,
    /// "signal: 11 (SIGSEGV)", if it ended by itself with one.
    pub(super) signal: Option<String>,
    /// On standard output and standard error.
    pub(super) output: String,
    pub(super) took: Duration,
}

/// Interval between looks whether a program has ended.
const PAUSE: Duration = Duration::from_millis(20);

/// How long a killed program may take to end. The kernel does not end one that waits for a driver that hangs; it is left behind.
const KILL_LIMIT: Duration = Duration::from_secs(3);

/// Runs a program and its child processes. Their output goes to `log`.
pub(super) fn finish(command: &mut Command, log: &Path, limit: Duration) -> Result<Ended> {
    let start = Instant::now();
    let mut group = Group::start(command, log)?;
    let status = group.wait(limit)?;
    if status.is_none() {
        group.kill();
    }
    let output = String::from_utf8_lossy(&std::fs::read(log)?).into_owned();
    let code = status.and_then(|status| status.code());
    let signal = status.filter(|status| status.code().is_none()).map(|status| status.to_string());
    Ok(Ended { code, is_late: status.is_none(), signal, output, took: start.elapsed() })
}

/// A process and its child processes. They are killed when it is dropped.
pub(super) struct Group(Child);

impl Group {
    pub(super) fn start(command: &mut Command, log: &Path) -> Result<Group> {
        let file = File::create(log).with_context(|| format!("make {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
        let child = command.spawn().with_context(|| format!("start {}", tools::shown(command)))?;
        Ok(Group(child))
    }

    /// Waits for the first process. `None`: it has not ended within the limit.
    pub(super) fn wait(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            if start.elapsed() >= limit {
                return Ok(None);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Asks all processes to end.
    pub(super) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    fn kill(&mut self) {
        self.signal(Signal::KILL);
        // One that does not end even now is left behind.
        let _ = self.wait(KILL_LIMIT);
    }

    fn signal(&self, signal: Signal) {
        let leader = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        // They may have ended by themselves.
        let _ = kill_process_group(leader.expect("a process has a number"), signal);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Also after the first process has ended: its child processes may have outlived it.
        self.kill();
    }
}

impl Ended {
    /// Why it did not end well.
    pub(super) fn why(&self) -> String {
        let signal = self.signal.as_ref().map_or(String::new(), |signal| format!(", {signal}"));
        format!("{}{signal}", last_line(&self.output))
    }
}

/// The last line of a program's output: usually the reason why it ended.
pub(super) fn last_line(output: &str) -> String {
    output.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_killed_with_its_children() {
        let log = std::env::temp_dir().join(format!("baton-xtask-{}.log", std::process::id()));
        let mut endless = Command::new("sh");
        // The child ignores a polite signal, and outlives its parent.
        endless.args(["-c", "trap '' TERM; sleep 100 & echo $!; wait"]);
        // Long enough for a shell to begin, on any machine.
        let ended = finish(&mut endless, &log, Duration::from_secs(3)).unwrap();
        assert!(ended.is_late && ended.code.is_none());
        let child: i32 = ended.output.trim().parse().unwrap();
        let is_gone = || {
            let state = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
            // A child without a parent stays a zombie where no init waits for it.
            state.is_empty() || state.contains(") Z ")
        };
        let start = Instant::now();
        while !is_gone() {
            assert!(start.elapsed() < Duration::from_secs(20), "the child process lives");
            std::thread::sleep(PAUSE);
        }
        std::fs::remove_file(log).unwrap();
    }
}
