//! Runs a program to its end or its time limit, and reads its output.

use std::{
    fs::File,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{check::Outcome, tools};

/// A program that has ended.
pub(super) struct Ended {
    /// Its exit code; `None` after the time limit or a signal.
    pub(super) code: Option<i32>,
    pub(super) is_late: bool,
    /// On standard output and standard error.
    pub(super) output: String,
    pub(super) took: Duration,
}

/// Interval between checks whether a program has ended.
const PAUSE: Duration = Duration::from_millis(50);

/// Runs a program and its child processes. Their output goes to `log`.
pub(super) fn finish(command: &mut Command, log: &Path, limit: Duration) -> Result<Ended> {
    let start = Instant::now();
    let mut group = Group::start(command, log)?;
    let mut is_late = false;
    let status = loop {
        match group.0.try_wait()? {
            Some(status) => break status,
            None if start.elapsed() >= limit => {
                is_late = true;
                group.kill();
                break group.0.wait()?;
            }
            None => std::thread::sleep(PAUSE),
        }
    };
    let output = String::from_utf8_lossy(&std::fs::read(log)?).into_owned();
    let code = status.code().filter(|_| !is_late);
    Ok(Ended { code, is_late, output, took: start.elapsed() })
}

/// A process and its child processes. They are killed when it is dropped.
pub(super) struct Group(pub(super) Child);

impl Group {
    pub(super) fn start(command: &mut Command, log: &Path) -> Result<Group> {
        let file = File::create(log).with_context(|| format!("make {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
        let child = command.spawn().with_context(|| format!("start {}", tools::shown(command)))?;
        Ok(Group(child))
    }

    /// Sends all of them a signal, such as "TERM".
    pub(super) fn signal(&self, signal: &str) {
        let group = format!("-{}", self.0.id());
        // They may have ended by themselves.
        let _ = Command::new("kill").args(["-s", signal, "--", &group]).stderr(Stdio::null()).status();
    }

    fn kill(&mut self) {
        self.signal("KILL");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            self.kill();
            let _ = self.0.wait();
        }
    }
}

/// The outcome of a test program.
pub(super) fn of_tests(ended: &Ended) -> Outcome {
    let mut findings: Vec<String> = ended
        .output
        .lines()
        .filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
        .map(|name| name.trim_start_matches("cuda::").to_owned())
        .collect();
    let counts = ended.output.lines().find_map(|line| line.strip_prefix("test result: ok. "));
    let num_passed = counts.and_then(|counts| counts.split(' ').next()?.parse::<u32>().ok());
    if ended.is_late {
        findings.push(format!("not done in {:.0} s", ended.took.as_secs_f32()));
    }
    match (findings.is_empty(), num_passed, ended.code) {
        // A program without tests counts as failed.
        (true, Some(num_passed @ 1..), Some(0)) => Outcome::Passed(format!("{num_passed} tests")),
        (true, _, _) => Outcome::Failed(vec![last_line(&ended.output)]),
        (false, _, _) => Outcome::Failed(findings),
    }
}

/// The outcome of `gpu_check`.
pub(super) fn of_figures(ended: &Ended) -> Outcome {
    let rows = || ended.output.lines().filter(|line| line.starts_with('|') && !line.starts_with("|--"));
    let missed = rows().filter(|line| line.contains("MISSED")).map(|line| line.trim_matches(['|', ' ']));
    let missed: Vec<String> = missed.map(|line| line.replace(" | ", ", ")).collect();
    match (ended.code, missed.is_empty()) {
        (Some(0), true) => Outcome::Passed(format!("{} figures", rows().count().saturating_sub(1))),
        (Some(_), false) => Outcome::Failed(missed),
        _ if ended.is_late => Outcome::Failed(vec![format!("not done in {:.0} s", ended.took.as_secs_f32())]),
        _ => Outcome::Failed(vec![last_line(&ended.output)]),
    }
}

/// The last line of a program's output: usually the reason why it ended.
pub(super) fn last_line(output: &str) -> String {
    output.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(output: &str, code: Option<i32>) -> Ended {
        Ended { code, is_late: code.is_none(), output: output.to_owned(), took: Duration::from_secs(7) }
    }

    fn words(outcome: Outcome) -> String {
        match outcome {
            Outcome::Passed(what) => format!("passed: {what}"),
            Outcome::Failed(findings) => format!("failed: {}", findings.join("; ")),
            Outcome::Skipped(why) => format!("skipped: {why}"),
        }
    }

    #[test]
    fn results_of_tests_are_read() {
        let passed = "test cuda::a ... ok\n\ntest result: ok. 12 passed; 0 failed; 0 ignored\n";
        let failed = "test cuda::a ... FAILED\ntest b ... ok\n\ntest result: FAILED. 1 passed; 1 failed\n";
        let none = "test result: ok. 0 passed; 0 failed; 3 filtered out\n";
        for (output, code, expected) in [
            (passed, Some(0), "passed: 12 tests"),
            (failed, Some(101), "failed: a"),
            (failed, None, "failed: a; not done in 7 s"),
            (none, Some(0), "failed: test result: ok. 0 passed; 0 failed; 3 filtered out"),
            ("no library\n\n", Some(127), "failed: no library"),
            ("", Some(1), "failed: it said nothing"),
        ] {
            assert_eq!(words(of_tests(&ended(output, code))), expected);
        }
    }

    #[test]
    fn a_missed_target_is_a_finding() {
        let row = "| copy | 1.0 | 3 TB/s | – | – |\n| attention | 2.0 | 2 TB/s | 70.0 % | 85.0 %";
        let head =
            "A card\n\n| what | median, ms | reached | of the ceiling | target |\n|---|---|---|---|---|\n";
        let figures = |end: &str, code| words(of_figures(&ended(&format!("{head}{row}{end}"), code)));
        assert_eq!(figures(" |\n", Some(0)), "passed: 2 figures");
        let missed = figures(", MISSED |\n", Some(3));
        assert!(missed.starts_with("failed: attention, 2.0") && missed.ends_with("MISSED"), "{missed}");
        assert_eq!(figures(" |\n", None), "failed: not done in 7 s");
        assert_eq!(figures(" |\nno memory", Some(1)), "failed: no memory");
    }

    #[test]
    fn a_program_that_does_not_end_is_ended() {
        let log = std::env::temp_dir().join(format!("baton-xtask-{}.log", std::process::id()));
        let mut endless = Command::new("sh");
        endless.args(["-c", "echo begun; sleep 100 & wait"]);
        // Long enough for a shell to begin, on any machine.
        let ended = finish(&mut endless, &log, Duration::from_secs(5)).unwrap();
        assert!(ended.is_late && ended.code.is_none());
        assert_eq!(ended.output, "begun\n");
        std::fs::remove_file(log).unwrap();
    }
}
